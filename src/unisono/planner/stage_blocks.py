"""Blocks of each rank of a pipeline, such that the rank with the most FLOPs has as few as possible. Imports no torch.

The output matrix belongs to the last stage, which has fewer blocks for it. All blocks count as their mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from unisono.planner.layout import Layout


def blocks_per_rank(layout: Layout) -> tuple[float, ...]:
    """Blocks of each rank of the pipeline; fractions if the cut is equal, or if there are more stages than blocks."""
    model, stages = layout.model, max(1, layout.stages_per_rank)
    if layout.pp == 1:
        return (float(model.layers),)
    if layout.cut == "equal" or layout.pp * stages > model.layers:
        return (model.layers / layout.pp,) * layout.pp
    passed = model.dense_params + model.expert_layers * model.experts_per_token * model.expert_params
    # FLOPs over those of a block: of matrix products with parameters, and of causal attention
    block = passed / model.layers + model.score_dims * layout.seq_len
    return _balanced(model.layers, layout.pp, stages, model.vocab * model.hidden / block)


@cache
def _balanced(layers: int, pp: int, stages: int, head: float) -> tuple[float, ...]:
    """Blocks of each rank, for a ``head`` that costs as much as so many blocks; each of a rank's ``stages`` has one."""
    fixed = stages - 1  # of each rank, so that they move no balance
    return tuple(fixed + blocks for blocks in _equal_blocks(layers - pp * fixed, pp, head))


def _equal_blocks(count: int, num_stages: int, head: float) -> tuple[int, ...]:
    """What ``balance_stages`` gives for ``count`` blocks of cost 1, in time that does not grow with their square."""
    others = num_stages - 1
    # of equally good splits the one with the shorter first stages
    last = min(
        range(1, count - others + 1), key=lambda blocks: (max(-((blocks - count) // others), blocks + head), -blocks)
    )
    left = count - last
    return (*((left + stage) // others for stage in range(others)), last)


def recomputed_per_rank(layout: Layout) -> tuple[float, ...]:
    """Blocks of each rank of the pipeline that the backward pass computes again."""
    if layout.recompute == "full":
        return blocks_per_rank(layout)
    blocks = layout.recomputed_blocks or (0,) * layout.pp
    return tuple(float(sum(blocks[rank :: layout.pp])) for rank in range(layout.pp))


def spread_over_stages(blocks: Sequence[int], stages_per_rank: int) -> tuple[int, ...]:
    """Blocks of each stage in order, of so many of each rank: as equal as possible, the first stages of a rank the largest."""
    stages = max(1, stages_per_rank)
    return tuple((count + stages - 1 - chunk) // stages for chunk in range(stages) for count in blocks)


def blocks_per_stage(layout: Layout) -> tuple[int, ...]:
    """Blocks of each stage in order; rank ``r`` has every ``pp``-th from stage ``r`` on, the first of them the largest."""
    return spread_over_stages([int(blocks) for blocks in blocks_per_rank(layout)], layout.stages_per_rank)
