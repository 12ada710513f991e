"""Evaluation: one pass over held-out samples, exact under any number of ranks and any uneven share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from unisono.data.dataset import Dataset
from unisono.data.loader import eval_batches
from unisono.dist import World
from unisono.parallel.device import autocast
from unisono.plan.plan import Plan
from unisono.train.metrics import LOSS, Metric
from unisono.train.objectives import Objective


def evaluate(
    model: Callable[..., Any],
    data: Dataset,
    *,
    objective: Objective,
    metrics: Mapping[str, Metric],
    inputs: Callable[[Mapping[str, Tensor]], dict[str, Tensor]],
    world: World,
    device: torch.device,
    plan: Plan,
    limit: int,
) -> dict[str, float]:
    """``loss`` and each metric over the first ``limit`` samples (0 = all). Every rank takes its share, and gets the result."""
    all_metrics = {"loss": LOSS, **metrics}
    total = torch.zeros(sum(m.size for m in all_metrics.values()), dtype=torch.float64, device=device)
    was_training = isinstance(model, nn.Module) and model.training
    if isinstance(model, nn.Module):
        model.eval()
    try:
        with torch.no_grad():
            for host_batch in eval_batches(data, plan.micro_batch, world.rank, world.world, limit or None):
                batch = {name: tensor.to(device, non_blocking=True) for name, tensor in host_batch.items()}
                with autocast(plan):
                    outputs = model(**inputs(batch))
                    loss_sum, weight = objective(outputs, batch)
                sums = [metric.sums(outputs, batch, loss_sum, weight) for metric in all_metrics.values()]
                total += torch.cat(sums)
        world.all_reduce(total)
    finally:
        if isinstance(model, nn.Module):
            model.train(was_training)
    values = iter(total.tolist())
    return {name: metric.value([next(values) for _ in range(metric.size)]) for name, metric in all_metrics.items()}
