"""Figures that the rules compare, and how they are written in findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from unisono.diagnose.finding import Severity
from unisono.diagnose.run_facts import Floats, RankFacts, RunFacts

MIN_READINGS: Final = 8  # fewer say nothing about the time of a step
DATA_WAIT: Final = (0.05, 0.20)  # warning, critical: share of a step
MAX_SAMPLES: Final = 1 << 20  # of a micro-batch, in events that anybody may have written


def has_enough_readings(facts: RunFacts) -> bool:
    """Whether there are enough readings to judge the time of a step."""
    if not facts.ranks:
        return False
    readings = len(facts.common_steps()) if facts.steps_together else min(len(rank.steps) for rank in facts.ranks)
    return readings >= MIN_READINGS


def shares_of(facts: RunFacts, phase: str) -> Floats:
    """Share of a phase in the time of each rank [ranks]."""
    return np.array([rank.phase_s[phase].sum() / rank.wall_s.sum() for rank in facts.ranks])


def last_arriver_wait_frac(facts: RunFacts, phase: str) -> float:
    """Share of ``phase`` in the time of a step, on the rank that waits least in each reading: the last one to arrive."""
    return float(facts.phase_s(phase).min(axis=0).sum() / facts.wall_s().mean(axis=0).sum())


def median_last_arriver_wait_frac(facts: RunFacts, phase: str) -> float:
    """Like ``last_arriver_wait_frac``, with the median over readings in place of the mean, so that single pauses do not count."""
    return float(np.median(facts.phase_s(phase).min(axis=0)) / facts.wall_s().mean())


def lower_medians(values: Floats) -> Floats:
    """The median over ranks [ranks, …] -> […]; of an even number the lower of the two in the middle, so that one of two ranks
    is no majority."""
    return np.sort(values, axis=0)[(len(values) - 1) // 2]


def lower_median(values: Floats) -> float:
    """``lower_medians`` of one value of each rank."""
    return float(lower_medians(values))


def excess_over_others(values: Floats) -> Floats:
    """Each value minus the lower median of the others [ranks]; 0 for a single one."""
    count = len(values)
    if count < 2:
        return np.zeros(count)
    order = np.argsort(values, kind="stable")
    place = np.empty(count, np.int64)
    place[order] = np.arange(count)
    middle = (count - 2) // 2  # in the sorted values of the others
    return values - values[order][middle + (place <= middle)]


def standing_out(facts: RunFacts, shares: Floats) -> tuple[int, ...]:
    """The ranks that have most of a cost [ranks]: those whose share is above that of the others by half of the largest one. None
    of a single rank, and none where it is the same on all."""
    excess = excess_over_others(shares)
    return chosen_ranks(facts, excess >= max(0.5 * float(shares.max()), 1e-12))


def severity_of(share: float, warning: float, critical: float) -> Severity | None:
    """None below both thresholds."""
    return "critical" if share >= critical else "warning" if share >= warning else None


def per_step(rank: RankFacts, seconds: Floats) -> float:
    """Mean over the steps of a rank of its ``seconds`` [readings]."""
    return float(seconds.sum() / max(1, rank.steps_per_reading.sum()))


def step_s(facts: RunFacts) -> float:
    """Mean seconds of a step, from the readings of the lowest rank."""
    return per_step(facts.ranks[0], facts.ranks[0].wall_s)


def milliseconds(facts: RunFacts, share: float) -> str:
    """A share of the time of a step, in milliseconds."""
    return f"{1000 * share * step_s(facts):.3g} ms"


def chosen_ranks(facts: RunFacts, chosen: NDArray[np.bool_]) -> tuple[int, ...]:
    """The ranks of the rows that are chosen [ranks]."""
    return tuple(rank for rank, is_chosen in zip(facts.rank_numbers, chosen, strict=True) if is_chosen)


def named_ranks(ranks: Sequence[int]) -> str:
    """Ranks in words."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {listed(ranks)}"


def named_host(rank: RankFacts) -> str:
    """The host of a rank in brackets, for after its number; empty where it is not known."""
    return f" (host {rank.host})" if rank.host else ""


def highest_of_hosts(ranks: Iterable[RankFacts], name: str) -> float | None:
    """Mean of a figure of the monitor, on the host of ``ranks`` where it is highest; None where not known."""
    return max((mean for rank in ranks if (mean := rank.monitor.mean(name)) is not None), default=None)


def busy_frac(ranks: Iterable[RankFacts]) -> float | None:
    """Share of the processors that are busy, on the busiest host of ``ranks``; None where not known."""
    return highest_of_hosts(ranks, "cpu_frac")


def host_busy_frac(facts: RunFacts, rank: RankFacts) -> float | None:
    """The same of the host of ``rank``, which one rank of each host samples."""
    return busy_frac([rank, *(other for other in facts.ranks if rank.host and other.host == rank.host)])


def setting_text(facts: RunFacts, name: str) -> tuple[str, ...]:
    """A setting as evidence; nothing where the run has none of that name."""
    return (f"{name} is {facts.settings[name]}",) if name in facts.settings else ()


def plan_group(facts: RunFacts, name: str) -> dict[str, Any]:
    """A group of the plan, such as ``batch``; empty where the run's plan has none."""
    group = facts.plan.get(name)
    return cast("dict[str, Any]", group) if isinstance(group, dict) else {}


def larger_micro_batches(facts: RunFacts, fits: Callable[[int], bool]) -> tuple[int, ...]:
    """Factors by which the micro-batch can grow, ascending: a step has a whole number of micro-batches, and ``fits(factor)``.

    Empty with pipelines, where fewer micro-batches make a longer bubble.
    """
    batch = plan_group(facts, "batch")
    micro_batch, passes = batch.get("micro_batch"), batch.get("accumulation")
    if not isinstance(micro_batch, int) or not isinstance(passes, int) or not 0 < micro_batch * passes < MAX_SAMPLES:
        return ()
    if plan_group(facts, "mesh").get("pp", 1) != 1:
        return ()
    return tuple(factor for factor in range(2, passes + 1) if passes % factor == 0 and fits(factor))


def listed(numbers: Iterable[int], count: int = 5) -> str:
    """The first ``count`` numbers."""
    numbers = list(numbers)
    return ", ".join(map(str, numbers[:count])) + (", …" if len(numbers) > count else "")
