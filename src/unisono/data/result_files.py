"""The folder of results of a data job: its ``data/``, which is what all that reads it reads, and files lost from it.

``data_sizes.json`` beside ``data/`` has the path of each file in it, with forward slashes, and its size in bytes. Indices are
left out: they may be made anew.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from fnmatch import fnmatch
from glob import glob, has_magic
from pathlib import Path
from typing import Final

import msgspec

from unisono.data.convert.file_kind import INDEX_SUFFIXES
from unisono.data.kept_rows import KEPT_FOLDER
from unisono.data.per_file_arrays import FILES_JSON
from unisono.errors import DataError
from unisono.sanitize import quoted
from unisono.storage.files import look_up, write_atomically
from unisono.storage.json_lines import as_json
from unisono.storage.limits import LimitError, read_json

DATA_FOLDER: Final = "data"  # of a job, with the data that it wrote
DATA_SIZES: Final = "data_sizes.json"
JOB_FILE: Final = "job.json"  # with what determines the results
REPORT_FILE: Final = "report.json"  # the job is done


def data_of_results(folder: Path) -> Path:
    """The folder that is read of a folder of results: its ``data/``; any other folder, or a file, itself.

    Raises:
        DataError: It has only row indices, parts of a split, or a report.
    """
    has_rows = (folder / KEPT_FOLDER / FILES_JSON).is_file()
    if not has_rows and not ((folder / JOB_FILE).is_file() and (folder / REPORT_FILE).is_file()):
        return folder
    if (folder / DATA_FOLDER).is_dir():
        return folder / DATA_FOLDER
    parts = parts_of_split(folder)
    if has_rows:
        nearest = (
            f"the rows as a file: unisono data convert SOURCE NEW --kept-rows {folder}; "
            f"in a run, data.train=SOURCE with data.kept_rows={folder}; or the data set itself"
        )
    else:
        nearest = f"a part, as {parts[0]}" if parts else "the data set that the results are of"
    raise DataError(
        given=f"{folder}, a folder of results without {DATA_FOLDER}/"
        + (", with row indices alone" if has_rows else ""),
        rule=f"of a folder of results the documents in {DATA_FOLDER}/ are read",
        consequence="nothing was read",
        nearest=nearest,
    )


def parts_of_split(folder: Path) -> list[Path]:
    """The parts in a folder of results of a split, in the order of their names; none in any other."""
    return sorted(file.parent.parent for file in folder.glob(f"*/{KEPT_FOLDER}/{FILES_JSON}"))


def write_data_sizes(folder: Path) -> None:
    """Write which files are in ``folder/data``, if that is there."""
    data = folder / DATA_FOLDER
    if not data.is_dir():
        return
    paths = (
        Path(root, name) for root, _, names in os.walk(data) for name in names if not name.endswith(INDEX_SUFFIXES)
    )
    sizes = {path.relative_to(data).as_posix(): path.stat().st_size for path in sorted(paths)}
    write_atomically(folder / DATA_SIZES, as_json(sizes, indent=1) + b"\n")


def require_whole_results(paths: Iterable[str | Path]) -> None:
    """Check that files of results have the sizes with which they were written.

    Args:
        paths: Files, globs and folders; of folders of results, of their ``data/`` and of what lies in these the files are
            compared, and no others. One in which nothing is recorded is taken as it is.

    Raises:
        DataError: Files are missing or have another size, or it cannot be read which files there were.
    """
    asked: dict[Path, list[str]] = {}  # by folder of results what is read of its data; "" for all
    for path in paths:
        expanded, fault = look_up(path)
        if fault:
            continue
        for each in (expanded, *([] if expanded.exists() else glob(str(expanded)))):
            _add(Path(os.path.abspath(each)), asked)
    for folder, inside in asked.items():
        _require_whole(folder, inside)


def _add(path: Path, asked: dict[Path, list[str]]) -> None:
    if (path / DATA_SIZES).is_file():
        asked.setdefault(path, []).append("")
        return
    for data in (path, *path.parents):
        if data.name == DATA_FOLDER and (data.parent / DATA_SIZES).is_file():
            relative = path.relative_to(data).as_posix()
            asked.setdefault(data.parent, []).append("" if relative == "." else relative)


def _require_whole(folder: Path, inside: list[str]) -> None:
    listing = folder / DATA_SIZES
    try:
        sizes: dict[str, int] = read_json(listing, msgspec.json.Decoder(dict[str, int]).decode)
    except (LimitError, ValueError, OSError) as error:
        raise _refused(f"{listing}, which is no list of files: {error}", folder) from error
    names, patterns = set(inside), [part for part in inside if has_magic(part)]
    faults = [
        f"{quoted(name)} {fault}"
        for name, size in sizes.items()
        if _is_asked(name, names, patterns) and (fault := _fault(folder / DATA_FOLDER / name, size))
    ]
    if faults:
        more = f" and {len(faults) - 1:,} more" if len(faults) > 1 else ""
        raise _refused(f"{folder / DATA_FOLDER}, where files are not as they were written: {faults[0]}{more}", folder)


def _is_asked(name: str, names: set[str], patterns: list[str]) -> bool:
    above = (parent.as_posix() for parent in Path(name).parents)
    return (
        "" in names
        or name in names
        or any(part in names for part in above)
        or any(fnmatch(name, each) for each in patterns)
    )


def _fault(path: Path, size: int) -> str:
    try:
        found = path.stat().st_size
    except OSError:
        return "is missing"
    return "" if found == size else f"has {found:,} bytes, not {size:,}"


def _refused(given: str, folder: Path) -> DataError:
    return DataError(
        given=given,
        rule="results are read as a whole: their report counts all of their documents",
        consequence="nothing was written",
        nearest=f"run the command that wrote {folder} again, into another folder; or copy the remaining files to another folder",
    )
