"""What a worker has of each chunk, where its servers answer pulls with codes: the other side of ``server.shadows``.

A copy is the worker's own, apart from the tensors that values are pulled into, which their owner may change. Answers are taken
in the order in which they arrive, in the thread that receives them, whoever waits for them. Two pulls of a chunk may be under way
at once: only the first names a base, so the others are answered in full, whichever order the server sees them in.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future as Reply
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.errors import CommError
from unisono.kvstore.compression import Codec
from unisono.kvstore.compression.codec import accumulation_dtype
from unisono.kvstore.server.chunk_payload import chunk_tensor, read_bases, read_chunks
from unisono.kvstore.server.placement import Chunk
from unisono.kvstore.wire.frame import Frame, Op


@dataclass(slots=True)
class _Copy:
    """``value`` [elements], in the accumulation dtype, after answer ``number``. ``free``: a pull may name that number."""

    chunk: Chunk
    value: Tensor | None = None
    number: int = 0
    free: bool = False
    nbytes: int = 0  # of what came last


class PullDecoder:
    """The copies of one worker. Thread-safe.

    A copy is separate from the tensors that values are pulled into, which their owner may change. Answers are decoded
    in the order in which they arrive, in the receiving thread. Two pulls of a chunk may be in flight: only the first
    names a base, so the others get exact answers, in whichever order the server sees them.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._lock = threading.Lock()
        self._copies: dict[int, _Copy] = {}

    def bases(self, chunks: Sequence[Chunk]) -> list[int]:
        """The bases that a pull of these chunks names; 0 for a chunk with another pull in flight. The pull must follow."""
        with self._lock:
            found: list[int] = []
            for chunk in chunks:
                copy = self._copies.setdefault(chunk.number, _Copy(chunk))
                found.append(copy.number if copy.free else 0)
                copy.free = False
            return found

    def forget(self) -> None:
        """Make the next pulls exact."""
        with self._lock:
            for copy in self._copies.values():
                copy.free = False

    def decode_when_received(
        self, reply: Reply[Frame], chunks: Sequence[Chunk], based: Sequence[int], places: Sequence[memoryview]
    ) -> Reply[Frame]:
        """The reply to a pull that named ``based``, done once its values are in ``places``, the chunks' memory."""
        told: Reply[Frame] = Reply()

        def came(reply: Reply[Frame]) -> None:
            try:
                answer = reply.result()
                if answer.op is Op.DATA:
                    self.decode(answer, chunks, based, places)
            except Exception as error:  # this thread receives for others too: who waits is told
                told.set_exception(error)
            else:
                told.set_result(answer)

        reply.add_done_callback(came)
        return told

    @torch.no_grad()
    def decode(
        self, answer: Frame, chunks: Sequence[Chunk], based: Sequence[int], places: Sequence[memoryview]
    ) -> None:
        """Update the copies from an answer and write them to ``places``. Raises CommError for an answer that does not
        fit."""
        parts, _, _ = read_chunks(answer, prefix=False)
        numbers = read_bases(answer, prefix=False)
        if [number for number, _ in parts] != [chunk.number for chunk in chunks] or len(numbers) != len(parts):
            raise _unlike(answer, f"{len(parts)} chunks and {len(numbers)} numbers", "it answers for what was asked")
        for chunk, base, number, (_, data), place in zip(chunks, based, numbers, parts, places, strict=True):
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
        """By key the bytes of its values, and the bytes received for them last."""
        found: dict[str, tuple[int, int]] = {}
        with self._lock:
            for copy in self._copies.values():
                if copy.value is not None:
                    whole, came = found.get(copy.chunk.key, (0, 0))
                    found[copy.chunk.key] = whole + copy.chunk.nbytes, came + copy.nbytes
        return found


def _unlike(answer: Frame, given: str, rule: str) -> CommError:
    return CommError(
        given=f"an answer to a pull with {given}, in {answer.entries} entries",
        rule=rule,
        consequence="nothing of it was used",
        nearest="use the same release of unisono everywhere",
    )
