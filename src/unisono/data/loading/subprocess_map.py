"""Requests answered in order by processes of one command, spoken to through pipes.

A caller's ``__main__`` is not run again, nothing is pickled, and a process ends by itself when the one that started it is gone. A
frame is its length (8 bytes, little-endian) and that many bytes; each request frame gets one answer frame.
"""

from __future__ import annotations

import os
import queue
import signal
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import IO, TypeVar

from unisono.errors import UnisonoError

_LENGTH = struct.Struct("<Q")
Tag = TypeVar("Tag")


def subprocess_map(
    requests: Iterable[tuple[Tag, bytes]],
    command: Sequence[str],
    *,
    workers: int,
    ahead: int,
    ended: Callable[[Tag, int], UnisonoError],
    environ: Mapping[str, str] | None = None,
) -> Generator[tuple[Tag, bytes]]:
    """(tag, answer) of each request, in order, by ``workers`` processes of ``command``.

    At most ``ahead`` requests per worker are under way, so memory is bounded by the size of so many answers. Close the
    generator to end the processes early. Where one ends by itself, what ``ended(tag, exit code)`` makes is raised.
    """
    processes = [_Process(command, environ) for _ in range(workers)]
    idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()
    for process in processes:
        idle.put(process)

    def ask(tag: Tag, request: bytes) -> bytes:
        process = idle.get()
        try:
            answer = process.ask(request)
        finally:
            idle.put(process)
        if answer is None:
            raise ended(tag, process.wait())
        return answer

    threads = ThreadPoolExecutor(workers, thread_name_prefix="unisono-framed")
    try:
        pending: deque[tuple[Tag, Future[bytes]]] = deque()
        for tag, request in requests:
            pending.append((tag, threads.submit(ask, tag, request)))
            if len(pending) >= ahead * workers:
                oldest, future = pending.popleft()
                yield oldest, future.result()
        while pending:
            oldest, future = pending.popleft()
            yield oldest, future.result()
    finally:
        for process in processes:
            process.kill()  # it keeps nothing; threads that wait for it wake up
        threads.shutdown(cancel_futures=True)
        for process in processes:
            process.close()


def serve_requests(answer: Callable[[bytes], bytes]) -> None:
    """The other side: answer requests on standard input until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the process that started us decides
    # Whatever a package prints goes to stderr, not between the frames. A broken pipe (of a frame, or of what closing the file
    # flushes) tells that nobody is there.
    with suppress(BrokenPipeError), os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)
        while (request := _receive(sys.stdin.buffer)) is not None:
            _send(answers, answer(request))


class _Process:
    """One worker, used by one thread at a time."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str] | None) -> None:
        environ = os.environ | dict(environ or {})
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ)

    def ask(self, request: bytes) -> bytes | None:
        """The answer, None where the process has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            _send(self._process.stdin, request)
            return _receive(self._process.stdout)
        return None

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> int:
        return self._process.wait()

    def close(self) -> None:
        """Release what is left of a killed process."""
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):  # what it did not read any more
                    pipe.close()


def _send(file: IO[bytes], frame: bytes) -> None:
    file.write(_LENGTH.pack(len(frame)))
    file.write(frame)
    file.flush()


def _receive(file: IO[bytes]) -> bytes | None:
    """The next frame, None where the other side is gone."""
    head = file.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    body = file.read(length)
    return body if len(body) == length else None
