"""Arrays for the rows of files, in a folder: ``NAME.npy`` for each file, and ``files.json`` with the names and stamps of all.

A NAME is a file's path relative to the folder that all files lie in, so the data can be moved as a whole.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any, Final, Protocol, TypeVar, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from unisono.data.recordio.remote_file import is_url
from unisono.errors import DataError
from unisono.sanitize import quoted
from unisono.storage.files import require_regular, write_atomically

FILES_JSON: Final = "files.json"
_MAX_NAME_BYTES: Final = 230  # of a file; with .npy and the end of a temporary name 255, which file systems take


class Entry(Protocol):
    """A file in ``files.json``: its name, and its stamp, which changes when the file does."""

    @property
    def name(self) -> str: ...
    @property
    def stamp(self) -> str: ...


E = TypeVar("E", bound=Entry)


def stamp_of(size: int, mtime_ns: int) -> str:
    """The stamp of a file."""
    return f"{size} {mtime_ns}"


def file_stamp(path: Path) -> str:
    """The stamp of a file as it is now; of a folder a hash of the names, sizes and times of its files."""
    if not path.is_dir():
        status = path.stat()
        return stamp_of(status.st_size, status.st_mtime_ns)
    digest = xxhash.xxh3_128()
    for file in _files_below(path):
        status = file.stat()
        digest.update(
            f"{file.relative_to(path)}\0{status.st_size} {status.st_mtime_ns}\n".encode(errors="surrogateescape")
        )
    return digest.hexdigest()


def _files_below(folder: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        folders.sort()
        yield from (Path(root, file) for file in sorted(files))


def require_array_names(names: Iterable[str]) -> None:
    """Raise DataError if the array of a file would have the name of another entry of its folder, or one that is too long."""
    names = list(names)
    folders = {str(parent) for name in names for parent in PurePath(name).parents}
    for name in names:
        array = f"{name}.npy"
        parents = array.split("/")[:-1]
        if parents[:1] == [FILES_JSON] or array in folders:
            given = f"{quoted(name)}, of which the place of the rows, {quoted(array)}, is taken"
        elif (size := len(os.fsencode(PurePath(name).name))) > _MAX_NAME_BYTES:
            given = f"{quoted(name)}, whose name has {size} bytes"
        else:
            continue
        raise DataError(
            given=given,
            rule=f"rows of a file are in NAME.npy beside {FILES_JSON}, and a name has at most {_MAX_NAME_BYTES} bytes",
            consequence="nothing was written",
            nearest="another name of that file or folder",
        )


def find_entry(
    entries: Mapping[str, E],
    file: str | Path,
    stamp: str | None = None,
    *,
    unknown: Callable[[], Exception],
    changed: Callable[[], Exception],
) -> E:
    """The entry of a file: its path ends with the entry's name, and its stamp is the entry's.

    Args:
        entries: The entries by their names.
        file: The file; one behind a URL has no entry.
        stamp: Its stamp, if it is known.
        unknown: Makes the error for a file without an entry of its name.
        changed: Makes the error for a file whose stamp is another.
    """
    parts = () if is_url(file) else Path(os.path.abspath(file)).parts  # a remote file has no time of change
    names = (os.path.join(*parts[-count:]) for count in range(len(parts) - 1, 0, -1))
    named = [entries[name] for name in names if name in entries]
    if not named:
        raise unknown()
    stamp = stamp or file_stamp(Path(file))
    same = next((entry for entry in named if entry.stamp == stamp), None)
    if same is None:
        raise changed()
    return same


def write_array(path: Path, array: NDArray[Any]) -> None:
    """Write a ``.npy`` file so that ``path`` holds either its old content or all of the new.

    Raises:
        OSError: It cannot be written. ``numpy.save`` raises one without an ``errno`` where a disk is full.
    """
    array, header = np.ascontiguousarray(array), io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(array))
    write_atomically(path, header.getbuffer(), array.data)


def read_array(path: Path, kinds: str) -> NDArray[Any]:
    """The array of a ``.npy`` file with one dim, mapped into memory.

    Raises:
        ValueError: It is no such file, has more dims, or its kind (of ``numpy.dtype.kind``) is none of ``kinds``.
        OSError: It cannot be read.
    """
    require_regular(path)
    try:
        found: Any = np.load(path, mmap_mode="r", allow_pickle=False)  # a wrong length takes no memory
    except EOFError as error:
        raise ValueError(str(error)) from error
    if not isinstance(found, np.ndarray):
        raise ValueError("several arrays")
    array = cast("NDArray[Any]", found)
    if array.ndim != 1 or array.dtype.kind not in kinds:
        raise ValueError(f"an array of {array.dtype} and shape {list(array.shape)}")
    return array
