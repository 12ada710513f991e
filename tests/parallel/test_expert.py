"""Expert parallelism: losses and gradients of one process, experts without tokens, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from plans import like_one_process
from pool import Pool
from torch import Tensor

from unisono.dist import JobSpec, World
from unisono.errors import PlanError
from unisono.models.gpt import GPT
from unisono.models.loss import cross_entropy_sum
from unisono.models.moe import MoE, update_router_biases
from unisono.models.options import ModelOptions
from unisono.parallel.expert import sum_balance_counts
from unisono.parallel.fsdp import FSDPGradients
from unisono.parallel.mesh import ParallelDims
from unisono.parallel.sharding import ShardedParameters
from unisono.parallel.transforms import parallelize
from unisono.plan.options import PlanOptions
from unisono.plan.resolve import derive_plan

SIZES = {
    "num_layers": 2,
    "dim": 16,
    "num_heads": 2,
    "num_kv_heads": 1,
    "ffn_dim": 24,
    "vocab_size": 48,
    "num_experts": 4,
}
TOKENS = 13


def model(sizes: dict) -> GPT:
    torch.manual_seed(0)
    made = GPT(ModelOptions(**{**SIZES, **sizes})).double()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "router" in name:
                parameter.mul_(20)  # far from ties, and uneven
    return made


def micro_batches(count: int, samples: int) -> list[dict[str, Tensor]]:
    """Samples of different length: the sums of the ranks have different weights."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 48, (count, samples, TOKENS + 1), generator=generator)
    lengths = torch.randint(3, TOKENS + 1, (count, samples, 1), generator=generator)
    weights = (torch.arange(TOKENS) < lengths).double()
    return [{"tokens": t[:, :-1], "targets": t[:, 1:], "weights": w} for t, w in zip(tokens, weights, strict=True)]


def passes(gpt: Any, batches: list[dict[str, Tensor]], arm: Any = None) -> float:
    """Forward and backward over micro-batches; the loss sum."""
    total = 0.0
    for number, batch in enumerate(batches, 1):
        loss, _ = cross_entropy_sum(gpt(batch["tokens"]), batch["targets"], batch["weights"])
        if arm is not None and number == len(batches):
            arm()
        loss.backward()
        total += float(loss.detach())
    return total


def alone(sizes: dict, batches: list[dict[str, Tensor]]) -> tuple[float, GPT]:
    gpt = model(sizes)
    loss = passes(gpt, batches)
    update_router_biases(gpt, lambda counts: counts, torch.tensor(True))
    return loss, gpt


def biases(gpt: Any) -> dict[str, list[float]]:
    return {name: buffer.tolist() for name, buffer in gpt.named_buffers() if name.endswith("router.bias")}


def on_ranks(world: World, plan: dict, sizes: dict, empty: bool = False) -> dict:
    """One step of two micro-batches; the largest relative error of this rank's pieces of the gradients of one process."""
    options = PlanOptions(device="cpu", global_batch=8, **{"micro_batch": 1, **plan})
    chosen = derive_plan(options, world_size=world.world_size, device="cpu", native_bf16=False)
    count, samples = chosen.batch.accumulation, 8 // chosen.batch.accumulation
    batches = micro_batches(count, samples)
    if empty:  # all tokens alike: some experts, and the ranks that hold them, see none
        batches = [{**batch, "tokens": torch.full_like(batch["tokens"], 7)} for batch in batches]
    loss, reference = alone(sizes, batches)
    whole = {name: p.grad for name, p in reference.named_parameters()}

    dims = ParallelDims(chosen, world)
    parallel = parallelize(chosen, model(sizes), dims)
    gpt, table = parallel.model, parallel.table
    pieces = ShardedParameters(gpt, dims, table)
    sync = FSDPGradients(gpt, pieces, dims)
    rank, share = dims.data_rank, chosen.batch.micro_batch
    mine = [{name: each[rank * share : (rank + 1) * share] for name, each in batch.items()} for batch in batches]
    totals = torch.tensor([passes(gpt, mine, sync.prepare_last_backward)], dtype=torch.float64)
    sync.wait(totals)
    update_router_biases(gpt, lambda counts: dims.sum(dims.sum(counts, "dp_replicate"), "shard"), torch.tensor(True))
    errors, elements = {}, 0
    for name, piece in pieces.parameters.items():
        part = pieces.shard_of(name, piece.grad)
        assert part is not None
        block = tuple(slice(at, at + size) for at, size in zip(part.offset, piece.shape, strict=True))
        assert part.global_shape == whole[name].shape, name
        errors[name] = float((piece.grad - whole[name][block]).abs().max()) if piece.numel() else 0.0
        errors[name] /= max(float(whole[name].abs().max()), 1e-12)
        elements += piece.numel() if part.replica_id == 0 else 0
    found = {
        "loss": float(totals) / loss,
        "errors": errors,
        "elements": elements,
        "count": pieces.num_parameters,
        "parameters": sum(p.numel() for p in reference.parameters()),
        "norm": float(pieces.global_norm([p.grad for p in pieces.parameters.values()])),
        "whole_norm": float(torch.stack([g.norm() for g in whole.values()]).norm()),
        "bias": biases(gpt),
        "whole_bias": biases(reference),
        "experts": [list(pieces.parameters[f"blocks.0.ffn.experts.{name}"].shape) for name in ("gate", "down")],
        "idle": float((whole["blocks.0.ffn.experts.gate"].flatten(1).abs().sum(1) == 0).sum()),
    }
    sync.close()
    return found


def check(found: list[dict]) -> None:
    for outcome in found:
        assert outcome["loss"] == pytest.approx(1, rel=1e-6)  # it is added up in float32
        assert max(outcome["errors"].values()) < 1e-5, outcome["errors"]
        assert outcome["norm"] == pytest.approx(outcome["whole_norm"], rel=1e-6)
        assert outcome["bias"] == outcome["whole_bias"]
        assert all(any(bias) for bias in outcome["bias"].values())
        assert outcome["count"] == outcome["parameters"]
    assert sum(outcome["elements"] for outcome in found) == found[0]["parameters"]  # together they tile the whole


@pytest.mark.parametrize(
    ("ranks", "plan", "shapes"),
    [
        (2, {"dp_shard": 2, "ep": 2}, [[2, 24, 16], [2, 16, 24]]),
        (4, {"dp_shard": 4, "ep": 2}, [[1, 24, 16], [1, 16, 24]]),
        (4, {"dp_shard": 2, "ep": 2}, [[2, 24, 16], [2, 16, 24]]),  # and dp_replicate 2
        (4, {"dp_shard": 4, "ep": 4, "zero": 1}, [[1, 24, 16], [1, 16, 24]]),
        (4, {"dp_shard": 4, "ep": 2, "recompute": "full"}, [[1, 24, 16], [1, 16, 24]]),
        (2, {"dp_shard": 2, "ep": 2, "recompute": "selective", "zero": 2}, [[2, 24, 16], [2, 16, 24]]),
    ],
)
def test_gradients_are_those_of_one_process(pool: Pool, ranks: int, plan: dict, shapes: list) -> None:
    found = pool.run(on_ranks, plan, {}, ranks=ranks)
    check(found)
    assert all(outcome["experts"] == shapes for outcome in found)


@pytest.mark.parametrize(
    ("plan", "sizes", "shapes"),
    [
        ({"dp_shard": 4}, {"num_experts": 6}, [[6, 6, 16], [6, 4, 24]]),
        ({"dp_shard": 4, "ep": 2}, {"num_experts": 6}, [[3, 12, 16], [3, 8, 24]]),
    ],
)
def test_experts_that_do_not_divide_are_cut_inside(pool: Pool, plan: dict, sizes: dict, shapes: list) -> None:
    """Six experts over four ranks: each has a quarter of every expert, not two, two, two and none."""
    found = pool.run(on_ranks, plan, sizes, ranks=4)
    check(found)
    assert all(outcome["experts"] == shapes for outcome in found)


@pytest.mark.parametrize("balance", ["bias", "loss"])
def test_experts_and_ranks_without_tokens(pool: Pool, balance: str) -> None:
    """One token everywhere goes to two of eight experts: most ranks receive no row."""
    found = pool.run(on_ranks, {"dp_shard": 4, "ep": 4}, {"num_experts": 8, "balance": balance}, True, ranks=4)
    check(found)
    assert found[0]["idle"] >= 4


def halves(world: World) -> tuple[list, list]:
    """The router's gradient from half of each sequence per rank, summed over ranks, and that of one process."""
    torch.manual_seed(0)
    layer = MoE(ModelOptions(**SIZES, balance="loss")).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.5)
    x = torch.randn(3, 8, 16, dtype=torch.float64)
    layer(x).sum().backward()
    whole = layer.router.weight.grad.clone()
    layer.zero_grad()
    options = PlanOptions(device="cpu", cp=2, global_batch=1)
    dims = ParallelDims(derive_plan(options, world_size=2, device="cpu", native_bf16=False), world)
    sum_balance_counts(layer, dims)
    layer(x.chunk(2, dim=1)[world.rank]).sum().backward()
    return dims.sum(layer.router.weight.grad, "cp").tolist(), whole.tolist()


def test_sequences_over_ranks_have_one_balance_loss(pool: Pool) -> None:
    for mine, whole in pool.run(halves, ranks=2):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(whole), rtol=1e-6, atol=1e-6)


def refused(world: World, plan: dict, sizes: dict) -> str:
    options = PlanOptions(device="cpu", global_batch=8, **plan)
    dims = ParallelDims(
        chosen := derive_plan(options, world_size=world.world_size, device="cpu", native_bf16=False), world
    )
    with pytest.raises(PlanError) as caught:
        parallelize(chosen, model(sizes), dims)
    return str(caught.value)


def test_what_cannot_be_cut_is_refused(pool: Pool) -> None:
    plan = {"dp_shard": 2, "ep": 2}
    assert pool.run(refused, plan, {"num_experts": 0}, ranks=2)[0] == (
        "plan.ep=2 for GPT, which has no experts\n"
        "  rule: ep spreads the experts of models.moe.Experts over ranks\n"
        "  so:   it would change nothing\n"
        "  try:  plan.ep=1, or model.num_experts"
    )
    assert pool.run(refused, plan, {"num_experts": 5}, ranks=2)[0] == (
        "plan.ep=2 for blocks.0.ffn.experts with 5 experts\n"
        "  rule: each rank has equally many experts\n"
        "  so:   the layer cannot be sharded\n"
        "  try:  plan.ep=1, or model.num_experts=6"
    )


def rounded(world: World, run_dir: str, changes: dict) -> list[float]:
    sizes = {"num_experts": 4, "balance": "none"}
    with tiny.trainer(run_dir, world=world, steps=3, precision="bf16", recompute="full", sizes=sizes, **changes) as run:
        return [step.loss for step in run]


def test_rows_travel_in_bf16_too(pool: Pool, tmp_path: Path) -> None:
    """And are sent again in the backward pass, where activations are computed again."""
    alone = rounded(World(JobSpec()), str(tmp_path / "alone"), {})
    together = pool.run(rounded, str(tmp_path / "run"), {"dp_shard": 2, "ep": 2}, ranks=2)
    assert together[0] == pytest.approx(alone, rel=1e-3)  # bf16 has 8 bits; a choice between near ties may differ


@pytest.mark.parametrize(
    ("ranks", "plan"), [(2, {"dp_shard": 2, "ep": 2}), (4, {"dp_shard": 4, "ep": 2, "micro_batch": 1})]
)
def test_a_run_trains_and_saves_like_one_process(pool: Pool, tmp_path: Path, ranks: int, plan: dict) -> None:
    """Through the trainer: losses, norms and the saved state, whose experts are blocks of the whole stacks."""
    together = like_one_process(pool, tmp_path, ranks, sizes={"num_experts": 4, "balance": "none"}, **plan)
    assert sum(outcome["held"] for outcome in together) == pytest.approx(1)
