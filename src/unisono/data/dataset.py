"""The ``Dataset`` protocol, and an adapter for PyTorch's map-style datasets.

Not here: iterable-style datasets (``loading.stream_loader``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from unisono.errors import DataError

Batch = dict[str, NDArray[Any]]
Ids = NDArray[np.int64]


@runtime_checkable
class Dataset(Protocol):
    """Protocol of a data set: samples by number, read in batches.

    Attributes:
        fingerprint: Identifies the samples; it must change whenever a sample does, so that a resumed run notices.
    """

    fingerprint: str

    def __len__(self) -> int: ...

    def read(self, indices: NDArray[np.int64]) -> Batch:
        """Named arrays whose first dim is ``len(indices)``, in new memory that the caller may modify."""
        ...


@runtime_checkable
class PerSampleDataset(Protocol):
    """A data set that can return samples of different shapes, which a transform makes equal."""

    def samples(self, indices: NDArray[np.int64]) -> list[Batch]: ...

    def read(self, indices: NDArray[np.int64]) -> Batch:
        """Samples by number, stacked along a new first dim."""
        return collate(self.samples(indices), indices.tolist())


TYPE_AND_LENGTH = "map:"  # how a fingerprint begins that says no more of the samples


class MapStyle(Protocol):
    """Anything with a length whose items are samples: ``torch.utils.data.Dataset``, a list, …"""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def as_dataset(data: Dataset | MapStyle) -> Dataset:
    """Return ``data`` itself if it is a ``Dataset``, else ``from_map_style(data)``."""
    return data if isinstance(data, Dataset) else from_map_style(data)


def from_map_style(data: MapStyle, *, fingerprint: str = "") -> Dataset:
    """Adapt a map-style dataset: read it sample by sample and stack the samples of a batch.

    A sample is a dict of named values, a named tuple, a pair (x, y), which becomes ``inputs`` and ``targets``, or one
    value, which becomes ``inputs``. Values are tensors, arrays or numbers; Python floats become float32, ints int64.
    Put randomness into the loader's ``transform``, whose generator is keyed by sample: random numbers that
    ``__getitem__`` takes from global generators are not reproduced by a resumed run.

    Args:
        data: ``torch.utils.data.Dataset``, list, or any other object with a length and items. If it has
            ``__getitems__``, one call reads all samples of a batch, as in PyTorch.
        fingerprint: Identifies the samples; it should change when they do, so that a resumed run notices. By default
            the ``fingerprint`` attribute of ``data``, or else its type and length.

    Raises:
        DataError: While reading, for samples that cannot be stacked: names, shapes or dtypes other than those of the
            first.
    """
    kind = type(data)
    default = f"{TYPE_AND_LENGTH}{kind.__module__}.{kind.__qualname__}:{len(data)}"
    return _MapStyleDataset(data, fingerprint or str(getattr(data, "fingerprint", "")) or default)


class _MapStyleDataset(PerSampleDataset):
    def __init__(self, data: MapStyle, fingerprint: str) -> None:
        self.fingerprint = fingerprint
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def samples(self, indices: Ids) -> list[Batch]:
        ids = cast("list[int]", indices.tolist())
        many = getattr(self._data, "__getitems__", None)
        samples = many(ids) if many is not None else [self._data[index] for index in ids]
        return [check_sample(sample) for sample in samples]


def read_samples(dataset: Dataset, indices: Ids) -> list[Batch]:
    """Samples of any data set, one by one. Raises DataError for arrays of another length than ``indices``."""
    if isinstance(dataset, PerSampleDataset):
        return dataset.samples(indices)
    batch = check_batch(dataset.read(indices), indices.size)
    return [{name: array[row] for name, array in batch.items()} for row in range(indices.size)]


def check_batch(batch: Batch, count: int) -> Batch:
    """Return ``batch``. Raises DataError if an array's first dim is not ``count``."""
    for name, array in batch.items():
        if array.ndim == 0 or len(array) != count:
            raise DataError(
                given=f"{name!r} of shape {list(array.shape)} from reading {count} samples",
                rule="the first dim of each array is the number of samples asked for",
                consequence="samples and values cannot be matched",
                nearest=f"return {name!r} with shape [{count}, …]",
            )
    return batch


def check_sample(sample: Any) -> Batch:
    """Convert one sample to named arrays by the rules of ``from_map_style``. Raises DataError."""
    if isinstance(sample, Mapping):
        items = cast("Mapping[str, Any]", sample)
        return {str(name): _array(str(name), value) for name, value in items.items()}
    if isinstance(sample, tuple | list):
        values = cast("Sequence[Any]", sample)
        fields: tuple[str, ...] = getattr(values, "_fields", ("inputs", "targets"))
        if len(values) == len(fields):
            return {name: _array(name, value) for name, value in zip(fields, values, strict=True)}
        raise _unclear(f"a sample that is a {type(values).__name__} of {len(values)} values")
    return {"inputs": _array("inputs", sample)}


def collate(samples: Sequence[Batch], ids: Sequence[int]) -> Batch:
    """Stack samples along a new first dim. ``ids`` name them in errors."""
    first = samples[0]
    batch = {name: np.empty((len(samples), *value.shape), value.dtype) for name, value in first.items()}
    for row, sample in enumerate(samples):
        if sample.keys() != first.keys():
            raise _unlike(f"sample {ids[row]} has {sorted(sample)}, sample {ids[0]} has {sorted(first)}")
        for name, value in sample.items():
            like = first[name]
            if value.shape != like.shape or value.dtype != like.dtype:
                raise _unlike(
                    f"{name!r} of sample {ids[row]} is {value.dtype}{list(value.shape)}, "
                    f"of sample {ids[0]} {like.dtype}{list(like.shape)}"
                )
            batch[name][row] = value
    return batch


def _array(name: str, value: Any) -> NDArray[Any]:
    if isinstance(value, float) and not isinstance(value, np.generic):
        return np.array(value, np.float32)
    try:
        array = np.asarray(value)  # a tensor on the CPU shares its memory
    except (TypeError, ValueError, RuntimeError) as error:
        raise _unclear(f"{name!r} of a sample, {type(value).__name__}: {error}") from error
    if array.dtype.kind not in "biufc":
        raise _unclear(f"{name!r} of a sample, {type(value).__name__} of dtype {array.dtype}")
    return array


def _unclear(given: str) -> DataError:
    return DataError(
        given=given,
        rule="a sample is a dict of tensors, arrays or numbers, a pair (inputs, targets), or one such value",
        consequence="it cannot be put into a batch",
        nearest='return {"inputs": …, "targets": …} with tensors numpy has a dtype for (bfloat16 as float32)',
    )


def _unlike(given: str) -> DataError:
    return DataError(
        given=given,
        rule="the samples of a batch have the same names, shapes and dtypes",
        consequence="they cannot be stacked",
        nearest="pad or crop in the dataset or in the loader's transform, and give the loss a weight of 0 there",
    )
