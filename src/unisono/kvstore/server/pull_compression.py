"""Compressed pulls: servers answer with the code of the difference between the current value and the worker's copy.

As in DoubleSqueeze (Tang et al. 2019, arXiv:1905.05957) errors are compensated in both directions. For each worker and
chunk the server keeps a copy of the worker's value, equal bit for bit. A pull is answered with the code of value -
copy, and both sides add the decoded code to their copies. The omitted part is in the next difference, so there is no
residual.

An answer has a number, and a pull names its base: the number of the last answer that the worker decoded, 0 for none.

    base = the number of the server's copy   the next difference
    base = the number before that            the last answer was lost: the same code again
    any other base                           the exact value, which becomes the copy

A server gives each number once, and every process counts from its own random start: a worker that names a copy's number
has its bits. All of this may be lost at any time, at the cost of an exact answer, so it is neither saved nor
replicated.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
import threading
from collections.abc import Sequence
from concurrent.futures import Future as Reply
from dataclasses import dataclass, field

import torch
from torch import Tensor

from unisono.errors import CommError
from unisono.kvstore.compression import Codec
from unisono.kvstore.compression.codec import accumulation_dtype
from unisono.kvstore.server.chunk_payload import chunk_tensor, read_bases, read_chunks
from unisono.kvstore.server.chunk_store import is_finite
from unisono.kvstore.server.placement import Chunk
from unisono.kvstore.wire.frame import Frame, Op, protocol_error

_FIRST_BELOW = 1 << 62


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestedChunk:
    """A chunk's ``value`` [elements], floating, in its ``version``, for a worker that names ``base``."""

    chunk: int
    base: int
    value: Tensor
    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PullAnswer:
    """Per chunk the code, or the value where not ``coded``; its number; the lowest version."""

    coded: bool
    data: tuple[Tensor, ...]
    numbers: tuple[int, ...]
    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _ServerCopy:
    """``value`` is the worker's after answer ``number``, whose ``code`` was of the difference after answer ``before``
    (0: it was exact). ``turn`` counts codes since the last exact answer."""

    value: Tensor  # [elements], in the accumulation dtype
    number: int
    version: int
    before: int = 0
    code: Tensor | None = None
    turn: int = 0


@dataclass(slots=True)
class _Worker:
    lock: threading.Lock = field(default_factory=threading.Lock)
    chunks: dict[int, _ServerCopy] = field(default_factory=dict[int, _ServerCopy])


class PullEncoder:
    """The copies of all workers at one server. Thread-safe."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._numbers = itertools.count(1 + secrets.randbelow(_FIRST_BELOW))
        self._lock = threading.Lock()
        self._workers: dict[int, _Worker] = {}

    @torch.no_grad()
    def answer(self, worker: int, requests: Sequence[RequestedChunk]) -> PullAnswer:
        """Bring ``worker`` to these values, or nearer. The chunks of an answer are all coded or all exact. The values
        are kept and must not be changed."""
        with self._lock:
            own_copies, number = self._workers.setdefault(worker, _Worker()), next(self._numbers)
        with own_copies.lock:
            after = [self._after(worker, own_copies.chunks.get(request.chunk), request, number) for request in requests]
            codes = [copy.code for copy in after if copy is not None and copy.code is not None]
            if len(codes) < len(requests):
                after = [
                    _ServerCopy(value=_wide(request.value), number=number, version=request.version)
                    for request in requests
                ]
            copies = [copy for copy in after if copy is not None]
            own_copies.chunks |= {request.chunk: copy for request, copy in zip(requests, copies, strict=True)}
        coded = len(codes) == len(requests)
        return PullAnswer(
            coded=coded,
            data=tuple(codes if coded else (request.value for request in requests)),
            numbers=tuple(copy.number for copy in copies),
            version=min((copy.version for copy in copies), default=0),
        )

    def drop_worker(self, worker: int) -> None:
        """Forget a worker that has gone."""
        with self._lock:
            self._workers.pop(worker, None)

    def clear(self) -> None:
        """Forget all copies after the values were replaced."""
        with self._lock:
            self._workers.clear()

    def _after(
        self, worker: int, copy: _ServerCopy | None, requests: RequestedChunk, number: int
    ) -> _ServerCopy | None:
        """The copy after a coded answer; None where none is possible."""
        if copy is None or requests.base == 0:
            return None
        if requests.base == copy.before:
            return copy
        if requests.base != copy.number:
            return None
        value, turn = _wide(requests.value), copy.turn + 1
        code = self._codec.encode(value - copy.value, _seed(worker, requests.chunk, turn))
        reached = copy.value + self._codec.decode(code, value.numel(), value.dtype, trusted=True)
        # also exact where the value would overflow its dtype at the worker
        if not is_finite(reached.to(requests.value.dtype)):
            return None
        # a codec may transmit nothing of a small difference: it would never arrive
        if torch.equal(reached, copy.value) and not torch.equal(reached, value):
            return None
        return _ServerCopy(
            value=reached, number=number, version=requests.version, before=copy.number, code=code, turn=turn
        )


def _wide(value: Tensor) -> Tensor:
    return value.to(accumulation_dtype(value.dtype))


def _seed(worker: int, chunk: int, turn: int) -> int:
    """The seed of codecs that round stochastically; equal in a repeated run."""
    return int.from_bytes(hashlib.blake2b(f"{worker}/{chunk}/{turn}".encode(), digest_size=7).digest(), "little")


@dataclass(slots=True)
class _WorkerCopy:
    """``value`` [elements], in the accumulation dtype, after answer ``number``. ``free``: a pull may name that number."""

    chunk: Chunk
    value: Tensor | None = None
    number: int = 0
    free: bool = False
    nbytes: int = 0  # of the last answer


class PullDecoder:
    """The copies of one worker. Thread-safe.

    A copy is separate from the tensors that values are pulled into, which their owner may change. Answers are decoded
    in the order in which they arrive, in the receiving thread. Two pulls of a chunk may be in flight: only the first
    names a base, so the others get exact answers, in whichever order the server sees them.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._lock = threading.Lock()
        self._copies: dict[int, _WorkerCopy] = {}

    def bases(self, chunks: Sequence[Chunk]) -> list[int]:
        """The bases that a pull of these chunks names; 0 for a chunk with another pull in flight. The pull must follow."""
        with self._lock:
            numbers: list[int] = []
            for chunk in chunks:
                copy = self._copies.setdefault(chunk.number, _WorkerCopy(chunk))
                numbers.append(copy.number if copy.free else 0)
                copy.free = False
            return numbers

    def forget(self) -> None:
        """Make the next pulls exact."""
        with self._lock:
            for copy in self._copies.values():
                copy.free = False

    def decode_when_received(
        self, reply: Reply[Frame], chunks: Sequence[Chunk], based: Sequence[int], targets: Sequence[memoryview]
    ) -> Reply[Frame]:
        """The reply to a pull that named ``based``, done once its values are in ``targets``, the chunks' memory."""
        decoded: Reply[Frame] = Reply()

        def on_reply(reply: Reply[Frame]) -> None:
            try:
                answer = reply.result()
                if answer.op is Op.DATA:
                    self.decode(answer, chunks, based, targets)
            except Exception as error:  # the receiving thread continues; the waiting caller gets the error
                decoded.set_exception(error)
            else:
                decoded.set_result(answer)

        reply.add_done_callback(on_reply)
        return decoded

    @torch.no_grad()
    def decode(
        self, answer: Frame, chunks: Sequence[Chunk], based: Sequence[int], targets: Sequence[memoryview]
    ) -> None:
        """Update the copies from an answer and write them to ``targets``. Raises CommError for an answer that does not
        fit."""
        parts, _, _ = read_chunks(answer, prefix=False)
        numbers = read_bases(answer, prefix=False)
        if [number for number, _ in parts] != [chunk.number for chunk in chunks] or len(numbers) != len(parts):
            raise _unlike(answer, f"{len(parts)} chunks and {len(numbers)} numbers", "it answers for what was asked")
        for chunk, base, number, (_, data), place in zip(chunks, based, numbers, parts, targets, strict=True):
            copy = self._copies[chunk.number]
            if answer.codec == 0:
                value = chunk_tensor(answer, data, chunk, {}).to(accumulation_dtype(chunk.dtype))
            elif copy.value is None or copy.number != base:
                raise _unlike(answer, f"a difference from number {base}", f"this worker has number {copy.number}")
            else:
                code = torch.frombuffer(data, dtype=torch.uint8)
                value = copy.value + self._codec.decode(code, chunk.num_elements, accumulation_dtype(chunk.dtype))
            torch.frombuffer(place, dtype=chunk.dtype).copy_(value)
            with self._lock:
                copy.value, copy.number, copy.free, copy.nbytes = value, number, True, data.nbytes

    def stats(self) -> dict[str, tuple[int, int]]:
        """The bytes of each key's values, and the bytes last received for them, by key."""
        sizes: dict[str, tuple[int, int]] = {}
        with self._lock:
            for copy in self._copies.values():
                if copy.value is not None:
                    whole, on_reply = sizes.get(copy.chunk.key, (0, 0))
                    sizes[copy.chunk.key] = whole + copy.chunk.nbytes, on_reply + copy.nbytes
        return sizes


def _unlike(answer: Frame, given: str, rule: str) -> CommError:
    return protocol_error(f"an answer to a pull with {given}, in {answer.entries} entries", rule)
