"""Start the worker processes of a loader: the first imports and loads the data set, then forks the others.

Forks share the memory of what was loaded until they write to it, and skip the imports. A fork is only safe in a process with one
thread and without open files of its own: a lock that another thread holds stays locked, and a file's position is shared. The
first process therefore checks itself after loading. If it cannot fork, every worker is started as the first one was
(docs/adr/0005).

The forks are children of the first process. The parent has a socket pair to each, made before the start, and a descriptor of the
process (``pidfd``), through which it kills and waits.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import numpy as np

from unisono.data.loading.subprocess_map import Subprocess
from unisono.dist.interpreter import code_command, open_standard_descriptors
from unisono.errors import DataError

HEADER_BYTES = 64  # of a worker's memory: the sample it is at, int64, alone on a cache line
_PATIENCE_S = 1.0  # for a process to end by itself


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerChild:
    """A worker process, and the descriptor of the anonymous file that it shares with this process."""

    process: Subprocess | ForkedProcess
    memory: int

    def close(self) -> int | None:
        """End the process and release the memory; returns its exit code if it can be known."""
        code = self.process.close()
        os.close(self.memory)
        return code


class WorkerStarter:
    """Starts the worker processes of one loader. Threads share it.

    Args:
        boot: Python code of the process; its arguments are those of ``forked_share``.
        load_request: Builds the request that makes the process load the data set. It answers with ``forked``, the ids of
            the processes that it forked, or with ``error``.
    """

    def __init__(self, boot: str, load_request: Callable[[], bytes]) -> None:
        self._boot, self._load_request = boot, load_request
        self._lock = threading.Lock()
        self._spares: deque[WorkerChild] = deque()
        self._wanted, self._started = 1, 0
        self._can_fork = _has_process_descriptors()
        self._stopped = False

    def expect(self, workers: int) -> None:
        """Have the next process fork as many as are missing to ``workers``."""
        self._wanted = workers

    def start(self, adopt: Callable[[WorkerChild], None]) -> WorkerChild:
        """A process that has loaded the data set. ``adopt`` gets it before, so that it can be killed while it loads.

        Raises EOFError or OSError if it ended, DataError if it could not load.
        """
        with self._lock:  # while the first loads, the others wait for what it forks
            if self._stopped:
                raise EOFError
            if self._spares:
                child = self._spares.popleft()
                adopt(child)
                return child
            siblings = max(0, self._wanted - self._started - 1) if self._can_fork else 0
            if siblings:
                child = self._start(adopt, siblings)
                self._started += 1 + len(self._spares)
                return child
            self._started += 1
        return self._start(adopt, 0)

    def stop(self) -> None:
        """Start nothing any more."""
        self._stopped = True

    def close(self) -> None:
        """End the processes that nobody took."""
        self.stop()
        with self._lock:
            for child in self._spares:
                child.process.kill()
                child.close()
            self._spares.clear()

    def _start(self, adopt: Callable[[WorkerChild], None], siblings: int) -> WorkerChild:
        request = self._load_request()
        open_standard_descriptors()
        memories = [_new_memory() for _ in range(1 + siblings)]
        pipes = [Pipe() for _ in range(siblings)]
        theirs = [
            number for memory, (_, end) in zip(memories[1:], pipes, strict=True) for number in (memory, end.fileno())
        ]
        try:
            process = Subprocess(
                code_command(self._boot, *map(str, [memories[0], *theirs])),
                pass_fds=[memories[0], *theirs],
                # the cores are for the workers, one each; and a process with threads of OpenBLAS cannot fork
                environ={"OPENBLAS_NUM_THREADS": os.environ.get("OPENBLAS_NUM_THREADS", "1")},
            )
        except BaseException:
            _release(memories, [end for both in pipes for end in both])
            raise
        ours = [pipe for pipe, _ in pipes]
        for _, end in pipes:
            end.close()
        child = WorkerChild(process=process, memory=memories[0])
        adopt(child)
        try:
            answer = json.loads(process.ask(request))
            if "error" in answer:
                raise cannot_start(
                    f"data set or transform: {answer['error']['what']}", "a worker process must be able to load them"
                )
            forked: list[int] = answer["forked"]
            processes = [ForkedProcess(pipe, pid) for pipe, pid in zip(ours, forked, strict=False)]
        except BaseException:
            _release(memories[1:], ours)
            raise
        self._can_fork &= len(forked) == siblings
        self._spares += [
            WorkerChild(process=process, memory=memory)
            for process, memory in zip(processes, memories[1:], strict=False)
        ]
        _release(memories[1 + len(forked) :], ours[len(forked) :])
        return child


class ForkedProcess:
    """A process that another one of ours forked, with the interface of ``Subprocess``."""

    def __init__(self, pipe: Connection[Any, Any], pid: int) -> None:
        self._pipe, self._pid = pipe, pid
        self._process = os.pidfd_open(pid)

    def ask(self, request: bytes) -> bytes:
        """Send a request and wait for its answer. Raises EOFError or OSError if the process has ended."""
        self._pipe.send_bytes(request)
        return self._pipe.recv_bytes()

    def kill(self) -> None:
        """End the process; a call to ``ask`` in another thread raises."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, signal.SIGKILL)

    def close(self) -> int | None:
        """Wait for the process, which is killed if it does not end within a second.

        Returns:
            Its exit code; None if its parent has ended and the code is lost.
        """
        if not self._has_ended(_PATIENCE_S):
            self.kill()
            self._has_ended(_PATIENCE_S)
        code = _exit_code(self._pid)
        self._pipe.close()
        os.close(self._process)
        return code

    def _has_ended(self, timeout_s: float) -> bool:
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        return bool(poll.poll(1000 * timeout_s))


def forked_share(arguments: Sequence[int]) -> tuple[int, int, list[tuple[int, int]]]:
    """Own memory, own pipe, and (memory, pipe) of each process to fork, from the arguments of the first process."""
    memory, *others, pipe = arguments
    return memory, pipe, list(zip(others[::2], others[1::2], strict=True))


def open_descriptors() -> set[int]:
    """The descriptors that this process has open."""
    found: set[int] = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing itself had one
            os.fstat(int(name))
            found.add(int(name))
    return found


def fork_workers(pairs: Sequence[tuple[int, int]], known: set[int]) -> tuple[list[int], tuple[int, int] | None]:
    """Fork a process for each (memory, pipe), if this process can be forked. Closes what belongs to another process.

    Args:
        pairs: One for each process.
        known: Descriptors that were open before the data set was loaded.

    Returns:
        The ids of the processes and None; in such a process none and its own (memory, pipe).
    """
    forked: list[int] = []
    if pairs and len(os.listdir("/proc/self/task")) == 1 and open_descriptors() <= known:
        gc.collect()
        gc.freeze()  # a collection would write to every object, and so copy its page
        for number, own in enumerate(pairs):
            pid = os.fork()
            if pid == 0:
                _close_all(pairs[number + 1 :])
                _seed_anew()
                return [], own
            forked.append(pid)
            _close_all([own])
    else:
        _close_all(pairs)
    return forked, None


class WorkerStartError(DataError):
    """No worker process can be started for this data set and these transforms."""


def cannot_start(given: str, rule: str) -> WorkerStartError:
    """The error for a data set or transform that cannot be brought to a process."""
    return WorkerStartError(
        given=given,
        rule=rule,
        consequence="no worker process was started",
        nearest="define what is passed at the top of a module that the program imports; or loader.worker_kind thread",
    )


def _seed_anew() -> None:
    """Forks have the state of the first process's global generators; Python's own is seeded anew by the interpreter."""
    np.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.random.default_generator.seed()


def _new_memory() -> int:
    memory = os.memfd_create("unisono-loader")
    os.ftruncate(memory, HEADER_BYTES)
    return memory


def _has_process_descriptors() -> bool:
    """Whether the kernel has ``pidfd_open``, and lets this process call it."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError):
        return False
    return True


def _exit_code(pid: int) -> int | None:
    """The exit code of a process that has ended and was not waited for by its parent."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return os.waitstatus_to_exitcode(int(fields[48])) if state in "ZX" else None  # proc(5): field 52, state is 3


def _close_all(pairs: Sequence[tuple[int, int]]) -> None:
    for pair in pairs:
        for number in pair:
            os.close(number)


def _release(memories: Sequence[int], pipes: Sequence[Connection[Any, Any]]) -> None:
    for memory in memories:
        os.close(memory)
    for pipe in pipes:
        pipe.close()
