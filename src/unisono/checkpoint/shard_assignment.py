"""Who writes what: the tensors all ranks share are cut into pieces and dealt out so that every shard is about as big.

What only one rank has, its own tensors and its blocks of tensors spread over ranks, it writes itself. Pure functions of
names, shapes and dtypes: all ranks come to the same result without talking, and a result holds for every save until a
tensor is added or changes its shape. Nothing here reads or writes a file.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import xxhash

from unisono.checkpoint.safetensors_format import build_header, num_bytes
from unisono.parallel.sharding import TensorShard

# A tensor smaller than this is never cut: its neighbour's shard may as well be that much bigger.
_SMALLEST_CUT_BYTES = 2**20

Table = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # name -> (shape, dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowRange:
    """Rows ``[start, stop)`` along dim 0 of tensor ``name``; a tensor without dims is one row."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSource:
    """What this rank writes of a tensor: ``extent`` elements at ``offset`` of the whole, of ``shape``.

    ``rows`` is what to take of the tensor this rank holds: a range of dim 0, an index, or None where the block is all of it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: tuple[int, ...]
    extent: tuple[int, ...]
    rows: slice | tuple[slice, ...] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPiece:
    """A block that has its place: under ``key``, in bytes ``[begin, end)`` of a shard file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: tuple[int, ...]
    extent: tuple[int, ...]
    key: str
    rows: slice | tuple[slice, ...] | None
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardContents:
    """One rank's file: its pieces in the order they lie in it, behind ``header``.

    ``spread`` are the tensors of all ranks' parts, as they are whole. ``fingerprint`` is equal on ranks that share the
    same tensors; ``total_bytes`` is the size of all ranks' tensors.
    """

    pieces: tuple[TensorPiece, ...]
    header: bytes
    size: int
    spread: Table
    fingerprint: str
    total_bytes: int


def lay_out_shards(
    shared: Table, own: Table, parts: Mapping[str, TensorShard], *, rank: int, world: int
) -> ShardContents:
    """The shard of ``rank``: its share of the tensors all ranks share, all of its own, its blocks of the parts."""
    dealt = assign_shards({name: (shape, dtype.itemsize) for name, (shape, dtype) in shared.items()}, world)[rank]
    dealt += [RowRange(name=name, start=0, stop=_num_rows(shape)) for name, (shape, _) in own.items()]
    table = {**shared, **own}
    blocks = [_block_of_rows(rows, *table[rows.name]) for rows in dealt]
    blocks += [block for name, part in parts.items() for block in _blocks_of_part(name, part, rank)]
    # wide elements first, as safetensors orders them: every tensor then lies aligned in its file
    blocks.sort(key=lambda block: (-block.dtype.itemsize, block.name))
    keys = _keys(blocks)
    header, begins = build_header(
        [(key, block.dtype, block.extent) for key, block in zip(keys, blocks, strict=True)], {"format": "pt"}
    )
    pieces = tuple(
        TensorPiece(
            name=block.name,
            shape=block.shape,
            dtype=block.dtype,
            offset=block.offset,
            extent=block.extent,
            key=key,
            rows=block.rows,
            begin=begin,
            end=begin + num_bytes(block.dtype, block.extent),
        )
        for block, key, begin in zip(blocks, keys, begins, strict=True)
    )
    spread = {name: (tuple(part.global_shape), part.tensor.dtype) for name, part in parts.items()}
    described = [
        sorted((name, list(shape), str(dtype)) for name, (shape, dtype) in each.items()) for each in (shared, spread)
    ]
    return ShardContents(
        pieces=pieces,
        header=header,
        size=pieces[-1].end if pieces else len(header),
        spread=spread,
        fingerprint=xxhash.xxh3_128_hexdigest(json.dumps(described).encode()),
        total_bytes=sum(num_bytes(dtype, shape) for shape, dtype in (*shared.values(), *spread.values()))
        + world * sum(num_bytes(dtype, shape) for shape, dtype in own.values()),
    )


def _block_of_rows(rows: RowRange, shape: tuple[int, ...], dtype: torch.dtype) -> TensorSource:
    extent = (rows.stop - rows.start, *shape[1:]) if shape else ()
    return TensorSource(
        name=rows.name,
        shape=shape,
        dtype=dtype,
        offset=(rows.start, *(0 for _ in shape[1:])) if shape else (),
        extent=extent,
        rows=None if extent == shape else slice(rows.start, rows.stop),
    )


def _blocks_of_part(name: str, part: TensorShard, rank: int) -> Iterator[TensorSource]:
    """The blocks as they were passed, right or wrong: whether those of all ranks fit together is seen when all are known."""
    shape, extent = tuple(part.global_shape), tuple(part.tensor.shape)
    if 0 in extent:
        if 0 in shape and rank == 0:  # a tensor without elements has one owner too
            yield TensorSource(
                name=name, shape=shape, dtype=part.tensor.dtype, offset=(0,) * len(shape), extent=shape, rows=None
            )
    elif not part.replica:
        for index, offset in part.boxes():
            extent = tuple(part.tensor[index].shape)
            yield TensorSource(
                name=name, shape=shape, dtype=part.tensor.dtype, offset=offset, extent=extent, rows=index or None
            )


def _keys(blocks: Sequence[TensorSource]) -> list[str]:
    """A name inside the file for each, no two alike: the tensor's own where it is whole, else with ranges of its dims."""
    wholes = {block.name for block in blocks if block.extent == block.shape}
    keys: list[str] = []
    for block in blocks:
        key = block.name
        if block.extent != block.shape:
            ranges = [f"{begin}:{begin + size}" for begin, size in zip(block.offset, block.extent, strict=False)]
            while len(ranges) > 1 and block.extent[len(ranges) - 1 :] == block.shape[len(ranges) - 1 :]:
                ranges.pop()  # the last dims go unsaid where they are whole
            key += f"[{','.join(ranges)}]"
            while key in wholes:  # another tensor is called that
                key += "'"
        keys.append(key)
    return keys


def assign_shards(shapes: Mapping[str, tuple[Sequence[int], int]], world: int) -> list[list[RowRange]]:
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


def _between(names: Sequence[str], rows: Sequence[int], begin: tuple[int, int], end: tuple[int, int]) -> list[RowRange]:
    found: list[RowRange] = []
    for index in range(begin[0], min(end[0] + 1, len(names))):
        start = begin[1] if index == begin[0] else 0
        stop = end[1] if index == end[0] else rows[index]
        # an empty tensor has no rows, and still exactly one owner: whoever passes its end
        if start < stop or (rows[index] == 0 and index < end[0]):
            found.append(RowRange(name=names[index], start=start, stop=stop))
    return found


def _num_rows(shape: Sequence[int]) -> int:
    return shape[0] if shape else 1


def _num_bytes(shape: Sequence[int], itemsize: int) -> int:
    size = itemsize
    for extent in shape:
        size *= extent
    return size
