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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol

from unisono.dist import JobSpec
from unisono.dist.jobspec import LOOPBACK
from unisono.errors import LaunchError, Problem
from unisono.launch import reaper
from unisono.launch.resources import ResourceShare
from unisono.launch.secret import secret_pipe

_PR_SET_PDEATHSIG = 1

# what another launcher left in our own environment must not describe our workers
_FOREIGN_GROUPS = ("TORCHELASTIC_", "DMLC_")
_FOREIGN = {
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE"),
    *("UNISONO_LISTEN_FD", "UNISONO_SERVERS", "UNISONO_SERVER_ADDRESSES", "UNISONO_SERVER", "UNISONO_SECRET_FD"),
}


class WorkerProcess(Protocol):
    """A started process of a job, on this host (``here``) or another. ``rank`` is a server's index where it is a server."""

    rank: int
    name: str
    log: Path | None
    killed_by_us: bool
    here: bool

    @property
    def pid(self) -> int:
        """Also the number of its process group, on its own host."""
        ...

    def code(self) -> int | None:
        """How it ended, negative for a signal; None while it runs."""
        ...

    def end_by(self, number: signal.Signals) -> None:
        """Asks the process itself to end; what it started hears of it from the process."""
        ...

    def kill_group(self) -> None:
        """SIGKILL for the process and everything left in its group; on return nothing of it is left."""
        ...


@dataclass(kw_only=True, slots=True)
class Worker:
    """A process of this host; ``log`` is None where its output goes elsewhere."""

    rank: int
    name: str
    process: subprocess.Popen[bytes]
    log: Path | None
    reaper: Reaper
    killed_by_us: bool = False
    here: bool = True

    @property
    def pid(self) -> int:
        return self.process.pid

    def code(self) -> int | None:
        return self.process.poll()

    def end_by(self, number: signal.Signals) -> None:
        if self.process.poll() is None:
            self.killed_by_us = True
            self.process.send_signal(number)

    def kill_group(self) -> None:
        if self.process.poll() is None:
            self.killed_by_us = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()
        self.reaper.forget(self.pid)


class Reaper:
    """The lifeline: see ``unisono.launch.reaper``. A context manager around everything that has workers."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Reaper:
        command = [sys.executable, "-I", "-S", str(Path(reaper.__file__))]
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
    command: Sequence[str],
    share: ResourceShare,
    *,
    run_id: str,
    epoch: int,
    logs: Path,
    guard: Reaper,
    keep_faults: bool,
    environ: Mapping[str, str],
) -> list[Worker]:
    """Starts one worker per process of ``share``, all told to meet at a fresh loopback port that rank 0 already holds.

    Raises LaunchError when the command cannot be started; then none is left running.
    """
    listener = socket.create_server((LOOPBACK, 0), backlog=2048) if share.processes > 1 else None
    job = JobSpec(
        run_id=run_id,
        restart_count=epoch,
        world_size=share.processes,
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
            output = None if log is None else open_log(log)
            try:
                workers.append(
                    start_worker(
                        command,
                        place,
                        share,
                        guard=guard,
                        logs=logs,
                        log=log,
                        output=output,
                        restarted=not keep_faults,
                        environ=environ,
                    )
                )
            finally:
                if output is not None:
                    output.close()
    except LaunchError:
        for worker in workers:
            worker.kill_group()
        raise
    finally:
        if listener is not None:
            # rank 0 has inherited it; when it ends, the port is free
            listener.close()
    return workers


def start_worker(
    command: Sequence[str],
    job: JobSpec,
    share: ResourceShare,
    *,
    guard: Reaper,
    logs: Path,
    log: Path | None,
    output: IO[bytes] | int | None,
    restarted: bool,
    environ: Mapping[str, str],
    secret: bytes | None = None,
) -> Worker:
    """Starts one process in its place. ``output`` takes what it prints (None: this process's own streams), ``environ`` is set
    over what it inherits, ``secret`` reaches it by a pipe.

    Raises LaunchError when the command cannot be started.
    """
    inherited = {name: value for name, value in os.environ.items() if not _foreign(name)}
    if restarted:
        inherited.pop("UNISONO_FAULT", None)
    cpus = share.affinity[job.local_rank] if share.affinity is not None and job.role == "worker" else None
    # where the threads stand at SIGSEGV, or at the SIGABRT of a launcher that ends a hung rank, goes to the log
    inherited.setdefault("PYTHONFAULTHANDLER", "1")
    inherited |= {**environ, **job.environ(), **share.environ()}
    inherited["UNISONO_LAUNCH"] = json.dumps(share.record() | {"affinity": cpus, "restarted": restarted})
    inherited["UNISONO_LOGS"] = str(logs)
    passed = [] if job.listen_fd is None else [job.listen_fd]
    secret_fd = None if secret is None else secret_pipe(secret)
    if secret_fd is not None:
        # the job has a secret of its own, and a process takes one
        inherited.pop("UNISONO_SECRET_FILE", None)
        inherited["UNISONO_SECRET_FD"] = str(secret_fd)
        passed.append(secret_fd)
    try:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            env=inherited,
            pass_fds=passed,
            start_new_session=True,
            preexec_fn=_preparation(cpus),
        )
    except OSError as error:
        raise LaunchError(
            given=f"{command[0]!r} cannot be started ({error.strerror})",
            rule="the command of a launch is a program this user may run",
            consequence="no process is running",
            nearest=f"{sys.executable} -m your_module, or the full path of the program",
        ) from error
    finally:
        if secret_fd is not None:
            os.close(secret_fd)
    guard.watch(process.pid)
    name = f"rank {job.rank}" if job.role == "worker" else f"server {job.server_index}"
    return Worker(rank=job.server_index or job.rank, name=name, process=process, log=log, reaper=guard)


def _foreign(name: str) -> bool:
    return name in _FOREIGN or name.startswith(_FOREIGN_GROUPS)


def open_log(path: Path) -> IO[bytes]:
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
