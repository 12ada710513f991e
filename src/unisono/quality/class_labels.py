"""Labels of data sets: of rows of tables, of image records, and of images in one folder per class."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from unisono.data.convert.formats.jsonl import row_of_line
from unisono.data.convert.formats.table import Row, check_columns, describe_value, open_source
from unisono.data.convert.pack.image_listing import list_images
from unisono.data.convert.table_files import open_file
from unisono.data.per_file_arrays import file_stamp
from unisono.data.sources import open_source as open_data
from unisono.data.sources.arrow_folder import arrow_classes, arrow_files, arrow_rows, is_arrow_folder
from unisono.data.sources.converted import sample_of_row
from unisono.errors import DataError
from unisono.quality.documents import WHOLE_FILE, list_files
from unisono.quality.file_meter import UNMETERED, FileMeter
from unisono.quality.refused import refused
from unisono.sanitize import listed, quoted
from unisono.storage.limits import MAX_RECORD_BYTES
from unisono.tasks.sources import TARGETS, class_names_of, scan
from unisono.tasks.targets import class_names, is_absent

IMAGES: Final = "images"
ARROW: Final = "arrow"


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledFile:
    """A table, or a folder of images or of a Hugging Face data set.

    Attributes:
        path: Of the file or folder.
        name: Its path relative to the folder that was given; of several paths, relative to the folder that all lie in.
        kind: The suffix that names the format of a table, ``images`` or ``arrow``.
        stamp: Changes when the file does.
        size: In bytes; of a folder that of its files.
    """

    path: Path
    name: str
    kind: str
    stamp: str
    size: int


def find_labelled(paths: Sequence[Path]) -> list[LabelledFile]:
    """List the files whose rows have labels.

    Args:
        paths: Tables (of which one file of a set stands for the set), folders of tables, folders of images, or folders of
            Hugging Face's ``save_to_disk``.

    Raises:
        DataError: A path is not there, is given twice, or is neither.
    """
    found: list[tuple[Path, str, int]] = []  # path, kind and size
    for path in paths:
        if path.is_dir() and is_arrow_folder(path):
            found.append((path, ARROW, sum(file.stat().st_size for file in arrow_files(path))))
            continue
        files, _ = list_files([path])
        if path.is_dir() and all(file.kind == WHOLE_FILE for file in files):
            found.append((path, IMAGES, sum(file.size for file in files)))
            continue
        for file in files:
            if file.kind == WHOLE_FILE:
                raise refused(f"{file.path}, a file of text", "rows of tables and images have labels", "a table")
            found.append((file.path, file.kind, file.size))
    whole = [Path(os.path.abspath(path)) for path, _, _ in found]
    if len(set(whole)) < len(whole):
        twice = sorted({str(path) for path in whole if whole.count(path) > 1})
        raise refused(f"files that are given twice: {listed(map(quoted, twice))}", "each row counts once", "each once")
    is_tables = len(paths) == 1 and paths[0].is_dir() and found[0][0] != paths[0]
    common = paths[0] if is_tables else os.path.commonpath([path.parent for path in whole])
    return [
        LabelledFile(path=path, name=os.path.relpath(path, common), kind=kind, stamp=file_stamp(path), size=size)
        for path, kind, size in found
    ]


def require_unchanged(files: Sequence[LabelledFile]) -> None:
    """Raise DataError if a file has changed since it was listed."""
    for file in files:
        if not file.path.exists() or file_stamp(file.path) != file.stamp:
            raise refused(
                f"{file.path}, which has changed meanwhile",
                "a data set stays as it is while it is read",
                "the same command again, with another folder for the results",
            )


def read_classes(file: LabelledFile, field: str, meter: FileMeter = UNMETERED) -> Iterator[str | None]:
    """The name of each row's class; None of a row without a label: an absent or empty value, or NaN.

    Names are those that ``data.train`` has for the classes: an integer is the text of its digits.

    Args:
        file: The file.
        field: Of the labels; of images and image records ``targets``.
        meter: Receives the bytes that are read.

    Raises:
        DataError: The file is damaged, has no such field, or a label is neither text nor an integer.
    """
    names: tuple[str, ...] = ()
    if file.kind == IMAGES:
        yield from _folders_of_images(file.path, field)
        meter.end()
        return
    if file.kind == ARROW:
        names = arrow_classes(file.path).get(field, ())
        values = _field_of(arrow_rows(arrow_files(file.path)), field)
    elif file.kind == ".rec":
        records = open_data(file.path, columns={TARGETS: field})
        names = class_names_of(records, field)
        values = (sample[TARGETS] for sample in meter.shares(scan(records), len(records)))
    elif file.kind == ".jsonl":
        values = _values_of_lines(file.path, field, meter)
    else:
        table = open_file(file.path, file.kind, [field] if file.kind == ".parquet" else None)
        if table.schema is not None:
            check_columns([field], table.schema, str(file.path))
        values = _field_of(meter.rows(table), field)
    known: dict[tuple[type, Any], str | None] = {}
    for row, value in enumerate(values):
        if not isinstance(value, str | int | bytes):
            yield _name(value, names, file.path, row, field)
            continue
        key = (type(value), value)
        if key not in known:
            known[key] = _name(value, names, file.path, row, field)
        yield known[key]
    meter.end()


def _folders_of_images(folder: Path, field: str) -> Iterator[str]:
    if field != TARGETS:
        raise refused(
            f"{folder}, a folder of images, with the field {quoted(field)}",
            f"the label of an image is its folder, whose field is {TARGETS!r}",
            f"--label {TARGETS}",
        )
    listing = list_images(folder)
    if listing.bad:
        raise refused(
            f"{folder}: {listing.bad[0].path}: {listing.bad[0].reason}", "all images can be read", "remove or repair it"
        )
    for image in listing.samples:
        yield listing.classes[int(image.labels[0])] if listing.classes else "0"


def _field_of(rows: Iterable[Row], field: str) -> Iterator[Any]:
    return (row.get(field) for row in rows)


def _values_of_lines(path: Path, field: str, meter: FileMeter) -> Iterator[Any]:
    """The value of each line of JSONL; None where the field is missing or null."""
    with open_source(path) as source:
        offset = 0
        for number, line in enumerate(iter(lambda: source.readline(MAX_RECORD_BYTES + 1), b""), 1):
            meter.add(len(line))
            try:
                yield row_of_line(line, path, number, offset, [field])[field]
            except DataError:
                if not _is_without(line, field):
                    raise
                yield None
            offset += len(line)


def _is_without(line: bytes, field: str) -> bool:
    """Whether the line is an object without the field, or with null there."""
    try:
        row = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError:
        return False
    return field not in row or bytes(row[field]) == b"null"


def _name(value: Any, names: Sequence[str], path: Path, row: int, field: str) -> str | None:
    """The name of a class; ``names`` are those of its numbers, where -1 is no label (as in Hugging Face's ``ClassLabel``)."""
    if value is None:
        return None
    try:
        if isinstance(value, list | tuple):
            raise refused(describe_value(value), "a row has one label", "a field of single labels")
        array = sample_of_row({field: value}, row)[field]
        if is_absent(array):
            return None
        (name,) = class_names(array, several=False)
        if not names or not isinstance(name, int):
            return str(name)
        if not -1 <= name < len(names):
            raise refused(
                f"class {name} of {len(names)} classes", "a number of a class is below their number", "another"
            )
        return names[name] if name >= 0 else None
    except DataError as error:
        place = f"{path}, row {row}, field {quoted(field)}"
        raise DataError(*(replace(problem, given=f"{place}: {problem.given}") for problem in error.problems)) from error
