"""Step times of layouts, those with partial recompute between the ones without recompute and with full recompute.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from unisono.planner.layout import Layout, Numbers, columns
from unisono.planner.stage_blocks import blocks_per_rank, recomputed_per_rank
from unisono.planner.step_time import StepParts, efficiencies, fitted_constants, step_time
from unisono.planner.step_work import count_work

# parts of a step that are no work of a pass; all others are, of blocks or of the output matrix
OUTSIDE: Final = frozenset({"imbalance", "bubble", "gradients", "optimizer", "stragglers"})


def layout_time(layouts: Sequence[Layout]) -> StepParts:
    """The step time of each of ``layouts``.

    A block takes what it takes in a layout where all are recomputed as it is: in full, or not at all.
    """
    is_partial = np.array([layout.recompute == "partial" for layout in layouts], bool)
    times = _times([_without(layout, "none") if layout.recompute == "partial" else layout for layout in layouts])
    if not is_partial.any():
        return times
    partial = [layout for layout in layouts if layout.recompute == "partial"]
    none = StepParts(**{name: getattr(times, name)[is_partial] for name in StepParts.__slots__})
    mixed = _mixed(partial, none, _times([_without(layout, "full") for layout in partial]))
    for name, seconds in mixed.items():
        getattr(times, name)[is_partial] = seconds
    return times


def _times(layouts: Sequence[Layout]) -> StepParts:
    fitted = fitted_constants()
    times = step_time(count_work(layouts), efficiencies(layouts, fitted), fitted)
    (factors,) = columns(layouts, lambda it: it.learned_factor)
    if (factors == 1).all():
        return times
    return StepParts(**{name: getattr(times, name) * factors for name in StepParts.__slots__})


def _without(layout: Layout, mode: str) -> Layout:
    return replace(layout, recompute=mode, recomputed_blocks=())  # pyright: ignore[reportArgumentType]


def _mixed(layouts: Sequence[Layout], none: StepParts, full: StepParts) -> dict[str, Numbers]:
    """The parts for ``layouts`` with partial recompute, from those without recompute and with full recompute."""
    layers, pp, in_blocks, again = columns(
        layouts,
        lambda it: it.model.layers,
        lambda it: it.pp,
        lambda it: it.cut != "equal",
        lambda it: sum(it.recomputed_blocks),
    )
    share = again / layers
    parts = {
        name: (1 - share) * getattr(none, name) + share * getattr(full, name)
        for name in StepParts.__slots__
        if name not in ("imbalance", "stragglers")
    }
    counts = [layout.pp for layout in layouts]
    which, starts = np.repeat(np.arange(len(layouts)), counts), np.cumsum([0, *counts[:-1]])
    blocks, recomputed = (
        np.array([each for layout in layouts for each in of_ranks(layout)])
        for of_ranks in (blocks_per_rank, recomputed_per_rank)
    )
    block_s, full_block_s = (_block_s(each, layers / pp) for each in (none, full))
    passes_s = (blocks - recomputed) * block_s[which] + recomputed * full_block_s[which]
    # the rank of the last stage has all of the output matrix; of an equal cut each rank has a part
    passes_s += np.where(in_blocks > 0, 0, parts["lm_head"])[which]
    passes_s[starts + np.array([layout.head_rank for layout in layouts])] += np.where(
        in_blocks > 0, parts["lm_head"] * pp, 0
    )
    busy = np.sum(tuple(seconds for name, seconds in parts.items() if name not in OUTSIDE), axis=0)
    parts["imbalance"] = np.maximum(0, np.maximum.reduceat(passes_s, starts) - busy) * (pp > 1)
    alone = np.sum(tuple(parts.values()), axis=0)
    parts["stragglers"] = alone * none.stragglers / (none.total - none.stragglers)
    return parts


def _block_s(parts: StepParts, blocks: Numbers) -> Numbers:
    """Seconds of one block in a step, whose ranks have so many ``blocks``."""
    passes = (getattr(parts, name) for name in StepParts.__slots__ if name not in OUTSIDE and name != "lm_head")
    return np.sum(tuple(passes), axis=0) / blocks
