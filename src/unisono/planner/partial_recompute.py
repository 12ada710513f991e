"""Full recompute of some blocks of each stage: the fewest with which a layout fits. Imports no torch.

The other blocks keep all that they compute, as in Megatron-LM with ``--recompute-method block``. The memory of a rank falls by
the same bytes with each block, so the number follows without a search. Ranks that hold more micro-batches recompute more blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from unisono.planner.layout import Layout, Numbers
from unisono.planner.peak_memory import COUNTED, places_of_ranks, rank_parts
from unisono.planner.stage_blocks import blocks_per_rank, blocks_per_stage, spread_over_stages

_ACTIVATIONS = COUNTED.index("activations")


def least_recompute(
    layouts: Sequence[Layout], limit_bytes: float | Numbers, *, is_pinned: bool = False
) -> list[Layout]:
    """``layouts``, none of which recomputes anything, each with the fewest recomputed blocks of each rank with which it fits.

    Left out are those that fit as they are, or not with all blocks recomputed either. If partial recompute ``is_pinned``, these
    recompute one block, and all but one. ``limit_bytes`` is one number, or one for each layout.
    """
    possible = np.array([_can_be_partial(layout) and layout.model.layers > 1 for layout in layouts], bool)
    limits = np.broadcast_to(np.asarray(limit_bytes, float), len(layouts))[possible]
    layouts = [layout for layout, can_be in zip(layouts, possible, strict=True) if can_be]
    if not layouts:
        return []
    ends = np.cumsum([layout.pp for layout in layouts])
    found: list[Layout] = []
    for layout, counts in zip(layouts, np.split(_least_counts(layouts, limits), ends[:-1]), strict=True):
        blocks = blocks_per_rank(layout)
        if is_pinned:
            counts = np.minimum(counts, blocks)
            counts[0] += not counts.any()
            counts[-1] -= bool((counts == blocks).all())
        if counts.any() and (counts <= blocks).all() and (counts < blocks).any():
            found.append(with_blocks(layout, spread_over_stages(layout, list(map(int, counts)))))
    return found


def pinned_recompute(layouts: Sequence[Layout], count: int) -> list[Layout]:
    """``layouts`` with ``count`` recomputed blocks of each stage, or all of a smaller one; not those where this is all blocks."""
    found: list[Layout] = []
    for layout in layouts:
        blocks = blocks_per_stage(layout)
        if _can_be_partial(layout) and count < max(blocks):
            found.append(with_blocks(layout, tuple(min(count, each) for each in blocks)))
    return found


def with_blocks(layout: Layout, blocks: tuple[int, ...]) -> Layout:
    """``layout`` with so many recomputed blocks of each stage."""
    return replace(layout, recompute="partial", recomputed_blocks=blocks)


def _can_be_partial(layout: Layout) -> bool:
    # what waits for weight gradients of zbv is kept, recomputed or not (``peak_memory``)
    return layout.pp * max(1, layout.stages_per_rank) <= layout.model.layers and layout.passes != "zbv"


def _least_counts(layouts: Sequence[Layout], limits: Numbers) -> Numbers:
    """The fewest blocks of each rank of ``layouts``, one after the other; more than it has where that is not enough."""
    ranks = [places_of_ranks(layout) for layout in layouts]
    which = np.repeat(np.arange(len(layouts)), [len(each) for each in ranks])
    limit_bytes = limits[which]
    places = np.array([place for each in ranks for place in each], float)
    blocks = places[:, 1].copy()

    def parts(recomputed: Numbers) -> Numbers:
        places[:, 2] = recomputed
        return rank_parts(layouts, which, places)

    none, full = parts(np.zeros(len(blocks))), parts(blocks)
    of_block = (none[_ACTIVATIONS] - full[_ACTIVATIONS]) / blocks
    # from the first recomputed block on, a rank needs what a whole block has while its backward pass runs
    excess = full.sum(0) - full[_ACTIVATIONS] + none[_ACTIVATIONS] - limit_bytes
    counts = np.where(none.sum(0) <= limit_bytes, 0, np.maximum(1, np.ceil(excess / of_block)))
    # a quotient that rounding made too small
    return counts + ((counts > 0) & (parts(np.minimum(counts, blocks)).sum(0) > limit_bytes))
