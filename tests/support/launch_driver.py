"""Starts a launch in a process of its own: ``python driver.py OPTIONS_JSON RUN_DIR COMMAND…``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from unisono.errors import UnisonoError
from unisono.launch import LaunchOptions, launch_local

if __name__ == "__main__":
    try:
        code = launch_local(
            sys.argv[3:], LaunchOptions(**json.loads(sys.argv[1])), run_dir=Path(sys.argv[2]), run_id="test"
        )
    except UnisonoError as error:
        print(error, file=sys.stderr)
        code = error.exit_code
    assert "torch" not in sys.modules
    sys.exit(code)
