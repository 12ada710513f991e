"""Cells of tables, column by column and batch by batch. Unlike rows of ``open_file``, cells may be missing, null or nested."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from unisono.data.convert.formats.csv import column_names, number_kind, read_header, read_records, require_width
from unisono.data.convert.formats.jsonl import object_of_line
from unisono.data.convert.formats.parquet import read_batches
from unisono.data.convert.formats.table import open_source, row_bytes
from unisono.data.convert.table_files import Row, open_file
from unisono.storage.limits import MAX_RECORD_BYTES

KINDS: Final = ("absent", "null", "bool", "int", "float", "string", "bytes", "list", "object", "other")
ABSENT, NULL, BOOL, INT, FLOAT, STRING, BYTES, LIST, OBJECT, OTHER = range(len(KINDS))
BATCH_ROWS: Final = 1 << 14
BATCH_BYTES: Final = 16 << 20
_LARGEST: Final = float(np.finfo(np.float64).max)
_KIND_OF: Final[dict[type, int]] = {
    type(None): NULL,
    bool: BOOL,
    int: INT,
    float: FLOAT,
    str: STRING,
    bytes: BYTES,
    list: LIST,
    np.ndarray: LIST,
    dict: OBJECT,
}
# numbers that need no closer look, each with a comma behind it: whole ones are exact in float64, and none is infinite
_CSV_NUMBERS: Final = re.compile(r"(?:-?(?:0|[1-9][0-9]{0,14})(?:\.[0-9]{0,30})?(?:[eE][+-]?[0-9]{1,2})?,)++")
_CSV_INT: Final = re.compile(r"0|-?[1-9][0-9]*")
_ABSENT: Final = object()


@dataclass(frozen=True, kw_only=True, slots=True)
class Cells:
    """Cells of one column in a batch.

    Attributes:
        kinds: Number in ``KINDS`` of each cell, uint8 [rows].
        numbers: Ints and floats as float64, NaN for all others, [rows]. An int beyond float64 is its largest value.
        values: The cells as Python objects; bytes of JSONL are decoded. Of CSV the text of each cell, which is the string of
            one in quotes and of one that is no number. Of Parquet empty unless the column has strings, bytes or times, or was
            asked for.
        stored: The type that the file declares, as Parquet names it; empty if it declares none.
    """

    kinds: NDArray[np.uint8]
    numbers: NDArray[np.float64]
    values: Sequence[Any]
    stored: str = ""


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive rows of a file.

    Attributes:
        rows: How many.
        columns: Cells by name. Columns that no row of the batch has may be left out.
        size: Bytes that they take in the file, about.
    """

    rows: int
    columns: dict[str, Cells]
    size: int


def read_cells(path: Path, kind: str, wanted: Collection[str] = ()) -> Iterator[Batch]:
    """All rows of a table in bounded memory. A file with columns and without rows is one batch of no rows.

    Args:
        path: The file.
        kind: The suffix that names its format.
        wanted: Columns whose ``values`` are there in any format.

    Raises:
        DataError: The file is damaged.
        ExtraError: pyarrow, for Parquet, is not installed.
    """
    if kind == ".csv":
        return _csv(path)
    if kind == ".parquet":
        return _parquet(path, wanted)
    return _of_rows(
        _json_rows(path) if kind == ".jsonl" else ((row, row_bytes(row)) for row in _table_rows(path, kind))
    )


def _table_rows(path: Path, kind: str) -> Iterator[Row]:
    yield from open_file(path, kind).rows


def _json_rows(path: Path) -> Iterator[tuple[Row, int]]:
    """(object, bytes of its line) of each line."""
    with open_source(path) as source:
        offset = 0
        for number, line in enumerate(iter(lambda: source.readline(MAX_RECORD_BYTES + 1), b""), 1):
            yield object_of_line(line, path, number, offset), len(line)
            offset += len(line)


def _of_rows(rows: Iterator[tuple[Row, int]]) -> Iterator[Batch]:
    batch: list[Row] = []
    size = 0
    for row, count in rows:
        batch.append(row)
        size += count
        if len(batch) == BATCH_ROWS or size >= BATCH_BYTES:
            yield _batch(batch, size)
            batch, size = [], 0
    if batch:
        yield _batch(batch, size)


def _batch(rows: Sequence[Row], size: int) -> Batch:
    names = dict.fromkeys(name for row in rows for name in row)
    cells = {name: cells_of([decoded(row.get(name, _ABSENT)) for row in rows]) for name in names}
    return Batch(len(rows), cells, size)


def decoded(value: Any) -> Any:
    """The bytes of ``{"base64": "…"}``, which is how JSONL has them; any other value itself."""
    if type(value) is dict and value.keys() == {"base64"} and isinstance(value["base64"], str):
        try:
            return base64.b64decode(value["base64"], validate=True)
        except binascii.Error:
            return cast("dict[str, Any]", value)
    return value


def cells_of(values: Sequence[Any]) -> Cells:
    """The cells of Python objects."""
    kinds = np.fromiter((kind_of(value) for value in values), np.uint8, len(values))
    numbers = np.full(len(values), np.nan)
    where = np.flatnonzero((kinds == INT) | (kinds == FLOAT))
    found = [values[row] for row in where.tolist()]
    try:
        numbers[where] = np.array(found, np.float64)
    except OverflowError:
        numbers[where] = [as_float(value) for value in found]
    return Cells(kinds=kinds, numbers=numbers, values=values)


def kind_of(value: Any) -> int:
    """The number in ``KINDS`` of a Python object."""
    return ABSENT if value is _ABSENT else _KIND_OF.get(type(value), OTHER)


def as_float(value: float) -> float:
    """The nearest float64, which is its largest value for an int beyond it."""
    try:
        return float(value)
    except OverflowError:
        return _LARGEST if value > 0 else -_LARGEST


def _csv(path: Path) -> Iterator[Batch]:
    records = read_records(path)
    names = column_names(path, read_header(path, records))
    batch: list[list[tuple[str, bool]]] = []
    size = 0
    is_first = True
    for number, offset, cells, record in records:
        require_width(path, number, offset, cells, names)
        batch.append(cells)
        size += len(record)
        if len(batch) == BATCH_ROWS or size >= BATCH_BYTES:
            yield _csv_batch(names, batch, size)
            batch, size, is_first = [], 0, False
    if batch or is_first:
        yield _csv_batch(names, batch, size)


def _csv_batch(names: Sequence[str], records: Sequence[Sequence[tuple[str, bool]]], size: int) -> Batch:
    columns = zip(*records, strict=True) if records else [()] * len(names)
    return Batch(len(records), {name: _csv_cells(cells) for name, cells in zip(names, columns, strict=True)}, size)


def _csv_cells(cells: Sequence[tuple[str, bool]]) -> Cells:
    """Types are those of the repository's CSV: a cell in quotes is a string, a number has no leading zeros."""
    texts = [text for text, _ in cells]
    joined = ",".join(texts) + ","  # a cell without quotes has no comma
    if texts and not any(in_quotes for _, in_quotes in cells) and _CSV_NUMBERS.fullmatch(joined):
        kinds = np.array([INT if _CSV_INT.fullmatch(text) else FLOAT for text in texts], np.uint8)
    else:
        kinds = np.array([csv_kind(text, in_quotes) for text, in_quotes in cells], np.uint8)
    numbers = np.full(len(texts), np.nan)
    where = np.flatnonzero((kinds == INT) | (kinds == FLOAT))
    numbers[where] = [float(texts[row]) for row in where.tolist()]
    return Cells(kinds=kinds, numbers=numbers, values=texts)


def csv_kind(text: str, in_quotes: bool) -> int:
    """The number in ``KINDS`` of a cell of CSV."""
    if in_quotes:
        return STRING
    return {"int64": INT, "float64": FLOAT}.get(number_kind(text), STRING) if text else NULL


def _int_cells(ints: NDArray[np.integer[Any]], values: Sequence[Any], is_null: NDArray[np.bool_], stored: str) -> Cells:
    kinds = np.where(is_null, NULL, INT).astype(np.uint8)
    numbers = ints.astype(np.float64)
    numbers[is_null] = np.nan
    return Cells(kinds=kinds, numbers=numbers, values=values, stored=stored)


def _parquet(path: Path, wanted: Collection[str]) -> Iterator[Batch]:
    file, batches = read_batches(path)
    if not file.metadata.num_rows:
        empty = file.schema_arrow.empty_table()
        names = empty.column_names
        yield Batch(0, {name: arrow_cells(empty.column(name).combine_chunks(), wanted=False) for name in names}, 0)
    file_bytes = path.stat().st_size
    for batch in batches:
        cells = {name: arrow_cells(batch.column(name), wanted=name in wanted) for name in batch.schema.names}
        yield Batch(batch.num_rows, cells, file_bytes * batch.num_rows // file.metadata.num_rows)


def arrow_cells(column: Any, *, wanted: bool) -> Cells:
    """The cells of an arrow array; ``values`` of numbers and lists only if ``wanted``. Stamps are ints of their unit."""
    stored = str(column.type)
    if is_dictionary(stored):
        column = column.dictionary_decode()
    kind = arrow_kind(str(column.type))
    is_null = column.is_null().to_numpy(zero_copy_only=False)
    if kind == OTHER and str(column.type).startswith("timestamp") and wanted:
        return _with_nulls(kind, column.cast("int64").to_pylist(), is_null, stored)
    if kind == INT:
        ints = column.fill_null(0).to_numpy(zero_copy_only=False)
        return _int_cells(ints, column.to_pylist() if wanted else (), is_null, stored)
    if kind == FLOAT:
        kinds = np.where(is_null, NULL, FLOAT).astype(np.uint8)
        numbers = column.cast("float64").fill_null(np.nan).to_numpy(zero_copy_only=False)
        return Cells(kinds=kinds, numbers=numbers, values=column.to_pylist() if wanted else (), stored=stored)
    return _with_nulls(kind, column.to_pylist() if wanted or kind in (STRING, BYTES) else (), is_null, stored)


def _with_nulls(kind: int, values: Sequence[Any], is_null: NDArray[np.bool_], stored: str) -> Cells:
    kinds = np.where(is_null, NULL, kind).astype(np.uint8)
    return Cells(kinds=kinds, numbers=np.full(len(kinds), np.nan), values=values, stored=stored)


def is_dictionary(stored: str) -> bool:
    """Whether values of a type, by its name, are codes of others."""
    return stored.startswith("dictionary<")


def stored_kind(stored: str) -> str:
    """The kind of a type's values, by its name, as ``KINDS`` has it."""
    return KINDS[
        arrow_kind(stored.removeprefix("dictionary<values=").partition(",")[0] if is_dictionary(stored) else stored)
    ]


def arrow_kind(stored: str) -> int:
    """The kind of a type by its name."""
    if stored in ("null", "bool"):
        return NULL if stored == "null" else BOOL
    if stored.lstrip("u").startswith("int"):
        return INT
    if stored in ("halffloat", "float", "double"):
        return FLOAT
    if stored in ("string", "large_string", "string_view"):
        return STRING
    if "binary" in stored.partition("<")[0]:
        return BYTES
    if "list" in stored.partition("<")[0]:
        return LIST
    return OBJECT if stored.startswith(("struct<", "map<")) else OTHER
