"""The header of a MindRecord file: its fields, pages and row groups.

    0            u64   bytes of the JSON header
    8            …     JSON header (UTF-8), then zeros up to header_size
    header_size  …     page 0, page 1, …: page p starts at header_size + page_size · p; a file without rows ends here

Integers are little-endian unless noted. A blob page is one row group: rows ``start_row_id`` to ``end_row_id``, each u64 length
and payload; its ``page_type_id`` is the number of the group. A raw page has the scalar parts of the rows of one or more groups,
each group from its offset on, each row u64 length and a MessagePack map. Both kinds of pages share one numbering.

Format: MindSpore ``mindrecord``, versions 2.0 and 3.0 (2.0 packs no integers). Not here: values, the index.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from unisono.errors import DataError
from unisono.sanitize import listed, quoted, shorten
from unisono.storage.limits import (
    MAX_MINDRECORD_HEADER_BYTES,
    MAX_MINDRECORD_SHARDS,
    MAX_RECORD_BYTES,
    check_count,
    decode_json,
    num_elements,
)

LENGTH: Final = struct.Struct("<Q")
LENGTH_BYTES: Final = LENGTH.size
VERSION: Final = "3.0"
VERSIONS: Final = ("2.0", VERSION)
BLOB, RAW = "BLOB_DATA", "RAW_DATA"
ARRAY_TYPES: Final = ("int32", "int64", "float32", "float64")
SCALAR_TYPES: Final = (*ARRAY_TYPES, "string")
_INTEGERS: Final = ("int32", "int64")
_COPY: Final = "a whole copy of the file: MindRecord has no checksums from which it could be mended"

# far above any real file, and low enough that page · page_size does not overflow
_Count = Annotated[int, Meta(ge=0, le=1 << 48)]
_Number = Annotated[int, Meta(ge=0, le=1 << 31)]


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldType:
    """A field's type and, for an array, its shape.

    Attributes:
        type: int32, int64, float32, float64, string or bytes; in tables of ``data.convert`` the name of any NumPy dtype
            of numbers.
        shape: Shape of an array, with at most one −1 for a dim of any size. None for a single value.
    """

    type: str
    shape: tuple[int, ...] | None = None


class GroupEntry(Struct, frozen=True):
    """Start of a row group's rows in a raw page."""

    id: _Number
    offset: _Count


class PageEntry(Struct, frozen=True):
    """One page. ``page_size`` counts its used bytes; raw pages have no meaningful row numbers and ``page_type_id``."""

    page_id: _Number
    shard_id: _Number
    page_type: Literal["BLOB_DATA", "RAW_DATA"]
    page_type_id: int
    start_row_id: _Count
    end_row_id: _Count
    row_group_ids: list[GroupEntry] | None
    page_size: _Count


class IndexEntry(Struct, frozen=True):
    """A field with a column in the index."""

    schema_id: int
    index_field: str


class FieldEntry(Struct, frozen=True, omit_defaults=True):
    """A ``FieldType`` in the JSON header, without a shape if it has none."""

    type: str
    shape: tuple[int, ...] | None = None


class SchemaEntry(Struct, frozen=True):
    """The fields, and the names of those in blob pages, in their order there."""

    desc: str
    blob_fields: list[str]
    schema: dict[str, FieldEntry]


class MindRecordHeader(Struct, frozen=True):
    """The JSON header; the field names are stored."""

    header_size: _Count
    index_fields: list[IndexEntry] | None
    page: list[PageEntry] | None
    page_size: _Count
    schema: list[SchemaEntry]
    shard_addresses: list[str]
    shard_id: _Number
    version: str
    statistics: msgspec.Raw = msgspec.Raw(b"null")

    @property
    def blob_fields(self) -> list[str]:
        """Names of the fields in blob pages, in order."""
        return self.schema[0].blob_fields

    @property
    def fields(self) -> dict[str, FieldType]:
        """All fields, in the order of the header."""
        entries = self.schema[0].schema
        return {name: FieldType(type=entry.type, shape=entry.shape) for name, entry in entries.items()}

    @property
    def packed(self) -> bool:
        """Whether integer arrays are packed."""
        return self.version != "2.0" and has_packed_integers(self.fields)

    @property
    def indexed(self) -> list[str]:
        """Names of the fields with a column in the index."""
        return [entry.index_field for entry in self.index_fields or ()]


_HEADER: Final = msgspec.json.Decoder(MindRecordHeader)


def has_packed_integers(fields: dict[str, FieldType]) -> bool:
    """Whether version 3.0 packs integers for these fields: if any is an integer array."""
    return any(field.shape is not None and field.type in _INTEGERS for field in fields.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class RowGroups:
    """Row groups in row order, each array [groups] int64: page numbers, and offsets and ends within the pages.

    The rows of a raw part end at or before ``raw_limits``, those of a blob page exactly at ``blob_ends``.
    """

    rows: NDArray[np.int64]
    ids: NDArray[np.int64]
    blob_pages: NDArray[np.int64]
    blob_ends: NDArray[np.int64]
    raw_pages: NDArray[np.int64]
    raw_offsets: NDArray[np.int64]
    raw_limits: NDArray[np.int64]

    @property
    def total_rows(self) -> int:
        """Rows of the file."""
        return int(self.rows.sum())


def begins_like_header(path: Path, head: bytes) -> bool:
    """Whether the file, whose first nine bytes or more are ``head``, begins with a JSON object behind its length."""
    if len(head) <= LENGTH_BYTES or head[LENGTH_BYTES : LENGTH_BYTES + 1] != b"{":
        return False
    (length,) = LENGTH.unpack_from(head)
    return 1 < length <= min(path.stat().st_size, MAX_MINDRECORD_HEADER_BYTES) - LENGTH_BYTES


def read_header(path: Path, data: memoryview) -> MindRecordHeader:
    """Read and check the header of the file whose bytes are ``data``. Raises DataError naming the offset."""
    if len(data) < LENGTH_BYTES:
        raise damaged_error(path, 0, f"the file ends after {len(data)} bytes, before the length of its header")
    (length,) = LENGTH.unpack_from(data)
    if length > min(len(data), MAX_MINDRECORD_HEADER_BYTES) - LENGTH_BYTES:
        raise damaged_error(path, 0, f"the header says {length} bytes, and the file has {len(data)}")
    try:
        head: MindRecordHeader = decode_json(data[LENGTH_BYTES : LENGTH_BYTES + length], _HEADER.decode)
    except ValueError as error:
        raise damaged_error(path, LENGTH_BYTES, f"the header is not understood: {shorten(str(error), 500)}") from error
    contradiction = _contradiction(head, length)
    if contradiction:
        raise damaged_error(path, LENGTH_BYTES, contradiction)
    return head


def _contradiction(head: MindRecordHeader, length: int) -> str:
    """The first contradiction in a header, or an empty string."""
    if head.version not in VERSIONS:
        return f"the header has version {quoted(head.version)}, and there are {' and '.join(VERSIONS)}"
    if not LENGTH_BYTES + length <= head.header_size <= MAX_MINDRECORD_HEADER_BYTES:
        return f"the header of {LENGTH_BYTES + length} bytes says it has room for {head.header_size}"
    if not 0 < head.page_size <= MAX_RECORD_BYTES:
        return f"the header says pages of {head.page_size} bytes, and they have 1 to {MAX_RECORD_BYTES}"
    if len(head.schema) != 1:
        return f"the header has {len(head.schema)} schemas instead of one"
    if not 0 < len(head.shard_addresses) <= MAX_MINDRECORD_SHARDS:
        return f"the header names {len(head.shard_addresses)} files, and a set has 1 to {MAX_MINDRECORD_SHARDS}"
    fields, blobs = head.fields, head.blob_fields
    if not fields:
        return "the header has no fields"
    if len(set(blobs)) != len(blobs) or not fields.keys() >= set(blobs):
        return (
            f"the header has blob fields [{listed(map(quoted, blobs))}] of the fields [{listed(map(quoted, fields))}]"
        )
    try:
        check_count(len(fields), "fields")
        for field in fields.values():
            num_elements([max(1, dim) for dim in field.shape or ()], 8)
    except ValueError as error:
        return f"the header has {error}"
    for name, field in fields.items():
        if field.shape is not None and (field.shape.count(-1) > 1 or any(dim < 1 and dim != -1 for dim in field.shape)):
            return f"field {quoted(name)} has shape {list(field.shape)}"
        is_known_type = field.type in ((*SCALAR_TYPES, "bytes") if field.shape is None else ARRAY_TYPES)
        if not is_known_type or (name in blobs) != (field.shape is not None or field.type == "bytes"):
            kind = quoted(field.type) + ("" if field.shape is None else " array")
            return f"field {quoted(name)} is a {kind}, which cannot be stored so"
    missing = set(head.indexed) - fields.keys()
    return (
        f"the header has an index of [{listed(map(quoted, sorted(missing)))}], which are no fields" if missing else ""
    )


def read_row_groups(path: Path, head: MindRecordHeader, size: int) -> RowGroups:
    """The row groups of a file of ``size`` bytes. Raises DataError if its pages contradict each other or the size."""
    blobs: list[PageEntry] = []
    raws: dict[int, tuple[int, int, int]] = {}
    for number, page in enumerate(head.page or ()):
        begin = page_offset(head, number)
        if page.page_id != number:
            raise damaged_error(path, begin, f"page {number} is called {page.page_id}")
        if page.page_size > head.page_size:
            raise damaged_error(path, begin, f"page {number} says {page.page_size} used bytes of {head.page_size}")
        if begin + page.page_size > size:
            end = begin + page.page_size
            raise damaged_error(
                path, size, f"the file ends {end - size} bytes before page {number} does, which began at {begin}"
            )
        if page.page_type == BLOB:
            blobs.append(page)
            continue
        entries = page.row_group_ids or []
        limits = [*(entry.offset for entry in entries), page.page_size][1:]
        for entry, limit in zip(entries, limits, strict=True):
            if entry.id in raws or entry.offset > limit:
                raise damaged_error(path, begin, f"page {number} has row group {entry.id} twice, or not in order")
            raws[entry.id] = (number, entry.offset, limit)
    blobs.sort(key=lambda page: page.start_row_id)
    at = 0
    for page in blobs:
        begin = page_offset(head, page.page_id)
        if page.start_row_id != at or page.end_row_id <= at:
            raise damaged_error(
                path, begin, f"page {page.page_id} has rows {page.start_row_id} to {page.end_row_id}, after {at} rows"
            )
        at = page.end_row_id
        max_bytes = min(page.page_size, raws[page.page_type_id][2] if page.page_type_id in raws else -1)
        if (at - page.start_row_id) * LENGTH_BYTES > max_bytes:
            raise damaged_error(
                path, begin, f"page {page.page_id} has no room, or no raw part, for its rows up to {at}"
            )
    if len(raws) != len(blobs):
        raise damaged_error(
            path, LENGTH_BYTES, f"the header has {len(raws)} raw and {len(blobs)} blob parts of row groups"
        )
    parts = np.array([raws[page.page_type_id] for page in blobs], np.int64).reshape(-1, 3)
    pages = np.array(
        [(p.end_row_id - p.start_row_id, p.page_type_id, p.page_id, p.page_size) for p in blobs], np.int64
    ).reshape(-1, 4)
    return RowGroups(
        rows=pages[:, 0],
        ids=pages[:, 1],
        blob_pages=pages[:, 2],
        blob_ends=pages[:, 3],
        raw_pages=parts[:, 0],
        raw_offsets=parts[:, 1],
        raw_limits=parts[:, 2],
    )


def page_offset(head: MindRecordHeader, page: int) -> int:
    """Offset of a page in the file."""
    return head.header_size + head.page_size * page


def damaged_error(path: Path, offset: int, what: str, *, row: int | None = None, nearest: str = _COPY) -> DataError:
    """The error for a damaged file, or a damaged row of it."""
    return DataError(
        given=f"{path}: {'' if row is None else f'row {row} '}at offset {offset}: {what}",
        rule="in a MindRecord file lengths agree with header, index and size, and values with their fields",
        consequence="nothing of the file is used" if row is None else "the row is not used",
        nearest=nearest,
    )
