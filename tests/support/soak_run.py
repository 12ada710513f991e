"""The runs that the soak kills, as a Python configuration: what they do while the file SOAK_HOLD is there, they do slowly.

Synchronous ones train the tiny GPT with dropout. Asynchronous ones count: the gradient of a sample is one at its own place and
zero elsewhere, whatever the values are, so that with SGD every value is an exact sum, in any order of pushes.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import tiny
import torch
from torch import Tensor, nn

from unisono import Components, RunConfig
from unisono.train.objectives import next_token

NUM_COUNTED = 64
PAUSE_S = 0.25


class Numbers:
    """Samples that are their own number."""

    fingerprint = "numbers-1"

    def __len__(self) -> int:
        return NUM_COUNTED

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {"number": np.asarray(indices, np.int64)}


class Counts(nn.Module):
    """Four parameters [NUM_COUNTED], for several servers to hold. Its output: the sum of their values at each sample's number."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = nn.ParameterList([nn.Parameter(torch.zeros(NUM_COUNTED)) for _ in range(4)])

    def forward(self, number: Tensor) -> Tensor:
        return torch.stack([count[number] for count in self.counts]).sum(0)


def objective(outputs: Any, batch: Any) -> Any:
    """Sum of the counted values, or the loss of the GPT."""
    if Path(os.environ["SOAK_HOLD"]).exists():
        time.sleep(PAUSE_S)
    if "number" in batch:
        return outputs.sum(), torch.tensor(float(len(outputs)))
    return next_token(outputs, batch)


def config() -> RunConfig:
    def is_counting(run: RunConfig) -> bool:
        return run.plan.sync == "dist_async"

    def model(run: RunConfig) -> nn.Module:
        return Counts() if is_counting(run) else tiny.model(dropout=0.1, num_layers=2, num_kv_heads=2)

    def data(run: RunConfig) -> tuple[Any, Any]:
        made: Any = Numbers() if is_counting(run) else tiny.RaggedTokens()
        return made, made

    return RunConfig(components=Components(model=model, data=data, objective=objective, metrics=()))
