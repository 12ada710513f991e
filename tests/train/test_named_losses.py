"""Several losses by name: their sum is trained, and each is reported."""

from __future__ import annotations

from collections.abc import Mapping
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
from unisono.errors import DataError
from unisono.observe.events import read_events

SAMPLES = [(torch.randn(6, generator=torch.Generator().manual_seed(n)), torch.ones(2) * (n % 3)) for n in range(24)]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def errors(outputs: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Squared errors and sizes of the outputs of each sample, [B] each."""
    return (outputs - batch["targets"]).square().sum(1), outputs.abs().sum(1)


def two_losses(outputs: Tensor, batch: Mapping[str, Tensor]) -> Any:
    square, size = errors(outputs, batch)
    return {"square": square.sum(), "size": 0.1 * size.sum()}, torch.tensor(float(len(square)))


def two_means(outputs: Tensor, batch: Mapping[str, Tensor]) -> Any:
    square, size = errors(outputs, batch)
    return {"square": square.mean(), "size": 0.1 * size.mean()}


def one_loss(outputs: Tensor, batch: Mapping[str, Tensor]) -> Any:
    square, size = errors(outputs, batch)
    return square.sum() + 0.1 * size.sum(), torch.tensor(float(len(square)))


def trainer(folder: Path, objective: Any, micro_batch: int = 8, **changes: Any) -> Trainer:
    given: dict[str, Any] = {
        "model": net(),
        "data": from_map_style(SAMPLES),
        "plan": PlanOptions(
            device="cpu", precision="fp32", global_batch=8, micro_batch=micro_batch, **changes.pop("plan", {})
        ),
        "objective": objective,
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        "options": TrainOptions(steps=4, eval_every_steps=0),
        "loader": LoaderOptions(num_workers=0),
        "checkpoint": CheckpointOptions(every_steps=0),
        "run_dir": folder,
        "observe": ObserveOptions(console="off", trackers=(), report=False),
    }
    return Trainer(**(given | changes))


def plain_loop(order: list[list[int]]) -> list[dict[str, float]]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found: list[dict[str, float]] = []
    for ids in order:
        inputs, targets = (torch.stack(column) for column in zip(*(SAMPLES[n] for n in ids), strict=True))
        losses = two_means(model(inputs), {"targets": targets})
        optimizer.zero_grad()
        sum(losses.values()).backward()
        optimizer.step()
        found.append({name: loss.item() for name, loss in losses.items()})
    return found


def close(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=2e-5)


@pytest.mark.parametrize("micro_batch", [8, 2])
@pytest.mark.parametrize("objective", [two_losses, two_means])
def test_the_sum_is_trained_and_each_is_reported(tmp_path: Path, objective: Any, micro_batch: int) -> None:
    with trainer(tmp_path / "one", one_loss) as run:
        order, total = zip(*((step.sample_ids.tolist(), step.loss) for step in run), strict=True)
    expected = plain_loop(list(order))
    with trainer(tmp_path / "named", objective, micro_batch, eval_data=from_map_style(SAMPLES)) as run:
        steps = list(run)
        events = [e for e in read_events(run.events.path).events if e["kind"] == "step"]
        value = run.evaluate()["loss"]
    close([step.losses for step in steps], expected)
    assert [step.loss for step in steps] == pytest.approx(list(total), rel=2e-5)
    close([{name: e[f"train/loss/{name}"] for name in ("square", "size")} for e in events], expected)
    with trainer(tmp_path / "one", one_loss, eval_data=from_map_style(SAMPLES)) as run:
        assert run.evaluate()["loss"] == pytest.approx(value, rel=2e-5)


def losses_of(world: World, folder: str, layout: dict[str, Any]) -> list[dict[str, float]]:
    with trainer(Path(folder), two_losses, 2, world=world, model=net, plan=layout) as run:
        return [step.losses for step in run]


@pytest.mark.parametrize(
    "layout", [{}, *(pytest.param(p, marks=pytest.mark.full) for p in ({"dp_shard": 2}, {"sync": "dist_local"}))]
)
def test_ranks_report_the_whole_batch(pool: Pool, tmp_path: Path, layout: dict[str, Any]) -> None:
    with trainer(tmp_path / "one", two_losses) as run:
        one = [step.losses for step in run]
    found = pool.run(losses_of, str(tmp_path / "two"), layout, ranks=2)
    if "sync" in layout:  # each rank has losses of its own part
        close([{name: (a[name] + b[name]) / 2 for name in a} for a, b in zip(*found, strict=True)][:1], one[:1])
        return
    for losses in found:
        close(losses, one)


class Blocks(nn.Module):
    """Blocks that a pipeline can divide."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)])
        self.head = nn.Linear(6, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return self.head(inputs)


def losses_of_stages(world: World, folder: str) -> list[dict[str, float]]:
    with trainer(Path(folder), two_losses, 4, world=world, model=Blocks, plan={"pp": 2}) as run:
        return [step.losses for step in run]


@pytest.mark.full
def test_stages_report_the_losses_of_the_last(pool: Pool, tmp_path: Path) -> None:
    with trainer(tmp_path / "one", two_losses, model=Blocks()) as run:
        one = [step.losses for step in run]
    for losses in pool.run(losses_of_stages, str(tmp_path / "two"), ranks=2):
        close(losses, one)


def test_a_loss_may_be_absent_from_a_micro_batch(tmp_path: Path) -> None:
    def sometimes(outputs: Tensor, batch: Mapping[str, Tensor]) -> Any:
        losses, weight = two_losses(outputs, batch)
        seen.append(0)
        return (losses if len(seen) % 2 else {"square": losses["square"]}), weight

    seen: list[int] = []
    with trainer(tmp_path, sometimes, 4) as run:
        assert all(step.losses.keys() == {"square", "size"} for step in run)


@pytest.mark.parametrize(
    ("losses", "given"),
    [
        ({}, "an objective that returned no loss"),
        ({"square": torch.ones(2)}, "an objective whose loss 'square' is a tensor [2]"),
        ({"square": 1.5}, "an objective whose loss 'square' is a float"),
    ],
)
def test_losses_are_numbers(tmp_path: Path, losses: Any, given: str) -> None:
    with pytest.raises(DataError) as caught, trainer(tmp_path, lambda outputs, batch: (losses, torch.ones(()))) as run:
        next(iter(run))
    assert str(caught.value) == (
        f"{given}\n"
        "  rule: named losses are a mapping of names to 0-dim tensors, and their sum is trained\n"
        "  so:   there is nothing to train on\n"
        '  try:  return {"loss": losses.sum()}, weights.sum()'
    )


def test_a_name_that_comes_later_is_refused(tmp_path: Path) -> None:
    def late(outputs: Tensor, batch: Mapping[str, Tensor]) -> Any:
        seen.append(0)
        return {"other" if len(seen) > 2 else "square": errors(outputs, batch)[0].sum()}, torch.tensor(8.0)

    seen: list[int] = []
    with pytest.raises(DataError) as caught, trainer(tmp_path, late) as run:
        list(run)
    assert str(caught.value) == (
        "a loss 'other', which was absent in the first step (it had square)\n"
        "  rule: the first step of a process has all losses; one may be absent later, and then counts as 0\n"
        "  so:   it would not be reported\n"
        "  try:  a zero under that name where there is none"
    )
