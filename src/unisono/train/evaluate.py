"""Evaluation: one pass over held-out samples, exact under any number of ranks and any uneven share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from unisono.data.dataset import Dataset
from unisono.data.loader import eval_batches, share
from unisono.dist import World
from unisono.parallel.device import autocast
from unisono.parallel.sharded import release
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
            for host_batch, counts in _passes(data, plan, world, min(limit or len(data), len(data))):
                batch = {name: tensor.to(device, non_blocking=True) for name, tensor in host_batch.items()}
                with world.guard_collectives("forward pass of an evaluation"), autocast(plan):
                    outputs = model(**inputs(batch))
                    loss_sum, weight = objective(outputs, batch)
                if not counts:
                    continue
                sums = [metric.sums(outputs, batch, loss_sum, weight) for metric in all_metrics.values()]
                total += torch.cat(sums)
        world.all_reduce(total).div_(plan.tp)  # ranks that share a layer saw the same samples
    finally:
        if isinstance(model, nn.Module):
            release(model)
            model.train(was_training)
    values = iter(total.tolist())
    return {name: metric.value([next(values) for _ in range(metric.size)]) for name, metric in all_metrics.items()}


def _passes(data: Dataset, plan: Plan, world: World, samples: int) -> Iterator[tuple[dict[str, Tensor], bool]]:
    """This rank's batches, and True; where ranks hold parts of one model, one more of any sample, and False, for a rank with
    fewer batches: the others need its part once more."""
    rank, ranks = world.rank // plan.tp, plan.data_ranks
    yield from ((batch, True) for batch in eval_batches(data, plan.micro_batch, rank, ranks, samples))
    own, longest = (-(-len(share(samples, each, ranks)) // plan.micro_batch) for each in (rank, 0))
    if plan.sharded and own < longest:
        yield next(eval_batches(data, 1, 0, 1, 1)), False
