"""Requests answered in order by subprocesses that run one command.

Nothing is pickled, the parent's ``__main__`` is not run again, and a subprocess ends by itself when its parent is gone. Each
request is one message over a socket pair, whose descriptor is the command's last argument; each gets one answer.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any, TypeVar

from unisono.data.loading.worker_pool import PoolWorker, WorkerPool
from unisono.errors import UnisonoError

Tag = TypeVar("Tag")


def subprocess_map(
    requests: Iterable[tuple[Tag, bytes | None]],
    command: Sequence[str],
    *,
    workers: int,
    ahead: int,
    ended: Callable[[Tag, int], UnisonoError],
    environ: Mapping[str, str] | None = None,
) -> Generator[tuple[Tag, bytes]]:
    """(tag, answer) of each request, in order, by at most ``workers`` processes of ``command``.

    A process starts when there is a request for it, so there are no more than requests. A request of None is not sent, and its
    answer is empty. At most ``ahead`` requests per worker are in flight, which bounds the
    memory of waiting answers. Closing the generator kills the processes. Raises ``ended(tag, exit code)`` if a process ends by
    itself.
    """

    def make_worker() -> _ProcessWorker[Tag]:
        # Output of the processes goes to stderr, away from the parent's own.
        return _ProcessWorker(Subprocess(command, stdout=2, environ=environ), ended)

    pool = WorkerPool(make_worker, name="unisono-subprocess")
    try:
        pool.resize(workers)
        for (tag, _), answer in pool.map_in_order(requests, ahead=ahead * workers):
            yield tag, answer
    finally:
        pool.close()


class _ProcessWorker(PoolWorker[tuple[Tag, bytes | None], bytes]):
    """Sends the requests of a pool's thread to a process."""

    def __init__(self, process: Subprocess, ended: Callable[[Tag, int], UnisonoError]) -> None:
        self._process, self._ended = process, ended

    def __call__(self, request: tuple[Tag, bytes | None], /) -> bytes:
        tag, content = request
        try:
            return b"" if content is None else self._process.ask(content)
        except (EOFError, OSError) as error:
            raise self._ended(tag, self._process.close()) from error

    def interrupt(self) -> None:
        self._process.kill()  # wakes the thread that waits for it

    def close(self) -> None:
        self._process.close()


class Subprocess:
    """A running command and the parent's end of its socket pair. What it prints on stdout goes to ``stdout``, a descriptor."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdout: int | None = None,
        pass_fds: Sequence[int] = (),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._pipe, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                pass_fds=(*pass_fds, theirs.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                env=os.environ | dict(environ or {}),
            )

    def ask(self, request: bytes) -> bytes:
        """Send a request and wait for its answer. Raises EOFError or OSError if the process has ended."""
        self._pipe.send_bytes(request)
        return self._pipe.recv_bytes()

    def kill(self) -> None:
        """End the process; a call to ``ask`` in another thread raises."""
        self._process.kill()

    def close(self) -> int:
        """Wait for the process, which is killed if it does not end within a second, and return its exit code."""
        try:
            self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._pipe.close()
        return self._process.wait()


def serve_requests(pipe: Connection[Any, Any], answer: Callable[[bytes], bytes]) -> None:
    """In the subprocess: answer requests until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the parent decides
    while True:
        try:
            request = pipe.recv_bytes()
        except (EOFError, OSError):  # also in the middle of a request
            return
        reply = answer(request)
        with suppress(ConnectionError):  # the next read finds that the parent is gone
            pipe.send_bytes(reply)
