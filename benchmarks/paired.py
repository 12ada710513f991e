"""Ratios of two timings taken in pairs, with an interval that assumes nothing about the noise.

On a shared machine a step can take twice as long as the one before; what two neighbouring blocks have in common cancels in their
ratio. So blocks alternate, each pair gives one ratio, and the median of the ratios is reported with its order-statistic interval.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """(interval's low, its high, the confidence it really has) of the median, from order statistics (David & Nagaraja 2003).

    The k-th smallest and k-th largest of n values enclose the median with probability 1 - 2·P(Binomial(n, 1/2) < k); k is
    the largest that keeps ``confidence``. Fewer than six values cannot give 95 %: then it is their range.
    """
    ordered, n = sorted(values), len(values)
    tail, k = 0.0, 0
    while k < (n - 1) // 2 and 1 - 2 * (tail + math.comb(n, k) / 2**n) >= confidence:
        tail += math.comb(n, k) / 2**n
        k += 1
    k = max(k, 1)
    covered = 1 - 2 * sum(math.comb(n, i) for i in range(k)) / 2**n
    return ordered[k - 1], ordered[n - k], covered


def ratio(mine: Sequence[float], others: Sequence[float]) -> dict[str, Any]:
    """The median of ``mine[i] / others[i]`` and its interval."""
    ratios = [a / b for a, b in zip(mine, others, strict=True)]
    low, high, covered = median_interval(ratios)
    return {
        "ratio": round(statistics.median(ratios), 4),
        "interval": [round(low, 4), round(high, 4)],
        "confidence": round(covered, 4),
        "pairs": len(ratios),
    }


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median and its interval of values that have no partner."""
    low, high, _ = median_interval(values)
    return {"median": statistics.median(values), "interval": [low, high], "values": len(values)}
