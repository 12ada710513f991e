"""Stamps of rows: the usual interval between two, gaps, and stamps that repeat or go back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from unisono.errors import DataError
from unisono.quality.columns.exact_quantiles import CHUNK, quantiles
from unisono.quality.columns.numeric_columns import SHOWN, SHOWN_GROUPS
from unisono.quality.columns.scan import FileFacts, ScannedArrays
from unisono.quality.columns.series import Column, Groups, new_array
from unisono.sanitize import quoted

TIME_REASONS: Final = ("gap", "back", "repeated")  # by the bit of each row's flags
_MIN_INTERVALS: Final = 10  # of a series whose usual interval is known


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingTimes:
    """The stamps of a data set.

    Attributes:
        column: Their column.
        unit: ``s`` of dates; empty of numbers, whose unit only the column's owner knows.
        missing: Rows without a stamp.
        series: Number of series: one, or one of each group.
        not_judged: Series with too few intervals to know the usual one; their gaps are not judged.
        interval: Median interval of the series, of several the median of these; None if none is known.
        gaps: Intervals longer than ``max_gap`` times that of their series.
        back: Stamps before the one before them.
        repeated: Stamps equal to the one before them.
        places: The first of each reason: place of the later row, reason, interval.
        groups: Groups with any of these: group, stamps, interval, gaps, back, repeated.
        groups_left_out: Such groups that are not listed.
    """

    column: str
    unit: str
    missing: int
    series: int
    not_judged: int
    interval: float | None
    gaps: int
    back: int
    repeated: int
    places: tuple[dict[str, Any], ...]
    groups: tuple[dict[str, Any], ...]
    groups_left_out: int


def stamps_column(
    arrays: ScannedArrays, names: Sequence[str], facts: Sequence[FileFacts], groups: Groups, name: str
) -> Column:
    """The stamps of all files, relative to the first; in seconds, or in the unit of their numbers.

    Args:
        arrays: Of the scan.
        names: Of the files.
        facts: Of the files.
        groups: Of the rows.
        name: Of the column.

    Raises:
        DataError: Files have stamps of different kinds.
    """
    having = [number for number, found in enumerate(facts) if found.time_kind]
    shifts = [0.0] * len(facts)
    for number in having:
        first, found = facts[having[0]], facts[number]
        if (first.time_kind, first.time_unit_s) != (found.time_kind, found.time_unit_s):
            raise DataError(
                given=f"column {quoted(name)}, {_words(first)} in {names[having[0]]} and {_words(found)} in {names[number]}",
                rule="stamps are of one kind in all files",
                consequence="nothing was written",
                nearest="each kind of files by itself",
            )
        shifts[number] = float(found.time_base - first.time_base) * (found.time_unit_s or 1.0)
    return Column(arrays, ["time" if found.time_kind else None for found in facts], groups, shifts)


def _words(facts: FileFacts) -> str:
    unit = f" in units of {facts.time_unit_s:g} s" if facts.time_kind == "timestamp" else ""
    return {"number": "numbers", "text": "dates as text", "timestamp": "timestamps"}[facts.time_kind] + unit


def judge_times(
    name: str,
    column: Column,
    flags: NDArray[np.uint8],
    folder: Path,
    *,
    groups: Sequence[str],
    max_gap: float,
    unit: str,
) -> SamplingTimes:
    """Intervals of each group's stamps, in the order of the rows.

    Args:
        name: Of the column.
        column: Its stamps.
        flags: Of all rows, uint8 [rows]; gets bits of ``TIME_REASONS``.
        folder: For files that nobody needs afterwards.
        groups: Names of the groups.
        max_gap: Longest interval that is no gap, in usual intervals.
        unit: Of the stamps.
    """
    series = column.series(folder)
    intervals: list[float] = []
    counts = np.zeros(len(TIME_REASONS), np.int64)
    places: list[list[dict[str, Any]]] = [[] for _ in TIME_REASONS]
    flagged: list[dict[str, Any]] = []
    not_judged = 0
    for number, group in enumerate(groups):
        begin, end = series.bounds[number : number + 2].tolist()
        stamps, rows = series.values[begin:end], series.rows[begin:end]
        usual = _usual_interval(stamps, folder)
        not_judged += usual is None
        intervals += [] if usual is None else [usual]
        own = np.zeros(len(TIME_REASONS), np.int64)
        for later, steps in _steps(stamps, rows):
            for bit, found in enumerate((steps > max_gap * (usual or np.inf), steps < 0, steps == 0)):
                where = np.flatnonzero(found)
                flags[later[where]] |= 1 << bit
                own[bit] += len(where)
                places[bit] += [
                    {"at": int(later[at]), "reason": TIME_REASONS[bit], "interval": float(f"{steps[at]:.9g}")}
                    | ({"group": group} if len(groups) > 1 else {})
                    for at in where[:SHOWN].tolist()
                ]
        counts += own
        places = [sorted(found, key=lambda place: place["at"])[:SHOWN] for found in places]
        if own.any() and len(groups) > 1:
            facts = dict(zip(("gaps", "back", "repeated"), own.tolist(), strict=True))
            flagged.append({"group": group, "stamps": len(stamps), "interval": usual, **facts})
    flagged.sort(key=lambda facts: -facts["gaps"] - facts["back"] - facts["repeated"])
    return SamplingTimes(
        column=name,
        unit=unit,
        missing=len(flags) - len(series.values),
        series=len(groups),
        not_judged=not_judged,
        interval=float(np.median(intervals)) if intervals else None,
        gaps=int(counts[0]),
        back=int(counts[1]),
        repeated=int(counts[2]),
        places=tuple(place for found in places for place in found),
        groups=tuple(flagged[:SHOWN_GROUPS]),
        groups_left_out=max(0, len(flagged) - SHOWN_GROUPS),
    )


def _steps(
    stamps: NDArray[np.float64], rows: NDArray[np.int64]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float64]]]:
    """(row of the later stamp, interval) of neighbours, each an array."""
    for begin in range(0, len(stamps) - 1, CHUNK):
        part = np.array(stamps[begin : begin + CHUNK + 1])
        yield np.array(rows[begin + 1 : begin + CHUNK + 1]), np.diff(part)


def _usual_interval(stamps: NDArray[np.float64], folder: Path) -> float | None:
    """The median of the intervals above 0; None if there are too few."""
    count = sum(int(np.sum(steps > 0)) for _, steps in _steps(stamps, np.zeros(0, np.int64)))
    if count < _MIN_INTERVALS:
        return None
    steps = np.zeros(count) if count <= CHUNK else new_array(folder / "intervals", count, np.float64)
    at = 0
    for _, part in _steps(stamps, np.zeros(0, np.int64)):
        above = part[part > 0]
        steps[at : at + len(above)] = above
        at += len(above)
    return quantiles(steps, (0.5,))[0]
