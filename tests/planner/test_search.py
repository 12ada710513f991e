"""The search over layouts: legal, deterministic, true to pins, and never slower with more memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from unisono.planner.devices import DEVICES
from unisono.planner.layout import LayoutError
from unisono.planner.layout_space import AXES, Job, Space
from unisono.planner.model_presets import PRESETS
from unisono.planner.model_shape import ModelShape
from unisono.planner.peak_memory import peak_memory
from unisono.planner.search import MEMORY_SHARE, SearchResult, choose, compare
from unisono.planner.simulate import predict

GIB = 2**30


def job(model: str | ModelShape = "llama-3-8b", device: str = "h100", num_devices: int = 8, **changes: object) -> Job:
    whole = Job(
        model=PRESETS[model] if isinstance(model, str) else model,
        device=DEVICES[device],
        num_devices=num_devices,
        precision="bf16",
        global_batch=64,
        seq_len=8192,
        pins={},
    )
    return replace(whole, **changes)  # pyright: ignore[reportArgumentType]


def search(job: Job) -> SearchResult:
    return choose(job, compare(job))


JOBS = [
    job(),
    job("llama-3-70b", num_devices=256, global_batch=256),
    job("mixtral-8x7b", num_devices=128, global_batch=256, seq_len=4096),
    job("llama-3-8b", num_devices=24, global_batch=96),  # no power of two
    job("llama-3-405b", num_devices=1024, global_batch=64, seq_len=131072),
]
NAMES = [f"{each.model.layers} layers on {each.num_devices}" for each in JOBS]


@pytest.mark.parametrize("each", JOBS, ids=NAMES)
def test_the_best_fits_and_uses_all_devices_and_the_whole_batch(each: Job) -> None:
    best = search(each).best
    assert best is not None
    layout = best.layout
    assert layout.dp * layout.tp * layout.pp * layout.cp == each.num_devices
    assert layout.num_micro_batches * layout.micro_batch * layout.dp == each.global_batch
    assert layout.num_micro_batches.is_integer()
    assert best.needed_bytes <= MEMORY_SHARE * each.device.memory_bytes
    assert best.needed_bytes == float(peak_memory([layout]).counted[0])
    assert best.step_s == pytest.approx(predict([layout])[0].step_s, rel=1e-12)


@pytest.mark.parametrize("each", JOBS, ids=NAMES)
def test_the_same_job_has_the_same_plan(each: Job) -> None:
    assert search(each) == search(replace(each, pins=dict(each.pins)))


@pytest.mark.parametrize("each", JOBS[:3], ids=NAMES[:3])
def test_more_memory_never_gives_a_slower_plan(each: Job) -> None:
    found = [search(replace(each, memory_bytes=gib * GIB)).best for gib in (20, 40, 60, 80, 120, 200, 1000)]
    times = [best.step_s for best in found if best is not None]
    assert len(times) >= 4
    assert times == sorted(times, reverse=True)
    assert search(replace(each, memory_bytes=1000 * GIB)).best == search(each).without_limit


@pytest.mark.parametrize(
    "pins",
    [
        {"tp": 4}, {"pp": 2, "stages_per_rank": 2}, {"dp_shard": 8}, {"zero": 2}, {"zero": 3, "pp": 2}, {"micro_batch": 2},
        {"recompute": "full"}, {"tp": 2, "pp": 4}, {"stages_per_rank": 2}, {"stages_per_rank": 1}, {"zero": 0},
        {"schedule": "gpipe"}, {"schedule": "1f1b"}, {"schedule": "interleaved"}, {"schedule": "zbv"},
        {"schedule": "zbv", "recompute": "full"},
    ],
    ids=str,
)  # fmt: skip
def test_pins_are_kept(pins: dict[str, int | str]) -> None:
    found = search(job(pins=pins))
    assert found.best is not None
    for candidate in (found.best, *found.pareto, *(each for _, _, each in found.changes)):
        assert {name: getattr(candidate.layout, name) for name in pins} == pins
    assert {axis for axis, _, _ in found.changes}.isdisjoint(pins)


@pytest.mark.parametrize("each", JOBS, ids=NAMES)
def test_every_value_of_an_axis_is_in_a_layout_or_has_a_rule(each: Job) -> None:
    space = Space(each)
    had = {axis: {getattr(layout, axis) for layout in space.layouts} for axis in AXES}
    told = {axis: {value for name, value, _ in space.refused if name == axis} for axis in AXES}
    assert all(had[axis].isdisjoint(told[axis]) for axis in AXES)
    assert all(reason for _, _, reason in space.refused)
    expected: dict[str, set[int | str]] = {
        "tp": {1, 2, 4, 8},
        "cp": {1, 2, 4, 8},
        "zero": {0, 1, 2, 3},
        "micro_batch": {1, 2, 4, 8, 16},
        "recompute": {"none", "selective", "full"},
        "schedule": {"gpipe", "1f1b", "interleaved", "zbv"},
    }
    for axis, values in expected.items():
        assert values <= had[axis] | told[axis], axis


def test_rules_of_values_that_no_layout_has() -> None:
    rules = {(axis, value): rule for axis, value, rule in search(job(num_devices=64, global_batch=64)).refused}
    assert rules["tp", 16] == "fast links connect 8 devices"
    assert rules["pp", 64] == "each stage has a block, and the model has 32"
    assert rules["cp", 2].startswith("sequences are divided from 32,768 tokens on")
    assert rules["ep", 2] == "the model has no experts"
    many = {(axis, value): rule for axis, value, rule in search(job(global_batch=512, pins={"dp_shard": 1})).refused}
    assert many["schedule", "gpipe"] == "it takes as long as 1f1b, and holds all micro-batches"
    alone = {(axis, value): rule for axis, value, rule in search(job(pins={"pp": 1})).refused}
    assert alone["schedule", "zbv"] == "it orders the passes of a pipeline, and no layout has one"
    three = replace(PRESETS["llama-3-8b"], heads=24, kv_heads=3, head_dim=128)
    rules = {(axis, value): rule for axis, value, rule in search(job(model=three)).refused}
    assert rules["tp", 2].startswith("it divides 24 heads and 14336 hidden units, and divides 3 key/value heads")


def test_layouts_are_legal_and_all_different() -> None:
    layouts = Space(JOBS[2]).layouts
    assert len(set(map(repr, layouts))) == len(layouts)
    for layout in layouts:
        assert layout.dp * layout.tp * layout.pp * layout.cp == layout.num_devices
        assert layout.num_micro_batches * layout.micro_batch * layout.dp == layout.global_batch
        assert layout.num_micro_batches >= layout.pp or layout.schedule == "gpipe"
        assert (layout.schedule is None) == (layout.pp == 1)
        assert (layout.zero == 0) == (layout.state_ranks == 1)
        assert layout.state_ranks % layout.ep == 0
    assert {(layout.zero, layout.pp > 1) for layout in layouts} == {
        (zero, pp) for zero in range(4) for pp in (True, False)
    }


def test_each_other_value_says_what_becomes_of_the_plan() -> None:
    found = search(job())
    assert found.best is not None
    for axis, value, candidate in found.changes:
        assert getattr(candidate.layout, axis) == value != getattr(found.best.layout, axis)
        fits = candidate.needed_bytes <= found.limit_bytes
        assert not fits or candidate.step_s >= found.best.step_s
    assert {axis for axis, _, _ in found.changes} <= set(AXES)


def test_a_simpler_layout_that_is_about_as_fast_is_told() -> None:
    found = search(job(memory_bytes=200 * GIB, num_devices=64, global_batch=512))
    assert found.best is not None
    assert found.simplest is not None
    assert found.best.step_s <= found.simplest.step_s <= found.best.step_s * 1.03


def test_none_on_the_front_is_both_faster_and_smaller() -> None:
    found = search(job())
    times = [each.step_s for each in found.pareto]
    peaks = [each.needed_bytes for each in found.pareto]
    assert times == sorted(times)
    assert peaks == sorted(peaks, reverse=True)
    assert len(found.pareto) >= 5


def test_what_does_not_fit_and_what_cannot_be() -> None:
    found = search(job("llama-3-405b", num_devices=8))
    assert found.best is None
    assert found.num_fitting == 0
    assert found.smallest.needed_bytes <= min(each.needed_bytes for each in found.pareto)
    with pytest.raises(LayoutError, match=r"tp=3: it divides 32 heads"):
        search(job(pins={"tp": 3}))
    with pytest.raises(LayoutError, match="a global batch of 7 sequences"):
        search(job(num_devices=1024, global_batch=7))


def test_short_sequences_are_not_divided_and_long_ones_are() -> None:
    assert {each.layout.cp for each in search(job()).pareto} == {1}
    long = search(job("llama-3-8b", num_devices=64, global_batch=8, seq_len=131072)).best
    assert long is not None
    assert long.layout.cp > 1


def test_every_layout_of_the_largest_clusters_is_compared() -> None:
    """Tens of thousands at most, which count in a second or so (``benchmarks/planner``)."""
    for each in (
        job("llama-3-405b", num_devices=16384, global_batch=2048),
        job("deepseek-v3", device="gb200", num_devices=65536, global_batch=16384, seq_len=4096),
    ):
        found = search(each)
        assert found.best is not None
        assert 30 < found.num_layouts < 100_000


def test_a_pipeline_of_more_ranks_than_micro_batches_is_that_of_gpipe() -> None:
    few = job("llama-3-70b", num_devices=64, global_batch=4, pins={"pp": 8, "tp": 8})
    layouts = Space(few).layouts
    assert {(layout.num_micro_batches, layout.schedule) for layout in layouts if layout.micro_batch == 1} == {
        (4, "gpipe")
    }
    best = search(replace(few, memory_bytes=1000 * GIB)).best
    assert best is not None
    assert best.axes_text.startswith("tp=8 pp=8 schedule=gpipe")
