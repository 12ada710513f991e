"""The sidecar: a memory-mapped index file beside a raw payload file, with the payload's description and its parts' offsets.

Layout, everything little-endian:

    offset  bytes  what
    0       8      magic ``unisidx\\n``
    8       4      version (1)
    12      4      bytes of the JSON head, at most 1 MiB
    16      8      bytes of the whole sidecar file
    24      16     xxh3-128 of bytes 0..24 followed by the JSON head (canonical, big-endian digest)
    40      …      JSON head, then zeros up to a multiple of 64
    …       …      columns, each a raw array at a multiple of 64

The head describes the payload (bytes, dtype, xxh3-128) and every column (dtype, count, offset, xxh3-128), and holds the writer's
own facts. Opening is O(1) in the number of records: it checks magic, sizes and the head's digest. ``verify_sidecar`` reads
everything. This module does not interpret the payload.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from unisono.errors import DataError, Problem
from unisono.sanitize import quoted, shorten
from unisono.storage.files import open_regular, write_atomically
from unisono.storage.limits import MAX_SIDECAR_HEAD_BYTES, check_count, decode_json

MAGIC: Final = b"unisidx\n"
VERSION: Final = 1
Facts = TypeVar("Facts")
_FIXED: Final = struct.Struct("<8sIIQ16s")
_ALIGN: Final = 64
COLUMN_DTYPES: Final = ("|u1", "<u2", "<u4", "<u8", "<i8", "<f4", "<f8")


@dataclass(frozen=True, kw_only=True, slots=True)
class PayloadInfo:
    """Size, dtype and digest of the payload file."""

    bytes: int
    dtype: str
    xxh3_128: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnInfo:
    """One array inside the sidecar."""

    dtype: str
    count: int
    offset: int
    xxh3_128: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SidecarHeader:
    """The JSON head of a sidecar; the field names are stored."""

    kind: str
    payload: PayloadInfo
    columns: dict[str, ColumnInfo]
    facts: dict[str, str | int]


_HEADER: Final = msgspec.json.Decoder(SidecarHeader)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sidecar:
    """An opened sidecar. ``columns`` are read-only views of the mapped file."""

    path: Path
    head: SidecarHeader
    digest: str
    columns: dict[str, NDArray[Any]]


def map_array(path: Path, dtype: str, *, count: int, offset: int = 0) -> NDArray[Any]:
    """``count`` items of a file as a read-only array backed by the page cache."""
    if count == 0:
        return np.empty(0, dtype)
    with open_regular(path) as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(mapped, dtype, count=count, offset=offset)


def write_sidecar(
    path: Path, *, kind: str, payload: PayloadInfo, columns: Mapping[str, NDArray[Any]], facts: Mapping[str, str | int]
) -> None:
    """Write a sidecar atomically. Column dtypes: uint8, uint16, uint32, uint64, int64, float32, float64."""
    stored = {name: np.ascontiguousarray(column, column.dtype.newbyteorder("<")) for name, column in columns.items()}
    table = {
        name: ColumnInfo(dtype=column.dtype.str, count=column.size, offset=(1 << 63) - 1, xxh3_128=digest_of(column))
        for name, column in stored.items()
    }
    # The head holds the offsets, and its length shifts them: lay out with the longest numbers, then pad.
    head_bytes = len(msgspec.json.encode(SidecarHeader(kind=kind, payload=payload, columns=table, facts=dict(facts))))
    end = _aligned(_FIXED.size + head_bytes)
    for name, column in stored.items():
        table[name] = replace(table[name], offset=end)
        end = _aligned(end + column.nbytes)
    encoded = msgspec.json.encode(SidecarHeader(kind=kind, payload=payload, columns=table, facts=dict(facts)))
    head = encoded.ljust(head_bytes)
    fixed = _FIXED.pack(MAGIC, VERSION, head_bytes, end, b"")[:24]
    parts: list[Any] = [fixed, xxhash.xxh3_128(fixed + head).digest(), head, _padding(_FIXED.size + head_bytes)]
    for column in stored.values():
        parts += [_bytes_of(column), _padding(column.nbytes)]
    write_atomically(path, *parts)


def open_sidecar(path: Path, *, kind: str) -> Sidecar:
    """Open a sidecar of ``kind`` without reading payload or columns.

    Raises DataError for a file that is not a sidecar, of another version or kind, truncated, or with a damaged head.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            fixed = file.read(_FIXED.size)
            if len(fixed) < _FIXED.size or not fixed.startswith(MAGIC):
                raise damaged_sidecar_error(path, "it does not begin like a sidecar")
            _, version, head_bytes, total, digest = _FIXED.unpack(fixed)
            if version != VERSION:
                raise damaged_sidecar_error(path, f"it has version {version}, this unisono reads version {VERSION}")
            if total != size or head_bytes > min(MAX_SIDECAR_HEAD_BYTES, size - _FIXED.size):
                raise damaged_sidecar_error(path, f"it has {size} bytes where its head says {total}")
            raw = file.read(head_bytes)
    except OSError as error:
        raise damaged_sidecar_error(path, f"it cannot be read: {error.strerror}") from error
    if xxhash.xxh3_128(fixed[:24] + raw).digest() != digest:
        raise damaged_sidecar_error(path, "its head does not match the head's digest")
    try:
        head: SidecarHeader = decode_json(raw, _HEADER.decode, max_bytes=MAX_SIDECAR_HEAD_BYTES)
        check_count(len(head.columns))
    except ValueError as error:
        raise damaged_sidecar_error(path, f"its head is not understood: {shorten(str(error), 500)}") from error
    if head.kind != kind:
        raise damaged_sidecar_error(path, f"it describes {quoted(head.kind)}, not {kind!r}")
    for name, column in head.columns.items():
        if not _fits(column, size):
            raise damaged_sidecar_error(path, f"column {quoted(name)} lies outside the file or has an unknown dtype")
    if (
        head.payload.dtype not in COLUMN_DTYPES
        or head.payload.bytes < 0
        or head.payload.bytes % np.dtype(head.payload.dtype).itemsize
    ):
        raise damaged_sidecar_error(
            path, f"payload dtype {quoted(head.payload.dtype)} does not fit {head.payload.bytes} bytes"
        )
    content = map_array(path, "|u1", count=size)  # mapped once: a process has few thousand mappings
    columns: dict[str, NDArray[Any]] = {
        name: np.frombuffer(content, column.dtype, count=column.count, offset=column.offset)
        if column.count
        else np.empty(0, column.dtype)
        for name, column in head.columns.items()
    }
    return Sidecar(path=path, head=head, digest=digest.hex(), columns=columns)


def verify_sidecar(sidecar: Sidecar, payload: NDArray[Any]) -> list[Problem]:
    """Read payload and columns and compare their digests; returns an empty list if every byte is as written."""
    problems: list[Problem] = []
    if digest_of(payload) != sidecar.head.payload.xxh3_128:
        problems.append(_damage(sidecar.path, "the payload beside it does not match its digest"))
    problems.extend(
        _damage(sidecar.path, f"column {quoted(name)} does not match its digest") for name in damaged_columns(sidecar)
    )
    return problems


def damaged_columns(sidecar: Sidecar) -> list[str]:
    """Names of the columns that do not match their digests; reads all of them."""
    columns = sidecar.head.columns
    return [name for name, column in sidecar.columns.items() if digest_of(column) != columns[name].xxh3_128]


def read_facts(sidecar: Sidecar, kind: type[Facts]) -> Facts:
    """The writer's facts as a dataclass. Raises DataError for other facts."""
    try:
        return msgspec.convert(sidecar.head.facts, kind)
    except msgspec.ValidationError as error:
        raise damaged_sidecar_error(sidecar.path, f"it has unexpected facts: {shorten(str(error), 500)}") from error


def digest_of(array: NDArray[Any]) -> str:
    """xxh3-128 of an array's bytes, as hex."""
    return xxhash.xxh3_128(_bytes_of(array)).hexdigest()


def view_of(array: NDArray[Any]) -> memoryview:
    """The array's memory as a view; read-only if the array is."""
    return memoryview(cast("Any", array))


def _bytes_of(array: NDArray[Any]) -> memoryview | bytes:
    return view_of(array).cast("B") if array.size else b""


def _fits(column: ColumnInfo, size: int) -> bool:
    if column.dtype not in COLUMN_DTYPES or column.count < 0 or column.offset < 0 or column.offset % _ALIGN:
        return False
    return column.offset + column.count * np.dtype(column.dtype).itemsize <= size


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN


def _padding(offset: int) -> bytes:
    return bytes(_aligned(offset) - offset)


def _damage(path: Path, what: str) -> Problem:
    return Problem(
        given=f"{path}: {what}",
        rule="a shard and its sidecar are read as they were written, every byte",
        consequence="nothing of this shard is used",
        nearest="write the shard again; prepared corpora are rebuilt when their folder is deleted",
    )


def damaged_sidecar_error(path: Path, what: str) -> DataError:
    """The error for a sidecar, or its payload, that is not as it was written."""
    return DataError(_damage(path, what))
