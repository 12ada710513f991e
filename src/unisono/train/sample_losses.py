"""Evaluation of each sample by itself: its loss, and what the model gives each class."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unisono.data.dataset import Dataset
from unisono.data.loading.loader import eval_batches, rank_range, to_device
from unisono.data.nested import map_leaves
from unisono.data.sample_losses import VERSION, LossesOf, SampleLosses, describe_files
from unisono.dist.progress import note_progress
from unisono.errors import ConfigError, DataError
from unisono.tasks.sources import sample_files
from unisono.train.build import RunData, has_own_data
from unisono.train.config import RunConfig
from unisono.train.named_losses import sum_losses
from unisono.train.objectives import Batch, Objective, cross_entropy, dense_logits, find_targets
from unisono.train.step import ForwardBackward


def losses_of_samples(
    config: RunConfig,
    data: RunData,
    held_out: Dataset,
    forward_backward: ForwardBackward,
    objective: Objective,
    device: torch.device,
) -> SampleLosses:
    """The losses of a run's held-out samples, with the numbers that these have in their files. A collective.

    Args:
        config: Of the run.
        data: Of the run.
        held_out: Its held-out samples, collated as the model takes them.
        forward_backward: The model, whole on every rank.
        objective: Gives the loss of a sample, and its weight.
        device: Where the model is.

    Raises:
        ConfigError: The samples are not rows of files.
        DataError: The task has classes, and the model's logits or the targets are not those of one class.
    """
    rows = data.held_out_rows
    if rows is None:
        raise ConfigError(
            given="losses of single samples of the user's own data"
            if has_own_data(config)
            else "losses of windows of tokens",
            rule="a loss is written with the number of its sample in data.train or data.eval",
            consequence="no losses were written",
            nearest="data.train=FILE of a table, whose rows are the samples",
        )
    task, options = config.task, config.data
    has_classes = task.has_classes and task.kind != "sequence_labelling" and objective is cross_entropy
    loss, target, probabilities = evaluate_samples(
        forward_backward,
        held_out,
        objective=objective,
        num_classes=len(task.classes) if has_classes else 0,
        device=device,
        data_rank=forward_backward.world.rank,
    )
    files = describe_files(sample_files(options.eval or options.train, options))
    about = LossesOf(
        version=VERSION,
        num_samples=rows.total,
        target=task.target,
        classes=list(task.classes) if has_classes else [],
        files=files,
    )
    fold = np.full(len(loss), options.eval_fold)
    return SampleLosses(about=about, sample=rows.ids, loss=loss, fold=fold, target=target, probabilities=probabilities)


def evaluate_samples(
    forward_backward: ForwardBackward,
    data: Dataset,
    *,
    objective: Objective,
    num_classes: int,
    device: torch.device,
    data_rank: int,
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.float32]]:
    """Evaluate every sample by itself, on all ranks together. A collective.

    A micro-batch goes through the model at once if that returns a tensor with a row for each sample; otherwise its samples do one
    after the other. The objective always sees a single sample.

    Args:
        forward_backward: The model, whole on every rank.
        data: The samples.
        objective: Gives the loss of a sample, and its weight.
        num_classes: Classes of the task, of which a sample has one; 0 of a task without.
        device: Where the model is.
        data_rank: Number of this rank.

    Returns:
        The same on every rank: mean loss of each sample, float64 [samples], NaN where nothing counts; its class, int64
        [samples], -1 of a task without; the probability of each class, float32 [samples, num_classes].

    Raises:
        DataError: Logits or targets are not those of ``num_classes`` classes.
    """
    model, plan = forward_backward.model, forward_backward.plan
    numbers = torch.zeros(len(data), 2, dtype=torch.float64, device=device)  # loss and class
    probabilities = torch.zeros(len(data), num_classes, dtype=torch.float32, device=device)
    ranks, micro_batch = plan.mesh.dp_world_size, plan.batch.micro_batch
    share = rank_range(len(data), data_rank, ranks)

    def add(sample: int, outputs: Any, batch: Batch) -> None:
        losses, weight = objective(outputs, batch)
        numbers[sample, 0] = sum_losses(losses).double() / weight.double()
        if num_classes:
            probabilities[sample] = _probabilities(outputs, num_classes)
            numbers[sample, 1] = _target(batch)

    def add_all(first: int, size: int, _number: int, outputs: Any, batch: Batch) -> None:
        samples = [_sample_of(batch, row) for row in range(size)]
        if isinstance(outputs, Tensor) and outputs.dim() and len(outputs) == size:
            for row, sample in enumerate(samples):
                add(first + row, outputs[row : row + 1], sample)
        elif size == 1:
            add(first, outputs, batch)
        else:
            forward_backward.evaluate(samples, lambda row, found, sample: add(first + row, found, sample))

    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            batches = eval_batches(data, micro_batch, data_rank, ranks)
            for first, batch in zip(range(share.start, share.stop, micro_batch), batches, strict=True):
                size = min(micro_batch, share.stop - first)
                forward_backward.evaluate([to_device(batch, device)], partial(add_all, first, size))
                note_progress()
        forward_backward.world.all_reduce(numbers)  # each rank has the rows of its own samples, and zeros
        forward_backward.world.all_reduce(probabilities)
    finally:
        model.train(was_training)
    loss, target = numbers.cpu().numpy().T
    classes = target.astype(np.int64) if num_classes else np.full(len(data), -1)
    return np.ascontiguousarray(loss), classes, probabilities.cpu().numpy()


def _sample_of(batch: Batch, row: int) -> dict[str, Any]:
    return {name: map_leaves(lambda tensor: tensor[row : row + 1], entry) for name, entry in batch.items()}


def _probabilities(outputs: Any, num_classes: int) -> Tensor:
    logits = dense_logits(outputs)
    if tuple(logits.shape) != (1, num_classes):
        raise _unfit(f"logits {list(logits.shape)} of a sample")
    return torch.softmax(logits[0].float(), 0)


def _target(batch: Batch) -> Tensor:
    targets = find_targets(batch)
    if targets.numel() != 1 or targets.is_floating_point():
        raise _unfit(f"targets {list(targets.shape)} of a sample")
    return targets.reshape(())


def _unfit(given: str) -> DataError:
    return DataError(
        given=given,
        rule="the losses of single samples come with the probability of each class of the task, and a sample has one class",
        consequence="they were not written",
        nearest="a model with an output for each of task.classes; unisono eval without --sample-losses has mean values",
    )
