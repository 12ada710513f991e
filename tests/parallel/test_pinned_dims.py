"""Placements over ``dp_shard`` and ``ep``: ranks train like one process, and keep the dims that are pinned."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny
from plan_edit import changed
from pool import Pool
from torch import nn
from traced_memory import compare

from unisono import ModelOptions, PlanOptions
from unisono.dist import JobSpec, World
from unisono.errors import PlanError
from unisono.models.gpt import GPT
from unisono.observe.formatting import event_message
from unisono.parallel.tensor.pinned_dims import resolve_pinned_dims
from unisono.plan.plan import Plan
from unisono.plan.resolve import derive_plan
from unisono.plan.rules import ParameterPlacement
from unisono.plan.validate import validate_plan

COLUMNS = (None, "dp_shard")
FFN = ParameterPlacement(module="blocks.*.ffn", parameter="*.weight", dims=COLUMNS)
TABLE = ParameterPlacement(parameter="embedding.weight", dims=COLUMNS)
PINS = (FFN, TABLE)
BOTH = (
    ParameterPlacement(module="blocks.*.ffn", parameter="gate.weight", dims=("tp", "dp_shard")),
    ParameterPlacement(module="blocks.*.ffn", parameter="up.weight", dims=("tp", "dp_shard")),
    ParameterPlacement(module="blocks.*.ffn", parameter="down.weight", dims=("dp_shard", "tp")),
)
EXPERTS = {"num_experts": 4, "num_kv_heads": 2}
STACKS = (
    ParameterPlacement(module="blocks.*.ffn.experts", parameter="down", dims=("ep", None, "dp_shard")),
    ParameterPlacement(module="blocks.*.ffn.experts", parameter="up", dims=("ep", "dp_shard", None)),
    ParameterPlacement(module="blocks.*.ffn.experts", parameter="gate", dims=("ep", None, None)),
)


def planned(ranks: int, **options: Any) -> Plan:
    given = PlanOptions(**{"device": "cpu", "global_batch": 8, "precision": "fp32", **options})
    return derive_plan(given, world_size=ranks, device="cpu", native_bf16=False)


def trained(
    world: World, run_dir: str, axes: Mapping[str, Any], placements: Any, stop_after: int, sizes: Mapping[str, Any]
) -> dict[str, Any]:
    """Losses and norms of the steps up to ``stop_after``, and shapes of this rank's parameters."""
    found: list[tuple[float, float]] = []
    pins = {"placements": placements} if placements else {}
    with tiny.trainer(run_dir, world=world, steps=4, sizes=dict(sizes), **pins, **axes) as run:
        for step in run:
            found.append((step.loss, float(step.stats[1])))
            if step.index == stop_after:
                break
        shapes = {name: tuple(part.shape) for name, part in run.state.sharded.parameters.items()}
    return {"figures": found, "shapes": shapes}


def alone(tmp_path: Path, sizes: Mapping[str, Any] | None = None) -> list[tuple[float, float]]:
    return trained(World(JobSpec()), str(tmp_path / "alone"), {}, (), 4, sizes or {})["figures"]


def check_equal(found: list[tuple[float, float]], expected: list[tuple[float, float]]) -> None:
    for mine, other in zip(found, expected, strict=True):
        assert mine[0] == pytest.approx(other[0], rel=1e-5)
        assert mine[1] == pytest.approx(other[1], rel=1e-4)


AXES: dict[str, tuple[dict[str, Any], tuple[ParameterPlacement, ...]]] = {
    "zero 3": ({"dp_shard": 4}, PINS),
    "zero 1": ({"dp_shard": 4, "zero": 1}, PINS),
    "zero 2": ({"dp_shard": 4, "zero": 2}, PINS),
    "replicas": ({"dp_shard": 2, "zero": 3}, PINS),
    "sequences": ({"cp": 2, "dp_shard": 2}, PINS),
    "sequences share states": ({"cp": 2, "dp_shard": 1}, PINS),
    "pipeline, recompute": ({"pp": 2, "dp_shard": 2, "schedule": "1f1b", "micro_batch": 2, "recompute": "full"}, PINS),
    "with tp": ({"tp": 2, "dp_shard": 2}, BOTH),
    "beside rules of tp": (
        {"tp": 2, "dp_shard": 2, "sequence_parallel": True},
        (ParameterPlacement(module="blocks.*.ffn", parameter="[gu]*.weight", dims=COLUMNS),),
    ),
}


@pytest.mark.parametrize(("axes", "placements"), AXES.values(), ids=AXES)
def test_four_ranks_and_then_two_without_the_pin_train_like_one_process(
    pool: Pool, tmp_path: Path, axes: dict[str, Any], placements: tuple[ParameterPlacement, ...]
) -> None:
    expected = alone(tmp_path)
    first = pool.run(trained, str(tmp_path / "run"), axes, placements, 2, {}, ranks=4)[0]
    rest = pool.run(trained, str(tmp_path / "run"), {"dp_shard": 2}, (), 4, {}, ranks=2)[0]
    check_equal([*first["figures"], *rest["figures"]], expected)
    ranks = axes["dp_shard"] * axes.get("cp", 1)
    whole = {name: tuple(parameter.shape) for name, parameter in tiny.model().named_parameters()}
    name = "blocks.0.ffn.up.weight"
    rows, columns = whole[name]
    assert first["shapes"][name] == (rows // axes.get("tp", 1), columns // ranks)
    assert rest["shapes"][name] == (rows // 2, columns)
    if TABLE in placements:
        rows, columns = whole["embedding.weight"]
        assert first["shapes"]["embedding.weight"] == (rows, columns // ranks)
    (said,) = [event for event in tiny.events(tmp_path / "run") if event["kind"] == "placements"]
    line = event_message(said)
    assert line is not None
    assert (
        f"sharded over dp_shard: {'embedding.weight (dim 1), ' if TABLE in placements else ''}blocks.0.ffn."
        in line.text
    )
    assert f"{name} (dim 1)" in line.text
    assert ("replicated: " in line.text) == (placements is BOTH)


@pytest.mark.parametrize("sizes", [EXPERTS, {**EXPERTS, "num_experts": 6}], ids=["4 experts", "6 experts"])
def test_stacks_of_experts_are_split_along_the_dim_that_is_pinned(
    pool: Pool, tmp_path: Path, sizes: dict[str, int]
) -> None:
    expected = alone(tmp_path, sizes)
    first = pool.run(trained, str(tmp_path / "run"), {"dp_shard": 4, "ep": 2}, STACKS, 2, sizes, ranks=4)[0]
    rest = pool.run(trained, str(tmp_path / "run"), {"dp_shard": 2, "ep": 2}, (), 4, sizes, ranks=2)[0]
    check_equal([*first["figures"], *rest["figures"]], expected)
    whole = {name: tuple(p.shape) for name, p in tiny.model(**sizes).named_parameters()}
    path = "blocks.0.ffn.experts."
    experts, rows, columns = whole[path + "down"]
    assert first["shapes"][path + "down"] == (experts // 2, rows, columns // 2)
    experts, rows, columns = whole[path + "up"]
    assert first["shapes"][path + "up"] == (experts // 2, rows // 2, columns)


def test_norms_of_whole_parameters_are_those_of_parts_along_any_dim(pool: Pool, tmp_path: Path) -> None:
    """LAMB scales the update of a parameter by the norms of the whole parameter."""
    kind = {"kind": "lamb"}
    expected = trained(World(JobSpec()), str(tmp_path / "alone"), kind, (), 4, {})["figures"]
    found = pool.run(trained, str(tmp_path / "run"), {"dp_shard": 2, "tp": 2, **kind}, BOTH, 4, {}, ranks=4)[0]
    check_equal(found["figures"], expected)


@pytest.mark.full
@pytest.mark.parametrize(
    ("axes", "placements"),
    [({"dp_shard": 4}, (FFN,)), ({"dp_shard": 4, "zero": 1}, (FFN,)), ({"dp_shard": 2, "tp": 2}, BOTH)],
    ids=["zero 3", "zero 1", "with tp"],
)
def test_traced_memory_is_that_of_executed_ranks(
    pool: Pool, tmp_path: Path, axes: dict[str, Any], placements: tuple[ParameterPlacement, ...]
) -> None:
    settings = {"layers": 4, "micro_batch": 1, "tensor_parallel.placements": placements, **axes}
    compare(pool, tmp_path, "gpt", settings, 4)


def problems_of(model: nn.Module, plan: Plan, *placements: ParameterPlacement) -> list[tuple[str, str, str]]:
    with pytest.raises(PlanError) as caught:
        resolve_pinned_dims(model, changed(plan, placements=placements))
    return [(problem.given, problem.rule, problem.nearest) for problem in caught.value.problems]


def test_dims_that_cannot_be_split_are_refused() -> None:
    model = GPT(ModelOptions(num_layers=2, dim=24, num_heads=2, vocab_size=48, ffn_dim=30))
    plan = planned(4, dp_shard=4)
    ((given, rule, nearest),) = problems_of(
        model, plan, ParameterPlacement(module="blocks.*.ffn", parameter="down.weight", dims=COLUMNS)
    )
    assert given == (
        "blocks.0.ffn.down.weight of shape [24, 30] placed as (None, 'dp_shard'), over 4 ranks that share states"
    )
    assert rule == "FSDP2 splits a dim other than the first into equal parts, and 4 does not divide 30"
    assert nearest == "'dp_shard' on dim 0, or 2 ranks that share states"
    # the first dim may be uneven, as it is without a pin
    rows = ParameterPlacement(module="blocks.*.ffn", parameter="up.weight", dims=("dp_shard", None))
    assert resolve_pinned_dims(model, changed(plan, placements=(rows,)))["blocks.0.ffn.up.weight"] == (
        "dp_shard",
        None,
    )


@pytest.mark.parametrize(
    ("placement", "given", "nearest"),
    [
        (
            ParameterPlacement(module="blocks.*.ffn.experts", parameter="up", dims=(None, "ep", None)),
            "blocks.0.ffn.experts.up of shape [4, 64, 16] placed as (None, 'ep', None)",
            "('ep', None, None)",
        ),
        (
            ParameterPlacement(module="blocks.*.attention", parameter="q.weight", dims=("ep", None)),
            "blocks.0.attention.q.weight of shape [16, 16] placed as ('ep', None)",
            "no 'ep' in this placement",
        ),
        (
            ParameterPlacement(module="blocks.*.attention", parameter="q.weight", dims=("dp_shard",)),
            "the placement ('dp_shard',) of q.weight of shape [16, 16]",
            "2 entries of 'tp' or None",
        ),
        (
            ParameterPlacement(module="blocks.*.attentions", parameter="q.weight", dims=COLUMNS),
            "a placement in 'blocks.*.attentions'",
            "did you mean 'blocks.1.attention'?",
        ),
    ],
)
def test_placements_that_fit_no_parameter_are_refused(placement: ParameterPlacement, given: str, nearest: str) -> None:
    found = problems_of(tiny.model(**EXPERTS), planned(4, dp_shard=4, ep=2), placement)
    assert [(problem[0], problem[2]) for problem in found] == [(given, nearest)]


def test_a_parameter_has_one_placement() -> None:
    plan = planned(4, tp=2, dp_shard=2)
    up = {"module": "blocks.0.ffn", "parameter": "up.weight"}
    found = problems_of(
        tiny.model(),
        plan,
        ParameterPlacement(**up, dims=("tp", None)),
        ParameterPlacement(module="blocks.*.ffn", parameter="up.weight", dims=COLUMNS),
    )
    assert found == [
        (
            "blocks.0.ffn.up.weight placed as (None, 'dp_shard') and as ('tp', None)",
            "a parameter has one placement, which names all axes along which it is split",
            "('tp', 'dp_shard'), or patterns that do not overlap",
        )
    ]


def test_a_pin_of_a_parameter_that_stays_whole_is_refused() -> None:
    plan = changed(planned(4, dp_shard=4), ignored_modules=("blocks.0.ffn",))
    ((given, rule, _),) = problems_of(tiny.model(), plan, ParameterPlacement(parameter="blocks.0.ffn.*", dims=COLUMNS))[
        :1
    ]
    assert given.startswith("blocks.0.ffn.gate.weight of shape ")
    assert rule.startswith("FSDP2 leaves this parameter whole")


@pytest.mark.parametrize(
    ("dims", "said", "nearest"),
    [
        (("pp", None), "a stage has whole parameters", "pipeline.layers_per_stage"),
        (
            ("cp", None),
            "ranks of cp compute parts of a sequence with the same parameters",
            "'dp_shard', which names all",
        ),
        (("dp_replicate", None), "replicas of the model have the same parameters", "'dp_shard', with plan.dp_shard"),
        (("dp_shards", None), "a placement names tp, dp_shard and ep, each for one dim", "did you mean 'dp_shard'?"),
        (("dp_shard", "dp_shard"), "each for one dim at most", "each axis once"),
    ],
)
def test_axes_along_which_no_parameter_is_split(dims: tuple[str | None, ...], said: str, nearest: str) -> None:
    plan = changed(planned(2, dp_shard=2), placements=(ParameterPlacement(parameter="w", dims=dims),))
    with pytest.raises(PlanError) as caught:
        validate_plan(plan, 2)
    (problem,) = caught.value.problems
    assert f"the placement {dims} of 'w' of 'the model'" in problem.given
    assert said in problem.rule
    assert nearest in problem.nearest


def test_pins_without_ranks_to_split_over_are_refused() -> None:
    whole = changed(planned(2, dp_shard=1), placements=(FFN,))
    with pytest.raises(PlanError, match="placements over dp_shard with dp_shard 1"):
        validate_plan(whole, 2)
    together = changed(planned(2, dp_shard=2), placements=STACKS)
    with pytest.raises(PlanError, match="placements over ep with ep 1"):
        validate_plan(together, 2)
    values = ParameterPlacement(module="a", outputs=(None, "dp_shard"))
    with pytest.raises(PlanError, match="a placement has 'tp' for one dim at most and None"):
        validate_plan(changed(planned(4, tp=2), placements=(values,)), 4)


def split_twice(world: World, run_dir: str) -> str:
    down = (ParameterPlacement(module="blocks.*.ffn", parameter="down.weight", dims=COLUMNS),)
    with pytest.raises(PlanError) as caught, tiny.trainer(run_dir, world=world, tp=2, dp_shard=2, placements=down):
        pass
    return str(caught.value)


def test_a_dim_that_rules_of_tp_split_is_refused_on_all_ranks(pool: Pool, tmp_path: Path) -> None:
    said = pool.run(split_twice, str(tmp_path), ranks=4)
    assert len(set(said)) == 1
    assert "blocks.0.ffn.down.weight of shape " in said[0]
    assert "rule: tp splits it along dim 1, and a dim other than the first is split over one axis" in said[0]
