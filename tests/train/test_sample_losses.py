"""Losses of single samples: those of each sample by itself, under any number of ranks and whatever the model returns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F
from pool import Pool, WorkersFailed
from torch import nn

from unisono.dist import World
from unisono.plan.options import PlanOptions
from unisono.plan.resolve import derive_plan
from unisono.train.objectives import cross_entropy, next_token
from unisono.train.sample_losses import evaluate_samples
from unisono.train.step import ForwardBackward, input_selector

SAMPLES = 11


class Points:
    """Points of three classes."""

    fingerprint = "points"

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.x, self.y = rng.normal(size=(SAMPLES, 4)).astype(np.float32), rng.integers(0, 3, SAMPLES)

    def __len__(self) -> int:
        return SAMPLES

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {"inputs": self.x[indices], "targets": self.y[indices]}


class Wrapped(nn.Module):
    """Returns its logits in a dict."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.inner(inputs)}


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def evaluated(world: World, kind: str, num_classes: int) -> tuple[Any, Any, Any]:
    model: nn.Module = tiny.model() if kind == "tokens" else linear() if kind == "tensor" else Wrapped(linear())
    options = PlanOptions(device="cpu", precision="fp32", global_batch=4 * world.world_size, micro_batch=4)
    plan = derive_plan(options, world_size=world.world_size, device="cpu", native_bf16=False)
    return evaluate_samples(
        ForwardBackward(model=model, inputs=input_selector(model), plan=plan, world=world),
        tiny.RaggedTokens(SAMPLES) if kind == "tokens" else Points(),
        objective=next_token if kind == "tokens" else cross_entropy,
        num_classes=num_classes,
        device=torch.device("cpu"),
        data_rank=world.rank,
    )


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("kind", ["tensor", "dict"])
def test_losses_and_probabilities_of_classes(pool: Pool, ranks: int, kind: str) -> None:
    data = Points()
    with torch.no_grad():
        logits = linear()(torch.from_numpy(data.x))
    losses = F.cross_entropy(logits, torch.from_numpy(data.y), reduction="none")
    for loss, target, probabilities in pool.run(evaluated, kind, 3, ranks=ranks):
        assert loss == pytest.approx(losses.numpy(), rel=1e-6)
        assert target.tolist() == data.y.tolist()
        assert probabilities == pytest.approx(logits.softmax(1).numpy(), rel=1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_losses_of_texts_are_means_over_their_own_tokens(pool: Pool, ranks: int) -> None:
    data = tiny.RaggedTokens(SAMPLES)
    batch = {name: torch.from_numpy(array) for name, array in data.read(np.arange(SAMPLES)).items()}
    with torch.no_grad():
        logits = tiny.model().eval()(batch["tokens"]).logits()
    losses = F.cross_entropy(logits.transpose(1, 2), batch["targets"], reduction="none") * batch["weights"]
    expected = losses.sum(1) / batch["weights"].sum(1)
    for loss, target, probabilities in pool.run(evaluated, "tokens", 0, ranks=ranks):
        assert loss == pytest.approx(expected.numpy(), rel=1e-5)
        assert target.tolist() == [-1] * SAMPLES
        assert probabilities.shape == (SAMPLES, 0)


def test_a_model_of_another_number_of_classes(pool: Pool) -> None:
    with pytest.raises(WorkersFailed) as raised:
        pool.run(evaluated, "tensor", 5, ranks=1)
    assert "logits [1, 3] of a sample" in str(raised.value)
