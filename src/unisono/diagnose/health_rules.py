"""Rules of losses and gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator

from unisono.diagnose.figures import (
    listed,
)
from unisono.diagnose.finding import Finding
from unisono.diagnose.run_facts import RunFacts, SkippedStep


def non_finite_steps(facts: RunFacts) -> Iterator[Finding]:
    """NUM01: losses or gradients that are no numbers."""
    skipped = [
        (rank.rank, step) for rank in facts.ranks for step in rank.skipped if not math.isfinite(step.loss)
    ]  # a finite loss with an infinite norm is how fp16 finds its loss scale
    if not skipped:
        return
    numbers = sorted({step.step for _, step in skipped})
    num_steps = max(rank.num_steps for rank in facts.ranks)
    share = len(numbers) / max(1, num_steps)
    causes = [
        (rank, step) for rank, step in skipped if step.rank_loss is not None and not math.isfinite(step.rank_loss)
    ]
    ranks = tuple(sorted({rank for rank, _ in causes}))
    yield Finding(
        id="NUM01",
        title="the loss is no number in some steps",
        severity="critical" if share >= 0.03 else "warning",
        cost_frac=min(1.0, share),
        confidence=0.95 if causes else 0.7,
        ranks=ranks if len(ranks) < len(facts.ranks) else (),
        evidence=(
            f"{len(numbers)} of {num_steps} steps were skipped: {listed(numbers)}",
            *(_sample_text(rank, step) for rank, step in causes[:3]),
        ),
        advice="read these samples (loader order is fixed by the seed); if they are sound, a lower optim.lr, a longer warm-up or "
        "plan.precision=fp32",
    )


def _sample_text(rank: int, step: SkippedStep) -> str:
    samples = f"; its samples are {listed(step.sample_ids)}" if step.sample_ids else ""
    return f"step {step.step}: the losses of rank {rank} alone sum to {step.rank_loss}{samples}"
