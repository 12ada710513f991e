"""Rules of memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np

from unisono.diagnose.figures import MAX_SAMPLES, named_host, named_ranks, plan_group
from unisono.diagnose.finding import Finding
from unisono.diagnose.memory_pools import MemoryPool, memory_pools
from unisono.diagnose.run_facts import RankFacts, RunFacts
from unisono.profile.source_files import marked

_LINE_FRAC: Final = 0.1  # of the growth, for a line to be named
_RANK_FRAC: Final = 0.25  # of the growth of the rank that grows most, for a rank to be named
_CREEP_STEPS: Final = 200  # over fewer, caches that fill look like memory that grows


def near_out_of_memory(facts: RunFacts) -> Iterator[Finding]:
    """MEM01: the largest memory in use, of all ranks that share it, is near the limit."""
    pools = [pool for pool in memory_pools(facts.ranks) if pool.limit_bytes > 0]
    near = [pool for pool in pools if pool.used_frac >= 0.90 or _num_retries(pool)]
    if not near:
        return
    worst = max(near, key=lambda pool: (_num_retries(pool) > 0, pool.used_frac))
    ranks = sorted(rank.rank for pool in near for rank in pool.ranks)
    num_retries = _num_retries(worst)
    largest = max(worst.ranks, key=lambda rank: rank.peak_bytes)
    micro_batch = plan_group(facts, "batch").get("micro_batch")
    patch: dict[str, Any] = {}
    if isinstance(micro_batch, int) and 1 < micro_batch < MAX_SAMPLES:
        # a divisor: any other number may not divide the global batch
        patch = {"plan.micro_batch": next(n for n in range(micro_batch // 2, 0, -1) if micro_batch % n == 0)}
    yield Finding(
        id="MEM01",
        title="memory is nearly full",
        severity="critical" if worst.used_frac >= 0.96 or num_retries else "warning",
        cost_frac=0.0,
        confidence=0.9,
        ranks=tuple(ranks) if len(ranks) < len(facts.ranks) else (),
        evidence=(
            f"{_named(worst.ranks)} {'has' if len(worst.ranks) == 1 else 'have together'} used "
            f"{worst.peak_bytes / 2**30:.3g} of {worst.limit_bytes / 2**30:.3g} GiB ({worst.used_frac:.0%})",
            *(
                [f"rank {largest.rank} has used most of it, {largest.peak_bytes / 2**30:.3g} GiB"]
                if len(worst.ranks) > 1
                else []
            ),
            *([f"{num_retries} allocations found no free memory at first"] if num_retries else []),
        ),
        advice="a smaller micro-batch (the global batch and its gradients stay the same), plan.recompute, or dp_shard over more "
        "ranks",
        patch=patch,
    )


def _num_retries(pool: MemoryPool) -> int:
    return sum(rank.num_alloc_retries for rank in pool.ranks)


def _named(ranks: Sequence[RankFacts]) -> str:
    """Ranks that share a memory in words; of several also their host."""
    return named_ranks([rank.rank for rank in ranks]) + (named_host(ranks[0]) if len(ranks) > 1 else "")


def fragmentation(facts: RunFacts) -> Iterator[Finding]:
    """MEM02: much of the device's memory lies in blocks that the allocator holds and no tensor uses."""
    unused = {
        rank.rank: (rank.peak_reserved_bytes - rank.peak_bytes, rank.peak_reserved_bytes / rank.peak_bytes, rank)
        for rank in facts.ranks
        if rank.peak_bytes > 0 and rank.limit_bytes > 0
    }
    fragmented = {
        number: (held, ratio, rank)
        for number, (held, ratio, rank) in unused.items()
        if ratio >= 1.3 and held >= 0.3 * rank.limit_bytes
    }
    if not fragmented:
        return
    number, (held, ratio, rank) = max(fragmented.items(), key=lambda item: item[1][0])
    yield Finding(
        id="MEM02",
        title="device memory is fragmented",
        severity="critical" if ratio >= 2.0 or rank.num_alloc_retries else "warning",
        cost_frac=0.0,
        confidence=0.8,
        ranks=tuple(sorted(fragmented)) if len(fragmented) < len(facts.ranks) else (),
        evidence=(
            f"rank {number} holds {rank.peak_reserved_bytes / 2**30:.3g} GiB of the device and had at most "
            f"{rank.peak_bytes / 2**30:.3g} GiB in tensors ({ratio:.2f} times as much)",
            f"{held / 2**30:.3g} of {rank.limit_bytes / 2**30:.3g} GiB are free blocks between tensors",
            *([f"{rank.num_alloc_retries} allocations had to give them back first"] if rank.num_alloc_retries else []),
        ),
        advice="batches of one shape (data.seq_len), and segments that grow: PYTORCH_ALLOC_CONF=expandable_segments:True",
    )


def memory_creep(facts: RunFacts) -> Iterator[Finding]:
    """MEM03: the memory in use grows all the time."""
    growth = {rank.rank: _growth(rank) for rank in facts.ranks}

    def growth_of(pool: MemoryPool) -> float:
        return sum(growth[rank.rank] for rank in pool.ranks)

    growing = [
        pool
        for pool in memory_pools(facts.ranks)
        if pool.limit_bytes > 0 and 1000 * growth_of(pool) >= 0.01 * pool.limit_bytes
    ]
    if not growing:
        return
    named = {pool.ranks[0].rank: _growing_most(pool, growth) for pool in growing}
    worst = max(growing, key=lambda pool: growth_of(pool) / pool.limit_bytes)
    per_step = growth_of(worst)
    in_use = sum(float(rank.memory_bytes[-1]) for rank in worst.ranks if len(rank.memory_bytes))
    left_steps = max(0.0, worst.limit_bytes - in_use) / per_step
    of_worst = named[worst.ranks[0].rank]
    most = max(of_worst, key=lambda rank: growth[rank.rank])
    ranks = sorted(rank.rank for some in named.values() for rank in some)
    shown, verb = (growth[most.rank], "grows") if len(of_worst) == 1 else (per_step, "grow together")
    yield Finding(
        id="MEM03",
        title="memory grows with every step",
        severity="critical" if 1000 * per_step >= 0.05 * worst.limit_bytes else "warning",
        cost_frac=0.0,
        confidence=0.8,
        ranks=tuple(ranks) if len(ranks) < len(facts.ranks) else (),
        evidence=(
            f"{_named(of_worst)} {verb} by {shown / 2**20:.3g} MiB a step, steadily over {_span(most)} steps",
            f"{'its' if len(worst.ranks) == 1 else 'the'} {worst.limit_bytes / 2**30:.3g} GiB"
            + (f" of {len(worst.ranks)} ranks" if len(worst.ranks) > 1 else "")
            + f" would be full after {left_steps:,.0f} more steps",
            *_growing_lines(facts, most.rank, growth[most.rank]),
        ),
        advice="look for what is kept from step to step: a list of losses or outputs with their graphs (keep .item() or "
        ".detach()), and caches in transforms, data sets and callbacks",
    )


def _growing_most(pool: MemoryPool, growth: Mapping[int, float]) -> list[RankFacts]:
    """The ranks whose memory grows, by rank in ``growth``, without those that add little."""
    most = max(growth[rank.rank] for rank in pool.ranks)
    return [rank for rank in pool.ranks if growth[rank.rank] >= _RANK_FRAC * most]


def _growing_lines(facts: RunFacts, rank: int, per_step: float) -> Iterator[str]:
    """The lines whose allocations a profile of the rank with stacks has seen to stay, or how to find them."""
    profile = next((profile for profile in facts.profiles if profile.rank == rank and profile.has_stacks), None)
    lines = [] if profile is None else [line for line in profile.grows if line.bytes_per_step >= _LINE_FRAC * per_step]
    for line in lines[:3]:
        what = f"tensors ({line.phase})" if line.kind == "tensor" else "objects"
        yield f"{what} of {marked(line.source)} stay: {line.bytes_per_step / 2**20:.3g} MiB a step"
    if not lines and profile is not None:
        yield f"in the {profile.num_steps} profiled steps no line's tensors, arrays or objects stayed: more steps may show it"
    elif not lines:
        yield "a profile names the line that allocates it: unisono profile RUN_DIR --now --steps 5 --stacks"


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
