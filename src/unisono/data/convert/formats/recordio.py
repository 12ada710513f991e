"""``.rec``: one bytes field is the payload, numbers and 1-d arrays are side columns, an int ``key`` is the record's key.

A table with an image becomes image records as im2rec writes them: MXNet's image header with the labels (all other fields), then
PNG.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from unisono.data.convert.formats.table import (
    Row,
    Table,
    describe_value,
    encode_image_column,
    unreadable_error,
    unwritable_error,
)
from unisono.data.mindrecord import FieldType
from unisono.data.recordio import ImageHeader, RecordFile, RecordWriter, pack_header
from unisono.data.recordio.index import RaggedColumn, SideColumn
from unisono.data.sidecar import COLUMN_DTYPES
from unisono.sanitize import listed, quoted


def read(path: Path) -> Table:
    """The records as rows of ``data``, the side columns and, unless keys are 0, 1, 2, …, ``key``."""
    file = RecordFile(path)
    columns = dict(file.side)
    if not isinstance(file.keys, range):
        columns["key"] = np.asarray(file.keys)
    if "data" in columns or ("key" in columns and "key" in file.side):
        raise unreadable_error(
            f"{path} with side columns [{listed(map(quoted, sorted(file.side)))}]",
            "a row has the payload as 'data' and the record's own key as 'key'",
            "the file by RecordFile, which has them apart",
        )

    def rows() -> Iterator[Row]:
        for number, payload in enumerate(file):
            yield {"data": payload, **{name: _value(column, number) for name, column in columns.items()}}

    # only a record shows the dtype of an array
    has_schema = len(file) > 0 or not any(isinstance(column, RaggedColumn) for column in columns.values())
    kinds = {name: _kind(column) for name, column in columns.items()} if has_schema else {}
    schema = {"data": FieldType(type="bytes"), **kinds} if has_schema else None
    return Table(rows=rows(), schema=schema, count=len(file))


def _value(column: SideColumn, number: int) -> Any:
    return column[number] if isinstance(column, RaggedColumn) else column[number].item()


def _kind(column: SideColumn) -> FieldType:
    if isinstance(column, RaggedColumn):
        return FieldType(type=column[0].dtype.name, shape=(-1,))
    return FieldType(type="float64" if column.dtype.kind == "f" else "int64")


def write(path: Path, table: Table) -> int:
    """Write the rows as records; returns their number."""
    kinds: dict[str, str] = {}
    with RecordWriter(path, overwrite=True) as writer:
        for number, row in enumerate(encode_image_column(table).rows):
            payload, key, side = _parts(row, number)
            if table.image is not None:
                if not side:
                    raise unwritable_error(
                        f"row {number} without a label as an image record",
                        "MXNet's image header, which comes before a picture, has its labels",
                        "the column of the label, besides the picture",
                    )
                labels = np.array(list(side.values()), np.float32)
                label = float(labels[0]) if len(labels) == 1 else labels
                payload = pack_header(ImageHeader(label=label, id=number), payload)
            for name, value in side.items():
                # else the column would turn ints into floats, or fail at the end without naming a row
                kind = value.dtype.str if isinstance(value, np.ndarray) else type(value).__name__
                if kinds.setdefault(name, kind) != kind:
                    raise unwritable_error(
                        f"row {number}, field {quoted(name)}: {describe_value(value)}",
                        "a side column is of ints, of floats, or of arrays of one type, in all rows",
                        "a .jsonl file holds fields of any type",
                    )
            writer.write(payload, key=key, side=side)
    return len(writer)


def _parts(row: Row, number: int) -> tuple[bytes, int | None, dict[str, Any]]:
    """Payload, key and side values of a row."""
    payloads = {name: value for name, value in row.items() if isinstance(value, bytes)}
    numbers = {name: value for name, value in row.items() if type(value) in (int, float) or _is_list(value)}
    others = sorted(row.keys() - payloads.keys() - numbers.keys())
    if len(payloads) != 1 or others:
        kinds_in_row = listed(f"{name} ({type(row[name]).__name__})" for name in sorted({*payloads, *others}))
        raise unwritable_error(
            f"row {number} with {kinds_in_row or 'no bytes'} as a RecordIO record",
            "a record is one payload of bytes; what else belongs to it are numbers, or short arrays of one dim",
            "a .mindrecord, .parquet or .jsonl file holds such rows, or choose columns that are a record",
        )
    for name, value in numbers.items():
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise unwritable_error(
                f"row {number}, field {quoted(name)}: {describe_value(value)}",
                "a number beside a record is an int64 or a float64",
                "a .jsonl file holds such numbers",
            )
    if "data" in numbers:
        raise unwritable_error(
            f"row {number}, field 'data': {describe_value(row['data'])}",
            "'data' is the payload",
            "another name for this field",
        )
    key = numbers.pop("key", None)
    if key is not None and not isinstance(key, int):
        raise unwritable_error(
            f"row {number} with key {describe_value(key)}", "a key is an integer", "another name for this field"
        )
    return next(iter(payloads.values())), key, numbers


def _is_list(value: Any) -> bool:
    if not isinstance(value, np.ndarray):
        return False
    array = cast("NDArray[Any]", value)
    return array.ndim == 1 and array.dtype.newbyteorder("<").str in COLUMN_DTYPES
