"""Metrics as sums: exact over any number of ranks and any uneven share.

A metric turns each batch into a vector of sums; vectors are added over batches, all-reduced once, and only then turned into a
number. A mean of per-batch means, which would depend on the split, cannot be written this way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unisono.errors import DataError
from unisono.models.loss import LazyLogits

Batch = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """``sums(outputs, batch, loss_sum, weight)`` gives a float64 vector of ``size``; ``value`` turns the total into a number."""

    size: int
    sums: Callable[[Any, Batch, Tensor, Tensor], Tensor]
    value: Callable[[list[float]], float]


def _ratio(total: list[float]) -> float:
    return total[0] / total[1] if total[1] else math.nan


def _loss_sums(_outputs: Any, _batch: Batch, loss_sum: Tensor, weight: Tensor) -> Tensor:
    return torch.stack([loss_sum, weight]).double()


def _byte_sums(_outputs: Any, batch: Batch, loss_sum: Tensor, _weight: Tensor) -> Tensor:
    if "target_bytes" not in batch:
        raise DataError(
            given=f"metric 'bits_per_byte' on batches with {', '.join(sorted(batch))}",
            rule="it divides by the bytes each target stands for, batch['target_bytes']",
            consequence="the metric has no value",
            nearest="leave it out, or use a token data set of unisono",
        )
    return torch.stack([loss_sum.double() / math.log(2), batch["target_bytes"].double().sum()])


def _logits(outputs: Any, batch: Batch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(logits [n, C], targets [n], weights [n]) a few rows at a time."""
    targets = batch["targets"].flatten()
    weights = (
        batch["weights"].flatten().double() if "weights" in batch else torch.ones_like(targets, dtype=torch.float64)
    )
    if isinstance(outputs, LazyLogits):
        for rows, logits in outputs.chunks():
            yield logits, targets[rows], weights[rows]
    else:
        yield outputs.flatten(0, -2), targets, weights


def top_k(k: int) -> Metric:
    """Share of targets among the k likeliest classes."""

    def sums(outputs: Any, batch: Batch, _loss_sum: Tensor, _weight: Tensor) -> Tensor:
        total = torch.zeros(2, dtype=torch.float64, device=batch["targets"].device)
        for logits, targets, weights in _logits(outputs, batch):
            hit = (logits.topk(min(k, logits.shape[-1]), dim=-1).indices == targets[:, None]).any(-1)
            total += torch.stack([(hit * weights).sum(), weights.sum()])
        return total

    return Metric(size=2, sums=sums, value=_ratio)


def f1(classes: int) -> Metric:
    """Macro-averaged F1 over the classes that occur in targets or predictions; weights count as repetitions."""

    def sums(outputs: Any, batch: Batch, _loss_sum: Tensor, _weight: Tensor) -> Tensor:
        table = torch.zeros(3, classes, dtype=torch.float64, device=batch["targets"].device)  # hits, predicted, actual
        for logits, targets, weights in _logits(outputs, batch):
            chosen = logits.argmax(-1)
            table[0].index_add_(0, targets, weights * (chosen == targets))
            table[1].index_add_(0, chosen, weights)
            table[2].index_add_(0, targets, weights)
        return table.flatten()

    def value(total: list[float]) -> float:
        hits, predicted, actual = total[:classes], total[classes : 2 * classes], total[2 * classes :]
        scores = [2 * h / (p + a) for h, p, a in zip(hits, predicted, actual, strict=True) if p + a > 0]
        return sum(scores) / len(scores) if scores else math.nan

    return Metric(size=3 * classes, sums=sums, value=value)


LOSS = Metric(size=2, sums=_loss_sums, value=_ratio)
METRICS: dict[str, Metric] = {
    "perplexity": Metric(size=2, sums=_loss_sums, value=lambda total: math.exp(min(_ratio(total), 700.0))),
    "bits_per_byte": Metric(size=2, sums=_byte_sums, value=_ratio),
    "accuracy": top_k(1),
    "top5": top_k(5),
}


def find_metric(name: str) -> Metric | None:
    """A built-in metric: one of METRICS, ``top<k>`` or ``f1:<classes>``; None when the name is not built in."""
    if name in METRICS:
        return METRICS[name]
    if name.startswith("top") and name[3:].isdigit() and int(name[3:]) > 0:
        return top_k(int(name[3:]))
    if name.startswith("f1:") and name[3:].isdigit() and int(name[3:]) > 1:
        return f1(int(name[3:]))
    return None
