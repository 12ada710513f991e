"""``.csv`` after RFC 4180: UTF-8, commas, a header line, double quotes doubled inside quotes. Nothing is repaired.
The last row may have no line end.

A quoted cell is a string. A column of unquoted integers in int64 is int64, one of unquoted numbers, ``nan`` or ``inf`` is
float64, any other is string; reading the whole file once determines this. A number has no leading zeros, and an integer among
floats must be exact in float64, so that codes and long ids do not change. Bytes are base64 in the given columns.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from unisono.data.convert.formats.table import (
    Row,
    Table,
    check_names,
    check_rows,
    damaged_error,
    describe_value,
    infer_schema,
    not_utf8_error,
    open_source,
    unreadable_error,
    unwritable_error,
)
from unisono.data.mindrecord import FieldType
from unisono.data.text_encoding import encoding_of
from unisono.errors import DataError
from unisono.sanitize import listed, quoted
from unisono.storage.files import new_file
from unisono.storage.limits import MAX_COLUMNS, MAX_NUMBER_CHARACTERS, MAX_RECORD_BYTES

_CELL: Final = re.compile(r'(?:"((?:[^"]++|"")*+)"|([^",\r\n]*+))(,|\Z)')
_PLAIN: Final = re.compile(r"[^\",;\t|\r\n\ufeff]+")  # without signs that separate columns elsewhere
_INT: Final = re.compile(r"0|-?[1-9][0-9]{0,18}")
_FLOAT: Final = re.compile(r"-?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,5})?")
_WORDS: Final = ("nan", "inf", "-inf")
_BOM: Final = b"\xef\xbb\xbf"
_HEAD_BYTES: Final = 256  # by which another encoding is seen
_Cell = tuple[str, bool]  # the text, and whether it stood in quotes


def read(path: Path, binary: Collection[str] = ()) -> Table:
    """The lines after the header as rows; columns in ``binary`` are base64. Raises DataError naming line and offset."""
    names, kinds = _types(path, frozenset(binary))
    return Table(rows=_rows(path, names, kinds), schema={name: FieldType(type=kinds[name]) for name in names})


def write(path: Path, table: Table, binary: Collection[str] = ()) -> int:
    """Write a header line and the rows, strings quoted, bytes of fields in ``binary`` as base64. Returns the number of rows."""
    schema, rows = infer_schema(table)
    check_names(schema)
    for name, field in schema.items():
        if field.type == "bytes" and name not in binary:
            raise unwritable_error(
                f"field {quoted(name)}, which is bytes, as CSV",
                "CSV is text: bytes are base64 in the fields that are named, for writing and for reading",
                f"--base64 {name}; a .jsonl, .parquet or .mindrecord file holds bytes",
            )
        if field.shape is not None or field.type == "bool":
            kind = "a bool" if field.shape is None else "a list of strings" if field.type == "string" else "an array"
            raise unwritable_error(
                f"field {quoted(name)}, {kind}, as CSV",
                "a column is of ints, floats, strings or base64",
                "a .jsonl or .parquet file holds such rows",
            )
    if unknown := [name for name in binary if schema.get(name, FieldType(type="")).type != "bytes"]:
        raise unwritable_error(f"base64 for {quoted(unknown[0])}", "base64 is for fields of bytes", "leave it out")
    count = 0
    with new_file(path) as file:
        file.write((",".join(name if _PLAIN.fullmatch(name) else _quoted(name) for name in schema) + "\n").encode())
        for row in check_rows(rows, schema, "CSV"):
            try:
                file.write((",".join(_text(row[name], count, name) for name in schema) + "\n").encode())
            except UnicodeEncodeError as error:
                raise unwritable_error(
                    f"row {count}: {error.reason}", "CSV is UTF-8 here", "bytes in place of a str"
                ) from error
            count += 1
    return count


def _types(path: Path, binary: frozenset[str]) -> tuple[list[str], dict[str, str]]:
    """The names of the columns and their types, from the whole file."""
    records = read_records(path)
    names = column_names(path, read_header(path, records))
    if unknown := sorted(binary - set(names)):
        raise unreadable_error(
            f"{path}: base64 for {quoted(unknown[0])}", f"columns are {listed(names)}", "one of these, or leave it out"
        )
    candidates: dict[int, tuple[str, ...]] = {
        place: ("int64", "float64") for place, name in enumerate(names) if name not in binary
    }
    empty = True
    for number, offset, cells, _ in records:
        empty = False
        require_width(path, number, offset, cells, names)
        for place, possible in list(candidates.items()):
            text, in_quotes = cells[place]
            candidates[place] = () if in_quotes else tuple(kind for kind in possible if _IS[kind](text))
            if not candidates[place]:
                del candidates[place]
    kinds = dict.fromkeys(names, "string") | dict.fromkeys(binary, "bytes")
    if not empty:
        kinds |= {names[place]: possible[0] for place, possible in candidates.items()}
    return names, kinds


def _rows(path: Path, names: list[str], kinds: dict[str, str]) -> Iterator[Row]:
    records = read_records(path)
    next(records, None)
    for number, offset, cells, _ in records:
        require_width(path, number, offset, cells, names)
        try:
            yield {name: _value(text, kinds[name]) for name, (text, _) in zip(names, cells, strict=True)}
        except ValueError as error:
            raise damaged_error(path, offset, f"line {number}: {error}") from error


def _value(text: str, kind: str) -> Any:
    if kind == "string":
        return text
    if kind == "bytes":
        try:
            return base64.b64decode(text, validate=True)
        except (ValueError, binascii.Error) as error:
            raise ValueError(f"{text[:40]!r} is no base64: {error}") from error
    return int(text) if kind == "int64" else float(text)


def _is_int(text: str) -> bool:
    return _INT.fullmatch(text) is not None and -(1 << 63) <= int(text) < 1 << 63


def _is_float(text: str) -> bool:
    if len(text) > MAX_NUMBER_CHARACTERS or not _FLOAT.fullmatch(text):
        return text in _WORDS
    return int(text) == float(text) if text.lstrip("-").isdigit() else math.isfinite(float(text))


_IS: Final = {"int64": _is_int, "float64": _is_float}


def read_header(path: Path, records: Iterator[tuple[int, int, list[_Cell], bytes | bytearray]]) -> list[_Cell]:
    """The cells of the first of the records. Raises DataError for a file without any."""
    _, _, header, _ = next(records, (1, 0, [], b""))
    if not header:
        raise damaged_error(path, 0, "an empty file, without header line and rows")
    return header


def column_names(path: Path, header: Sequence[_Cell]) -> list[str]:
    """The names in a header line. Raises DataError if one is empty or there twice, or if they have no commas between them."""
    names = [text for text, _ in header]
    if len(header) == 1 and not header[0][1] and (sign := next((sign for sign in ";\t|" if sign in names[0]), "")):
        raise unreadable_error(
            f"{path}: offset 0: a header line with the one name {quoted(names[0])}",
            "a .csv file has commas between its columns",
            f"the file with commas between its columns, where it has {sign!r}; or this name in quotes, if it is one",
        )
    if not all(names) or len(set(names)) != len(names):
        raise unreadable_error(
            f"{path}: offset 0: a header line with the names [{listed(map(quoted, names))}]",
            "each column has a name of its own",
            "another name in the header for a column without one, or with that of another column",
        )
    return names


def number_kind(text: str) -> str:
    """``int64`` or ``float64`` for the text of a number, ``nan`` and ``inf``; empty for any other text."""
    return "int64" if _is_int(text) else "float64" if _is_float(text) else ""


def require_width(path: Path, number: int, offset: int, cells: Sequence[_Cell], names: Sequence[str]) -> None:
    """Raise DataError for a record that has not one cell of each column."""
    if len(cells) != len(names):
        raise unreadable_error(
            f"{path}: offset {offset}: line {number} has {len(cells)} fields, and the header {len(names)}",
            "each line has a field for each column; it is not known which one is missing or too many",
            f"a line with {len(names)} fields, or without that line; a whole copy, if the file was cut",
        )


def read_records(path: Path) -> Iterator[tuple[int, int, list[_Cell], bytes | bytearray]]:
    """Line number and offset of each record, its cells (text, whether in quotes), and itself with its line end.

    Raises:
        DataError: The file is damaged.
    """
    with open_source(path) as file:
        head = file.read(_HEAD_BYTES)
        offset, number = file.seek(len(_BOM) if head.startswith(_BOM) else 0), 1
        # lines of another encoding would not end where they are cut
        if encoding_of(head) and (error := not_utf8_error(path, "offset 0: line 1", 0, head)):
            raise error
        while line := file.readline(MAX_RECORD_BYTES + 1):
            record, lines = line, 1
            quotes = line.count(b'"')
            if quotes % 2:
                record = bytearray(line)  # a list of short lines would take 20 times their size
                while quotes % 2 and len(record) <= MAX_RECORD_BYTES and (more := file.readline(MAX_RECORD_BYTES + 1)):
                    record += more
                    quotes, lines = quotes + more.count(b'"'), lines + 1
            size = len(record)
            if size > MAX_RECORD_BYTES:
                raise damaged_error(path, offset, f"line {number} has more than {MAX_RECORD_BYTES:,} bytes")
            if quotes % 2:
                raise _quote_error(path, offset, f"line {number} has a quote that nothing closes")
            if number == 1 and not record.endswith(b"\n"):  # the last row may have none
                raise damaged_error(
                    path, offset, "line 1, the header, has no line end, as in a file that was cut: it ends with \\n"
                )
            try:
                yield number, offset, _cells(record.decode().removesuffix("\n").removesuffix("\r")), record
            except _MisplacedSignError as error:
                raise _quote_error(path, offset, f"line {number}: {error}") from error
            except ValueError as error:
                other = not_utf8_error(path, f"offset {offset}: line {number}", offset, bytes(record))
                raise other or damaged_error(path, offset, f"line {number}: {error}") from error
            offset, number = offset + size, number + lines


class _MisplacedSignError(ValueError):
    """A quote, or a line end, in a field that is not in quotes."""


def _quote_error(path: Path, offset: int, what: str) -> DataError:
    return unreadable_error(
        f"{path}: offset {offset}: {what}",
        "a field with quotes, commas or line ends stands in quotes, and each quote in it is doubled",
        'such a field as "say ""yes"" or no"; a whole copy, if the file was cut',
    )


def _cells(record: str) -> list[_Cell]:
    if '"' not in record and "\r" not in record:
        if record.count(",") >= MAX_COLUMNS:
            raise _too_many_fields()
        return [(text, False) for text in record.split(",")]
    cells: list[_Cell] = []
    at = 0
    while True:
        match = _CELL.match(record, at)
        if match is None:
            raise _MisplacedSignError(f"field {len(cells) + 1} has a quote or a line end where none can be")
        if len(cells) == MAX_COLUMNS:
            raise _too_many_fields()
        inside, plain, end = match.groups()
        cells.append((plain, False) if inside is None else (inside.replace('""', '"'), True))
        if not end:
            return cells
        at = match.end()


def _too_many_fields() -> ValueError:
    return ValueError(f"more than {MAX_COLUMNS:,} fields")


def _text(value: Any, number: int, name: str) -> str:
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise unwritable_error(
            f"row {number}, field {quoted(name)}: {describe_value(value)}",
            "an integer column is int64",
            "a .jsonl file holds it",
        )
    return repr(value)


def _quoted(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'
