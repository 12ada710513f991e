"""``.jsonl``: one object per line; bytes as ``{"base64": "…"}``, arrays as lists (read back as bool, int64 or float64).

A list of strings stays a list.
"""

from __future__ import annotations

import base64
import binascii
import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, cast

import numpy as np

from unisono.data.convert.formats.table import (
    OtherField,
    OtherFields,
    Row,
    Table,
    check_columns,
    not_utf8_error,
    open_source,
    unreadable_error,
    unwritable_error,
)
from unisono.errors import DataError
from unisono.sanitize import quoted, shorten
from unisono.storage.files import new_file
from unisono.storage.limits import MAX_JSON_DEPTH, MAX_RECORD_BYTES, check_count, decode_json

BASE64: Final = "base64"
_VALUES: Final = 'values are numbers, strings, lists of numbers or of strings, and bytes as {"base64": …}'
_SHOWN_FIELDS: Final = 4
_TYPES: Final = {dict: "object", list: "list", type(None): "null"}


def read(path: Path, columns: Sequence[str] | None = None, others: OtherFields | None = None) -> Table:
    """The lines as rows, with only these columns if given; values of others may then be of any kind.

    Values that no row can hold are an error, or are left out of their rows if ``others`` is given: it gets their fields.
    """
    return Table(rows=_rows(path, columns, others))


def write(path: Path, table: Table) -> int:
    """Write the rows as lines; returns their number."""
    count = 0
    with new_file(path) as file:
        for row in table.rows:
            try:
                file.write((to_line(row) + "\n").encode())
            except UnicodeEncodeError as error:
                raise unwritable_error(
                    f"row {count}: {error.reason}", "JSON is UTF-8", "bytes in place of a str"
                ) from error
            except ValueError as error:
                raise unwritable_error(
                    f"row {count}: {error}",
                    "JSON has finite numbers only",
                    "a .mindrecord or .parquet file holds such rows",
                ) from error
            count += 1
    return count


def to_line(row: Row) -> str:
    """The line of a row. Raises ValueError for a number that is not finite."""
    return json.dumps(row, default=_to_json, ensure_ascii=False, allow_nan=False)


def _rows(path: Path, columns: Sequence[str] | None, others: OtherFields | None) -> Iterator[Row]:
    for line, number, offset in lines_of(path):
        if others is None or columns is not None:
            yield row_of_line(line, path, number, offset, columns)
        else:
            yield _readable_part(object_of_line(line, path, number, offset), others, f"{path}: line {number}")


def read_objects(path: Path, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """The objects of the lines with values of any kind as they are, also those that no row can hold; with only these columns if
    given. Raises DataError as ``object_of_line``, or for an object without a column."""
    for line, number, offset in lines_of(path):
        values = object_of_line(line, path, number, offset)
        if columns is not None:
            check_columns(columns, values, f"line {number} of {path}")
            values = {name: values[name] for name in columns}
        yield values


def lines_of(path: Path) -> Iterator[tuple[bytes, int, int]]:
    """The lines, each with its number from 1, and where it begins."""
    with open_source(path) as file:
        offset = number = 0
        while line := file.readline(MAX_RECORD_BYTES + 1):
            number += 1
            yield line, number, offset
            offset += len(line)


def row_of_line(line: bytes, path: Path, number: int, offset: int, columns: Sequence[str] | None = None) -> Row:
    """The row of a line, with only these columns if given.

    ``number``, from 1, and ``offset`` name it in the DataError for an invalid one.
    """
    rule = f"a line is one JSON object; {_VALUES}"
    try:
        values = _values(line)
    except ValueError as error:
        raise _line_error(line, path, number, offset, error, rule) from error
    if columns is not None:
        check_columns(columns, values, f"line {number} of {path}")
    row: dict[str, Any] = {}
    for name in values if columns is None else columns:
        try:
            row[name] = _from_json(values[name])
        except ValueError as error:
            others = [] if columns is not None else [other for other in values if other != name]
            given = f"{path}: line {number} at offset {offset}: field {quoted(name)}: {error}"
            raise unreadable_error(given, rule, _instead_of(values[name], others, path)) from error
    return row


def _instead_of(value: Any, others: Sequence[str], path: Path) -> str:
    """What is read in place of a row with a value that no row can hold; ``others`` are the fields that may be read without it."""
    is_nested = isinstance(value, dict) and not _is_base64(value)
    first = "its members as fields of their own" if is_nested else "repair or remove that line"
    if not others:
        return first
    options = " ".join(f"--column {shlex.quote(shorten(other))}" for other in others[:_SHOWN_FIELDS])
    more = " …" if len(others) > _SHOWN_FIELDS else ""
    return f"{first}; or a table without the field: unisono data convert {path} NEW {options}{more}"


def object_of_line(line: bytes, path: Path, number: int, offset: int) -> dict[str, Any]:
    """The object of a line, as ``row_of_line``, but with any value: null, objects, and lists as they are."""
    try:
        return _values(line)
    except ValueError as error:
        raise _line_error(line, path, number, offset, error, "a line is one JSON object") from error


def _readable_part(values: dict[str, Any], others: OtherFields, place: str) -> Row:
    """The fields with values that a row can hold; ``others`` gets the first of each other one, at ``place``."""
    row: dict[str, Any] = {}
    for name, value in values.items():
        try:
            row[name] = _from_json(value)
        except ValueError as error:
            if name not in others:
                kind = BASE64 if _is_base64(value) else _TYPES[type(value)]
                others[name] = OtherField(
                    kind,
                    unreadable_error(
                        f"{place}, field {quoted(name)}: {error}", _VALUES, "another field, or without such rows"
                    ),
                )
    return row


def _line_error(line: bytes, path: Path, number: int, offset: int, error: ValueError, rule: str) -> DataError:
    """The error for a line.

    Args:
        line: The line.
        path: Its file.
        number: Its number, from 1.
        offset: Where it begins in the file.
        error: What is wrong with it, if it is UTF-8.
        rule: What a line is.
    """
    place = f"line {number} at offset {offset}"
    return not_utf8_error(path, place, offset, line) or unreadable_error(
        f"{path}: {place}: {error}", rule, "repair or remove that line"
    )


def _values(line: bytes) -> dict[str, Any]:
    if len(line) > MAX_RECORD_BYTES:
        raise ValueError(f"it has more than {MAX_RECORD_BYTES:,} bytes")
    row = decode_json(line, _decode, max_bytes=MAX_RECORD_BYTES)
    if not isinstance(row, dict):
        raise ValueError("it is no object")
    values = cast("dict[str, Any]", row)
    check_count(len(values), "fields")
    return values


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("it has a name twice")
    return values


def _decode(text: bytes) -> Any:
    # of bytes, json.loads would take UTF-16 and UTF-32 as well, of which a line does not end where it is cut
    return json.loads(text.decode("utf-8-sig", "surrogatepass"), object_pairs_hook=_object)


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        if not _is_base64(value):
            raise ValueError('an object other than {"base64": "…"}')
        try:
            return base64.b64decode(value[BASE64], validate=True)
        except binascii.Error as error:
            raise ValueError(f"base64: {error}") from error
    if isinstance(value, list):
        return _array(cast("list[Any]", value))
    if value is None:
        raise ValueError("null is no number, string, list or bytes")
    return value


def _is_base64(value: Any) -> bool:
    return isinstance(value, dict) and [*value] == [BASE64] and isinstance(value[BASE64], str)


def _array(values: list[Any]) -> Any:
    if values and all(isinstance(value, str) for value in values):
        return values
    kinds = _kinds(values)
    if kinds <= {bool} or kinds <= {int, float}:
        array = np.array(values)  # a ragged list is a ValueError
        # among floats an int may be rounded, and one beyond int64 would be an unsigned one
        if array.dtype.kind in "bi" or (array.dtype.kind == "f" and (int not in kinds or abs(array).max() < 1 << 53)):
            return array
    raise ValueError("a list inside a row is of strings, or of numbers: ints within int64, floats, or true and false")


def _kinds(values: list[Any], depth: int = 1) -> set[type]:
    if depth > MAX_JSON_DEPTH:
        raise ValueError(f"more than {MAX_JSON_DEPTH} lists inside each other")
    kinds = set(map(type, values))
    if list in kinds:
        kinds.discard(list)
        lists = (cast("list[Any]", value) for value in values if isinstance(value, list))
        kinds.update(*(_kinds(value, depth + 1) for value in lists))
    return kinds


def _to_json(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    return value.tolist()
