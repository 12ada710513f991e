"""Labels of data sets: of rows of tables, of image records, and of images in one folder per class."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

from unisono.data.convert.formats.table import OtherFields, Row, describe_value
from unisono.data.convert.pack.image_listing import list_images
from unisono.data.convert.table_files import open_file
from unisono.data.per_file_arrays import file_stamp
from unisono.data.result_files import data_of_results
from unisono.data.sources.arrow_folder import arrow_classes, arrow_files, arrow_rows, is_arrow_folder
from unisono.errors import DataError
from unisono.quality.file_meter import UNMETERED, FileMeter
from unisono.quality.input_files import WHOLE_FILE, is_image_name, list_files
from unisono.quality.json_rows import NoValue
from unisono.quality.refused import refused
from unisono.quality.row_keys import class_of, image_class, keyed, row_keys
from unisono.sanitize import listed, quoted
from unisono.tasks.sources import TARGETS

IMAGES: Final = "images"
ARROW: Final = "arrow"
_OF_TEXTS: Final = (
    "a table with the text and the class of each file; "
    "unisono data labels and data split --stratify targets take folders of texts"
)


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
    paths = [data_of_results(path) for path in paths]
    for path in paths:
        if path.is_dir() and is_arrow_folder(path):
            found.append((path, ARROW, sum(file.stat().st_size for file in arrow_files(path))))
            continue
        files, _ = list_files([path])
        if path.is_dir() and all(file.kind == WHOLE_FILE and is_image_name(file.path) for file in files):
            found.append((path, IMAGES, sum(file.size for file in files)))
            continue
        for file in files:
            if file.kind == WHOLE_FILE:
                what, nearest = (
                    ("an image", "its folder") if is_image_name(file.path) else ("a file of text", _OF_TEXTS)
                )
                raise refused(
                    f"{file.path}, {what}", "rows of tables and images in folders have labels that runs read", nearest
                )
            found.append((file.path, file.kind, file.size))
    whole = [Path(os.path.abspath(path)) for path, _, _ in found]
    counts = Counter(map(os.path.realpath, whole))  # links to a file are the same file
    if twice := sorted(str(path) for path in whole if counts[os.path.realpath(path)] > 1):
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


def read_classes(file: LabelledFile, field: str, meter: FileMeter = UNMETERED) -> Iterator[str | DataError | None]:
    """The name of each row's class; None of a row without a label: an absent or empty value, or NaN.

    Of a row or an image that cannot be read it is the reason. Such a row has its number, such an image has none in a run.

    Names are those that ``data.train`` has for the classes: an integer is the text of its digits.

    Args:
        file: The file.
        field: Of the labels; of images and image records ``targets``.
        meter: Receives the bytes that are read.

    Raises:
        DataError: The file is damaged from there on, or has no such field.
    """
    if file.kind == IMAGES:
        yield from _folders_of_images(file.path, field)
        meter.end()
        return
    if file.kind == ARROW:
        names = arrow_classes(file.path).get(field, ())
        values = _field_of(arrow_rows(arrow_files(file.path)), field)
        found = keyed(values, file.path, field, partial(_class_in_run, names=names))
    else:
        found = row_keys(file.path, file.kind, field, _class_in_run, meter)
    for name in found:
        yield None if isinstance(name, NoValue) else cast("str | DataError", name)
    meter.end()


def first_fields(file: LabelledFile) -> list[str]:
    """The fields of the first row. Raises DataError if the file is damaged."""
    others: OtherFields = {}
    is_arrow = file.kind == ARROW
    rows = arrow_rows(arrow_files(file.path)) if is_arrow else open_file(file.path, file.kind, others=others).rows
    return [*next(iter(rows), {}), *others]


def _folders_of_images(folder: Path, field: str) -> Iterator[str | DataError]:
    if field != TARGETS:
        raise refused(
            f"{folder}, a folder of images, with the field {quoted(field)}",
            f"the label of an image is its folder, whose field is {TARGETS!r}",
            f"--label {TARGETS}",
        )
    listing = list_images(folder)
    for bad in listing.bad:
        yield refused(
            f"{folder}: {bad.path}: {bad.reason}",
            "all images can be read",
            "remove or repair it; --on-error skip leaves it out",
        )
    for image in listing.samples:
        yield image_class(folder / image.name, image.name)


def _field_of(rows: Iterable[Row], field: str) -> Iterator[Any]:
    return (row.get(field) for row in rows)


def _class_in_run(value: Any, names: Sequence[str] = ()) -> str | None:
    """The class, as ``class_of``. Raises DataError also for text that a run cannot read."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise refused(
                f"{describe_value(value)}, a lone surrogate at {error.start}",
                "text is Unicode, which UTF-8 can hold; a lone surrogate is half of a character",
                "that row without it",
            ) from error
    return class_of(value, names)
