"""Writes what this rank is doing when it makes no progress, before a collective's deadline ends the job. No torch.

Every rank has one, and ranks that step together stand still together, so no rank has to tell another. The thread runs while the
main thread waits in C code. Where C code holds the interpreter for good, Python's faulthandler writes the stacks instead: its
thread needs no interpreter. A rank that goes on removes what it has written.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final

from unisono.dist.hang import stuck_path
from unisono.dist.jobspec import JobSpec
from unisono.dist.rank_dump import num_collectives, remove_dump, write_dump
from unisono.dist.stop_notice import StopNotice
from unisono.storage.directory import make_folder
from unisono.storage.files import PRIVATE_MODE, open_new

_POLL_S: Final = 1.0
# a step of less than a second may still wait for a disk; a pause may be several times the longest before it
_MIN_QUIET_S: Final = 20.0
_LONGEST_PAUSES: Final = 10.0
# a stop signal of the launcher gives a rank five seconds
_STOP_QUIET_S: Final = 1.0


class Watchdog:
    """Watches a rank from construction until ``close``.

    Progress is a finished step or an issued collective. It is missing after 10 times the longest time between two, at least
    20 s and at most half of the deadline.

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
        self._has_dump = False
        remove_dump(folder, job.rank)
        self._stuck_file = self._open_stuck_file()
        self._thread = threading.Thread(target=self._run, name="unisono-watchdog", daemon=True)
        self._thread.start()

    @property
    def quiet_limit_s(self) -> float:
        """Seconds without progress after which this rank writes its dump."""
        return min(self._deadline_s / 2, max(_MIN_QUIET_S, _LONGEST_PAUSES * self._longest_s))

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
            self._has_dump = False  # it stays, or a later one of the failure does
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

    def _progress(self) -> tuple[int, int]:
        step = self._step
        return (0 if step is None else step(), num_collectives())

    def _run(self) -> None:
        before, since_s = self._progress(), time.monotonic()
        is_first = True
        while True:
            if self._stuck_file is not None:
                faulthandler.dump_traceback_later(self.quiet_limit_s + 2 * self._poll_s, file=self._stuck_file)
            if self._stop.wait(self._poll_s):
                return
            now_s, now = time.monotonic(), self._progress()
            if now != before:
                if not is_first:  # the first one compiles
                    self._longest_s = max(self._longest_s, now_s - since_s)
                before, since_s, is_first = now, now_s, False
                self._forget()
                continue
            quiet_s = now_s - since_s
            stopping = quiet_s >= _STOP_QUIET_S and StopNotice.is_requested()
            if not self._has_dump and (stopping or quiet_s >= self.quiet_limit_s):
                self._has_dump = True
                for folder in tuple(self._folders):
                    reason = "no progress" if quiet_s >= self.quiet_limit_s else "stop"
                    write_dump(folder, self._job, reason, step=now[0] if self._step else None, quiet_s=quiet_s)

    def _forget(self) -> None:
        if self._has_dump:
            self._has_dump = False
            for folder in self._folders:
                remove_dump(folder, self._job.rank)
