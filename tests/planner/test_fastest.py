"""The search for the fastest plan of a run: what it tries, keeps, and chooses, with times that are known."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unisono.config import load_config
from unisono.dist import JobSpec
from unisono.errors import PlanError
from unisono.measure.calibration import Calibration
from unisono.plan.options import PlanOptions
from unisono.plan.pipeline_schedule import Kind, stage_index
from unisono.plan.plan import VERSION, Plan
from unisono.planner.fastest import FastestPlanSearch, changes_in_words, kept_fields, pinned_options
from unisono.planner.learned import Learned
from unisono.planner.plan_record import used_axes
from unisono.train.config import RunConfig
from unisono.train.rank_timing import PassDuration, RankTiming
from unisono.train.setup import resolve_plan

GIB = 2**30


@dataclass
class Trials:
    """A machine on which the work of a plan is known: it grows with passes and recompute, memory with what is kept."""

    tp_speedup: float = 1.0
    ep_speedup: float = 1.0
    largest: float = math.inf
    timed: list[Plan] = field(default_factory=list)

    def trace(self, options: PlanOptions, num_ranks: int, ranks: Any = ()) -> tuple[Plan, list[Any]]:
        plan = resolve_plan(options, JobSpec(world_size=num_ranks))[1]
        kept = {"none": 1.0, "selective": 0.6, "full": 0.3}[plan.recompute.mode]
        size = plan.batch.micro_batch * kept + 4 / (plan.mesh.dp_shard * plan.mesh.tp * plan.mesh.pp)
        return plan, [SimpleNamespace(peak=SimpleNamespace(bytes=size * GIB), confidence="exact")]

    def time(self, options: PlanOptions, num_ranks: int) -> list[RankTiming]:
        plan, _ = self.trace(options, num_ranks)
        if plan.batch.micro_batch > self.largest:
            raise torch.OutOfMemoryError
        self.timed.append(plan)
        step_s = 8 / num_ranks + 0.1 * plan.batch.accumulation
        step_s *= {"none": 1.0, "selective": 1.1, "full": 1.3}[plan.recompute.mode]
        step_s /= self.tp_speedup if plan.mesh.tp > 1 else 1
        step_s += 0.2 * (plan.mesh.dp_shard > 1) + 0.4 * (plan.mesh.cp > 1)
        step_s /= self.ep_speedup if plan.mesh.ep > 1 else 1
        return [_timing(plan, place, step_s) for place in range(plan.mesh.pp)]


def _timing(plan: Plan, place: int, step_s: float) -> RankTiming:
    schedule, chunks = plan.pipeline.schedule, plan.stages_per_rank
    stages = tuple(stage_index(schedule, plan.mesh.pp, place, chunk) for chunk in range(chunks))
    each_s = step_s / plan.batch.accumulation / chunks / 3
    parts: dict[Kind, float] = {"F": 1, "I": 1, "W": 1} if schedule == "zbv" else {"F": 1, "B": 2}
    passes = tuple(PassDuration(kind, stage, part * each_s) for stage in stages for kind, part in parts.items())
    return RankTiming(
        rank=place,
        stages=stages,
        step_s=step_s,
        steps=3,
        spread_frac=0.0,
        traffic=(),
        passes=passes if plan.mesh.pp > 1 else (),
    )


def search(
    trials: Trials,
    memory_gib: float,
    *,
    num_ranks: int = 2,
    budget_s: float = 60.0,
    pinned: Any = (),
    num_experts: int = 0,
    **options: Any,
) -> Any:
    given = PlanOptions(device="cpu", **{"global_batch": 8, **options})
    found = FastestPlanSearch(
        trials=trials,  # type: ignore[arg-type]
        options=given,
        pinned=frozenset(pinned),
        num_ranks=num_ranks,
        memory_bytes=round(memory_gib * GIB),
        num_experts=num_experts,
        links=Calibration(),
        budget_s=budget_s,
        tried=lambda candidate: None,
    )
    return found, found.run()


def test_the_configured_plan_stays_where_nothing_is_faster() -> None:
    found, best = search(Trials(), 100)
    assert best.settings == {}
    assert found.candidates[0] is best


def test_another_axis_is_taken_where_it_is_faster() -> None:
    assert search(Trials(tp_speedup=2), 100)[1].settings["tp"] == 2


def test_what_a_strategy_file_places_stays_and_the_other_axes_are_searched(tmp_path: Path) -> None:
    """Semi-automatic: the file has ``tp`` and placements of parameters; the search has the rest."""
    placed = [{"module": "blocks.*", "parameter": "up.weight", "dims": ["tp", None]}]
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"version": VERSION, "mesh": {"tp": 2}, "tensor_parallel": {"placements": placed}}))
    found, best = search(Trials(), 100, num_ranks=4, pinned=("tp",), file=str(file))
    plans = [candidate.plan for candidate in found.candidates if candidate.plan is not None]
    assert {plan.mesh.tp for plan in plans} == {2}
    assert all(len(plan.tensor_parallel.placements) == 1 for plan in plans)
    tried = {(plan.mesh.pp, plan.mesh.cp, plan.mesh.dp_replicate, plan.mesh.dp_shard) for plan in plans}
    assert tried >= {(1, 1, 2, 1), (1, 1, 1, 2), (2, 1, 1, 1), (1, 2, 1, 1)}
    refused = {candidate.refused for candidate in found.candidates if candidate.plan is None}
    assert "not possible: placements with sequence_parallel True" in refused
    assert "not possible: placements with schedule 'zbv'" in refused
    assert best.plan in plans


@pytest.mark.parametrize("cut", [[1, 3], [2, 2]], ids=str)
def test_a_cut_of_a_strategy_file_stays_beside_its_pipeline(tmp_path: Path, cut: list[int]) -> None:
    file = tmp_path / "plan.json"
    file.write_text(
        json.dumps(
            {"version": VERSION, "mesh": {"pp": 2}, "batch": {"micro_batch": 2}, "pipeline": {"layers_per_stage": cut}}
        )
    )
    resolved = load_config(RunConfig, overrides=["plan.global_batch=8", f"plan.file={file}"])
    found, best = search(Trials(), 100, num_ranks=4, pinned=pinned_options(resolved), file=str(file))
    plans = [candidate.plan for candidate in found.candidates if candidate.plan is not None]
    assert len(plans) > 3
    assert {plan.pipeline.layers_per_stage for plan in plans} == {tuple(cut)}
    assert {plan.mesh.pp for plan in plans} == {2}
    assert {(plan.mesh.tp, plan.mesh.cp, plan.mesh.dp_shard) for plan in plans} >= {(1, 1, 1), (2, 1, 1), (1, 1, 2)}
    assert best.plan in plans
    assert kept_fields(found.options) == ["pipeline.layers_per_stage"]


@pytest.mark.parametrize(("num_experts", "ep"), [(0, 1), (3, 1), (8, 4)])
def test_experts_are_shared_where_there_are_any(num_experts: int, ep: int) -> None:
    found, best = search(Trials(ep_speedup=2), 100, num_ranks=4, num_experts=num_experts)
    assert (best.plan.mesh.ep > 1) == (ep > 1)
    tried = {candidate.plan.mesh.ep for candidate in found.candidates if candidate.plan is not None}
    assert tried == ({1, 2, 4} if num_experts == 8 else {1})


def test_a_plan_that_does_not_fit_is_never_run() -> None:
    trials = Trials()
    found, best = search(trials, 3.5)
    assert best.plan.recompute.mode != "none" or best.plan.batch.micro_batch == 1
    for plan in trials.timed:
        assert trials.trace(options_of(plan), 2)[1][0].peak.bytes <= 3.5 * GIB
    refused = [candidate.refused for candidate in found.candidates if candidate.timed is None]
    assert any("too much" in reason for reason in refused)


def test_what_earlier_runs_took_decides() -> None:
    trials, learned = Trials(tp_speedup=1.5), {("tp",): Learned(factor=3.0, runs=4)}
    found, best = search(trials, 100)
    assert best.settings["tp"] == 2
    corrected = FastestPlanSearch(
        trials=trials,  # type: ignore[arg-type]
        options=found.options,
        pinned=found.pinned,
        num_ranks=found.num_ranks,
        memory_bytes=found.memory_bytes,
        num_experts=0,
        links=found.links,
        budget_s=60.0,
        tried=lambda candidate: None,
        learned=lambda plan: learned.get(used_axes(plan), Learned()),
    )
    chosen = corrected.run()
    assert chosen is not None
    assert chosen.settings.get("tp", 1) == 1
    slow = next(each for each in corrected.candidates if each.settings.get("tp") == 2 and each.timed)
    assert slow.timed is not None
    assert slow.step_s == 3 * slow.timed.step_s


def options_of(plan: Plan) -> PlanOptions:
    mesh = plan.mesh
    return PlanOptions(
        device="cpu",
        global_batch=8,
        micro_batch=plan.batch.micro_batch,
        recompute=plan.recompute.mode,  # type: ignore[arg-type]
        dp_shard=mesh.dp_shard,
        tp=mesh.tp,
        pp=mesh.pp,
        cp=mesh.cp,
        schedule=plan.pipeline.schedule,
    )


def test_nothing_fits() -> None:
    found, best = search(Trials(), 0.1)
    assert best is None
    assert all(candidate.refused for candidate in found.candidates)


@pytest.mark.parametrize("memory_gib", [2.5, 3.0, 4.0, 5.0, 8.0, 100.0])
def test_more_memory_is_never_slower(memory_gib: float) -> None:
    slower = search(Trials(), memory_gib)[1]
    faster = search(Trials(), memory_gib * 1.5)[1]
    assert slower is None or faster.timed.step_s <= slower.timed.step_s


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 6, 8])
def test_plans_are_legal_and_each_has_a_time_or_a_reason(num_ranks: int) -> None:
    found, best = search(Trials(), 100, num_ranks=num_ranks, global_batch=24)
    assert best is not None
    for candidate in found.candidates:
        assert (candidate.timed is None) == bool(candidate.refused)
        if candidate.plan is not None:
            assert candidate.plan.mesh.world_size == num_ranks
    plans = [candidate.plan for candidate in found.candidates if candidate.plan is not None]
    assert all(plan not in plans[:place] for place, plan in enumerate(plans))


def test_the_same_input_gives_the_same_plan() -> None:
    once, again = (search(Trials(tp_speedup=1.5), 4.0, num_ranks=4) for _ in range(2))
    assert once[1] == again[1]
    assert once[0].candidates == again[0].candidates


@pytest.mark.parametrize("pins", [{"tp": 2}, {"micro_batch": 2}, {"recompute": "full"}, {"dp_shard": 2, "zero": 1}])
def test_what_the_user_set_stays(pins: dict[str, Any]) -> None:
    found, _ = search(Trials(tp_speedup=3), 100, pinned=pins, **pins)
    for candidate in found.candidates:
        assert set(pins).isdisjoint(candidate.settings)


def test_what_is_set_is_pinned_also_where_it_is_the_default(tmp_path: Path) -> None:
    file = tmp_path / "part.json"
    file.write_text('{"mesh": {"cp": 1}, "recompute": {"mode": "none"}}')
    settings = ["plan.tp=1", "plan.global_batch=4", f"plan.file={file}"]
    assert pinned_options(load_config(RunConfig, overrides=settings)) == {"tp", "cp", "recompute"}
    assert pinned_options(load_config(RunConfig, overrides=[])) == set()


def test_a_device_that_runs_out_of_memory_ends_no_search() -> None:
    found, best = search(Trials(largest=2), 100)
    assert best.plan.batch.micro_batch == 2
    assert found.candidates[0].refused.startswith("out of memory")


def test_no_plan_is_tried_after_its_time() -> None:
    found, best = search(Trials(), 100, budget_s=0.0)
    assert best.settings == {}
    assert {candidate.refused for candidate in found.candidates[1:]} == {"not tried: the time for the search was over"}


def test_a_configured_plan_that_is_not_legal_is_an_error() -> None:
    with pytest.raises(PlanError, match="tp"):
        search(Trials(), 100, tp=4)


def test_changes_are_named_as_they_are_set() -> None:
    assert changes_in_words({"tp": 2, "sequence_parallel": True}) == "tp=2 sequence_parallel=true"
    assert changes_in_words({}) == "as configured"
