"""Numeric columns: robust statistics, outliers, values that are not finite, and values that stand still.

A value is an outlier if ``|x - median| > max_z * 1.4826 * MAD``, with the median absolute deviation MAD, which for a normal
distribution is its standard deviation divided by 1.4826 (Iglewicz and Hoaglin, How to Detect and Handle Outliers, 1993). Where
more than half of the values are equal, MAD is 0, and the interquartile range divided by 1.349 takes its place; where that is 0
too, no value is judged. Medians and quantiles are exact. Of normal data, a value is taken for an outlier at the default of 6 with
a probability of 2e-9 in long series, and of 7e-6 in the shortest series that are judged, of 50 values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from unisono.quality.columns.exact_quantiles import CHUNK, chunks_of, quantiles
from unisono.quality.columns.series import Column, Series

REASONS: Final = ("outlier", "non-finite", "stuck")  # by the bit of each value's flags
OUTLIER, NON_FINITE, STUCK = 1, 2, 4
MIN_VALUES: Final = 50  # of a series that is judged
SHOWN: Final = 20  # places of each reason
SHOWN_GROUPS: Final = 50
_MAD: Final = 1.4826  # 1 / the upper quartile of the standard normal distribution
_IQR: Final = 1.349  # its interquartile range
_FRACTIONS: Final = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
_MIN_OUTSIDE: Final = 0.1  # of the values of a column that varies
_BINS: Final = 60
_MAX_DRAWN: Final = 1e300  # differences of larger numbers may be infinite


@dataclass(frozen=True, kw_only=True, slots=True)
class NumericColumn:
    """A column of numbers.

    Attributes:
        name: Its name.
        numbers: Finite numbers; the statistics are theirs.
        non_finite: Values that are NaN or infinite.
        missing: Rows without a number.
        median: None without numbers.
        mad: Median absolute deviation; None without numbers.
        quantiles: By their fractions, from ``0`` (the smallest) to ``1``.
        series: Number of series: one, or one of each group.
        scales: Series judged for outliers, by what their spread is measured with: ``MAD`` or ``IQR``.
        not_judged: Series not judged for outliers, by the reason.
        not_varying: Series not judged for stuck values, as they vary too little.
        outliers: Values that are outliers.
        stuck_runs: Runs of equal values that are too long.
        stuck_values: Values in them.
        places: The first of each reason: file, row, value, reason, and ``z`` of outliers or ``length`` of runs.
        groups: Groups with flagged values: group, numbers, median, outliers, stuck_values.
        groups_left_out: Such groups that are not listed.
        histogram: ``begin`` and ``width`` of the bins, their ``counts``, and how many numbers are ``below`` and ``above``.
    """

    name: str
    numbers: int
    non_finite: int
    missing: int
    median: float | None
    mad: float | None
    quantiles: dict[str, float]
    series: int
    scales: dict[str, int]
    not_judged: dict[str, int]
    not_varying: int
    outliers: int
    stuck_runs: int
    stuck_values: int
    places: tuple[dict[str, Any], ...]
    groups: tuple[dict[str, Any], ...]
    groups_left_out: int
    histogram: dict[str, Any]


@dataclass(slots=True)
class _Tally:
    """What judging the series of a column adds up."""

    medians: NDArray[np.float64]  # [series]
    spreads: NDArray[np.float64]  # [series], 0 of those that are not judged
    scales: Counter[str] = field(default_factory=Counter[str])
    not_judged: Counter[str] = field(default_factory=Counter[str])
    not_varying: int = 0
    outliers: int = 0
    stuck_runs: int = 0
    stuck_values: int = 0
    runs: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])  # (first row, length) of the first
    groups: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


def judge_column(
    name: str,
    column: Column,
    flags: NDArray[np.uint8],
    folder: Path,
    *,
    groups: Sequence[str],
    max_z: float,
    stuck_run: int,
) -> NumericColumn:
    """Statistics and flags of a column, each group of rows judged by itself.

    Args:
        name: Of the column.
        column: Its numbers.
        flags: Of all rows, uint8 [rows]; gets bits of ``REASONS``.
        folder: For files that nobody needs afterwards.
        groups: Names of the groups.
        max_z: Largest robust z-score of a value that is no outlier.
        stuck_run: Fewest equal values in a row that are stuck, in a series that varies otherwise.
    """
    series = column.series(folder)
    total = len(series.values)
    counted = _flag_non_finite(column, flags)
    tally = _Tally(np.zeros(len(groups)), np.zeros(len(groups)))
    for number, group in enumerate(groups):
        _judge_series(series, number, group, flags, tally, max_z, stuck_run)
    found = dict(zip(_FRACTIONS, quantiles(series.values, _FRACTIONS), strict=True)) if total else {}
    median = found.get(0.5)
    mad = None if median is None else _mad(series.values, median)
    flagged = (
        sorted(tally.groups, key=lambda facts: -facts["outliers"] - facts["stuck_values"]) if len(groups) > 1 else []
    )
    return NumericColumn(
        name=name,
        numbers=total,
        non_finite=counted - total,
        missing=len(flags) - counted,
        median=median,
        mad=mad,
        quantiles={f"{fraction:g}": value for fraction, value in found.items()},
        series=len(groups),
        scales=dict(tally.scales),
        not_judged=dict(tally.not_judged),
        not_varying=tally.not_varying,
        outliers=tally.outliers,
        stuck_runs=tally.stuck_runs,
        stuck_values=tally.stuck_values,
        places=tuple(_places(column, flags, tally, groups)),
        groups=tuple(flagged[:SHOWN_GROUPS]),
        groups_left_out=max(0, len(flagged) - SHOWN_GROUPS),
        histogram=_histogram(series.values, found, mad or 0.0, max_z),
    )


def _mad(values: NDArray[np.float64], median: float) -> float:
    return quantiles(values, (0.5,), lambda numbers: _distance(numbers, median))[0]


def _distance(values: NDArray[np.float64], median: float) -> NDArray[np.float64]:
    with np.errstate(over="ignore"):  # of the largest numbers
        return np.abs(values - median)


def _flag_non_finite(column: Column, flags: NDArray[np.uint8]) -> int:
    """The number of values, those that are not finite among them."""
    count = 0
    for rows, values, _ in column.chunks():
        flags[rows[~np.isfinite(values)]] |= NON_FINITE
        count += len(rows)
    return count


def _judge_series(
    series: Series, number: int, group: str, flags: NDArray[np.uint8], tally: _Tally, max_z: float, stuck_run: int
) -> None:
    begin, end = series.bounds[number : number + 2].tolist()
    values, rows = series.values[begin:end], series.rows[begin:end]
    if len(values) < MIN_VALUES:
        tally.not_judged[f"fewer than {MIN_VALUES} values"] += 1
        return
    lower, tally.medians[number], upper = quantiles(values, (0.25, 0.5, 0.75))
    mad = _mad(values, tally.medians[number])
    spread = _MAD * mad if mad else (upper - lower) / _IQR
    outliers = 0
    if spread:
        tally.scales["MAD" if mad else "IQR"] += 1
        tally.spreads[number] = spread
        for at, chunk in enumerate(chunks_of(values)):
            beyond = np.flatnonzero(_distance(chunk, tally.medians[number]) > max_z * spread)
            flags[rows[at * CHUNK + beyond]] |= OUTLIER
            outliers += len(beyond)
    else:
        tally.not_judged["half of the values or more are equal"] += 1
    runs, varies = _long_runs(values, stuck_run)
    if not varies:
        tally.not_varying += 1
        runs = runs[:0]
    for start, length in runs.tolist():
        for first in range(start, start + length, CHUNK):
            flags[rows[first : min(first + CHUNK, start + length)]] |= STUCK
    tally.outliers += outliers
    tally.stuck_runs += len(runs)
    tally.stuck_values += int(runs[:, 1].sum())
    tally.runs = sorted([*tally.runs, *((int(rows[start]), length) for start, length in runs[:SHOWN].tolist())])[:SHOWN]
    if outliers or len(runs):
        tally.groups.append(
            {
                "group": group,
                "numbers": len(values),
                "median": float(tally.medians[number]),
                "outliers": outliers,
                "stuck_values": int(runs[:, 1].sum()),
            }
        )


def _long_runs(values: NDArray[np.float64], at_least: int) -> tuple[NDArray[np.int64], bool]:
    """(place, length) of each run of ``at_least`` equal values or more, int64 [runs, 2], and whether the others vary.

    They do if they are a tenth of the values or more, and less than half of them equal the one before.
    """
    found = [np.zeros((0, 2), np.int64)]
    open_at, equal = 0, 0  # where the run begins that is not over; equal neighbours in short runs
    last: float | None = None
    for number, chunk in enumerate(chunks_of(values)):
        starts = np.flatnonzero(chunk[1:] != chunk[:-1]) + 1
        if last is None or chunk[0] != last:
            starts = np.concatenate(([0], starts))
        begins = np.concatenate(([open_at], number * CHUNK + starts)) if last is not None else starts
        last, open_at = float(chunk[-1]), int(begins[-1])
        lengths = np.diff(begins)
        found.append(np.stack((begins[:-1], lengths), axis=1)[lengths >= at_least])
        equal += int((lengths[lengths < at_least] - 1).sum())
    length = len(values) - open_at
    if length >= at_least:
        found.append(np.array([[open_at, length]], np.int64))
    else:
        equal += length - 1
    runs = np.concatenate(found)
    outside = len(values) - int(runs[:, 1].sum())
    return runs, outside >= _MIN_OUTSIDE * len(values) and 2 * equal < outside


def _places(column: Column, flags: NDArray[np.uint8], tally: _Tally, groups: Sequence[str]) -> list[dict[str, Any]]:
    """The first values of each reason, by their rows among all."""
    places: list[dict[str, Any]] = []
    for bit in (OUTLIER, NON_FINITE):
        for row in first_flagged(flags, bit):
            value, number = column.value(row), column.group(row)
            place: dict[str, Any] = {"at": row, "reason": REASONS[bit.bit_length() - 1], "value": json_number(value)}
            if bit == OUTLIER:
                with np.errstate(over="ignore"):
                    z = float((value - tally.medians[number]) / tally.spreads[number])
                place["z"] = json_number(float(f"{z:.4g}"))
            places.append(place | ({"group": groups[number]} if len(groups) > 1 else {}))
    for row, length in tally.runs:
        place = {"at": row, "reason": "stuck", "value": json_number(column.value(row)), "length": length}
        places.append(place | ({"group": groups[column.group(row)]} if len(groups) > 1 else {}))
    return places


def json_number(value: float) -> float | str:
    """A number as JSON has it; ``nan``, ``inf`` and ``-inf``, which it does not have, as texts."""
    return value if np.isfinite(value) else str(value)


def first_flagged(flags: NDArray[np.uint8], bit: int) -> list[int]:
    """The first rows with a flag, ``SHOWN`` at most."""
    rows: list[int] = []
    for begin in range(0, len(flags), CHUNK):
        rows += (begin + np.flatnonzero(flags[begin : begin + CHUNK] & bit)[: SHOWN - len(rows)]).tolist()
        if len(rows) == SHOWN:
            break
    return rows


def _histogram(values: NDArray[np.float64], found: dict[float, float], mad: float, max_z: float) -> dict[str, Any]:
    """Counts of bins over the values that are no outliers of the whole column."""
    if not found:
        return {}
    low, high = found[0.0], found[1.0]
    if mad:
        reach = max_z * _MAD * mad
        low, high = max(low, found[0.5] - reach), min(high, found[0.5] + reach)
    width = high / _BINS - low / _BINS
    if not width or max(-low, high) > _MAX_DRAWN:
        return {}
    counts = np.zeros(_BINS, np.int64)
    below = 0
    for chunk in chunks_of(values):
        below += int(np.sum(chunk < low))
        counts += np.histogram(chunk, bins=_BINS, range=(low, high))[0]
    above = len(values) - below - int(counts.sum())
    return {"begin": low, "width": width, "counts": counts.tolist(), "below": below, "above": above}
