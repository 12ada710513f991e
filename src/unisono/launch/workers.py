"""Processes of this host: start them, signal them, leave none behind.

Every worker leads a process group of its own, so a Ctrl-C in the terminal reaches only the launcher, and the worker's own
children end with it. If the launcher is killed, the kernel's parent-death signal (Linux) ends each worker and ``reaper``
ends its whole group.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from unisono.dist import JobSpec
from unisono.dist.early_signals import EARLY_SIGNALS
from unisono.dist.failure import TRACEBACKS
from unisono.dist.jobspec import OWN_VARIABLES, TORCH_VARIABLES
from unisono.dist.secret import secret_descriptor
from unisono.errors import LaunchError, Problem
from unisono.launch import reaper
from unisono.launch.resources import ResourceShare
from unisono.storage.files import open_new

_PR_SET_PDEATHSIG = 1

# its sitecustomize.py records what ends a worker that is a Python script
_SCRIPT_HOOK = Path(__file__).with_name("script_hook")

_PYTHON_FLAGS = re.compile("-[bBdEhiIOPqRsSuvx]+")

# variables of an outer launcher must not describe our workers
_FOREIGN_GROUPS = ("TORCHELASTIC_", "DMLC_")
_FOREIGN = {
    *TORCH_VARIABLES,
    *OWN_VARIABLES,
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "UNISONO_SECRET_FD"),
}


@dataclass(kw_only=True, slots=True)
class WorkerProcess(ABC):
    """A started process of a job, on this host (``here``) or another. For a server, ``rank`` is its index.

    ``pid`` is the id of the process and of its group, on its own host. ``log`` is None if its output goes elsewhere.
    """

    rank: int
    name: str
    pid: int
    log: Path | None
    here: bool = True
    killed_by_us: bool = False

    @abstractmethod
    def code(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""

    @abstractmethod
    def end_by(self, number: signal.Signals) -> None:
        """Send a signal to the process alone, not to its children."""

    @abstractmethod
    def kill_group(self) -> None:
        """Send SIGKILL to the process and its group; returns once the process is gone."""


@dataclass(kw_only=True, slots=True)
class Worker(WorkerProcess):
    """A process of this host."""

    process: subprocess.Popen[bytes]
    reaper: Reaper

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
    """The process that ends all workers when the launcher dies (``unisono.launch.reaper``). Enter it before any worker starts."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Reaper:
        command = [sys.executable, "-I", "-S", str(Path(reaper.__file__))]
        # an empty environment: the reaper needs none, and /proc cannot show what it does not have
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, env={}, cwd="/", start_new_session=True)
        return self

    def watch(self, group: int) -> None:
        """End process group ``group`` when the launcher dies."""
        self._send(f"+{group}\n")

    def forget(self, group: int) -> None:
        """Stop watching ``group``: it has ended, and its id may be reused."""
        self._send(f"-{group}\n")

    def _send(self, line: str) -> None:
        pipe = self._process.stdin if self._process is not None else None
        assert pipe is not None
        # if the reaper was killed, the parent-death signal still works; the run continues
        with contextlib.suppress(BrokenPipeError):
            pipe.write(line.encode())
            pipe.flush()

    def __exit__(self, *exc: object) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process.wait()


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSpec:
    """A process to start on this host: its command, its place in the job, its share of the host.

    ``environ`` is set over the inherited environment. ``logs`` is the folder for what a rank records when it fails.
    ``restarted`` processes get no injected fault. ``secret`` (32 bytes) reaches the process by a descriptor.
    """

    command: Sequence[str]
    job: JobSpec
    share: ResourceShare
    logs: Path
    environ: Mapping[str, str]
    restarted: bool = False
    secret: bytes | None = None

    @property
    def cpus(self) -> list[int] | None:
        """The logical CPUs this process is pinned to, or None."""
        if self.share.affinity is None or self.job.role != "worker":
            return None
        return self.share.affinity[self.job.local_rank]

    def full_environ(self) -> dict[str, str]:
        """All variables of the process, apart from its secret."""
        full = {name: value for name, value in os.environ.items() if not foreign_variable(name)}
        if self.restarted:
            # the launcher shows the error, in one line if it is the one that it has shown
            full[TRACEBACKS] = "record"
            full.pop("UNISONO_FAULT", None)
        # at SIGSEGV, or the SIGABRT of a launcher that ends a hung rank, the stacks of all threads go to the log
        full.setdefault("PYTHONFAULTHANDLER", "1")
        full |= {**self.environ, **self.job.environ(), **self.share.environ()}
        full["UNISONO_LAUNCH"] = json.dumps(self.share.record() | {"affinity": self.cpus, "restarted": self.restarted})
        full["UNISONO_LOGS"] = str(self.logs)
        if self.job.role == "worker":
            full["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_SCRIPT_HOOK), full.get("PYTHONPATH")]))
        return full


def start_worker(
    spec: WorkerSpec, reaper: Reaper, *, log: Path | None = None, output: IO[bytes] | int | None = None
) -> Worker:
    """Start one process. ``output`` receives its standard output and error; None leaves it this process's own.

    ``log`` is the path that ``output`` writes to, for reports. Raises LaunchError if the command cannot be started.
    """
    job, environ = spec.job, spec.full_environ()
    inherited_fds = [] if job.listen_fd is None else [job.listen_fd]
    secret_fd = None if spec.secret is None else secret_descriptor(spec.secret)
    if secret_fd is not None:
        # the job has a secret of its own, and a process takes one
        environ.pop("UNISONO_SECRET_FILE", None)
        environ["UNISONO_SECRET_FD"] = str(secret_fd)
        inherited_fds.append(secret_fd)
    try:
        process = subprocess.Popen(
            list(spec.command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            env=environ,
            pass_fds=inherited_fds,
            start_new_session=True,
            preexec_fn=_before_exec(spec),
        )
    except OSError as error:
        raise LaunchError(
            given=f"{spec.command[0]!r} cannot be started ({error.strerror})",
            rule="the command of a launch is a program this user may run",
            consequence="no process is running",
            nearest=f"{sys.executable} -m your_module, or the full path of the program",
        ) from error
    finally:
        if secret_fd is not None:
            os.close(secret_fd)
    reaper.watch(process.pid)
    name = f"rank {job.rank}" if job.role == "worker" else f"server {job.server_index}"
    rank = job.server_index or job.rank
    return Worker(rank=rank, name=name, pid=process.pid, log=log, process=process, reaper=reaper)


def foreign_variable(name: str) -> bool:
    """Whether a variable describes the place of a process in an outer job."""
    return name in _FOREIGN or name.startswith(_FOREIGN_GROUPS)


def open_log(path: Path) -> IO[bytes]:
    """A new log file; never through a link, never over an existing file. Raises LaunchError."""
    try:
        return open_new(path)
    except OSError as error:
        raise LaunchError(unwritable(path, error)) from error


def unwritable(path: Path, error: OSError) -> Problem:
    """The problem of a run folder that cannot be written."""
    return Problem(
        given=f"{path} cannot be written ({error.strerror})",
        rule="a launch keeps its logs and its record in the run's folder",
        consequence="no process was started",
        nearest="another run.dir, or a folder this user may write to",
    )


def is_unisono_train(command: Sequence[str]) -> bool:
    """Whether it is ``unisono train`` or ``python -m unisono train`` of this very environment.

    Another program of that name, such as a shell script that starts ours, would keep the signals blocked. Options of Python are
    those without a value.
    """
    program, arguments = Path(shutil.which(command[0]) or ""), list(command[1:])
    if program.parent != Path(sys.executable).parent:
        return False
    if program.name.startswith("python"):
        while arguments and _PYTHON_FLAGS.fullmatch(arguments[0]):
            del arguments[0]
        return arguments[:3] == ["-m", "unisono", "train"]
    return program.name == "unisono" and arguments[:1] == ["train"]


def _before_exec(spec: WorkerSpec) -> Callable[[], None]:
    """The function the child runs between fork and exec. The launcher has no threads, so no lock is held across the fork.

    SIGTERM and SIGINT wait until a rank of ours handles them (``dist/early_signals.py``): they would end Python's own start with
    a code that does not say that nothing was saved. Any other program gets them at once.
    """
    parent, cpus = os.getpid(), spec.cpus
    is_own = is_unisono_train(spec.command)
    prctl = getattr(ctypes.CDLL(None), "prctl", None)

    def prepare() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL.value, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)
        if cpus is not None:
            os.sched_setaffinity(0, cpus)
        if is_own:
            signal.pthread_sigmask(signal.SIG_BLOCK, EARLY_SIGNALS)

    return prepare
