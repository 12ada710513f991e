"""Dropout inside attention where its heads, or its sequences, are shared by ranks: each rank draws for its own part."""

from __future__ import annotations

import functools
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.nn.functional as F
from plans import on_ranks, save_at
from pool import Pool
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from unisono.dist import World
from unisono.parallel.context import ContextParallel
from unisono.parallel.mesh import ParallelDims
from unisono.parallel.transforms import TRANSFORMS, parallelize
from unisono.plan.options import PlanOptions
from unisono.plan.resolve import derive_plan
from unisono.plan.rules import ColwiseRowwise

T, HEADS = 8, 4
RULE = ColwiseRowwise(module="steps.*.mix", colwise=("q", "k", "v"), rowwise="out", num_heads_attr="heads")


class Mix(nn.Module):
    """Attention that looks at all places alike. Of one-hot places, what each head gives is the mask of its dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.q, self.k, self.v = (nn.Linear(T, HEADS * T, bias=False) for _ in range(3))
        self.out = nn.Linear(HEADS * T, T)
        nn.init.zeros_(self.q.weight)
        self.v.weight.data.copy_(torch.eye(T).repeat(HEADS, 1))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (self.heads, T)).transpose(1, 2) for each in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5 if self.training else 0.0)
        self.seen.append(mixed.detach())
        return self.out(mixed.transpose(1, 2).flatten(2))


class Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = Mix()
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        dropped = F.dropout(torch.ones_like(x), 0.5, self.training)
        self.kept.append(dropped)
        return x + self.mix(places) * dropped, places


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.steps = nn.ModuleList(Step() for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        x = inputs
        for step in self.steps:
            x, _ = step(x, inputs)
        return x


def masks(world: World, axes: dict[str, int], recompute: str) -> dict[str, Any]:
    """Which probabilities each layer's attention kept, what dropout between the pairs kept, and gradients."""
    options = PlanOptions(device="cpu", precision="fp32", global_batch=world.world_size, recompute=recompute, **axes)
    derived = derive_plan(options, world_size=world.world_size, device="cpu", native_bf16=False)
    plan = derived.updated(tensor_parallel={"rules": (RULE,) * ("tp" in axes)})
    dims = ParallelDims(plan, world)
    net = Net()
    context = ContextParallel(dims, net) if plan.mesh.cp > 1 else None
    whole = torch.eye(T)[None]
    batch = {"inputs": whole}
    parallelize(plan, net, dims, context, transforms=[each for each in TRANSFORMS if each.name != "fsdp"])
    torch.manual_seed(dims.rng_rank)
    if context:
        with context.micro_batch(batch):
            net(context.shard_batch(batch)["inputs"]).sum().backward()
    else:
        net(whole).square().sum().backward()
    after = torch.rand(3).tolist()
    outcome: dict[str, Any] = {
        "heads": [[(head != 0).tolist() for head in step.mix.seen[0][0]] for step in net.steps],
        "between": [step.kept[0].tolist() for step in net.steps],
        "after": after,
        "gradients": [p.grad.tolist() for p in net.parameters()],
    }
    before = torch.get_rng_state()
    with torch.no_grad():
        net.eval()(whole)
    return outcome | {"evaluation draws": not torch.equal(torch.get_rng_state(), before)}


def masks_of_all(world: World, recomputes: list[str]) -> list[dict[str, Any]]:
    return [masks(world, {"tp": 2}, each) for each in recomputes]


def test_heads_of_other_ranks_drop_other_places(pool: Pool) -> None:
    together = pool.run(masks_of_all, ["none", "none", "full", "selective"], ranks=2)
    ranks, again, *recomputed = zip(*together, strict=True)
    assert ranks[0]["between"] == ranks[1]["between"]
    assert ranks[0]["after"] == ranks[1]["after"]
    drawn = [head for rank in ranks for layer in rank["heads"] for head in layer]
    assert len(drawn) == 2 * HEADS
    assert all(one != other for one, other in combinations(drawn, 2)), "two heads drop the same"
    assert not ranks[0]["evaluation draws"]
    assert again == ranks, "it is reproducible"
    for each in recomputed:
        for name in ("gradients", "after"):
            assert [found[name] for found in each] == [found[name] for found in ranks], name


def test_ranks_of_a_sequence_drop_other_places(pool: Pool) -> None:
    ranks = pool.run(masks, {"cp": 2}, "none", ranks=2)
    rows = [[head for layer in rank["heads"] for head in layer] for rank in ranks]
    assert len(rows[0]) == len(rows[1]) == 2 * HEADS
    assert all(len(head) == T // 2 and len(head[0]) == T for head in rows[0])
    assert all(one != other for one, other in product(*rows))
    assert ranks[0]["between"] != ranks[1]["between"]


class _Drops(TorchFunctionMode):
    """Attention inside drops."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            kwargs = {**(kwargs or {}), "dropout_p": 0.2}
        return func(*args, **(kwargs or {}))


def dropping() -> nn.Module:
    """The tiny GPT with dropout in its attention and behind it."""
    model = tiny.model(num_heads=4, num_kv_heads=2, dropout=0.1)
    for block in model.blocks:
        inner = block.attention.forward

        @functools.wraps(inner)
        def forward(*args: Any, inner: Any = inner, attention: nn.Module = block.attention, **kwargs: Any) -> Any:
            if not attention.training:
                return inner(*args, **kwargs)
            with _Drops():
                return inner(*args, **kwargs)

        block.attention.forward = forward
    return model


def trained(world: World, run_dir: str, changes: dict, stop: int) -> Any:
    changes = {**changes, "steps": 4, "network": dropping()}
    return save_at(world, run_dir, changes, stop) if stop else on_ranks(world, run_dir, changes)


@pytest.mark.full
def test_resumes_bit_by_bit(pool: Pool, tmp_path: Path) -> None:
    ranks, axes = 4, {"cp": 2, "tp": 2, "sequence_parallel": True}
    changes = {**axes, "recompute": "full"}
    straight = pool.run(trained, str(tmp_path / "straight"), changes, 0, ranks=ranks)
    assert len({str(outcome["losses"]) for outcome in straight}) == 1
    pool.run(trained, str(tmp_path / "cut"), changes, 2, ranks=ranks)
    resumed = pool.run(trained, str(tmp_path / "cut"), changes, 0, ranks=ranks)
    assert [o["digest"] for o in resumed] == [o["digest"] for o in straight]
    assert resumed[0]["losses"] == straight[0]["losses"][2:]
    plain = pool.run(trained, str(tmp_path / "plain"), axes, 0, ranks=ranks)
    assert [o["digest"] for o in plain] == [o["digest"] for o in straight]
