"""Launch the tiny run in processes of its own: ``python launch_tiny.py RUN_DIR PROCESSES '{settings}'``. Torch-free."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from unisono.launch import LaunchOptions, launch_local

if __name__ == "__main__":
    run_dir, processes, settings = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    options = LaunchOptions(
        num_processes=processes, num_threads=1, max_restarts=settings.pop("max_restarts", 2), timeout_s=60.0
    )
    script = str(Path(__file__).with_name("tiny.py"))
    command = [sys.executable, script, json.dumps({"run_dir": str(run_dir), **settings})]
    sys.exit(launch_local(command, options, run_dir=run_dir, run_id="drill"))
