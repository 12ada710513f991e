"""Write Parquet with changed cells, batch by batch. Masked values, and cells of columns that the file has not, are null."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from unisono.data.convert.formats.parquet import codec_of, read_batches, write_batches
from unisono.data.convert.formats.table import describe_value
from unisono.quality.columns.file_change import FileChange
from unisono.quality.columns.lossless import recast
from unisono.quality.columns.table_cells import stored_kind
from unisono.quality.columns.targets import Target
from unisono.quality.input_files import InputFile

_USUAL: Final = {"bool": "bool", "int": "int64", "float": "double", "string": "string", "bytes": "large_binary"}
Types = Mapping[str, Any]  # pyarrow's type of each column of the schema


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cells:
    """A column of a batch in its new type.

    Attributes:
        array: The cells, null where one cannot be cast.
        change: What was done; empty if nothing was.
        is_changed: Of each cell, bool [rows].
        faults: Why a cell cannot be cast, by row.
    """

    array: Any
    change: str
    is_changed: NDArray[np.bool_]
    faults: Mapping[int, str]


def arrow_types(files: Sequence[InputFile], targets: Mapping[str, Target]) -> Types:
    """The type of each column in all files of Parquet.

    Raises:
        DataError: A file is damaged.
        ExtraError: pyarrow is not installed.
    """
    pa: Any = importlib.import_module("pyarrow")
    known: dict[str, Any] = {}
    for file in files:
        if file.kind == ".parquet":
            known |= {str(kind): kind for kind in read_batches(file.path)[0].schema_arrow.types}
    types: dict[str, Any] = {}
    for name, target in targets.items():
        stored = target.stored or _USUAL.get(target.kind, "null")
        types[name] = known[stored] if stored in known else pa.type_for_alias(stored)
    return types


def write_parquet(change: FileChange, path: Path, types: Types) -> None:
    """Write a file of Parquet.

    Args:
        change: What changes in it.
        path: The new file.
        types: Of the schema; empty if nothing is cast.

    Raises:
        DataError: A value cannot be cast without loss.
    """
    pa: Any = importlib.import_module("pyarrow")
    source, batches = read_batches(change.file.path)
    fields = {field.name: field for field in source.schema_arrow}
    new_fields: list[Any] = []
    for name in change.columns:
        field = fields[name] if name in fields else pa.field(name, types[name])
        is_nullable = field.nullable or name in change.masked
        new_fields.append(field.with_type(types.get(name, field.type)).with_nullable(is_nullable))
    schema = pa.schema(new_fields)
    if [(field.name, field.type) for field in schema] == [(field.name, field.type) for field in source.schema_arrow]:
        schema = schema.with_metadata(source.schema_arrow.metadata)  # else it would name columns and types that were
    write_batches(path, schema, _changed(pa, change, batches, schema, types), codec_of(source))


def _changed(pa: Any, change: FileChange, batches: Iterator[Any], schema: Any, types: Types) -> Iterator[Any]:
    begin = 0
    for batch in batches:
        present = {*batch.schema.names}
        count = batch.num_rows
        masked = change.masked_in(begin, count)
        texts: dict[int, list[tuple[str, str]]] = {}  # masked columns and values by row
        faults: dict[int, tuple[str, str, str]] = {}  # the first by row: column, value, reason
        columns: dict[str, _Cells] = {}
        for name, field in zip(schema.names, schema, strict=True):
            if name not in present:
                columns[name] = _Cells(
                    array=pa.nulls(count, field.type), change="added", is_changed=np.ones(count, np.bool_), faults={}
                )
                continue
            column = batch.column(name)
            for row in masked[name].tolist() if name in masked else ():
                texts.setdefault(row, []).append((name, str(column[row].as_py())))
            if name in masked:
                column = _without(pa, column, masked[name])
            target = change.targets.get(name)
            columns[name] = _unchanged(column) if target is None else _cast(pa, column, target, types[name])
            for row, reason in columns[name].faults.items():
                faults.setdefault(row, (name, describe_value(column[row].as_py()), reason))
        for row in sorted({*texts, *faults}):
            if row in faults:
                change.drop(begin + row, *faults[row])
            else:
                for name, text in texts[row]:
                    change.mask(begin + row, name, text)
        is_kept = np.ones(count, np.bool_)
        is_kept[list(faults)] = False
        for name, cells in columns.items():
            if changed := int(np.sum(cells.is_changed & is_kept)):
                change.count(name, cells.change, changed)
        new = pa.RecordBatch.from_arrays([cells.array for cells in columns.values()], schema=schema)
        yield new.filter(pa.array(is_kept)) if faults else new
        begin += count
        change.advance(count)


def _without(pa: Any, column: Any, rows: NDArray[np.int64]) -> Any:
    """The column with null in these rows, for any type."""
    is_null = np.zeros(len(column), np.bool_)
    is_null[rows] = True
    return column.take(pa.array(np.arange(len(column)), mask=is_null))


def _unchanged(column: Any) -> _Cells:
    return _Cells(array=column, change="", is_changed=np.zeros(len(column), np.bool_), faults={})


def _cast(pa: Any, column: Any, target: Target, new_type: Any) -> _Cells:
    """The column in the type of the schema, its images in the mode of most, and its texts in their encoding."""
    if column.null_count == len(column):
        return _unchanged(column if column.type == new_type else pa.nulls(len(column), new_type))
    kind = stored_kind(str(column.type))
    is_wider = (kind, target.kind) == ("int", "float")
    if (kind != target.kind and not is_wider) or (kind == "bytes" and (target.mode or target.encoding)):
        return _recast(pa, column, target, new_type)
    if column.type == new_type:
        return _unchanged(column)
    new, faults = _cast_type(pa, column, new_type)
    is_value = ~_is_null(column)
    return _Cells(array=new, change=f"{column.type} to {new_type}", is_changed=is_value, faults=faults)


def _is_null(column: Any) -> NDArray[np.bool_]:
    return column.is_null().to_numpy(zero_copy_only=False)


def _recast(pa: Any, column: Any, target: Target, new_type: Any) -> _Cells:
    """Values of another kind, images of another mode, or texts in another encoding, one by one."""
    values: list[Any] = []
    is_changed = np.zeros(len(column), np.bool_)
    faults: dict[int, str] = {}
    change = ""
    for row, value in enumerate(column.to_pylist()):
        try:
            found = recast(value, target)
        except ValueError as error:
            faults[row] = str(error)
            values.append(None)
            continue
        values.append(value if found is None else found[0])
        if found is not None:
            is_changed[row], change = True, found[1]
    array = pa.array(values, pa.type_for_alias(_USUAL[target.kind]) if target.kind in _USUAL else new_type)
    new, others = _cast_type(pa, array, new_type)
    return _Cells(array=new, change=change, is_changed=is_changed, faults={**others, **faults})


def _cast_type(pa: Any, column: Any, new_type: Any) -> tuple[Any, dict[int, str]]:
    """The column in another type of its kind, and why a row's value cannot be cast."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if _num_zones(pa, column.type) != _num_zones(
        pa, new_type
    ):  # pyarrow would take times without a zone for those of UTC
        faults = dict.fromkeys(np.flatnonzero(~_is_null(column)).tolist(), "times with a zone and without one differ")
        return pa.nulls(len(column), new_type), faults
    try:
        new = column.cast(new_type)
        # ints and floats become wider ones, where the cast itself refuses what is not exact; NaN does not equal itself
        if pa.types.is_floating(new_type) or new.cast(column.type).equals(column):
            return new, {}
    except pa.ArrowException:
        pass
    faults = {
        row: f"{new_type} has no such value" for row in range(len(column)) if not _fits(pa, column, row, new_type)
    }
    return _without(pa, column, np.array([*faults], np.int64)).cast(new_type), faults


def _num_zones(pa: Any, kind: Any) -> int:
    """How many timestamps with a zone are in a type."""
    if pa.types.is_timestamp(kind):
        return int(kind.tz is not None)
    return sum(_num_zones(pa, kind.field(number).type) for number in range(kind.num_fields))


def _fits(pa: Any, column: Any, row: int, new_type: Any) -> bool:
    one = column.slice(row, 1)
    try:
        return repr(one.cast(new_type).cast(column.type).to_pylist()) == repr(one.to_pylist())
    except pa.ArrowException:
        return False
