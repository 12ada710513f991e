"""Bootstrap confidence intervals of differences between two runs: of ratios of means and of medians, and of means.

Steps that follow each other are alike (a busy disk slows many in a row), so blocks of them are drawn, not single ones (Künsch
1989); a block has n^(1/3) steps. The draws are the same each time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from unisono.observe.history import Counts, Floats

MIN_SAMPLES: Final = 8  # fewer do not tell how much they vary
_MAX_SAMPLES: Final = 2000  # that are drawn from
_DRAWS: Final = 1000
_LEVEL: Final = 0.95


@dataclass(frozen=True, slots=True)
class Sample:
    """Values of a figure in the order of time, each with its weight in the mean [values]."""

    values: Floats
    weights: Floats

    def mean(self) -> float | None:
        """The weighted mean; None without a weight."""
        total = float(self.weights.sum())
        return float((self.values * self.weights).sum()) / total if total else None


def ratio_interval(base: Sample, other: Sample) -> tuple[float, float] | None:
    """The 95 % interval of mean(``other``) / mean(``base``); None for fewer than ``MIN_SAMPLES`` of either."""
    if min(len(base.values), len(other.values)) < MIN_SAMPLES:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        return _interval(_mean_draws(other, seed=1) / _mean_draws(base, seed=0))


def median_ratio_interval(base: Floats, other: Floats) -> tuple[float, float] | None:
    """The same of the medians, without weights."""
    if min(len(base), len(other)) < MIN_SAMPLES:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        return _interval(_median_draws(other, seed=1) / _median_draws(base, seed=0))


def mean_interval(values: Floats) -> tuple[float, float] | None:
    """The 95 % interval of the mean of ``values``; None for fewer than ``MIN_SAMPLES``, or where one is no number."""
    if len(values) < MIN_SAMPLES:
        return None
    return _interval(_mean_draws(Sample(values, np.ones(len(values))), seed=0))


def _mean_draws(sample: Sample, *, seed: Literal[0, 1]) -> Floats:
    """The weighted mean of each of the draws [draws]."""
    # of many values the sums of consecutive ones: to leave some out would miss pauses, or count them too often
    begins = np.arange(0, len(sample.values), -(-len(sample.values) // _MAX_SAMPLES))
    sums = np.add.reduceat(sample.values * sample.weights, begins)
    weights = np.add.reduceat(sample.weights, begins)
    places = _draws(len(begins), seed=seed)
    with np.errstate(divide="ignore", invalid="ignore"):
        return sums[places].sum(axis=1) / weights[places].sum(axis=1)


def _median_draws(values: Floats, *, seed: Literal[0, 1]) -> Floats:
    """The median of each of the draws [draws]."""
    if len(values) > _MAX_SAMPLES:  # so many that lie evenly among them: the interval is a little too wide
        values = values[np.linspace(0, len(values) - 1, _MAX_SAMPLES).astype(np.int64)]
    return np.median(values[_draws(len(values), seed=seed)], axis=1)


def _draws(count: int, *, seed: Literal[0, 1]) -> Counts:
    """Places of ``count`` values in each of the draws [draws, count]."""
    length = math.ceil(count ** (1 / 3))
    random = np.random.default_rng(seed)
    begins: Counts = random.integers(0, count, (_DRAWS, math.ceil(count / length)))
    return (begins[:, :, None] + np.arange(length)).reshape(_DRAWS, -1)[:, :count] % count


def _interval(drawn: Floats) -> tuple[float, float] | None:
    if not np.isfinite(drawn).all():
        return None
    low, high = np.quantile(drawn, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return float(low), float(high)
