"""Who writes what: the tensors all ranks share are cut into pieces and dealt out so that every shard is about as big.

Pure functions of names, shapes and dtypes: all ranks come to the same result without talking, and a result holds for
every save until a tensor is added or changes its shape. Nothing here reads or writes a file.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import xxhash

from unisono.train.checkpoint.tensorfile import build_header, num_bytes

# A tensor smaller than this is never cut: its neighbour's shard may as well be that much bigger.
_SMALLEST_CUT_BYTES = 2**20

Table = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # name -> (shape, dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Rows ``[start, stop)`` along dim 0 of tensor ``name``; a tensor without dims is one row."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A block of tensor ``name``, of shape ``extent`` at ``offset`` of the whole, in bytes ``[begin, end)`` of a shard file.

    ``rows`` is the range of dim 0 to take of the tensor, None where the piece is all of it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: tuple[int, ...]
    extent: tuple[int, ...]
    key: str
    rows: slice | None
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One rank's file: its pieces in the order they lie in it, behind ``header``.

    ``fingerprint`` is equal on ranks that share the same tensors; ``total_bytes`` is the size of all ranks' tensors.
    """

    pieces: tuple[Piece, ...]
    header: bytes
    size: int
    fingerprint: str
    total_bytes: int


def lay_out(shared: Table, own: Table, *, rank: int, world: int) -> Shard:
    """The shard of ``rank``: its part of the tensors all ranks share, and all of its own."""
    parts = deal({name: (shape, dtype.itemsize) for name, (shape, dtype) in shared.items()}, world)[rank]
    parts += [Rows(name=name, start=0, stop=shape[0] if shape else 1) for name, (shape, _) in own.items()]
    table = {**shared, **own}
    # wide elements first, as safetensors orders them: every tensor then lies aligned in its file
    parts.sort(key=lambda part: (-table[part.name][1].itemsize, part.name))
    extents: list[tuple[int, ...]] = []
    for part in parts:
        shape = table[part.name][0]
        extents.append((part.stop - part.start, *shape[1:]) if shape else ())
    keys = [_key(part, table[part.name][0]) for part in parts]
    entries = [(key, table[part.name][1], extent) for key, part, extent in zip(keys, parts, extents, strict=True)]
    header, begins = build_header(entries, {"format": "pt"})
    pieces: list[Piece] = []
    for part, key, extent, begin in zip(parts, keys, extents, begins, strict=True):
        shape, dtype = table[part.name]
        pieces.append(
            Piece(
                name=part.name,
                shape=shape,
                dtype=dtype,
                offset=(part.start, *(0 for _ in shape[1:])) if shape else (),
                extent=extent,
                key=key,
                rows=None if extent == shape else slice(part.start, part.stop),
                begin=begin,
                end=begin + num_bytes(dtype, extent),
            )
        )
    described = sorted((name, list(shape), str(dtype)) for name, (shape, dtype) in shared.items())
    return Shard(
        pieces=tuple(pieces),
        header=header,
        size=pieces[-1].end if pieces else len(header),
        fingerprint=xxhash.xxh3_128_hexdigest(json.dumps(described).encode()),
        total_bytes=sum(num_bytes(dtype, shape) for shape, dtype in shared.values())
        + world * sum(num_bytes(dtype, shape) for shape, dtype in own.values()),
    )


def _key(part: Rows, shape: tuple[int, ...]) -> str:
    """A piece's name inside the file: the tensor's own where it is whole, else with the rows."""
    whole = not shape or part.stop - part.start == shape[0]
    return part.name if whole else f"{part.name}[{part.start}:{part.stop}]"


def deal(shapes: Mapping[str, tuple[Sequence[int], int]], world: int) -> list[list[Rows]]:
    """Cut tensors ``{name: (shape, bytes per element)}`` into one list of rows per rank, about equal in bytes.

    All tensors in a fixed order make one long line of bytes, cut in ``world`` equal parts; a cut inside a tensor moves
    to the nearest row, inside a small tensor to its nearer end. Every row goes to exactly one rank, and the number of
    pieces is at most the number of tensors plus ``world - 1``.
    """
    names = sorted(shapes, key=lambda name: (-shapes[name][1], name))
    sizes = [_num_bytes(*shapes[name]) for name in names]
    ends = list(accumulate(sizes))
    total = ends[-1] if ends else 0
    marks = [(0, 0)]  # where each rank's part starts: (tensor, row)
    for rank in range(1, world):
        target = total * rank // world
        index = bisect_right(ends, target)
        if index == len(names):
            marks.append((index, 0))
            continue
        rows = _num_rows(shapes[names[index]][0])
        inside = target - (ends[index] - sizes[index])
        at = round(inside * rows / sizes[index])
        if sizes[index] < _SMALLEST_CUT_BYTES:
            at = 0 if 2 * inside < sizes[index] else rows
        marks.append((index + 1, 0) if at == rows else (index, at))
    marks.append((len(names), 0))
    return [
        _between(names, [_num_rows(shapes[name][0]) for name in names], marks[rank], marks[rank + 1])
        for rank in range(world)
    ]


def _between(names: Sequence[str], rows: Sequence[int], begin: tuple[int, int], end: tuple[int, int]) -> list[Rows]:
    found: list[Rows] = []
    for index in range(begin[0], min(end[0] + 1, len(names))):
        start = begin[1] if index == begin[0] else 0
        stop = end[1] if index == end[0] else rows[index]
        # an empty tensor has no rows, and still exactly one owner: whoever passes its end
        if start < stop or (rows[index] == 0 and index < end[0]):
            found.append(Rows(name=names[index], start=start, stop=stop))
    return found


def _num_rows(shape: Sequence[int]) -> int:
    return shape[0] if shape else 1


def _num_bytes(shape: Sequence[int], itemsize: int) -> int:
    size = itemsize
    for extent in shape:
        size *= extent
    return size
