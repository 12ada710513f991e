"""Traced memory against executed ranks over pairs of settings, of Hugging Face models, with real routing, and of few blocks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import matrix
import pytest
from matrix import Case
from pool import Pool
from traced_memory import EXECUTED_STEPS, compare, executed, trainer_of, without_buffers

from unisono.dist import JobSpec, World
from unisono.measure.live_storages import Peak, Site
from unisono.train.block_traces import extrapolated
from unisono.train.dry_run import RankMemory, plan_of_ranks, trace_places, trace_ranks

GRID: dict[str, tuple[Any, ...]] = {
    "model": ("gpt", "gpt-moe", "gpt-moe-capped", "bert", "resnet"),
    "zero": (0, 1, 2, 3),
    "recompute": ("none", "selective", "full"),
    "tp": (1, 2, 4),
    "schedule": ("", "gpipe", "1f1b", "interleaved", "zbv"),
}
Point = tuple[Any, ...]
RANKS = 4
# blocks: one for each stage. Micro-batches of a rank: GPipe has all in flight at once, 1F1B one more than that, interleaved ones
# come in groups of the ranks; without a pipeline the first makes the gradients, and the second adds to them
LEAST = {"": (2, 2), "gpipe": (2, 2), "1f1b": (2, 3), "interleaved": (4, 4), "zbv": (4, 4)}
# what a rank of the small mixture holds in its highest step with real routing, over the trace with equal shares
DROPLESS_BAND = (0.95, 1.1)


def ranks_of(point: Point) -> int:
    _, zero, _, tp, schedule = point
    return tp * (2 if schedule else 1) * (2 if zero else 1)


def is_legal(point: Point) -> bool:
    model, zero, _, tp, schedule = point
    if model == "resnet" and (tp > 1 or schedule == "zbv"):
        return False
    return ranks_of(point) <= RANKS and not (schedule == "zbv" and zero)


def pairs_of(point: Point) -> set[tuple[tuple[int, Any], tuple[int, Any]]]:
    return set(itertools.combinations(enumerate(point), 2))


def pairwise_points() -> Iterator[Point]:
    """Points with each pair of values that any legal point has: always the first point with most pairs that are missing."""
    legal = [point for point in itertools.product(*GRID.values()) if is_legal(point)]
    missing = set().union(*map(pairs_of, legal))
    while missing:
        best = max(legal, key=lambda point: len(pairs_of(point) & missing))
        missing -= pairs_of(best)
        yield best


def case_of(point: Point) -> Case:
    model, zero, recompute, tp, schedule = point
    axes = {"pp": 2} if schedule else {}
    if zero:
        axes["dp_shard"] = 2
    elif ranks_of(point) < RANKS:
        axes["dp_replicate"] = 2
    if tp > 1:
        axes["tp"] = tp
    settings = {"recompute": recompute}
    settings |= {"zero": zero} if zero else {}
    settings |= {"schedule": schedule} if schedule else {}
    return Case(model=model, axes=axes, settings=settings)


def settings_of(case: Case) -> dict[str, Any]:
    """Of a step with as few operations as its schedule needs: what a trace takes is time for each operation."""
    blocks, micro_batches = LEAST[case.settings.get("schedule", "")]
    settings = matrix.settings_of(case)
    data_ranks = case.axes.get("dp_replicate", 1) * case.axes.get("dp_shard", 1)
    global_batch = data_ranks * micro_batches * settings["micro_batch"]
    return {**settings, "layers": blocks, "global_batch": global_batch, "steps": EXECUTED_STEPS}


CASES = [case_of(point) for point in pairwise_points()]


@pytest.mark.full
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_traced_memory_is_that_of_executed_ranks_over_pairs_of_settings(pool: Pool, tmp_path, case: Case) -> None:
    compare(pool, tmp_path, case.model, settings_of(case), case.ranks, once_a_stage=True)


@pytest.mark.full
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_model_of_hugging_face_is_traced_as_it_is_executed(pool: Pool, tmp_path, recompute: str) -> None:
    pytest.importorskip("transformers")
    case = Case(model="llama", axes={"dp_shard": 2}, settings={"recompute": recompute})
    compare(pool, tmp_path, case.model, {**matrix.settings_of(case), "steps": EXECUTED_STEPS}, case.ranks)


@pytest.mark.full
def test_a_mask_that_transformers_makes_for_a_trace_alone_is_counted(pool: Pool, tmp_path) -> None:
    pytest.importorskip("transformers")
    settings = {"dp_shard": 2, "layers": 2, "global_batch": 12, "micro_batch": 3, "steps": EXECUTED_STEPS}
    (traced,) = trainer_of(str(tmp_path), World(JobSpec(world_size=2)), "llama-sdpa", settings).dry_run(2)
    real, _ = pool.run(executed, "llama-sdpa", settings, ranks=2, timeout_s=240)
    assert 1.005 < without_buffers(traced.peak.by_kind) / without_buffers(real) < 1.1


@pytest.mark.full
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_memory_of_real_routing_lies_in_the_stated_band(pool: Pool, tmp_path, recompute: str) -> None:
    case = Case(model="gpt-moe", axes={"dp_shard": 2, "ep": 2}, settings={"recompute": recompute})
    settings = {**matrix.settings_of(case), "steps": EXECUTED_STEPS}
    traced = trainer_of(str(tmp_path), World(JobSpec(world_size=2)), case.model, settings).dry_run(2, [0, 1])
    real = pool.run(executed, case.model, settings, routes_equally=False, ranks=2, timeout_s=240)
    for rank, by_kind in zip(traced, real, strict=True):
        share = without_buffers(by_kind) / without_buffers(rank.peak.by_kind)
        assert DROPLESS_BAND[0] <= share <= DROPLESS_BAND[1]
        assert abs(share - 1) > 1e-4, "routed equally"


def both(tmp_path, model: str, layers: int, ranks: int, **settings: Any) -> tuple[RankMemory, RankMemory]:
    """From traces of a few blocks, and of all."""
    run = trainer_of(str(tmp_path), World(JobSpec(world_size=ranks)), model, {"layers": layers, **settings})
    (few,) = trace_ranks(run._inputs, run._given_plan, ranks, [ranks - 1])
    plan = plan_of_ranks(run._given_plan, ranks, [ranks - 1])
    plan = replace(plan, backend=replace(plan.backend, compile="off"))
    return few, trace_places(run._inputs, plan, [ranks - 1], {})[ranks - 1]


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "ranks", "settings"),
    [
        ("gpt", 1, {"recompute": "selective"}),
        ("gpt", 1, {"recompute": "none"}),
        ("gpt", 2, {"dp_shard": 2, "zero": 3, "recompute": "full"}),
        ("gpt", 2, {"dp_shard": 2, "zero": 1}),
        ("gpt", 4, {"dp_shard": 2, "tp": 2, "zero": 2, "recompute": "selective"}),
        ("gpt", 3, {"dp_shard": 3, "global_batch": 6, "fsdp.prefetch_blocks": 2}),
        ("gpt", 2, {}),
        ("gpt-moe", 2, {"dp_shard": 2, "recompute": "full"}),
        ("bert", 2, {"tp": 2, "sequence_parallel": True}),
        ("llama", 2, {"dp_shard": 2, "recompute": "full"}),
    ],
)
def test_memory_from_a_few_blocks_is_that_of_a_trace_of_all(
    tmp_path, model: str, ranks: int, settings: dict[str, Any]
) -> None:
    few, whole = both(tmp_path, model, 26, ranks, micro_batch=1 if "global_batch" in settings else 4, **settings)
    assert (few.traced_blocks, few.equal_blocks, whole.traced_blocks) == (5, 26, 0)
    assert few.peak.bytes == pytest.approx(whole.peak.bytes, rel=1e-3)
    assert few.peak.by_kind == pytest.approx(whole.peak.by_kind, rel=1e-3, abs=1e-3 * whole.peak.bytes)
    assert few.ledger == whole.ledger


def test_a_model_whose_blocks_differ_is_traced_as_a_whole(tmp_path) -> None:
    settings = {"micro_batch": 8, "recompute": "none"}
    run = trainer_of(str(tmp_path), World(JobSpec()), "gpt", {"layers": 26, **settings})
    for number, block in enumerate(run._inputs.model.blocks):
        block.told = number // 2  # not its own number
    (memory,) = run.dry_run(1)
    assert memory.traced_blocks == 0


def place(kind: str, by_kind: dict[str, int]) -> tuple[Site, Peak]:
    return Site(kind, "mm", 8), Peak(bytes=sum(by_kind.values()), by_kind=by_kind, operator="mm", kind=kind)


def test_the_highest_place_may_be_another_one_with_all_blocks() -> None:
    traces = [
        dict([place("forward", {"kept": 1000}), place("backward", {"kept": 10, "gradients": 20 * count})])
        for count in (3, 4, 5)
    ]
    peak = extrapolated(traces, 121)
    assert peak is not None
    assert (peak.kind, peak.bytes, peak.by_kind) == ("backward", 10 + 20 * 126, {"kept": 10, "gradients": 20 * 126})


def test_a_place_that_is_not_on_a_line_is_not_extrapolated_where_it_matters() -> None:
    bent = [dict([place("forward", {"kept": count**2})]) for count in (3, 4, 5)]
    assert extrapolated(bent, 121) is None
    beside = [
        {**trace, **dict([place("backward", {"kept": 1000 * count})])}
        for trace, count in zip(bent, (3, 4, 5), strict=True)
    ]
    peak = extrapolated(beside, 121)
    assert peak is not None
    assert peak.bytes == 126_000
