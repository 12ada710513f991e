"""Rows of Parquet files with columns of any type: read from the columns that are needed, and written as pyarrow has them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from unisono.data.convert.formats.parquet import codec_of, read_batches, write_batches
from unisono.data.convert.formats.table import Row, unreadable_error, unwritable_error
from unisono.quality.columns.table_cells import stored_kind
from unisono.quality.file_meter import UNMETERED, FileMeter
from unisono.sanitize import quoted, shorten

_EMPTY: Final[dict[str, Any]] = {"string": "", "bytes": b""}
_NANOSECONDS: Final = ("timestamp[ns", "time64[ns", "duration[ns")
_REASON: Final = 300  # characters


def parquet_rows(path: Path, columns: Sequence[str] | None = None, meter: FileMeter = UNMETERED) -> Iterator[Row]:
    """The rows, with only these columns if given.

    Null is None, a list a list, a struct a dict, and a time in nanoseconds, which Python has none of, an int.

    Args:
        path: The file.
        columns: Only these columns are read. By default all.
        meter: Receives the bytes that are read: each row counts as much as any other.

    Raises:
        DataError: There is no such column, the file is damaged, or Python has no value for one of a column.
    """
    file, batches = read_batches(path, columns)
    yield from meter.shares(_rows(path, batches), file.metadata.num_rows)


def _rows(path: Path, batches: Iterator[Any]) -> Iterator[Row]:
    for batch in batches:
        names = batch.schema.names
        values = [_python_values(path, name, column) for name, column in zip(names, batch.columns, strict=True)]
        for row in zip(*values, strict=True):
            yield dict(zip(names, row, strict=True))


def example_row(path: Path) -> Row:
    """A row that shows the kind of each column, also of a file without rows.

    A column of bytes has its first value that is not empty, another of bytes or strings an empty one, and any other None.

    Raises:
        DataError: The file is damaged.
    """
    schema = read_batches(path)[0].schema_arrow
    row = {field.name: _EMPTY.get(stored_kind(str(field.type))) for field in schema}
    wanted = [name for name, value in row.items() if value == b""]
    if not wanted:
        return row
    for batch in read_batches(path, wanted)[1]:
        for name in wanted:
            row[name] = row[name] or next(filter(None, batch.column(name).to_pylist()), b"")
        if all(row[name] for name in wanted):
            break
    return row


def write_kept_parquet(
    source: Path,
    target: Path,
    kept: NDArray[np.bool_],
    changes: Iterator[bytes | None],
    column: str,
    change: Callable[[Any, bytes], Any],
) -> None:
    """Write the kept rows of a file with its schema and compression, batch by batch: nulls, metadata and all other cells stay.

    Args:
        source: The file.
        target: The new file.
        kept: Of each row, bool [rows].
        changes: Of each kept row, in order, what changes in it, as text in UTF-8; None of one that stays.
        column: The column that changes.
        change: The new value of a cell, by its value before and that text.

    Raises:
        DataError: The file is damaged, or its column cannot hold a new value.
    """
    file, batches = read_batches(source)
    write_batches(target, file.schema_arrow, _kept(source, batches, kept, changes, column, change), codec_of(file))


def _kept(
    source: Path,
    batches: Iterator[Any],
    kept: NDArray[np.bool_],
    changes: Iterator[bytes | None],
    column: str,
    change: Callable[[Any, bytes], Any],
) -> Iterator[Any]:
    """The kept rows of each batch; arguments are those of ``write_kept_parquet``."""
    pa: Any = importlib.import_module("pyarrow")
    begin = 0
    for batch in batches:
        is_kept = kept[begin : begin + batch.num_rows]
        begin += batch.num_rows
        rows = batch if is_kept.all() else _filtered(pa, batch, is_kept)
        texts = list(islice(changes, rows.num_rows))
        if any(text is not None for text in texts):
            values = rows.column(column).to_pylist()
            new = [value if text is None else change(value, text) for value, text in zip(values, texts, strict=True)]
            try:
                array = pa.array(new, rows.column(column).type)
            except (pa.ArrowException, OverflowError) as error:
                raise unwritable_error(
                    f"{source}: column {quoted(column)} with new values: {shorten(str(error), _REASON)}",
                    f"a column keeps its type, here {shorten(str(rows.column(column).type), _REASON)}",
                    "the file with a wider type of this column",
                ) from error
            arrays = [array if name == column else rows.column(name) for name in rows.schema.names]
            rows = pa.RecordBatch.from_arrays(arrays, schema=rows.schema)
        yield rows


def _filtered(pa: Any, batch: Any, is_kept: NDArray[np.bool_]) -> Any:
    try:
        return batch.filter(pa.array(is_kept))
    except pa.ArrowNotImplementedError:  # of views, such as string_view
        edges = np.flatnonzero(np.diff(np.concatenate(([0], is_kept.astype(np.int8), [0]))))
        runs = [batch.slice(begin, end - begin) for begin, end in edges.reshape(-1, 2).tolist()] or [batch.slice(0, 0)]
        columns = [pa.concat_arrays([run.column(number) for run in runs]) for number in range(batch.num_columns)]
        return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def _python_values(path: Path, name: str, column: Any) -> list[Any]:
    if str(column.type).startswith(_NANOSECONDS):
        column = column.cast("int64")
    try:
        return column.to_pylist()
    except (ValueError, OverflowError, NotImplementedError) as error:
        raise unreadable_error(
            f"{path}: column {quoted(name)} of type {shorten(str(column.type), _REASON)}: {shorten(str(error), _REASON)}",
            "rows have values as Python has them: times to the microsecond, years up to 9999",
            "--column with another column, or a copy of the file without this one",
        ) from error
