"""Image records of RecordIO: images behind MXNet's header, which has the number of their class."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from unisono.data.convert.table_files import Row
from unisono.data.image.decoding import image_format
from unisono.data.recordio import pack_header, unpack_header
from unisono.data.sources import open_source
from unisono.errors import DataError
from unisono.quality.file_meter import UNMETERED, FileMeter
from unisono.sanitize import quoted
from unisono.storage.files import write_atomically
from unisono.tasks.sources import TARGETS, class_names_of, scan

RECORDS: Final = ".rec"
PAYLOAD: Final = "data"  # field of the record in a row
_OF_THE_FILE: Final = "the class of an image record is one of those in .classes.txt, if that file is there"


def image_of_record(payload: bytes) -> bytes | None:
    """The encoded image behind the header of an image record; None of another payload."""
    if image_format(payload) is not None:
        return None
    try:
        image = unpack_header(payload)[1]
    except DataError:
        return None
    return None if image_format(image) is None else bytes(image)


def record_class_names(path: Path) -> tuple[str, ...]:
    """Names of the classes that are beside a file of image records, in the order of their numbers; empty without any."""
    return class_names_of(open_source(path, classes=False), TARGETS)


def record_classes(path: Path, meter: FileMeter = UNMETERED) -> Iterator[str | int]:
    """The class of each image record: its name, or its number where names are not known.

    Raises:
        DataError: A label is none of the classes.
    """
    names = record_class_names(path)
    records = open_source(path, columns={TARGETS: TARGETS})
    for record, sample in enumerate(meter.shares(scan(records), len(records))):
        number = int(sample[TARGETS])
        if names and number >= len(names):
            raise _refused(f"{path}, record {record}, with class {number} of {len(names)}", _OF_THE_FILE)
        yield names[number] if names else number


def with_class(row: Row, names: tuple[str, ...], label: str) -> Row:
    """The row of an image record with another class; ``names`` are those of the classes, if they are known.

    Raises:
        DataError: It is none of the classes.
    """
    header, image = unpack_header(row[PAYLOAD])
    if not names and not label.isdecimal():
        raise _refused(
            f"class {quoted(label)} for an image record without class names",
            "class labels of such records are integers",
        )
    if names and label not in names:
        raise _refused(f"class {quoted(label)} for an image record whose {len(names)} classes are others", _OF_THE_FILE)
    number = names.index(label) if names else int(label)
    return {**row, PAYLOAD: pack_header(replace(header, label=float(number)), bytes(image))}


def copy_class_names(path: Path, copy: Path) -> None:
    """Write the names of a file's classes, if it has any, beside its copy, where ``open_source`` finds them."""
    if names := record_class_names(path):
        write_atomically(Path(f"{copy}.classes.txt"), "".join(f"{name}\n" for name in names).encode())


def _refused(given: str, rule: str) -> DataError:
    return DataError(
        given=given,
        rule=rule,
        consequence="nothing was written",
        nearest="the file of classes that unisono data pack wrote beside the records",
    )
