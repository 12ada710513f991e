"""What every kind of packing shares: where shards are cut, their names, the report, and going on after a kill."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import xxhash

from unisono.data.convert.formats.table import unwritable_error
from unisono.data.convert.pack.image_listing import BadInput
from unisono.data.convert.pack.resumable_shards import (
    BadInputError,
    CommitPlan,
    PackProgress,
    PartialTarget,
    ShardCut,
    ShardJournal,
    ShardSeries,
    bad_inputs_error,
    open_partial_target,
)
from unisono.storage.files import write_atomically

UNSPLIT: Final = "all"  # the series of what is not split
OnError = Literal["fail", "skip"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackResult:
    """What became of the inputs. ``splits``: records of each part; ``empty``: inputs that gave no record and were not bad."""

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
    """``identity``: all that decides the bytes of the target. ``beside``: small files written beside it, by suffix.
    ``bad``, ``left_out``: of the listing."""

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
    """Write the target's files, whole and under their names, or none of them; then its report.

    ``numbered``: their number is in their names even where it is one file. Raises DataError for a target that exists and,
    where ``on_error`` is "fail", for bad inputs; the report is written then too.
    """
    part = job.target.with_name(f"{job.target.name}.part")
    names = [each.name for each in series]
    if not (part / "ending.json").exists():
        _refuse_existing(job.target, names)
    if job.on_error == "fail" and job.bad:
        _write_report(job, job.bad, None)
        raise bad_inputs_error(job.bad)
    identity = xxhash.xxh3_128_hexdigest(msgspec.json.encode(job.identity))
    with open_partial_target(part, f"{identity} of {job.source}\n".encode()) as work:
        ending = work.ending()
        if ending is None:
            _refuse_existing(job.target, names)
            try:
                journals = _build(work, series, fail=job.on_error == "fail")
            except BadInputError as error:
                _write_report(job, [error.bad], None)
                raise bad_inputs_error([error.bad]) from None
            ending = CommitPlan(journals=journals, moves=_moves(job.target, journals, numbered))
            work.decide(ending)
        packed = _packed(job, ending)
        for suffix, text in job.side_files.items():
            write_atomically(job.target.with_name(job.target.name + suffix), text.encode())
        _write_report(job, packed.bad, packed)
        work.end(ending, job.target.parent)
    return packed


def cut_by_bytes(shard_bytes: int | None) -> ShardCut:
    """Shards that end with the record which fills them; one shard where None."""
    return lambda _stop, size: shard_bytes is not None and size >= shard_bytes


def cut_by_count(inputs: int, shards: int) -> ShardCut:
    """``shards`` shards of equal numbers of inputs, the first ones of one more where that does not come out even."""
    ends = {inputs * (number + 1) // shards for number in range(shards)}
    return lambda stop, _size: stop in ends and stop < inputs


def check_suffix(target: Path, known: Iterable[str], kind: str) -> None:
    """Raises DataError where ``kind`` is not written to such a file."""
    if target.suffix not in known:
        raise unwritable_error(
            f"{target}, whose suffix is {target.suffix!r}",
            f"--kind {kind} is packed into {', '.join(known)}",
            f"{target.with_suffix(next(iter(known))).name}",
        )


def _build(work: PartialTarget, series: Sequence[ShardSeries], *, fail: bool) -> dict[str, list[ShardJournal]]:
    totals = [each.total for each in series]
    progress = PackProgress(None if None in totals else sum(total or 0 for total in totals))
    return {each.name: work.build(each, progress, fail=fail) for each in series}


def _refuse_existing(target: Path, series: Sequence[str]) -> None:
    """The target, and what is named as one of its parts or shards."""
    parts = "|".join(f"-{name}" for name in series if name != UNSPLIT)
    ours = re.compile(rf"{re.escape(target.stem)}({parts})?(-[0-9]{{5}}(-of-[0-9]{{5}})?)?{re.escape(target.suffix)}")
    if not target.parent.is_dir():
        raise unwritable_error(
            f"{target}, in a folder that is not there", "a target's folder exists", f"mkdir -p {target.parent}"
        )
    there = sorted(each for each in target.parent.iterdir() if ours.fullmatch(each.name))
    if there:
        raise unwritable_error(
            f"{there[0]}, which exists",
            "a target, its parts and its shards are written once",
            "another name for the target",
        )


def _moves(target: Path, journals: Mapping[str, list[ShardJournal]], numbered: bool) -> dict[str, str]:
    """SERIES-NNNNN/FILE to the name it gets, indexes before what they index. MindRecord's files hold their own names, and
    keep them."""
    moves: dict[str, str] = {}
    for series, shards in journals.items():
        stem = target.stem if series == UNSPLIT else f"{target.stem}-{series}"
        for number, journal in enumerate(shards):
            place = f"-{number:05d}" if numbered else f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
            for file in sorted(journal.files, key=lambda file: Path(file).suffix == target.suffix):
                name = file if target.suffix == ".mindrecord" else f"{stem}{place}{Path(file).suffix}"
                moves[f"{series}-{number:05d}/{file}"] = name
    return moves


def _packed(job: PackJob, ending: CommitPlan) -> PackResult:
    shards = [journal for journals in ending.journals.values() for journal in journals]
    bad = (*job.bad, *(each for journal in shards for each in journal.bad))
    inputs = sum(journal.stop - journal.start for journal in shards) + len(job.bad)
    return PackResult(
        files=tuple(job.target.with_name(name) for name in ending.moves.values() if name.endswith(job.target.suffix)),
        num_inputs=inputs,
        num_records=sum(journal.records for journal in shards),
        num_empty=sum(journal.empty for journal in shards),
        bad=bad,
        num_left_out=job.left_out,
        splits={
            name: sum(each.records for each in journals)
            for name, journals in ending.journals.items()
            if name != UNSPLIT
        },
        report=job.report,
    )


def _write_report(job: PackJob, bad: Sequence[BadInput], packed: PackResult | None) -> None:
    """What became of the inputs, also where nothing was written (``packed`` None)."""
    told: dict[str, Any] = {"source": job.source, "target": str(job.target), "on_error": job.on_error}
    if packed is not None:
        told |= {
            "files": [path.name for path in packed.files],
            "inputs": packed.num_inputs,
            "records": packed.num_records,
        }
        told |= {"empty": packed.num_empty, "left_out": packed.num_left_out, "splits": packed.splits}
    told["written"] = packed is not None
    told["bad"] = [{"path": each.path, "reason": each.reason} for each in bad]
    write_atomically(job.report, json.dumps(told, indent=1, ensure_ascii=False).encode() + b"\n")
