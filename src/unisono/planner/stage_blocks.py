"""Blocks of each rank of a pipeline: as given, or such that the rank with the most FLOPs has as few as possible.

Imports no torch. The output matrix belongs to the last stage, which has fewer blocks for it. All blocks count as their mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache

from unisono.planner.layout import Layout
from unisono.planner.model_shape import ModelShape


def blocks_per_rank(layout: Layout) -> tuple[float, ...]:
    """Blocks of each rank of the pipeline; fractions if the cut is equal, or if there are more stages than blocks. Those that a
    layout gives go before."""
    model, stages = layout.model, max(1, layout.stages_per_rank)
    if layout.pp == 1:
        return (float(model.layers),)
    if layout.layers_per_stage:
        return _of_ranks(layout, layout.layers_per_stage)
    if layout.cut == "equal" or layout.pp * stages > model.layers:
        return (model.layers / layout.pp,) * layout.pp
    cut = _balanced(model.layers, layout.pp, stages, _head_blocks(model, layout.seq_len))
    # the rank with the output matrix is the last, or the first in a V
    return (cut[-1], *cut[:-1]) if layout.head_rank == 0 else cut


@lru_cache(maxsize=64)
def _head_blocks(model: ModelShape, seq_len: int) -> float:
    """FLOPs of the output matrix over those of a block: of matrix products with parameters, and of causal attention."""
    passed = model.dense_products + model.expert_layers * model.experts_per_token * model.expert_params
    return model.vocab * model.hidden / (passed / model.layers + model.score_dims * seq_len)


@cache
def _balanced(layers: int, pp: int, stages: int, head: float) -> tuple[float, ...]:
    """Blocks of each rank, for a ``head`` that costs as much as so many blocks, on the last; all of its ``stages`` have one."""
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
    if not layout.recomputed_blocks:
        return (0.0,) * layout.pp
    return _of_ranks(layout, layout.recomputed_blocks)


def _of_ranks(layout: Layout, counts: Sequence[int]) -> tuple[float, ...]:
    """The sum over the stages of each rank, of a number for each stage in order."""
    sums = [0.0] * layout.pp
    for rank, count in zip(ranks_of_stages(layout), counts, strict=True):
        sums[rank] += count
    return tuple(sums)


def ranks_of_stages(layout: Layout) -> tuple[int, ...]:
    """The rank of each stage in order: ranks in turn, or up and down a V (``plan.pipeline_schedule.stage_index``)."""
    if layout.passes == "zbv":
        return (*range(layout.pp), *reversed(range(layout.pp)))
    return tuple(range(layout.pp)) * max(1, layout.stages_per_rank)


def spread_over_stages(layout: Layout, blocks: Sequence[int]) -> tuple[int, ...]:
    """Blocks of each stage in order, of so many of each rank: as equal as possible, the first stages of a rank the largest.

    Of a given cut no stage gets more blocks than it has.
    """
    stages = max(1, layout.stages_per_rank)
    if layout.layers_per_stage:
        return _spread_within(ranks_of_stages(layout), layout.layers_per_stage, blocks)
    return tuple(
        (blocks[rank] + stages - 1 - number // layout.pp) // stages
        for number, rank in enumerate(ranks_of_stages(layout))
    )


def _spread_within(ranks: Sequence[int], most: Sequence[int], blocks: Sequence[int]) -> tuple[int, ...]:
    """``blocks`` of each rank, dealt one by one to that of its stages which has fewest, up to the ``most`` that it can have."""
    spread = [0] * len(ranks)
    for rank, count in enumerate(blocks):
        for _ in range(count):
            free = [stage for stage, of in enumerate(ranks) if of == rank and spread[stage] < most[stage]]
            spread[min(free, key=spread.__getitem__)] += 1
    return tuple(spread)


def blocks_per_stage(layout: Layout) -> tuple[int, ...]:
    """Blocks of each stage in order: those of a given cut, or ``spread_over_stages``."""
    if layout.layers_per_stage:
        return layout.layers_per_stage
    return spread_over_stages(layout, [int(blocks) for blocks in blocks_per_rank(layout)])


def recomputed_per_stage(layout: Layout) -> tuple[int, ...]:
    """Those of each stage that the backward pass computes again in full."""
    if layout.recompute == "full":
        return blocks_per_stage(layout)
    return layout.recomputed_blocks or (0,) * (layout.pp * max(1, layout.stages_per_rank))
