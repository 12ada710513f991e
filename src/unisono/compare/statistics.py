"""Bootstrap confidence intervals of differences between two runs: of ratios of medians, and of means.

Steps that follow each other are alike (a busy disk slows many in a row), so blocks of them are drawn, not single ones (Künsch
1989); a block has n^(1/3) steps. The draws are the same each time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, Literal

import numpy as np

from unisono.observe.history import Counts, Floats

MIN_SAMPLES: Final = 8  # fewer do not tell how much they vary
_MAX_SAMPLES: Final = 2000  # of more, so many that lie evenly among them: the interval is a little too wide
_DRAWS: Final = 1000
_LEVEL: Final = 0.95


def ratio_interval(base: Floats, other: Floats) -> tuple[float, float] | None:
    """The 95 % interval of median(``other``) / median(``base``); None for fewer than ``MIN_SAMPLES`` of either."""
    if min(len(base), len(other)) < MIN_SAMPLES:
        return None
    below, above = _draws(base, np.median, seed=0), _draws(other, np.median, seed=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return _interval(above / below)


def mean_interval(values: Floats) -> tuple[float, float] | None:
    """The 95 % interval of the mean of ``values``; None for fewer than ``MIN_SAMPLES``, or where one is no number."""
    if len(values) < MIN_SAMPLES:
        return None
    return _interval(_draws(values, np.mean, seed=0))


def _draws(values: Floats, statistic: Callable[..., Floats], *, seed: Literal[0, 1]) -> Floats:
    """The statistic of each of the draws [draws]."""
    if len(values) > _MAX_SAMPLES:
        values = values[np.linspace(0, len(values) - 1, _MAX_SAMPLES).astype(np.int64)]
    count = len(values)
    length = math.ceil(count ** (1 / 3))
    random = np.random.default_rng(seed)
    begins: Counts = random.integers(0, count, (_DRAWS, math.ceil(count / length)))
    places = (begins[:, :, None] + np.arange(length)).reshape(_DRAWS, -1)[:, :count] % count
    return statistic(values[places], axis=1)


def _interval(drawn: Floats) -> tuple[float, float] | None:
    if not np.isfinite(drawn).all():
        return None
    low, high = np.quantile(drawn, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return float(low), float(high)
