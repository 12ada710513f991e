"""Spikes of a loss are those that a window sorted for each step finds."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from unisono.diagnose import RunFacts, TrainingFacts
from unisono.diagnose.health_rules import loss_spikes


def plain_spikes(losses: NDArray[np.float64]) -> list[int]:
    """Places of losses above the median of the 50 before them, by 8 of their deviations and by a fifth."""
    found: list[int] = []
    for place in range(50, len(losses)):
        before = losses[place - 50 : place]
        if not math.isfinite(losses[place]) or np.isnan(before).any():
            continue
        middle = float(np.median(before))
        deviation = 1.4826 * float(np.median(np.abs(before - middle)))
        if losses[place] > middle + 8 * deviation and losses[place] > 1.2 * middle:
            found.append(place)
    return found


@pytest.mark.parametrize("kind", ["noise", "steps", "negative", "with NaN", "with infinities", "falling"])
def test_spikes_are_those_of_sorted_windows(kind: str) -> None:
    draw = np.random.default_rng(0)
    losses = draw.normal(3.0, 0.1, 20_000) + 5 * (draw.random(20_000) < 0.01)
    match kind:
        case "steps":  # many equal values
            losses = np.round(losses)
        case "negative":
            losses = losses - 4.0
        case "with NaN":
            losses[draw.integers(0, 20_000, 40)] = math.nan
        case "with infinities":
            losses[draw.integers(0, 20_000, 40)] = math.inf
        case "falling":
            losses = losses / np.arange(1, 20_001)
        case _:
            pass
    with np.errstate(invalid="ignore"):
        expected = plain_spikes(losses)
    assert expected
    facts = RunFacts(ranks=(), training=TrainingFacts(steps=np.arange(1, 20_001), losses=losses))
    (finding,) = loss_spikes(facts)
    first = ", ".join(str(place + 1) for place in expected[:5])
    assert finding.evidence[0].startswith(f"{len(expected)} of 20000 steps: {first}")
