"""Predictions of a trained model for new samples, in the order of the samples, on any number of ranks.

The samples are taken in rounds of ``ranks · batch_size``. In a round each rank reads the samples of its own share and predicts
them, then all ranks get the predictions of all: memory is bounded by a round, and the order is that of the samples whatever the
number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch

from unisono.data.dataset import Batch as Sample
from unisono.data.dataset import Dataset, check_batch, collate
from unisono.data.loading.loader import tensors_of, to_device
from unisono.data.tokens.tokenizer import Tokenizer
from unisono.dist.progress import note_progress
from unisono.errors import DataError, Problem, UnisonoError
from unisono.tasks.encoders import new_sample_encoder, padding_of
from unisono.tasks.new_samples import NewSample
from unisono.train.build import DEFAULT_BUCKETS
from unisono.train.config import RunConfig
from unisono.train.objectives import Batch
from unisono.train.predictions import OutputKind, Values
from unisono.train.step import ForwardBackward


@dataclass(frozen=True, kw_only=True, slots=True)
class NewInputs:
    """How samples become batches of a model.

    Attributes:
        encode: A sample as it is read → the parts that the model sees.
        batch: Parts → a batch.
    """

    encode: Callable[[Sample], Iterable[Sample]]
    batch: Callable[[list[Sample]], Sample]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """A prediction, or why there is none.

    Attributes:
        sample: What it is for.
        values: By the names of ``OutputKind.fields``; None for a sample that could not be read.
        problem: Why it could not; None otherwise.
    """

    sample: NewSample
    values: Values | None
    problem: Problem | None


def task_inputs(config: RunConfig, tokenizer: Tokenizer | None) -> NewInputs:
    """Samples of the run's task become batches as those of its evaluation do."""
    task, data = config.task, config.data
    buckets = config.model.vocab_size or DEFAULT_BUCKETS
    encode = new_sample_encoder(task, data, config.image, config.text, tokenizer=tokenizer, buckets=buckets)
    padding = None if tokenizer is None else padding_of(data, tokenizer, task)
    return NewInputs(encode=encode, batch=padding or _stacked)


def _stacked(samples: list[Sample]) -> Sample:
    return collate(samples, range(len(samples)))


_NUMBER = "number"


def own_inputs(data: Dataset) -> NewInputs:
    """Samples of a data set of the user's own become batches as it reads them."""

    def batch(samples: list[Sample]) -> Sample:
        return data.read(np.array([sample[_NUMBER] for sample in samples], np.int64))

    return NewInputs(encode=lambda sample: [sample], batch=batch)


def own_samples(data: Dataset, name: str) -> Iterator[NewSample]:
    """The samples of a data set of the user's own, each by its number in ``name``."""
    return (NewSample(file=name, row=at, read=partial(dict, {_NUMBER: at})) for at in range(len(data)))


def predict(
    forward_backward: ForwardBackward,
    samples: Iterable[NewSample],
    inputs: NewInputs,
    kind: OutputKind,
    *,
    batch_size: int,
    device: torch.device,
) -> Iterator[Prediction]:
    """The prediction for each sample, in order, the same on every rank. A collective, until it is exhausted.

    Args:
        forward_backward: The model, whole on every rank.
        samples: The same on every rank; a rank reads its own share alone.
        inputs: Make batches of samples.
        kind: What the outputs mean.
        batch_size: Samples that go through the model at once.
        device: Where the model is.

    Raises:
        DataError: While iterating, the model's outputs are not of ``kind``, or ``samples`` raises it.
    """
    world = forward_backward.world
    forward_backward.model.eval()
    samples = iter(samples)
    while group := list(islice(samples, world.world_size * batch_size)):
        share = group[world.rank * batch_size : (world.rank + 1) * batch_size]
        with torch.no_grad():
            found = _predict_share(forward_backward, share, inputs, kind, batch_size, device)
        everyone = (row for of_rank in world.all_gather_json(found) for row in of_rank)
        note_progress()
        for sample, (values, problem) in zip(group, everyone, strict=True):
            yield Prediction(sample=sample, values=values, problem=None if problem is None else Problem(**problem))


def without_errors(predictions: Iterable[Prediction]) -> Iterator[Prediction]:
    """The predictions up to the first sample that could not be read. Raises DataError there, with its place."""
    for prediction in predictions:
        if (problem := prediction.problem) is not None:
            raise DataError(
                replace(
                    problem,
                    given=f"{prediction.sample.place}: {problem.given}",
                    nearest=f"{problem.nearest}; or --on-error mark, which goes on with the other samples",
                )
            )
        yield prediction


def _predict_share(
    forward_backward: ForwardBackward,
    share: Sequence[NewSample],
    inputs: NewInputs,
    kind: OutputKind,
    batch_size: int,
    device: torch.device,
) -> list[tuple[Values | None, dict[str, str] | None]]:
    """(values, None) or (None, problem) of each sample of this rank's share, as JSON types."""
    read: dict[int, Sample] = {}
    problems: dict[int, dict[str, str]] = {}
    said: list[list[Values]] = [[] for _ in share]

    def parts() -> Iterator[tuple[int, Sample]]:
        for at, sample in enumerate(share):
            try:
                read[at] = sample.read()
                encoded = inputs.encode(read[at])
            except (UnisonoError, OSError) as error:
                problems[at] = asdict(_problem_of(error))
            else:
                yield from ((at, part) for part in encoded)

    def add(owners: Sequence[int], _number: int, outputs: Any, batch: Batch) -> None:
        for owner, values in zip(owners, kind.read(outputs, batch), strict=True):
            said[owner].append(values)

    waiting = parts()
    while group := list(islice(waiting, batch_size)):
        batch = tensors_of(check_batch(inputs.batch([part for _, part in group]), len(group)))
        forward_backward.evaluate([to_device(batch, device)], partial(add, [at for at, _ in group]))
    return [
        (None, problems[at]) if at in problems else (_finite(kind.finish(said[at], read[at])), None)
        for at in range(len(share))
    ]


def _problem_of(error: UnisonoError | OSError) -> Problem:
    if isinstance(error, UnisonoError):
        return error.problems[0]
    return Problem(
        given=str(error), rule="files are read", consequence="there is no sample", nearest="a file that can be read"
    )


def _finite(value: Any) -> Any:
    """JSON types without NaN and infinity, which JSON does not have: None in their place."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, list) else value
