"""Rules of memory."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final

import numpy as np

from unisono.diagnose.figures import (
    MAX_SAMPLES,
    plan_group,
)
from unisono.diagnose.finding import Finding
from unisono.diagnose.run_facts import RankFacts, RunFacts

_CREEP_STEPS: Final = 200  # over fewer, caches that fill look like memory that grows


def near_out_of_memory(facts: RunFacts) -> Iterator[Finding]:
    """MEM01: the largest memory in use is near the limit."""
    used = {rank.rank: rank.peak_bytes / rank.limit_bytes for rank in facts.ranks if rank.limit_bytes > 0}
    near = {rank: share for rank, share in used.items() if share >= 0.90}
    if not near:
        return
    worst = max(near, key=lambda rank: near[rank])
    peak = next(rank for rank in facts.ranks if rank.rank == worst)
    micro_batch = plan_group(facts, "batch").get("micro_batch")
    patch: dict[str, Any] = {}
    if isinstance(micro_batch, int) and 1 < micro_batch < MAX_SAMPLES:
        # a divisor: any other number may not divide the global batch
        patch = {"plan.micro_batch": next(n for n in range(micro_batch // 2, 0, -1) if micro_batch % n == 0)}
    yield Finding(
        id="MEM01",
        title="memory is nearly full",
        severity="critical" if near[worst] >= 0.96 else "warning",
        cost_frac=0.0,
        confidence=0.9,
        ranks=tuple(sorted(near)) if len(near) < len(facts.ranks) else (),
        evidence=(
            f"rank {worst} has used {peak.peak_bytes / 2**30:.3g} of {peak.limit_bytes / 2**30:.3g} GiB ({near[worst]:.0%})",
        ),
        advice="a smaller micro-batch (the global batch and its gradients stay the same), plan.recompute, or dp_shard over more "
        "ranks",
        patch=patch,
    )


def memory_creep(facts: RunFacts) -> Iterator[Finding]:
    """MEM03: the memory in use grows all the time."""
    growth = {rank.rank: _growth(rank) for rank in facts.ranks if rank.limit_bytes > 0}
    growing = {
        rank.rank: growth[rank.rank]
        for rank in facts.ranks
        if rank.limit_bytes > 0 and 1000 * growth[rank.rank] >= 0.01 * rank.limit_bytes
    }
    if not growing:
        return
    worst = max(facts.ranks, key=lambda rank: growing.get(rank.rank, 0.0) / max(rank.limit_bytes, 1.0))
    per_step = growing[worst.rank]
    left_steps = max(0.0, worst.limit_bytes - worst.memory_bytes[-1]) / per_step
    yield Finding(
        id="MEM03",
        title="memory grows with every step",
        severity="critical" if 1000 * per_step >= 0.05 * worst.limit_bytes else "warning",
        cost_frac=0.0,
        confidence=0.8,
        ranks=tuple(sorted(growing)) if len(growing) < len(facts.ranks) else (),
        evidence=(
            f"rank {worst.rank} grows by {per_step / 2**20:.3g} MiB a step, steadily over {_span(worst)} steps",
            f"its {worst.limit_bytes / 2**30:.3g} GiB would be full after {left_steps:,.0f} more steps",
        ),
        advice="look for what is kept from step to step: a list of losses or outputs with their graphs (keep .item() or "
        ".detach()), and caches in transforms, data sets and callbacks",
    )


def _growth(rank: RankFacts) -> float:
    """Bytes by which the memory grows in a step; 0 unless it grows in each fifth of the run but the first."""
    if _span(rank) < _CREEP_STEPS or len(rank.steps) < 5 * 2:
        return 0.0
    levels = [float(np.median(part)) for part in np.array_split(rank.memory_bytes, 5)[1:]]
    if not all(later > earlier > 0 for earlier, later in pairwise(levels)):
        return 0.0
    _, begin, *_, end = np.array_split(rank.steps, 5)
    return (levels[-1] - levels[0]) / float(np.median(end) - np.median(begin))


def _span(rank: RankFacts) -> int:
    """Number of steps from the first reading to the last."""
    return int(rank.steps[-1] - rank.steps[0]) if len(rank.steps) else 0
