"""Locate the rows of a file by its SQLite index, checked against its pages, or by reading the pages.

``name.db`` has the tables ``INDEXES``, one line per row, and ``SHARD_NAME``, the name of the data file:

    ROW_ID, PAGE_ID_RAW, PAGE_OFFSET_RAW, PAGE_OFFSET_RAW_END, ROW_GROUP_ID, PAGE_ID_BLOB, PAGE_OFFSET_BLOB,
    PAGE_OFFSET_BLOB_END, then INC_i (0) and <field>_<schema id> for each index field, PRIMARY KEY(ROW_ID, INC_0, …)

Offsets are relative to the page and include the eight bytes of length. The header determines everything but the boundaries
between rows, so each column of the index has one correct value for each row; any other value is damage.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from unisono.data.mindrecord.header import LENGTH, LENGTH_BYTES, MindRecordHeader, RowGroups, damaged_error
from unisono.data.mindrecord.row_values import decode_scalars
from unisono.data.sidecar import view_of
from unisono.errors import DataError
from unisono.storage.files import open_new, require_regular
from unisono.storage.limits import MAX_COLUMNS, MAX_SQL_BYTES, MAX_SQL_STEPS_PER_ROW, SMALL_FILE_SQL_STEPS

_LOG: Final = logging.getLogger("unisono.data")
_COLUMNS: Final = (
    "ROW_ID",
    "ROW_GROUP_ID",
    "PAGE_ID_RAW",
    "PAGE_OFFSET_RAW",
    "PAGE_OFFSET_RAW_END",
    "PAGE_ID_BLOB",
    "PAGE_OFFSET_BLOB",
    "PAGE_OFFSET_BLOB_END",
)
_TABLES: Final = ("INDEXES", "SHARD_NAME")
_STRETCH: Final = (
    32  # rows fetched at once: a text of MAX_SQL_BYTES can stand in each of their columns, without taking space
)
_STEPS: Final = 1 << 16  # of SQLite's machine, between two looks at their limit
_SQL_TYPES: Final = {"string": "TEXT", "int32": "INTEGER", "int64": "INTEGER"}


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLocations:
    """Offsets in the file of the two parts of each row, from their length fields on; each array [rows] int64."""

    raw_begins: NDArray[np.int64]
    raw_ends: NDArray[np.int64]
    blob_begins: NDArray[np.int64]
    blob_ends: NDArray[np.int64]


def index_path(path: Path) -> Path:
    """The path of a file's index, ``name.db`` beside ``name``."""
    return path.with_name(f"{path.name}.db")


def locate_rows(
    path: Path, head: MindRecordHeader, groups: RowGroups, data: memoryview, decrypted: memoryview | None
) -> RowLocations:
    """Locate the rows of a file, by its index if it has one. Raises DataError if index and pages disagree.

    ``decrypted``: the content of the index, if the file on disk is encrypted.
    """
    index_file = index_path(path)
    if not os.path.exists(index_file):
        _LOG.warning("%s is missing: the rows of %s are found by reading its pages", index_file, path.name)
        return scan_rows(path, head, groups, data)
    try:
        require_regular(index_file)  # SQLite would wait for what writes to a pipe
    except OSError as error:
        raise _bad_index(index_file, str(error.strerror)) from error
    try:
        with closing(_open(index_file, decrypted)) as index:
            _confine(index, groups.total_rows)
            names = [row[0] for row in index.execute("SELECT NAME FROM SHARD_NAME LIMIT 2")]
            table = _table(index, groups.total_rows) if names == [path.name] else None
    except (sqlite3.Error, ValueError, TypeError, OverflowError) as error:
        raise _bad_index(index_file, str(error)) from error
    if table is None:
        _LOG.warning(
            "%s is the index of %s: the rows of %s are found by reading its pages", index_file, names, path.name
        )
        return scan_rows(path, head, groups, data)
    return _compared(path, head, groups, table)


def _open(path: Path, decrypted: memoryview | None) -> sqlite3.Connection:
    if decrypted is None:
        return sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1", uri=True)
    connection = sqlite3.connect(":memory:")
    connection.deserialize(decrypted)
    return connection


def _confine(index: sqlite3.Connection, rows: int) -> None:
    """Let the index run no code of its own: refuse everything but plain tables, and limit steps and sizes.

    Raises:
        ValueError: It has a view, a trigger, a virtual table or a computed column, or lacks a table.
        sqlite3.Error: It is damaged, or exceeds a limit.
    """
    index.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_SQL_BYTES)
    index.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    index.setlimit(sqlite3.SQLITE_LIMIT_EXPR_DEPTH, 100)
    steps_left = [SMALL_FILE_SQL_STEPS + MAX_SQL_STEPS_PER_ROW * rows]

    def stop() -> bool:
        steps_left[0] -= _STEPS
        return steps_left[0] < 0

    index.set_progress_handler(stop, _STEPS)
    index.execute("PRAGMA trusted_schema = OFF")
    index.execute("PRAGMA mmap_size = 0")
    entries = index.execute("SELECT type, name, rootpage FROM sqlite_master LIMIT ?", (MAX_COLUMNS,)).fetchall()
    for kind, name, page in entries:
        # a view, a trigger or a virtual table has no page of its own
        if kind not in ("table", "index") or not page:
            raise ValueError(f"it has the {kind} {str(name)[:40]!r}, and an index has plain tables only")
    if sorted(name for kind, name, _ in entries if kind == "table" and name in _TABLES) != list(_TABLES):
        raise ValueError("it has no tables INDEXES and SHARD_NAME")
    for table in _TABLES:
        columns = index.execute(f"PRAGMA table_xinfo({table})").fetchall()
        if computed := [column[1] for column in columns if column[6]]:
            raise ValueError(f"table {table} has the column {computed[0][:40]!r}, which is computed, not stored")


def _table(index: sqlite3.Connection, rows: int) -> NDArray[np.int64]:
    """The index as an array [rows, columns], sorted by row."""
    cursor = index.execute(f"SELECT {', '.join(_COLUMNS)} FROM INDEXES NOT INDEXED LIMIT {rows + 1}")
    chunks = [np.empty((0, len(_COLUMNS)), np.int64)]
    while lines := cursor.fetchmany(_STRETCH):
        try:
            chunks.append(np.array(lines, np.int64))
        except (TypeError, ValueError):
            raise ValueError("it has a location that is no integer") from None
    table = np.concatenate(chunks)
    if len(table) != rows:
        raise ValueError(f"it has {'more' if len(table) > rows else len(table)} rows where the data file has {rows}")
    return table[np.argsort(table[:, 0], kind="stable")]


def _compared(path: Path, head: MindRecordHeader, groups: RowGroups, table: NDArray[np.int64]) -> RowLocations:
    """The locations in the index, after checking each number against the header and the previous row."""
    rows, ids, raw_pages, raw_begins, raw_ends, blob_pages, blob_begins, blob_ends = table.T
    counts = groups.rows
    firsts = np.cumsum(counts) - counts
    lasts = firsts + counts - 1

    def following(ends: NDArray[np.int64], begins: Any) -> NDArray[np.int64]:
        expected = np.append(0, ends[:-1])[: len(ends)]
        expected[firsts] = begins
        return expected

    # numbers first, then lengths
    good = rows == np.arange(len(table))
    good &= (ids == np.repeat(groups.ids, counts)) & (raw_pages == np.repeat(groups.raw_pages, counts))
    good &= (blob_pages == np.repeat(groups.blob_pages, counts)) & (
        raw_begins == following(raw_ends, groups.raw_offsets)
    )
    good &= (blob_begins == following(blob_ends, 0)) & (raw_ends - raw_begins >= LENGTH_BYTES)
    good &= (blob_ends - blob_begins >= LENGTH_BYTES) & (raw_ends <= np.repeat(groups.raw_limits, counts))
    good &= blob_ends <= np.repeat(groups.blob_ends, counts)
    good[lasts] &= blob_ends[lasts] == groups.blob_ends
    raw_bases = head.header_size + head.page_size * np.repeat(groups.raw_pages, counts)
    blob_bases = head.header_size + head.page_size * np.repeat(groups.blob_pages, counts)
    if not good.all():
        row = int(np.argmin(good))
        contradiction = f"{index_path(path).name} contradicts the header and the rows before about the row's location"
        raise damaged_error(path, int(blob_bases[row]), contradiction, row=row)
    return RowLocations(
        raw_begins=raw_bases + raw_begins,
        raw_ends=raw_bases + raw_ends,
        blob_begins=blob_bases + blob_begins,
        blob_ends=blob_bases + blob_ends,
    )


def scan_rows(path: Path, head: MindRecordHeader, groups: RowGroups, data: memoryview) -> RowLocations:
    """Locate the rows by the lengths in the pages. Raises DataError at the first length that leads out of its page."""
    count = groups.total_rows
    places = RowLocations(
        raw_begins=np.empty(count, np.int64),
        raw_ends=np.empty(count, np.int64),
        blob_begins=np.empty(count, np.int64),
        blob_ends=np.empty(count, np.int64),
    )
    raw_begins, raw_ends = view_of(places.raw_begins), view_of(places.raw_ends)
    blob_begins, blob_ends = view_of(places.blob_begins), view_of(places.blob_ends)
    row = 0
    for number, rows in enumerate(groups.rows.tolist()):
        raw_base = head.header_size + head.page_size * int(groups.raw_pages[number])
        blob_base = head.header_size + head.page_size * int(groups.blob_pages[number])
        raw, raw_limit = raw_base + int(groups.raw_offsets[number]), raw_base + int(groups.raw_limits[number])
        blob, blob_limit = blob_base, blob_base + int(groups.blob_ends[number])
        for _ in range(rows):
            raw_begins[row], blob_begins[row] = raw, blob
            raw = _part_end(path, data, raw, raw_limit, row)
            blob = _part_end(path, data, blob, blob_limit, row)
            raw_ends[row], blob_ends[row] = raw, blob
            row += 1
        if blob != blob_limit:
            raise damaged_error(path, blob, f"{blob_limit - blob} bytes behind the last row of the page", row=row - 1)
    return places


def _part_end(path: Path, data: memoryview, at: int, limit: int, row: int) -> int:
    """End of the row part that starts at ``at``. Raises DataError."""
    if at + LENGTH_BYTES > limit:
        raise damaged_error(path, at, f"its page ends at {limit}, before its length", row=row)
    (length,) = LENGTH.unpack_from(data, at)
    if length > limit - at - LENGTH_BYTES:
        raise damaged_error(path, at, f"it says {length} bytes, and its page has {limit - at - LENGTH_BYTES}", row=row)
    return at + LENGTH_BYTES + length


def write_index(
    target: Path, name: str, head: MindRecordHeader, groups: RowGroups, places: RowLocations, data: memoryview
) -> None:
    """Write and sync the index of the data file ``name``, whose bytes are ``data``, to ``target``."""
    fields = head.fields
    indexed = {field: fields[field] for field in head.indexed}
    extra = [
        (f"INC_{number}", f"{field}_0", _SQL_TYPES.get(kind.type, "NUMERIC"))
        for number, (field, kind) in enumerate(indexed.items())
    ]
    columns = [f"{column} INT NOT NULL" for column in _COLUMNS]
    columns += [part for inc, column, kind in extra for part in (f"{inc} INT", f"{column} {kind}")]
    key = ", ".join(["ROW_ID", *(inc for inc, *_ in extra)])
    names = [*_COLUMNS, *(part for inc, column, _ in extra for part in (inc, column))]
    open_new(target).close()  # no link, and with our permissions
    with closing(
        sqlite3.connect(f"file:{quote(str(target.absolute()))}?mode=rw", isolation_level=None, uri=True)
    ) as index:
        # the file is new and renamed at the end: no rollback is needed
        index.execute("PRAGMA journal_mode = OFF")
        index.execute("PRAGMA synchronous = OFF")
        index.execute("BEGIN")
        index.execute(f"CREATE TABLE INDEXES({', '.join(columns)}, PRIMARY KEY({key}))")
        index.execute("CREATE TABLE SHARD_NAME(NAME TEXT NOT NULL)")
        index.execute("INSERT INTO SHARD_NAME (NAME) VALUES (?)", (name,))
        index.executemany(
            f"INSERT INTO INDEXES ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})",
            _lines(head, groups, places, data, indexed),
        )
        index.execute("COMMIT")
    handle = os.open(target, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _lines(
    head: MindRecordHeader, groups: RowGroups, places: RowLocations, data: memoryview, indexed: Any
) -> Iterator[list[Any]]:
    row = 0
    for number, rows in enumerate(groups.rows.tolist()):
        group, raw_page, blob_page = (int(ids[number]) for ids in (groups.ids, groups.raw_pages, groups.blob_pages))
        raw_base = head.header_size + head.page_size * raw_page
        blob_base = head.header_size + head.page_size * blob_page
        for at in range(row, row + rows):
            begin, end = int(places.raw_begins[at]), int(places.raw_ends[at])
            values = decode_scalars(indexed, data[begin + LENGTH_BYTES : end], check=True) if indexed else {}
            yield [
                *(at, group, raw_page, begin - raw_base, end - raw_base),
                *(blob_page, int(places.blob_begins[at]) - blob_base, int(places.blob_ends[at]) - blob_base),
                *(part for value in values.values() for part in (0, value)),
            ]
        row += rows


def _bad_index(path: Path, what: str) -> DataError:
    return DataError(
        given=f"{path}: {what}",
        rule="an index has a line for each row of its data file, in the tables INDEXES and SHARD_NAME",
        consequence="nothing of the data file is used",
        nearest="remove the index: the rows are then found by reading the pages of the data file",
    )
