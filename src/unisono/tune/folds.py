"""Cross-validation: a training for each fold of the data that is held out, and mean and spread of a metric over them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from unisono.report.charts import curve_layout
from unisono.report.html import render_page
from unisono.report.page import SUMMARY
from unisono.report.section import Section, Table
from unisono.report.tables import Figure
from unisono.sanitize import printable
from unisono.storage.files import write_atomically
from unisono.tune.space import Range, Space
from unisono.tune.study import TrialRecord

FOLD: Final = "data.eval_fold"


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossValidation:
    """A metric over the folds.

    Attributes:
        metric: Its name.
        values: Its last value where the fold was held out, by number of the fold; without those that failed.
        num_folds: Number of folds.
        failed: Numbers of the folds whose training ended without a value.
    """

    metric: str
    values: dict[int, float]
    num_folds: int
    failed: Sequence[int] = ()

    @property
    def mean(self) -> float | None:
        """Mean of the values; None without any."""
        return statistics.fmean(self.values.values()) if self.values else None

    @property
    def spread(self) -> float | None:
        """Sample standard deviation of the values; None for fewer than two."""
        return statistics.stdev(self.values.values()) if len(self.values) > 1 else None

    def to_json(self) -> dict[str, Any]:
        """The same as JSON types, with mean, spread and standard error."""
        error = None if self.spread is None else self.spread / math.sqrt(len(self.values))
        values = {str(fold): value for fold, value in self.values.items()}
        fields = {"metric": self.metric, "folds": self.num_folds, "values": values, "failed": list(self.failed)}
        return {**fields, "mean": self.mean, "standard_deviation": self.spread, "standard_error": error}

    def verdict(self) -> str:
        """Mean and spread in a sentence."""
        if self.mean is None:
            return f"No fold has a value of {self.metric}."
        spread = "" if self.spread is None else f" ± {self.spread:.2g}"
        unfinished = self.num_folds - len(self.values) - len(self.failed)
        lacks = f"; {len(self.failed)} of {self.num_folds} folds failed" if self.failed else ""
        lacks += f"; {unfinished} of {self.num_folds} folds have not ended" if unfinished else ""
        return (
            f"{self.metric} {self.mean:.4g}{spread} (mean and standard deviation of {len(self.values)} folds{lacks})."
        )


def folds_space(num_folds: int) -> Space:
    """The number of the fold that is held out, as the setting of a grid."""
    return {FOLD: Range(low=0, high=num_folds - 1, step=1, is_integer=True)}


def fold_settings(num_folds: int, *, whole: bool) -> list[str]:
    """Settings of every training; ``whole``: all samples of the fold that is held out are evaluated."""
    return [f"data.eval_frac={1 / num_folds!r}", *(["train.num_eval_samples=0"] if whole else [])]


def cross_validation(metric: str, num_folds: int, records: Sequence[TrialRecord]) -> CrossValidation:
    """What the trainings that ended say."""
    values = {
        int(record.settings[FOLD]): record.value
        for record in records
        if record.outcome == "done" and record.value is not None
    }
    ended = {int(record.settings[FOLD]) for record in records if record.outcome != "running"}
    failed = sorted(ended - values.keys())
    return CrossValidation(metric=metric, values=values, num_folds=num_folds, failed=failed)


def write_folds_page(path: Path, found: CrossValidation, records: Sequence[TrialRecord]) -> None:
    """Write the values by fold as an HTML page; an older one is replaced atomically."""
    numbers = sorted(found.values)
    data = [
        {"type": "bar", "x": [str(number) for number in numbers], "y": [found.values[number] for number in numbers]}
    ]
    layout = curve_layout("", found.metric) | {"xaxis": {"type": "category", "title": {"text": "fold held out"}}}
    rows = [
        [
            record.settings.get(FOLD, ""),
            record.outcome.replace("_", " "),
            "" if record.value is None else f"{record.value:.6g}",
            printable(record.reason.partition("\n")[0]),
        ]
        for record in records
    ]
    section = Section(
        title="By fold",
        charts=[{"id": "folds", "data": data, "layout": layout}],
        tables=[Table(head=["fold", "end", found.metric, "why"], rows=rows)],
    )
    page = render_page(
        SUMMARY,
        section.charts,
        title="Cross-validation",
        verdict=printable(found.verdict()),
        figures=[Figure("folds", str(found.num_folds))],
        sections=[section],
    )
    write_atomically(path, page.encode())
