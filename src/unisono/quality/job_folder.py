"""Folder of a job over a data set: intermediate files that a killed job finds again, and results that appear all at once."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from unisono.data.kept_rows import KEPT_FOLDER
from unisono.data.result_files import (
    DATA_FOLDER,
    JOB_FILE,
    REPORT_FILE,
    parts_of_split,
    require_whole_results,
    write_data_sizes,
)
from unisono.errors import ConfigError, Problem
from unisono.storage.directory import make_folder
from unisono.storage.files import is_inside, write_atomically
from unisono.storage.folder_lock import FolderLock
from unisono.storage.json_lines import as_json
from unisono.storage.limits import LimitError, read_json
from unisono.storage.write_errors import explained_write_errors

T = TypeVar("T")
DROPPED_FILE: Final = "dropped.jsonl"  # documents or rows that are not in the results, and why
_LOCK_FILE: Final = ".lock"
_WORK: Final = "work"
_SKIPS: Final = "skips_unreadable"


class JobFolder:
    """The folder of a job that this process has for itself.

    Attributes:
        sketches: A folder for sketches; a killed job finds them again.
        new: A folder for results, empty at first.
        is_done: Whether the job ended here before.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.sketches = path / _WORK / "sketches"
        self.new = path / _WORK / "new"
        self._old = path / _WORK / "old"
        self.is_done = (path / REPORT_FILE).exists()
        for name in (REPORT_FILE, JOB_FILE):  # a job that was killed while it wrote them
            for left in path.glob(f"{name}.tmp-*"):
                left.unlink()
        if self.is_done:
            shutil.rmtree(path / _WORK, ignore_errors=True)  # of one that was killed after its report
            return
        for folder in (self.new, self._old):
            shutil.rmtree(folder, ignore_errors=True)
            make_folder(folder)
        make_folder(self.sketches)

    def result(self, kind: type[T], **others: Any) -> T:
        """The result of a job that is done: its report as ``kind``, with other fields.

        Raises:
            ConfigError: The report is damaged.
            DataError: Files of ``data/``, here or in a part of a split, are missing or have another size.
        """
        path = self._path / REPORT_FILE
        require_whole_results([self._path, *_with_data(self._path)])
        try:
            return msgspec.convert({**read_json(path), **others}, kind)
        except (LimitError, ValueError, OSError, TypeError) as error:
            raise _refused(
                f"{path}, which is no report: {error}", "a folder holds the results of one job", "another folder"
            ) from error

    def finish(self, report: Mapping[str, Any]) -> None:
        """Move the results from ``new`` into the folder, with a list of the files in ``data/``, write the report, which says that
        the job is done, and delete the intermediate files."""
        for folder in _with_data(self.new):
            write_data_sizes(folder)
        for entry in sorted(self.new.iterdir()):
            place = self._path / entry.name
            if place.is_dir():  # of a job that was killed here; at no moment are there only some of its files
                place.rename(self._old / entry.name)
            entry.rename(place)
        write_atomically(self._path / REPORT_FILE, as_json(report, indent=1) + b"\n")
        shutil.rmtree(self._path / _WORK)


@contextmanager
def open_job(
    path: Path, identity: Mapping[str, Any], inputs: Sequence[Path], *, skips_unreadable: bool = False
) -> Generator[JobFolder]:
    """Make or reopen the folder of a job.

    Args:
        path: The folder.
        identity: All that determines the results; JSON.
        inputs: What the job reads, none of which may lie in the folder, or the folder in it.
        skips_unreadable: Whether unreadable documents are dropped. A job that stopped at one may be continued with True.

    Raises:
        ConfigError: It holds other files, or results of a job with another identity, or another process works in it; or it
            cannot be written.
    """
    for source in inputs:
        if is_inside(path, source) or (source.is_dir() and is_inside(source, path)):
            raise _refused(
                f"{path} for what is read from {source}",
                "the output folder and the inputs do not contain each other",
                "a folder outside of the inputs",
            )
    if path.exists() and not path.is_dir():
        raise _refused(f"{path}, which is no folder", "results are written into a new folder", "another name")
    wanted = json.loads(json.dumps({**identity, _SKIPS: skips_unreadable}))
    job = path / JOB_FILE
    # a job that was killed before it had its file leaves the lock, or a temporary name
    if (
        not job.exists()
        and path.exists()
        and any(name != _LOCK_FILE and JOB_FILE not in name for name in os.listdir(path))
    ):
        raise _refused(f"{path}, which holds other files", "results are written into a new folder", "another name")
    with explained_write_errors(
        path,
        consequence="the job is not finished",
        other_name="rename the file or folder of the inputs with that name, then run the same command again",
    ):
        make_folder(path)
        lock = FolderLock(path / _LOCK_FILE, work="is working", nearest="wait for it, or another folder")
        try:
            found = _content(job) if job.exists() else wanted
            if found != wanted and found != {**wanted, _SKIPS: False}:
                raise _refused(
                    f"{path}, which has results of other inputs or settings",
                    "a folder holds the results of one job; the same job goes on there",
                    "the inputs and settings as they were, or another folder",
                )
            if not job.exists() or (found != wanted and not (path / REPORT_FILE).exists()):
                write_atomically(job, json.dumps(wanted, sort_keys=True).encode() + b"\n")
            yield JobFolder(path)
        finally:
            lock.close()


def _with_data(folder: Path) -> list[Path]:
    """The folder of results itself if it has data or kept rows, else the parts of a split in it."""
    if (folder / DATA_FOLDER).is_dir() or (folder / KEPT_FOLDER).is_dir():
        return [folder]
    return parts_of_split(folder)


def _content(path: Path) -> Any:
    try:
        return read_json(path)
    except (LimitError, ValueError, OSError):
        return None


def _refused(given: str, rule: str, nearest: str) -> ConfigError:
    return ConfigError(Problem(given=given, rule=rule, consequence="nothing was written", nearest=nearest))
