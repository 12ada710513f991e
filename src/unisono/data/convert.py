"""Rows from one file format to another, chosen by suffix: RecordIO, MindRecord, JSON Lines. Nothing is dropped or cast.

A row is named values: int, float, str, bytes, or an array. What a format cannot hold is an error that names row and field:

    .rec         one bytes field is the payload, numbers are side columns, an int field ``key`` is the record's key
    .mindrecord  anything but booleans; ints are int64 and floats float64 where the source does not say otherwise
    .jsonl       an object a line; bytes as {"base64": "…"}, arrays as lists (read back as int64 or float64)
"""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np

from unisono.data.mindrecord import Field, MindRecordFile, MindRecordWriter
from unisono.data.recordio import RecordFile, RecordWriter
from unisono.data.sidecar import sync_folder
from unisono.errors import DataError, Problem

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows and what is known of their types before the first one is read (None: nothing)."""

    rows: Iterable[Row]
    schema: dict[str, Field] | None


def convert(source: Path, target: Path, *, overwrite: bool = False) -> int:
    """Write all rows of ``source`` to ``target``, which is there whole or not at all; returns how many.

    Raises DataError for a suffix that is no format here, a target that exists, a damaged source, and a row that the target's
    format cannot hold.
    """
    read, write = _format(source)[0], _format(target)[1]
    if target.exists() and not overwrite:
        raise _cannot(
            f"{target}, which exists", "a file is written once, under a new name", "another name, or --overwrite"
        )
    return write(target, read(source))


def _format(path: Path) -> tuple[Callable[[Path], Table], Callable[[Path, Table], int]]:
    if path.suffix not in _FORMATS:
        known = ", ".join(_FORMATS)
        raise _cannot(
            f"{path}, whose suffix is {path.suffix!r}", f"the suffix names the format: {known}", f"one of {known}"
        )
    return _FORMATS[path.suffix]


def _read_recordio(path: Path) -> Table:
    file = RecordFile(path)
    columns = dict(file.side)
    if not isinstance(file.keys, range):
        columns["key"] = np.asarray(file.keys)
    kinds = {name: Field(type="float64" if column.dtype.kind == "f" else "int64") for name, column in columns.items()}

    def rows() -> Iterator[Row]:
        lists = {name: column.tolist() for name, column in columns.items()}
        for number, payload in enumerate(file):
            yield {"data": payload, **{name: values[number] for name, values in lists.items()}}

    return Table(rows=rows(), schema={"data": Field(type="bytes"), **kinds})


def _write_recordio(path: Path, table: Table) -> int:
    with RecordWriter(path, overwrite=True) as writer:
        for number, row in enumerate(table.rows):
            payloads = {name: value for name, value in row.items() if isinstance(value, bytes)}
            numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
            others = sorted(row.keys() - payloads.keys() - numbers.keys())
            if len(payloads) != 1 or others:
                said = ", ".join(f"{name} ({type(row[name]).__name__})" for name in sorted({*payloads, *others}))
                raise _cannot(
                    f"row {number} with {said or 'no bytes'} as a RecordIO record",
                    "a record is one payload of bytes; what else belongs to it are numbers",
                    "a .mindrecord or .jsonl file holds such rows",
                )
            key = numbers.pop("key", None)
            if isinstance(key, float):
                raise _cannot(f"row {number} with key {key}", "a key is an integer", "another name for this field")
            writer.write(next(iter(payloads.values())), key=key, side=numbers)
    return len(writer)


def _read_mindrecord(path: Path) -> Table:
    file = MindRecordFile(path)
    return Table(rows=file, schema=file.schema)


def _write_mindrecord(path: Path, table: Table) -> int:
    rows = iter(table.rows)
    schema = table.schema
    if schema is None:
        first = next(rows, None)
        if first is None:
            raise _cannot("a source without rows", "the first row says what the fields are", "a source that holds rows")
        schema = {name: _kind(name, value) for name, value in first.items()}
        rows = chain([first], rows)
    with MindRecordWriter(path, schema, overwrite=True) as writer:
        for row in rows:
            writer.write(row)
    return len(writer)


def _kind(name: str, value: Any) -> Field:
    if isinstance(value, np.ndarray):
        array = cast("np.ndarray[Any, Any]", value)
        return Field(type=array.dtype.name, shape=(-1, *array.shape[1:]))
    kinds = {int: "int64", float: "float64", str: "string", bytes: "bytes"}
    if type(value) not in kinds:
        raise _cannot(
            f"field {name!r}, a {type(value).__name__}",
            "a field is an int, a float, a string, bytes or an array of numbers",
            "another type, or leave the field out",
        )
    return Field(type=kinds[type(value)])


def _read_jsonl(path: Path) -> Table:
    return Table(rows=_json_rows(path), schema=None)


def _json_rows(path: Path) -> Iterator[Row]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise _cannot(
            f"{path}: {error.strerror}", "a source is a file that can be read", "the path of a file"
        ) from error
    with file:
        offset = 0
        for number, line in enumerate(file, start=1):
            try:
                row: Any = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError("it is no object")
                yield {name: _from_json(value) for name, value in cast("dict[str, Any]", row).items()}
            except (ValueError, RecursionError) as error:
                raise _cannot(
                    f"{path}: line {number} at offset {offset}: {error}",
                    'a line is one JSON object of numbers, strings, lists of numbers, and bytes as {"base64": …}',
                    "mend or remove that line",
                ) from error
            offset += len(line)


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        found = cast("dict[str, Any]", value)
        if found.keys() != {"base64"} or not isinstance(found["base64"], str):
            raise ValueError('an object inside a row is {"base64": "…"}')
        try:
            return base64.b64decode(found["base64"], validate=True)
        except binascii.Error as error:
            raise ValueError(f"base64: {error}") from error
    if isinstance(value, list):
        array = np.array(cast("list[Any]", value))
        if array.dtype.kind not in "if":
            raise ValueError("a list inside a row is of numbers")
        return array
    if value is None or isinstance(value, bool):
        raise ValueError(f"{json.dumps(value)} is no number, string, list or bytes")
    return value


def _write_jsonl(path: Path, table: Table) -> int:
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    count = 0
    try:
        with temporary.open("x", encoding="utf-8") as file:
            for row in table.rows:
                try:
                    line = json.dumps(row, default=_to_json, ensure_ascii=False, allow_nan=False)
                except ValueError as error:
                    raise _cannot(
                        f"row {count}: {error}", "JSON has finite numbers only", "a .mindrecord file holds such rows"
                    ) from error
                file.write(line + "\n")
                count += 1
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)
    return count


def _to_json(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    return value.tolist()


def _cannot(given: str, rule: str, nearest: str) -> DataError:
    return DataError(Problem(given=given, rule=rule, consequence="nothing was written", nearest=nearest))


_FORMATS = {
    ".rec": (_read_recordio, _write_recordio),
    ".mindrecord": (_read_mindrecord, _write_mindrecord),
    ".jsonl": (_read_jsonl, _write_jsonl),
}
