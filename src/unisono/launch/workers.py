"""The processes of one attempt: start them, look after them, leave none behind.

Every worker leads a process group of its own, so that a Ctrl-C in the terminal reaches the launcher alone and what a
worker starts can be ended with it. Two things end workers whose launcher was killed: the kernel's parent-death signal
(Linux) for the worker itself, and ``guard`` for its whole group.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import IO

from unisono.dist import JobSpec
from unisono.dist.jobspec import LOOPBACK
from unisono.errors import LaunchError, Problem
from unisono.launch import guard
from unisono.launch.share import Share

_PR_SET_PDEATHSIG = 1

# what another launcher left in our own environment must not describe our workers
_FOREIGN = (
    *("TORCHELASTIC_", "DMLC_", "UNISONO_LISTEN_FD"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE"),
)


@dataclass(kw_only=True, slots=True)
class Worker:
    """One started process; ``log`` is None for rank 0, which writes to the launcher's own terminal."""

    rank: int
    process: subprocess.Popen[bytes]
    log: Path | None
    killed_by_us: bool = False

    @property
    def pid(self) -> int:
        """Also the number of its process group."""
        return self.process.pid

    def end_by(self, number: signal.Signals) -> None:
        """Asks the worker itself to end; what it started hears of it from the worker."""
        if self.process.poll() is None:
            self.killed_by_us = True
            self.process.send_signal(number)

    def kill_group(self) -> None:
        """SIGKILL for the worker and everything left in its group, and the end of its zombie."""
        if self.process.poll() is None:
            self.killed_by_us = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()


class Guard:
    """The lifeline: see ``unisono.launch.guard``. A context manager around everything that has workers."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Guard:
        command = [sys.executable, "-I", "-S", str(Path(guard.__file__))]
        # an empty environment: the guard needs nothing, and what it does not have it cannot show in /proc
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, env={}, cwd="/", start_new_session=True)
        return self

    def watch(self, group: int) -> None:
        """From now on ``group`` ends with the launcher."""
        self._tell(f"+{group}\n")

    def forget(self, group: int) -> None:
        """``group`` is gone, and its number may soon belong to others."""
        self._tell(f"-{group}\n")

    def _tell(self, line: str) -> None:
        pipe = self._process.stdin if self._process is not None else None
        assert pipe is not None
        # a guard that was killed leaves the parent-death signal; the run itself need not suffer
        with contextlib.suppress(BrokenPipeError):
            pipe.write(line.encode())
            pipe.flush()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process.wait()


def start_workers(
    command: Sequence[str], share: Share, *, run_id: str, epoch: int, logs: Path, guard: Guard, keep_faults: bool
) -> list[Worker]:
    """Starts one worker per process of ``share``, all told to meet at a fresh loopback port that rank 0 already holds.

    Raises LaunchError when the command cannot be started; then none is left running.
    """
    listener = socket.create_server((LOOPBACK, 0), backlog=2048) if share.processes > 1 else None
    job = JobSpec(
        run_id=run_id,
        epoch=epoch,
        world=share.processes,
        local_world=share.processes,
        master_port=listener.getsockname()[1] if listener else 0,
        source="unisono",
    )
    workers: list[Worker] = []
    try:
        for rank in range(share.processes):
            fd = listener.fileno() if listener is not None and rank == 0 else None
            place = replace(job, rank=rank, local_rank=rank, listen_fd=fd)
            log = None if rank == 0 else logs / f"rank-{rank}.attempt-{epoch}.log"
            workers.append(_start(command, place, share, log, logs, keep_faults=keep_faults))
            guard.watch(workers[-1].pid)
    except (OSError, LaunchError) as error:
        for worker in workers:
            worker.kill_group()
            guard.forget(worker.pid)
        if isinstance(error, LaunchError):
            raise
        raise LaunchError(
            Problem(
                given=f"{command[0]!r} cannot be started ({error.strerror})",
                rule="the command of a launch is a program this user may run",
                consequence="no process is running",
                nearest=f"{sys.executable} -m your_module, or the full path of the program",
            )
        ) from error
    finally:
        if listener is not None:
            # rank 0 has inherited it; when it ends, the port is free
            listener.close()
    return workers


def _start(
    command: Sequence[str], job: JobSpec, share: Share, log: Path | None, logs: Path, *, keep_faults: bool
) -> Worker:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    if not keep_faults:
        environ.pop("UNISONO_FAULT", None)
    cpus = share.affinity[job.rank] if share.affinity is not None else None
    environ |= job.environ() | share.environ()
    environ["UNISONO_LAUNCH"] = json.dumps(share.record() | {"affinity": cpus, "restarted": not keep_faults})
    environ["UNISONO_LOGS"] = str(logs)
    output = None if log is None else _open_log(log)
    try:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            env=environ,
            pass_fds=[] if job.listen_fd is None else [job.listen_fd],
            start_new_session=True,
            preexec_fn=_preparation(cpus),
        )
    finally:
        if output is not None:
            output.close()
    return Worker(rank=job.rank, process=process, log=log)


def _open_log(path: Path) -> IO[bytes]:
    """Exclusive and private: never through a link someone placed there, never over an earlier attempt."""
    try:
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb")
    except OSError as error:
        raise LaunchError(unwritable(path, error)) from error


def unwritable(path: Path, error: OSError) -> Problem:
    """What to say when the run's folder does not take a file."""
    return Problem(
        given=f"{path} cannot be written ({error.strerror})",
        rule="a launch keeps its logs and its record in the run's folder",
        consequence="no process was started",
        nearest="another run.dir, or a folder this user may write to",
    )


def _preparation(cpus: Sequence[int] | None) -> Callable[[], None]:
    """What the child does between fork and exec. The launcher has no threads, so a fork of it holds no foreign lock."""
    parent = os.getpid()
    prctl = getattr(ctypes.CDLL(None), "prctl", None)

    def prepare() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL.value, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)
        if cpus is not None:
            os.sched_setaffinity(0, cpus)

    return prepare
