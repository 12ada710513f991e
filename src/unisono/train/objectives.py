"""Objectives: ``objective(outputs, batch) -> (loss_sum, weight)``.

Both are 0-dim tensors on the device; the trainer divides the sum by the weight over all micro-batches and ranks, so neither
accumulation nor layout changes the loss. An objective sees the model's outputs only, never the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unisono.models.loss import cross_entropy_sum

Batch = Mapping[str, Tensor]
Objective = Callable[[Any, Batch], tuple[Tensor, Tensor]]


def next_token(outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Cross-entropy in nats over tokens; ``outputs`` is a ``models.loss.LazyLogits``, ``batch`` has targets, weights [B, T]."""
    return cross_entropy_sum(outputs, batch["targets"], batch["weights"])


def masked_token(outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Cross-entropy in nats over the P tokens of each text that ``data.text.masking`` chose.

    ``outputs`` is a ``models.loss.LazyLogits`` at these tokens; ``batch`` has their targets and weights [B, P].
    """
    return cross_entropy_sum(outputs, batch["targets"], batch["weights"])


def cross_entropy(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Cross-entropy of classes, in nats: ``outputs`` are logits [B, C]; ``batch`` has int64 targets [B], optional weights [B]."""
    losses = F.cross_entropy(outputs.float(), batch["targets"], reduction="none")  # [B]
    weights = batch.get("weights", torch.ones_like(losses))
    return (losses * weights).sum(), weights.sum()


def mean_squared_error(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Squared error: ``outputs`` and the targets of ``batch`` have one shape [B, …], optional weights [B]; it counts elements."""
    errors = (outputs.float() - batch["targets"].float()).square().reshape(len(outputs), -1).sum(1)  # [B]
    weights = batch.get("weights", torch.ones_like(errors))
    return (errors * weights).sum(), weights.sum() * (outputs.numel() // max(1, errors.numel()))


OBJECTIVES: dict[str, Objective] = {
    "next_token": next_token,
    "masked_token": masked_token,
    "cross_entropy": cross_entropy,
    "mean_squared_error": mean_squared_error,
}
