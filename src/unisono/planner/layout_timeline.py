"""The passes of a layout's pipeline over time, from its predicted step. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from unisono.plan.pipeline_schedule import Kind, schedule_order
from unisono.planner.layout import Layout
from unisono.planner.layout_time import OUTSIDE
from unisono.planner.pipeline_timeline import TimedPass, pipeline_timeline
from unisono.planner.stage_blocks import blocks_per_stage
from unisono.planner.step_work import count_work


def layout_timeline(layout: Layout, parts_s: Mapping[str, float], micro_batches: int) -> list[list[TimedPass]]:
    """The passes of the first ``micro_batches`` of a step on each rank of a pipeline; messages take no time.

    A forward pass takes a third of both passes, and once more where it is recomputed. ``parts_s`` are means over the ranks
    (``StepParts``); a stage has its part of them by its blocks, and the last one the output matrix.
    """
    work_s = sum(seconds for name, seconds in parts_s.items() if name not in OUTSIDE and name != "lm_head")
    head_s = parts_s["lm_head"] * layout.pp / layout.num_micro_batches
    blocks = blocks_per_stage(layout)
    again = blocks if layout.recompute == "full" else layout.recomputed_blocks or (0,) * len(blocks)
    # of a block that is not recomputed
    block_s = work_s / layout.num_micro_batches / ((sum(blocks) + sum(again) / 3) / layout.pp)
    # of all blocks of a micro-batch, those gradients of weights that zbv computes later
    later_s = count_work([layout]).later_share[0] * parts_s["matmul"] * layout.pp / layout.num_micro_batches
    seconds: dict[tuple[Kind, int], float] = {}
    for stage, (count, repeated) in enumerate(zip(blocks, again, strict=True)):
        last_s = head_s if stage == len(blocks) - 1 else 0.0  # the output matrix is not computed again
        backward_s = block_s * (2 * count + repeated) / 3 + last_s * 2 / 3
        seconds["F", stage] = block_s * count / 3 + last_s / 3
        seconds["B", stage] = backward_s
        seconds["W", stage] = later_s * count / sum(blocks)
        seconds["I", stage] = backward_s - seconds["W", stage]
    order = schedule_order(layout.passes, layout.pp, max(1, layout.stages_per_rank), micro_batches)
    return pipeline_timeline(order, seconds)
