"""Which checkpoints may go. A pure function."""

from __future__ import annotations

import math
from collections.abc import Mapping

from unisono.checkpoint.options import CheckpointOptions


def expired_checkpoints(scores: Mapping[int, float | None], options: CheckpointOptions) -> list[int]:
    """The committed steps to delete, oldest first, given ``{step: score}``.

    Stays: the newest ``keep_last``, every step divisible by ``keep_every``, the ``keep_best`` lowest scores (of equal
    ones the newer). The newest always stays; a score that is missing or not finite is never among the best.
    """
    steps = sorted(scores)
    kept = set(steps[-max(1, options.keep_last) :])
    if options.keep_every:
        kept |= {step for step in steps if step % options.keep_every == 0}
    ranked = sorted((score, -step) for step, score in scores.items() if score is not None and math.isfinite(score))
    kept |= {-step for _, step in ranked[: options.keep_best]}
    return [step for step in steps if step not in kept]
