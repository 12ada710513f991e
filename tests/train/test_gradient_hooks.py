"""torch's hooks on the gradients of parameters, against a plain loop with accumulation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn

from unisono import (
    CheckpointOptions,
    LoaderOptions,
    ObserveOptions,
    PlanOptions,
    Trainer,
    TrainOptions,
    from_map_style,
)
from unisono.dist import World
from unisono.errors import ConfigError
from unisono.train import mean_squared_error

SAMPLES = [(torch.randn(6, generator=torch.Generator().manual_seed(n)), torch.ones(2) * (n % 3)) for n in range(24)]
STEPS = 4


def masked(gradient: Tensor) -> Tensor:
    """Only the first row is trained, twice as fast."""
    return gradient * torch.tensor([2.0, 0, 0, 0])[:, None]


def halve(parameter: Tensor) -> None:
    """The gradient that is accumulated so far becomes half of it, after each micro-batch."""
    parameter.grad.mul_(0.5)


def on_tensor(model: nn.Module) -> None:
    model[0].weight.register_hook(masked)


def on_accumulation(model: nn.Module) -> None:
    model[0].weight.register_post_accumulate_grad_hook(halve)


def net(add_hook: Callable[[nn.Module], None]) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
    add_hook(model)
    return model


def trainer(folder: Path, model: nn.Module, micro_batch: int = 8, **changes: Any) -> Trainer:
    given: dict[str, Any] = {
        "model": model,
        "data": from_map_style(SAMPLES),
        "plan": PlanOptions(
            device="cpu", precision="fp32", global_batch=8, micro_batch=micro_batch, **changes.pop("plan", {})
        ),
        "objective": mean_squared_error,
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        "options": TrainOptions(steps=STEPS, eval_every_steps=0),
        "loader": LoaderOptions(num_workers=0),
        "checkpoint": CheckpointOptions(every_steps=0),
        "run_dir": folder,
        "observe": ObserveOptions(console="off", trackers=(), report=False),
    }
    return Trainer(**(given | changes))


def plain_loop(order: list[list[int]], model: nn.Module, micro_batch: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses: list[float] = []
    for ids in order:
        optimizer.zero_grad()
        total = 0.0
        for start in range(0, 8, micro_batch):
            part = ids[start : start + micro_batch]
            inputs, targets = (torch.stack(column) for column in zip(*(SAMPLES[n] for n in part), strict=True))
            loss = nn.functional.mse_loss(model(inputs), targets) * len(part) / 8
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses


@pytest.mark.parametrize("micro_batch", [8, 2])
@pytest.mark.parametrize("add_hook", [on_tensor, on_accumulation])
def test_hooks_act_as_in_a_plain_loop(tmp_path: Path, add_hook: Callable[[nn.Module], None], micro_batch: int) -> None:
    with trainer(tmp_path, net(add_hook), micro_batch) as run:
        order, losses = zip(*((step.sample_ids.tolist(), step.loss) for step in run), strict=True)
    expected = plain_loop(list(order), net(add_hook), micro_batch)
    assert list(losses) == pytest.approx(expected, rel=2e-5)
    without = plain_loop(list(order), net(lambda model: None), micro_batch)
    assert list(losses) != pytest.approx(without, rel=1e-3)


def losses_of(world: World, folder: str, layout: dict[str, Any], hook: str) -> list[float] | str:
    try:
        with trainer(Path(folder), net(globals()[hook]), 2, world=world, plan=layout) as run:
            return [step.loss for step in run]
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize("add_hook", [on_tensor, pytest.param(on_accumulation, marks=pytest.mark.full)])
def test_hooks_act_on_every_rank(pool: Pool, tmp_path: Path, add_hook: Any) -> None:
    """A hook gets the gradients of its own rank. One that acts on each micro-batch does the same as on one rank."""
    first, second = pool.run(losses_of, str(tmp_path / "two"), {}, add_hook.__name__, ranks=2)
    assert first == second
    with trainer(tmp_path / "one", net(add_hook), 4) as run:
        one = [step.loss for step in run]
    same = first == pytest.approx(one, rel=2e-5)
    assert same == (add_hook is on_tensor)  # accumulated gradients are those of fewer micro-batches on two ranks


@pytest.mark.parametrize("layout", [{"dp_shard": 2}, pytest.param({"pp": 2}, marks=pytest.mark.full)])
@pytest.mark.parametrize("add_hook", [on_tensor, pytest.param(on_accumulation, marks=pytest.mark.full)])
def test_hooks_on_sharded_parameters_are_refused(
    pool: Pool, tmp_path: Path, layout: dict[str, Any], add_hook: Any
) -> None:
    (axis,) = layout
    for text in pool.run(losses_of, str(tmp_path), layout, add_hook.__name__, ranks=2):
        assert text == (
            f"a gradient hook on '0.weight' with {axis} 2\n"
            "  rule: a hook gets the gradient of a whole parameter, and no rank has the whole model\n"
            "  so:   it would not be called, or with a part of the gradient; nothing was started\n"
            "  try:  a plan without dp_shard, tp and pp, or a hook on the output of a module"
        )
