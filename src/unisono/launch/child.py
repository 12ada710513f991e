"""A command of unisono as a child of another one: started, ended, and what it said."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Any, Final

from unisono.dist.interpreter import module_path
from unisono.launch.workers import Reaper, foreign_variable

_SHOWN_LINES: Final = 6
LAUNCHER: Final = "launch: "  # begins what a launcher says


def start_child(
    reaper: Reaper, command: Sequence[str], output: IO[Any], variables: Mapping[str, str] | None = None
) -> subprocess.Popen[Any]:
    """Start a command in a session of its own. It ends with this process, however this one ends.

    Args:
        reaper: Ends it then; the caller has it forget the process after its end.
        command: Program and arguments.
        output: File for its output and its errors.
        variables: Environment variables besides this process's own, without those of a job.
    """
    environ = {name: value for name, value in os.environ.items() if not foreign_variable(name)}
    process = subprocess.Popen(
        list(command),
        env={**environ, "PYTHONPATH": module_path(), **(variables or {})},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    reaper.watch(process.pid)
    return process


def kill_group(process: subprocess.Popen[Any]) -> None:
    """End a process that leads its own session, unless it has ended. Ranks end with their launcher (``launch.workers``)."""
    if process.poll() is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def error_paragraph(said: str) -> str:
    """The error in the output of a command: its last one of four parts, else its last lines; before it what a launcher saw of the
    rank that began it."""
    lines = said.rstrip().splitlines()
    begins = [place for place, line in enumerate(lines) if line.startswith("unisono: ")]
    words = [line.removeprefix(LAUNCHER) for line in lines if line.startswith(LAUNCHER)]
    cause = [line for line in words if line.startswith("attempt ")][-1:]
    if begins:
        first = begins[-1]
        end = next((place for place in range(first + 1, len(lines)) if not lines[place].startswith(" ")), len(lines))
        return "\n".join([*cause, lines[first].removeprefix("unisono: "), *lines[first + 1 : end]])
    return "\n".join((words or [line for line in lines if line.strip()])[-_SHOWN_LINES:])
