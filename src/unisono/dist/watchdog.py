"""Writes what this rank is doing while no step ends, before a collective's deadline ends the job. No torch.

A rank that is busy with other work (an evaluation, a save, a compilation) says so in its dump, so that a diagnosis does not take
it for one that hangs. Every rank has a watchdog, and ranks that step together stand still together, so no rank has to tell
another. The thread runs while the main thread waits in C code. Where C code holds the interpreter for good, Python's faulthandler
writes the stacks instead: its thread needs no interpreter. A rank that goes on removes what it has written.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from unisono.dist.hang import stuck_path
from unisono.dist.jobspec import JobSpec
from unisono.dist.progress import current_activity, num_activities, num_heartbeats
from unisono.dist.rank_dump import (
    WORKING,
    num_collectives,
    remove_dump,
    thread_stacks,
    waits_in_collective,
    write_dump,
)
from unisono.dist.stop_notice import StopNotice
from unisono.storage.directory import make_folder
from unisono.storage.files import PRIVATE_MODE, open_new

_POLL_S: Final = 1.0
# a step of less than a second may still wait for a disk; a pause may be several times the longest before it
_MIN_QUIET_S: Final = 20.0
_LONGEST_PAUSES: Final = 10.0
# a compilation, a save or the set-up of a run shows no sign of progress for that long at most
_MAX_SILENT_S: Final = 600.0
# how often a rank that is at work on something else than a step says so again
_REPEAT_S: Final = 15.0
# a main thread that has used a processor for this share of a pause computes, on a machine that may be busy, and does not wait
_COMPUTES_FRAC: Final = 0.05
# on a stack during a compilation, and not when compiled code runs: files of torch 2.13 and Triton, parts of functions' names
_COMPILING: Final = (
    ("/torch/_dynamo/convert_frame.py", ""),
    ("/torch/_inductor/compile_fx.py", "compile"),
    ("/triton/compiler/", ""),
)
# a stop signal of the launcher gives a rank five seconds
_STOP_QUIET_S: Final = 1.0


class Watchdog:
    """Watches a rank from construction until ``close``.

    Progress is a finished step, an issued collective, or a heartbeat of other work (``dist.progress``). It is missing after
    10 times the longest time between two, at least 20 s and at most half of the deadline. An activity that may be silent, a
    compilation, and a main thread that computes and waits in no collective have 10 minutes, at most half of the deadline too.

    Args:
        job: The process's place in the job.
        folder: Folder of logs that gets the dump.
        deadline_s: Deadline of a collective in seconds; 0 for a process that has none.
        step: Returns the number of finished steps; None if there are none to count.
    """

    def __init__(self, job: JobSpec, folder: Path, *, deadline_s: float, step: Callable[[], int] | None = None) -> None:
        self._job, self._folders, self._step = job, [folder], step
        self._deadline_s = deadline_s or float("inf")
        self._stop = threading.Event()
        self._poll_s = min(_POLL_S, self._deadline_s / 20)
        self._longest_s = 0.0
        self._reason = ""  # that of the dump that is there
        self._written_s = 0.0
        self._main = threading.main_thread()
        remove_dump(folder, job.rank)
        self._stuck_file = self._open_stuck_file()
        self._thread = threading.Thread(target=self._run, name="unisono-watchdog", daemon=True)
        self._thread.start()

    @property
    def quiet_limit_s(self) -> float:
        """Seconds without a step or collective until a dump is written; without any progress for as long, the dump says
        ``no progress``."""
        return min(self._deadline_s / 2, max(_MIN_QUIET_S, _LONGEST_PAUSES * self._longest_s))

    @property
    def silent_limit_s(self) -> float:
        """Seconds until the dump says ``no progress`` during work that shows none, such as a compilation."""
        return max(self.quiet_limit_s, min(self._deadline_s / 2, _MAX_SILENT_S))

    def follow(self, step: Callable[[], int] | None, folder: Path | None = None) -> None:
        """Count finished steps too, from now on, and write dumps into ``folder`` too. None counts collectives alone again."""
        self._step = step
        if folder is not None and folder.absolute() not in [each.absolute() for each in self._folders]:
            self._folders.append(folder)
            remove_dump(folder, self._job.rank)

    def close(self, *, failed: bool = False) -> None:
        """Stop watching; unless the rank ``failed``, there is nothing to explain, and its files are removed. Idempotent."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        if failed:
            self._reason = ""  # it stays, or a later one of the failure does
        self._forget()
        self._close_stuck_file(keep=failed)

    def _close_stuck_file(self, *, keep: bool) -> None:
        file, self._stuck_file = self._stuck_file, None
        if file is not None:
            faulthandler.cancel_dump_traceback_later()
            keep = keep and os.fstat(file.fileno()).st_size > 0
            file.close()
            if not keep:
                with suppress(OSError):
                    self._stuck_path.unlink()

    @property
    def _stuck_path(self) -> Path:
        return stuck_path(self._folders[0], self._job.rank, self._job.restart_count)

    def _open_stuck_file(self) -> IO[Any] | None:
        """The file for faulthandler, whose timer is one of the process: it is taken in launched jobs alone."""
        if "UNISONO_LOGS" not in os.environ or threading.current_thread() is not threading.main_thread():
            return None
        with suppress(OSError):
            make_folder(self._folders[0])
            self._stuck_path.unlink(missing_ok=True)
            file = open_new(self._stuck_path, mode=PRIVATE_MODE, buffering=0)
            atexit.register(self._close_stuck_file, keep=True)
            return file
        return None

    def _steps(self) -> tuple[int, int]:
        step = self._step
        return (0 if step is None else step(), num_collectives())

    def _run(self) -> None:
        stepped = worked = _Mark(self._steps(), num_heartbeats(), num_activities(), time.monotonic(), self._cpu_s())
        is_first, had_stacks = True, False
        while True:
            activity = current_activity()
            if self._stuck_file is not None:
                is_silent = activity is not None and activity.is_silent
                limit_s = self.silent_limit_s if is_silent else self.quiet_limit_s
                faulthandler.dump_traceback_later(limit_s + 2 * self._poll_s, file=self._stuck_file)
            if self._stop.wait(self._poll_s):
                return
            now = _Mark(self._steps(), num_heartbeats(), num_activities(), time.monotonic(), self._cpu_s())
            if now.steps != stepped.steps or now.heartbeats != worked.heartbeats:
                # the first one compiles, and an activity has pauses of its own
                was_silent = activity is not None and activity.is_silent
                if now.steps == stepped.steps and not was_silent:
                    self._longest_s = max(self._longest_s, now.at_s - worked.at_s)
                elif (
                    now.steps != stepped.steps
                    and not is_first
                    and now.activities == stepped.activities
                    and not was_silent
                ):
                    self._longest_s = max(self._longest_s, now.at_s - stepped.at_s)
                worked = now
                # steps since the last look may be those before the call in which it hung; and a stop signal ends that call
                if had_stacks and not StopNotice.is_requested():
                    self._clear_stuck_file()
            had_stacks = self._has_stacks()
            if now.steps != stepped.steps:
                stepped, is_first = now, False
                self._forget()
                continue
            self._write_when_due(now, stepped, worked)

    def _write_when_due(self, now: _Mark, stepped: _Mark, worked: _Mark) -> None:
        stepless_s, quiet_s = now.at_s - stepped.at_s, now.at_s - worked.at_s
        if stepless_s < self.quiet_limit_s:
            if not self._reason and stepless_s >= _STOP_QUIET_S and StopNotice.is_requested():
                self._write("stop", now, stepless_s)
            return
        reason = WORKING if self._is_at_work(now, worked, quiet_s) else "no progress"
        if reason != self._reason or (reason == WORKING and now.at_s - self._written_s >= _REPEAT_S):
            self._write(reason, now, stepless_s)

    def _is_at_work(self, now: _Mark, worked: _Mark, quiet_s: float) -> bool:
        """Whether a rank without a step gets on with something else."""
        if quiet_s < self.quiet_limit_s:
            return True
        if quiet_s >= self.silent_limit_s:
            return False
        activity = current_activity()
        if (activity is not None and activity.is_silent) or _is_compiling():
            return True
        # a wait for an accelerator may use a processor too
        return now.cpu_s - worked.cpu_s >= _COMPUTES_FRAC * quiet_s and not waits_in_collective()

    def _cpu_s(self) -> float:
        """Processor time of the main thread in seconds; 0 where it cannot be read."""
        try:
            return time.clock_gettime(time.pthread_getcpuclockid(self._main.ident or 0))
        except (AttributeError, OSError):
            return 0.0

    def _write(self, reason: str, now: _Mark, stepless_s: float) -> None:
        self._reason, self._written_s = reason, now.at_s
        for folder in tuple(self._folders):
            write_dump(folder, self._job, reason, step=now.steps[0] if self._step else None, quiet_s=stepless_s)

    def _has_stacks(self) -> bool:
        """Whether the interpreter was blocked for so long that its stacks were written."""
        return self._stuck_file is not None and os.fstat(self._stuck_file.fileno()).st_size > 0

    def _clear_stuck_file(self) -> None:
        """Remove the stacks of a rank whose interpreter was blocked, and which goes on."""
        if self._stuck_file is not None:
            self._stuck_file.seek(0)
            self._stuck_file.truncate()

    def _forget(self) -> None:
        if self._reason:
            self._reason = ""
            for folder in self._folders:
                remove_dump(folder, self._job.rank)


@dataclass(frozen=True, slots=True)
class _Mark:
    """How far the process is at a time.

    Attributes:
        steps: Finished steps, and issued collectives.
        heartbeats: Those of other work (``dist.progress``).
        activities: Activities that have begun.
        at_s: Monotonic time in seconds.
        cpu_s: Processor time of the main thread in seconds.
    """

    steps: tuple[int, int]
    heartbeats: int
    activities: int
    at_s: float
    cpu_s: float


def _is_compiling() -> bool:
    frames = [frame for thread in thread_stacks() for frame in thread.frames]
    return any(file in frame.file and name in frame.function for frame in frames for file, name in _COMPILING)
