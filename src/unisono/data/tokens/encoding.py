"""Encode documents to token ids, in order, in this process or in several.

A request to a worker process is the tokenizer's fingerprint and a list of texts, in MessagePack. The answer is three concatenated
uint32 arrays: tokens per text, ids, bytes of text per token.

Each worker process runs the tokenizer on one thread. Within one process the tokenizer package's own threads encode as fast, but
one thread converts their results to arrays, at 20 MB of text per second (measured), which limits any number of cores.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from multiprocessing.connection import Connection

import msgspec
import numpy as np

from unisono.data.loading.subprocess_map import serve_requests, subprocess_map
from unisono.data.loading.worker_pool import allowed_cores
from unisono.data.tokens.tokenizer import BYTES, Encoded, Tokenizer, load_tokenizer
from unisono.dist.interpreter import module_command
from unisono.errors import UnisonoError

Document = tuple[str, str]  # (label, text)

_HERE_CHARS = 1 << 23  # text per call in this process: enough for the tokenizer's own threads
_REQUEST_CHARS = 1 << 20
_WORKER_BYTES = 1 << 23  # text per worker that is worth starting a process, about a third of a second


def encode_documents(
    documents: Iterable[Document], tokenizer: Tokenizer, *, workers: int
) -> Generator[tuple[str, Encoded]]:
    """(label, encoded text) of each document, in order; ``workers`` processes, 0 = this one.

    At most two requests of about a million characters per worker are in flight. A worker loads the tokenizer by its ``name``.
    Closing the generator ends the processes. Raises UnisonoError if a process ends by itself.
    """
    if workers == 0:
        for batch in _batches(documents, _HERE_CHARS):
            yield from _labelled(batch, tokenizer.encode([text for _, text in batch]))
        return
    requests = (
        (batch, msgspec.msgpack.encode((tokenizer.fingerprint, [text for _, text in batch])))
        for batch in _batches(documents, _REQUEST_CHARS)
    )
    command = module_command("unisono.data.tokens.encoding", tokenizer.name)
    environ = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    answers = subprocess_map(requests, command, workers=workers, ahead=2, ended=_ended_at, environ=environ)
    with closing(answers):
        for batch, answer in answers:
            if not answer:
                raise _ended("a tokenizing process found another tokenizer: the file changed meanwhile")
            yield from _labelled(batch, _unpacked(answer, len(batch)))


def default_workers(tokenizer: Tokenizer, text_bytes: int) -> int:
    """Encoding processes: none for bytes, which are copied faster than sent, or for little text."""
    workers = 0 if tokenizer.name == BYTES else min(allowed_cores(), text_bytes // _WORKER_BYTES)
    return workers if workers > 1 else 0


def _unpacked(answer: bytes, texts: int) -> list[Encoded]:
    numbers = np.frombuffer(answer, "<u4")
    counts, ids, sizes = np.split(numbers, [texts, (texts + numbers.size) // 2])
    ends = np.cumsum(counts, dtype=np.int64)[:-1]
    return [Encoded(ids=i, token_bytes=b) for i, b in zip(np.split(ids, ends), np.split(sizes, ends), strict=True)]


def _labelled(batch: list[Document], encoded: list[Encoded]) -> Iterator[tuple[str, Encoded]]:
    return zip((label for label, _ in batch), encoded, strict=True)


def _batches(documents: Iterable[Document], chars: int) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document[1])
        if size >= chars:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _ended_at(_batch: list[Document], code: int) -> UnisonoError:
    return _ended(f"a tokenizing process ended with exit code {code}")


def _ended(given: str) -> UnisonoError:
    return UnisonoError(
        given=given,
        rule="each process that encodes text runs until all of it is encoded",
        consequence="the corpus was not prepared; finished shards are kept and not made again",
        nearest="start again; where memory ran out, cut very large files: a file is one document, encoded at once",
    )


def _answer(name: str) -> Callable[[bytes], bytes]:
    """The worker's answer to a request; empty if the worker's tokenizer differs."""
    tokenizer = load_tokenizer(name)

    def answer(request: bytes) -> bytes:
        fingerprint, texts = msgspec.msgpack.decode(request, type=tuple[str, list[str]])
        if fingerprint != tokenizer.fingerprint:
            return b""
        encoded = tokenizer.encode(texts)
        counts = np.array([text.ids.size for text in encoded], "<u4")
        columns = [counts, *(text.ids for text in encoded), *(text.token_bytes for text in encoded)]
        return np.concatenate(columns).astype("<u4").tobytes()

    return answer


if __name__ == "__main__":
    serve_requests(Connection(int(sys.argv[2])), _answer(sys.argv[1]))
