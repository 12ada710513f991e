"""A Python file run as ``python FILE`` runs it, in a process that has imported torch already (``nursery``)."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

from nursery import Nursery


def run(nursery: Nursery, path: Path, timeout_s: float = 150.0) -> tuple[int, str]:
    """Exit code and output of ``path``, whose folder is its working folder."""
    log = path.with_suffix(".log")
    child = nursery.start("script:main", str(path), log=log)
    try:
        code = child.exit_code(timeout_s)
    finally:
        child.kill()
    return code, log.read_text(errors="replace")


def main(path: str) -> Any:
    folder = os.path.dirname(path)
    os.chdir(folder)
    sys.argv, sys.path[0] = [path], folder
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        return end.code
    return 0
