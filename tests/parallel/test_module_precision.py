"""Rules of precision by module: what they change, on one process and on several, and what is refused."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tiny
import torch
from plan_edit import changed
from pool import Pool

from unisono.checkpoint import open_checkpoint
from unisono.dist import JobSpec, World
from unisono.errors import PlanError
from unisono.models.loss import LazyLogits
from unisono.parallel.transforms import parallelize
from unisono.plan.options import PlanOptions
from unisono.plan.plan import Plan
from unisono.plan.resolve import derive_plan
from unisono.plan.rules import DtypeRule
from unisono.train.whole_model import tensor_reader

STEPS = 4


def plan_of(rules: list[dict[str, str]], ranks: int = 1, **options: Any) -> Plan:
    asked = PlanOptions(**{"device": "cpu", "precision": "bf16", "global_batch": 8, **options})
    made = derive_plan(asked, world_size=ranks, device="cpu", native_bf16=False)
    return changed(made, dtype_rules=tuple(msgspec.convert(rule, DtypeRule) for rule in rules))


def train(
    world: World,
    rules: list[dict[str, str]],
    options: dict[str, Any],
    kind: str = "adamw",
    sizes: dict[str, Any] | None = None,
    deferred: bool = False,
) -> dict[str, Any]:
    """Losses, and dtypes of what a checkpoint holds."""
    sizes = {"tied": False, **(sizes or {})}
    model = {"network": functools.partial(tiny.model, **sizes)} if deferred else {"sizes": sizes}
    with tempfile.TemporaryDirectory() as folder:
        made = tiny.trainer(
            str(world.broadcast_json(folder)), world=world, steps=STEPS, kind=kind, ema_decay=0.9, **model
        )
        made._given_plan = plan_of(rules, world.world_size, **options)
        with made as run:
            losses = [step.loss for step in run]
            held = {name: tensor.dtype for name, tensor in run.state.global_state().items()}
        world.barrier()
    return {"losses": losses, "held": {name: str(dtype).removeprefix("torch.") for name, dtype in held.items()}}


@pytest.mark.parametrize(
    "kind", ["adamw", "lars", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("adam", "sgd", "lamb"))]
)
def test_bf16_parameters_have_fp32_gradients_and_moments(kind: str) -> None:
    found = train(World(JobSpec()), [{"module": "blocks.*", "parameters": "bf16"}], {}, kind)
    for name, dtype in found["held"].items():
        matrix = "blocks" in name and "norm" not in name
        if name.startswith("model/"):
            assert dtype == ("bfloat16" if matrix else "float32"), name
        elif name.startswith(("optim/", "ema/")):
            assert dtype == "float32", name
    exact = train(World(JobSpec()), [], {}, kind)
    assert found["losses"] != exact["losses"]
    assert found["losses"] == pytest.approx(exact["losses"], rel=2e-2)


def test_a_run_goes_on_and_is_read_into_fp32(tmp_path: Path) -> None:
    losses: list[float] = []
    for folder, stops in (("whole", [4]), ("parts", [2, 4])):
        losses.clear()
        for stop in stops:
            made = tiny.trainer(tmp_path / folder, steps=4)
            made._given_plan = plan_of([{"module": "blocks.*", "parameters": "bf16"}])
            with made as run:
                for step in run:
                    losses.append(step.loss)
                    if step.index == stop:
                        break
                digest, trained = tiny.digest(run), run.state.model.state_dict()
        if folder == "whole":
            expected = (digest, list(losses))
    assert (digest, losses) == expected
    model = tiny.model()
    read = tensor_reader(model, open_checkpoint(tmp_path / "parts" / "checkpoints" / "step-00000004"))
    for name, tensor in model.state_dict().items():
        read(name, tensor)
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, trained[name].float()), name


def test_the_head_in_fp32() -> None:
    """As a model that autocast leaves alone from its last norm on."""
    model = tiny.model(tied=False)
    rules = [{"module": "norm", "compute": "fp32"}, {"module": "head", "compute": "fp32"}]
    changed = parallelize(plan_of(rules), tiny.model(tied=False)).model
    tokens = torch.arange(12).view(1, 12)
    seen: list[torch.Tensor] = []
    model.norm.register_forward_pre_hook(lambda _m, args: seen.append(args[0]))
    with torch.autocast("cpu", torch.bfloat16):
        model(tokens)
        head: LazyLogits = changed(tokens)
        logits = head.logits()
    expected = model.head(model.norm(seen[0].float()))
    assert head.compute == torch.float32
    assert torch.equal(logits, expected)


def test_a_part_in_bf16_of_a_model_in_fp32() -> None:
    rules = [{"module": "blocks.0.ffn", "compute": "bf16"}]
    model, plain = parallelize(plan_of(rules, precision="fp32"), tiny.model()).model, tiny.model()
    x = torch.randn(1, 3, 16)
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain.blocks[0].ffn(x)
    made = model.blocks[0].ffn(x)
    assert made.dtype == torch.float32
    assert torch.equal(made, expected.float())
    assert torch.equal(model.blocks[1].ffn(x), plain.blocks[1].ffn(x))


SPREAD = [
    ("fsdp", 2, {"dp_shard": 2}),
    ("zero1", 2, {"dp_shard": 2, "zero": 1, "micro_batch": 2}),
    ("buckets", 2, {}),
    ("tp", 2, {"tp": 2}),
    ("pp", 2, {"pp": 2, "micro_batch": 2}),
    ("cp", 2, {"cp": 2}),
    ("tp-fsdp", 4, {"tp": 2, "dp_shard": 2}),
]
ALL = [
    {"module": "blocks.*", "parameters": "bf16"},
    {"module": "norm", "compute": "fp32"},
    {"module": "head", "compute": "fp32"},
]


@pytest.mark.parametrize(
    ("ranks", "options"),
    [pytest.param(*each, id=name, marks=[] if name == "fsdp" else pytest.mark.full) for name, *each in SPREAD],
)
def test_spread_over_ranks(pool: Pool, ranks: int, options: dict[str, Any]) -> None:
    like_one_process(pool.run(train, ALL, options, ranks=ranks), train(World(JobSpec()), ALL, {}))


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        pytest.param(
            {"dp_shard": 2, "ep": 2, "micro_batch": 4}, {"num_experts": 2, "num_experts_per_token": 1}, id="ep"
        ),
        pytest.param({"pp": 2, "schedule": "zbv", "micro_batch": 2}, {"num_layers": 4}, id="zbv"),
    ],
)
def test_spread_over_ranks_from_a_callable(pool: Pool, options: dict[str, Any], sizes: dict[str, Any]) -> None:
    alone = train(World(JobSpec()), ALL, {}, sizes=sizes)
    like_one_process(pool.run(train, ALL, options, sizes=sizes, deferred=True, ranks=2), alone)


@pytest.mark.full
def test_compiled_blocks_follow_the_rules() -> None:
    alone = World(JobSpec())
    like_one_process([train(alone, ALL, {"compile": "regional"})], train(alone, ALL, {}))


def like_one_process(together: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    assert len({str(each["losses"]) for each in together}) == 1
    # bf16 parameters move by steps of 2^-8: one that rounds the other way is that far off
    assert together[0]["losses"] == pytest.approx(alone["losses"], rel=4e-3)
    held = {name: dtype for each in together for name, dtype in each["held"].items()}
    assert held == alone["held"]


@pytest.mark.parametrize("options", [{"dp_shard": 2}, pytest.param({}, marks=pytest.mark.full)])
def test_gradients_travel_in_bf16(pool: Pool, options: dict[str, Any]) -> None:
    rules = [{"module": "blocks.*", "gradients": "bf16"}]
    exact, rounded = (pool.run(train, each, {**options, "precision": "fp32"})[0]["losses"] for each in ([], rules))
    assert rounded[0] == exact[0]
    assert rounded[1:] != exact[1:]
    assert rounded == pytest.approx(exact, rel=2e-3)


def refusal(rules: list[dict[str, str]], ranks: int = 1, **options: Any) -> str:
    with pytest.raises(PlanError) as caught:
        parallelize(plan_of(rules, ranks, **options), tiny.model())
    return str(caught.value)


def test_what_is_refused() -> None:
    text = refusal([{"module": "block.*", "parameters": "bf16"}])
    assert "a dtype rule for 'block.*'" in text
    assert "did you mean 'blocks.*'?" in text
    text = refusal([{"module": "blocks.*", "compute": "fp32"}, {"module": "blocks.0", "compute": "fp32"}])
    assert "blocks.0, which is named by dtype rules for 'blocks.*' and 'blocks.0'" in text
    assert "a dtype rule for 'norm' with nothing else" in refusal([{"module": "norm"}])
    assert "with compute 'bf16'" in refusal([{"module": "blocks.*", "compute": "bf16"}])
    assert "with parameters 'fp32'" in refusal([{"module": "blocks.*", "parameters": "fp32"}])
    assert "with gradients 'bf16'" in refusal([{"module": "blocks.*", "gradients": "bf16"}])
    text = refusal([{"module": "blocks.*", "parameters": "bf16"}], precision="fp32")
    assert "parameters 'bf16' for blocks.0.attention.q.weight, computed in fp32" in text
    text = refusal([{"module": "blocks.*", "parameters": "bf16"}], 2, dp_shard=2, micro_batch=2)
    assert "parameters 'bf16' with zero 3 and accumulation 2" in text


def test_a_strategy_file_holds_them(tmp_path: Path) -> None:
    plan = plan_of(ALL)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
