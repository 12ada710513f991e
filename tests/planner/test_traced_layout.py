"""Traced memory of layouts: as much as a trace of the whole step says, from a few blocks and micro-batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from unisono.parallel.pipeline import executor
from unisono.planner import traced_layout
from unisono.planner.devices import DEVICES
from unisono.planner.layout import Layout
from unisono.planner.layout_space import Job
from unisono.planner.layout_strategy import plan_of
from unisono.planner.model_shape import ModelShape
from unisono.planner.peak_memory import peak_memory
from unisono.planner.search import compare
from unisono.planner.traced_layout import LayoutTracer
from unisono.train.dry_run import trace_ranks

SHAPE = ModelShape(layers=4, hidden=256, heads=8, kv_heads=4, head_dim=32, ffn=704, gated=True, vocab=2000)
MOST_ERROR = 0.005  # of the peak
PIPELINE: dict[str, Any] = {"pp": 2, "stages_per_rank": 1, "schedule": "1f1b"}


@pytest.fixture(autouse=True)
def sends_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent is freed by the next message in traces of whole steps too, as with the back ends of accelerators."""
    monkeypatch.setattr(executor, "_is_completed", lambda work: True)


def layout(*, model: ModelShape = SHAPE, micro_batches: int = 4, dp: int = 16, **values: Any) -> Layout:
    """A layout of more than the ranks of a host, which share memory otherwise."""
    ranks = values.get("tp", 1) * values.get("pp", 1) * values.get("cp", 1) * dp
    values = {"zero": 0, "dp_shard": dp if values.get("zero") else 1, **values}
    return Layout(
        model=model,
        device=DEVICES["h100"],
        precision="bf16",
        num_devices=ranks,
        cut="balanced",
        micro_batch=2,
        global_batch=2 * dp * micro_batches,
        seq_len=256,
        **values,
    )


def whole_step(given: Layout) -> int:
    """The highest peak of a rank in a trace of the whole step of all places of the pipeline."""
    plan = plan_of(given)
    inputs = traced_layout._inputs(given.model, given, plan)
    return max(rank.peak.bytes for rank in trace_ranks(inputs, plan, given.num_devices))


def check(given: Layout) -> None:
    found = LayoutTracer().memory(given)
    assert not found.refused
    assert found.peak_bytes == pytest.approx(whole_step(given), rel=MOST_ERROR)


def test_a_pipeline_is_put_together_from_short_ones() -> None:
    check(layout(pp=2, stages_per_rank=1, schedule="gpipe", micro_batches=2))


@pytest.mark.full
@pytest.mark.parametrize("recompute", ["none", "selective", "full", "partial"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
def test_schedules_and_recompute(schedule: str, recompute: str) -> None:
    stages = 2 if schedule == "interleaved" else 1
    blocks = ((2, 1, 0, 1) if stages == 2 else (2, 1)) if recompute == "partial" else ()
    shape = replace(SHAPE, layers=6 * stages)
    given: dict[str, Any] = {"pp": 2, "stages_per_rank": stages, "schedule": schedule}
    check(layout(model=shape, recompute=recompute, recomputed_blocks=blocks, **given))


@pytest.mark.full
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_zero_bubble_and_tensor_parallel(tp: int) -> None:
    check(layout(pp=2, stages_per_rank=2, schedule="zbv", tp=tp))


@pytest.mark.full
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("pp", [1, 2])
def test_shared_states(zero: int, pp: int) -> None:
    pipeline = PIPELINE if pp > 1 else {}
    check(layout(model=replace(SHAPE, layers=6), zero=zero, dp=16, tp=2, **pipeline))


@pytest.mark.full
@pytest.mark.parametrize(
    "values",
    [
        {"zero": 3, "dp": 4, "recompute": "selective", "tp": 4},
        {"zero": 3, "dp": 8, "cp": 2},
        {"zero": 1, "dp_shard": 4, "tp": 2, **PIPELINE},
        {"micro_batches": 1, "dp": 9},  # as many as are traced, between which the CPU shares memory
        {"recompute": "partial", "recomputed_blocks": (3,), "dp": 9},
        {"model": replace(SHAPE, tied=True), **PIPELINE},
        {"model": replace(SHAPE, experts=4, experts_per_token=2), "zero": 1, "ep": 2, **PIPELINE},
    ],
    ids=["zero-3", "sequences", "hybrid", "one-micro-batch", "partial", "tied", "experts"],
)
def test_other_axes(values: dict[str, Any]) -> None:
    check(layout(**values))


@pytest.mark.full
@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize(("recompute", "least"), [("none", 0.98), ("selective", 0.93)])
def test_a_search_counts_what_tokens_add(recompute: str, least: float, tp: int) -> None:
    """Of a sequence twice as long, with few logits, whose loss is counted otherwise: 1.01 and 1.00, selective 0.95."""
    few = replace(SHAPE, layers=8, vocab=64)
    job = Job(
        model=few,
        device=DEVICES["h100"],
        num_devices=2 * tp,
        precision="bf16",
        global_batch=6,
        seq_len=256,
        pins={"tp": tp, "pp": 1, "zero": 1, "micro_batch": 1, "recompute": recompute},
    )
    longer = replace(job, seq_len=512)
    (one,), (two,) = (
        [it for it in compare(each).layouts if it.cp == 1 and it.dp_shard == 2 and it.recompute == recompute]
        for each in (job, longer)
    )
    tracer = LayoutTracer()
    traced = tracer.memory(two).peak_bytes - tracer.memory(one).peak_bytes
    added = float(np.diff(peak_memory([one, two]).counted)[0])
    assert least < added / traced < 1.02


def test_what_layouts_have_in_common_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[Layout] = []
    trace = traced_layout._trace

    def watched(short: Layout) -> Any:
        traced.append(short)
        return trace(short)

    monkeypatch.setattr(traced_layout, "_trace", watched)
    tracer, shape = LayoutTracer(), replace(SHAPE, layers=32)
    partial = layout(
        model=shape, pp=4, stages_per_rank=1, schedule="1f1b", recompute="partial", recomputed_blocks=(3,) * 4
    )
    some = tracer.memory(partial)
    assert [short.recompute for short in traced] == ["partial", "none"]  # all blocks of the first are recomputed
    more = tracer.memory(replace(partial, recomputed_blocks=(6,) * 4))
    none = tracer.memory(replace(partial, recompute="none", recomputed_blocks=()))
    full = tracer.memory(replace(partial, recompute="full", recomputed_blocks=()))
    shorter = tracer.memory(
        replace(
            partial,
            num_devices=32,
            pp=2,
            stages_per_rank=4,
            schedule="interleaved",
            recompute="none",
            recomputed_blocks=(),
        )
    )
    assert len(traced) == 3
    assert none.peak_bytes > some.peak_bytes > more.peak_bytes > full.peak_bytes > 0
    assert shorter.peak_bytes > none.peak_bytes


def test_a_layout_that_no_run_has_is_told() -> None:
    said = LayoutTracer().memory(replace(layout(tp=2), precision="fp8"))
    assert "fp8" in said.refused
    assert said.peak_bytes == 0
