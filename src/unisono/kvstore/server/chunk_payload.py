"""Frame payloads of chunks: a table of entries, a push header, then the data back to back.

    entries x (chunk u32, nbytes u32), for a push (lr f64, base_version u64), with WITH_BASES entries x (base u64), data

Little endian. Every count is compared with the bytes present before anything is read. Without a codec the data of an
entry are the chunk's elements; for rows their numbers (i64, from the chunk's first), then, in a push, the rows
themselves.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from unisono.errors import CommError
from unisono.kvstore.server.chunk_store import ChunkGradient
from unisono.kvstore.server.placement import CHUNK_BYTES, Chunk
from unisono.kvstore.wire.frame import DTYPES, Frame, Op, payload_views, protocol_error

BATCH_SHARD = 1  # flag of a push: seq is its batch shard, else the worker's own count
WRITE = 2  # flag of ROWS and STATE: the payload replaces or updates; else it is a request
REFUSED = 4  # flag of an ACK or DATA: the push held a NaN or an infinity and changed nothing
WITH_BASES = 8  # flag of PULL, PUSHPULL and DATA: a base for each entry, see ``pull_compression``

CODED = 1  # the number, in a frame, of the one codec that a run agreed on

# bytes of an encoded chunk, its elements and dtype -> the gradient [elements]; raises ValueError for a bad code
Decoder = Callable[[memoryview, int, torch.dtype], Tensor]

# shared memory for one frame: chunks, their table of numbers and sizes, and the push header
SLOT_BYTES = CHUNK_BYTES + (64 << 10)

_ENTRY_BYTES = _BASE_BYTES = 8
_PREFIX = struct.Struct("<dQ")
_ID_BYTES = 8


def write_chunks(
    op: Op,
    parts: Sequence[tuple[int, memoryview]],
    *,
    dtype: str,
    prefix: tuple[float, int] | None = None,
    based: Sequence[int] = (),
) -> Frame:
    """A frame of ``(chunk, data)``; ``prefix``: lr and base_version of a push; ``based``: a base per part."""
    numbers = [number for chunk, data in parts for number in (chunk, data.nbytes)]
    head = struct.pack(f"<{len(numbers)}I", *numbers) + (_PREFIX.pack(*prefix) if prefix is not None else b"")
    payload = [memoryview(head + struct.pack(f"<{len(based)}Q", *based)), *(data for _, data in parts)]
    flags = WITH_BASES if based else 0
    return Frame(op, dtype=DTYPES.index(dtype), flags=flags, entries=len(parts), payload=payload)


def chunk_values_frame(pulled: Sequence[tuple[int, Tensor, int]]) -> Frame:
    """A DATA frame of (chunk, value, version); the frame's ``clock`` is the lowest version."""
    answer = write_chunks(
        Op.DATA,
        [(number, raw_bytes(value)) for number, value, _ in pulled],
        dtype=common_dtype(v for _, v, _ in pulled),
    )
    return replace(answer, clock=min((version for _, _, version in pulled), default=0))


def common_dtype(values: Iterable[Tensor]) -> str:
    """The dtype of all values of a frame, as frames name it. Raises CommError where they differ."""
    dtypes = {str(value.dtype).removeprefix("torch.") for value in values} or {"float32"}
    if len(dtypes) > 1:
        raise CommError(
            given=f"chunks of {', '.join(sorted(dtypes))} asked for in one frame",
            rule="a frame has one dtype",
            consequence="nothing was sent",
            nearest="take the groups of the placement",
        )
    return dtypes.pop()


def read_chunks(frame: Frame, *, prefix: bool) -> tuple[list[tuple[int, memoryview]], float, int]:
    """``(chunk, data)`` of every entry, lr and base_version. Raises CommError unless they fill the payload exactly."""
    data, head = _whole(frame), _head(frame, prefix=prefix)
    if data.nbytes < head:
        raise _torn(frame, data.nbytes, head)
    numbers = struct.unpack_from(f"<{2 * frame.entries}I", data)
    lr, base_version = _PREFIX.unpack_from(data, frame.entries * _ENTRY_BYTES) if prefix else (float("nan"), 0)
    if head + sum(numbers[1::2]) != data.nbytes:
        raise _torn(frame, data.nbytes, head + sum(numbers[1::2]))
    parts: list[tuple[int, memoryview]] = []
    for chunk, nbytes in zip(numbers[::2], numbers[1::2], strict=True):
        parts.append((chunk, data[head : head + nbytes]))
        head += nbytes
    return parts, lr, base_version


def read_bases(frame: Frame, *, prefix: bool) -> tuple[int, ...]:
    """The base of every entry; empty without WITH_BASES."""
    data, head = _whole(frame), _head(frame, prefix=prefix)
    if not frame.flags & WITH_BASES:
        return ()
    if data.nbytes < head:
        raise _torn(frame, data.nbytes, head)
    return struct.unpack_from(f"<{frame.entries}Q", data, head - frame.entries * _BASE_BYTES)


def read_requested_chunks(frame: Frame) -> list[int]:
    """The chunks of a PULL: a table of entries without data, whose nbytes are ignored."""
    data = _whole(frame)
    if data.nbytes != _head(frame, prefix=False):
        raise _torn(frame, data.nbytes, _head(frame, prefix=False))
    chunks = struct.unpack_from(f"<{2 * frame.entries}I", data)[::2]
    if any(left >= right for left, right in itertools.pairwise(chunks)):
        raise CommError(
            given=f"{frame.op.name} of chunks in the order {list(chunks[:8])}",
            rule="a frame names each chunk once, in rising order, so an answer is never larger than the server",
            consequence="nothing was sent",
            nearest="take the groups of the placement",
        )
    return list(chunks)


def answer_views(frame: Frame, chunks: Sequence[Chunk]) -> list[Tensor | None]:
    """Views of the request's slot at the places where ``write_chunks`` will want the values of ``chunks``; None without
    a slot that holds them."""
    start = len(chunks) * _ENTRY_BYTES
    if frame.slot is None or start + sum(chunk.nbytes for chunk in chunks) > frame.slot.view.nbytes:
        return [None] * len(chunks)
    starts = itertools.accumulate((chunk.nbytes for chunk in chunks), initial=start)
    view = frame.slot.view
    return [_view(view[at : at + chunk.nbytes], chunk.dtype) for at, chunk in zip(starts, chunks, strict=False)]


def chunk_tensor(frame: Frame, data: memoryview, chunk: Chunk, decoders: Mapping[int, Decoder]) -> Tensor:
    """The elements of an entry."""
    if frame.codec:
        decoder = decoders.get(frame.codec)
        if decoder is None:
            raise _misfit(frame, chunk, f"codec {frame.codec}, which this server has not")
        try:
            return decoder(data, chunk.num_elements, chunk.dtype)
        except ValueError as error:
            raise _misfit(frame, chunk, str(error)) from error
    _same_dtype(frame, chunk)
    if data.nbytes != chunk.nbytes:
        raise _misfit(frame, chunk, f"{data.nbytes} bytes")
    return _view(data, chunk.dtype)


def chunk_rows(frame: Frame, data: memoryview, chunk: Chunk) -> ChunkGradient:
    """An entry of ROWS: row numbers and, in a push, their gradients."""
    _same_dtype(frame, chunk)
    row_bytes = chunk.row_elements * chunk.dtype.itemsize if frame.flags & WRITE else 0
    count, rest = divmod(data.nbytes, _ID_BYTES + row_bytes)
    if rest or count * max(chunk.row_elements, 1) > chunk.num_elements:
        raise _misfit(frame, chunk, f"{data.nbytes} bytes of rows")
    ids = _view(data[: count * _ID_BYTES], torch.int64)
    values = _view(data[count * _ID_BYTES :], chunk.dtype).view(count, chunk.row_elements if row_bytes else 0)
    return ChunkGradient(chunk.number, values, ids)


def raw_bytes(value: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied."""
    return value.flatten().view(torch.uint8).numpy().data


def _view(data: memoryview, dtype: torch.dtype) -> Tensor:
    if not data.nbytes:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(data) if data.readonly else data, dtype=dtype)


def _head(frame: Frame, *, prefix: bool) -> int:
    """The number of bytes before the data."""
    per_entry = _ENTRY_BYTES + (_BASE_BYTES if frame.flags & WITH_BASES else 0)
    return frame.entries * per_entry + prefix * _PREFIX.size


def _whole(frame: Frame) -> memoryview:
    parts = payload_views(frame)
    return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))


def _same_dtype(frame: Frame, chunk: Chunk) -> None:
    if frame.dtype >= len(DTYPES) or f"torch.{DTYPES[frame.dtype]}" != str(chunk.dtype):
        raise _misfit(frame, chunk, f"dtype {DTYPES[frame.dtype] if frame.dtype < len(DTYPES) else frame.dtype}")


def _torn(frame: Frame, given: int, needed: int) -> CommError:
    text = f"{frame.op.name} of {frame.entries} entries in {given} bytes, whose parts add up to {needed}"
    return protocol_error(text, "entries and their data fill a payload exactly")


def _misfit(frame: Frame, chunk: Chunk, what: str) -> CommError:
    return CommError(
        given=f"{frame.op.name} of chunk {chunk.number} with {what}",
        rule=f"it is {chunk.num_elements} elements of {chunk.dtype}, of {chunk.key!r}, in rows of {chunk.row_elements}",
        consequence="nothing of it was used",
        nearest="start all workers with one model, one precision and one compression",
    )
