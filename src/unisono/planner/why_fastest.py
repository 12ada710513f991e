"""Why a plan is the fastest of those that were tried: what a change of one setting costs, and what would make another faster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from unisono.planner.fastest import Candidate, changes_in_words

# where the numbers of a candidate are from, some of them measured; those of a layout on a cluster: number_sources.LAYOUT_SOURCES
CANDIDATE_SOURCES: Final[Mapping[str, str]] = {
    "peak_bytes": "exact: tensors of a traced step; measured in a real step where peak_confidence says so",
    "work_s": "measured: steps of one rank of this run",
    "communication_s": "calibrated: counted bytes, at the speed that plan calibrate measured between ranks that compute",
    "bubble_s": "modelled: the order of passes, with their measured times",
    "straggler_s": "modelled: the slowest of normally distributed ranks, with the measured spread of one",
    "learned_factor": "measured: what earlier runs took over the sum of the parts (unisono plan accuracy); step_s has it",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Neighbour:
    """A plan that differs from the fastest one in one setting.

    Attributes:
        change: The setting, as it is given on the command line.
        slower_frac: Part by which its step takes longer; None where it was not timed.
        reason: Why it was not timed.
    """

    change: str
    slower_frac: float | None
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Flip:
    """A change of the machine with which another plan would be the fastest, or, with more memory, could be.

    Attributes:
        change: What would have to change.
        plan: Settings of the other plan.
    """

    change: str
    plan: str


def neighbours(candidates: Sequence[Candidate], best: Candidate) -> list[Neighbour]:
    """All candidates that differ from ``best`` in one setting, the fastest first."""
    found = [
        Neighbour(
            change=changes_in_words(difference),
            slower_frac=None if other.timed is None else other.step_s / best.step_s - 1,
            reason=other.refused,
        )
        for other in candidates
        if other is not best and len(difference := _differences(best, other)) == 1
    ]
    return sorted(found, key=lambda each: (each.slower_frac is None, each.slower_frac))


def _differences(best: Candidate, other: Candidate) -> dict[str, Any]:
    """Settings of ``other`` that are not those of ``best``; one that it leaves as configured has no value."""
    names = [*other.settings, *(name for name in best.settings if name not in other.settings)]
    return {
        name: other.settings.get(name, "as configured")
        for name in names
        if other.settings.get(name) != best.settings.get(name)
    }


def flips(candidates: Sequence[Candidate], best: Candidate) -> list[Flip]:
    """What would make another candidate the fastest: faster or slower collectives, or more memory."""
    return [*_flips_of_collectives(candidates, best), *_flips_of_memory(candidates)]


def _flips_of_collectives(candidates: Sequence[Candidate], best: Candidate) -> Iterator[Flip]:
    """The nearest factors on the time of collectives, below and above one, at which another plan takes as long as ``best``.

    With the factor f, a step takes rest + f x collectives. Two plans take equally long at the f where both sums are equal.
    """
    best_s = _collectives_s(best)
    crossings: list[tuple[float, Candidate]] = []
    for other in candidates:
        if other is best or other.timed is None or (other_s := _collectives_s(other)) == best_s:
            continue
        factor = ((other.step_s - other_s) - (best.step_s - best_s)) / (best_s - other_s)
        if factor > 0:
            crossings.append((factor, other))
    faster = max((each for each in crossings if each[0] < 1), key=lambda each: each[0], default=None)
    slower = min((each for each in crossings if each[0] > 1), key=lambda each: each[0], default=None)
    if faster is not None:
        yield Flip(change=f"collectives {1 / faster[0]:.3g} times as fast", plan=changes_in_words(faster[1].settings))
    if slower is not None:
        yield Flip(change=f"collectives {slower[0]:.3g} times as slow", plan=changes_in_words(slower[1].settings))


def _flips_of_memory(candidates: Sequence[Candidate]) -> Iterator[Flip]:
    """Plans that were traced and did not fit have no time: the smallest of them may be faster."""
    too_large = [each for each in candidates if each.peak_bytes is not None and each.timed is None]
    if too_large:
        least = min(too_large, key=lambda each: each.peak_bytes or 0)
        yield Flip(
            change=f"more memory: {(least.peak_bytes or 0) / 2**30:.4g} GiB for the tensors of a rank let one more plan be timed",
            plan=changes_in_words(least.settings),
        )


def _collectives_s(candidate: Candidate) -> float:
    """Seconds of collectives in a step, corrected as ``step_s`` is."""
    return sum(candidate.timed.communication_s.values()) * candidate.learned.factor if candidate.timed else 0.0
