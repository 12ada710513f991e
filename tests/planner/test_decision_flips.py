"""What changes the decision of a search, fewer devices, and the reasons of what was not chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from unisono.planner.answer import Answer
from unisono.planner.decision_flips import FACTORS, PROPERTIES, Sensitivity, sensitivity
from unisono.planner.devices import DEVICES
from unisono.planner.layout_space import AXES, Job
from unisono.planner.model_presets import PRESETS
from unisono.planner.number_sources import LAYOUT_SOURCES
from unisono.planner.peak_memory import MemoryParts
from unisono.planner.search import PredictedLayout, choose, compare, memory_limit
from unisono.planner.step_time import StepParts
from unisono.planner.why_not import why_not

JOB = Job(
    model=PRESETS["llama-3-70b"],
    device=DEVICES["h100"],
    num_devices=128,
    precision="bf16",
    global_batch=256,
    seq_len=8192,
    pins={},
)
SCALED = {
    "network bandwidth": "network_bytes_per_s",
    "link bandwidth": "link_bytes_per_s",
    "device memory": "memory_bytes",
}


def found(job: Job = JOB) -> Sensitivity:
    return sensitivity(job, compare(job))


def changed(job: Job, name: str, factor: float) -> Job:
    """``job`` with the property really changed."""
    if name == "devices":
        return replace(job, num_devices=int(job.num_devices * factor))
    if name == "global batch":
        return replace(job, global_batch=int(job.global_batch * factor))
    field = SCALED[name]
    return replace(job, device=replace(job.device, **{field: getattr(job.device, field) * factor}))


def best_of(job: Job) -> PredictedLayout | None:
    return compare(job).best(memory_limit(job))


def test_each_change_has_the_layout_that_a_search_with_it_finds() -> None:
    flips = found().perturbations
    assert [(flip.changed, flip.factor) for flip in flips] == [
        (name, factor) for name in PROPERTIES for factor in FACTORS
    ]
    own = best_of(JOB)
    assert own is not None
    for flip in flips:
        best = best_of(changed(JOB, flip.changed, flip.factor))
        assert (flip.best is None) == (best is None)
        if best is None or flip.best is None:
            assert flip.reason
            continue
        axes, before = ([getattr(each.layout, axis) for axis in AXES if axis != "dp_shard"] for each in (best, own))
        assert [getattr(flip.best.layout, axis) for axis in AXES if axis != "dp_shard"] == axes
        assert flip.best.step_s == pytest.approx(best.step_s)
        assert flip.is_other or axes == before
    assert {flip.is_other for flip in flips} == {True, False}


def test_fewer_devices_have_the_best_of_their_own_search() -> None:
    counts = found().device_counts
    assert [each.num_devices for each in counts] == [128, 64, 32]
    for each in counts:
        best = best_of(replace(JOB, num_devices=each.num_devices))
        assert each.best == best
        assert best is not None
        assert each.tokens_per_s == pytest.approx(256 * 8192 / best.step_s / each.num_devices)
    every = [(layout, each.num_devices) for each in counts for layout in each.front]
    for one, devices in every:
        beaten = [
            other
            for other, fewer in every
            if other is not one
            and fewer <= devices
            and other.step_s <= one.step_s
            and other.needed_bytes <= one.needed_bytes
        ]
        assert not beaten


def test_a_change_without_a_layout_says_why() -> None:
    few = replace(JOB, num_devices=16, global_batch=1, pins={"tp": 8, "pp": 1, "cp": 1})
    assert compare(replace(few, num_devices=8)).layouts
    job = replace(few, num_devices=8)
    flips = {(flip.changed, flip.factor): flip for flip in found(job).perturbations}
    assert flips["devices", 2].best is None
    assert flips["devices", 2].reason.startswith("16 devices, a global batch of 1 sequences")
    assert flips["global batch", 0.5].reason == "a half of 1 sequences is no whole number"


def test_every_layout_that_was_not_chosen_has_a_reason() -> None:
    """More time, or more memory than there is; and of what decides, the part is named that grows most."""
    result = choose(JOB, compare(JOB))
    answer = Answer.of(JOB, result, found())
    assert answer.prediction is not None
    for (_, _, each), reason in zip(result.changes, answer.reasons, strict=True):
        if each.needed_bytes > result.limit_bytes:
            assert reason.startswith("does not fit: ")
            assert any(part in reason for part in ("states", "activations", "gathered", "logits", "recomputed"))
        else:
            assert reason == "as fast, and not simpler" or reason.startswith("+")
    smaller = replace(answer.prediction, step_s=answer.prediction.step_s * 1.1)
    slower = replace(smaller, parts_s={**smaller.parts_s, "bubble": smaller.parts_s["bubble"] + 1})
    assert why_not(answer.prediction, slower, result.limit_bytes) == "+10.0%, mostly bubble"


def test_every_number_of_a_prediction_has_a_source() -> None:
    assert {*StepParts.__slots__, *MemoryParts.__slots__} <= LAYOUT_SOURCES.keys()
    assert {source.kind for source in LAYOUT_SOURCES.values()} == {"exact", "modelled", "fitted"}
    assert all(source.text for source in LAYOUT_SOURCES.values())
    assert not any(
        "step_time.json" in LAYOUT_SOURCES[name].text for name in MemoryParts.__slots__
    )  # it has those of times
