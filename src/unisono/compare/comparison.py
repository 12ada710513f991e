"""Compares two runs: each figure with its ratio, difference and confidence interval."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from unisono.compare.differences import Difference, differences
from unisono.compare.run_figures import RunFigures
from unisono.compare.statistics import MIN_SAMPLES, Sample, mean_interval, median_ratio_interval, ratio_interval
from unisono.observe.history import Floats

STEP_MEDIAN: Final = "perf/step_median_s"
LOSS_STEPS: Final = 50  # the last steps of both runs over which losses are compared


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One figure of two runs.

    Attributes:
        name: Its name, as in events: ``perf/step_s``.
        a: Its value in the first run; None if that has none, NaN if it is no number.
        b: Its value in the second run.
        interval: 95 % interval of ``ratio``, or of ``delta`` for the training loss; None where single steps are not known or too
            few.
        at: Of which steps it is, in words; empty for a figure of the whole run.
    """

    name: str
    a: float | None
    b: float | None
    interval: tuple[float, float] | None = None
    at: str = ""

    @property
    def ratio(self) -> float | None:
        """``b / a``; None where it is not defined."""
        return self.b / self.a if self.a and self.b is not None else None

    @property
    def delta(self) -> float | None:
        """``b - a``."""
        return None if self.a is None or self.b is None else self.b - self.a

    def to_json(self) -> dict[str, Any]:
        """The same as JSON types, with numbers that are none as null."""
        values = {"a": self.a, "b": self.b, "ratio": self.ratio, "delta": self.delta}
        finite = {name: value if value is not None and math.isfinite(value) else None for name, value in values.items()}
        interval = None if self.interval is None else list(self.interval)
        return {"name": self.name, **finite, "interval": interval, **({"at": self.at} if self.at else {})}


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The second run ``b`` beside the first ``a``.

    Attributes:
        a: The first run, of which ratios are.
        b: The second run.
        rows: The figures that either has.
        first_loss_difference: First step of both at which their losses are not the same bits; None where all are.
        common_steps: Number of steps whose losses both have.
        settings: Options that differ.
        environment: Versions, devices, data and plan that differ.
        notes: What the figures cannot tell.
    """

    a: RunFigures
    b: RunFigures
    rows: tuple[Row, ...]
    first_loss_difference: int | None
    common_steps: int
    settings: tuple[Difference, ...]
    environment: tuple[Difference, ...]
    notes: tuple[str, ...]

    def row(self, name: str) -> Row | None:
        """The row of a figure; None where neither run has it."""
        return next((row for row in self.rows if row.name == name), None)

    def to_json(self) -> dict[str, Any]:
        """The same as JSON types."""
        return {
            "a": str(self.a.run_dir),
            "b": str(self.b.run_dir),
            "figures": [row.to_json() for row in self.rows],
            "common_steps": self.common_steps,
            "first_loss_difference": self.first_loss_difference,
            "settings": [{"key": each.key, "a": each.a, "b": each.b} for each in self.settings],
            "environment": [{"key": each.key, "a": each.a, "b": each.b} for each in self.environment],
            "notes": list(self.notes),
        }


def compare_runs(a: RunFigures, b: RunFigures) -> Comparison:
    """Compare two runs."""
    notes = [*a.notes, *(note for note in b.notes if note not in a.notes)]
    rows: list[Row] = []
    first_difference, num_common = None, 0
    if len(a.losses) and len(b.losses):
        steps, mine, its = np.intersect1d(a.loss_steps, b.loss_steps, return_indices=True)
        losses, others = a.losses[mine], b.losses[its]
        num_common = len(steps)
        if num_common:
            rows.append(_loss_row(steps.tolist(), losses, others))
            differ = np.flatnonzero((losses != others) & ~(np.isnan(losses) & np.isnan(others)))
            first_difference = int(steps[differ[0]]) if len(differ) else None
        else:
            notes.append("the runs have no step in common: their losses cannot be compared")
    rows += [
        row for name in sorted({*a.evaluations, *b.evaluations}) if (row := _evaluation_row(name, a, b)) is not None
    ]
    for name in dict.fromkeys([*a.samples, *b.samples]):
        rows.append(_sample_row(name, a, b))
        if name == "perf/step_s":
            rows.append(_median_row(a, b))
    rows += [
        Row(name=name, a=a.values.get(name), b=b.values.get(name)) for name in dict.fromkeys([*a.values, *b.values])
    ]
    for run in (a, b):
        count = len(run.samples.get("perf/step_s", ()))
        if count < MIN_SAMPLES:
            notes.append(
                f"{run.run_dir} has {count} readings after warm-up: with fewer than {MIN_SAMPLES} of either run it is too short "
                "to tell how sure a ratio is"
            )
    return Comparison(
        a=a,
        b=b,
        rows=tuple(rows),
        first_loss_difference=first_difference,
        common_steps=num_common,
        settings=tuple(differences(a.settings, b.settings)),
        environment=tuple(differences(a.environment, b.environment)),
        notes=tuple(dict.fromkeys(notes)),
    )


def _loss_row(steps: list[int], losses: Floats, others: Floats) -> Row:
    """Mean losses over the last steps that both runs have."""
    count = min(LOSS_STEPS, len(steps))
    return Row(
        name="train/loss",
        a=float(losses[-count:].mean()),
        b=float(others[-count:].mean()),
        interval=mean_interval(others[-count:] - losses[-count:]),
        at=f"mean of steps {steps[-count]} to {steps[-1]}" if count > 1 else f"step {steps[-1]}",
    )


def _evaluation_row(name: str, a: RunFigures, b: RunFigures) -> Row | None:
    """The metric in the last evaluation after the same step; without one, the last of each run."""
    mine, its = a.evaluations.get(name, {}), b.evaluations.get(name, {})
    if common := set(mine) & set(its):
        step = max(common)
        return Row(name=name, a=mine[step], b=its[step], at=f"step {step}")
    ends = [max(found, default=None) for found in (mine, its)]
    at = " and ".join(f"step {end}" for end in ends if end is not None)
    return Row(
        name=name,
        a=None if ends[0] is None else mine[ends[0]],
        b=None if ends[1] is None else its[ends[1]],
        at=at,
    )


def _sample_row(name: str, a: RunFigures, b: RunFigures) -> Row:
    """The mean over time, in which single long pauses count with what they take."""
    mine, its = (
        Sample(run.samples[name], run.weights[name]) if len(run.samples.get(name, ())) else None for run in (a, b)
    )
    return Row(
        name=name,
        a=None if mine is None else mine.mean(),
        b=None if its is None else its.mean(),
        interval=None if mine is None or its is None else ratio_interval(mine, its),
    )


def _median_row(a: RunFigures, b: RunFigures) -> Row:
    """The time of a step in the median reading, in which single pauses do not count."""
    mine, its = (run.samples.get("perf/step_s", np.zeros(0)) for run in (a, b))
    return Row(
        name=STEP_MEDIAN,
        a=float(np.median(mine)) if len(mine) else None,
        b=float(np.median(its)) if len(its) else None,
        interval=median_ratio_interval(mine, its),
    )
