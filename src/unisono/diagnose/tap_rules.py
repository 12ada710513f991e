"""Rules of tapped steps: dead units, and how far an update moves the weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from unisono.diagnose.figures import listed
from unisono.diagnose.finding import Finding
from unisono.diagnose.run_facts import RunFacts

_LOW, _USUAL, _HIGH = 1e-5, 1e-3, 1e-1  # update over weights, the median over matrices
_DEAD_WARNING: Final = 0.5
_DEAD_CRITICAL: Final = 0.9
_MIN_TAPS: Final = 3


def dead_units(facts: RunFacts) -> Iterator[Finding]:
    """NUM06: most channels of a layer are zero for every sample of a batch, in each of the last taps."""
    taps = facts.training.taps[-_MIN_TAPS:]
    if len(taps) < _MIN_TAPS:
        return
    lasting = {
        path: min(tap.dead_fracs[path] for tap in taps)
        for path in taps[-1].dead_fracs
        if all(path in tap.dead_fracs for tap in taps)
    }
    dead = sorted((path for path, share in lasting.items() if share >= _DEAD_WARNING), key=lambda path: -lasting[path])
    if not dead:
        return
    yield Finding(
        id="NUM06",
        title="units of a layer are never active",
        severity="critical" if lasting[dead[0]] >= _DEAD_CRITICAL else "warning",
        cost_frac=0.0,
        confidence=0.9,
        evidence=(
            f"in steps {listed(tap.step for tap in taps)}, channels that are 0 for the whole batch: "
            + ", ".join(f"{lasting[path]:.0%} of {path}" for path in dead[:5])
            + (", …" if len(dead) > 5 else ""),
        ),
        advice="such units learn nothing: a lower optim.lr or a longer warm-up, initial values that do not push them below 0, a "
        "norm before the layer, or GELU or leaky ReLU",
    )


def update_ratio(facts: RunFacts) -> Iterator[Finding]:
    """NUM07: updates are far too small or too large for the weights that they change."""
    taps = [tap for tap in facts.training.taps if tap.update_fracs]
    if len(taps) < _MIN_TAPS:
        return
    medians = np.array([np.median(list(tap.update_fracs.values())) for tap in taps])
    # schedules begin and end with small rates: too small is what is small at its largest
    largest, usual = float(medians.max()), float(np.median(medians))
    if largest >= _LOW and usual <= _HIGH:
        return
    is_low = largest < _LOW
    shown = largest if is_low else usual
    tap = taps[int(medians.argmax())] if is_low else taps[-1]
    extreme = (min if is_low else max)(tap.update_fracs, key=lambda name: tap.update_fracs[name])
    yield Finding(
        id="NUM07",
        title=f"the learning rate is too {'low' if is_low else 'high'} for the weights",
        severity="warning",
        cost_frac=0.0,
        confidence=0.6,
        evidence=(
            f"an update changes the median matrix by {shown:.2g} of its norm, in {len(taps)} taps; "
            f"{_LOW:g} to {_HIGH:g} is usual",
            f"step {tap.step}: {extreme} by {tap.update_fracs[extreme]:.2g}",
            *_range_text(facts, shown),
        ),
        advice=f"optim.lr about {_USUAL / shown:.2g} times its value, which changes weights by {_USUAL:g} of their norm a step",
    )


def _range_text(facts: RunFacts, ratio: float) -> tuple[str, ...]:
    """The range of learning rates that moves weights by 1e-4 to 1e-2 of their norm; nothing without the run's rate."""
    rate = facts.settings.get("optim.lr")
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not rate > 0:
        return ()
    return (
        f"optim.lr is {rate:g}; {0.1 * _USUAL / ratio * rate:.2g} to {10 * _USUAL / ratio * rate:.2g} is worth a try",
    )
