"""Batch arithmetic and the plan as data."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_edit import changed

from unisono.errors import PlanError
from unisono.plan.options import PlanOptions
from unisono.plan.plan import Plan, strategy_text
from unisono.plan.resolve import derive_plan
from unisono.plan.validate import validate_plan


def plan(world: int = 1, *, native_bf16: bool = False, **options: object) -> Plan:
    return derive_plan(PlanOptions(**options), world_size=world, device="cpu", native_bf16=native_bf16)


@given(st.integers(1, 5000), st.integers(1, 64), st.integers(0, 200))
def test_derived_batches_always_multiply_out(global_batch: int, world: int, micro_batch: int) -> None:
    if global_batch < world or micro_batch > -(-global_batch // world):
        with pytest.raises(PlanError):
            plan(world, global_batch=global_batch, micro_batch=micro_batch)
        return
    made = plan(world, global_batch=global_batch, micro_batch=micro_batch)
    largest_share = -(-global_batch // world)
    assert (
        (made.batch.accumulation - 1) * made.batch.micro_batch
        < largest_share
        <= made.batch.accumulation * made.batch.micro_batch
    )
    assert made.sync.kind == ("dist_sync" if world > 1 else "local")


def test_all_problems_come_at_once_with_what_would_work() -> None:
    with pytest.raises(PlanError) as raised:
        plan(4, global_batch=2, micro_batch=8, sync="local")
    assert str(raised.value) == (
        "3 problems\n"
        "1. global_batch 2 on 4 ranks\n"
        "  rule: every rank gets at least one sample of each step\n"
        "  so:   2 ranks would never see data\n"
        "  try:  plan.global_batch=4, or launch.num_processes=2\n"
        "2. micro_batch 8 with global_batch 2 on 4 ranks\n"
        "  rule: a micro-batch is part of a rank's share of the step\n"
        "  so:   the share is only 1 samples\n"
        "  try:  plan.micro_batch=1, or plan.global_batch=32\n"
        "3. sync 'local' on 4 ranks\n"
        "  rule: the local store sums inside one process only\n"
        "  so:   ranks would train different models\n"
        "  try:  plan.sync='dist_sync' (or leave it at 'auto')"
    )


def test_what_says_nothing_of_how_the_state_is_kept_is_refused() -> None:
    changes = {
        "fsdp.shard_threshold_numel": 100,
        "fsdp.ignored_modules": ("norm",),
        "fsdp.prefetch_blocks": -1,
        "bucket_bytes": 0,
    }
    wrong = changed(plan(2), **changes)
    with pytest.raises(PlanError) as raised:
        validate_plan(wrong, 2)
    assert str(raised.value) == (
        "4 problems\n"
        "1. shard_threshold_numel 100 with dp_shard 1 x cp 1\n"
        "  rule: it is 0 or more, and acts on a state that ranks share\n"
        "  so:   it would change nothing\n"
        "  try:  shard_threshold_numel=0, or dp_shard=2\n"
        "2. prefetch_blocks -1 with dp_shard 1 x cp 1\n"
        "  rule: it is 0 or more, and acts on a state that ranks share\n"
        "  so:   it would change nothing\n"
        "  try:  prefetch_blocks=0, or dp_shard=2\n"
        "3. fsdp.ignored_modules ['norm'] with dp_shard 1 x cp 1\n"
        "  rule: it names modules that are replicated where ranks share the state\n"
        "  so:   it would change nothing\n"
        "  try:  fsdp.ignored_modules=[], or dp_shard=2\n"
        "4. bucket_bytes 0\n"
        "  rule: one all-reduce sums this many bytes of gradients, at least 1 (a larger gradient has one of its own)\n"
        "  so:   nothing could be sent\n"
        "  try:  bucket_bytes=4194304"
    )


def test_bf16_is_chosen_only_where_it_is_native() -> None:
    assert plan(native_bf16=True).precision.compute == "bf16"
    assert plan(native_bf16=False).precision.compute == "fp32"
    assert plan(native_bf16=False, precision="bf16").precision.compute == "bf16"


def test_a_plan_is_data() -> None:
    one = plan(2, global_batch=12)
    assert Plan.from_json(one.to_json()) == one
    other = changed(one, recompute="full")
    assert one.diff(other) == {"recompute.mode": ("none", "full")}
    assert one.hash != other.hash
    assert one.hash == Plan.from_json(one.to_json()).hash
    named = changed(other, block_costs=(0.5, 1.0), **{"recompute.modules": ("blocks.*.ffn",)})
    assert Plan.from_json(named.to_json()) == named
    data = named.to_json()
    assert Plan.from_json({**data, "pipeline": {**data["pipeline"], "block_costs": [0.5, 1]}}) == named
    assert other.diff(named) == {
        "pipeline.block_costs": ([], [0.5, 1.0]),
        "recompute.modules": ([], ["blocks.*.ffn"]),
    }
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.mesh.device = "tpu"  # type: ignore[misc]


def test_lists_of_numbers_take_one_line_of_a_strategy_file() -> None:
    data = {
        "version": 1,
        "pipeline": {"layers_per_stage": [*range(80)], "block_costs": [1.5, -2e-07, 1e22], "empty": [], "one": [3]},
        "text": {"a": "[\n 1,\n 2\n]", "b": ["[\n1\n]"], "nested": [[1, 2], {"c": [4, 5]}], "names": ["x", "y"]},
    }
    text = strategy_text(data)
    assert json.loads(text) == data
    lines = text.splitlines()
    assert f'  "layers_per_stage": {[*range(80)]},' in lines
    assert '  "block_costs": [1.5, -2e-07, 1e+22],' in lines
    assert '  "one": [3]' in lines


def test_foreign_plans_are_refused_by_name() -> None:
    data = plan().to_json()
    with pytest.raises(PlanError, match="there is no field 'colour'"):
        Plan.from_json({**data, "colour": 3})
    with pytest.raises(PlanError, match=r"batch.global_batch = 'many': Expected `int`, got `str`"):
        Plan.from_json({**data, "batch": {**data["batch"], "global_batch": "many"}})
    with pytest.raises(PlanError, match=r"'mesh\.tp' is missing"):
        Plan.from_json({**data, "mesh": {name: value for name, value in data["mesh"].items() if name != "tp"}})
    with pytest.raises(PlanError) as raised:
        Plan.from_json(
            {
                **data,
                "tensor_parallel": {**data["tensor_parallel"], "rules": "many"},
                "fsdp": {**data["fsdp"], "zero": 4},
            }
        )
    assert [(each.rule, each.nearest) for each in raised.value.problems] == [
        ("a field holds a value of its type", "1 or 2 or 3"),
        ("a field holds a value of its type", "a list, as docs/plans.md has it"),
    ]


@pytest.mark.parametrize("value", ["x", [], 1.5, True])
def test_a_field_of_several_types_says_which(value: object) -> None:
    with pytest.raises(PlanError, match=r"a value of type int \| None"):
        Plan.from_json({"version": 3, "sync": {"staleness": value}})


@pytest.mark.parametrize("version", [1, 4, 2.0, "2", True, None, 2**70])
def test_a_plan_of_another_version_has_that_problem_alone(version: object) -> None:
    with pytest.raises(PlanError) as raised:
        Plan.from_json({"version": version, "colour": 3})
    (problem,) = raised.value.problems
    assert (problem.given, problem.nearest) == (
        f"a plan of version {version!r}",
        "a plan of version 3, or another unisono",
    )


def test_a_field_is_given_once_and_in_its_group() -> None:
    data = plan().to_json()
    with pytest.raises(PlanError, match=r"there is no field 'sync.bucket_bytes outside of its group'"):
        Plan.from_json({**data, "sync.bucket_bytes": 7777})
