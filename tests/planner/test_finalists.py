"""The finalists of a search: what traces say decides, counts of others follow, and no more are traced than may be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from unisono.planner.answer import Answer
from unisono.planner.decision_flips import sensitivity
from unisono.planner.devices import DEVICES
from unisono.planner.finalists import MOST_FINALISTS, Finalists, TracedMemory, trace_finalists, untraceable
from unisono.planner.layout import Layout
from unisono.planner.layout_space import Job
from unisono.planner.model_presets import PRESETS
from unisono.planner.peak_memory import peak_memory
from unisono.planner.search import SearchResult, choose, compare, memory_limit

JOB = Job(
    model=PRESETS["llama-3-70b"],
    device=DEVICES["h100"],
    num_devices=64,
    precision="bf16",
    global_batch=128,
    seq_len=8192,
    pins={},
)
Memory = Callable[[Layout], TracedMemory]


def counted(layout: Layout) -> float:
    return float(peak_memory([layout]).counted[0])


def scaled(none: float, full: float) -> Memory:
    """Traces by which blocks that are recomputed take ``full`` times what is counted, and others ``none`` times."""

    def memory_of(layout: Layout) -> TracedMemory:
        ends = [replace(layout, recompute=mode, recomputed_blocks=()) for mode in ("none", "full")]
        kept, least = none * counted(ends[0]), full * counted(ends[1])
        share = {"none": 1.0, "selective": 0.5, "full": 0.0}.get(
            layout.recompute, 1 - sum(layout.recomputed_blocks) / layout.model.layers
        )
        return TracedMemory(peak_bytes=share * kept + (1 - share) * least)

    return memory_of


def found(job: Job, memory_of: Memory) -> tuple[SearchResult, Finalists]:
    job, table, finalists = trace_finalists(job, memory_of)
    return choose(job, table), finalists


def test_what_is_counted_right_is_traced_first_and_stays() -> None:
    result, finalists = found(JOB, lambda layout: TracedMemory(peak_bytes=counted(layout)))
    first, *others = finalists.traced
    assert first.fits
    assert result.best is not None
    assert first.layout == result.best.layout
    assert all(not each.fits and each.step_s < first.step_s for each in others)  # might have fitted as traced
    plain = choose(JOB, compare(replace(JOB, pins={"offload": False})))
    assert result.best == plain.best
    assert result.num_layouts == plain.num_layouts


@pytest.mark.parametrize("factor", [1.3, 2.0, 3.0])
def test_counts_that_are_too_low_alike_are_corrected_by_one_trace(factor: float) -> None:
    """The answer is that of a search with as much less memory."""
    result, finalists = found(JOB, lambda layout: TracedMemory(peak_bytes=factor * counted(layout)))
    smaller = replace(JOB, pins={"offload": False}, memory_bytes=JOB.device.memory_bytes / factor)
    less = choose(smaller, compare(smaller)).best
    assert less is not None
    assert result.best is not None
    assert result.best.layout == less.layout
    assert result.best.needed_bytes == pytest.approx(factor * counted(less.layout))
    assert [each.fits for each in finalists.traced[:2]] == [False, True]


@pytest.mark.parametrize("factors", [(2.5, 1.1), (1.8, 1.0), (1.4, 2.2)])
def test_the_answer_was_traced_and_no_faster_layout_fits(factors: tuple[float, float]) -> None:
    memory_of = scaled(*factors)
    result, finalists = found(JOB, memory_of)
    assert result.best is not None
    traced = finalists.of(result.best.layout)
    assert traced is not None
    assert traced.fits
    assert result.best.needed_bytes == traced.traced.peak_bytes
    assert 2 <= len(finalists.traced) <= MOST_FINALISTS
    table = compare(replace(JOB, pins={"offload": False}))
    fitting = [
        step_s
        for step_s, each in zip(table.step_s, table.layouts, strict=True)
        if memory_of(each).peak_bytes <= memory_limit(JOB)
    ]
    assert result.best.step_s <= min(fitting) * (1 + 1e-9)


def test_where_none_fits_the_nearest_is_told_after_as_many_traces_as_may_be() -> None:
    sizes = iter(np.linspace(1.01, 1.08, 100))  # each just too large
    result, finalists = found(JOB, lambda layout: TracedMemory(peak_bytes=next(sizes) * memory_limit(JOB)))
    assert len(finalists.traced) == MOST_FINALISTS
    assert not any(each.fits for each in finalists.traced)
    assert result.best is None
    huge, all_too_large = found(JOB, lambda layout: TracedMemory(peak_bytes=1000 * counted(layout)))
    assert huge.best is None
    assert all_too_large.nearest is None
    assert len(all_too_large.traced) < MOST_FINALISTS


def test_a_layout_that_cannot_be_traced_is_no_answer() -> None:
    def memory_of(layout: Layout) -> TracedMemory:
        return TracedMemory(refused="too wide") if layout.tp > 1 else TracedMemory(peak_bytes=counted(layout))

    job = replace(JOB, model=PRESETS["llama-3-8b"], num_devices=8, global_batch=64, pins={"tp": 2})
    result, finalists = found(job, memory_of)
    assert result.best is None
    assert {each.traced.refused for each in finalists.traced} == {"too wide"}
    assert len(finalists.traced) == MOST_FINALISTS


def test_predictions_have_the_memory_of_the_trace_and_of_its_corrections() -> None:
    job, table, finalists = trace_finalists(JOB, scaled(2.5, 1.1))
    answer = Answer.of(job, choose(job, table), sensitivity(job, table), finalists)
    assert answer.best is not None
    assert answer.prediction is not None
    assert answer.prediction.memory["traced"] == answer.best.needed_bytes
    assert answer.prediction.needed_bytes == pytest.approx(answer.best.needed_bytes)
    for (_, _, each), reason in zip(answer.found.changes, answer.reasons, strict=True):
        assert reason.startswith("does not fit") == (each.needed_bytes > answer.found.limit_bytes), reason


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("gpt3-175b", "no gate"),
        ("deepseek-v3", "latent attention"),
        ("llama-4-scout", "shared expert"),
        ("llama-3-405b", ""),
        ("mixtral-8x7b", ""),
    ],
)
def test_models_that_no_family_of_unisono_builds_are_not_guessed(model: str, reason: str) -> None:
    said = untraceable(PRESETS[model])
    assert reason in said
    assert bool(said) == bool(reason)
    assert "biases" in untraceable(replace(PRESETS["llama-3-8b"], other_params=5))
