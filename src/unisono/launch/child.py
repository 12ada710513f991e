"""A command of unisono as a child of another one: started, ended, and what it said."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final

from unisono.dist.interpreter import module_path
from unisono.launch.workers import Reaper, foreign_variable

_SHOWN_LINES: Final = 6
_TAIL_BYTES: Final = 20_000
IS_CHILD: Final = "UNISONO_IS_CHILD"  # set in commands of this package whose output it reads
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
        env={**environ, "PYTHONPATH": module_path(), IS_CHILD: "1", **(variables or {})},
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


def run_child(
    command: Sequence[str],
    *,
    run_dir: Path | None = None,
    timeout_s: float | None = None,
    variables: Mapping[str, str] | None = None,
) -> tuple[int | None, str]:
    """Run a command to its end, or kill it after ``timeout_s`` seconds.

    Args:
        command: Program and arguments.
        run_dir: Folder of the run that it trains, if it does: the logs of its ranks are read as well.
        timeout_s: Longest time; None for any.
        variables: Environment variables besides this process's own, without those of a job.

    Returns:
        Its exit code, None if it was killed, and the end of its output.
    """
    code: int | None = None
    with Reaper() as reaper, tempfile.TemporaryFile() as output:
        process = start_child(reaper, command, output, variables)
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout_s)
        finally:
            kill_group(process)
            reaper.forget(process.pid)
        return code, end_of_output(output, run_dir)


def end_of_output(output: IO[bytes], run_dir: Path | None = None) -> str:
    """The end of what a child wrote into the file ``output``; before it the ends of its ranks' logs, of which the local launcher
    shows rank 0 alone."""
    output.seek(max(0, output.seek(0, os.SEEK_END) - _TAIL_BYTES))
    text = output.read().decode(errors="replace")
    for log in sorted(run_dir.glob("logs/rank-*.log")) if run_dir is not None else ():
        with suppress(OSError):
            text = log.read_text(errors="replace")[-_TAIL_BYTES:] + "\n" + text
    return text


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
