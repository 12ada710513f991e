"""Pack jobs of any kind: options, shards, the report. A killed job loses only its current shard (``partial_target``)."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import xxhash

from unisono.data.cleaning_record import CLEANING_SUFFIX
from unisono.data.convert.formats.table import unwritable_error
from unisono.data.convert.pack.partial_target import (
    UNSPLIT,
    BadInput,
    BadInputError,
    CommitPlan,
    PackProgress,
    PartialTarget,
    ShardCut,
    ShardJournal,
    ShardSeries,
    open_partial_target,
)
from unisono.data.convert.table_files import files_of
from unisono.errors import DataError
from unisono.sanitize import shorten
from unisono.storage.files import MAX_SHOWN_PATH, look_up, write_atomically

OnError = Literal["fail", "skip"]
_SHOWN = 20
_LOG = logging.getLogger("unisono")


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
    for path in (part, job.report):  # names longer than the target's own
        _, fault = look_up(path)
        if fault:
            given = f"{shorten(str(path), MAX_SHOWN_PATH)}, which lies beside the target: {fault}"
            raise unwritable_error(given, "a target has a name that leaves room for those beside it", "another target")
    if not os.path.exists(part / "ending.json"):
        _refuse_existing(job.target, names, job.side_files)
    if job.on_error == "fail" and job.bad:
        _write_report(job, job.bad, None)
        raise bad_inputs_error(job.bad)
    identity = xxhash.xxh3_128_hexdigest(msgspec.json.encode({**job.identity, "on_error": job.on_error}))
    with open_partial_target(part, f"{identity} of {job.source}\n".encode()) as partial:
        plan = partial.read_plan(names)
        resumed = plan is not None
        if plan is None:
            _refuse_existing(job.target, names, job.side_files)
            try:
                journals = _build(partial, series, fail=job.on_error == "fail")
            except BadInputError as error:
                _write_report(job, [error.bad], None)
                raise bad_inputs_error([error.bad]) from None
            _refuse_existing(job.target, names, job.side_files)  # made by others meanwhile
            plan = CommitPlan(journals=journals)
            partial.write_plan(plan)
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
    files = [(path.name, path.stat()) for path in files_of(source) if os.path.exists(path)]
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


def _refuse_existing(target: Path, series: Sequence[str], side_files: Mapping[str, str]) -> None:
    """Raise DataError if the target, a file named like one of its parts or shards, or an index or file beside one exists."""
    beside = {f"{target.name}{suffix}": text.encode() for suffix, text in side_files.items()}
    parts = "|".join(f"-{re.escape(name)}" for name in series if name != UNSPLIT)
    number, suffix = "(-[0-9]{5}(-of-[0-9]{5})?)?", re.escape(target.suffix)
    ours = re.compile(rf"{re.escape(target.stem)}({parts})?{number}({suffix}|{suffix}\.db|\.u?idx)")
    if not os.path.isdir(target.parent):
        raise unwritable_error(
            f"{target}, in a folder that does not exist", "a target's folder exists", f"mkdir -p {target.parent}"
        )
    beside.setdefault(f"{target.name}{CLEANING_SUFFIX}", b"")  # of another target of this name
    existing = [
        path
        for path in sorted(target.parent.iterdir())
        if ours.fullmatch(path.name) or (path.name in beside and _read_if_file(path) != beside[path.name])
    ]
    existing.sort(key=lambda path: path.suffix != target.suffix)  # the files themselves before those beside them
    if existing:
        raise unwritable_error(
            f"{existing[0]}, which exists",
            "a target, its parts and its shards are written once",
            "remove it, or another name for the target",
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


def bad_inputs_error(bad: Sequence[BadInput]) -> DataError:
    """The error for bad inputs of a job with ``on_error`` "fail"."""
    shown = "".join(f"\n    {entry.path}: {entry.reason}" for entry in bad[:_SHOWN])
    follows = any("--follow-links" in entry.reason for entry in bad)
    nearest = "repair or remove them; or --on-error skip packs the rest and lists them in the report"
    more = f"\n    and {len(bad) - _SHOWN:,} more, all in the report" if len(bad) > _SHOWN else ""
    return DataError(
        given=f"{len(bad):,} bad input{'s' if len(bad) > 1 else ''}:{shown}{more}",
        rule="every input is packed, unless --on-error skip",
        consequence="the target was not written; finished shards, if any, are kept for a next run",
        nearest=f"--follow-links, which takes what links and paths lead out to; else {nearest}" if follows else nearest,
    )


def _read_if_file(path: Path) -> bytes | None:
    return path.read_bytes() if os.path.isfile(path) else None
