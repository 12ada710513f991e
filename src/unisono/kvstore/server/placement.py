"""The placement of chunks on servers: a pure function of names, shapes, dtypes and the number of servers.

Keys are split into chunks of at most 4 MiB, so that a large tensor is divided among servers and frames stay small. Chunks
are whole codec blocks and, where that fits, whole rows, so that rows can be pushed and pulled alone. Chunks go largest
first to the least loaded server (longest-processing-time-first, Graham 1969): loads differ by at most one chunk. (MXNet
hashes small tensors and splits large ones evenly over all servers.)
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from unisono.errors import ConfigError, nearest_name
from unisono.kvstore.keys import nothing_sent

CHUNK_BYTES = 4 << 20
BLOCK_ELEMENTS = 1024  # a block of the codecs
# a frame counts the bytes of an entry in 32 bits; how many entries a server takes is in wire.frame.Limits
_MOST_CHUNK_BYTES = (1 << 32) - 1
_MOST_ENTRIES = 4096

ShapeTable = Mapping[str, tuple[Sequence[int], torch.dtype]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Elements ``[start, start + num_elements)`` of a key, in row-major order, held by one server."""

    number: int
    key: str
    start: int
    num_elements: int
    dtype: torch.dtype
    row_elements: int  # 0: the chunk does not consist of whole rows
    server: int

    @property
    def nbytes(self) -> int:
        return self.num_elements * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkPlacement:
    """The server of every element of every key. ``chunks[n]`` has number n; ``hash`` is equal where the placement is."""

    num_servers: int
    chunk_bytes: int
    chunks: tuple[Chunk, ...]
    shapes: Mapping[str, tuple[int, ...]]
    hash: str

    def chunks_of(self, key: str) -> list[Chunk]:
        """A key's chunks in order; empty for an empty tensor. Raises ConfigError for an unknown key."""
        self._known(key)
        return [chunk for chunk in self.chunks if chunk.key == key]

    def chunks_on(self, server: int) -> list[Chunk]:
        """A server's chunks, in order of number."""
        return [chunk for chunk in self.chunks if chunk.server == server]

    def groups(self, keys: Iterable[str], server: int) -> list[list[Chunk]]:
        """A server's chunks of these keys, in runs of one dtype that fit a frame: at most ``chunk_bytes``, or one
        chunk."""
        wanted = set(keys)
        for key in wanted:
            self._known(key)
        groups: list[list[Chunk]] = []
        free_bytes = 0
        for chunk in self.chunks_on(server):
            if chunk.key not in wanted:
                continue
            last = groups[-1] if groups else []
            if not last or last[0].dtype != chunk.dtype or chunk.nbytes > free_bytes or len(last) == _MOST_ENTRIES:
                groups.append([])
                free_bytes = self.chunk_bytes
            groups[-1].append(chunk)
            free_bytes -= chunk.nbytes
        return groups

    def _known(self, key: str) -> None:
        if key not in self.shapes:
            rule = "keys are those of the table that the store started with"
            raise nothing_sent(f"key {key!r}", rule, nearest_name(key, self.shapes))


def place_chunks(
    table: ShapeTable, servers: int, chunk_bytes: int = CHUNK_BYTES, whole: Collection[str] = ()
) -> ChunkPlacement:
    """Place ``table`` (shape and dtype by key) on ``servers`` servers. Keys in ``whole`` stay one chunk, as LAMB and
    LARS need for their norms.

    Raises ConfigError for a chunk of 4 GiB or more, and without a server.
    """
    if servers < 1 or chunk_bytes < 8 * BLOCK_ELEMENTS:
        raise ConfigError(
            given=f"{servers} servers, chunks of {chunk_bytes} bytes",
            rule=f"there is at least one server, and a chunk holds at least a block of {BLOCK_ELEMENTS} elements",
            consequence="there is no place for the parameters",
            nearest=f"servers = 1, chunks of {CHUNK_BYTES} bytes",
        )
    pieces = [
        (key, start, elements, dtype, row)
        for key, (shape, dtype) in sorted(table.items())
        for start, elements, row in _cuts(key, shape, dtype, chunk_bytes, key in whole)
    ]
    sizes = [elements * dtype.itemsize for _, _, elements, dtype, _ in pieces]
    home = [0] * len(pieces)
    loads = [(0, server) for server in range(servers)]
    for number in sorted(range(len(pieces)), key=lambda n: (-sizes[n], n)):
        load, home[number] = loads[0]
        heapq.heapreplace(loads, (load + sizes[number], home[number]))
    chunks = tuple(
        Chunk(number=n, key=key, start=start, num_elements=elements, dtype=dtype, row_elements=row, server=home[n])
        for n, (key, start, elements, dtype, row) in enumerate(pieces)
    )
    facts = [servers, [[c.key, c.start, c.num_elements, str(c.dtype), c.server] for c in chunks], describe_table(table)]
    return ChunkPlacement(
        num_servers=servers,
        chunk_bytes=chunk_bytes,
        chunks=chunks,
        shapes={key: tuple(shape) for key, (shape, _) in sorted(table.items())},
        hash=hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16],
    )


def describe_table(table: ShapeTable) -> dict[str, str]:
    """The table as text, to compare and to print: ``{"w": "[4, 8] torch.float32"}``."""
    return {key: f"{list(shape)} {dtype}" for key, (shape, dtype) in sorted(table.items())}


def _cuts(
    key: str, shape: Sequence[int], dtype: torch.dtype, chunk_bytes: int, whole: bool
) -> Iterable[tuple[int, int, int]]:
    """``(start, elements, row_elements)`` of each chunk of a key."""
    total, row = math.prod(shape), math.prod(shape[1:]) if shape else 0
    most = chunk_bytes // dtype.itemsize
    unit = math.lcm(BLOCK_ELEMENTS, row) if row else BLOCK_ELEMENTS
    by_rows = 0 < unit <= most
    unit = unit if by_rows else BLOCK_ELEMENTS
    size = total if whole or total <= most else most // unit * unit
    if size * dtype.itemsize > _MOST_CHUNK_BYTES:
        raise ConfigError(
            given=f"key {key!r} has {total * dtype.itemsize} bytes and stays whole",
            rule="a chunk has less than 4 GiB",
            consequence="it would not fit a frame",
            nearest="an optimizer without layer-wise norms (adamw, sgd), so that keys can be cut",
        )
    in_rows = row if by_rows or size == total else 0
    return [(start, min(size, total - start), in_rows) for start in range(0, total, size)] if total else []
