"""One reading of all tables: the types of each file's columns, and their numbers in files of their own.

Each file of the data set has a folder with arrays: ``numbers-N.rows`` and ``.values`` of each column with numbers (int64 row in
the file, float64), the same of stamps (``time``), and ``groups.codes`` (int32 per row). Those of a small file are in one file,
``arrays``, as a table may have 100,000 columns; those of a larger one in a file each. ``facts.json`` is written last: a killed
job reads no finished file again.
"""

from __future__ import annotations

import codecs
import logging
import shutil
from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from unisono.data.convert.formats.csv import number_kind
from unisono.data.convert.formats.table import describe_value, open_source
from unisono.data.image.decoding import probe
from unisono.data.recordio import unpack_header
from unisono.data.text_encoding import encoding_of
from unisono.errors import DataError, nearest_name
from unisono.quality.columns.table_cells import (
    ABSENT,
    BYTES,
    FLOAT,
    INT,
    KINDS,
    NULL,
    OTHER,
    STRING,
    Batch,
    Cells,
    read_cells,
)
from unisono.quality.documents import Documents
from unisono.quality.file_meter import FileMeter
from unisono.quality.input_files import InputFile, is_image_name
from unisono.quality.progress import SILENT, Progress
from unisono.quality.refused import refused
from unisono.sanitize import quoted
from unisono.storage.directory import make_folder
from unisono.storage.files import opener, write_atomically
from unisono.storage.json_lines import as_json
from unisono.storage.limits import read_json

MAX_GROUPS: Final = 100_000
EMPTY: Final = "empty"
NO_TEXT: Final = ("binary", "broken image")  # contents of bytes that are neither text nor a known image
UTF8: Final = "text, UTF-8"
UTF8_BOM: Final = "text, UTF-8 with mark"
UTF16: Final = "text, UTF-16"  # with its mark
OTHER_TEXT: Final = "text, not UTF-8"
TEXTS: Final = (UTF8, UTF8_BOM, UTF16, OTHER_TEXT)
_FACTS: Final = "facts.json"
_ARRAYS: Final = "arrays"
_HEAD_BYTES: Final = 1 << 20
_LOG: Final = logging.getLogger("unisono")
_BUFFER_BYTES: Final = 64 << 20  # of arrays that are not written yet
_ARRAY_BYTES: Final = 200  # that an array takes beside its numbers
_OPEN_FILES: Final = 64
_NUMBERS: Final = ("int", "float")
_FEW_TEXTS: Final = 0.1  # of the cells of a CSV column of numbers
_BOM_FORMATS: Final = (".csv", ".jsonl")  # which may begin with a byte-order mark
_CONTROL: Final = bytes(set(range(32)) - set(b"\t\n\r\f\x1b"))
_MAX_STAMP: Final = 1e300  # differences of larger numbers may be infinite
_STAMP_UNITS: Final = {"timestamp[s": 1.0, "timestamp[ms": 1e-3, "timestamp[us": 1e-6, "timestamp[ns": 1e-9}


class ColumnFacts(msgspec.Struct):
    """A column of one file.

    Attributes:
        counts: Cells of each kind but ``absent``.
        first: Row and value, described, of the first cell of each kind.
        stored: The type that the file declares; empty if it declares none.
        contents: Of bytes: count and first row of each content, such as ``JPEG RGB`` or ``text, UTF-8``.
        is_number_text: Whether each string is the text of a finite number.
        numbers: Number of the column's file of numbers, -1 if it has none.
        has_bare_numbers: Whether strings among the cells are numbers without quotes, as CSV has them.
        has_null_texts: Whether some of the cells that are null are texts that stand for no value.
    """

    counts: dict[str, int] = {}
    first: dict[str, tuple[int, str]] = {}
    stored: str = ""
    contents: dict[str, tuple[int, int]] = {}
    is_number_text: bool = True
    numbers: int = -1
    has_bare_numbers: bool = False
    has_null_texts: bool = False


class FileFacts(msgspec.Struct):
    """A file.

    Attributes:
        rows: Number of its rows.
        columns: By name, in their order.
        groups: The groups by their codes.
        encoding: Of a file of text that is not empty, such as ``text, UTF-8`` or ``text, UTF-8 with mark``; empty of any other.
        time_kind: ``number``, ``text`` or ``timestamp``; empty without stamps.
        time_unit_s: Seconds of one unit of stamps that are dates; 0 of numbers, whose unit is not known.
        time_base: The first stamp in its unit; stamps are written relative to it, so that float64 keeps their differences.
        places: Of a small file where each array is in ``arrays``: first byte and bytes.
    """

    rows: int = 0
    columns: dict[str, ColumnFacts] = {}
    groups: list[str] = []
    encoding: str = ""
    time_kind: str = ""
    time_unit_s: float = 0.0
    time_base: int | float = 0
    places: dict[str, tuple[int, int]] = {}


def scan_files(
    documents: Documents,
    folder: Path,
    *,
    time: str | None,
    group: str | None,
    null_texts: Collection[str] = (),
    compares_encodings: bool = False,
    progress: Progress = SILENT,
) -> list[FileFacts]:
    """Read all files that have not been read before into ``folder``; one folder for each, by its number.

    Args:
        documents: The tables; or images, each a table of one row with the column ``image``.
        folder: A folder of this job alone.
        time: Column of stamps: numbers, ISO 8601 texts or Parquet's timestamps.
        group: Column whose values name a sensor.
        null_texts: Texts that stand for no value.
        compares_encodings: Whether a file that is not UTF-8, beside others that are, has its encoding as its only fact.
        progress: Receives the bytes that are read.

    Raises:
        DataError: A file is text, or there are images beside tables; a file is damaged or has changed, or a row's stamp or
            group cannot be one.
        ExtraError: A package that reads a format is not installed.
    """
    whole = [file for file in documents.files if file.corpus_entry is not None]
    is_images = len(whole) == len(documents.files) and all(is_image_name(file.path) for file in whole)
    if whole and not is_images:
        raise refused(
            f"{whole[0].path}, a file that is no table", "columns are those of tables", "tables, or images alone"
        )
    images = replace(documents, content="images")
    places = [folder / str(number) for number in range(len(documents.files))]
    earlier = [_facts_of(place) for place in places]
    done = sum(file.size for file, found in zip(documents.files, earlier, strict=True) if found is not None)
    progress.begin("reading", documents.total_bytes, "bytes", done=done)
    facts: list[FileFacts] = []
    others: list[DataError] = []  # of files in another encoding than UTF-8
    for number, (file, place, found) in enumerate(zip(documents.files, places, earlier, strict=True)):
        if file.corpus_entry is not None:
            found = _facts_of_image(images, number)
            progress.advance(file.size)
        elif found is None:
            shutil.rmtree(place, ignore_errors=True)
            make_folder(place)
            meter = FileMeter(file.size, progress.advance)
            try:
                found = _FileScan(file, place, time, group, null_texts).run(meter)
                write_atomically(place / _FACTS, as_json(msgspec.to_builtins(found)))
            except DataError as error:
                encoding = other_encoding(file) if compares_encodings else ""
                if not encoding:
                    raise
                others.append(error)
                shutil.rmtree(place)  # columns of its first rows
                found = FileFacts(encoding=encoding)
            meter.end()
        facts.append(found)
    documents.require_unchanged()
    if others and not any(found.columns for found in facts):
        raise others[0]
    for error in others:
        (problem,) = error.problems
        _LOG.warning(
            "%s: its columns are not compared with the others; they would be with %s", problem.given, problem.nearest
        )
    for column in (time, group):
        if column is not None and facts and not any(column in found.columns for found in facts):
            names = list(dict.fromkeys(name for found in facts for name in found.columns))
            raise refused(f"column {quoted(column)}, which no file has", "it is a column", nearest_name(column, names))
    return facts


def _facts_of_image(images: Documents, number: int) -> FileFacts:
    """A file that is an image as a table of one row, whose only column is the image."""
    data = next((data for _, data in images.contents([(number, 0)]) if isinstance(data, bytes)), b"")
    content = content_of(data, may_have_header=False)
    image = ColumnFacts(counts={"bytes": 1}, first={"bytes": (0, content)}, contents={content: (1, 0)})
    return FileFacts(rows=1, columns={"image": image})


def _facts_of(place: Path) -> FileFacts | None:
    """What an earlier job has found out about a file; None if it was killed before."""
    try:
        return msgspec.convert(read_json(place / _FACTS), FileFacts)
    except (OSError, ValueError):
        return None


class _FileScan:
    """The state of reading one file."""

    def __init__(
        self, file: InputFile, folder: Path, time: str | None, group: str | None, null_texts: Collection[str]
    ) -> None:
        self._null_texts = frozenset(null_texts)
        self._file, self._folder, self._time, self._group = file, folder, time, group
        self._facts = FileFacts()
        self._codes: dict[str, int] = {}
        self._num_numeric = 0
        self._pending: dict[str, list[NDArray[Any]]] = {}
        self._pending_bytes = 0
        self._is_small = True

    def run(self, meter: FileMeter) -> FileFacts:
        facts = self._facts
        if self._file.kind in _BOM_FORMATS:
            facts.encoding = _encoding(self._file)
        for batch in read_cells(self._file.path, self._file.kind, [name for name in (self._time, self._group) if name]):
            if self._group is not None:  # before texts become no value: a name of a group is a text
                self._add_groups(batch, self._group)
            for name, cells in batch.columns.items():
                self._add(facts.columns.setdefault(name, ColumnFacts()), cells)
            if self._time is not None:
                self._add_stamps(batch, self._time)
            facts.rows += batch.rows
            meter.add(batch.size)
        facts.groups = list(self._codes)
        if self._file.kind == ".csv":
            for column in facts.columns.values():
                _join_texts(column)
        if self._is_small:
            self._write_together()
        else:
            self._flush()
        return facts

    def _add(self, column: ColumnFacts, cells: Cells) -> None:
        row = self._facts.rows
        if self._null_texts:
            is_text = cells.kinds == STRING
            texts = [at for at in np.flatnonzero(is_text).tolist() if cells.values[at] in self._null_texts]
            cells.kinds[texts] = NULL
            column.has_null_texts = column.has_null_texts or bool(texts)
        column.stored = cells.stored
        for kind, count in enumerate(np.bincount(cells.kinds, minlength=len(KINDS)).tolist()):
            if count and kind != ABSENT:
                name = KINDS[kind]
                column.counts[name] = column.counts.get(name, 0) + count
                if name not in column.first:
                    at = int(np.argmax(cells.kinds == kind))
                    column.first[name] = (row + at, _shown(cells, at))
        where = np.flatnonzero((cells.kinds == INT) | (cells.kinds == FLOAT))
        if len(where):
            if column.numbers < 0:
                column.numbers = self._num_numeric
                self._num_numeric += 1
            self._write(f"numbers-{column.numbers}", row + where, cells.numbers[where])
        column.is_number_text = column.is_number_text and all(
            _is_finite_number(cells.values[at]) for at in np.flatnonzero(cells.kinds == STRING).tolist()
        )
        for at in np.flatnonzero(cells.kinds == BYTES).tolist():
            content = content_of(cells.values[at], may_have_header=self._file.kind == ".rec")
            count, first = column.contents.get(content, (0, row + at))
            column.contents[content] = (count + 1, first)

    def _add_stamps(self, batch: Batch, name: str) -> None:
        cells = batch.columns.get(name)
        if cells is None:
            return
        facts = self._facts
        where = np.flatnonzero((cells.kinds != ABSENT) & (cells.kinds != NULL))
        stamps: list[int | float] = []
        for at in where.tolist():
            stamp, kind = _stamp(cells, at)
            if not kind or facts.time_kind not in ("", kind):
                raise refused(
                    f"{self._file.path}: row {facts.rows + at}, column {quoted(name)}: {_shown(cells, at)}",
                    f"a stamp is a number from {-_MAX_STAMP:g} to {_MAX_STAMP:g}, or a date and time as ISO 8601 writes them, "
                    "alike in all rows",
                    "another --time column, or without that row",
                )
            if not facts.time_kind:
                facts.time_kind, facts.time_base = kind, stamp
                if kind != "number":
                    facts.time_unit_s = _unit_s(cells.stored) if kind == "timestamp" else 1e-6
            stamps.append(stamp)
        relative = np.array([float(stamp - facts.time_base) for stamp in stamps], np.float64)
        self._write("time", facts.rows + where, relative * (facts.time_unit_s or 1.0))

    def _add_groups(self, batch: Batch, name: str) -> None:
        cells = batch.columns.get(name)
        codes = np.zeros(batch.rows, np.int32)
        for at in range(batch.rows):
            kind = ABSENT if cells is None else int(cells.kinds[at])
            if cells is None or kind in (ABSENT, NULL):
                group = ""
            elif kind in (INT, FLOAT, STRING):
                group = str(cells.values[at])
            else:
                raise refused(
                    f"{self._file.path}: row {self._facts.rows + at}, column {quoted(name)}: {_shown(cells, at)}",
                    "a group is named by a string or a number",
                    "another --group column",
                )
            codes[at] = self._codes.setdefault(group, len(self._codes))
        require_few_groups(len(self._codes), name)
        self._append("groups.codes", codes)

    def _write(self, name: str, rows: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        self._append(f"{name}.rows", rows)
        self._append(f"{name}.values", values)

    def _append(self, name: str, values: NDArray[Any]) -> None:
        self._pending.setdefault(name, []).append(values)
        self._pending_bytes += values.nbytes + _ARRAY_BYTES
        if self._pending_bytes > _BUFFER_BYTES:
            self._flush()
            self._is_small = False

    def _flush(self) -> None:
        """Append the arrays to files of their own."""
        for name, parts in self._pending.items():
            with open(self._folder / name, "ab", opener=opener) as file:
                file.writelines(part.tobytes() for part in parts)
        self._pending, self._pending_bytes = {}, 0

    def _write_together(self) -> None:
        """Write the arrays into one file, each from a multiple of 8 bytes on."""
        with open(self._folder / _ARRAYS, "wb", opener=opener) as file:
            for name, parts in self._pending.items():
                begin = file.tell()
                file.writelines(part.tobytes() for part in parts)
                self._facts.places[name] = begin, file.tell() - begin
                file.write(bytes(-file.tell() % 8))


def _encoding(file: InputFile) -> str:
    """The encoding of a file that is read as UTF-8; empty of an empty one."""
    with open_source(file.path) as source:
        head = source.read(len(codecs.BOM_UTF8))
    return UTF8_BOM if head == codecs.BOM_UTF8 else UTF8 if head else ""


def other_encoding(file: InputFile) -> str:
    """The encoding of a file of text that is not UTF-8; empty if it is, or of a file in another format."""
    if file.kind not in _BOM_FORMATS:
        return ""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with open_source(file.path) as source:
        head = source.read(_HEAD_BYTES)
        if name := encoding_of(head):
            return f"text, {name}"
        try:
            for piece in chain([head], iter(lambda: source.read(_HEAD_BYTES), b"")):
                decoder.decode(piece)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            return OTHER_TEXT
    return ""


def require_few_groups(count: int, column: str) -> None:
    """Raise DataError for more groups than ``MAX_GROUPS``."""
    if count > MAX_GROUPS:
        raise refused(
            f"column {quoted(column)} with more than {MAX_GROUPS:,} values",
            f"a group is one sensor of at most {MAX_GROUPS:,}",
            "the column that names the sensor",
        )


def _join_texts(column: ColumnFacts) -> None:
    """A CSV column of texts has strings that look like numbers, such as codes; they count as strings like the others.

    A column of numbers with a few texts stays what it is, so that these texts are seen.
    """
    strings = column.counts.get("string", 0)
    numbers = sum(column.counts.get(kind, 0) for kind in _NUMBERS)
    if numbers and strings > _FEW_TEXTS * (numbers + strings):
        column.counts["string"] = strings + numbers
        column.first["string"] = min(column.first[kind] for kind in ("string", *_NUMBERS) if kind in column.first)
        for kind in _NUMBERS:
            column.counts.pop(kind, None)
            column.first.pop(kind, None)
        column.numbers, column.has_bare_numbers = -1, True


def _is_finite_number(text: str) -> bool:
    return bool(number_kind(text)) and not text.lstrip("-").isalpha()  # nan and inf


def _shown(cells: Cells, at: int) -> str:
    """A cell for an error or a report."""
    if cells.values:
        return describe_value(cells.values[at])
    number = float(cells.numbers[at])
    return f"{number:g}" if number == number else KINDS[cells.kinds[at]]


def _stamp(cells: Cells, at: int) -> tuple[int | float, str]:
    """The stamp of a cell in its unit, and its kind; an empty kind if it is none."""
    kind, value = int(cells.kinds[at]), cells.values[at]
    if kind in (INT, FLOAT) and not abs(cells.numbers[at]) <= _MAX_STAMP:  # nor is NaN
        return 0, ""
    if kind == INT:
        return int(value), "number"
    if kind == FLOAT:
        return float(cells.numbers[at]), "number"
    if kind == OTHER and _unit_s(cells.stored):
        return int(value), "timestamp"
    if kind == STRING:
        try:
            date = datetime.fromisoformat(value)
        except ValueError:
            return 0, ""
        since = (date if date.tzinfo is not None else date.replace(tzinfo=UTC)) - datetime(1970, 1, 1, tzinfo=UTC)
        return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds, "text"
    return 0, ""


def _unit_s(stored: str) -> float:
    return next((unit_s for name, unit_s in _STAMP_UNITS.items() if stored.startswith(name)), 0.0)


def content_of(value: bytes, *, may_have_header: bool) -> str:
    """The format and mode of an image, or the encoding of a text, by the bytes alone."""
    if not value:
        return EMPTY
    try:
        info = probe(value)
    except DataError:
        if value.startswith((b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")):
            return "broken image"
    else:
        return f"{info.format} {info.mode}"
    if may_have_header:
        try:
            image = bytes(unpack_header(value)[1])
        except DataError:
            image = b""
        if image and (content := content_of(image, may_have_header=False)) not in (*NO_TEXT, *TEXTS):
            return content
    if value.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) and _is_utf16(value):
        return UTF16
    if value.translate(None, _CONTROL) != value:
        return "binary"
    try:
        value.decode()
    except UnicodeDecodeError:
        return OTHER_TEXT
    return UTF8_BOM if value.startswith(codecs.BOM_UTF8) else UTF8


def _is_utf16(value: bytes) -> bool:
    try:
        return "\0" not in value.decode("utf-16")
    except UnicodeDecodeError:
        return False


class ScannedArrays:
    """The arrays that the reading of all files has written.

    Args:
        folder: That of the scan.
        facts: Of the files.
    """

    def __init__(self, folder: Path, facts: Sequence[FileFacts]) -> None:
        self._folder, self._facts = folder, facts
        self._together = lru_cache(maxsize=_OPEN_FILES)(self._map_together)

    def read(self, file: int, name: str, dtype: Any) -> NDArray[Any]:
        """An array of a file, of one dim, mapped into memory; an array that was not written is empty."""
        if self._facts[file].places:
            begin, size = self._facts[file].places.get(name, (0, 0))
            return self._together(file)[begin : begin + size].view(dtype)
        return mapped(self._folder / str(file) / name, dtype)

    def _map_together(self, file: int) -> NDArray[np.uint8]:
        return mapped(self._folder / str(file) / _ARRAYS, np.uint8)


def mapped(path: Path, dtype: Any) -> NDArray[Any]:
    """The array of a file, of one dim; a file that is not there has none."""
    if not path.exists() or not path.stat().st_size:
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, mode="r")
