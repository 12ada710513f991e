"""``.parquet``: numbers, booleans, strings, bytes, lists of strings, and lists of numbers as arrays, through pyarrow.

An array of shape [-1, 3] is a ``list`` of ``fixed_size_list``\\ s of 3, so all dtypes and dims are preserved. Page checksums are
written, and verified if a file has them; Parquet has none for its footer.
"""

from __future__ import annotations

import importlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np

from unisono.data.convert.formats.parquet_pages import ParquetLimits
from unisono.data.convert.formats.table import (
    OtherField,
    OtherFields,
    Row,
    Table,
    check_columns,
    check_names,
    check_rows,
    infer_schema,
    open_source,
    row_bytes,
    unreadable_error,
    unwritable_error,
)
from unisono.data.mindrecord import FieldType
from unisono.errors import DataError, missing_extra
from unisono.sanitize import quoted, shorten
from unisono.storage.files import new_file
from unisono.storage.limits import (
    MAX_PARQUET_ENTRIES,
    MAX_PARQUET_EXPANSION,
    MAX_PARQUET_TEXT_BYTES,
    SMALL_FILE_PARQUET_BYTES,
    LimitError,
)

_BUFFER_BYTES: Final = 1 << 20  # of a column at once; without it, a row group's whole column
_GROUP_ROWS: Final = 1 << 12
_GROUP_BYTES: Final = 32 << 20
_NAMES: Final = {"bool": "bool", "halffloat": "float16", "float": "float32", "double": "float64"}
_CODEC: Final = "snappy"
_ABSENT: Final = object()
_CODECS: Final = {name: name.lower() for name in ("SNAPPY", "GZIP", "BROTLI", "LZ4", "ZSTD")} | {"UNCOMPRESSED": "none"}
_TEXTS: Final = ("string", "large_string", "string_view")
_BYTES: Final = ("binary", "large_binary", "binary_view")


def read(path: Path, columns: Sequence[str] | None = None, others: OtherFields | None = None) -> Table:
    """The rows, with only these columns if given.

    Columns and cells that no row can hold are an error; if ``others`` is given, it gets these columns, and rows are without them.
    """
    file, limits, pa = _open(path)
    arrow = file.schema_arrow
    if columns is not None:
        check_columns(columns, arrow.names, f"{path}")
    schema: dict[str, FieldType] = {}
    for name in columns or arrow.names:
        try:
            schema[name] = _field(path, name, arrow.field(name).type)
        except DataError as error:
            if others is None:
                raise
            others.setdefault(name, OtherField(str(arrow.field(name).type), error))
    return Table(rows=_rows(path, file, limits, schema, pa, others), schema=schema, count=file.metadata.num_rows)


def read_batches(path: Path, columns: Sequence[str] | None = None) -> tuple[Any, Iterator[Any]]:
    """The file as pyarrow has it, with columns of any type and nulls.

    Args:
        path: The file.
        columns: Only these columns are read. By default all.

    Returns:
        The ``ParquetFile``, and its record batches in bounded memory.

    Raises:
        DataError: There is no such column; or, while batches are read, the file is damaged.
    """
    file, limits, pa = _open(path)
    names = file.schema_arrow.names
    if columns is not None:
        check_columns(columns, names, f"{path}")

    def batches() -> Iterator[Any]:
        at = 0
        try:
            for batch in _batches(path, file, limits, names if columns is None else list(columns), pa):
                try:
                    batch.validate(full=True)
                except pa.ArrowException as error:
                    raise _damaged(path, f"rows {at} to {at + batch.num_rows - 1}: {error}") from error
                yield batch
                at += batch.num_rows
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise _damaged(path, error) from error
        if at != file.metadata.num_rows:
            raise _damaged(path, f"it holds {at} rows, and its footer says {file.metadata.num_rows}")

    return file, batches()


def _open(path: Path) -> tuple[Any, ParquetLimits, Any]:
    pa, pq = _pyarrow()
    try:
        with open_source(path) as source:
            limits = ParquetLimits(source.fileno())
    except LimitError as error:
        raise _too_large(path, error) from error
    except ValueError as error:
        raise _damaged(path, error) from error
    try:
        file = pq.ParquetFile(
            path,
            thrift_string_size_limit=MAX_PARQUET_TEXT_BYTES,
            thrift_container_size_limit=MAX_PARQUET_ENTRIES,
            page_checksum_verification=True,
            pre_buffer=False,
            buffer_size=_BUFFER_BYTES,
        )
        names = file.schema_arrow.names
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _damaged(path, error) from error
    if len(set(names)) != len(names):
        raise unreadable_error(
            f"{path}, two of whose columns have one name", "a field has a name of its own", "another name"
        )
    return file, limits, pa


def _rows(
    path: Path, file: Any, limits: ParquetLimits, schema: dict[str, FieldType], pa: Any, others: OtherFields | None
) -> Iterator[Row]:
    """The rows of a file.

    Args:
        path: The file.
        file: The file, opened.
        limits: Its limits.
        schema: The columns that are read.
        pa: pyarrow.
        others: As of ``read``.
    """
    at = 0
    batches = _batches(path, file, limits, list(schema), pa)
    while True:
        try:
            batch = next(batches, None)
            if batch is None:
                break
            batch.validate(full=True)
            cells: dict[str, list[Any]] = {}
            for name, field in schema.items():
                try:
                    cells[name] = _cells(path, at, name, batch.column(name), field)
                except DataError as error:
                    if others is None:
                        raise
                    others.setdefault(name, OtherField(f"{batch.column(name).type} with nulls or uneven lists", error))
                    cells[name] = _readable_cells(path, at, name, batch.column(name), field)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise _damaged(path, error) from error
        for values in zip(*cells.values(), strict=True) if cells else [()] * batch.num_rows:
            yield {name: value for name, value in zip(cells, values, strict=True) if value is not _ABSENT}
        at += batch.num_rows
    if at != file.metadata.num_rows:
        raise _damaged(path, f"it holds {at} rows, and its footer says {file.metadata.num_rows}")


def _batches(path: Path, file: Any, limits: ParquetLimits, columns: list[str], pa: Any) -> Iterator[Any]:
    """Record batches in bounded memory: each row group's pages are checked before pyarrow reads them."""
    expanded = 0
    with open_source(path) as source:
        size = os.fstat(source.fileno()).st_size
        most = SMALL_FILE_PARQUET_BYTES + MAX_PARQUET_EXPANSION * size
        for group in range(file.metadata.num_row_groups):
            if not file.metadata.row_group(group).num_rows:
                continue
            try:
                rows = limits.rows_at_once(pa, source.fileno(), group, columns)
            except LimitError as error:
                raise _too_large(path, error) from error
            except ValueError as error:
                raise _damaged(path, error) from error
            for batch in file.iter_batches(batch_size=rows, row_groups=[group], columns=columns, use_threads=False):
                expanded += batch.nbytes
                if expanded > most:
                    raise _too_large(
                        path, f"it expands to more than {most:,} bytes, the limit for a file of {size:,} bytes"
                    )
                yield batch


def write(path: Path, table: Table) -> int:
    """Write the rows in row groups of at most 4,096 rows or about 32 MiB; returns the number of rows."""
    pa, pq = _pyarrow()
    fields, rows = infer_schema(table)
    check_names(fields)
    arrow = pa.schema([pa.field(name, _type(pa, name, field), nullable=False) for name, field in fields.items()])
    rows, count = check_rows(rows, fields, "Parquet"), 0
    # the page size is checked once per batch: with the default of 1,024 values a page of images is 100 MB
    options = {"write_page_checksum": True, "write_batch_size": 64}
    with new_file(path) as file, pq.ParquetWriter(file, arrow, **options) as writer:
        while group := list(_group(rows)):
            columns = [_column(pa, [row[name] for row in group], field, count) for name, field in fields.items()]
            writer.write_table(pa.Table.from_arrays(columns, schema=arrow))
            count += len(group)
    return count


def codec_of(file: Any) -> str:
    """The compression of most columns of a ``ParquetFile``, as ``write_batches`` takes it; that of pyarrow without row groups."""
    if not file.metadata.num_row_groups:
        return _CODEC
    group = file.metadata.row_group(0)
    codecs = Counter(group.column(number).compression for number in range(group.num_columns))
    most = next((name for name, _ in codecs.most_common(1)), "")
    return _CODECS.get(most, _CODEC)


def write_batches(path: Path, schema: Any, batches: Iterable[Any], codec: str = _CODEC) -> None:
    """Write record batches of pyarrow, with columns of any type and nulls, in row groups of about 4,096 rows or 32 MiB.

    Args:
        path: The new file.
        schema: Of pyarrow.
        batches: The rows.
        codec: Compression, as pyarrow names it.

    Raises:
        DataError: pyarrow cannot write a type.
    """
    pa, pq = _pyarrow()
    options = {"write_page_checksum": True, "write_batch_size": 64, "compression": codec}
    group: list[Any] = []
    rows = size = 0
    try:
        with new_file(path) as file, pq.ParquetWriter(file, schema, **options) as writer:
            for batch in batches:
                if not batch.num_rows:  # else it may become a row group without pages
                    continue
                group.append(batch)
                rows, size = rows + batch.num_rows, size + batch.nbytes
                if rows >= _GROUP_ROWS or size >= _GROUP_BYTES:
                    writer.write_table(pa.Table.from_batches(group, schema))
                    group, rows, size = [], 0, 0
            if group:
                writer.write_table(pa.Table.from_batches(group, schema))
    except (pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        raise unwritable_error(
            f"{path}: {shorten(str(error), 500)}", "pyarrow can write all types of the file", "choose other columns"
        ) from error


def _group(rows: Iterator[Row]) -> Iterator[Row]:
    size = 0
    for row in islice(rows, _GROUP_ROWS):
        yield row
        size += row_bytes(row)
        if size >= _GROUP_BYTES:
            return


def _field(path: Path, name: str, kind: Any) -> FieldType:
    """The field type of an arrow type. Raises DataError."""
    dims: list[int] = []
    inner = kind
    while hasattr(inner, "value_field"):
        dims.append(getattr(inner, "list_size", -1))
        inner = inner.value_type
    text = str(inner)
    number = _NAMES.get(text, text)
    if number in ("bool", "float16", "float32", "float64") or (text.lstrip("u").startswith("int")):
        return FieldType(type=number, shape=tuple(dims) or None)
    if not dims and text.startswith("dictionary<values=string,"):  # pyarrow cannot read all lists of them
        return FieldType(type="string")
    if len(dims) < 2 and text in _TEXTS:
        return FieldType(type="string", shape=tuple(dims) or None)
    if not dims and (text in _BYTES or text.startswith("fixed_size_binary[")):
        return FieldType(type="bytes")
    raise unreadable_error(
        f"{path}: column {quoted(name)} of type {shorten(str(kind), 200)}",
        "a field is a number, a boolean, a string, bytes, a list of strings, or lists of numbers or booleans",
        "choose other columns, or cast this one before it is written",
    )


def _type(pa: Any, name: str, field: FieldType) -> Any:
    """The arrow type of a field. Raises DataError."""
    if field.type == "bytes":
        return pa.large_binary()
    try:
        kind = pa.string() if field.type == "string" else pa.from_numpy_dtype(np.dtype(field.type))
    except (TypeError, pa.ArrowException) as error:
        raise unwritable_error(
            f"field {quoted(name)} of type {field.type}", f"Parquet has no such numbers: {error}", "a smaller type"
        ) from error
    for dim in reversed(field.shape or ()):
        kind = pa.large_list(kind) if dim == -1 else pa.list_(kind, dim)
    return kind


def _column(pa: Any, values: list[Any], field: FieldType, at: int) -> Any:
    """Values of one field as an arrow array; arrays are built from their flat values."""
    shape = field.shape
    if shape is None or field.type == "string":
        try:
            return pa.array(values, _type(pa, "", field))
        except (UnicodeEncodeError, pa.ArrowException) as error:
            raise unwritable_error(
                f"rows {at} to {at + len(values) - 1}: {shorten(str(error), 500)}",
                "a string is UTF-8",
                "bytes in place of str",
            ) from error
    shapes = np.array([value.shape for value in values], np.int64)  # [rows, dims]
    column = pa.array(np.concatenate([value.reshape(-1) for value in values]))
    # from the innermost dim outwards: in dim k the number of a row's lists is the product of its dims before k
    for dim in reversed(range(len(shape))):
        lists = shapes[:, :dim].prod(axis=1)
        if shape[dim] == -1:
            offsets = np.zeros(lists.sum() + 1, np.int64)
            np.cumsum(np.repeat(shapes[:, dim], lists), out=offsets[1:])
            column = pa.LargeListArray.from_arrays(pa.array(offsets), column)
        else:
            column = pa.FixedSizeListArray.from_arrays(column, shape[dim])
    return column


def _cells(path: Path, at: int, name: str, column: Any, field: FieldType) -> list[Any]:
    """The values of a column, as Python objects or arrays."""
    _no_nulls(path, at, name, column)
    if field.shape is None:
        return column.to_pylist()
    if field.type == "string":
        _no_nulls(path, at, name, column.flatten())
        return column.to_pylist()
    rows = len(column)
    bounds = np.arange(rows + 1)  # [rows + 1] start of each row's lists among all lists of the dim
    shapes = np.zeros((rows, len(field.shape)), np.int64)
    for dim, size in enumerate(field.shape):
        if size != -1:
            offsets = np.arange(len(column) + 1) * size
        else:
            offsets = column.offsets.to_numpy()
            offsets = (offsets - offsets[0]).astype(np.int64)
        column = column.flatten()
        _no_nulls(path, at, name, column)
        sizes, counts = np.diff(offsets), np.diff(bounds)
        if size != -1:
            shapes[:, dim] = size
        elif sizes.size:
            shapes[:, dim] = np.where(counts > 0, sizes[np.minimum(bounds[:-1], sizes.size - 1)], 0)
        ragged = np.repeat(np.arange(rows), counts)[sizes != np.repeat(shapes[:, dim], counts)]
        if ragged.size:
            raise unreadable_error(
                f"{path}: row {at + int(ragged[0])}, column {quoted(name)}: lists of different lengths inside a list",
                "lists of lists are arrays: as long as each other",
                "choose other columns",
            )
        bounds = offsets[bounds]
    flat = column.to_numpy(zero_copy_only=False)
    return [
        flat[begin:end].reshape(shape)
        for begin, end, shape in zip(bounds[:-1].tolist(), bounds[1:].tolist(), shapes.tolist(), strict=True)
    ]


def _readable_cells(path: Path, at: int, name: str, column: Any, field: FieldType) -> list[Any]:
    """The values of a column, of which some are ``_ABSENT``: those that no row can hold."""
    if field.shape is None:
        return [_ABSENT if value is None else value for value in column.to_pylist()]
    values: list[Any] = []
    for row in range(len(column)):
        try:
            values += _cells(path, at + row, name, column.slice(row, 1), field)
        except DataError:
            values.append(_ABSENT)
    return values


def _no_nulls(path: Path, at: int, name: str, column: Any) -> None:
    if column.null_count:
        first = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        raise unreadable_error(
            f"{path}: column {quoted(name)} with a null, at row {at + first} or inside the lists behind it",
            "a row has a value in each field",
            "choose other columns, or put a value in the place of nulls",
        )


def _damaged(path: Path, error: object) -> Exception:
    reason = shorten(str(error), 500).strip().replace("\n", "; ")
    return unreadable_error(
        f"{path}: {reason}", "pyarrow can read the file, every page of it", "a whole copy of the file"
    )


def _too_large(path: Path, reason: object) -> Exception:
    return unreadable_error(
        f"{path}: {reason}",
        "what a file expands to is bounded by its own size (unisono.storage.limits)",
        "a whole copy of the file; if it is real, the same table written with less compression, or with smaller row groups",
    )


def _pyarrow() -> tuple[Any, Any]:
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError as error:
        raise missing_extra("parquet", "pyarrow", "a .parquet file") from error
