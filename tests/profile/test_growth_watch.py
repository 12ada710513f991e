"""What stays in memory from step to step is found with its line; what a step needs for itself, or makes once, is not."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from unisono.profile.growth_watch import GrowthWatch
from unisono.profile.rank_profile import GrowingAllocation


def line_of(mark: str) -> str:
    """The line of this file that ends with ``# mark``."""
    lines = Path(__file__).read_text().splitlines()
    return f"{__file__}:{next(n for n, text in enumerate(lines, 1) if text.endswith(f'# {mark}'))}"


def watched(body: Any, steps: int = 4) -> tuple[GrowingAllocation, ...]:
    """What stays of ``body(step)``."""
    watch = GrowthWatch(lambda: "forward")
    with watch:
        for step in range(steps):
            watch.next_step()
            body(step)
        return watch.growing()


@pytest.fixture
def train() -> Any:
    """A step of a model with AdamW, whose loss it returns."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> torch.Tensor:
        loss = model(torch.randn(64, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def test_a_step_keeps_nothing(train: Any) -> None:
    assert watched(lambda step: train()) == ()


def test_a_list_of_tensors(train: Any) -> None:
    kept: list[torch.Tensor] = []

    def step(number: int) -> None:
        train()
        kept.append(torch.ones(2**14))  # the tensor

    (found,) = watched(step)
    assert found == GrowingAllocation(
        kind="tensor", source=line_of("the tensor"), phase="forward", bytes_per_step=float(4 * 2**14)
    )


def test_views_of_what_was_there_before_are_no_growth() -> None:
    weight, kept = torch.ones(2**14), list[torch.Tensor]()
    assert watched(lambda step: kept.append(weight.view(128, 128).t())) == ()


def test_graphs_that_a_loss_keeps() -> None:
    model, kept = nn.Linear(64, 512), list[torch.Tensor]()

    def step(number: int) -> None:
        kept.append(torch.tanh(model(torch.randn(64, 64))).sum())  # the graph

    found = watched(step)
    assert [(line.kind, line.source) for line in found] == [("tensor", line_of("the graph"))]
    # the input of the layer, the result of tanh and the loss
    assert found[0].bytes_per_step == 4 * (64 * 64 + 64 * 512 + 1)


def test_arrays_and_other_objects() -> None:
    arrays: list[np.ndarray] = []
    texts: list[Any] = []

    def step(number: int) -> None:
        arrays.append(np.ones(10_000))  # the array
        texts.append([f"{number} {place}" for place in range(500)])  # the texts

    found = {line.source: line for line in watched(step)}
    assert set(found) == {line_of("the array"), line_of("the texts")}
    assert found[line_of("the array")].bytes_per_step == pytest.approx(80_000, rel=0.01)
    assert {line.kind for line in found.values()} == {"object"}


def test_a_buffer_that_is_made_once_is_no_growth() -> None:
    made: list[torch.Tensor] = []
    assert watched(lambda step: made or made.append(torch.ones(2**14))) == ()


def test_two_steps_tell_nothing() -> None:
    kept: list[torch.Tensor] = []
    assert watched(lambda step: kept.append(torch.ones(2**14)), steps=2) == ()


def test_somebody_else_s_trace_of_memory_goes_on() -> None:
    tracemalloc.start()
    try:
        watched(lambda step: None)
        assert tracemalloc.is_tracing()
    finally:
        tracemalloc.stop()
    watched(lambda step: None)
    assert not tracemalloc.is_tracing()
