"""Objectives: ``objective(outputs, batch) -> (loss_sum, weight)``.

Both are 0-dim tensors on the device; the trainer divides the sum by the weight over all micro-batches and ranks, so neither
accumulation nor layout changes the loss. An objective sees the model's outputs only, never the model. In place of ``loss_sum``
it may return several by name, ``{name: loss_sum}``: their sum is trained, and each is reported, divided by the same weight.

``as_objective`` makes one of a loss of ``torch.nn``, or of a function that returns a mean.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unisono.errors import ConfigError, DataError, PlanError, nearest_name
from unisono.models.loss import IGNORED, LazyLogits, cross_entropy_sum
from unisono.plan.plan import Plan
from unisono.train.named_losses import sum_losses
from unisono.train.settings import function_name

Batch = Mapping[str, Tensor]
Objective = Callable[[Any, Batch], tuple[Tensor | Mapping[str, Tensor], Tensor]]
MEAN_LOSS_NOTICE = {
    "code": "mean_loss",
    "what": "the objective returns one number, taken as the mean over the samples of a micro-batch",
    "why": "losses of micro-batches and ranks are added up by weight, and here the weight is the number of samples",
    "cost": "a mean over anything else, such as tokens, depends on how samples are divided into micro-batches",
    "fix": "return (loss_sum, weight) from the objective",
}


def next_token(outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Cross-entropy in nats over tokens.

    ``outputs`` are logits [B, T, V], have them (``find_logits``), or are a ``models.loss.LazyLogits``; ``batch`` has targets
    [B, T], the next token of each, of which -100 does not count, and optional weights [B, T].
    """
    logits = find_logits(outputs)
    if isinstance(logits, LazyLogits):
        targets = find_targets(batch)
        weights = batch.get("weights")
        return cross_entropy_sum(logits, targets, torch.ones_like(targets) if weights is None else weights)
    return cross_entropy(logits, batch)


def masked_token(outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Cross-entropy in nats over the tokens of each text that ``data.text.masking`` chose.

    ``outputs`` are as for ``next_token``, at these P tokens, and ``batch`` has their targets and weights [B, P]. Or at all tokens
    [B, T], with targets of -100 at the others. Throughput counts all tokens of the texts, also those that are not hidden.
    """
    return next_token(outputs, batch)


def cross_entropy(outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Cross-entropy of classes, in nats.

    ``outputs`` are logits [B, …, C] or have them (``find_logits``); ``batch`` has int64 targets [B, …], of which -100 does not
    count, or probabilities [B, …, C], and optional weights [B, …] or [B].
    """
    logits = dense_logits(outputs)
    targets = find_targets(batch)
    if targets.is_floating_point():  # of mixup and CutMix
        _check_shape(logits.shape, targets, logits)
        losses = F.cross_entropy(logits.float().flatten(0, -2), targets.float().flatten(0, -2), reduction="none")  # [N]
        weights = row_weights(batch, targets).to(losses.dtype)
        return (losses * weights).sum(), weights.sum()
    _check_shape(logits.shape[:-1], targets, logits)
    flat = targets.flatten()
    try:
        losses = F.cross_entropy(logits.float().flatten(0, -2), flat, reduction="none")  # [N]
    except IndexError as error:  # an accelerator has no error that can be caught
        outside = flat[(flat != IGNORED) & ((flat < 0) | (flat >= logits.shape[-1]))]
        raise DataError(
            given=f"a target of {int(outside[0])} for logits of {logits.shape[-1]} classes",
            rule=f"classes are 0 to {logits.shape[-1] - 1}; {IGNORED} does not count",
            consequence="there is no logit of that class",
            nearest=f"a model with {int(flat.max()) + 1} outputs, or targets that count from 0",
        ) from error
    weights = row_weights(batch, targets).to(losses.dtype)
    return (losses * weights).sum(), weights.sum()


def mean_squared_error(outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Squared error; it counts elements.

    ``outputs`` and the targets of ``batch`` have one shape [B, …], but for dims of size 1; optional weights [B].
    """
    predictions = dense_logits(outputs)
    targets = find_targets(batch)
    if [n for n in targets.shape if n != 1] != [n for n in predictions.shape if n != 1]:
        _check_shape(predictions.shape, targets, predictions)
    errors = (predictions.float() - targets.float().reshape(predictions.shape)).square()
    errors = errors.reshape(len(predictions), -1).sum(1)  # [B]
    weights = batch.get("weights", torch.ones_like(errors))
    return (errors * weights).sum(), weights.sum() * (predictions.numel() // max(1, errors.numel()))


def model_loss(outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """The mean loss that the model computed itself, times the number of labels in it.

    ``outputs`` have ``loss`` [] as an attribute or an entry. Its weight is their ``weight`` [], if they have one. Otherwise it is
    the number of ``labels`` of ``batch`` that are not -100; without the first of each row if the outputs are those of a causal
    language model of transformers, which shifts the labels. Labels that are floats all count. A label of weight 0 is -100 to the
    model (``train.step.input_selector``).
    """
    loss = _entry(outputs, "loss")
    if not isinstance(loss, Tensor) or loss.dim():
        raise DataError(
            given=f"a model that returned {_described(outputs)}, for the objective model_loss",
            rule="the model returns its mean loss as .loss or ['loss'], a 0-dim tensor",
            consequence="there is no loss to train on",
            nearest="entries 'labels' in the batch, which models of transformers make a loss of, or another objective",
        )
    weight = _entry(outputs, "weight")
    if weight is None:
        labels = counted_labels(batch)
        if labels is None:
            raise DataError(
                given=f"a loss of the model itself, for a batch with {', '.join(sorted(batch))}",
                rule="it is a mean over the entries of batch['labels'] that are not -100, or over outputs.weight samples",
                consequence="micro-batches could not be weighted",
                nearest="name the targets 'labels', or return {'loss': …, 'weight': …}",
            )
        shifted = labels[:, 1:] if "CausalLM" in type(outputs).__name__ else labels
        counted = shifted != IGNORED if not shifted.is_floating_point() else torch.ones_like(shifted)
        weight = counted.sum()
    weight = weight.to(loss.dtype)
    # the mean of no label is not a number
    return torch.where(weight > 0, loss, torch.zeros_like(loss)) * weight, weight


OBJECTIVES: dict[str, Objective] = {
    "next_token": next_token,
    "masked_token": masked_token,
    "cross_entropy": cross_entropy,
    "mean_squared_error": mean_squared_error,
    "model_loss": model_loss,
}


def as_objective(loss: Any, notice: Callable[[], None] = lambda: None) -> Objective:
    """An objective of ``loss``: an objective or a built-in one's name, a loss of ``torch.nn``, or a function that returns a mean.

    A loss of ``torch.nn`` is computed per element. Its weight is what its own mean divides by, so that ``ignore_index`` and class
    weights count as there. Any other ``(outputs, batch)`` that returns one 0-dim tensor, or several by name, is taken as a mean
    over the samples of its micro-batch. A mean over anything else, such as tokens, then depends on the micro-batches; ``notice``
    is called once.

    Raises:
        ConfigError: A loss of ``torch.nn`` whose weight is not known, or that is no mean; or no function.
        DataError: From the objective itself, the first time, if it returns anything else.
    """
    loss = find_objective(loss)
    if loss in OBJECTIVES.values():
        return loss
    if isinstance(loss, nn.Module) and type(loss).__module__.startswith("torch.nn."):
        return _of_module(loss)
    noticed = checked = False

    def objective(outputs: Any, batch: Batch) -> tuple[Tensor | Mapping[str, Tensor], Tensor]:
        nonlocal noticed, checked
        result = loss(outputs, batch)
        if not isinstance(result, Tensor | Mapping):
            if not checked:  # the first time is enough
                _check_pair(result, function_name(loss))
                checked = True
            return result
        total = sum_losses(cast("Tensor | Mapping[str, Tensor]", result))
        if total.dim():
            raise DataError(
                given=f"an objective that returned a tensor {list(total.shape)}",
                rule="it returns (loss_sum, weight), two 0-dim tensors, or one 0-dim tensor, the mean of its micro-batch",
                consequence="the losses could not be weighted",
                nearest="return losses.sum(), weights.sum()",
            )
        if not noticed:
            noticed = True
            notice()
        weights = batch.get("weights")
        size = len(next(iter(batch.values())))
        if weights is None:
            weight = torch.tensor(float(size), device=total.device)
        else:  # a sample that fills up the batch has weight 0
            weight = (weights.reshape(size, -1) != 0).any(1).sum().to(total.dtype)
        if isinstance(result, Mapping):
            return {name: mean * weight for name, mean in cast("Mapping[str, Tensor]", result).items()}, weight
        return result * weight, weight

    return objective


def _check_pair(result: Any, name: str) -> None:
    """Raise DataError unless ``result`` of the objective ``name`` is a loss, or several by name, and a weight."""
    parts = list(cast("tuple[Any, ...] | list[Any]", result)) if isinstance(result, tuple | list) else []
    if len(parts) == 2 and all(isinstance(part, Tensor) and not part.dim() for part in parts):
        return
    if len(parts) == 2 and isinstance(parts[0], Mapping) and isinstance(parts[1], Tensor) and not parts[1].dim():
        return  # ``sum_losses`` looks into the mapping
    returned = f"({', '.join(map(_kind, parts))}{',' if len(parts) == 1 else ''})" if parts else _kind(result)
    raise DataError(
        given=f"the objective {name}, which returned {returned}",
        rule="it returns (loss_sum, weight), two 0-dim tensors, or one 0-dim tensor, the mean of its micro-batch",
        consequence="there is no loss to train on",
        nearest="end it with: return losses.sum(), torch.tensor(float(len(losses)))",
    )


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"


def find_objective(loss: Any) -> Any:
    """The built-in objective of this name, or ``loss`` itself. Raises ConfigError for an unknown name and what is no function."""
    if isinstance(loss, str) and loss in OBJECTIVES:
        return OBJECTIVES[loss]
    if not callable(loss):
        raise ConfigError(
            given=f"the objective {loss!r}",
            rule="it is one of " + ", ".join(OBJECTIVES) + ", a loss of torch.nn, or a function (outputs, batch)",
            consequence="there is no loss, and nothing was started",
            nearest=nearest_name(loss, OBJECTIVES) if isinstance(loss, str) else "a function of outputs and batch",
        )
    return loss


def check_objective(objective: Objective, plan: Plan) -> None:
    """Raises PlanError for ``model_loss`` where ranks share sequences: the model would shift labels among parts of them."""
    if objective is model_loss and plan.mesh.cp > 1:
        raise PlanError(
            given=f"the objective model_loss with plan.cp={plan.mesh.cp}",
            rule="a model that computes its own loss gets whole sequences of labels",
            consequence="it would compare tokens with labels of other places; nothing was started",
            nearest="the objective next_token with 'targets', or plan.cp=1",
        )


def find_logits(outputs: Any) -> LazyLogits | Tensor:
    """The logits among a model's outputs: a tensor itself, ``outputs.logits`` or ``outputs["logits"]``. Raises DataError."""
    if isinstance(outputs, Tensor | LazyLogits):
        return outputs
    logits = _entry(outputs, "logits")
    if isinstance(logits, Tensor | LazyLogits):
        return logits
    raise DataError(
        given=f"a model that returned {_described(outputs)}",
        rule="a built-in objective or metric takes a tensor, or outputs with .logits or ['logits']",
        consequence="there is nothing to compare with the targets",
        nearest="return the logits from forward, or give an objective (outputs, batch) -> (loss_sum, weight)",
    )


def dense_logits(outputs: Any) -> Tensor:
    """``find_logits`` as one tensor."""
    logits = find_logits(outputs)
    return logits.logits() if isinstance(logits, LazyLogits) else logits


def find_targets(batch: Batch) -> Tensor:
    """``batch["targets"]``. Raises DataError if there is none."""
    if "targets" in batch:
        return batch["targets"]
    raise DataError(
        given=f"a batch with {', '.join(sorted(batch))}",
        rule="built-in objectives and metrics compare the outputs with batch['targets']",
        consequence="there is nothing to compare with",
        nearest="name the labels 'targets'; or the objective 'model_loss', if the model makes a loss of them itself"
        if "labels" in batch
        else "give the data set (or a transform) the entry 'targets'",
    )


def flat_weights(batch: Batch, targets: Tensor) -> Tensor:
    """The weight of each of ``targets`` [B, …] in one dim: ``batch["weights"]`` of its shape or of shape [B], by default ones."""
    weights = batch.get("weights")
    if weights is None:
        return torch.ones(targets.numel(), device=targets.device)
    if weights.dim() < targets.dim():
        weights = weights.reshape(*weights.shape, *[1] * (targets.dim() - weights.dim())).expand_as(targets)
    return weights.flatten()


def row_weights(batch: Batch, targets: Tensor, loss: Any = None) -> Tensor:
    """The weight [N] of each row of logits in a mean over classes: what an objective of classes divides its sum by.

    Args:
        batch: May have ``weights``.
        targets: Classes [B, …], of which -100 do not count, or probabilities of classes [B, …, C], which all do.
        loss: A loss of ``torch.nn`` for classes, whose ``ignore_index`` does not count and whose class weights do.
    """
    if targets.is_floating_point():
        return flat_weights(batch, targets[..., 0])
    ignored = loss.ignore_index if isinstance(loss, _CLASSES) else IGNORED
    flat = targets.flatten()
    weights = flat_weights(batch, targets) * (flat != ignored)
    class_weights = loss.weight if isinstance(loss, _CLASSES) else None
    if class_weights is None:
        return weights
    return weights * class_weights.to(flat.device)[flat.where(flat != ignored, 0)]


def counted_labels(batch: Batch) -> Tensor | None:
    """``batch["labels"]``, if any, with -100 where their weight is 0. Raises DataError for floats that have weights."""
    labels, weights = batch.get("labels"), batch.get("weights")
    if labels is None or weights is None:
        return labels
    if labels.is_floating_point():
        raise DataError(
            given="labels that are floats, with weights, for a model that computes its own loss",
            rule="a label of weight 0 is given to the model as -100, which is a number to a regression",
            consequence="samples that do not count would be trained on",
            nearest="the objective mean_squared_error with 'targets', or loader.last_batch=drop and no weights",
        )
    return labels.masked_fill(flat_weights(batch, labels).reshape(labels.shape) == 0, IGNORED)


_CLASSES = nn.CrossEntropyLoss, nn.NLLLoss
_PER_ELEMENT = nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.SoftMarginLoss


def _of_module(loss: nn.Module) -> Objective:
    """An objective of a loss of ``torch.nn``."""
    reduction = getattr(loss, "reduction", None)
    if not isinstance(loss, (*_CLASSES, *_PER_ELEMENT)) or reduction != "mean":
        raise ConfigError(
            given=f"the objective {type(loss).__name__}" + (f" with reduction={reduction!r}" if reduction else ""),
            rule="a loss of torch.nn is a mean by one of "
            + ", ".join(sorted(kind.__name__ for kind in (*_CLASSES, *_PER_ELEMENT))),
            consequence="the weight of a micro-batch is not known, and nothing was started",
            nearest="reduction='mean', which is divided by the weight of the global batch"
            if isinstance(loss, (*_CLASSES, *_PER_ELEMENT))
            else "a function (outputs, batch) -> (loss_sum, weight)",
        )
    elementwise = copy.deepcopy(loss)  # class weights move to the device
    elementwise.reduction = "none"  # pyright: ignore[reportArgumentType]

    def objective(outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        predictions, targets = dense_logits(outputs).float(), find_targets(batch)
        elementwise.to(predictions.device)
        if isinstance(loss, _CLASSES):
            if targets.is_floating_point():  # probabilities of the classes, [B, C]
                counted, weights = row_weights(batch, targets, elementwise), flat_weights(batch, targets[..., 0])
                targets = targets.float()
            else:
                _check_shape(predictions.shape[:-1], targets, predictions)
                counted, weights = row_weights(batch, targets, elementwise), flat_weights(batch, targets)
                predictions, targets = predictions.flatten(0, -2), targets.flatten()
            losses: Tensor = elementwise(predictions, targets)
        else:
            if [n for n in targets.shape if n != 1] != [n for n in predictions.shape if n != 1]:
                _check_shape(predictions.shape, targets, predictions)
            losses = elementwise(predictions, targets.float().reshape(predictions.shape))
            counted = weights = flat_weights(batch, losses)
        if "weights" in batch:
            losses = losses.flatten() * weights
        return losses.sum(), counted.sum()

    return objective


def _check_shape(expected: torch.Size, targets: Tensor, outputs: Tensor) -> None:
    if targets.shape != expected:
        raise DataError(
            given=f"targets {list(targets.shape)} for outputs {list(outputs.shape)}",
            rule=f"targets of these outputs are {list(expected)}",
            consequence="outputs and targets cannot be matched",
            nearest="a data set or transform that gives targets of that shape, or an objective of your own",
        )


def _entry(outputs: Any, name: str) -> Any:
    """``outputs[name]`` of a mapping, else ``outputs.name``; None if there is none."""
    if isinstance(outputs, Mapping):
        return cast("Mapping[str, Any]", outputs).get(name)
    return None if isinstance(outputs, Tensor) else getattr(outputs, name, None)


def _described(outputs: Any) -> str:
    if isinstance(outputs, Mapping):
        return f"{type(outputs).__name__} with {', '.join(map(str, cast('Mapping[Any, Any]', outputs))) or 'nothing'}"
    return f"a tensor {list(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs).__name__
