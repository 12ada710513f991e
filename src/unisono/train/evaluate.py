"""Evaluation: one pass over held-out samples, exact under any number of ranks and any uneven share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from unisono.data.dataset import Dataset
from unisono.data.loading.loader import eval_batches, rank_range
from unisono.parallel.fsdp import reshard
from unisono.plan.plan import Plan
from unisono.train.forward_backward import ForwardBackward
from unisono.train.metrics import LOSS, Metric
from unisono.train.objectives import Objective


def evaluate(
    passes: ForwardBackward,
    data: Dataset,
    *,
    objective: Objective,
    metrics: Mapping[str, Metric],
    device: torch.device,
    data_rank: int,
    limit: int,
) -> dict[str, float]:
    """``loss`` and each metric over the first ``limit`` samples (0 = all). Every rank takes its share, and gets the result."""
    all_metrics = {"loss": LOSS, **metrics}
    total = torch.zeros(sum(m.size for m in all_metrics.values()), dtype=torch.float64, device=device)
    model, plan = passes.model, passes.plan
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            samples = min(limit or len(data), len(data))
            waiting = _passes(data, plan, data_rank, samples)
            # a pipeline is filled with several at a time
            while group := list(islice(waiting, 2 * plan.mesh.pp if plan.mesh.pp > 1 else 1)):
                counts = [each for _, each in group]

                def add(
                    number: int, outputs: Any, batch: Mapping[str, Tensor], counts: Sequence[bool] = counts
                ) -> None:
                    loss_sum, weight = objective(outputs, batch)
                    if counts[number]:
                        sums = [metric.sums(outputs, batch, loss_sum, weight) for metric in all_metrics.values()]
                        total.add_(torch.cat(sums))

                passes.evaluate([_copied(host, device) for host, _ in group], add)
        passes.world.all_reduce(total).div_(plan.mesh.tp)  # ranks that share a layer saw the same samples
    finally:
        reshard(model)
        model.train(was_training)
    values = iter(total.tolist())
    return {name: metric.value([next(values) for _ in range(metric.size)]) for name, metric in all_metrics.items()}


def _copied(batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


def _passes(data: Dataset, plan: Plan, rank: int, samples: int) -> Iterator[tuple[dict[str, Tensor], bool]]:
    """This rank's batches, and True; where ranks hold parts of one model, one more of any sample, and False, for a rank with
    fewer batches: the others need its part once more."""
    ranks = plan.mesh.dp_world_size
    yield from ((batch, True) for batch in eval_batches(data, plan.batch.micro_batch, rank, ranks, samples))
    own, longest = (-(-len(rank_range(samples, each, ranks)) // plan.batch.micro_batch) for each in (rank, 0))
    if plan.uses_fsdp and own < longest:
        yield next(eval_batches(data, 1, 0, 1, 1)), False
