"""What earlier runs correct in predicted step times: the median of measured over predicted. Imports no torch."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

MOST_WAIT_FRAC: Final = 0.1  # a run that waits longer for data says little of its plan
_MOST_PREDICTIONS: Final = 20  # the newest of which a correction is the median
_LEAST_PREDICTIONS: Final = 3  # a correction by one was worse than none, by two no better (docs/log.md)


@dataclass(frozen=True, kw_only=True, slots=True)
class Learned:
    """A correction: ``factor``, the median of measured over predicted steps, from ``runs`` earlier runs; 1 without any."""

    factor: float = 1.0
    runs: int = 0


class Ratio(NamedTuple):
    """Measured over predicted steps of a run: what was predicted, the axes that its ranks share, and the ratio."""

    prediction: Hashable
    axes: tuple[str, ...]
    ratio: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnedFactors:
    """Corrections from the runs that ``ratios`` are of, from the oldest to the newest."""

    ratios: Sequence[Ratio] = ()

    def of(self, axes: Sequence[str]) -> Learned:
        """The correction of a plan that shares ``axes``: by runs with the same ones, else by all runs.

        Runs of one prediction count as one, by their median: whatever disturbed the prediction is in all of them.
        Plans of which nothing is known are thus corrected as well. They would be preferred otherwise wherever runs take
        longer than predicted, as what is found to be the fastest was chosen for a short prediction.
        """
        alike = _by_prediction([each for each in self.ratios if each.axes == tuple(axes)])
        used = alike if len(alike) >= _LEAST_PREDICTIONS else _by_prediction(self.ratios)
        if len(used) < _LEAST_PREDICTIONS:
            return Learned()
        newest = used[-_MOST_PREDICTIONS:]
        return Learned(factor=statistics.median(map(statistics.median, newest)), runs=sum(map(len, newest)))


def _by_prediction(ratios: Sequence[Ratio]) -> list[list[float]]:
    """Measured over predicted steps of the runs of each prediction; that with the newest run is last."""
    found: dict[Hashable, list[float]] = {}
    for each in ratios:
        found[each.prediction] = [*found.pop(each.prediction, []), each.ratio]
    return list(found.values())
