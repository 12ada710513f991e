"""Documents to token ids, in order, in this process or in several.

Processes are started as commands and spoken to through pipes, so that a caller's ``__main__`` is not run again, nothing is
pickled, and a process ends by itself when the one that started it is gone. A frame is its length (8 bytes, little-endian)
and that many bytes. First the process sends its tokenizer's fingerprint; then each request, a MessagePack list of texts, is
answered by uint32 arrays, one after the other: tokens per text, ids, bytes of text per token.

Each process runs the tokenizer on one thread. The package's own threads, used where everything is done in this process,
encode as fast; but turning their results into arrays is left to one thread, at 20 MB of text per second (measured), which
would bound any number of cores.
"""

from __future__ import annotations

import os
import queue
import signal
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import IO

import msgspec
import numpy as np

from unisono.data.tokenizer import Encoded, Tokenizer, load_tokenizer
from unisono.errors import Problem, UnisonoError

Document = tuple[str, str]  # (label, text)

_HERE_CHARS = 1 << 23  # text given to the tokenizer of this process at once: enough for its own threads
_REQUEST_CHARS = 1 << 20
_LENGTH = struct.Struct("<Q")


def encode_documents(
    documents: Iterable[Document], tokenizer: Tokenizer, *, workers: int
) -> Generator[tuple[str, Encoded]]:
    """(label, encoded text) of each document, in order, whatever the number of ``workers``; 0 = in this process.

    At most two requests of about a million characters per worker are under way. A tokenizer is loaded there by its
    ``name``. Close the generator to end the processes early. Raises ``UnisonoError`` where one of them ends by itself.
    """
    if workers == 0:
        for batch in _batches(documents, _HERE_CHARS):
            yield from _labelled(batch, tokenizer.encode([text for _, text in batch]))
        return
    processes = [_Process(tokenizer) for _ in range(workers)]
    idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()
    for process in processes:
        idle.put(process)

    def encode(batch: list[Document]) -> list[Encoded]:
        process = idle.get()
        try:
            return process.encode([text for _, text in batch])
        finally:
            idle.put(process)

    threads = ThreadPoolExecutor(workers, thread_name_prefix="unisono-encode")
    try:
        pending: deque[tuple[list[Document], Future[list[Encoded]]]] = deque()
        for batch in _batches(documents, _REQUEST_CHARS):
            pending.append((batch, threads.submit(encode, batch)))
            if len(pending) > 2 * workers:
                oldest, future = pending.popleft()
                yield from _labelled(oldest, future.result())
        while pending:
            oldest, future = pending.popleft()
            yield from _labelled(oldest, future.result())
    finally:
        for process in processes:
            process.kill()  # it keeps nothing; threads that wait for it wake up
        threads.shutdown(cancel_futures=True)
        for process in processes:
            process.close()


def _labelled(batch: list[Document], encoded: list[Encoded]) -> Iterator[tuple[str, Encoded]]:
    return zip((label for label, _ in batch), encoded, strict=True)


def _batches(documents: Iterable[Document], chars: int) -> Iterator[list[Document]]:
    batch: list[Document] = []
    held = 0
    for document in documents:
        batch.append(document)
        held += len(document[1])
        if held >= chars:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


class _Process:
    """One tokenizing process, used by one thread at a time."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._fingerprint = tokenizer.fingerprint
        self._greeted = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", "unisono.data.encoding", tokenizer.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"},
        )

    def encode(self, texts: list[str]) -> list[Encoded]:
        """Token ids of each text."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if not self._greeted:
            fingerprint = _receive(self._process.stdout)
            if fingerprint is not None and fingerprint.decode() != self._fingerprint:
                raise _ended("a tokenizing process found another tokenizer: the file changed meanwhile")
            self._greeted = True
        answer = None
        with suppress(BrokenPipeError):
            _send(self._process.stdin, msgspec.msgpack.encode(texts))
            answer = _receive(self._process.stdout)
        if answer is None:
            raise _ended(f"a tokenizing process ended with exit code {self._process.wait()}")
        numbers = np.frombuffer(answer, "<u4")
        counts, ids, sizes = np.split(numbers, [len(texts), (len(texts) + numbers.size) // 2])
        ends = np.cumsum(counts, dtype=np.int64)[:-1]
        return [Encoded(ids=i, token_bytes=b) for i, b in zip(np.split(ids, ends), np.split(sizes, ends), strict=True)]

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """Release what is left of a killed process."""
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):  # what it did not read any more
                    pipe.close()


def _send(file: IO[bytes], *parts: bytes) -> None:
    file.write(_LENGTH.pack(sum(map(len, parts))))
    for part in parts:
        file.write(part)
    file.flush()


def _receive(file: IO[bytes]) -> bytes | None:
    """The next frame, None where the other side is gone."""
    head = file.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    body = file.read(length)
    return body if len(body) == length else None


def _ended(given: str) -> UnisonoError:
    return UnisonoError(
        Problem(
            given=given,
            rule="each process that encodes text runs until all of it is encoded",
            consequence="the corpus was not prepared; finished shards are kept and not made again",
            nearest="start again; where memory ran out, cut very large files: a file is one document, encoded at once",
        )
    )


def _serve(name: str) -> None:
    """Answer requests until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the process that started us decides
    # Whatever a package prints goes to stderr, not between the frames.
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)
        tokenizer = load_tokenizer(name)
        _send(answers, tokenizer.fingerprint.encode())
        while (request := _receive(sys.stdin.buffer)) is not None:
            encoded = tokenizer.encode(msgspec.msgpack.decode(request, type=list[str]))
            counts = np.array([each.ids.size for each in encoded], "<u4")
            columns = [counts, *(each.ids for each in encoded), *(each.token_bytes for each in encoded)]
            _send(answers, np.concatenate(columns).astype("<u4").tobytes())


if __name__ == "__main__":
    _serve(sys.argv[1])
