"""Rows of files that a data job kept, stored in a folder, and read by a run or a conversion.

A folder of kept rows has ``kept/NAME.npy`` for each file of the data, the row indices of its kept rows in order, int64, and
``kept/files.json``, as ``data.per_file_arrays`` says.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from unisono.data.convert.formats.table import Row
from unisono.data.convert.pack.image_listing import list_images
from unisono.data.per_file_arrays import FILES_JSON, file_stamp, find_entry, read_array, stamp_of
from unisono.data.sources.arrow_folder import is_arrow_folder
from unisono.errors import DataError
from unisono.sanitize import listed, quoted
from unisono.storage.files import look_up, write_atomically
from unisono.storage.limits import LimitError, read_json

KEPT_FOLDER: Final = "kept"
_MOST_ROWS: Final = 1 << 48
_AGAIN: Final = "unisono data clean, dedup, split, leak or relabel again, with another folder"


class KeptFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file some of whose rows are kept.

    Attributes:
        name: Its path relative to the folder that all files lie in.
        stamp: Changes when the file does; see ``file_stamp``.
        rows: Number of its rows; 1 of a file that is one document.
        kept: Of these kept.
    """

    name: str
    stamp: str
    rows: Annotated[int, msgspec.Meta(ge=0, le=_MOST_ROWS)]
    kept: Annotated[int, msgspec.Meta(ge=0, le=_MOST_ROWS)]


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptRows:
    """A folder of kept rows, and its files by their names."""

    folder: Path
    files: Mapping[str, KeptFile]


def write_kept_files(folder: Path, files: Sequence[KeptFile]) -> None:
    """Write which files the row indices in ``folder``, below ``kept``, are of."""
    write_atomically(folder / KEPT_FOLDER / FILES_JSON, msgspec.json.encode(files))


def read_kept_rows(address: str | Path) -> KeptRows:
    """Open a folder of kept rows.

    Raises:
        DataError: It is not there, or is no such folder.
    """
    path, fault = look_up(address)
    if fault or not path.exists():
        raise _refused(f"{quoted(str(address))}: {fault or 'it does not exist'}", "the folder that --out named")
    place = path / KEPT_FOLDER / FILES_JSON
    try:
        entries = read_json(place, msgspec.json.Decoder(list[KeptFile]).decode)
    except (LimitError, ValueError, OSError) as error:
        given = f"{path}, where {KEPT_FOLDER}/{FILES_JSON} cannot be read: {error}"
        raise _refused(given, "the folder that --out named; of data split, that of a part in it") from error
    return KeptRows(folder=path, files={entry.name: entry for entry in entries})


def kept_of_file(kept: KeptRows, file: str | Path, stamp: str | None = None) -> tuple[NDArray[np.int64], int]:
    """The row indices of the kept rows of a file, in order, and the number of all its rows.

    Args:
        kept: The folder.
        file: The file.
        stamp: Its stamp, if it is known.

    Raises:
        DataError: The folder has no rows of the file, the file has changed since, or its row indices are damaged.
    """
    entry = find_entry(
        kept.files,
        file,
        stamp,
        unknown=lambda: _refused(
            f"{file}, of which {kept.folder} has no rows", "the files that the folder was made of, under their names"
        ),
        changed=lambda: _refused(f"{file}, which has changed since {kept.folder} was written", _AGAIN),
    )
    if not entry.kept or entry.kept == entry.rows == 1:  # no array is read for an image, of which a folder has many
        return np.arange(entry.kept), entry.rows
    path = kept.folder / KEPT_FOLDER / f"{entry.name}.npy"
    try:
        numbers = read_array(path, "i").astype(np.int64)
    except (ValueError, OSError) as error:
        raise _refused(f"{path}: {error}", _AGAIN) from error
    if len(numbers) != entry.kept or (numbers[1:] <= numbers[:-1]).any():
        raise _refused(f"{path}, which has not {entry.kept:,} numbers in order", _AGAIN)
    if numbers[0] < 0 or numbers[-1] >= entry.rows:
        raise _refused(f"{path} with rows from {numbers[0]} to {numbers[-1]}, of {entry.rows:,}", _AGAIN)
    return numbers, entry.rows


def kept_samples(kept: KeptRows, files: Sequence[str | Path]) -> tuple[NDArray[np.int64], int]:
    """The indices of the kept samples among those of all ``files``, in order, and the number of all.

    Args:
        kept: The folder.
        files: The files of a data set, in the order of their samples. A folder is one of images.

    Raises:
        DataError: As ``kept_of_file``; or no sample is kept.
    """
    begin, numbers = 0, list[NDArray[np.int64]]()
    for file in files:
        if os.path.isdir(file) and not is_arrow_folder(Path(file)):
            images = list_images(Path(file))
            found = (kept_of_file(kept, images.root / image.name, stamp_of(*image.stamp)) for image in images.samples)
            of_file = np.flatnonzero([len(rows) for rows, _ in found])
            total = len(images.samples)
        else:
            of_file, total = kept_of_file(kept, file)
        numbers.append(begin + of_file)
        begin += total
    samples = np.concatenate(numbers)
    if not len(samples):
        raise _refused(f"{kept.folder}, which keeps no row of {_named(files)}", "other data, or other limits")
    return samples, begin


def require_rows(kept: KeptRows, files: Sequence[str | Path], total: int, found: int) -> None:
    """Raise DataError if files have another number of samples than ``kept`` says."""
    if found != total:
        raise _refused(f"{kept.folder} with {total:,} rows of {_named(files)}, which have {found:,}", _AGAIN)


def kept_of_table(kept: KeptRows, files: Sequence[Path], rows: Iterable[Row]) -> Iterator[Row]:
    """Those of the ``rows`` of a table that are kept. Raises DataError as ``kept_samples`` and ``require_rows``.

    Args:
        kept: The folder.
        files: The files of the table.
        rows: All rows of these, in order.
    """
    numbers, total = kept_samples(kept, files)

    def chosen() -> Iterator[Row]:
        wanted, found = iter(numbers), 0
        following = next(wanted, None)
        for row in rows:
            if found == following:
                following = next(wanted, None)
                yield row
            found += 1
        require_rows(kept, files, total, found)

    return chosen()


def without_dropped(kept: KeptRows, folder: Path, names: Iterable[str]) -> list[str]:
    """The names of images in ``folder`` that are kept, or of which it is not known."""
    return [name for name in names if not _is_dropped(kept, folder / name)]


def _is_dropped(kept: KeptRows, file: Path) -> bool:
    try:
        return not len(kept_of_file(kept, file, file_stamp(file))[0])
    except (DataError, OSError):
        return False


def _named(files: Sequence[str | Path]) -> str:
    return listed([str(file) for file in files])


def _refused(given: str, nearest: str) -> DataError:
    return DataError(
        given=given,
        rule="a folder of kept rows is valid only for the unchanged files that it was made from",
        consequence="it is not known which rows are read",
        nearest=nearest,
    )
