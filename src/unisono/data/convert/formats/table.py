"""Tables of typed rows, common to all formats, and their errors.

A row is a mapping of names to values: bool, int, float, str, bytes, a list of str, or a NumPy array of numbers. A field's type is
the name of a NumPy dtype, ``string`` or ``bytes``; an array or list also has a shape, in which −1 is any size.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

import numpy as np
from numpy.typing import NDArray

from unisono.data.mindrecord import FieldType
from unisono.data.text_encoding import conversion_command, encoding_of
from unisono.errors import DataError, nearest_name
from unisono.sanitize import listed, quoted, shorten
from unisono.storage.files import open_regular

Row = Mapping[str, Any]
_SCALARS: Final[dict[type, str]] = {bool: "bool", int: "int64", float: "float64", str: "string", bytes: "bytes"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows, which are read once, and the facts known before they are read.

    Attributes:
        rows: Mappings of field names to values: bool, int, float, str, bytes, lists of str, or NumPy arrays of numbers.
        schema: Type and shape of each field; None if only the rows determine it.
        image: Name of the field that is an image, uint8 [H, W] or [H, W, 3]; formats without such arrays hold it as
            PNG. None if there is none.
        count: Number of rows; None if the format does not tell it before they are read.
    """

    rows: Iterable[Row]
    schema: dict[str, FieldType] | None = None
    image: str | None = None
    count: int | None = None


@dataclass(frozen=True, slots=True)
class OtherField:
    """A field with values that no row can hold, such as an object of JSON or a decimal number of Parquet.

    Attributes:
        type: The type of the first such value, as its format calls it.
        error: What a reader says who wants the field.
    """

    type: str
    error: DataError


OtherFields = dict[str, OtherField]  # by the name of the field


def open_source(path: Path) -> BinaryIO:
    """Open a file for reading. Raises DataError."""
    try:
        return open_regular(path)
    except OSError as error:
        raise unreadable_error(
            f"{path}: {error.strerror}", "a source is a file that can be read", "the path of a file"
        ) from error


def unwritable_error(given: str, rule: str, nearest: str) -> DataError:
    """The error for values that the target cannot hold."""
    return DataError(given=given, rule=rule, consequence="nothing was written", nearest=nearest)


def check_names(names: Iterable[str]) -> None:
    """Raise DataError for a field whose name UTF-8 cannot hold."""
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise unwritable_error(
                f"field {name!r}, a lone surrogate at {error.start} of its name",
                "names are UTF-8; a lone surrogate is half of a character",
                "another name, or --column for the other fields",
            ) from error


def unreadable_error(given: str, rule: str, nearest: str) -> DataError:
    """The error for a source that violates its format, or holds values that no row can."""
    return DataError(given=given, rule=rule, consequence="nothing from there on was read", nearest=nearest)


def damaged_error(path: Path, offset: int, what: str, *, record: int | None = None) -> DataError:
    """The error for a damaged file."""
    place = f"offset {offset}" if record is None else f"record {record} at offset {offset}"
    return unreadable_error(
        f"{path}: {place}: {what}", "a file is read as its format says, every byte of it", "a whole copy of the file"
    )


def not_utf8_error(path: Path, place: str, offset: int, text: bytes) -> DataError | None:
    """The error for text that is not UTF-8; None if it is.

    Args:
        path: Its file.
        place: Where in the file it is, in words; empty of all of it.
        offset: Where in the file it begins.
        text: The text.
    """
    fault = encoding_of(text)
    if fault:
        fault = f"it is {fault}, not UTF-8"
    else:
        try:
            text.decode()
            return None
        except UnicodeDecodeError as error:
            fault = f"byte {offset + error.start}, 0x{text[error.start]:02x}, is not UTF-8"
    return unreadable_error(
        f"{path}: {place}: {fault}" if place else f"{path}: {fault}",
        "text is UTF-8",
        f"the file in UTF-8: {conversion_command(path, text)}",
    )


def select_columns(table: Table, columns: Sequence[str]) -> Table:
    """The table with only these fields, in this order. Raises DataError for an unknown field."""

    def rows() -> Iterator[Row]:
        for number, row in enumerate(table.rows):
            check_columns(columns, row, f"row {number}")
            yield {name: row[name] for name in columns}

    schema = table.schema
    if schema is not None:
        check_columns(columns, schema, "the source")
        schema = {name: schema[name] for name in columns}
    return replace(table, rows=rows(), schema=schema, image=table.image if table.image in columns else None)


def check_columns(columns: Sequence[str], fields: Collection[str], where: str) -> None:
    """Raise DataError for a column that is not a field."""
    for name in columns:
        if name not in fields:
            nearest = nearest_name(name, fields)
            raise unreadable_error(f"{where} has no column {quoted(name)}", "a column is a field of each row", nearest)


def field_type_of(name: str, value: Any) -> FieldType:
    """The field type of a value. The first dim of an array may differ in other rows."""
    if isinstance(value, np.ndarray):
        array = cast("np.ndarray[Any, Any]", value)
        if array.ndim and array.dtype.kind in "biuf":
            return FieldType(type=array.dtype.name, shape=(-1, *array.shape[1:]))
    if _is_string_list(value) and value:
        return FieldType(type="string", shape=(-1,))
    kind = _SCALARS.get(type(value))
    if kind is None:
        raise unwritable_error(
            f"field {quoted(name)}, a {type(value).__name__}",
            "a field is a bool, an int, a float, a string, bytes, a list of strings or an array of numbers",
            "another type, or leave the field out",
        )
    return FieldType(type=kind)


def infer_schema(table: Table) -> tuple[dict[str, FieldType], Iterator[Row]]:
    """The schema, inferred from the first row if the table has none, and all rows."""
    rows = iter(table.rows)
    if table.schema is not None:
        return table.schema, rows
    first = next(rows, None)
    if first is None:
        raise unwritable_error(
            "a source without rows",
            "the first row says what the fields are",
            "a source that holds rows, or a .jsonl file",
        )
    return {name: field_type_of(name, value) for name, value in first.items()}, chain([first], rows)


def check_rows(rows: Iterable[Row], schema: Mapping[str, FieldType], format_name: str) -> Iterator[Row]:
    """Yield the rows. Raises DataError for a row without exactly the fields of ``schema``, each of its type."""
    for number, row in enumerate(rows):
        if row.keys() != schema.keys():
            off = [f"no {quoted(name)}" for name in schema if name not in row]
            off += [quoted(name) for name in row if name not in schema]
            raise unwritable_error(
                f"row {number}, which has {listed(off)}",
                f"the rows of {format_name} have the same fields: {listed(schema)}",
                "a .jsonl file holds rows of any fields",
            )
        for name, field in schema.items():
            if not _fits(row[name], field):
                raise unwritable_error(
                    f"row {number}, field {quoted(name)}: {describe_value(row[name])}",
                    f"in {format_name} the field is {_described(field)} in all rows",
                    "a .jsonl file holds fields of any type",
                )
        yield row


def encode_png(image: NDArray[np.uint8]) -> bytes:
    """A grey [H, W] or colour [H, W, 3] uint8 image as PNG (W3C PNG, 8 bits a sample, no row filters), without loss."""
    height, width = image.shape[:2]
    # each row starts with the number of its filter: 0, none
    rows = np.zeros((height, 1 + image[0].size), np.uint8)
    rows[:, 1:] = image.reshape(height, -1)
    colour = 2 if image.ndim == 3 else 0
    head = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(rows.tobytes())), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks
    )


def encode_image_column(table: Table) -> Table:
    """The table with its image field, if it has one, encoded as PNG."""
    image = table.image
    if image is None:
        return table

    def rows() -> Iterator[Row]:
        for row in table.rows:
            picture: NDArray[Any] = row[image]
            yield {**row, image: encode_png(picture)}

    schema = None if table.schema is None else {**table.schema, image: FieldType(type="bytes")}
    return replace(table, rows=rows(), schema=schema, image=None)


def row_bytes(row: Row) -> int:
    """About the bytes that a row takes: of arrays, strings and bytes their own, of any other value 8."""
    return sum(map(_value_bytes, row.values()))


def _value_bytes(value: Any) -> int:
    if _is_string_list(value):
        return sum(map(len, value))
    return getattr(value, "nbytes", len(value) if isinstance(value, str | bytes) else 8)


def describe_value(value: Any) -> str:
    """A value for an error text: its type, and itself if it is short."""
    if isinstance(value, np.ndarray):
        array = cast("np.ndarray[Any, Any]", value)
        return f"an array of {array.dtype} and shape {list(array.shape)}"
    text = repr(value)
    return f"{shorten(text, 41)} ({type(value).__name__})"


def _is_string_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(part, str) for part in cast("list[Any]", value))


def _described(field: FieldType) -> str:
    if field.shape is not None and field.type == "string":
        return "a list of strings" if field.shape == (-1,) else f"a list of {field.shape[0]} strings"
    return field.type if field.shape is None else f"an array of {field.type} and shape {list(field.shape)}"


def _fits(value: Any, field: FieldType) -> bool:
    if field.shape is not None and field.type == "string":
        return _is_string_list(value) and field.shape[0] in (-1, len(value))
    if field.shape is not None:
        if not isinstance(value, np.ndarray):
            return False
        array = cast("np.ndarray[Any, Any]", value)
        dims = zip(field.shape, array.shape, strict=False)
        return (
            array.dtype.name == field.type
            and array.ndim == len(field.shape)
            and all(dim in (-1, size) for dim, size in dims)
        )
    if type(value) is int and (field.type.startswith("int") or field.type.startswith("uint")):
        limits = np.iinfo(field.type)
        return int(limits.min) <= value <= int(limits.max)
    if type(value) is float and field.type in ("float16", "float32"):
        with np.errstate(over="ignore"):
            return value != value or float(np.dtype(field.type).type(value)) == value
    return _SCALARS.get(type(value)) == field.type
