"""Observers of a run: called at a cadence, they read and change nothing."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
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
from unisono.observe.events import read_events
from unisono.train import Every, Step, mean_squared_error

SAMPLES = [(torch.randn(6, generator=torch.Generator().manual_seed(n)), torch.ones(2) * (n % 3)) for n in range(24)]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))


def trainer(folder: Path, *callbacks: Every, steps: int = 6, **changes: Any) -> Trainer:
    given: dict[str, Any] = {
        "model": net(),
        "data": from_map_style(SAMPLES),
        "plan": PlanOptions(device="cpu", precision="fp32", global_batch=8, **changes.pop("plan", {})),
        "objective": mean_squared_error,
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "options": TrainOptions(steps=steps, eval_every_steps=0),
        "loader": LoaderOptions(num_workers=0),
        "checkpoint": CheckpointOptions(every_steps=0),
        "run_dir": folder,
        "observe": ObserveOptions(console="off", trackers=(), report=False),
        "callbacks": callbacks,
    }
    return Trainer(**(given | changes))


def test_it_is_called_at_its_cadence_with_the_finished_step(tmp_path: Path) -> None:
    seen: list[tuple[int, float, Tensor]] = []

    def look(step: Step, model: nn.Module) -> None:
        assert not torch.is_grad_enabled()
        seen.append((step.index, step.loss, model[0].weight.clone()))

    weights: list[Tensor] = []
    losses: list[float] = []
    for steps in (3, 6):  # also after a resume
        with trainer(tmp_path, Every(steps=2, call=look), steps=steps) as run:
            for step in run:
                losses.append(step.loss)
                weights.append(run.model[0].weight.detach().clone())
    assert [index for index, _, _ in seen] == [2, 4, 6]
    assert [loss for _, loss, _ in seen] == losses[1::2]
    assert all(mine.equal(theirs) for (_, _, mine), theirs in zip(seen, weights[1::2], strict=True))


def test_it_changes_no_bit_of_the_run(tmp_path: Path) -> None:
    """Not even one that draws random numbers and evaluates the model."""

    def look(step: Step, model: nn.Module) -> None:
        torch.rand(3), random.random(), np.random.rand()
        model.eval()
        model(torch.ones(2, 6))

    runs: list[list[float]] = []
    for name, callbacks in (("without", ()), ("with", (Every(steps=1, call=look),))):
        with trainer(tmp_path / name, *callbacks) as run:
            runs.append([step.loss for step in run])
            assert all(module.training for module in run.model.modules())
    assert runs[0] == runs[1]


def scale(step: Step, model: nn.Module) -> None:
    model[0].weight.mul_(2)


def forward(step: Step, model: nn.Module) -> None:
    model(torch.ones(2, 6))


@pytest.mark.parametrize(("call", "name"), [(scale, "0.weight"), (forward, "1.num_batches_tracked")])
def test_one_that_changes_the_model_ends_the_run(tmp_path: Path, call: Any, name: str) -> None:
    with pytest.raises(ConfigError) as caught, trainer(tmp_path, Every(steps=1, call=call)) as run:
        next(iter(run))
    assert str(caught.value) == (
        f"the callback {call.__name__} changed {name!r} of the model\n"
        "  rule: callbacks only read: results are the same with and without them\n"
        "  so:   the run ends, and the newest checkpoint is that of an earlier step\n"
        "  try:  a loop of your own around the steps (for step in run: …); model.eval() before a forward pass"
    )


def test_its_error_is_the_users_own(tmp_path: Path) -> None:
    def fail(step: Step, model: nn.Module) -> None:
        raise KeyError("mine")

    run = trainer(tmp_path, Every(steps=2, call=fail))
    with pytest.raises(KeyError, match="mine"), run:
        list(run)
    events = read_events(run.events.path).events
    assert [e["error"] for e in events if e["kind"] == "run_end"] == ["KeyError"]
    assert run.state.step == 2


@pytest.mark.parametrize(
    ("callback", "given"),
    [
        ({"steps": 0, "call": print}, "Every(steps=0, …)"),
        ({"steps": 1, "call": 3}, "Every(call=3), a int"),
    ],
)
def test_texts_of_errors(callback: Any, given: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Every(**callback)
    assert str(caught.value) == (
        f"{given}\n"
        "  rule: Every takes steps, a whole number of at least 1, and a function call(step, model)\n"
        "  so:   nothing was started\n"
        "  try:  Every(steps=100, call=lambda step, model: print(step.index, step.loss))"
    )


def watched(world: World, folder: str, layout: dict[str, Any]) -> tuple[list[int], list[float]]:
    seen: list[int] = []
    layers = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 2))

    def look(step: Step, model: nn.Module) -> None:
        model.eval()
        model(torch.ones(2, 6))
        seen.append(step.index)

    callbacks = (Every(steps=2, call=look),) if "with" in folder else ()
    with trainer(Path(folder), *callbacks, model=layers, world=world, plan=layout) as run:
        return seen, [step.loss for step in run]


@pytest.mark.parametrize("layout", [{}, pytest.param({"dp_shard": 2}, marks=pytest.mark.full)])
def test_every_rank_calls_it(pool: Pool, tmp_path: Path, layout: dict[str, Any]) -> None:
    observed = pool.run(watched, str(tmp_path / "with"), layout, ranks=2)
    assert [seen for seen, _ in observed] == [[2, 4, 6]] * 2
    assert [losses for _, losses in observed] == [
        losses for _, losses in pool.run(watched, str(tmp_path / "plain"), layout, ranks=2)
    ]
