"""Write inputs to shards, one shard at a time, so that a killed process loses only the current one.

    DST.part/job.json            identity of the job: options, inputs with sizes and times
    DST.part/SERIES-NNNNN/       a shard's files
    DST.part/SERIES-NNNNN.json   journal of a finished shard: its inputs, bad ones, digests of its files
    DST.part/ending.json         all shards are finished; their files are being renamed

A journal is written atomically, after its shard's files. The next run keeps the shards whose files match their journal's digests,
writes the others again, and ends with the same bytes.
"""

from __future__ import annotations

import fcntl
import logging
import shutil
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from unisono.data.convert.pack.image_listing import BadInput
from unisono.errors import DataError
from unisono.storage.files import file_digest, sync_folder, write_atomically

_PROGRESS_S = 5.0
_SHOWN = 20
_LOG = logging.getLogger("unisono")


class PackedInput(msgspec.Struct, frozen=True):
    """The outcome of one input: records to write and their size in bytes, or the reason why it is bad."""

    records: Sequence[Any] = ()
    size: int = 0
    bad: BadInput | None = None


class ShardJournal(msgspec.Struct, frozen=True):
    """A finished shard: inputs ``start`` to ``stop``, numbers of records and of inputs without any that are not bad, and the
    digests of its files (xxh3-128)."""

    start: int
    stop: int
    records: int
    empty: int
    bad: list[BadInput]
    files: dict[str, str]


class CommitPlan(msgspec.Struct, frozen=True):
    """Finished shards by series, and the final names of their files: SERIES-NNNNN/FILE → name beside the target."""

    journals: dict[str, list[ShardJournal]]
    moves: dict[str, str]


ShardCut = Callable[[int, int], bool]  # (inputs of the series so far, bytes of the shard) -> whether the shard ends
InputSource = Callable[[int], Generator[PackedInput]]  # outcomes of the inputs from this number on
ShardWriter = Callable[[Path, Iterator[Any]], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSeries:
    """Inputs that share shards: all, or one part of a split. ``file``: the name of shard n."""

    name: str
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
        self._begin = self._said = time.monotonic()

    def take_over(self, journal: ShardJournal) -> None:
        self._taken_over += journal.stop - journal.start

    def add(self, outcome: PackedInput) -> None:
        self._inputs += 1
        self._records += len(outcome.records)
        self._bytes += outcome.size
        now = time.monotonic()
        if now - self._said < _PROGRESS_S:
            return
        self._said = now
        rate = self._inputs / max(1e-9, now - self._begin)
        done = self._taken_over + self._inputs
        left = "" if self._total is None else f", {(self._total - done) / rate:.0f} s left"
        of = "" if self._total is None else f" of {self._total}"
        _LOG.info("packing: %d%s inputs, %d records, %.1f MB, %.0f inputs/s%s", done, of, self._records,
                  self._bytes / 1e6, rate, left)  # fmt: skip


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
                folder.mkdir()
                inputs = chain(() if first is None else (first,), outcomes)
                shard = _ShardInputs(inputs, done[-1].stop if done else 0, series.cut, progress, fail)
                series.write(folder / series.file(len(done)), shard.records())
                done.append(shard.journal({path.name: file_digest(path) for path in sorted(folder.iterdir())}))
                _write_json(self.folder / f"{folder.name}.json", done[-1])
                first = next(outcomes, None)
        finally:
            outcomes.close()
        return done

    def planned(self) -> CommitPlan | None:
        """The commit plan of an interrupted commit, if there was one."""
        try:
            return msgspec.json.decode((self.folder / "ending.json").read_bytes(), type=CommitPlan)
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def plan(self, plan: CommitPlan) -> None:
        """Store the plan: all shards are finished, and their files may be moved."""
        _write_json(self.folder / "ending.json", plan)

    def commit(self, plan: CommitPlan, folder: Path) -> None:
        """Move the remaining files to their names in ``folder`` and remove this folder."""
        for old, new in plan.moves.items():
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
            journal = msgspec.json.decode((self.folder / f"{name}.json").read_bytes(), type=ShardJournal)
            valid = journal.start == start and all(
                Path(file).name == file and file_digest(self.folder / name / file) == digest
                for file, digest in journal.files.items()
            )
        except (FileNotFoundError, msgspec.DecodeError):
            return None
        return journal if valid else None


class _ShardInputs:
    """The inputs of one shard, counted while they are written."""

    def __init__(
        self, outcomes: Iterator[PackedInput], start: int, cut: ShardCut, progress: PackProgress, fail: bool
    ) -> None:
        self._outcomes, self._start, self._cut, self._progress, self._fail = outcomes, start, cut, progress, fail
        self._stop, self._count, self._empty, self._bytes = start, 0, 0, 0
        self._bad: list[BadInput] = []

    def records(self) -> Iterator[Any]:
        for outcome in self._outcomes:
            self._stop += 1
            self._progress.add(outcome)
            if outcome.bad is not None:
                if self._fail:
                    raise BadInputError(outcome.bad)
                self._bad.append(outcome.bad)
            elif not outcome.records:
                self._empty += 1
            self._count += len(outcome.records)
            self._bytes += outcome.size
            yield from outcome.records
            if self._cut(self._stop, self._bytes):
                return

    def journal(self, files: dict[str, str]) -> ShardJournal:
        return ShardJournal(
            start=self._start, stop=self._stop, records=self._count, empty=self._empty, bad=self._bad, files=files
        )


@contextmanager
def open_partial_target(folder: Path, job: bytes) -> Generator[PartialTarget]:
    """Open ``folder`` for ``job``, exclusively. Files of another job are deleted, with a warning. Raises DataError while another
    process has it open."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise DataError(
                given=f"{folder}: another process is at it ({error.strerror})",
                rule="one process at a time packs to a target",
                consequence="nothing was done",
                nearest="wait for it, or another target",
            ) from error
        path = folder / "job.json"
        if not path.exists() or path.read_bytes() != job:
            old = [entry for entry in folder.iterdir() if entry.name != "lock"]
            if old:
                _LOG.warning("%s: what is there is of other inputs or options, and is made anew", folder)
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
    """The error of ``--on-error fail``."""
    shown = "".join(f"\n    {entry.path}: {entry.reason}" for entry in bad[:_SHOWN])
    more = f"\n    and {len(bad) - _SHOWN:,} more, all in the report" if len(bad) > _SHOWN else ""
    return DataError(
        given=f"{len(bad):,} bad input{'s' if len(bad) > 1 else ''}:{shown}{more}",
        rule="every input is packed, unless --on-error skip",
        consequence="the target was not written; finished shards, if any, are kept for a next run",
        nearest="mend or remove them; or --on-error skip packs the rest and lists them in the report",
    )


def _write_json(path: Path, value: Any) -> None:
    write_atomically(path, msgspec.json.encode(value))
