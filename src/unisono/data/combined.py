"""Data sets built from data sets, some with a sample order of their own: mixtures, weights, batches of similar length."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import xxhash
from numpy.typing import NDArray

from unisono.data.dataset import (
    Batch,
    Dataset,
    Ids,
    MapStyle,
    PerSampleDataset,
    as_dataset,
    location_of,
    read_items,
    read_samples,
)
from unisono.data.order.permutation import Permutation
from unisono.data.order.samplers import (
    BucketedOrder,
    IndependentOrder,
    MixtureOrder,
    SampleOrder,
    ShuffledOrder,
    WeightedOrder,
)
from unisono.data.sample_weights import inverse_frequency
from unisono.errors import DataError


@runtime_checkable
class OrderedDataset(Protocol):
    """A data set that defines its own sample order."""

    def sample_order(self, *, seed: int, global_batch: int) -> SampleOrder: ...


def mixture(datasets: Sequence[Dataset | MapStyle], weights: Sequence[float]) -> Dataset:
    """Mix several data sets in proportion to ``weights``, in any stretch of the run.

    Each source is shuffled by itself. The length is the sum of the lengths: in an epoch a small source may repeat, a
    large one may not be exhausted. Samples of one batch must have the same names and shapes.

    Args:
        datasets: The sources, each with at least one sample.
        weights: One positive weight per source, relative to each other; shares are rounded to multiples of 1/4096.

    Raises:
        DataError: A source is empty, a weight is not positive or below 1/4096 of the sum, or the numbers of weights and
            sources differ.
    """
    parts = [as_dataset(dataset) for dataset in datasets]
    sizes = [len(part) for part in parts]
    MixtureOrder(sizes, weights, seed=0)  # raises for invalid weights
    return _ReorderedDataset(
        _JoinedDataset(parts),
        f"mixture:{list(weights)}",
        lambda seed, global_batch: MixtureOrder(sizes, weights, seed=seed),
    )


def concatenated(datasets: Sequence[Dataset | MapStyle]) -> Dataset:
    """The samples of several data sets, one after the other. Samples of one batch must have the same names and shapes."""
    return _JoinedDataset([as_dataset(dataset) for dataset in datasets])


def weighted(dataset: Dataset | MapStyle, weights: Sequence[float] | NDArray[np.float64]) -> Dataset:
    """Read each sample of ``dataset`` in proportion to its weight; an epoch has as many reads as there are samples.

    Takes 8 bytes of memory per sample. ``1 / count of the sample's class`` balances classes (``balancing_weights``).

    Args:
        dataset: The samples.
        weights: [samples] float, finite and >= 0, relative to each other; a sample of weight 0 is never read.

    Raises:
        DataError: A weight is negative or not finite, all are 0, or their number is not that of the samples.

    Source:
        Systematic sampling: Madow 1949.
    """
    base = as_dataset(dataset)
    sample_weights = np.asarray(weights, np.float64)
    _check_length(base, sample_weights, "weights")
    WeightedOrder(sample_weights, seed=0)
    return _ReorderedDataset(
        base,
        f"weighted:{xxhash.xxh3_64_hexdigest(sample_weights.tobytes())}",
        lambda seed, global_batch: WeightedOrder(sample_weights, seed=seed),
    )


def independent_draws(
    dataset: Dataset | MapStyle, weights: Sequence[float] | NDArray[np.float64], *, num_samples: int
) -> Dataset:
    """Draw samples of ``dataset`` independently, with replacement, in proportion to their weights.

    The draws of torch's ``WeightedRandomSampler``; ``weighted`` draws each sample evenly instead, and varies less.

    Args:
        dataset: The samples.
        weights: [samples] float, finite and >= 0, relative to each other.
        num_samples: Draws of one epoch, which is the length of the result.

    Raises:
        DataError: As ``weighted``.
    """
    base = as_dataset(dataset)
    sample_weights = np.asarray(weights, np.float64)
    _check_length(base, sample_weights, "weights")
    IndependentOrder(sample_weights, seed=0)
    return _ReorderedDataset(
        base,
        f"draws:{num_samples}:{xxhash.xxh3_64_hexdigest(sample_weights.tobytes())}",
        lambda seed, global_batch: IndependentOrder(sample_weights, seed=seed),
        length=num_samples,
    )


def subset(dataset: Dataset | MapStyle, indices: Sequence[int] | NDArray[np.int64]) -> Dataset:
    """The samples of ``dataset`` at ``indices``, as a data set. Raises DataError for an index out of range."""
    base = as_dataset(dataset)
    ids = np.asarray(indices, np.int64)
    if ids.ndim != 1 or not ids.size or ids.min() < 0 or ids.max() >= len(base):
        raise DataError(
            given=f"indices of shape {list(ids.shape)} from {ids.min(initial=0)} to {ids.max(initial=0)}",
            rule=f"indices are a list of numbers from 0 to {len(base) - 1}, at least one",
            consequence="there is no sample to read for some of them",
            nearest="make them with range(len(dataset)), and count from the beginning",
        )
    return _SubsetDataset(base, ids)


def balancing_weights(labels: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float64]:
    """Weights for ``weighted`` with which each class is read equally often.

    Args:
        labels: [samples] class of each sample, as integers.

    Returns:
        [samples] float64: 1 / number of samples of the same class.
    """
    _, classes, counts = np.unique(np.asarray(labels), return_inverse=True, return_counts=True)
    return inverse_frequency(counts)[classes]


def bucketed(
    dataset: Dataset | MapStyle, lengths: Sequence[int] | NDArray[np.int64], *, window_batches: int = 64
) -> Dataset:
    """Batch samples of similar length together, for less padding.

    Each epoch is shuffled, or in the order of a ``mixture`` or ``weighted`` data set; then every ``window_batches`` global
    batches are regrouped by length, and the batches of a window are shuffled. Each sample is read as often as without.

    Args:
        dataset: The samples.
        lengths: [samples] int, the length of each sample in any unit.
        window_batches: Global batches sorted together; more give less padding and a coarser shuffle.

    Raises:
        DataError: The number of lengths is not that of the samples.
    """
    base = as_dataset(dataset)
    sample_lengths = np.asarray(lengths, np.int64)
    _check_length(base, sample_lengths, "lengths")
    size = len(base)

    def make_order(seed: int, global_batch: int) -> SampleOrder:
        if isinstance(base, OrderedDataset):
            inner = base.sample_order(seed=seed, global_batch=global_batch)
        else:
            inner = ShuffledOrder(Permutation(size, seed=seed))
        return BucketedOrder(
            inner, sample_lengths, size=size, batch=global_batch, window_batches=window_batches, seed=seed
        )

    return _ReorderedDataset(
        base, f"bucketed:{window_batches}:{xxhash.xxh3_64_hexdigest(sample_lengths.tobytes())}", make_order
    )


def mapped(dataset: Dataset | MapStyle, function: Callable[[Batch], Batch]) -> Dataset:
    """Apply a deterministic ``function`` to each sample of ``dataset``, such as decoding.

    Randomness belongs into the loader's ``transform``. ``cached(mapped(…))`` caches the results.

    Args:
        dataset: The samples.
        function: Gets one sample, a dict of arrays without a batch dim, and returns the new sample. The fingerprint of
            the result has the function's qualified name, and for a dataclass its settings.
    """
    return _MappedDataset(as_dataset(dataset), function)


class _MappedDataset(PerSampleDataset):
    def __init__(self, base: Dataset, function: Callable[[Batch], Batch]) -> None:
        self._base, self._function = base, function
        # the repr of a dataclass includes its settings; a function has only a name
        name = (
            repr(function) if is_dataclass(function) else getattr(function, "__qualname__", type(function).__qualname__)
        )
        self.fingerprint = f"{function.__module__}.{name}:{base.fingerprint}"

    def __len__(self) -> int:
        return len(self._base)

    def samples(self, indices: Ids) -> list[Batch]:
        return [self._function(sample) for sample in read_samples(self._base, indices)]

    def location(self, index: int) -> str:
        return location_of(self._base, index)


class _JoinedDataset(PerSampleDataset):
    def __init__(self, parts: list[Dataset]) -> None:
        self._parts = parts
        self._starts = np.cumsum([0, *(len(part) for part in parts)])
        self.fingerprint = f"[{', '.join(part.fingerprint for part in parts)}]"

    def __len__(self) -> int:
        return int(self._starts[-1])

    def samples(self, indices: Ids) -> list[Batch]:
        by_row: dict[int, Batch] = {}
        homes = np.searchsorted(self._starts, indices, side="right") - 1
        for home in np.unique(homes).tolist():
            rows = np.flatnonzero(homes == home)
            samples = read_samples(self._parts[home], indices[rows] - self._starts[home])
            by_row |= dict(zip(rows.tolist(), samples, strict=True))
        return [by_row[row] for row in range(len(indices))]

    def location(self, index: int) -> str:
        home = int(np.searchsorted(self._starts, index, side="right")) - 1
        return location_of(self._parts[home], index - int(self._starts[home]))


class _SubsetDataset(PerSampleDataset):
    def __init__(self, base: Dataset, ids: Ids) -> None:
        self._base, self._ids = base, ids
        self.class_names: dict[str, tuple[str, ...]] = getattr(base, "class_names", {})
        self.column_faults: Mapping[str, DataError] = getattr(base, "column_faults", {})
        self.fingerprint = f"subset:{xxhash.xxh3_64_hexdigest(ids.tobytes())}:{base.fingerprint}"

    def __len__(self) -> int:
        return len(self._ids)

    def read(self, indices: Ids) -> Batch:
        return self._base.read(self._ids[indices])

    def samples(self, indices: Ids) -> list[Batch]:
        return read_samples(self._base, self._ids[indices])

    def items(self, indices: Ids) -> list[Any]:
        return read_items(self._base, self._ids[indices])

    def location(self, index: int) -> str:
        return location_of(self._base, int(self._ids[index]))


class _ReorderedDataset:
    """``base`` in another order. With a ``length`` of its own, numbers from the size of ``base`` on repeat its samples."""

    def __init__(
        self, base: Dataset, how: str, make_order: Callable[[int, int], SampleOrder], *, length: int | None = None
    ) -> None:
        self._base, self._make_order = base, make_order
        self._length = len(base) if length is None else length
        self.fingerprint = f"{how}:{base.fingerprint}"

    def __repr__(self) -> str:
        return f"ReorderedDataset({len(self)} of {self._base!r})"

    def __len__(self) -> int:
        return self._length

    def sample_order(self, *, seed: int, global_batch: int) -> SampleOrder:
        return self._make_order(seed, global_batch)

    def read(self, indices: Ids) -> Batch:
        return self._base.read(indices % len(self._base))

    def samples(self, indices: Ids) -> list[Batch]:
        return read_samples(self._base, indices % len(self._base))

    def items(self, indices: Ids) -> list[Any]:
        return read_items(self._base, indices % len(self._base))

    def location(self, index: int) -> str:
        return location_of(self._base, index % len(self._base))


def _check_length(base: Dataset, values: NDArray[Any], what: str) -> None:
    if len(values) != len(base):
        raise DataError(
            given=f"{len(values)} {what} for {len(base)} samples",
            rule=f"there is one of the {what} for each sample, in the data set's order",
            consequence="they cannot be matched",
            nearest="make them from the same list as the data set",
        )
