"""Assigns to each rank the tensors and pieces it writes, so that all shard files have about the same size.

Replicated tensors are split by rows over the ranks. Tensors that only one rank has, and its blocks of sharded
tensors, are written by that rank. These are pure functions of names, shapes and dtypes, so all ranks compute the same
result without communication; it stays valid until a tensor is added or changes its shape.
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

# A smaller tensor is never split: such a difference between shards does not matter.
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
    """A block that this rank writes: the elements of shape ``extent`` at ``offset`` of a tensor of global ``shape``.

    ``rows`` selects them from the tensor this rank holds: a range of dim 0, an index, or None for all of it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: tuple[int, ...]
    extent: tuple[int, ...]
    rows: slice | tuple[slice, ...] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPiece:
    """A TensorSource with its place in the shard file: under ``key``, in bytes ``[begin, end)``."""

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
    """The layout of one rank's file: ``header``, then the pieces in order; ``size`` in bytes.

    ``spread`` are the sharded tensors with their global shapes. ``fingerprint`` is equal on ranks that have the same
    replicated and sharded tensors. ``total_bytes`` is the size of all ranks' tensors.
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
    """The file layout of ``rank``: its share of the replicated tensors, all of its own, its blocks of sharded ones."""
    row_ranges = assign_shards({name: (shape, dtype.itemsize) for name, (shape, dtype) in shared.items()}, world)[rank]
    row_ranges += [RowRange(name=name, start=0, stop=_num_rows(shape)) for name, (shape, _) in own.items()]
    table = {**shared, **own}
    blocks = [_block_of_rows(rows, *table[rows.name]) for rows in row_ranges]
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
        sorted((name, list(shape), str(dtype)) for name, (shape, dtype) in tensors.items())
        for tensors in (shared, spread)
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
    """The blocks of a part. Whether the blocks of all ranks fit together is checked in ``tensor_table``."""
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
    """A unique key in the file for each block: the tensor's name, with the ranges of its dims unless it is whole."""
    wholes = {block.name for block in blocks if block.extent == block.shape}
    keys: list[str] = []
    for block in blocks:
        key = block.name
        if block.extent != block.shape:
            ranges = [f"{begin}:{begin + size}" for begin, size in zip(block.offset, block.extent, strict=False)]
            while len(ranges) > 1 and block.extent[len(ranges) - 1 :] == block.shape[len(ranges) - 1 :]:
                ranges.pop()  # trailing dims are omitted if they are whole
            key += f"[{','.join(ranges)}]"
            while key in wholes:  # another tensor has this name
                key += "'"
        keys.append(key)
    return keys


def assign_shards(shapes: Mapping[str, tuple[Sequence[int], int]], world: int) -> list[list[RowRange]]:
    """Split tensors ``{name: (shape, bytes per element)}`` into one list of row ranges per rank, about equal in bytes.

    The tensors in a fixed order are one sequence of bytes, split into ``world`` equal parts. A boundary inside a
    tensor moves to the nearest row, inside a small tensor to its nearer end. Every row goes to exactly one rank;
    there are at most ``world - 1`` more pieces than tensors.
    """
    names = sorted(shapes, key=lambda name: (-shapes[name][1], name))
    sizes = [_num_bytes(*shapes[name]) for name in names]
    ends = list(accumulate(sizes))
    total = ends[-1] if ends else 0
    starts = [(0, 0)]  # (tensor, row) at which each rank's part starts
    for rank in range(1, world):
        target = total * rank // world
        index = bisect_right(ends, target)
        if index == len(names):
            starts.append((index, 0))
            continue
        rows = _num_rows(shapes[names[index]][0])
        inside = target - (ends[index] - sizes[index])
        at = round(inside * rows / sizes[index])
        if sizes[index] < _SMALLEST_CUT_BYTES:
            at = 0 if 2 * inside < sizes[index] else rows
        starts.append((index + 1, 0) if at == rows else (index, at))
    starts.append((len(names), 0))
    return [
        _between(names, [_num_rows(shapes[name][0]) for name in names], starts[rank], starts[rank + 1])
        for rank in range(world)
    ]


def _between(names: Sequence[str], rows: Sequence[int], begin: tuple[int, int], end: tuple[int, int]) -> list[RowRange]:
    ranges: list[RowRange] = []
    for index in range(begin[0], min(end[0] + 1, len(names))):
        start = begin[1] if index == begin[0] else 0
        stop = end[1] if index == end[0] else rows[index]
        # an empty tensor has no rows but still exactly one owner: the rank whose part contains its end
        if start < stop or (rows[index] == 0 and index < end[0]):
            ranges.append(RowRange(name=names[index], start=start, stop=stop))
    return ranges


def _num_rows(shape: Sequence[int]) -> int:
    return shape[0] if shape else 1


def _num_bytes(shape: Sequence[int], itemsize: int) -> int:
    size = itemsize
    for extent in shape:
        size *= extent
    return size
