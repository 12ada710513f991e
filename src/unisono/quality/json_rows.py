"""The rows of JSONL with one field each, where a line that has none, or is damaged, does not end the reading."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from unisono.data.convert.formats.jsonl import object_of_line, row_of_line
from unisono.data.convert.formats.table import Row, open_source
from unisono.data.text_encoding import encoding_of
from unisono.errors import DataError
from unisono.quality.file_meter import FileMeter
from unisono.quality.refused import refused
from unisono.sanitize import quoted
from unisono.storage.limits import MAX_RECORD_BYTES


@dataclass(frozen=True, slots=True)
class NoValue:
    """A row without a value: the field is missing, null, empty or NaN. The error says so."""

    error: DataError


def json_rows(path: Path, field: str, meter: FileMeter) -> Iterator[Row | NoValue | DataError]:
    """The field of each line, ``NoValue`` of one without it or with null, or why the line cannot be read.

    Raises:
        DataError: The file cannot be read from there on, or no line has the field: then its name is wrong.
    """
    has_field = False
    missing: DataError | None = None
    for number, offset, line in _lines(path, meter):
        try:
            row = row_of_line(line, path, number, offset, [field])
        except DataError as error:
            if len(line) > MAX_RECORD_BYTES or (number == 1 and encoding_of(line)):  # UTF-16 or UTF-32
                raise
            try:
                values = object_of_line(line, path, number, offset)
            except DataError:
                yield error
                continue
            if field in values:
                has_field = True
            else:
                missing = missing or error
            yield NoValue(error) if values.get(field) is None else error
        else:
            has_field = True
            yield row
    if missing is not None and not has_field:
        (problem,) = missing.problems
        raise refused(f"column {quoted(field)}, which no row of {path} has", problem.rule, problem.nearest)


def _lines(path: Path, meter: FileMeter) -> Iterator[tuple[int, int, bytes]]:
    """Number, from 1, offset and content of each line; of one that is too long only its beginning."""
    with open_source(path) as source:
        offset = 0
        for number, line in enumerate(iter(lambda: source.readline(MAX_RECORD_BYTES + 1), b""), 1):
            meter.add(len(line))
            yield number, offset, line
            offset += len(line)
