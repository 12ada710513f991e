"""Layouts of a search as strategy files: legal for a run, with all blocks, and true to the layout."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from unisono.errors import PlanError
from unisono.plan.options import PlanOptions
from unisono.plan.resolve import derive_plan
from unisono.planner.devices import DEVICES
from unisono.planner.layout_space import SCHEDULES, Job, Space
from unisono.planner.layout_strategy import ACCELERATOR, plan_of, strategy, write_strategy
from unisono.planner.model_presets import PRESETS
from unisono.planner.search import choose, compare, memory_limit

JOB = Job(
    model=PRESETS["mixtral-8x7b"],
    device=DEVICES["h100"],
    num_devices=64,
    precision="bf16",
    global_batch=256,
    seq_len=65536,
    pins={},
)


def test_every_layout_that_is_compared_is_a_legal_plan() -> None:
    """Sharded states in pipelines, interleaved stages, experts and divided sequences: none breaks a rule of a run."""
    layouts = Space(JOB).layouts
    seen: set[tuple[object, ...]] = set()
    for layout in layouts[::7]:
        plan = plan_of(layout)
        assert plan.mesh.world_size == layout.num_devices
        assert (plan.mesh.shard_degree if layout.zero else 1) == layout.state_ranks
        assert plan.batch.accumulation == layout.num_micro_batches
        assert not plan.pipeline.layers_per_stage or sum(plan.pipeline.layers_per_stage) == layout.model.layers
        seen.add((layout.zero, layout.pp > 1, layout.stages_per_rank > 1, layout.ep > 1, layout.cp > 1))
    assert {(zero, True, True, False, False) for zero in (0, 1, 2, 3)} <= seen
    assert (3, True, True, True, True) in seen


def test_a_strategy_file_gives_the_plan_again(tmp_path: Path) -> None:
    for pins in (
        {},
        {"pp": 4, "stages_per_rank": 4},
        {"cp": 1, "pp": 8, "tp": 8, "schedule": "zbv"},
        {"cp": 1, "pp": 8, "schedule": "gpipe"},
        {"tp": 4, "zero": 2, "pp": 1},
        {"cp": 1, "ep": 8},
    ):
        job = replace(JOB, pins=pins, seq_len=4096 if pins.get("cp") == 1 else 65536)
        best = compare(job).best(memory_limit(job))
        assert best is not None
        file = tmp_path / "plan.json"
        write_strategy(file, best.layout)
        groups = json.loads(file.read_text())
        assert groups == strategy(best.layout)
        fields = sum(len(group) for group in groups.values() if isinstance(group, dict))
        assert len(file.read_text().splitlines()) == 3 + 2 * (len(groups) - 1) + fields  # a line per field
        read = derive_plan(PlanOptions(file=str(file)), world_size=64, device="cpu", native_bf16=True)
        assert read == plan_of(best.layout)
        assert read.pipeline.schedule == pins.get("schedule", read.pipeline.schedule)
        mesh = groups["mesh"]
        assert math.prod(mesh[axis] for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")) == 64


def test_offload_is_that_of_an_accelerator(tmp_path: Path) -> None:
    job = replace(JOB, seq_len=4096, device=DEVICES["gh200"], pins={"offload": True, "pp": 4})
    best = choose(job, compare(job)).best
    assert best is not None
    groups = strategy(best.layout)
    assert ("device" in groups["mesh"], groups["recompute"]) == (False, {"mode": "none", "offload": True})
    write_strategy(tmp_path / "plan.json", best.layout)
    options = PlanOptions(file=str(tmp_path / "plan.json"))
    read = derive_plan(options, world_size=64, device=ACCELERATOR, native_bf16=True)
    assert read == plan_of(best.layout)
    assert read.recompute.offload
    with pytest.raises(PlanError, match="offload on the device 'cpu'"):
        derive_plan(options, world_size=64, device="cpu", native_bf16=True)


def test_each_schedule_that_is_compared_is_a_legal_plan() -> None:
    layouts = [
        layout for layout in Space(replace(JOB, seq_len=4096, num_devices=16, global_batch=24)).layouts if layout.pp > 1
    ]
    assert {layout.schedule for layout in layouts} == set(SCHEDULES)
    for layout in [each for each in layouts if each.schedule != "interleaved"][::5]:
        assert plan_of(layout).pipeline.schedule == layout.schedule


@pytest.mark.parametrize("pins", [{"pp": 1}, {"pp": 4, "stages_per_rank": 4}, {"pp": 4, "stages_per_rank": 1}], ids=str)
def test_recomputed_blocks_are_those_of_each_stage(tmp_path: Path, pins: dict[str, int | str]) -> None:
    job = replace(JOB, pins=pins | {"recompute": "partial"}, seq_len=4096, memory_bytes=40 * 2**30)
    best = choose(job, compare(job)).best
    assert best is not None
    file = tmp_path / "plan.json"
    write_strategy(file, best.layout)
    read = derive_plan(PlanOptions(file=str(file)), world_size=64, device="cpu", native_bf16=True)
    assert read == plan_of(best.layout)
    assert read.recompute.mode == "full"
    counts, blocks = read.recompute.blocks_per_stage, read.pipeline.layers_per_stage or (job.model.layers,)
    assert counts == best.layout.recomputed_blocks
    assert 0 < sum(counts) < job.model.layers
    assert all(count <= of_stage for count, of_stage in zip(counts, blocks, strict=True))


def test_what_no_run_computes_is_refused() -> None:
    layout = next(layout for layout in Space(replace(JOB, seq_len=4096)).layouts if layout.tp > 1)
    with pytest.raises(PlanError) as raised:
        plan_of(replace(layout, precision="fp8"))
    assert raised.value.problems[0].given == f"precision fp8 with tp {layout.tp}"
