"""Classes and groups of the rows of one file: what a field says of each row, as the name of a class or the value of a group."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from unisono.data.convert.formats.table import check_columns, describe_value
from unisono.data.convert.table_files import open_file
from unisono.errors import DataError
from unisono.quality.file_meter import UNMETERED, FileMeter
from unisono.quality.image_records import RECORDS, record_classes
from unisono.quality.input_files import PARQUET
from unisono.quality.json_rows import NoValue, json_rows
from unisono.quality.parquet_rows import parquet_rows
from unisono.quality.refused import refused
from unisono.sanitize import quoted
from unisono.tasks.sources import TARGETS
from unisono.tasks.targets import class_names, is_absent

# The class or group of a field's value; None if absent. Raises DataError for other types.
Key = Callable[[Any], Hashable | None]
_ABSENT: Final = "a class or a group is a string or a number, and not empty"
_CACHED: Final = 100_000  # values


def class_of(value: Any, names: Sequence[str] = ()) -> str | None:
    """The name of a class, as runs have it: an integer is the text of its digits. None of an absent one, empty text or NaN.

    Args:
        value: A value of a field.
        names: Those of the numbers, where -1 is no label (as in Hugging Face's ``ClassLabel``). Empty if they are not known.

    Raises:
        DataError: It is neither text nor an integer, or a number that has no name.
    """
    if value is None:
        return None
    if isinstance(value, list | tuple):
        raise refused(describe_value(value), "a row has one label", "a field of single labels")
    if isinstance(value, str):
        return value if value.strip() else None
    array = np.frombuffer(value, np.uint8) if isinstance(value, bytes) else np.asarray(value)
    if is_absent(array):
        return None
    try:
        (name,) = class_names(array, several=False)
    except DataError as error:
        rule, nearest = "a class is one text or one integer", "the field of the class, or without that row"
        raise refused(describe_value(value), rule, nearest) from error
    if not names or not isinstance(name, int):
        return str(name)
    if not -1 <= name < len(names):
        raise refused(
            f"class index {name}, with {len(names)} class names",
            f"class indices are 0 to {len(names) - 1}; -1 means no label",
            "another index, or the missing class name",
        )
    return names[name] if name >= 0 else None


def group_of(value: Any) -> Hashable | None:
    """The value of a group; None of an absent one, empty text or NaN. Raises DataError for what is no text or number."""
    if isinstance(value, str):
        return value if value.strip() else None
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, float):
        return None if math.isnan(value) else value
    raise refused(describe_value(value), "a group is a string or a number", "a field of single values")


def image_class(file: str | Path, within: str) -> str:
    """The class of an image: the name of its folder, relative to the folder that was given.

    Args:
        file: The image.
        within: Its path in the folder that was given; of one that lies in it directly, or was given itself, the name.
    """
    return os.path.dirname(within) or os.path.basename(os.path.dirname(os.path.abspath(file)))


def row_keys(
    path: Path, kind: str, field: str, key: Key, meter: FileMeter = UNMETERED
) -> Iterator[Hashable | NoValue | DataError]:
    """The key of each row of a table or of records, ``NoValue``, or why the row cannot be read.

    Args:
        path: The file.
        kind: The suffix that names its format.
        field: Of the classes or groups; of image records ``targets``.
        key: Of a value.
        meter: Receives the bytes that are read.

    Raises:
        DataError: The file is damaged from there on, or has no such field.
    """
    yield from keyed(_values(path, kind, field, meter), path, field, key)
    meter.end()


def keyed(values: Iterable[Any], path: Path, field: str, key: Key) -> Iterator[Hashable | NoValue | DataError]:
    """The keys of values, with places in their errors; ``NoValue`` and ``DataError`` among the values stay."""
    known: dict[tuple[type, Any], Hashable | None] = {}
    for row, value in enumerate(values):
        if isinstance(value, NoValue | DataError):
            yield value
            continue
        cached = (type(value), value) if isinstance(value, str | int | bytes) else None
        try:
            found = known[cached] if cached in known else key(value)
        except DataError as error:
            place = f"{path}, row {row}, field {quoted(field)}"
            yield DataError(*(replace(problem, given=f"{place}: {problem.given}") for problem in error.problems))
            continue
        if cached is not None and len(known) < _CACHED:
            known[cached] = found
        if found is None:
            given = f"{path}, row {row}, field {quoted(field)}: {describe_value(value)}"
            found = NoValue(refused(given, _ABSENT, "another field, or without that row"))
        yield found


def _values(path: Path, kind: str, field: str, meter: FileMeter) -> Iterator[Any]:
    if kind == ".jsonl":
        yield from (row[field] if isinstance(row, dict) else row for row in json_rows(path, field, meter))
        return
    if kind == PARQUET:
        for row in parquet_rows(path, [field], meter):
            yield row[field]
        return
    if kind == RECORDS and field == TARGETS and TARGETS not in next(iter(open_file(path, kind).rows), ()):
        yield from record_classes(path, meter)  # names, or numbers of classes without names
        return
    table = open_file(path, kind)
    if table.schema is not None:
        check_columns([field], table.schema, str(path))
    for number, row in enumerate(meter.rows(table)):
        if field in row:
            yield row[field]
        else:
            given = f"{path}, row {number}, field {quoted(field)}: it is missing"
            yield NoValue(refused(given, _ABSENT, "another field, or without that row"))
