"""Metrics as sums: exact over any number of ranks and any uneven share.

A metric turns each batch into a vector of sums; vectors are added over batches, all-reduced once, and only then turned into a
number. A mean of per-batch means, which would depend on the split, cannot be written this way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unisono.errors import ConfigError, DataError, Problem, nearest_name
from unisono.models.loss import IGNORED, LazyLogits
from unisono.train.metric_kinds import kind_problems, objective_kind
from unisono.train.objectives import OBJECTIVES, dense_logits, find_logits, find_targets, flat_weights

Batch = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """``sums(outputs, batch, loss_sum, weight)`` gives a float64 vector of ``size``; ``value`` turns the total into a number.

    Of several numbers by name, an evaluation has each as ``<metric>/<name>``.
    """

    size: int
    sums: Callable[[Any, Batch, Tensor, Tensor], Tensor]
    value: Callable[[list[float]], float | dict[str, float]]

    def __repr__(self) -> str:
        sums, value = (getattr(code, "__qualname__", type(code).__qualname__) for code in (self.sums, self.value))
        return f"Metric(size={self.size}, sums={sums}, value={value})"


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
    """(logits [n, C], targets [n], weights [n]) a few rows at a time; a target of -100 becomes 0, of weight 0."""
    entry, logits = find_targets(batch), find_logits(outputs)
    _check_class_targets(logits, entry)
    targets, weights = entry.flatten(), flat_weights(batch, entry).double()
    weights, targets = weights * (targets != IGNORED), targets.where(targets != IGNORED, 0)
    if isinstance(logits, LazyLogits):
        for rows, part in logits.chunks():
            yield part, targets[rows], weights[rows]
    else:
        yield logits.flatten(0, -2), targets, weights


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
            _check_classes(logits.shape[-1], classes)
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


Table = list[list[float]]


def _from_table(classes: int, value: Callable[[Table], float | dict[str, float]]) -> Metric:
    """A metric of the confusion matrix: the weight of samples by target (row) and predicted class (column)."""

    def sums(outputs: Any, batch: Batch, _loss_sum: Tensor, _weight: Tensor) -> Tensor:
        table = torch.zeros(classes**2, dtype=torch.float64, device=find_targets(batch).device)
        for logits, targets, weights in _logits(outputs, batch):
            _check_classes(logits.shape[-1], classes)
            table.index_add_(0, targets * classes + logits.argmax(-1), weights)
        return table

    def of_total(total: list[float]) -> float | dict[str, float]:
        return value([total[row * classes : (row + 1) * classes] for row in range(classes)])

    return Metric(size=classes**2, sums=sums, value=of_total)


def binary_f1() -> Metric:
    """F1 of class 1 of two classes; 0 if no sample is, or is predicted to be, of class 1."""

    def value(table: Table) -> float:
        both = 2 * table[1][1] + table[0][1] + table[1][0]
        return 2 * table[1][1] / both if both else 0.0

    return _from_table(2, value)


def matthews(classes: int) -> Metric:
    """Matthews correlation coefficient of ``classes`` classes, -1 to 1; 0 if all targets, or all predictions, are of one class.

    Source: Gorodkin 2004.
    """

    def value(table: Table) -> float:
        actual, predicted = [sum(row) for row in table], [sum(column) for column in zip(*table, strict=True)]
        total, hits = sum(actual), sum(table[n][n] for n in range(classes))
        covariance = hits * total - sum(a * p for a, p in zip(actual, predicted, strict=True))
        spread = (total**2 - sum(p * p for p in predicted)) * (total**2 - sum(a * a for a in actual))
        return covariance / math.sqrt(spread) if spread > 0 else 0.0

    return _from_table(classes, value)


def confusion_matrix(classes: int) -> Metric:
    """The weight of samples by target and predicted class: the values ``<target>/<predicted>``."""

    def value(table: Table) -> dict[str, float]:
        return {
            f"{target}/{predicted}": table[target][predicted]
            for target in range(classes)
            for predicted in range(classes)
        }

    return _from_table(classes, value)


AUC_BINS = 1 << 14


def auc() -> Metric:
    """Area under the ROC curve of class 1 of two classes: how often a sample of class 1 has the higher score.

    The score is the logit [B] or [B, 1], or the difference of the logits [B, 2]. Scores are counted in 16,384 bins, equally wide
    in the logistic function of the score, and two scores in one bin count as equal: the error is at most half of the share of
    pairs that fall into one bin.
    """

    def sums(outputs: Any, batch: Batch, _loss_sum: Tensor, _weight: Tensor) -> Tensor:
        logits, entry = dense_logits(outputs).double(), find_targets(batch)
        targets, weights = entry.flatten(), flat_weights(batch, entry).double()
        if logits.dim() > 1 and logits.shape[-1] == 2 and logits.numel() == 2 * targets.numel():
            logits = logits[..., 1] - logits[..., 0]
        elif logits.numel() != targets.numel():
            _check_classes(logits.shape[-1], 2)
        bins = (logits.flatten().sigmoid() * AUC_BINS).long().clamp(max=AUC_BINS - 1)
        weights = weights * (targets != IGNORED)
        counts = torch.zeros(2 * AUC_BINS, dtype=torch.float64, device=targets.device)
        return counts.index_add_(0, bins + AUC_BINS * (targets == 1), weights)

    def value(total: list[float]) -> float:
        negative, positive = total[:AUC_BINS], total[AUC_BINS:]
        below = pairs = 0.0
        for others, ones in zip(negative, positive, strict=True):
            pairs += ones * (below + others / 2)
            below += others
        return pairs / (below * sum(positive)) if below and sum(positive) else math.nan

    return Metric(size=2 * AUC_BINS, sums=sums, value=value)


SPEARMAN_BINS = 512


def spearman(low: float, high: float) -> Metric:
    """Spearman's rank correlation of predictions and targets that lie between ``low`` and ``high``.

    Both are counted in 512 equally wide bins; values in one bin have the same rank, and values outside are in the first or last
    bin. It is exact where no two different values share a bin.
    """

    def bins(values: Tensor) -> Tensor:
        return (
            ((values.flatten().double() - low) / (high - low) * SPEARMAN_BINS)
            .floor()
            .clamp(0, SPEARMAN_BINS - 1)
            .long()
        )

    def sums(outputs: Any, batch: Batch, _loss_sum: Tensor, _weight: Tensor) -> Tensor:
        predictions, targets = dense_logits(outputs), find_targets(batch)
        _check_numbers(predictions, targets)
        weights = flat_weights(batch, targets).double()
        table = torch.zeros(SPEARMAN_BINS**2, dtype=torch.float64, device=targets.device)
        return table.index_add_(0, bins(targets) * SPEARMAN_BINS + bins(predictions), weights)

    def value(total: list[float]) -> float:
        table = torch.tensor(total, dtype=torch.float64, device="cpu").view(SPEARMAN_BINS, SPEARMAN_BINS)
        count = table.sum()

        def ranks(margin: Tensor) -> Tensor:  # the mean rank of each bin, around 0
            return margin.cumsum(0) - margin / 2 - count / 2

        rows, columns = table.sum(1), table.sum(0)
        x, y = ranks(rows), ranks(columns)
        spread = float((rows * x * x).sum() * (columns * y * y).sum())
        return float(x @ table @ y) / math.sqrt(spread) if spread > 0 else math.nan

    return Metric(size=SPEARMAN_BINS**2, sums=sums, value=value)


Scale = float | tuple[float, ...]


def _errors(value: Callable[[list[float], float], float], scale: Scale) -> Metric:
    """A metric of numbers from the sums of |e|, e², t, t² and 1, for errors e and targets t, each times its weight.

    Args:
        value: ``(sums, scale) -> value``.
        scale: What targets were divided by. Of several, targets are [B, numbers], and each number has a value, by its place.
    """
    columns = len(scale) if isinstance(scale, tuple) else 1

    def sums(outputs: Any, batch: Batch, _loss_sum: Tensor, _weight: Tensor) -> Tensor:
        entry = find_targets(batch)
        _check_numbers(dense := dense_logits(outputs), entry)
        targets, predictions = entry.double().flatten(), dense.double().flatten()
        weights = flat_weights(batch, entry).double()
        errors = predictions - targets
        terms = (errors.abs(), errors.square(), targets, targets.square(), torch.ones_like(targets))
        return torch.stack([(term * weights).reshape(-1, columns).sum(0) for term in terms]).T.flatten()

    def values(total: list[float]) -> float | dict[str, float]:
        if not isinstance(scale, tuple):
            return value(total, scale)
        return {str(n): value(total[5 * n : 5 * n + 5], part) for n, part in enumerate(scale)}

    return Metric(size=5 * columns, sums=sums, value=values)


def mean_absolute_error(scale: Scale = 1.0) -> Metric:
    """Mean of |prediction - target|, times ``scale``, by which targets were divided; of each number, if that is several."""
    return _errors(lambda total, factor: factor * total[0] / total[4] if total[4] else math.nan, scale)


def root_mean_squared_error(scale: Scale = 1.0) -> Metric:
    """Root of the mean of (prediction - target)², times ``scale``; of each number, if that is several."""
    return _errors(lambda total, factor: factor * math.sqrt(total[1] / total[4]) if total[4] else math.nan, scale)


def r2(scale: Scale = 1.0) -> Metric:
    """Share of the targets' variance that the predictions explain; NaN where all targets are equal.

    ``scale`` of several numbers gives the share of each.
    """

    def value(total: list[float], _scale: float) -> float:
        variance = total[3] - total[2] ** 2 / total[4] if total[4] else 0.0
        return 1 - total[1] / variance if variance > 0 else math.nan

    return _errors(value, scale)


def _check_classes(given: int, classes: int) -> None:
    if given > classes:
        raise DataError(
            given=f"logits of {given} classes for a metric of {classes}",
            rule="the metric counts every class that the model can predict",
            consequence="the metric has no value",
            nearest=f"the metric with {given} classes, such as f1:{given} or mcc:{given}",
        )


def _check_class_targets(logits: LazyLogits | Tensor, targets: Tensor) -> None:
    wrong = ""
    if targets.is_floating_point():
        wrong = f"targets of {targets.dtype}".replace("torch.", "")
    elif isinstance(logits, Tensor) and (logits.dim() < 2 or logits.shape[-1] < 2):
        wrong = f"outputs {list(logits.shape)}, without a number for each class,"
    elif isinstance(logits, Tensor) and logits.shape[:-1].numel() != targets.numel():
        wrong = f"outputs {list(logits.shape)} and targets {list(targets.shape)}"
    if wrong:
        raise DataError(
            given=f"{wrong} for a metric of classes",
            rule="it compares the largest of the logits [B, …, C] with integer targets [B, …]",
            consequence="the metric has no value",
            nearest="mae, rmse or r2 for numbers, auc for one logit of two classes, or a Metric of your own",
        )


def _check_numbers(predictions: Tensor, targets: Tensor) -> None:
    if predictions.numel() != targets.numel():
        raise DataError(
            given=f"outputs {list(predictions.shape)} and targets {list(targets.shape)} for a metric of numbers",
            rule="it compares each target with one predicted number",
            consequence="the metric has no value",
            nearest="accuracy or f1:<classes> for classes, or a Metric of your own",
        )


LOSS = Metric(size=2, sums=_loss_sums, value=_ratio)
METRICS: dict[str, Metric] = {
    "perplexity": Metric(size=2, sums=_loss_sums, value=lambda total: math.exp(min(_ratio(total), 700.0))),
    "bits_per_byte": Metric(size=2, sums=_byte_sums, value=_ratio),
    "accuracy": top_k(1),
    "token_accuracy": top_k(1),
    "top5": top_k(5),
    "f1": binary_f1(),
    "mcc": matthews(2),
    "auc": auc(),
    "mae": mean_absolute_error(),
    "rmse": root_mean_squared_error(),
    "r2": r2(),
}
_SCALED: dict[str, Callable[[Scale], Metric]] = {"mae": mean_absolute_error, "rmse": root_mean_squared_error, "r2": r2}


def find_metric(name: str, *, scale: Scale = 1.0) -> Metric | None:
    """A built-in metric by name; None when the name is not built in. ``scale`` is of mae, rmse and r2.

    It is one of METRICS, ``top<k>``, ``f1:<classes>`` (macro), ``mcc:<classes>``, ``confusion:<classes>`` or
    ``spearman:<low>:<high>``.
    """
    if name in _SCALED and scale != 1.0:
        return _SCALED[name](scale)
    if name in METRICS:
        return METRICS[name]
    if name.startswith("top") and name[3:].isdigit() and int(name[3:]) > 0:
        return top_k(int(name[3:]))
    kind, *texts = name.split(":")
    try:
        numbers = [float(text) for text in texts] if kind == "spearman" else [int(text) for text in texts]
    except ValueError:
        return None
    match kind, numbers:
        case "f1", [int(classes)] if classes > 1:
            return f1(classes)
        case "mcc", [int(classes)] if classes > 1:
            return matthews(classes)
        case "confusion", [int(classes)] if classes > 1:
            return confusion_matrix(classes)
        case "spearman", [low, high] if low < high < math.inf:
            return spearman(low, high)
        case _:
            return None


def check_metric_kinds(metrics: Mapping[str, Metric | str] | Sequence[str], objective: object) -> None:
    """Raise ConfigError for metrics of classes, by name, with an objective of numbers, and the reverse."""
    names = metrics.values() if isinstance(metrics, Mapping) else [metrics] if isinstance(metrics, str) else metrics
    name = str(getattr(objective, "__name__", type(objective).__name__))
    is_known = OBJECTIVES.get(name) is objective or type(objective).__module__.startswith("torch.nn.")
    kind = objective_kind(name) if is_known else ""
    problems = [*kind_problems([name for name in names if isinstance(name, str)], kind, f"the objective {name}")]
    if problems:
        raise ConfigError(*problems)


def as_metrics(metrics: Mapping[str, Metric | str] | Sequence[str]) -> dict[str, Metric]:
    """Metrics by name, of such a mapping or of names that ``find_metric`` knows. Raises ConfigError for anything else."""
    names = [metrics] if isinstance(metrics, str) else metrics
    given: dict[str, object] = dict(names) if isinstance(names, Mapping) else {name: name for name in names}
    found = {name: find_metric(value) if isinstance(value, str) else value for name, value in given.items()}
    problems = [
        Problem(
            given=f"the metric {given[name]!r}",
            rule="a metric is a Metric, or named by one of "
            + ", ".join(METRICS)
            + ", top<k>, f1:<classes>, mcc:<classes>, confusion:<classes>, spearman:<low>:<high>",
            consequence="evaluations would not have it, and nothing was started",
            nearest=nearest_name(str(given[name]), METRICS),
        )
        for name, value in found.items()
        if not isinstance(value, Metric)
    ]
    if problems:
        raise ConfigError(*problems)
    return {name: value for name, value in found.items() if isinstance(value, Metric)}
