"""Assigns to each rank the tensors and pieces it writes, so that all shard files have about the same size.

Replicated tensors are split by rows over the ranks. Tensors that only one rank has, and its blocks of sharded
tensors, are written by that rank. These are pure functions of names, shapes and dtypes, so all ranks compute the same
result without communication; it stays valid until a tensor is added or changes its shape.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import xxhash
from torch import Tensor

from unisono.checkpoint.safetensors_format import build_header, num_bytes
from unisono.parallel.sharding import TensorShard

# A smaller tensor is never split: such a difference between shards does not matter.
_SMALLEST_CUT_BYTES = 2**20

TensorSpecs = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # name -> (shape, dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPiece:
    """A block that this rank writes: the elements of shape ``extent`` at ``offset`` of a tensor of global ``shape``.

    ``index`` selects it from the tensor that the rank holds. It lies in bytes ``[begin, end)`` of the rank's file,
    under ``key``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: tuple[int, ...]
    extent: tuple[int, ...]
    index: tuple[slice, ...] = ()
    key: str = ""
    begin: int = 0
    end: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardFileLayout:
    """The layout of one rank's file: ``header``, then the pieces in order; ``size`` in bytes.

    ``sharded`` are the sharded tensors with their global shapes. ``fingerprint`` is equal on ranks that have the same
    replicated and sharded tensors. ``total_bytes`` is the size of all ranks' tensors.
    """

    pieces: tuple[TensorPiece, ...]
    header: bytes
    size: int
    sharded: TensorSpecs
    fingerprint: str
    total_bytes: int


def lay_out_shard(
    replicated: TensorSpecs,
    own: TensorSpecs,
    sharded: Mapping[str, tuple[Tensor, TensorShard]],
    *,
    rank: int,
    world_size: int,
) -> ShardFileLayout:
    """The file layout of ``rank``: its share of the replicated tensors, all of its own, its parts of sharded ones."""
    rows = assign_shards({name: (shape, dtype.itemsize) for name, (shape, dtype) in replicated.items()}, world_size)[
        rank
    ]
    pieces = [_piece_of_rows(name, *replicated[name], rows[name]) for name in rows]
    pieces += [_piece_of_rows(name, shape, dtype, range(_num_rows(shape))) for name, (shape, dtype) in own.items()]
    pieces += [piece for name, local in sharded.items() for piece in _pieces_of_shard(name, *local, rank)]
    # wide elements first, as safetensors orders them: every tensor then lies aligned in its file
    pieces.sort(key=lambda piece: (-piece.dtype.itemsize, piece.name))
    keys = _keys(pieces)
    header, begins = build_header(
        [(key, piece.dtype, piece.extent) for key, piece in zip(keys, pieces, strict=True)], {"format": "pt"}
    )
    placed = tuple(
        replace(piece, key=key, begin=begin, end=begin + num_bytes(piece.dtype, piece.extent))
        for piece, key, begin in zip(pieces, keys, begins, strict=True)
    )
    sharded_table = {name: (shard.global_shape, tensor.dtype) for name, (tensor, shard) in sharded.items()}
    described = [
        sorted((name, list(shape), str(dtype)) for name, (shape, dtype) in table.items())
        for table in (replicated, sharded_table)
    ]
    return ShardFileLayout(
        pieces=placed,
        header=header,
        size=placed[-1].end if placed else len(header),
        sharded=sharded_table,
        fingerprint=xxhash.xxh3_128_hexdigest(json.dumps(described).encode()),
        total_bytes=sum(num_bytes(dtype, shape) for shape, dtype in (*replicated.values(), *sharded_table.values()))
        + world_size * sum(num_bytes(dtype, shape) for shape, dtype in own.values()),
    )


def _piece_of_rows(name: str, shape: tuple[int, ...], dtype: torch.dtype, rows: range) -> TensorPiece:
    extent = (len(rows), *shape[1:]) if shape else ()
    return TensorPiece(
        name=name,
        shape=shape,
        dtype=dtype,
        offset=(rows.start, *(0 for _ in shape[1:])) if shape else (),
        extent=extent,
        index=() if extent == shape else (slice(rows.start, rows.stop),),
    )


def _pieces_of_shard(name: str, tensor: Tensor, shard: TensorShard, rank: int) -> Iterator[TensorPiece]:
    """The pieces of this rank's part. Whether the pieces of all ranks fit together is checked in ``tensor_table``."""
    shape = shard.global_shape
    if 0 in tensor.shape:
        if 0 in shape and rank == 0:  # a tensor without elements has one owner too
            yield TensorPiece(name=name, shape=shape, dtype=tensor.dtype, offset=(0,) * len(shape), extent=shape)
    elif not shard.replica_id:
        for index, offset in shard.blocks():
            extent = tuple(tensor[index].shape)
            yield TensorPiece(name=name, shape=shape, dtype=tensor.dtype, offset=offset, extent=extent, index=index)


def _keys(pieces: Sequence[TensorPiece]) -> list[str]:
    """A unique key in the file for each piece: the tensor's name, with the ranges of its dims unless it is whole."""
    wholes = {piece.name for piece in pieces if piece.extent == piece.shape}
    keys: list[str] = []
    for piece in pieces:
        key = piece.name
        if piece.extent != piece.shape:
            ranges = [f"{begin}:{begin + size}" for begin, size in zip(piece.offset, piece.extent, strict=False)]
            while len(ranges) > 1 and piece.extent[len(ranges) - 1 :] == piece.shape[len(ranges) - 1 :]:
                ranges.pop()  # trailing dims are omitted if they are whole
            key += f"[{','.join(ranges)}]"
            while key in wholes:  # another tensor has this name
                key += "'"
        keys.append(key)
    return keys


def assign_shards(shapes: Mapping[str, tuple[Sequence[int], int]], world_size: int) -> list[dict[str, range]]:
    """Split tensors ``{name: (shape, bytes per element)}`` into rows of dim 0 for each rank, about equal in bytes.

    The tensors in a fixed order are one sequence of bytes, split into ``world_size`` equal parts. A boundary inside a
    tensor moves to the nearest row, inside a small tensor to its nearer end. Every row goes to exactly one rank;
    there are at most ``world_size - 1`` more pieces than tensors.
    """
    names = sorted(shapes, key=lambda name: (-shapes[name][1], name))
    sizes = [itemsize * math.prod(shape) for shape, itemsize in map(shapes.__getitem__, names)]
    ends = list(accumulate(sizes))
    total = ends[-1] if ends else 0
    starts = [(0, 0)]  # (tensor, row) at which each rank's part starts
    for rank in range(1, world_size):
        target = total * rank // world_size
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
        for rank in range(world_size)
    ]


def _between(
    names: Sequence[str], rows: Sequence[int], begin: tuple[int, int], end: tuple[int, int]
) -> dict[str, range]:
    assigned: dict[str, range] = {}
    for index in range(begin[0], min(end[0] + 1, len(names))):
        start = begin[1] if index == begin[0] else 0
        stop = end[1] if index == end[0] else rows[index]
        # an empty tensor has no rows but still exactly one owner: the rank whose part contains its end
        if start < stop or (rows[index] == 0 and index < end[0]):
            assigned[names[index]] = range(start, stop)
    return assigned


def _num_rows(shape: Sequence[int]) -> int:
    return shape[0] if shape else 1
