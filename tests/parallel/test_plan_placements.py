"""Placements of a strategy file, through the trainer: equal to one process, saved and loaded by one rank."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny
from plan_edit import changed
from pool import Pool
from torch import Tensor, nn
from traced_memory import compare

from unisono import PlanOptions
from unisono.dist import JobSpec, World
from unisono.errors import PlanError
from unisono.observe.formatting import event_message
from unisono.plan.plan import Plan
from unisono.plan.resolve import derive_plan
from unisono.plan.rules import ColwiseRowwise, ParameterPlacement
from unisono.plan.validate import validate_plan

COLUMNS, ROWS = ("tp", None), (None, "tp")
FFN = (
    ParameterPlacement(module="blocks.*.ffn", parameter="gate.weight", dims=COLUMNS),
    ParameterPlacement(module="blocks.*.ffn", parameter="up.weight", dims=COLUMNS),
    ParameterPlacement(module="blocks.*.ffn", parameter="down.weight", dims=ROWS),
)


def planned(ranks: int, **options: Any) -> Plan:
    given = PlanOptions(**{"device": "cpu", "global_batch": 8, "precision": "fp32", "tp": ranks, **options})
    return derive_plan(given, world_size=ranks, device="cpu", native_bf16=False)


MOVED = (*FFN, ParameterPlacement(module="blocks.*.ffn.down", inputs=((None, "tp", None),), outputs=(None, None, None)))


def trained(world: World, run_dir: str, file: str, stop_after: int, sizes: Mapping[str, Any] | None = None) -> dict:
    found: list[tuple[float, float]] = []
    axes: dict[str, Any] = {"file": file, "device": "auto", "global_batch": 8, "precision": "auto"} if file else {}
    with tiny.trainer(run_dir, world=world, steps=4, sizes=dict(sizes or {}), **axes) as run:
        for step in run:
            found.append((step.loss, float(step.stats[1])))
            if step.index == stop_after:
                break
        pieces = run.state.sharded
        held = sum(p.numel() for p in pieces.parameters.values()) / pieces.num_parameters
    return {"figures": found, "held": held}


@pytest.mark.parametrize("placements", [FFN, MOVED], ids=["parameters", "values"])
def test_trains_like_one_process_and_goes_on_on_one_rank(
    pool: Pool, tmp_path: Path, placements: tuple[ParameterPlacement, ...]
) -> None:
    changed(planned(2), placements=placements).save(tmp_path / "plan.json")
    alone = trained(World(JobSpec()), str(tmp_path / "alone"), "", 4)["figures"]
    first = pool.run(trained, str(tmp_path / "run"), str(tmp_path / "plan.json"), 2, ranks=2)[0]
    rest = trained(World(JobSpec()), str(tmp_path / "run"), "", 4)["figures"]
    assert first["held"] < 0.8
    (said,) = [event for event in tiny.events(tmp_path / "run") if event["kind"] == "placements"]
    cut = {name for name, dims in said["placed"].items() if "tp" in dims}
    assert cut == {f"blocks.{n}.ffn.{name}.weight" for n in range(2) for name in ("gate", "up", "down")}
    line = event_message(said)
    assert line is not None
    assert "blocks.0.ffn.down.weight (dim 1)" in line.text
    assert "; replicated: embedding.weight, " in line.text
    for found, expected in zip([*first["figures"], *rest], alone, strict=True):
        assert found[0] == pytest.approx(expected[0], rel=1e-5)
        assert found[1] == pytest.approx(expected[1], rel=1e-4)


def unclear(world: World, run_dir: str, placements: tuple[ParameterPlacement, ...]) -> str:
    with pytest.raises(PlanError) as caught, tiny.trainer(run_dir, world=world, tp=2, placements=placements):
        pass
    return str(caught.value)


def test_values_are_placed_inside_of_modules_whose_parameters_are(pool: Pool, tmp_path: Path) -> None:
    placements = (*FFN, ParameterPlacement(module="blocks.*.ffn", outputs=(None, None, None)))
    assert pool.run(unclear, str(tmp_path), placements, ranks=2)[0] == (
        "a placement of the inputs or outputs of 'blocks.0.ffn'\n"
        "  rule: it is of a module inside one whose parameters are placed: outside values are plain tensors\n"
        "  so:   there would be nothing to move\n"
        "  try:  a placement of parameters in a module around it"
    )


def test_a_placement_says_one_thing() -> None:
    for wrong, said in (
        (ParameterPlacement(module="a"), "a placement in 'a' with nothing else\n"),
        (ParameterPlacement(parameter="w"), "a placement in 'the model' with parameter\n"),
        (ParameterPlacement(module="a", parameter="w", dims=ROWS, outputs=ROWS), "with parameter, dims, outputs\n"),
    ):
        with pytest.raises(PlanError, match="a placement has parameter and dims, or inputs and outputs") as caught:
            validate_plan(changed(planned(2), placements=(wrong,)), 2)
        assert said in str(caught.value)


AXES = {
    "replicas": {"dp_shard": 1},
    "zero 1": {"dp_shard": 2, "zero": 1},
    "zero 2": {"dp_shard": 2, "zero": 2},
    "zero 3, recompute": {"dp_shard": 2, "recompute": "full"},
    "sequences": {"cp": 2, "dp_shard": 1},
    "pipeline": {"pp": 2, "schedule": "1f1b"},
    "pipeline, recompute": {"pp": 2, "schedule": "gpipe", "recompute": "full"},
}


@pytest.mark.parametrize("axes", AXES.values(), ids=AXES)
def test_placements_beside_other_axes_train_like_one_process(pool: Pool, tmp_path: Path, axes: dict) -> None:
    """Four ranks with micro-batches of 2, and then one."""
    given = {**axes, "micro_batch": 2}
    changed(planned(4, tp=2, **given), placements=MOVED).save(tmp_path / "plan.json")
    alone = trained(World(JobSpec()), str(tmp_path / "alone"), "", 4)["figures"]
    first = pool.run(trained, str(tmp_path / "run"), str(tmp_path / "plan.json"), 2, ranks=4)[0]
    rest = trained(World(JobSpec()), str(tmp_path / "run"), "", 4)["figures"]
    for found, expected in zip([*first["figures"], *rest], alone, strict=True):
        assert found[0] == pytest.approx(expected[0], rel=1e-5)
        assert found[1] == pytest.approx(expected[1], rel=1e-4)


ATTENTION = (
    *(ParameterPlacement(module="blocks.*.attention", parameter=f"{name}.weight", dims=COLUMNS) for name in "qkv"),
    ParameterPlacement(module="blocks.*.attention", parameter="out.weight", dims=ROWS),
)
PROJECTIONS = (
    ParameterPlacement(module="blocks.*.attention.q", parameter="weight", dims=COLUMNS),
    ParameterPlacement(module="blocks.*.attention.out", parameter="weight", dims=ROWS),
)
EXPERTS = {"num_experts": 4, "num_kv_heads": 2}


def test_placements_beside_experts_on_several_ranks(pool: Pool, tmp_path: Path) -> None:
    changed(planned(4, tp=2, dp_shard=2, ep=2), placements=PROJECTIONS).save(tmp_path / "plan.json")
    alone = trained(World(JobSpec()), str(tmp_path / "alone"), "", 2, EXPERTS)["figures"]
    first = pool.run(trained, str(tmp_path / "run"), str(tmp_path / "plan.json"), 2, EXPERTS, ranks=4)[0]
    for found, expected in zip(first["figures"], alone, strict=True):
        assert found[0] == pytest.approx(expected[0], rel=1e-5)
        assert found[1] == pytest.approx(expected[1], rel=1e-4)


def refused(world: World, run_dir: str, sizes: Mapping[str, Any], placed: Any, axes: Mapping[str, Any]) -> list[str]:
    with (
        pytest.raises(PlanError) as caught,
        tiny.trainer(run_dir, world=world, tp=2, placements=placed, sizes=dict(sizes), **axes),
    ):
        pass
    return [problem.given for problem in caught.value.problems]


class Choosing(nn.Module):
    """Its course depends on the values of tensors, so that it has no trace."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tiny.VOCAB, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, tiny.VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.down(self.up(x) if x.max().item() > -100 else x)


def untraceable(world: World, run_dir: str) -> str:
    placed = (ParameterPlacement(module="up", parameter="weight", dims=COLUMNS),)
    with (
        pytest.raises(PlanError) as caught,
        tiny.trainer(run_dir, world=world, network=Choosing(), tp=2, placements=placed),
    ):
        pass
    return str(caught.value)


def test_a_model_without_a_trace_is_refused(pool: Pool, tmp_path: Path) -> None:
    said = pool.run(untraceable, str(tmp_path), ranks=2)[0]
    assert said.startswith("placements for Choosing, whose forward pass fails without values: ")
    assert "rule: where placed parameters are read is found by a pass with shapes alone" in said


def compressed(world: World, run_dir: str, codec: str) -> list[float]:
    with tiny.trainer(run_dir, world=world, steps=4, tp=2, dp_shard=1, compression=codec, placements=FFN) as run:
        return [step.loss for step in run]


def test_gradients_of_placed_parameters_are_compressed(pool: Pool, tmp_path: Path) -> None:
    whole, rounded = (pool.run(compressed, str(tmp_path / codec), codec, ranks=4)[0] for codec in ("none", "int8"))
    assert rounded[0] == whole[0]
    assert rounded[1:] != whole[1:]
    assert rounded == pytest.approx(whole, rel=1e-2)


HEAD = (ParameterPlacement(module="head", parameter="weight", dims=COLUMNS),)
WHOLE = (ParameterPlacement(parameter="blocks.*.ffn.up.weight", dims=COLUMNS),)


@pytest.mark.parametrize(
    ("placed", "axes", "sizes", "given"),
    [
        (HEAD, {}, {"tied": False}, "placements in 'head': the model never calls it"),
        (HEAD, {"pp": 2, "micro_batch": 2}, {"tied": False}, "placements in 'head' with pp 2"),
        (WHOLE, {"pp": 2, "micro_batch": 2}, {}, "placements in 'the model' with pp 2"),
        (
            ATTENTION,
            {"cp": 2},
            {"num_kv_heads": 2},
            "placements in 'blocks.0.attention', which computes attention, with cp 2",
        ),
        (
            (ParameterPlacement(module="blocks.*.ffn", parameter="router.weight", dims=COLUMNS),),
            {"dp_shard": 2, "ep": 2},
            EXPERTS,
            "placements in 'blocks.0.ffn', which has the experts blocks.0.ffn.experts, with ep 2",
        ),
    ],
)
def test_modules_that_cannot_be_placed_beside_other_axes(
    pool: Pool, tmp_path: Path, placed: Any, axes: dict[str, Any], sizes: dict[str, Any], given: str
) -> None:
    ranks = 4 if axes else 2
    assert given in pool.run(refused, str(tmp_path), sizes, placed, axes, ranks=ranks)[0]


@pytest.mark.full
@pytest.mark.parametrize("axes", [{"dp_shard": 2}, {"pp": 2, "schedule": "1f1b"}], ids=["zero 3", "pipeline"])
def test_traced_memory_with_placements_is_that_of_executed_ranks(pool: Pool, tmp_path: Path, axes: dict) -> None:
    settings = {"layers": 4, "tp": 2, "micro_batch": 1, "tensor_parallel.placements": FFN, **axes}
    compare(pool, tmp_path, "gpt", settings, 4)


def test_what_cannot_be_beside_placements() -> None:
    plan = changed(planned(2), placements=FFN, rules=(ColwiseRowwise(module="a", rowwise="b"),))
    with pytest.raises(PlanError, match="placements with rules 1"):
        validate_plan(plan, 2)
    with pytest.raises(PlanError, match="DTensor decides how activations are sharded"):
        validate_plan(changed(planned(2, sequence_parallel=True), placements=FFN), 2)
    with pytest.raises(PlanError, match="zbv computes gradients of weights from plain tensors"):
        validate_plan(changed(planned(4, tp=2, pp=2, schedule="zbv", micro_batch=1), placements=FFN), 4)
    with pytest.raises(PlanError, match=r"placements with plan\.tp=1"):
        validate_plan(changed(planned(1), placements=FFN), 1)
