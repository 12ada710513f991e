"""Pack jobs of any kind: options, shards, the report. A killed job loses only its current shard.

    DST.part/job.json            identity of the job: options, inputs with sizes and times
    DST.part/SERIES-NNNNN/       a shard's files
    DST.part/SERIES-NNNNN.json   journal of a finished shard: its inputs, bad ones, digests of its files
    DST.part/ending.json         all shards are finished; their files are being renamed

A journal is written atomically, after its shard's files. The next run keeps the shards whose files match their journal's digests,
writes the others again, and ends with the same bytes.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import xxhash

from unisono.data.convert.formats.table import unwritable_error
from unisono.data.convert.table_files import files_of
from unisono.errors import DataError
from unisono.storage.directory import make_folder
from unisono.storage.files import FOLDER_MODE, file_digest, opener, sync_folder, write_atomically
from unisono.storage.limits import read_json
from unisono.storage.ownership import foreign_reason

UNSPLIT: Final = "all"  # the series of inputs without a split
OnError = Literal["fail", "skip"]
_PROGRESS_S = 5.0
_SHOWN = 20
_JOB = re.compile(rb"[0-9a-f]{32} of .*\n", re.DOTALL)  # content of job.json
_MAX_JOB_BYTES = 1 << 20
_LOG = logging.getLogger("unisono")


@dataclass(frozen=True, kw_only=True, slots=True)
class BadInput:
    """An input that cannot be packed, and why."""

    path: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PackOptions:
    """How inputs are packed, of any kind.

    Attributes:
        shard_bytes: A file ends with the record that fills this many bytes. None is one file; for text 512 MiB.
        shards: Number of files of equal numbers of inputs; only for images that are files.
        workers: Processes; 0 is this one. By default chosen by the cores and the number of inputs.
        on_error: "fail": a bad input ends the job. "skip": it is left out and reported.
    """

    shard_bytes: int | None = None
    shards: int = 1
    workers: int | None = None
    on_error: OnError = "fail"


@dataclass(frozen=True, kw_only=True, slots=True)
class PackResult:
    """The outcome of packing.

    Attributes:
        files: The written files, without indexes, in order.
        num_inputs: Inputs, with the bad ones.
        num_records: Records in all files.
        num_empty: Inputs without a record that are not bad.
        bad: Inputs that could not be packed, each with the reason.
        num_left_out: Files of a folder that were not taken for images, by their suffix.
        splits: Number of records of each part, by its name; empty without a split.
        report: The report's path, ``TARGET.report.json``.
    """

    files: tuple[Path, ...]
    num_inputs: int
    num_records: int
    num_empty: int
    bad: tuple[BadInput, ...]
    num_left_out: int
    splits: dict[str, int]
    report: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class PackJob:
    """A packing job: its source, its target, and the facts of the listing.

    Attributes:
        source: Name of the source, for errors and the report.
        target: The file to write; the files of parts and shards are named after it.
        identity: All else that determines the bytes of the target; a job of another identity does not continue this
            one.
        on_error: Treatment of bad inputs.
        bad: Bad inputs of the listing.
        left_out: Number of files that the listing left out.
        side_files: Content of small text files written beside the target, by suffix.
    """

    source: str
    target: Path
    identity: Mapping[str, Any]
    on_error: OnError
    bad: Sequence[BadInput] = ()
    left_out: int = 0
    side_files: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def report(self) -> Path:
        return self.target.with_name(f"{self.target.name}.report.json")


def run_pack_job(job: PackJob, series: Sequence[ShardSeries], *, numbered: bool = False) -> PackResult:
    """Write all of the target's files or none, then its report.

    ``numbered``: also a single file has a number in its name. Raises DataError for a target that exists and, if ``on_error`` is
    "fail", for bad inputs; these are reported too.
    """
    part = job.target.with_name(f"{job.target.name}.part")
    names = [part_series.name for part_series in series]
    if not (part / "ending.json").exists():
        _refuse_existing(job.target, names)
    if job.on_error == "fail" and job.bad:
        _write_report(job, job.bad, None)
        raise bad_inputs_error(job.bad)
    identity = xxhash.xxh3_128_hexdigest(msgspec.json.encode({**job.identity, "on_error": job.on_error}))
    with open_partial_target(part, f"{identity} of {job.source}\n".encode()) as partial:
        plan = partial.planned(names)
        resumed = plan is not None
        if plan is None:
            _refuse_existing(job.target, names)
            try:
                journals = _build(partial, series, fail=job.on_error == "fail")
            except BadInputError as error:
                _write_report(job, [error.bad], None)
                raise bad_inputs_error([error.bad]) from None
            plan = CommitPlan(journals=journals)
            partial.plan(plan)
        moves = _moves(job.target, plan.journals, numbered)
        if resumed:
            partial.check_moves(plan, moves, job.target)
        result = _result(job, plan, moves)
        for suffix, text in job.side_files.items():
            write_atomically(job.target.with_name(job.target.name + suffix), text.encode())
        _write_report(job, result.bad, result)
        partial.commit(moves, job.target.parent)
    return result


def cut_by_bytes(shard_bytes: int | None) -> ShardCut:
    """End a shard with the record that fills ``shard_bytes``; None makes one shard."""
    return lambda _stop, size: shard_bytes is not None and size >= shard_bytes


def cut_by_count(inputs: int, shards: int) -> ShardCut:
    """Cut the inputs into ``shards`` shards of equal numbers, ± 1."""
    ends = {inputs * (number + 1) // shards for number in range(shards)}
    return lambda stop, _size: stop in ends and stop < inputs


def file_stamps(source: Path) -> list[tuple[str, int, int]]:
    """(name, size, mtime_ns) of the files of a table, by which a change is detected."""
    files = [(path.name, path.stat()) for path in files_of(source) if path.exists()]
    return [(name, status.st_size, status.st_mtime_ns) for name, status in files]


def check_suffix(target: Path, known: Iterable[str], kind: str) -> None:
    """Raise DataError if inputs of ``kind`` cannot be packed into such a file."""
    if target.suffix not in known:
        raise unwritable_error(
            f"{target}, whose suffix is {target.suffix!r}",
            f"--kind {kind} is packed into {', '.join(known)}",
            f"{target.with_suffix(next(iter(known))).name}",
        )


def _build(partial: PartialTarget, series: Sequence[ShardSeries], *, fail: bool) -> dict[str, list[ShardJournal]]:
    totals = [part.total for part in series]
    progress = PackProgress(None if None in totals else sum(total or 0 for total in totals))
    return {part.name: partial.build(part, progress, fail=fail) for part in series}


def _refuse_existing(target: Path, series: Sequence[str]) -> None:
    """Raise DataError if the target, or a file named like one of its parts or shards, exists."""
    parts = "|".join(f"-{name}" for name in series if name != UNSPLIT)
    ours = re.compile(rf"{re.escape(target.stem)}({parts})?(-[0-9]{{5}}(-of-[0-9]{{5}})?)?{re.escape(target.suffix)}")
    if not target.parent.is_dir():
        raise unwritable_error(
            f"{target}, in a folder that does not exist", "a target's folder exists", f"mkdir -p {target.parent}"
        )
    existing = sorted(path for path in target.parent.iterdir() if ours.fullmatch(path.name))
    if existing:
        raise unwritable_error(
            f"{existing[0]}, which exists",
            "a target, its parts and its shards are written once",
            "another name for the target",
        )


def _moves(target: Path, journals: Mapping[str, list[ShardJournal]], numbered: bool) -> dict[str, str]:
    """SERIES-NNNNN/FILE → final name, indexes before the files they index. MindRecord files contain their names and keep them."""
    moves: dict[str, str] = {}
    for series, shards in journals.items():
        stem = target.stem if series == UNSPLIT else f"{target.stem}-{series}"
        for number, journal in enumerate(shards):
            place = f"-{number:05d}" if numbered else f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
            for file in sorted(journal.files, key=lambda file: Path(file).suffix == target.suffix):
                name = file if target.suffix == ".mindrecord" else f"{stem}{place}{Path(file).suffix}"
                moves[f"{series}-{number:05d}/{file}"] = name
    return moves


def _result(job: PackJob, plan: CommitPlan, moves: Mapping[str, str]) -> PackResult:
    shards = [journal for journals in plan.journals.values() for journal in journals]
    return PackResult(
        files=tuple(job.target.with_name(name) for name in moves.values() if name.endswith(job.target.suffix)),
        num_inputs=sum(journal.stop - journal.start for journal in shards) + len(job.bad),
        num_records=sum(journal.records for journal in shards),
        num_empty=sum(journal.empty for journal in shards),
        bad=(*job.bad, *(bad for journal in shards for bad in journal.bad)),
        num_left_out=job.left_out,
        splits={
            name: sum(journal.records for journal in journals)
            for name, journals in plan.journals.items()
            if name != UNSPLIT
        },
        report=job.report,
    )


def _write_report(job: PackJob, bad: Sequence[BadInput], result: PackResult | None) -> None:
    """Write the outcome of the inputs, also if nothing was packed (``result`` None)."""
    report: dict[str, Any] = {"source": job.source, "target": str(job.target), "on_error": job.on_error}
    if result is not None:
        report |= {
            "files": [path.name for path in result.files],
            "inputs": result.num_inputs,
            "records": result.num_records,
            "empty": result.num_empty,
            "left_out": result.num_left_out,
            "splits": result.splits,
        }
    report["written"] = result is not None
    report["bad"] = [{"path": entry.path, "reason": entry.reason} for entry in bad]
    write_atomically(job.report, json.dumps(report, indent=1, ensure_ascii=False).encode() + b"\n")


class RecordAnswer(msgspec.Struct, frozen=True, array_like=True):
    """A worker's answer: the records of one input, or the reason why it has none. Of an image also width, height and ``tiles``:
    bytes per tile as little-endian uint32, empty if it has none, None if not requested."""

    records: list[bytes] = []
    reason: str = ""
    width: int = 0
    height: int = 0
    tiles: bytes | None = None


class PackedInput(msgspec.Struct, frozen=True):
    """The outcome of one input: records to write and their size in bytes, or the reason why it is bad."""

    records: Sequence[Any] = ()
    size: int = 0
    bad: BadInput | None = None


class ShardJournal(msgspec.Struct):
    """A shard, counted while it is written: inputs ``start`` to ``stop``, numbers of records and of inputs without any that are
    not bad, and the digests of its files (xxh3-128)."""

    start: int
    stop: int
    records: int
    empty: int
    bad: list[BadInput]
    files: dict[str, str]


class CommitPlan(msgspec.Struct, frozen=True):
    """Finished shards by series. Their files' final names follow from it (``_moves``)."""

    journals: dict[str, list[ShardJournal]]


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
    """The folder of a job's shards until all are finished. ``open_partial_target`` opens it exclusively."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

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
                if folder.exists():
                    shutil.rmtree(folder)
                folder.mkdir(mode=FOLDER_MODE)
                inputs = chain(() if first is None else (first,), outcomes)
                start = done[-1].stop if done else 0
                journal = ShardJournal(start=start, stop=start, records=0, empty=0, bad=[], files={})
                records = _shard_records(inputs, journal, series.cut, progress, fail)
                series.write(folder / series.file(len(done)), records)
                journal.files = {path.name: file_digest(path) for path in sorted(folder.iterdir())}
                done.append(journal)
                _write_json(self.folder / f"{folder.name}.json", journal)
                first = next(outcomes, None)
        finally:
            outcomes.close()
        return done

    def planned(self, series: Sequence[str]) -> CommitPlan | None:
        """The commit plan of an interrupted commit, if there was one. Raises DataError for one that names other files."""
        try:
            plan = read_json(self.folder / "ending.json", msgspec.json.Decoder(CommitPlan).decode)
        except (FileNotFoundError, ValueError):
            return None
        files = [file for shards in plan.journals.values() for journal in shards for file in journal.files]
        if set(plan.journals) != set(series) or not all(map(_is_plain, files)):
            raise _foreign_folder(self.folder, "its ending.json names other files than those of this job")
        return plan

    def plan(self, plan: CommitPlan) -> None:
        """Store the plan: all shards are finished, and their files may be moved."""
        _write_json(self.folder / "ending.json", plan)

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
            if os.path.lexists(self.folder / old) and os.path.lexists(moved):
                raise _foreign_folder(self.folder, f"{moved} exists and is not of this job")
            found = next(
                (path for path in (self.folder / old, moved) if path.is_file() and not path.is_symlink()), None
            )
            if found is None:
                raise _foreign_folder(self.folder, f"its file {old} is missing, and {moved} is not there either")
            if file_digest(found) != digests[old]:
                raise _foreign_folder(self.folder, f"{found} is not as the job wrote it")

    def commit(self, moves: Mapping[str, str], folder: Path) -> None:
        """Move the remaining files to their names in ``folder`` and remove this folder."""
        for old, new in moves.items():
            if (self.folder / old).exists():
                (self.folder / old).replace(folder / new)
        sync_folder(folder)
        shutil.rmtree(self.folder)

    def _finished(self, series: str) -> list[ShardJournal]:
        done: list[ShardJournal] = []
        while (journal := self._journal(f"{series}-{len(done):05d}", done[-1].stop if done else 0)) is not None:
            done.append(journal)
        if done:
            _LOG.info("%s: %d finished shards of %s are taken over", self.folder, len(done), series)
        return done

    def _journal(self, name: str, start: int) -> ShardJournal | None:
        try:
            journal = read_json(self.folder / f"{name}.json", msgspec.json.Decoder(ShardJournal).decode)
            valid = journal.start == start and all(
                _is_plain(file) and file_digest(self.folder / name / file) == digest
                for file, digest in journal.files.items()
            )
        except (FileNotFoundError, ValueError):
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
    make_folder(folder)
    if folder.is_symlink():
        raise _foreign_folder(folder, "it is a link")
    if reason := foreign_reason(folder):
        raise _foreign_folder(folder, reason)
    if any(entry.name != "lock" for entry in folder.iterdir()) and not _JOB.fullmatch(_content(folder / "job.json")):
        raise _foreign_folder(folder, "it has no job.json of a packing job")
    with open(folder / "lock", "ab", opener=opener) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise DataError(
                given=f"{folder}: another process is packing to it ({error.strerror})",
                rule="one process at a time packs to a target",
                consequence="nothing was done",
                nearest="wait for it, or another target",
            ) from error
        path = folder / "job.json"
        if not path.exists() or path.read_bytes() != job:
            old = [entry for entry in folder.iterdir() if entry.name != "lock"]
            if old:
                _LOG.warning(
                    "%s: its files belong to other inputs or options; they are deleted and written again", folder
                )
            for entry in old:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            write_atomically(path, job)
        try:
            yield PartialTarget(folder)
        except (BadInputError, DataError):
            if not any(folder.glob("*-[0-9]*.json")):
                shutil.rmtree(folder)
            raise


def bad_inputs_error(bad: Sequence[BadInput]) -> DataError:
    """The error for bad inputs of a job with ``on_error`` "fail"."""
    shown = "".join(f"\n    {entry.path}: {entry.reason}" for entry in bad[:_SHOWN])
    more = f"\n    and {len(bad) - _SHOWN:,} more, all in the report" if len(bad) > _SHOWN else ""
    return DataError(
        given=f"{len(bad):,} bad input{'s' if len(bad) > 1 else ''}:{shown}{more}",
        rule="every input is packed, unless --on-error skip",
        consequence="the target was not written; finished shards, if any, are kept for a next run",
        nearest="repair or remove them; or --on-error skip packs the rest and lists them in the report",
    )


def _is_plain(name: str) -> bool:
    return Path(name).name == name and name not in ("", ".", "..")


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()[:_MAX_JOB_BYTES]
    except OSError:
        return b""


def _foreign_folder(folder: Path, reason: str) -> DataError:
    return DataError(
        given=f"{folder}, which is not a job's that was interrupted: {reason}",
        rule="a job is continued from a folder that only its own user can have written",
        consequence="nothing was read from it, moved or deleted",
        nearest="look at what is in it and remove it, or another target",
    )


def _write_json(path: Path, value: Any) -> None:
    write_atomically(path, msgspec.json.encode(value))
