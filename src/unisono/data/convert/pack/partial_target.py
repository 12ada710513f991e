"""The folder of a pack job's shards until all are finished, from which the next run continues after a kill.

    DST.part/job.json            identity of the job: a hash of its options and inputs, and its source; a line of text
    DST.part/SERIES-NNNNN/       a shard's files
    DST.part/SERIES-NNNNN.json   journal of a finished shard: its inputs, bad ones, digests of its files
    DST.part/ending.json         all shards are finished; their files are being linked to their names beside DST

A journal is written atomically, after its shard's files. The next run keeps the shards whose files match their journal's digests,
writes the others again, and ends with the same bytes. A journal or ``ending.json`` that has changed since counts
as missing; one that names files of others is refused.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

import msgspec
import xxhash

from unisono.errors import DataError
from unisono.storage.directory import make_folder
from unisono.storage.files import (
    FOLDER_MODE,
    PRIVATE_MODE,
    file_digest,
    open_regular,
    os_reason,
    sync_folder,
    write_atomically,
)
from unisono.storage.limits import MAX_JOB_BYTES, read_json
from unisono.storage.ownership import untrusted_folder_reason

UNSPLIT: Final = "all"  # the series of inputs without a split
_PROGRESS_S = 5.0
_JOB = re.compile(rb"[0-9a-f]{32} of .*\n", re.DOTALL)  # content of job.json
_LOCK: Final = "lock"
_NO_JOURNAL: Final = (FileNotFoundError, PermissionError, ValueError)  # missing, no regular file, or of another version
_NO_LINKS: Final = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK)  # of a file system without hard links
_LOG = logging.getLogger("unisono")


@dataclass(frozen=True, kw_only=True, slots=True)
class BadInput:
    """An input that cannot be packed, and why."""

    path: str
    reason: str


class PackedInput(msgspec.Struct, frozen=True):
    """The outcome of one input: records to write and their size in bytes, or the reason why it is bad."""

    records: Sequence[Any] = ()
    size: int = 0
    bad: BadInput | None = None


class ShardJournal(msgspec.Struct):
    """A shard, counted while it is written: inputs ``start`` to ``stop``, numbers of records and of inputs without any that are
    not bad, and the digests of its files (xxh3-128). ``digest``: of the journal itself."""

    start: int
    stop: int
    records: int
    empty: int
    bad: list[BadInput]
    files: dict[str, str]
    digest: str = ""


class CommitPlan(msgspec.Struct, frozen=True):
    """Finished shards by series. Their files' final names follow from it (``_moves``). ``digest``: of the plan itself."""

    journals: dict[str, list[ShardJournal]]
    digest: str = ""


ShardCut = Callable[[int, int], bool]  # (inputs of the series so far, bytes of the shard) -> whether the shard ends
InputSource = Callable[[int], Generator[PackedInput]]  # outcomes of the inputs from this number on
ShardWriter = Callable[[Path, Iterator[Any]], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSeries:
    """Inputs that share shards: all, or one part of a split. ``file``: the name of shard n."""

    name: str = UNSPLIT
    source: InputSource
    file: Callable[[int], str]
    write: ShardWriter
    cut: ShardCut
    total: int | None = None


class PackProgress:
    """Logs progress every few seconds: inputs, records, MB, inputs/s and, if the total is known, the time left."""

    def __init__(self, total: int | None) -> None:
        self._total = total
        self._taken_over = self._inputs = self._records = self._bytes = 0
        self._begin = self._last_log_s = time.monotonic()

    def take_over(self, journal: ShardJournal) -> None:
        self._taken_over += journal.stop - journal.start

    def add(self, outcome: PackedInput) -> None:
        self._inputs += 1
        self._records += len(outcome.records)
        self._bytes += outcome.size
        now = time.monotonic()
        if now - self._last_log_s < _PROGRESS_S:
            return
        self._last_log_s = now
        rate = self._inputs / max(1e-9, now - self._begin)
        done = self._taken_over + self._inputs
        time_left = "" if self._total is None else f", {(self._total - done) / rate:.0f} s left"
        of = "" if self._total is None else f" of {self._total}"
        _LOG.info("packing: %d%s inputs, %d records, %.1f MB, %.0f inputs/s%s", done, of, self._records,
                  self._bytes / 1e6, rate, time_left)  # fmt: skip


class BadInputError(Exception):
    """An input that ends the job."""

    def __init__(self, bad: BadInput) -> None:
        super().__init__(bad)
        self.bad = bad


class PartialTarget:
    """The folder of a job's shards until all are finished. ``open_partial_target`` opens it exclusively.

    What is in it is deleted through its descriptor ``fd``, and files leave it so: others could replace its path by a link.
    """

    def __init__(self, folder: Path, fd: int) -> None:
        self.folder = folder
        self._fd = fd

    def build(self, series: ShardSeries, progress: PackProgress, *, fail: bool) -> list[ShardJournal]:
        """Write the missing shards of ``series``. Raises BadInputError for the first bad input if ``fail``."""
        done = self._finished(series.name)
        for journal in done:
            progress.take_over(journal)
        outcomes = series.source(done[-1].stop if done else 0)
        try:
            first = next(outcomes, None)
            while first is not None or not done:  # a series without inputs is one shard without records
                folder = self.folder / f"{series.name}-{len(done):05d}"
                if os.path.lexists(folder):
                    _remove(self._fd, folder.name)
                os.mkdir(folder.name, mode=FOLDER_MODE, dir_fd=self._fd)
                inputs = chain(() if first is None else (first,), outcomes)
                start = done[-1].stop if done else 0
                journal = ShardJournal(start=start, stop=start, records=0, empty=0, bad=[], files={})
                records = _shard_records(inputs, journal, series.cut, progress, fail)
                series.write(folder / series.file(len(done)), records)
                journal.files = {path.name: file_digest(path) for path in sorted(folder.iterdir())}
                journal.digest = _digest_of(journal)
                done.append(journal)
                _write_json(self.folder / f"{folder.name}.json", journal)
                first = next(outcomes, None)
        finally:
            outcomes.close()
        return done

    def read_plan(self, series: Sequence[str]) -> CommitPlan | None:
        """The commit plan of an interrupted commit, if there was one. Raises DataError for one that names other files."""
        try:
            plan = read_json(self.folder / "ending.json", msgspec.json.Decoder(CommitPlan).decode)
        except _NO_JOURNAL:
            return None
        files = [file for shards in plan.journals.values() for journal in shards for file in journal.files]
        if set(plan.journals) != set(series) or not all(map(_is_plain, files)):
            raise _foreign_folder(self.folder, "its ending.json names other files than those of this job")
        return plan if plan.digest == _digest_of(plan) else None

    def write_plan(self, plan: CommitPlan) -> None:
        """Store the plan: all shards are finished, and their files may be moved."""
        _write_json(self.folder / "ending.json", msgspec.structs.replace(plan, digest=_digest_of(plan)))

    def check_moves(self, plan: CommitPlan, moves: Mapping[str, str], target: Path) -> None:
        """Raise DataError if a file is missing or not as it was written, has a name that this target's files have not, or would
        replace a file."""
        digests = {
            f"{series}-{number:05d}/{file}": digest
            for series, shards in plan.journals.items()
            for number, journal in enumerate(shards)
            for file, digest in journal.files.items()
        }
        for old, new in moves.items():
            moved = target.with_name(new)
            suffix = Path(new).suffix
            if not new.startswith(target.stem) or suffix.rstrip("0123456789") not in (
                target.suffix,
                ".idx",
                ".uidx",
                ".db",
            ):
                raise _foreign_folder(self.folder, f"its file {new} is not named after {target.name}")
            if os.path.lexists(self.folder / old) and os.path.lexists(moved) and not self._is_linked(old, moved):
                raise _foreign_folder(self.folder, f"{moved} exists and is not of this job")
            found = next(
                (path for path in (self.folder / old, moved) if path.is_file() and not path.is_symlink()), None
            )
            if found is None:
                raise _foreign_folder(self.folder, f"its file {old} is missing, and {moved} is not there either")
            if file_digest(found) != digests[old]:
                raise _foreign_folder(self.folder, f"{found} is not as the job wrote it")

    def commit(self, moves: Mapping[str, str], folder: Path) -> None:
        """Give the remaining files their names in ``folder`` and remove this folder. Raises DataError for a name that a file of
        others has meanwhile."""
        for old, new in moves.items():
            with suppress(FileNotFoundError):  # moved before
                self._move(old, folder / new)
        sync_folder(folder)
        self.remove()

    def _move(self, old: str, new: Path) -> None:
        """Link ``old`` to ``new``, which must not exist; a rename would replace it. This folder's removal ends the old name."""
        try:
            os.link(old, new, src_dir_fd=self._fd, follow_symlinks=False)
        except FileExistsError as error:
            if not self._is_linked(old, new):
                raise self._taken_name(new) from error
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if os.path.lexists(new):
                raise self._taken_name(new) from error
            os.replace(old, new, src_dir_fd=self._fd)

    def _is_linked(self, old: str, new: Path) -> bool:
        """Whether ``old`` has the name ``new`` already, from a commit that was interrupted."""
        return os.path.samestat(os.stat(old, dir_fd=self._fd, follow_symlinks=False), os.lstat(new))

    def _taken_name(self, new: Path) -> DataError:
        return DataError(
            given=f"{new}, which another program has made meanwhile",
            rule="a packed file replaces no other",
            consequence=f"it stays as it is; the finished shards are kept in {self.folder}",
            nearest="move it away, and the same command goes on",
        )

    def remove(self) -> None:
        """Delete the folder with all files in it."""
        self.clear(keep="")
        with suppress(OSError):  # another process has put something else in its place
            self.folder.rmdir()

    def clear(self, *, keep: str) -> bool:
        """Delete all files but ``keep``; whether there were any."""
        names = [name for name in os.listdir(self._fd) if name != keep]
        for name in names:
            _remove(self._fd, name)
        return bool(names)

    def _finished(self, series: str) -> list[ShardJournal]:
        done: list[ShardJournal] = []
        while (journal := self._journal(f"{series}-{len(done):05d}", done[-1].stop if done else 0)) is not None:
            done.append(journal)
        if done:
            _LOG.info("%s: %d finished shards of %s are reused", self.folder, len(done), series)
        return done

    def _journal(self, name: str, start: int) -> ShardJournal | None:
        try:
            journal = read_json(self.folder / f"{name}.json", msgspec.json.Decoder(ShardJournal).decode)
            valid = (
                journal.digest == _digest_of(journal)
                and journal.start == start
                and all(
                    _is_plain(file) and file_digest(self.folder / name / file) == digest
                    for file, digest in journal.files.items()
                )
            )
        except _NO_JOURNAL:
            return None
        return journal if valid else None


def _shard_records(
    outcomes: Iterator[PackedInput], journal: ShardJournal, cut: ShardCut, progress: PackProgress, fail: bool
) -> Iterator[Any]:
    """The records of one shard, counted in ``journal``."""
    size = 0
    for outcome in outcomes:
        journal.stop += 1
        progress.add(outcome)
        if outcome.bad is not None:
            if fail:
                raise BadInputError(outcome.bad)
            journal.bad.append(outcome.bad)
        elif not outcome.records:
            journal.empty += 1
        journal.records += len(outcome.records)
        size += outcome.size
        yield from outcome.records
        if cut(journal.stop, size):
            return


@contextmanager
def open_partial_target(folder: Path, job: bytes) -> Generator[PartialTarget]:
    """Open ``folder`` for ``job``, exclusively. Files of another job are deleted, with a warning.

    Raises DataError while another process has it open, and for a folder that another user can have written or that no job made.
    """
    with suppress(FileExistsError):  # what else has this name, _open_folder says
        make_folder(folder)
    with ExitStack() as stack:
        fd = _open_folder(folder)
        stack.callback(os.close, fd)
        lock = _open_lock(folder, fd)
        stack.callback(os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            is_taken = error.errno in (errno.EAGAIN, errno.EACCES)
            what = "another process is packing to it" if is_taken else "its file system gives no lock"
            raise DataError(
                given=f"{folder}: {what} ({error.strerror})",
                rule="one process at a time packs to a target",
                consequence="nothing was done",
                nearest="wait for it, or another target" if is_taken else "a target on a local disk",
            ) from error
        partial = PartialTarget(folder, fd)
        path = folder / "job.json"
        if not path.exists() or path.read_bytes() != job:
            if partial.clear(keep=_LOCK):
                _LOG.warning(
                    "%s: its files belong to other inputs or options; they are deleted and written again", folder
                )
            write_atomically(path, job)
        try:
            yield partial
        except (BadInputError, DataError):
            if not any(folder.glob("*-[0-9]*.json")):
                partial.remove()
            raise


def _open_folder(folder: Path) -> int:
    """A descriptor of the folder. Raises DataError unless a packing job of this user made it, or it is empty."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise _foreign_folder(folder, "it is a link" if folder.is_symlink() else os_reason(error)) from error
    try:
        if reason := untrusted_folder_reason(folder, os.fstat(fd)):
            raise _foreign_folder(folder, reason)
        is_job = set(os.listdir(fd)) <= {_LOCK} or _JOB.fullmatch(_read_or_empty(folder / "job.json"))
        if not is_job:
            raise _foreign_folder(folder, "it has no job.json of a packing job")
    except BaseException:
        os.close(fd)
        raise
    return fd


def _open_lock(folder: Path, fd: int) -> int:
    """Open the lock's file in the folder ``fd``. Raises DataError if it is none: to open a pipe would wait for its other end."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        lock = os.open(_LOCK, flags, PRIVATE_MODE, dir_fd=fd)
    except OSError as error:
        raise _foreign_folder(folder, f"its file {_LOCK} cannot be opened ({os_reason(error)})") from error
    if not stat.S_ISREG(os.fstat(lock).st_mode):
        os.close(lock)
        raise _foreign_folder(folder, f"its {_LOCK} is no regular file")
    return lock


def _remove(fd: int, name: str) -> None:
    """Delete a file, link or folder of the folder ``fd``."""
    if stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
        shutil.rmtree(name, dir_fd=fd)
    else:
        os.unlink(name, dir_fd=fd)


def _is_plain(name: str) -> bool:
    return Path(name).name == name and name not in ("", ".", "..")


def _read_or_empty(path: Path) -> bytes:
    try:
        with open_regular(path, flags=os.O_NOFOLLOW) as file:
            return file.read(MAX_JOB_BYTES)
    except OSError:
        return b""


def _foreign_folder(folder: Path, reason: str) -> DataError:
    return DataError(
        given=f"{folder} cannot be continued: {reason}",
        rule="a job is continued from its own files, in a folder that only its user can have written",
        consequence="nothing was moved or deleted",
        nearest="look at what is in it and remove it, or another target",
    )


def _digest_of(content: ShardJournal | CommitPlan) -> str:
    """xxh3-128 of the content without its own digest: a wrong number in it would lose inputs, or pack them twice."""
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(msgspec.structs.replace(content, digest="")))


def _write_json(path: Path, value: Any) -> None:
    write_atomically(path, msgspec.json.encode(value))
