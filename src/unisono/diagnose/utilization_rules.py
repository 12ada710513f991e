"""Rules of devices that compute less than they could. They run after all others, as they need the other findings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from unisono.diagnose.figures import has_enough_readings, larger_micro_batches, milliseconds, plan_group
from unisono.diagnose.finding import Finding
from unisono.diagnose.memory_pools import MemoryPool, memory_pools
from unisono.diagnose.run_facts import RunFacts

# what a well-tuned transformer reaches; norms, optimizer and element-wise operators take the rest of the time
_OF_CEILING: Final = 0.7  # of a measured product
_OF_DATASHEET: Final = 0.5  # of which products themselves reach about three quarters
_WARNING, _CRITICAL = 0.7, 0.4  # of that
_SMALL_MODEL: Final = 10_000_000  # parameters; the products of smaller ones are too small for such a rate
_LITTLE_MEMORY: Final = 0.60
_FULL_MEMORY: Final = 0.85  # that a larger micro-batch may use


def low_use(facts: RunFacts, others: Sequence[Finding]) -> Iterator[Finding]:
    """UTIL01: matrix products make less of the device than they could, and no other finding explains more than half of that.
    MEM04: the memory has room for a larger micro-batch then. Nothing of models with fewer than ten million parameters.

    Args:
        facts: The run.
        others: The findings of all other rules.
    """
    if not has_enough_readings(facts) or 0 < facts.num_parameters < _SMALL_MODEL:
        return
    rank = facts.ranks[0]  # the rate is the mean of all devices
    use, of, expected = rank.ceiling_frac, "a large product, as it was measured", _OF_CEILING
    if not use:
        use, of, expected = rank.mfu, "the data sheet", _OF_DATASHEET
    reached = use / expected
    gap = 1.0 - reached  # share of the time of a step
    if not use or reached >= _WARNING or max((other.cost_frac for other in others), default=0.0) > gap / 2:
        return
    yield Finding(
        id="UTIL01",
        title="the device computes less than it can, and no other finding explains why",
        severity="critical" if reached < _CRITICAL else "warning",
        cost_frac=0.0,
        confidence=0.5,
        evidence=(
            f"the model makes {use:.1%} of the rate of {of}; {expected:.0%} can be expected",
            f"at that a step would take {milliseconds(facts, reached)} of {milliseconds(facts, 1.0)}",
        ),
        advice="larger micro-batches and models, plan.compile=regional, plan.precision=bf16 where it is native; "
        + ("unisono profile RUN_DIR shows" if facts.profiles else "unisono profile RUN_DIR --now finds")
        + " the operators that take the time",
    )
    yield from _room_left(facts)


def _room_left(facts: RunFacts) -> Iterator[Finding]:
    limited = [pool for pool in memory_pools(facts.ranks) if pool.limit_bytes > 0 and pool.peak_bytes > 0]
    if not limited:
        return
    used = max(pool.used_frac for pool in limited)
    if used >= _LITTLE_MEMORY:
        return

    def share_of(factor: int) -> float:
        return max(_peak_bytes(pool, factor) / pool.limit_bytes for pool in limited)

    factor = max(larger_micro_batches(facts, lambda factor: share_of(factor) <= _FULL_MEMORY), default=1)
    patch: dict[str, Any] = {}
    evidence = [f"{used:.0%} of the memory is in use"]
    if factor > 1:
        micro_batch: int = plan_group(facts, "batch")["micro_batch"]
        patch = {"plan.micro_batch": factor * micro_batch}
        evidence.append(
            f"with {factor * micro_batch} samples in place of {micro_batch} it would be {share_of(factor):.0%}"
        )
    recomputes = plan_group(facts, "recompute").get("mode", "none") != "none"
    yield Finding(
        id="MEM04",
        title="memory is left for larger micro-batches",
        severity="warning",
        cost_frac=0.0,
        confidence=0.5,
        evidence=tuple(evidence),
        advice=(
            f"plan.micro_batch={patch['plan.micro_batch']}: fewer and larger operators"
            if patch
            else "a larger plan.global_batch, which gives each micro-batch more samples (and the run fewer, larger steps)"
        )
        + ("; or plan.recompute=none" if recomputes else ""),
        patch=patch,
    )


def _peak_bytes(pool: MemoryPool, factor: int) -> float:
    """Bytes in use with micro-batches ``factor`` times as large: what the plan has ranks hold stays, all else grows with them.

    That is an upper bound, as the interpreter and libraries do not grow.
    """
    held = [sum(rank.held_bytes.values()) for rank in pool.ranks]
    return sum(
        held_bytes + factor * max(0.0, rank.peak_bytes - held_bytes)
        for rank, held_bytes in zip(pool.ranks, held, strict=True)
    )
