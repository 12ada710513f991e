"""Pinned placements: equal to one process, only the pinned is cut, and what cannot apply is said."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from plan_edit import changed
from pool import Pool
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from unisono.dist import JobSpec, World
from unisono.errors import PlanError
from unisono.models.gpt import GPT
from unisono.models.options import ModelOptions
from unisono.parallel.mesh import ParallelDims
from unisono.parallel.tensor.dtensor_placements import (
    resolve_placements,
    shard_function,
    shard_module,
)
from unisono.plan.options import PlanOptions
from unisono.plan.resolve import derive_plan
from unisono.plan.rules import ParameterPlacement

PINS = {"blocks.*.up.*": ("tp", None), "blocks.*.down.weight": (None, "tp"), "table.weight": (None, "tp")}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 18, bias=False)
        self.down = nn.Linear(18, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    """A table, two blocks, and a head that is the table again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def dims_of(world: World, **options: object) -> ParallelDims:
    options = {"device": "cpu", "global_batch": world.world_size, **options}
    return ParallelDims(
        derive_plan(PlanOptions(**options), world_size=world.world_size, device="cpu", native_bf16=False), world
    )


def trained(world: World, mode: str) -> dict[str, list]:
    """Losses and all parameters after steps of plain SGD on this rank's pieces."""
    model = Net().double()
    pins = {} if mode == "alone" else shard_module(model, PINS, dims_of(world, tp=world.world_size))
    if mode == "function":
        for block in model.blocks:
            block.norm.forward = shard_function(
                block.norm.forward, inputs=[(None, "tp", None)], outputs=(None, None, None)
            )
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(4):
        tokens = torch.randint(0, 11, (3, 6), generator=generator)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten(), reduction="sum")
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                assert not isinstance(parameter, DTensor)
                parameter -= 0.02 * parameter.grad
                parameter.grad = None
    return {
        "losses": losses,
        "held": sum(p.numel() for p in model.parameters()),
        "pins": pins,
        "whole": {n: joined(world, p.detach(), pins.get(n, ())).tolist() for n, p in model.named_parameters()},
    }


def joined(world: World, part: Tensor, dims: tuple[str | None, ...]) -> Tensor:
    """The whole tensor of which each rank has a part."""
    if "tp" not in dims:
        return part
    return torch.cat([torch.tensor(values) for values in world.all_gather_json(part.tolist())], dims.index("tp"))


@pytest.mark.parametrize(("mode", "ranks"), [("parameters", 2), ("parameters", 4), ("function", 2)])
def test_pinned_parameters_train_like_one_process(pool: Pool, mode: str, ranks: int) -> None:
    alone = trained(World(JobSpec()), "alone")
    for outcome in pool.run(trained, mode, ranks=ranks):
        assert outcome["losses"] == pytest.approx(alone["losses"], rel=1e-9)
        for name, values in alone["whole"].items():
            torch.testing.assert_close(
                torch.tensor(outcome["whole"][name]), torch.tensor(values), rtol=1e-9, atol=1e-9, msg=name
            )
        assert outcome["pins"]["blocks.1.down.weight"] == (None, "tp")
        assert outcome["pins"]["blocks.0.up.weight"] == ("tp", None)
        assert outcome["pins"]["blocks.0.norm.weight"] == (None,)
        assert outcome["held"] < 0.75 * alone["held"]
        assert "head.weight" not in outcome["pins"], "what is tied stays tied"


def trained_in_turns(job: JobSpec, folder: str) -> list[list[float]]:
    """Losses in jobs of the same two processes, which have the other rank each time."""
    losses = []
    for turn in range(3):
        here = replace(job, rank=(job.rank + turn) % 2)
        store = dist.FileStore(f"{folder}/{turn}", 2)
        dist.init_process_group("gloo", store=store, rank=here.rank, world_size=2, timeout=timedelta(seconds=20))
        world = World(here, group=dist.group.WORLD, timeout_s=20)
        losses.append(trained(world, "function")["losses"])
        world.close()
    return losses


def test_a_process_may_have_another_rank_in_its_next_job(pool: Pool, tmp_path: Path) -> None:
    """torch caches the mesh of DTensors, with this process's rank in it."""
    alone = trained(World(JobSpec()), "alone")
    for outcome in pool.run(trained_in_turns, str(tmp_path), ranks=2, joined=False):
        assert outcome == [pytest.approx(alone["losses"], rel=1e-9)] * 3


def gradients(world: World) -> dict[str, list]:
    """Loss and gradients of a GPT whose feed-forward layers are pinned, each by itself: what is around them stays plain."""
    torch.manual_seed(0)
    model = GPT(ModelOptions(num_layers=2, dim=8, num_heads=2, num_kv_heads=2, vocab_size=11, ffn_dim=12))
    pins = {}
    if world.group is not None:
        columns, rows = ("tp", None), (None, "tp")
        for number, block in enumerate(model.blocks):
            pinned = {"gate.weight": columns, "up.weight": columns, "down.weight": rows}
            own = shard_module(block.ffn, pinned, dims_of(world, tp=world.world_size))
            pins |= {f"blocks.{number}.ffn.{name}": dims for name, dims in own.items()}
    tokens = torch.randint(0, 11, (3, 6))
    loss = nn.functional.cross_entropy(model(tokens).logits().flatten(0, 1), tokens.flatten(), reduction="sum")
    loss.backward()
    found = {name: joined(world, p.grad, pins.get(name, ())) for name, p in model.named_parameters()}
    return {name: gradient.tolist() for name, gradient in found.items()} | {"loss": [loss.item()]}


def test_a_part_of_a_model_can_be_pinned(pool: Pool) -> None:
    alone = gradients(World(JobSpec()))
    for outcome in pool.run(gradients, ranks=2):
        for name, values in alone.items():
            torch.testing.assert_close(
                torch.tensor(outcome[name]), torch.tensor(values), rtol=1e-5, atol=1e-5, msg=name
            )


def refusals(world: World) -> list[str]:
    dims = dims_of(world, tp=world.world_size)
    found = []
    for placements in (
        {"blocks.*.upp.weight": ("tp", None), "table.weight": ("tp",)},
        {"table.weight": ("dp_shard", None)},
        {"table.*": ("tp", None), "head.weight": (None, "tp")},
    ):
        model = Net()
        with pytest.raises(PlanError) as caught:
            shard_module(model, placements, dims)
        assert {name: p.shape for name, p in model.named_parameters()} == {
            n: p.shape for n, p in Net().named_parameters()
        }
        found.append(str(caught.value))
    for value in (torch.zeros(2), 3):
        with pytest.raises(PlanError) as caught:
            shard_function(torch.relu, inputs=[("tp",)])(value)
        found.append(str(caught.value))
    net = Net()
    shard_module(net, PINS, dims)
    net.blocks[0].norm.forward = shard_function(net.blocks[0].norm.forward, inputs=[("tp",)])
    with pytest.raises(PlanError) as caught:
        net(torch.zeros(1, 4, dtype=torch.int64))
    found.append(str(caught.value))
    gpt = GPT(ModelOptions(num_layers=2, dim=8, num_heads=2, num_kv_heads=2, vocab_size=11))
    shard_module(gpt, {"blocks.*.ffn.up.weight": ("tp", None)}, dims)
    with pytest.raises(PlanError) as caught:
        gpt(torch.zeros(1, 4, dtype=torch.int64))
    return [*found, str(caught.value)]


def test_what_cannot_apply_is_said(pool: Pool) -> None:
    unknown, axis, twice, plain, number, dims, gpt = pool.run(refusals, ranks=2)[0]
    assert unknown == (
        "2 problems\n"
        "1. a placement of 'blocks.*.upp.weight'\n"
        "  rule: a placement names parameters of the model, by name or pattern\n"
        "  so:   it would act on nothing\n"
        "  try:  did you mean 'blocks.1.up.weight'?\n"
        "2. the placement ('tp',) of table.weight of shape [11, 8]\n"
        "  rule: a placement says for each dim whether it is cut\n"
        "  so:   it is unclear which dim is meant\n"
        "  try:  2 entries of 'tp' or None"
    )
    assert axis == (
        "the placement ('dp_shard', None) of 'table.weight'\n"
        "  rule: a placement has 'tp' for one dim at most and None for the others\n"
        "  so:   there are no other ranks that compute the same samples and could share it\n"
        "  try:  'tp'; placements of parameters in a strategy file have 'dp_shard' and 'ep' too"
    )
    assert twice == (
        "head.weight placed as ('tp', None) and, by 'head.weight', as (None, 'tp')\n"
        "  rule: a parameter has one placement\n"
        "  so:   it is unclear which counts\n"
        "  try:  patterns that do not overlap"
    )
    assert plain == (
        "input 0 of relu: Tensor\n"
        "  rule: a value can be moved inside a model whose parameters shard() has placed\n"
        "  so:   its placement would act on nothing\n"
        "  try:  shard(model, …) first, and None for what is no tensor"
    )
    assert dims == (
        "the placement ('tp',) of input 0 of forward of shape [1, 4, 8]\n"
        "  rule: a placement says for each dim whether it is cut\n"
        "  so:   it is unclear which dim is meant\n"
        "  try:  3 entries of 'tp' or None"
    )
    assert "input 0 of relu: int" in number
    assert gpt == (
        "GPT with pinned placements: aten.mul.Tensor got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to "
        "DTensor before calling distributed operators!\n"
        "  rule: DTensor has a rule for every operation, and tensors made in the forward pass come from inputs\n"
        "  so:   the operation cannot run on parts\n"
        "  try:  shard() on a part of the model, such as a feed-forward layer, or plan.dp_shard"
    )
    with pytest.raises(PlanError) as caught:
        shard_module(Net(), PINS, dims_of(World(JobSpec())))
    assert str(caught.value) == (
        "placements with plan.tp=1\n"
        "  rule: they shard parameters over the ranks of tp\n"
        "  so:   they would act on nothing\n"
        "  try:  plan.tp=2, or no placements"
    )


def test_a_function_is_told_at_once() -> None:
    for inputs, outputs, value in (([("tp", "tp")], None, 0), ([None], ("cp",), 1)):
        with pytest.raises(PlanError) as caught:
            shard_function(torch.relu, inputs=inputs, outputs=outputs)
        dims = outputs or inputs[0]
        assert str(caught.value).startswith(
            f"the placement {dims} of value {value} of relu\n  rule: a placement has 'tp'"
        )


@pytest.mark.parametrize(
    ("modules", "text"),
    [
        (
            {"block.*": "weight"},
            "a placement in 'block.*'\n"
            "  rule: it names modules of the model, by pattern\n"
            "  so:   it would act on nothing\n"
            "  try:  did you mean 'blocks.1'?",
        ),
        (
            {"blocks.0": "up.weight", "blocks.*.up": "weight"},
            "placements in 'blocks.0' and placements of blocks.0.up\n"
            "  rule: modules with placements hold no others, and share no parameter with the rest of the model\n"
            "  so:   a value would be asked for both as a DTensor and as a plain tensor\n"
            "  try:  placements in one module that holds both",
        ),
        (
            {"head": "weight"},
            "placements in 'head' and placements of table.weight\n"
            "  rule: modules with placements hold no others, and share no parameter with the rest of the model\n"
            "  so:   a value would be asked for both as a DTensor and as a plain tensor\n"
            "  try:  placements in one module that holds both",
        ),
    ],
)
def test_where_placements_cannot_be(modules: dict[str, str], text: str) -> None:
    """Known before any rank is asked for anything, so one process stands for two."""
    plan = derive_plan(PlanOptions(device="cpu", global_batch=2, tp=2), world_size=2, device="cpu", native_bf16=False)
    placed = tuple(ParameterPlacement(module=each, parameter=name, dims=("tp", None)) for each, name in modules.items())
    dims: Any = SimpleNamespace(plan=changed(plan, placements=placed))
    net = Net()
    with pytest.raises(PlanError) as caught:
        resolve_placements(net, dims.plan)
    assert str(caught.value) == text
    assert not any(isinstance(p, DTensor) for p in net.parameters())


def test_all_that_is_wrong_with_placements_comes_at_once() -> None:
    plan = derive_plan(PlanOptions(device="cpu", global_batch=2, tp=2), world_size=2, device="cpu", native_bf16=False)
    rows, columns = ("tp", None), (None, "tp")
    placed = (
        ParameterPlacement(module="block.*", parameter="up.weight", dims=rows),
        ParameterPlacement(module="blocks.*", parameter="up.weight", dims=rows),
        ParameterPlacement(module="blocks.0", parameter="up.weight", dims=columns),
        ParameterPlacement(module="blocks.*", parameter="down.wait", dims=columns),
        ParameterPlacement(module="blocks.*.down", inputs=((None, None, "tp"),)),
        ParameterPlacement(module="blocks.1.down", outputs=(None, None, None)),
        ParameterPlacement(module="head", outputs=(None, None, None)),
    )
    net, dims = Net(), SimpleNamespace(plan=changed(plan, placements=placed))
    with pytest.raises(PlanError) as caught:
        resolve_placements(net, dims.plan)
    assert [problem.given for problem in caught.value.problems] == [
        "a placement in 'block.*'",
        "two placements of 'up.weight' of 'blocks.0'",
        "two placements of the inputs and outputs of 'blocks.1.down'",
        "a placement of the inputs or outputs of 'head'",
        "a placement of 'down.wait'",
    ]
    assert not any(isinstance(p, DTensor) for p in net.parameters())
