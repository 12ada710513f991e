"""Lets a child write the report of a failed run whose rank 0 could not, because it was killed. No training code, no torch."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from unisono.dist.interpreter import module_command, module_path
from unisono.launch.workers import Reaper, foreign_variable
from unisono.observe.events import events_path
from unisono.observe.tracked import run_settings
from unisono.storage.files import os_reason
from unisono.storage.run_folder import REPORT_FILE

_LIMIT_S: Final = 60.0
_POLL_S: Final = 0.05
_ERROR: Final = "unisono: "  # begins an error of a command


def write_missing_report(run_dir: Path, received: Sequence[signal.Signals]) -> str:
    """Run ``unisono report`` if ``run_dir`` is a run with a report, and rank 0 has written none since its last event.

    Returns one line of warning; empty if nothing was wrong. Ends after a minute, or when ``received`` gets another signal.
    """
    try:
        reason = _run(run_dir.absolute(), received) if _is_missing(run_dir) else ""
    except OSError as error:
        reason = os_reason(error)
    if not reason:
        return ""
    return f"{REPORT_FILE} was not written: {reason}; unisono report {shlex.quote(str(run_dir))} makes it of the events"


def _is_missing(run_dir: Path) -> bool:
    try:
        # rank 0 writes its configuration when the folder becomes a run
        if run_settings(run_dir).get("observe.report") is not True:
            return False
        last_event_ns = events_path(run_dir, 0).stat().st_mtime_ns
    except (OSError, ValueError):
        return False
    try:
        return (run_dir / REPORT_FILE).stat().st_mtime_ns < last_event_ns
    except FileNotFoundError:
        return True


def _run(run_dir: Path, received: Sequence[signal.Signals]) -> str:
    """Why the report was not written; empty if it was."""
    environ = {name: value for name, value in os.environ.items() if not foreign_variable(name)}
    before, ends_at_s = len(received), time.monotonic() + _LIMIT_S
    with Reaper() as reaper, tempfile.TemporaryFile("w+", errors="replace") as said:
        process = subprocess.Popen(
            module_command("unisono", "report", str(run_dir)),
            env={**environ, "PYTHONPATH": module_path()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
            start_new_session=True,
        )
        reaper.watch(process.pid)  # it ends with this process, however this one ends
        try:
            while process.poll() is None:
                if len(received) > before:
                    return f"{received[-1].name} arrived"
                if time.monotonic() >= ends_at_s:
                    return f"not done after {_LIMIT_S:g} s"
                time.sleep(_POLL_S)
        finally:
            process.kill()
            process.wait()
            reaper.forget(process.pid)
        said.seek(0)
        return "" if process.returncode == 0 else _reason(said.read(), process.returncode)


def _reason(said: str, code: int) -> str:
    """The error of a command in one line: what was given, or the last line of a traceback."""
    lines = [line for line in said.splitlines() if line.strip()]
    given = [line.removeprefix(_ERROR) for line in lines if line.startswith(_ERROR)]
    return (given or lines or [f"exit code {code}"])[-1]
