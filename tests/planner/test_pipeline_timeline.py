"""Timelines of pipeline schedules: legal, as early as can be, and with the published bubbles."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise
from typing import Any

import pytest

from unisono.plan.pipeline_schedule import Action, Kind, schedule_order, stage_index
from unisono.plan.plan import STAGES_PER_RANK
from unisono.planner.devices import DEVICES
from unisono.planner.layout import Layout
from unisono.planner.layout_timeline import layout_timeline
from unisono.planner.model_presets import PRESETS
from unisono.planner.peak_memory import places_of_ranks
from unisono.planner.pipeline_timeline import end_s, pipeline_timeline
from unisono.planner.simulate import predict
from unisono.planner.stage_blocks import ranks_of_stages

SECONDS: dict[Kind, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
# published bubbles of equal stages, in forward passes of a whole rank: (p - 1)(F + B), divided by the stages of each rank where
# they alternate; (p - 1) F / v where gradients of weights fill the gaps
CASES: list[tuple[Any, int, int, int, float]] = [
    ("gpipe", 4, 1, 8, 9.0),
    ("1f1b", 4, 1, 8, 9.0),
    ("1f1b", 2, 1, 3, 3.0),
    ("interleaved", 4, 2, 8, 4.5),
    ("interleaved", 4, 4, 8, 2.25),
    ("interleaved", 2, 2, 4, 1.5),
    ("zbv", 4, 2, 8, 1.5),
    ("zbv", 2, 2, 4, 0.5),
]


@pytest.mark.parametrize(("schedule", "pp", "chunks", "micro_batches", "bubble"), CASES)
def test_the_bubbles_are_the_published_ones(
    schedule: Any, pp: int, chunks: int, micro_batches: int, bubble: float
) -> None:
    order = schedule_order(schedule, pp, chunks, micro_batches)
    seconds = {(kind, stage): each / chunks for kind, each in SECONDS.items() for stage in range(pp * chunks)}
    timeline = pipeline_timeline(order, seconds)
    assert end_s(timeline) == pytest.approx(3 * micro_batches + bubble)


@pytest.mark.parametrize(("schedule", "pp", "chunks", "micro_batches", "bubble"), CASES)
def test_no_pass_begins_before_what_it_needs(
    schedule: Any, pp: int, chunks: int, micro_batches: int, bubble: float
) -> None:
    order = schedule_order(schedule, pp, chunks, micro_batches)
    # uneven stages, and messages that take time
    seconds = {(kind, stage): each * (1 + stage % 3) for kind, each in SECONDS.items() for stage in range(pp * chunks)}
    timeline = pipeline_timeline(order, seconds, message_s=0.25)
    rank_of = {stage_index(schedule, pp, rank, chunk): rank for rank in range(pp) for chunk in range(chunks)}
    ends = {
        ("B" if each.action.kind == "I" else each.action.kind, *each.action[1:]): each.end_s
        for row in timeline
        for each in row
    }
    for rank, row in enumerate(timeline):
        assert [each.action for each in row] == list(order[rank])
        assert all(earlier.end_s <= later.begin_s for earlier, later in pairwise(row))
        free = 0.0
        for (kind, stage, micro), begin, end in row:
            assert end - begin == pytest.approx(seconds[kind, stage])
            needs = {"F": [("F", stage - 1)], "W": [("B", stage)]}.get(kind, [("F", stage), ("B", stage + 1)])
            arrivals = [
                ends[(*need, micro)] + (0.25 if rank_of[need[1]] != rank else 0.0)
                for need in needs
                if 0 <= need[1] < pp * chunks
            ]
            # as early as can be
            assert begin == pytest.approx(max([free, *arrivals]))
            free = end


def test_an_order_that_cannot_be_run_is_an_error() -> None:
    order = [[Action("B", 0, 0), Action("F", 0, 0)], [Action("F", 1, 0), Action("B", 1, 0)]]
    with pytest.raises(ValueError, match="wait for later ones"):
        pipeline_timeline(order, {(kind, stage): 1.0 for kind in ("F", "B") for stage in (0, 1)})


@pytest.mark.parametrize(("stages_per_rank", "recompute"), [(1, "none"), (1, "full"), (2, "none")])
def test_the_timeline_of_a_layout_takes_what_its_prediction_says(stages_per_rank: int, recompute: Any) -> None:
    layout = Layout(
        model=PRESETS["llama-2-7b"],
        device=DEVICES["h100"],
        precision="bf16",
        num_devices=4,
        pp=4,
        stages_per_rank=stages_per_rank,
        cut="balanced",
        global_batch=16,
        seq_len=4096,
        recompute=recompute,
    )
    (predicted,) = predict([layout])
    parts = predicted.parts_s
    timeline = layout_timeline(layout, parts, 16)
    assert sorted(len(row) for row in timeline) == [2 * 16 * stages_per_rank] * 4
    busy_s = [sum(each.end_s - each.begin_s for each in row) for row in timeline]
    outside = ("imbalance", "bubble", "gradients", "optimizer", "stragglers")
    assert sum(busy_s) / 4 == pytest.approx(sum(seconds for name, seconds in parts.items() if name not in outside))
    assert max(busy_s) == pytest.approx(sum(busy_s) / 4 + parts["imbalance"])
    # the bubble is counted as that of equal stages
    waits_s = end_s(timeline) - max(busy_s)
    assert waits_s == pytest.approx(parts["bubble"], rel=0.15)


@pytest.mark.parametrize("recomputed", [(8, 6, 4, 0), (1, 1, 1, 1)], ids=str)
def test_the_timeline_of_partial_recompute_takes_what_its_prediction_says(recomputed: tuple[int, ...]) -> None:
    """Forward passes of all blocks take the same; a backward pass takes as much longer as blocks are recomputed."""
    layout = Layout(
        model=PRESETS["llama-2-7b"],
        device=DEVICES["h100"],
        precision="bf16",
        num_devices=4,
        pp=4,
        stages_per_rank=1,
        cut="balanced",
        global_batch=16,
        seq_len=4096,
        recompute="partial",
        recomputed_blocks=recomputed,
    )
    (predicted,) = predict([layout])
    parts = predicted.parts_s
    timeline = layout_timeline(layout, parts, 16)
    busy_s = [sum(each.end_s - each.begin_s for each in row) for row in timeline]
    outside = ("imbalance", "bubble", "gradients", "optimizer", "stragglers")
    assert sum(busy_s) / 4 == pytest.approx(sum(seconds for name, seconds in parts.items() if name not in outside))
    # collectives are not repeated, which the prediction counts and the chart does not
    assert max(busy_s) == pytest.approx(sum(busy_s) / 4 + parts["imbalance"], rel=0.02)
    forward_s, backward_s = (
        [next(it.end_s - it.begin_s for it in row if it.action.kind == kind) for row in timeline[:3]] for kind in "FB"
    )
    assert forward_s == pytest.approx([forward_s[0]] * 3)
    assert [b / f for f, b in zip(forward_s, backward_s, strict=True)] == pytest.approx(
        [2 + count / 8 for count in recomputed[:3]]
    )


@pytest.mark.parametrize("model", ["llama-2-7b", "llama-3-70b", "llama-3-405b", "gpt-175b"])
def test_the_formula_of_a_step_holds_where_stages_of_a_rank_are_equal(model: str) -> None:
    """Played through pass by pass, with uneven ranks and the output matrix on the last one."""
    shape = PRESETS[model]
    layouts = [
        Layout(
            model=shape,
            device=DEVICES["h100"],
            precision="bf16",
            num_devices=8 * pp,
            tp=8,
            pp=pp,
            stages_per_rank=stages,
            cut="balanced",
            global_batch=fills * pp,
            seq_len=shape.max_seq_len,
        )
        for pp in (2, 4, 8, 16)
        for stages in range(1, 11)
        for fills in (2, 4)
        if pp * stages <= shape.layers and math.ceil(shape.layers / pp) % stages == 0
    ]
    ratios: list[float] = []
    for layout, predicted in zip(layouts, predict(layouts), strict=True):
        alone = ("gradients", "optimizer", "stragglers")
        formula_s = sum(seconds for name, seconds in predicted.parts_s.items() if name not in alone)
        played_s = end_s(layout_timeline(layout, predicted.parts_s, int(layout.num_micro_batches)))
        ratios.append(played_s / formula_s)
    assert len(ratios) >= 16
    assert min(ratios) >= 0.96
    assert max(ratios) <= 1.001


@pytest.mark.parametrize("tp", [1, 8])
@pytest.mark.parametrize("model", ["llama-2-7b", "gpt-175b"])
@pytest.mark.parametrize(("schedule", "fills"), [("gpipe", (0.5, 1, 2)), ("zbv", (1, 1.5, 2, 4))])
def test_the_formula_of_a_step_holds_for_other_schedules(
    schedule: Any, fills: tuple[float, ...], model: str, tp: int
) -> None:
    """Few micro-batches of gpipe, and weight gradients that fill the gaps of zbv, of all weights or of column-wise ones."""
    shape = PRESETS[model]
    layouts = [
        Layout(
            model=shape,
            device=DEVICES["h100"],
            precision="bf16",
            num_devices=tp * pp,
            tp=tp,
            pp=pp,
            stages_per_rank=2 if schedule == "zbv" else 1,
            schedule=schedule,
            cut="balanced",
            global_batch=int(fill * pp),
            seq_len=shape.max_seq_len,
        )
        for pp in (2, 4, 8)
        for fill in fills
    ]
    for layout, predicted in zip(layouts, predict(layouts), strict=True):
        alone = ("gradients", "optimizer", "stragglers")
        formula_s = sum(seconds for name, seconds in predicted.parts_s.items() if name not in alone)
        played_s = end_s(layout_timeline(layout, predicted.parts_s, int(layout.num_micro_batches)))
        # the longest prediction is that of fewer than 2 p - 1 micro-batches with zbv
        assert 0.92 <= played_s / formula_s <= 1.001, (layout.pp, layout.num_micro_batches)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zbv"])
def test_activations_are_held_of_as_many_micro_batches_as_the_order_of_passes_says(schedule: Any) -> None:
    """Counted in the order that ranks run: from a forward pass to the backward pass, or to the gradients of weights."""
    chunks = STAGES_PER_RANK[schedule]
    for pp, micro_batches in ((2, 2), (2, 6), (4, 4), (4, 8), (4, 16), (8, 8), (8, 24)):
        layout = Layout(
            model=PRESETS["llama-2-7b"],
            device=DEVICES["h100"],
            precision="bf16",
            num_devices=pp,
            pp=pp,
            stages_per_rank=chunks,
            schedule=schedule,
            cut="balanced",
            global_batch=micro_batches,
            seq_len=4096,
        )
        for rank, actions in enumerate(schedule_order(schedule, pp, chunks, micro_batches)):
            held = accumulate({"F": 1, "I": 0}.get(action.kind, -1) for action in actions)
            assert max(held) / chunks == places_of_ranks(layout)[rank].in_flight, (pp, micro_batches, rank)
            stages = {action.stage for action in actions}
            assert stages == {stage for stage, of in enumerate(ranks_of_stages(layout)) if of == rank}
