"""Who writes what: the tensors all ranks share are cut into pieces and dealt out so that every shard is about as big.

What only one rank has, its own tensors and its blocks of tensors spread over ranks, it writes itself. Pure functions of
names, shapes and dtypes: all ranks come to the same result without talking, and a result holds for every save until a
tensor is added or changes its shape. Nothing here reads or writes a file.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import xxhash
from torch import Tensor

from unisono.checkpoint.safetensors_format import build_header, num_bytes
from unisono.parallel.sharding import TensorShard

# A tensor smaller than this is never cut: its neighbour's shard may as well be that much bigger.
_SMALLEST_CUT_BYTES = 2**20

Table = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # name -> (shape, dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPiece:
    """What this rank writes of a tensor: ``extent`` elements from ``offset`` on, of ``shape`` in all.

    It lies in bytes ``[begin, end)`` of the rank's file, under ``key``. ``index`` selects it from the tensor that the rank holds.
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
    replicated: Table, own: Table, sharded: Mapping[str, tuple[Tensor, TensorShard]], *, rank: int, world: int
) -> ShardContents:
    """The file of ``rank``: its share of the replicated tensors, all of its own, and its parts of the sharded ones."""
    rows = assign_shards({name: (shape, dtype.itemsize) for name, (shape, dtype) in replicated.items()}, world)[rank]
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
    spread = {name: (shard.global_shape, tensor.dtype) for name, (tensor, shard) in sharded.items()}
    described = [
        sorted((name, list(shape), str(dtype)) for name, (shape, dtype) in table.items())
        for table in (replicated, spread)
    ]
    return ShardContents(
        pieces=placed,
        header=header,
        size=placed[-1].end if placed else len(header),
        spread=spread,
        fingerprint=xxhash.xxh3_128_hexdigest(json.dumps(described).encode()),
        total_bytes=sum(num_bytes(dtype, shape) for shape, dtype in (*replicated.values(), *spread.values()))
        + world * sum(num_bytes(dtype, shape) for shape, dtype in own.values()),
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
    """The pieces as they were passed, right or wrong: whether those of all ranks fit together is seen when all are known."""
    shape = shard.global_shape
    if 0 in tensor.shape:
        if 0 in shape and rank == 0:  # a tensor without elements has one owner too
            yield TensorPiece(name=name, shape=shape, dtype=tensor.dtype, offset=(0,) * len(shape), extent=shape)
    elif not shard.replica:
        for index, offset in shard.blocks():
            extent = tuple(tensor[index].shape)
            yield TensorPiece(name=name, shape=shape, dtype=tensor.dtype, offset=offset, extent=extent, index=index)


def _keys(pieces: Sequence[TensorPiece]) -> list[str]:
    """A name inside the file for each, no two alike: the tensor's own where it is whole, else with ranges of its dims."""
    wholes = {piece.name for piece in pieces if piece.extent == piece.shape}
    keys: list[str] = []
    for piece in pieces:
        key = piece.name
        if piece.extent != piece.shape:
            ranges = [f"{begin}:{begin + size}" for begin, size in zip(piece.offset, piece.extent, strict=False)]
            while len(ranges) > 1 and piece.extent[len(ranges) - 1 :] == piece.shape[len(ranges) - 1 :]:
                ranges.pop()  # the last dims go unsaid where they are whole
            key += f"[{','.join(ranges)}]"
            while key in wholes:  # another tensor is called that
                key += "'"
        keys.append(key)
    return keys


def assign_shards(shapes: Mapping[str, tuple[Sequence[int], int]], world: int) -> list[dict[str, range]]:
    """Cut tensors ``{name: (shape, bytes per element)}`` into the rows along dim 0 that each rank writes, about equal in bytes.

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


def _between(
    names: Sequence[str], rows: Sequence[int], begin: tuple[int, int], end: tuple[int, int]
) -> dict[str, range]:
    assigned: dict[str, range] = {}
    for index in range(begin[0], min(end[0] + 1, len(names))):
        start = begin[1] if index == begin[0] else 0
        stop = end[1] if index == end[0] else rows[index]
        # an empty tensor has no rows, and still exactly one owner: whoever passes its end
        if start < stop or (rows[index] == 0 and index < end[0]):
            assigned[names[index]] = range(start, stop)
    return assigned


def _num_rows(shape: Sequence[int]) -> int:
    return shape[0] if shape else 1


def _num_bytes(shape: Sequence[int], itemsize: int) -> int:
    size = itemsize
    for extent in shape:
        size *= extent
    return size
