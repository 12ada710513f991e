"""A ``torch.utils.data.DataLoader`` as data: its data set, order and collate function are taken over, or it is refused.

A loader of ours replaces it, because the order of a ``DataLoader`` depends on ranks and cannot be resumed without a replay.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from unisono.data.combined import independent_draws, subset
from unisono.data.dataset import CollateFn, Dataset, MapStyle, as_dataset
from unisono.data.options import LastBatch
from unisono.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchLoaderParts:
    """Parts of a ``DataLoader`` that a ``Loader`` of ours takes over.

    Attributes:
        data: Data set or stream.
        shuffle: Whether samples are shuffled in each epoch.
        collate_fn: Its collate function; None is ours, for the default of torch.
        batch_size: Samples of a batch of one process.
        last_batch: ``drop`` for ``drop_last``, else ``rollover``, the default.
        order: The order of the samples, in words.
    """

    data: Dataset | Iterable[Any]
    shuffle: bool
    collate_fn: CollateFn | None
    batch_size: int
    num_workers: int
    last_batch: LastBatch
    order: str


def read_torch_loader(loader: DataLoader[Any]) -> TorchLoaderParts:
    """The parts of ``loader``. Raises DataError for a sampler whose order cannot be kept, by name."""
    if loader.batch_size is None or (
        not isinstance(loader.dataset, IterableDataset) and type(loader.batch_sampler) is not BatchSampler
    ):
        given = (
            "without batch_size" if loader.batch_size is None and loader.batch_sampler is None else "with batch_sampler"
        )
        kind = "" if loader.batch_sampler is None else f" {type(loader.batch_sampler).__name__}"
        raise _refused(
            f"a DataLoader {given}{kind}",
            "the samples of a step are computed from its number, for any number of ranks; a batch_sampler lists whole batches",
            "pass the data set itself; bucketed(…) groups samples of similar length",
        )
    data: Dataset | Iterable[Any]
    if isinstance(loader.dataset, IterableDataset):
        data, shuffle, order = cast("Iterable[Any]", loader.dataset), False, "the stream's own order"
    else:
        data, shuffle, order = order_by_sampler(cast("MapStyle", loader.dataset), loader.sampler)
    own_collate = loader.collate_fn is not default_collate
    return TorchLoaderParts(
        data=data,
        shuffle=shuffle,
        collate_fn=loader.collate_fn if own_collate else None,
        batch_size=loader.batch_size,
        num_workers=loader.num_workers,
        last_batch="drop" if loader.drop_last else "rollover",
        order=order,
    )


def order_by_sampler(data: MapStyle, sampler: Any) -> tuple[Dataset, bool, str]:
    """(data set, whether it is shuffled, the order in words) of a torch sampler. Raises DataError for others, by name."""
    dataset = as_dataset(data)
    kind = type(sampler)
    if kind is SequentialSampler:
        return dataset, False, "samples in order"
    if kind is RandomSampler and not sampler.replacement and sampler.num_samples == len(dataset):
        return dataset, True, "each sample once per epoch, shuffled"
    if kind is DistributedSampler:
        words = (
            "each sample once per epoch, "
            + ("shuffled" if sampler.shuffle else "in order")
            + ", shared out over all ranks"
        )
        return dataset, bool(sampler.shuffle), words
    if kind is SubsetRandomSampler:
        indices = np.asarray(list(sampler.indices), np.int64)
        return subset(dataset, indices), True, f"{len(indices)} of {len(dataset)} samples once per epoch, shuffled"
    if kind is WeightedRandomSampler and sampler.replacement:
        weights = torch.as_tensor(sampler.weights, device="cpu").double().numpy()
        words = f"{sampler.num_samples} independent draws per epoch in proportion to the weights"
        return independent_draws(dataset, weights, num_samples=sampler.num_samples), True, words
    reasons = {
        RandomSampler: "with replacement or num_samples, its draws come from a generator's state and not from the position",
        WeightedRandomSampler: "without replacement, each draw depends on all earlier draws of the epoch",
    }
    raise _refused(
        f"the sampler {kind.__name__}",
        reasons.get(
            kind, "the samples of a step are computed from its number; any other sampler gives them one after the other"
        ),
        "RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler with replacement, DistributedSampler; "
        "or weighted(…), mixture(…), bucketed(…)",
    )


def _refused(given: str, rule: str, nearest: str) -> DataError:
    return DataError(
        given=given,
        rule=rule,
        consequence="its order could not be the same on other numbers of ranks, nor after a resume",
        nearest=nearest,
    )
