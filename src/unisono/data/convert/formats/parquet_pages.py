"""How much memory a Parquet file can take, from its footer and the headers of its pages, before pyarrow reads it.

pyarrow allocates what a page header says, and decodes as many rows at once as it is asked for. A few bytes can hold a page of
2 GiB, 10⁹ equal values, or a list of them in one row. So the sizes are checked here, and the rows read at once are chosen such
that they fit ``BATCH_BYTES``. Functions raise ValueError; the caller adds the file.

    file    PAR1, pages, FileMetaData, u32 its length, PAR1
    page    PageHeader, then compressed_page_size bytes

Format: Apache Parquet, ``parquet.thrift``. pyarrow's own metadata objects end the process for some damaged footers.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Final

from unisono.data.convert.formats.thrift import BINARY, I32, I64, Struct, ThriftReader, Wanted
from unisono.sanitize import quoted
from unisono.storage.limits import (
    MAX_EXPANSION,
    MAX_JSON_BYTES,
    MAX_JSON_DEPTH,
    MAX_PARQUET_HEADER_BYTES,
    MAX_RECORD_BYTES,
    MAX_ROWS_PER_BYTE,
    SMALL_FILE_BYTES,
    SMALL_FILE_ROWS,
    LimitError,
)

BATCH_ROWS: Final = 256
BATCH_BYTES: Final = 32 << 20  # of the values of a column that are decoded at once, where one row has less
# schema elements: type, type_length, repetition, name, children; num_rows; row groups: columns, num_rows
_COLUMN: Final[Wanted] = {3: {1: I32, 4: I32, 5: I64, 7: I64, 9: I64, 11: I64}}
_FOOTER: Final[Wanted] = {2: [{1: I32, 2: I32, 3: I32, 4: BINARY, 5: I32}], 3: I64, 4: [{1: [_COLUMN], 3: I64}]}
_PAGE: Final[Wanted] = {1: I32, 2: I32, 3: I32, 5: {1: I32, 2: I32}, 7: {1: I32}, 8: {1: I32, 4: I32}}
_WIDTHS: Final = (1, 4, 8, 12, 4, 8)  # bytes of a value, by physical type
_BYTE_ARRAY, _FIXED_BYTES = 6, 7
_REPEATED: Final = 2
_CODECS: Final = ("", "snappy", "gzip", "lzo", "brotli", "lz4_hadoop", "zstd", "lz4_raw")
_DICTIONARY_PAGE: Final = 2
_PART_OF_PAGE: Final = {0: 5, _DICTIONARY_PAGE: 7, 3: 8}  # by its type: the field with its values and encoding
_DICTIONARY_CODES: Final = (2, 8)  # encodings: PLAIN_DICTIONARY, RLE_DICTIONARY
_DELTA_BYTE_ARRAY: Final = 7  # each value shares a prefix with the one before
_LENGTH: Final = struct.Struct("<I")
_HEADER_BYTES: Final = 1 << 12  # read at first for a page's header


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A column of values: the top-level column it belongs to, its type, and whether a row has a list of them."""

    column: str
    kind: int
    width: int | None  # bytes of a value; None for texts
    is_list: bool


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The values of a leaf in one row group."""

    leaf: _Leaf
    codec: int
    values: int
    begin: int
    end: int


@dataclass(slots=True)
class _Pages:
    """What the page headers of a chunk say."""

    values: int = 0
    plain_bytes: list[int] = field(default_factory=list[int])  # of each data page without dictionary codes
    plain_values: list[int] = field(default_factory=list[int])
    coded_values: int = 0
    delta: bool = False
    dictionary: tuple[int, int, int] | None = None  # offset, compressed and uncompressed bytes


class ParquetLimits:
    """The footer of the file behind the descriptor ``fd``, checked. Raises ValueError. Does not keep the descriptor."""

    def __init__(self, fd: int) -> None:
        self._size = os.fstat(fd).st_size
        length, magic = struct.unpack("<I4s", _read(fd, 8, max(0, self._size - 8)))
        if magic != b"PAR1" or not 0 < length <= min(self._size - 12, MAX_JSON_BYTES):
            raise ValueError(f"it does not end with the length of its footer and PAR1, but with {length} and {magic!r}")
        try:
            footer = ThriftReader(_read(fd, length, self._size - 8 - length)).struct(_FOOTER)
            rows = footer[3]
            leaves = _leaves(footer[2])
            self._groups = [(group[3], _chunks(group, leaves, self._size)) for group in footer[4]]
        except (IndexError, KeyError, TypeError) as error:
            raise ValueError(f"its footer lacks what Parquet needs ({type(error).__name__}: {error})") from error
        most = SMALL_FILE_ROWS + MAX_ROWS_PER_BYTE * self._size
        if not 0 <= rows <= most or any(not 0 <= count <= rows for count, _ in self._groups):
            raise LimitError(
                f"its footer says {rows:,} rows, where a file of {self._size:,} bytes has at most {most:,}"
            )

    def rows_at_once(self, pa: Any, fd: int, group: int, columns: Collection[str]) -> int:
        """Rows of a row group of the file to read at once, of these top-level columns. ``pa`` is the module pyarrow.

        Raises:
            LimitError: A page, or a row, can be larger than the limits allow for a file of this size.
            ValueError: The pages are damaged.
        """
        num_rows, chunks = self._groups[group]
        rows = BATCH_ROWS
        for chunk in chunks:
            if chunk.leaf.column in columns:
                try:
                    rows = min(rows, self._rows_of_chunk(pa, fd, chunk, num_rows))
                except ValueError as error:  # LimitError among them
                    raise type(error)(f"row group {group}, column {quoted(chunk.leaf.column)}: {error}") from error
        return rows

    def _rows_of_chunk(self, pa: Any, fd: int, chunk: _Chunk, num_rows: int) -> int:
        pages, width = _read_pages(fd, chunk), chunk.leaf.width
        largest = max(pages.plain_bytes, default=0)
        code_bytes = pages.dictionary[2] if pages.dictionary is not None and pages.coded_values else 0
        if width is None and 2 * BATCH_ROWS * code_bytes > BATCH_BYTES:
            code_bytes = _longest(pa, fd, chunk, pages)
        if not chunk.leaf.is_list:
            if width is not None:
                return _fitting(lambda count: count * width)
            if pages.delta:
                return _fitting(lambda count: count * (code_bytes + largest))
            # the last page may have few values
            fewest = max(1, min(pages.plain_values[:-1], default=BATCH_ROWS))
            return _fitting(lambda count: count * code_bytes + (largest * (2 - -count // fewest) if largest else 0))
        # how long the list of a row is, only decoding it shows
        if width is not None:
            total = pages.values * width
        else:
            total = pages.coded_values * code_bytes + sum(pages.plain_bytes)
            total += sum(pages.plain_values) * largest if pages.delta else 0
        if total > max(MAX_RECORD_BYTES, MAX_EXPANSION * self._size):
            raise LimitError(
                f"its lists may have {total:,} bytes in one row, where a row group has at most {MAX_RECORD_BYTES:,}, or "
                f"{MAX_EXPANSION} times the {self._size:,} bytes of the file"
            )
        return _fitting(lambda count: count * total // max(1, num_rows))


def _read_pages(fd: int, chunk: _Chunk) -> _Pages:
    """Read all page headers of a chunk. Raises ValueError for sizes beyond the chunk, or the limits."""
    pages, at = _Pages(), chunk.begin
    while at < chunk.end and pages.values < chunk.values:
        header, at = _header(fd, at, chunk.end)
        kind, unpacked, packed = header.get(1, -1), header.get(2, -1), header.get(3, -1)
        if not 0 <= packed <= chunk.end - at or unpacked < 0:
            raise ValueError(f"a page of {packed} bytes at offset {at}, where {chunk.end - at} are left")
        if unpacked > (most := SMALL_FILE_BYTES + MAX_EXPANSION * packed):
            raise LimitError(
                f"a page of {packed:,} bytes says it has {unpacked:,} uncompressed, where {most:,} are the most: "
                f"{MAX_EXPANSION} times, and {SMALL_FILE_BYTES >> 20} MiB"
            )
        part: Struct = header.get(_PART_OF_PAGE.get(kind, 0), {})
        count = part.get(1, -1)
        if kind == _DICTIONARY_PAGE:
            pages.dictionary = (at, packed, unpacked)
        elif kind in _PART_OF_PAGE:
            if not 0 <= count <= chunk.values - pages.values:
                left = chunk.values - pages.values
                raise ValueError(f"a page of {count} values at offset {at}, where {left} are left")
            pages.values += count
            encoding = part.get(4 if kind == 3 else 2)
            if encoding in _DICTIONARY_CODES:
                pages.coded_values += count
            else:
                pages.plain_bytes.append(unpacked)
                pages.plain_values.append(count)
                pages.delta |= encoding == _DELTA_BYTE_ARRAY
        at += packed
    return pages


def _header(fd: int, at: int, stop: int) -> tuple[Struct, int]:
    """The header of the page at offset ``at``, and the offset behind it."""
    size = _HEADER_BYTES
    while True:
        data = os.pread(fd, min(size, stop - at), at)
        reader = ThriftReader(data)
        try:
            return reader.struct(_PAGE), at + reader.at
        except IndexError:
            if len(data) < size or size >= MAX_PARQUET_HEADER_BYTES:
                raise ValueError(f"the header of the page at offset {at} does not end") from None
        size *= 16


def _longest(pa: Any, fd: int, chunk: _Chunk, pages: _Pages) -> int:
    """Bytes of the longest text in the dictionary of a chunk; if it cannot be read here, of all of it."""
    if pages.dictionary is None:
        return 0
    offset, packed, unpacked = pages.dictionary
    content: Any = os.pread(fd, packed, offset)
    try:
        if chunk.codec:
            content = pa.Codec(_CODECS[chunk.codec]).decompress(content, unpacked)
    except (pa.ArrowException, ValueError, OSError):
        return unpacked
    view, at, longest = memoryview(content), 0, 0
    while at + 4 + longest < len(view):  # what is left can be longer
        (length,) = _LENGTH.unpack_from(view, at)
        at += 4 + length
        if length > longest:
            longest = length
    return min(longest, unpacked)


def _fitting(num_bytes: Callable[[int], int]) -> int:
    """The most rows, up to ``BATCH_ROWS``, whose bytes fit ``BATCH_BYTES``; at least one."""
    rows = BATCH_ROWS
    while rows > 1 and num_bytes(rows) > BATCH_BYTES:
        rows //= 2
    return rows


def _leaves(elements: list[Struct]) -> list[_Leaf]:
    """The columns of values of a schema, which is a tree whose elements stand in depth-first order."""
    leaves: list[_Leaf] = []
    # of each open group: children left, whether it is inside a list, and the top-level column
    open_groups: list[list[Any]] = [[elements[0].get(5, 0), False, ""]]
    for element in elements[1:]:
        while open_groups and open_groups[-1][0] == 0:
            open_groups.pop()
        if not open_groups:
            raise ValueError("its schema has elements that belong to no group")
        open_groups[-1][0] -= 1
        _, is_list, column = open_groups[-1]
        is_list = is_list or element.get(3) == _REPEATED
        column = column or element[4].decode(errors="replace")
        children = element.get(5, 0)
        if children < 0 or len(open_groups) > MAX_JSON_DEPTH:
            raise LimitError(
                f"its schema has {children} children, or more than {MAX_JSON_DEPTH} groups inside each other"
            )
        if children:
            open_groups.append([children, is_list, column])
            continue
        kind = element.get(1, -1)
        if not 0 <= kind <= _FIXED_BYTES:
            raise ValueError(f"its column {quoted(column)} has the unknown type {kind}")
        width = _WIDTHS[kind] if kind < _BYTE_ARRAY else element.get(2, -1) if kind == _FIXED_BYTES else None
        if width is not None and not 0 < width <= MAX_RECORD_BYTES:
            raise LimitError(
                f"its column {quoted(column)} has values of {width:,} bytes, where {MAX_RECORD_BYTES:,} are the most"
            )
        leaves.append(_Leaf(column, kind, width, is_list))
    if any(left for left, *_ in open_groups):
        raise ValueError("its schema ends inside a group")
    return leaves


def _chunks(group: Struct, leaves: list[_Leaf], file_bytes: int) -> list[_Chunk]:
    """The chunks of a row group. Raises ValueError if they are not those of the schema, or lie outside of the file."""
    if len(group[1]) != len(leaves):
        raise ValueError(f"a row group has {len(group[1])} columns, and the schema {len(leaves)}")
    chunks: list[_Chunk] = []
    for entry, leaf in zip(group[1], leaves, strict=True):
        facts: Struct = entry[3]
        values, begin, dictionary = facts[5], facts[9], facts.get(11, 0)
        begin = dictionary if 0 < dictionary < begin else begin
        end = begin + facts[7]
        if facts[1] != leaf.kind or not 0 <= facts[4] < len(_CODECS) or values < 0:
            raise ValueError(f"column {quoted(leaf.column)} has type {facts[1]}, codec {facts[4]} and {values} values")
        is_empty = not group[3] and not values  # pyarrow writes no page then, and 0 as the offset of the first
        if not is_empty and not 0 < begin <= end <= file_bytes:
            raise ValueError(f"column {quoted(leaf.column)} has bytes {begin} to {end}, and the file {file_bytes:,}")
        if not leaf.is_list and values > group[3]:
            raise ValueError(f"column {quoted(leaf.column)} has {values} values for {group[3]} rows")
        chunks.append(_Chunk(leaf, facts[4], values, begin, end))
    return chunks


def _read(fd: int, count: int, offset: int) -> bytes:
    data = os.pread(fd, count, offset)
    if len(data) < count:
        raise ValueError(f"it ends {count - len(data)} bytes too early")
    return data
