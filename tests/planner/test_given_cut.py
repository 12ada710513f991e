"""Cuts into stages that are given: kept by the search, and predicted as the same cut is where it was found."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.plan.options import PlanOptions, Schedule
from unisono.plan.resolve import derive_plan
from unisono.planner.devices import DEVICES
from unisono.planner.layout import Layout, LayoutError
from unisono.planner.layout_space import AXES, Job, Space, nearest_value
from unisono.planner.layout_strategy import plan_of, write_strategy
from unisono.planner.layout_timeline import layout_timeline
from unisono.planner.model_presets import PRESETS
from unisono.planner.partial_recompute import least_recompute
from unisono.planner.pipeline_timeline import end_s
from unisono.planner.search import choose, compare
from unisono.planner.simulate import Prediction, predict
from unisono.planner.stage_blocks import blocks_per_rank, blocks_per_stage, recomputed_per_rank

GIB = 2**30
MODEL = PRESETS["llama-3-8b"]  # 32 blocks
JOB = Job(
    model=MODEL, device=DEVICES["h100"], num_devices=16, precision="bf16", global_batch=64, seq_len=8192, pins={"tp": 2}
)


def pipeline(pp: int, stages: int, schedule: Schedule | None = None) -> Layout:
    return Layout(
        model=MODEL,
        device=DEVICES["h100"],
        precision="bf16",
        num_devices=pp,
        pp=pp,
        stages_per_rank=stages,
        schedule=schedule,
        cut="balanced",
        global_batch=16 * pp,
        seq_len=4096,
    )


def given_as(layout: Layout, *layers: int) -> Layout:
    return replace(layout, cut="given", layers_per_stage=layers)


@pytest.mark.parametrize(
    ("pp", "stages", "schedule"),
    [(4, 1, "1f1b"), (4, 1, "gpipe"), (4, 2, "zbv"), (4, 2, "interleaved"), (2, 4, "interleaved"), (5, 1, "1f1b")],
)
def test_the_balanced_cut_given_is_predicted_as_the_balanced_cut(pp: int, stages: int, schedule: Schedule) -> None:
    found = pipeline(pp, stages, schedule)
    told = given_as(found, *blocks_per_stage(found))
    assert blocks_per_rank(told) == blocks_per_rank(found)
    for changes in ({}, {"recompute": "full"}, {"micro_batch": 2}):
        one, other = predict([replace(each, **changes) for each in (found, told)])
        assert one == other
    few = least_recompute([found, told], 60 * GIB, is_pinned=True)
    if schedule != "zbv":
        assert few[0].recomputed_blocks == few[1].recomputed_blocks
        assert predict([few[0]]) == predict([few[1]])


@given(st.data())
def test_pins_are_kept_in_every_layout(data: st.DataObject) -> None:
    stages = data.draw(st.sampled_from([2, 4, 8]))
    ends = data.draw(st.lists(st.integers(1, 31), min_size=stages - 1, max_size=stages - 1, unique=True))
    cut = tuple(end - begin for begin, end in zip([0, *sorted(ends)], [*sorted(ends), 32], strict=True))
    job = replace(JOB, layers_per_stage=cut)
    layouts = Space(job).layouts
    assert layouts
    assert {layout.pp * layout.stages_per_rank for layout in layouts} == {stages}
    for layout in (*layouts[::7], *least_recompute(layouts[::7], 20 * GIB)):
        assert blocks_per_stage(layout) == cut
        assert plan_of(layout).pipeline.layers_per_stage == cut
        assert sum(blocks_per_rank(layout)) == 32
        assert all(again <= of for again, of in zip(layout.recomputed_blocks, cut, strict=False))
        assert all(again <= of for again, of in zip(recomputed_per_rank(layout), blocks_per_rank(layout), strict=True))


def test_the_stage_with_most_blocks_decides_time_and_memory() -> None:
    even, uneven, last = predict(
        [given_as(pipeline(4, 1, "1f1b"), *cut) for cut in ((8, 8, 8, 8), (14, 6, 6, 6), (6, 6, 6, 14))]
    )
    # in 1F1B the first rank keeps most micro-batches, and the last has the output matrix
    assert even.needed_bytes < last.needed_bytes < uneven.needed_bytes
    assert even.step_s < uneven.step_s < last.step_s
    assert uneven.step_s > 14 / 8 * 0.8 * even.step_s


def played_s(layout: Layout, best: Prediction) -> float:
    """Seconds of all passes of a step."""
    return end_s(layout_timeline(layout, best.parts_s, int(layout.num_micro_batches)))


@pytest.mark.parametrize("cut", [(8, 8, 8, 8), (12, 8, 8, 4), (4, 8, 8, 12), (14, 6, 6, 6), (6, 14, 6, 6)])
def test_steps_are_those_of_passes_one_by_one(cut: tuple[int, ...]) -> None:
    layout = given_as(pipeline(4, 1, "1f1b"), *cut)
    (best,) = predict([layout])
    outside = sum(best.parts_s[name] for name in ("gradients", "optimizer", "stragglers"))
    assert 0.97 < played_s(layout, best) / (best.step_s - outside) <= 1.001


def test_the_search_finds_a_plan_of_the_cut_and_the_strategy_file_has_it(tmp_path: Path) -> None:
    job = replace(JOB, layers_per_stage=(6, 8, 10, 8), seq_len=4096)
    found = choose(job, compare(job))
    assert found.best is not None
    for each in (
        found.best,
        found.simplest,
        found.without_limit,
        *found.pareto,
        *(each for _, _, each in found.changes),
    ):
        assert each is not None
        assert each.layout.layers_per_stage == (6, 8, 10, 8)
    write_strategy(tmp_path / "plan.json", found.best.layout)
    options = PlanOptions(file=str(tmp_path / "plan.json"))
    read = derive_plan(options, world_size=16, device="cpu", native_bf16=True)
    assert read == plan_of(found.best.layout)
    assert read.pipeline.layers_per_stage == (6, 8, 10, 8)


@pytest.mark.parametrize(
    ("layers", "pins", "said"),
    [
        ((8, 8, 8, 9), {}, "[8, 8, 8, 9], which are 33 blocks: the model has 32 blocks, try layers_per_stage=8,8,8,8"),
        ((8, 8, 8, 0), {}, "[8, 8, 8, 0]: each stage has a block, try layers_per_stage=8,8,8,8"),
        ((30, 1), {}, "[30, 1], which are 31 blocks: the model has 32 blocks, try layers_per_stage=30,2"),
        ((1,) * 33, {}, "which are 33 blocks: the model has 32 blocks, try at most 32 stages"),
        ((8, 8, 8, 8), {"pp": 8}, "pp=8: it divides the 4 stages that are given, try pp=4"),
        ((8, 8, 8, 8), {"pp": 1}, "pp=1: several stages are those of a pipeline, try pp=2"),
        (
            (8, 8, 8, 8),
            {"pp": 4, "stages_per_rank": 2},
            "pp=4: pp x stages_per_rank is 4, the number of stages that are given, try pp=2",
        ),
        ((4,) * 7 + (4,), {"stages_per_rank": 3}, "stages_per_rank=3: pp x stages_per_rank is 8, "),
        (
            (5, 5, 5, 5, 5, 5, 2),
            {},
            "layers_per_stage=5,5,5,5,5,5,2: pp x stages_per_rank is the number of stages, and the other pins leave no such "
            "pipeline, try 8 numbers",
        ),
    ],
)
def test_what_no_pipeline_has_is_refused(layers: tuple[int, ...], pins: dict[str, int | str], said: str) -> None:
    with pytest.raises(LayoutError) as raised:
        compare(replace(JOB, pins=pins, layers_per_stage=layers))
    assert said in f"{raised.value}, try {raised.value.nearest}"


@pytest.mark.parametrize(
    ("pins", "said"),
    [
        ({"tp": 3}, "tp=3: it divides 32 heads and 14336 hidden units"),
        ({"tp": 3}, "heads or is a multiple of them, try tp=4"),
        ({"pp": 64}, "pp=64: each stage has a block, and the model has 32, try pp=16"),
        ({"cp": 3}, "cp=3: 2 x cp divides sequences of 8192 tokens, try cp=4"),
        ({"ep": 4}, "ep=4: the model has no experts, try ep=1"),
        ({"pp": 3}, "pp=3: tp x pp x cp divides 16 devices, try pp=4"),
        ({"dp_shard": 3}, "dp_shard=3: it divides the model's replicas, try dp_shard=4"),
        ({"zero": 0, "dp_shard": 4}, "zero=0: it shares no states between data ranks, try zero=1"),
        ({"micro_batch": 3}, "micro_batch=3: it divides a replica's share of the global batch, try micro_batch=4"),
        (
            {"schedule": "zbv", "dp_shard": 2},
            "schedule=zbv: gradients of weights that zbv computes later are not shared",
        ),
    ],
)
def test_the_nearest_value_of_a_pin_that_no_layout_has(pins: dict[str, int | str], said: str) -> None:
    with pytest.raises(LayoutError) as raised:
        compare(replace(JOB, pins=pins))
    assert said in f"{raised.value}, try {raised.value.nearest}"
    axis, _, value = raised.value.nearest.partition("=")
    compare(replace(JOB, pins=pins | {axis: value if axis == "schedule" else int(value)}))  # it works


def test_every_value_that_is_searched_can_be_pinned() -> None:
    job = replace(JOB, model=PRESETS["mixtral-8x7b"], pins={}, seq_len=65536, num_devices=32)
    layouts = Space(job).layouts
    for axis in AXES:
        for value in {getattr(layout, axis) for layout in layouts} - {None}:
            if axis == "stages_per_rank" and value == 0:  # of no pipeline
                continue
            pinned = Space(replace(job, pins={axis: value})).layouts
            assert {getattr(layout, axis) for layout in pinned} == {value}
            assert len(pinned) >= sum(getattr(layout, axis) == value for layout in layouts)


@given(st.integers(0, 100), st.lists(st.integers(0, 100), min_size=1))
def test_the_nearest_number(pin: int, values: list[int]) -> None:
    nearest = int(nearest_value(pin, values))
    assert nearest in values
    assert nearest == pin or pin not in values
    below = [value for value in values if value <= pin]
    above = [value for value in values if value >= pin]
    assert nearest in (max(below, default=nearest), min(above, default=nearest))


def test_a_cut_is_that_of_a_layout_whose_stages_it_has() -> None:
    layout = pipeline(4, 1, "1f1b")
    for changes in (
        {"cut": "given"},
        {"layers_per_stage": (8, 8, 8, 8)},
        {"cut": "given", "layers_per_stage": (16, 16)},
        {"cut": "given", "layers_per_stage": tuple(accumulate((2, 2, 2, 2)))},
        {"cut": "given", "layers_per_stage": (8, 8, 8, 8), "pp": 1, "stages_per_rank": 0, "schedule": None},
    ):
        with pytest.raises(LayoutError):
            replace(layout, **changes)
