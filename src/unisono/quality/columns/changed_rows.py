"""Write tables of the formats without nulls with changed cells: records, MindRecord and webdataset's archives."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from unisono.data.convert.formats.table import Row, Table, describe_value
from unisono.data.convert.table_files import open_file, write_table
from unisono.data.mindrecord import FieldType
from unisono.errors import DataError
from unisono.quality.columns.file_change import FileChange
from unisono.sanitize import quoted

_TYPES: Final = {"int": "int64", "float": "float64", "string": "string"}
_INDEXED: Final = ".mindrecord"
_RULES: Final = ("records and archives have no null, and only floats can be NaN", "MindRecord has neither in its index")
_NEAREST: Final = "unisono data convert, to .parquet, .jsonl or .csv, which have rows without a value"


def write_rows(change: FileChange, path: Path) -> None:
    """Write the rows of a file. A masked float is NaN.

    Raises:
        DataError: A masked value is no float, a column is missing in the file, or a value cannot be cast without loss.
    """
    table = open_file(change.file.path, change.file.kind)
    write_table(path, replace(table, rows=_changed(change, table), schema=_schema(change, table)), is_shard=True)


def require_columns(change: FileChange, columns: set[str]) -> None:
    """Raise DataError if a file of a format without nulls lacks a column of the schema. ``columns`` are those it has."""
    for name in change.targets:
        if name not in columns:
            raise DataError(
                given=f"{change.file.path}, which has no column {quoted(name)}",
                rule=f"a column that is added has no values, and a row of {change.file.kind} has a value in each column",
                consequence="nothing was written",
                nearest=_NEAREST,
            )


def _changed(change: FileChange, table: Table) -> Iterator[Row]:
    for number, (row, masked) in enumerate(zip(table.rows, change.masked_columns(), strict=True)):
        new = change.recast_row(number, row, masked, {})
        if new is None:
            continue
        if name := next((name for name, value in new.items() if value is None), ""):
            raise _no_null(change, number, row, name)
        for name in masked:
            value = row[name]
            if not isinstance(value, float) or change.file.kind == _INDEXED:
                raise _no_null(change, number, row, name)
            change.mask(number, name, repr(value))
            new[name] = math.nan
        yield {**row, **new}


def _no_null(change: FileChange, number: int, row: Row, name: str) -> DataError:
    return DataError(
        given=f"{change.file.path}: row {number}, column {quoted(name)}: {describe_value(row[name])}",
        rule="no value is null, or NaN: " + _RULES[change.file.kind == _INDEXED],
        consequence="nothing was written",
        nearest=_NEAREST,
    )


def _schema(change: FileChange, table: Table) -> dict[str, FieldType] | None:
    if table.schema is None:
        return None
    cast = {
        name: FieldType(type=_TYPES[change.targets[name].kind])
        for name in change.deviating
        if change.targets[name].kind in _TYPES and table.schema[name].type != _TYPES[change.targets[name].kind]
    }
    return {**table.schema, **cast}
