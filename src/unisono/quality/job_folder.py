"""Folder of a job over a data set: intermediate files that a killed job finds again, and results that appear all at once."""

from __future__ import annotations

import json
import logging
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
from unisono.quality.refused import refused
from unisono.sanitize import listed
from unisono.storage.directory import make_folder
from unisono.storage.files import is_inside, write_atomically
from unisono.storage.folder_lock import FolderLock
from unisono.storage.json_lines import as_json
from unisono.storage.limits import LimitError, read_json
from unisono.storage.write_errors import explained_write_errors

T = TypeVar("T")
DROPPED_FILE: Final = "dropped.jsonl"  # documents or rows that are not in the results, and why
_LOG: Final = logging.getLogger("unisono")
_LOCK_FILE: Final = ".lock"
_WORK: Final = "work"
_FOLDERS_OF_WORK: Final = ("sketches", "new", "old")
_EMPTY_WORK: Final = ("chunks.jsonl", "benchmark_hashes.npy")  # what a job has there before its first chunk
_UNFINISHED: Final = "the job is not finished"
_RESULTS: Final = "results"  # in the report, the names of what is in the folder besides
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
        self.sketches, self.new, self._old = (path / _WORK / name for name in _FOLDERS_OF_WORK)
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
            DataError: Results are missing, or files of ``data/``, here or in a part of a split, have another size.
        """
        path = self._path / REPORT_FILE
        require_whole_results([self._path, *_with_data(self._path)])
        try:
            report = read_json(path)
            result = msgspec.convert({**report, **others}, kind)
            names = msgspec.convert(report.get(_RESULTS, []), list[str])  # reports of earlier versions have none
        except (LimitError, ValueError, OSError, TypeError) as error:
            raise _refused(
                f"{path}, which is no report: {error}", "a folder holds the results of one job", "another folder"
            ) from error
        if lost := [name for name in names if not (self._path / name).exists()]:
            raise refused(
                f"{self._path}, where results of the job are missing: {listed(lost)}",
                "a job that is done is not done again",
                "a copy of what is missing; or the same command with another folder",
            )
        return result

    def finish(self, report: Mapping[str, Any]) -> None:
        """Move the results from ``new`` into the folder, with a list of the files in ``data/``, write the report, which says that
        the job is done and what its results are, and delete the intermediate files."""
        for folder in _with_data(self.new):
            write_data_sizes(folder)
        results = sorted(self.new.iterdir())
        for entry in results:
            place = self._path / entry.name
            if place.is_dir():  # of a job that was killed here; at no moment are there only some of its files
                place.rename(self._old / entry.name)
            entry.rename(place)
        listing = {_RESULTS: [entry.name for entry in results]}
        write_atomically(self._path / REPORT_FILE, as_json({**report, **listing}, indent=1) + b"\n")
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
        ConfigError: It holds other files, links, or results of a job with another identity; another process works in it; or it
            cannot be written. A job with another identity that has done nothing yet is begun anew.
    """
    for source in inputs:
        if is_inside(path, source) or (source.is_dir() and is_inside(source, path)):
            raise _refused(
                f"--out {path}, which overlaps the input {source}",
                "the output folder and the inputs do not contain each other",
                "a folder outside of the inputs",
            )
    if os.path.lexists(path) and not os.path.isdir(path):
        kind = "a link to no folder" if path.is_symlink() else "no folder"
        raise _refused(f"{path}, which is {kind}", "results are written into a new folder", "another name")
    wanted = json.loads(json.dumps({**identity, _SKIPS: skips_unreadable}))
    job = path / JOB_FILE
    # a job that was killed before it had its file leaves the lock, or a temporary name
    if os.path.isdir(path) and not job.exists() and not _has_only(path, _LOCK_FILE):
        raise _refused(f"{path}, which holds other files", "results are written into a new folder", "another name")
    for name in ("", *_FOLDERS_OF_WORK):
        folder = path / _WORK / name
        if os.path.lexists(folder) and (folder.is_symlink() or not folder.is_dir()):
            raise _refused(
                f"{folder}, which is {'a link' if folder.is_symlink() else 'no folder'}",
                f"{_WORK}/ has the intermediate files of a job, in folders that it made itself and deletes at its end",
                "remove it, then run the same command again; or another folder",
            )
    with explained_write_errors(path, consequence=_UNFINISHED, other_name="another folder (--out)"):
        make_folder(path)
    with explained_write_errors(
        path,
        consequence=_UNFINISHED,
        other_name="rename the file or folder of the inputs with that name, then run the same command again",
    ):
        lock = FolderLock(path / _LOCK_FILE, work="is working", nearest="wait for it, or another folder")
        try:
            found = _content(job) if job.exists() else wanted
            if found != wanted and found != {**wanted, _SKIPS: False}:
                if not _has_only(path, _LOCK_FILE, _WORK) or _has_finished_work(path):
                    raise _refused(
                        f"{path}, which has results of other inputs or settings"
                        if found is not None
                        else f"{job}, which is damaged: it does not say which job the results are of",
                        "a folder holds the results of one job; the same job goes on there",
                        "the inputs and settings as they were, or another folder",
                    )
                _LOG.warning(
                    "%s: the job there had other inputs or settings and had done nothing yet: it begins anew", path
                )
                if (path / _WORK).exists():
                    shutil.rmtree(path / _WORK)  # before the file that says whose it is
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


def _has_only(folder: Path, *names: str) -> bool:
    """Whether a folder holds nothing but these names and the file that says which job it is of, also under a temporary name."""
    return all(name in names or name.partition(".tmp-")[0] == JOB_FILE for name in os.listdir(folder))


def _has_finished_work(folder: Path) -> bool:
    """Whether documents or files were finished, on which a command with the settings as they were goes on."""
    work = folder / _WORK / "sketches"
    return work.is_dir() and any(name not in _EMPTY_WORK for name in os.listdir(work))


def _content(path: Path) -> Any:
    try:
        return read_json(path)
    except (LimitError, ValueError, OSError):
        return None


def _refused(given: str, rule: str, nearest: str) -> ConfigError:
    return ConfigError(Problem(given=given, rule=rule, consequence="nothing was written", nearest=nearest))
