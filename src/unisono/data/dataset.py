"""The ``Dataset`` protocol, and an adapter for PyTorch's map-style datasets.

Not here: iterable-style datasets (``loading.stream_loader``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from unisono.data.nested import children, leaves, rebuild
from unisono.errors import DataError

Batch = dict[str, Any]  # arrays by name, or dicts, lists, tuples and dataclasses of arrays and strings
CollateFn = Callable[[list[Any]], Any]
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

    def __len__(self) -> int: ...

    def __repr__(self) -> str:
        return f"{type(self).__name__.lstrip('_')}({len(self)} samples)"

    def samples(self, indices: NDArray[np.int64]) -> list[Batch]: ...

    def read(self, indices: NDArray[np.int64]) -> Batch:
        """Samples by number, stacked along a new first dim."""
        return collate(self.samples(indices), indices.tolist())


_MAX_FLOAT32 = float(np.finfo(np.float32).max)


@runtime_checkable
class LocatedDataset(Protocol):
    """A data set that knows the file and row of each sample."""

    def location(self, index: int) -> str: ...


def location_of(dataset: Any, index: int) -> str:
    """Where a sample comes from, such as "row 7 of table.csv", rows counted from 1; empty if the data set does not know."""
    return dataset.location(index) if isinstance(dataset, LocatedDataset) else ""


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

    A sample is a dict of named values, a named tuple or a dataclass, a pair (x, y), which becomes ``inputs`` and
    ``targets``, or one value, which becomes ``inputs``. Values are tensors, arrays or numbers, strings, which a batch
    has as a list, or dicts, lists, tuples and dataclasses of these. Python floats become float32, ints int64.
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

    def __repr__(self) -> str:
        return f"Dataset({len(self)} samples of a {type(self._data).__name__})"

    def __len__(self) -> int:
        return len(self._data)

    def read(self, indices: Ids) -> Batch:
        items = self.items(indices)
        numbers = _stack_numbers(items)
        if numbers is not None:
            return {"inputs": numbers}
        return collate([check_sample(item) for item in items], indices.tolist())

    def samples(self, indices: Ids) -> list[Batch]:
        return [check_sample(sample) for sample in self.items(indices)]

    def items(self, indices: Ids) -> list[Any]:
        ids = cast("list[int]", indices.tolist())
        many = getattr(self._data, "__getitems__", None)
        return list(many(ids)) if many is not None else [self._data[index] for index in ids]


_NUMBERS: dict[type, Any] = {bool: np.bool_, int: np.int64, float: np.float32}


def _stack_numbers(values: list[Any]) -> NDArray[Any] | None:
    """One array of Python numbers of one type, as ``collate`` makes it; None for anything else."""
    kinds = set(map(type, values))
    dtype = _NUMBERS.get(kinds.pop()) if len(kinds) == 1 else None
    if dtype is None:
        return None
    try:
        if dtype is not np.float32:  # errstate takes a twentieth of the time of a small batch
            return np.array(values, dtype)
        with np.errstate(over="raise"):
            return np.array(values, dtype)
    except (OverflowError, FloatingPointError):  # an integer above int64, a float above float32: collate decides
        return None


def read_samples(dataset: Dataset, indices: Ids) -> list[Batch]:
    """Samples of any data set, one by one. Raises DataError for arrays of another length than ``indices``."""
    if isinstance(dataset, PerSampleDataset) and callable(dataset.samples):  # a number may have that name
        return dataset.samples(indices)
    batch = check_batch(dataset.read(indices), indices.size)
    return [{name: _row(array, row) for name, array in batch.items()} for row in range(indices.size)]


@runtime_checkable
class _HasItems(Protocol):
    """A data set that has samples as the user's code returned them."""

    def items(self, indices: Ids) -> list[Any]: ...


def read_items(dataset: Dataset, indices: Ids) -> list[Any]:
    """Samples as a ``collate_fn`` takes them: those of a map-style dataset as it returns them, others as named arrays."""
    return dataset.items(indices) if isinstance(dataset, _HasItems) else read_samples(dataset, indices)


def collated(dataset: Dataset, collate_fn: CollateFn) -> Dataset:
    """``dataset`` with batches made by ``collate_fn``, as the ``Loader``'s argument of that name makes them."""
    return _CollatedDataset(dataset, collate_fn)


class _CollatedDataset:
    def __init__(self, base: Dataset, collate_fn: CollateFn) -> None:
        self._base, self._collate_fn = base, collate_fn
        self.fingerprint = base.fingerprint

    def __repr__(self) -> str:
        return f"CollatedDataset({self._base!r})"

    def __len__(self) -> int:
        return len(self._base)

    def read(self, indices: Ids) -> Batch:
        return apply_collate(self._collate_fn, read_items(self._base, indices))

    def location(self, index: int) -> str:
        return location_of(self._base, index)


def apply_collate(collate_fn: CollateFn, samples: list[Any]) -> Batch:
    """The batch that ``collate_fn`` makes, by the naming rules of samples. Raises DataError if it cannot be a batch."""
    batch = check_sample(collate_fn(samples))
    if not any(isinstance(leaf, np.ndarray) and leaf.ndim for _, leaf in leaves(batch, "")):
        raise DataError(
            given=f"a batch without an array from collate_fn: {', '.join(sorted(batch)) or 'nothing'}",
            rule="collate_fn returns tensors or arrays whose first dim is the sample",
            consequence="there is nothing to train on",
            nearest='return {"inputs": …, "targets": …}',
        )
    return batch


def _row(value: Any, row: int) -> Any:
    """Sample ``row`` of an entry of a batch."""
    if isinstance(value, list) and (not value or not isinstance(value[0], np.ndarray)) and children(value[0]) is None:
        return value[row]  # one string for each sample
    if isinstance(value, np.ndarray):
        return value[row]
    parts = children(value)
    return value if parts is None else rebuild(value, [_row(part, row) for _, part in parts])


def check_batch(batch: Batch, count: int) -> Batch:
    """Return ``batch``. Raises DataError if an array's first dim is not ``count``."""
    for name, array in batch.items():
        if not isinstance(array, np.ndarray):
            for inner, leaf in leaves(array, name):
                if isinstance(leaf, np.ndarray):
                    check_batch({inner: leaf}, count)
        elif array.ndim == 0 or len(array) != count:
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
    if (fields_of := children(sample)) is not None:  # a dataclass
        return {name: _array(name, value) for name, value in fields_of}
    if isinstance(sample, str | bytes):  # carried along beside arrays only
        raise _unclear(f"'inputs' of a sample, {type(sample).__name__} of dtype {np.asarray(sample).dtype}")
    return {"inputs": _array("inputs", sample)}


def collate(samples: Sequence[Batch], ids: Sequence[int]) -> Batch:
    """Stack samples along a new first dim, in each nested part; strings become lists. ``ids`` name samples in errors."""
    first = samples[0]
    for row, sample in enumerate(samples):
        if sample.keys() != first.keys():
            raise _unlike(f"sample {ids[row]} has {sorted(sample)}, sample {ids[0]} has {sorted(first)}")
    return {name: _stack(name, [sample[name] for sample in samples], ids) for name in first}


def _stack(name: str, values: list[Any], ids: Sequence[int]) -> Any:
    like = values[0]
    if isinstance(like, np.ndarray | np.generic):
        stacked = np.empty((len(values), *like.shape), like.dtype)
        for row, value in enumerate(values):
            if getattr(value, "shape", None) != like.shape or value.dtype != like.dtype:
                raise _unlike(
                    f"{name!r} of sample {ids[row]} is {_describe(value)}, of sample {ids[0]} {_describe(like)}"
                )
            stacked[row] = value
        return stacked
    parts = children(like)
    if parts is None:
        return values
    keys = [key for key, _ in parts]
    columns: list[list[tuple[str, Any]]] = []
    for row, value in enumerate(values):
        column = children(value) or []
        if type(value) is not type(like) or [key for key, _ in column] != keys:
            raise _unlike(f"{name!r} of sample {ids[row]} is {_describe(value)}, of sample {ids[0]} {_describe(like)}")
        columns.append(column)
    return rebuild(
        like, [_stack(f"{name}.{key}", [column[at][1] for column in columns], ids) for at, key in enumerate(keys)]
    )


def _describe(value: Any) -> str:
    if isinstance(value, np.ndarray | np.generic):
        return f"{value.dtype}{list(value.shape)}"
    parts = children(value)
    return type(value).__name__ + ("" if parts is None else f" of {', '.join(key for key, _ in parts) or 'nothing'}")


def _array(name: str, value: Any) -> Any:
    """An entry of a sample: an array, a string, or a container of entries."""
    if isinstance(value, float) and not isinstance(value, np.generic):
        if _MAX_FLOAT32 < abs(value) < math.inf:
            raise _too_large(name, value)
        return np.array(value, np.float32)
    if isinstance(value, str | bytes):
        return value
    parts = children(value)
    if parts is not None and not isinstance(value, list | tuple):
        return rebuild(value, [_array(f"{name}.{key}", part) for key, part in parts])
    try:
        array = np.asarray(value)  # a tensor on the CPU shares its memory
    except (TypeError, ValueError, RuntimeError) as error:
        if parts is None:
            raise _unclear(f"{name!r} of a sample, {type(value).__name__}: {error}") from error
        array = None
    if array is not None and array.dtype.kind in "biufc" and array.size:
        return array
    if parts:  # not one array: a list of strings, of dicts, of arrays of several shapes
        return rebuild(value, [_array(f"{name}.{key}", part) for key, part in parts])
    if array is None or array.dtype.kind not in "biufc":
        raise _unclear(f"{name!r} of a sample, {type(value).__name__} of dtype {getattr(array, 'dtype', object)}")
    return array


def _too_large(name: str, value: float) -> DataError:
    return DataError(
        given=f"{name!r} of a sample, {value}",
        rule=f"Python floats become float32, whose largest number is {_MAX_FLOAT32:.4g}",
        consequence="it would be infinite",
        nearest="scale the values, or return numpy.float64(…)",
    )


def _unclear(given: str) -> DataError:
    return DataError(
        given=given,
        rule="a sample is a dict or dataclass of tensors, arrays, numbers, strings, a pair (inputs, targets), or one value",
        consequence="it cannot be put into a batch",
        nearest='return {"inputs": …, "targets": …} with tensors numpy has a dtype for (bfloat16 as float32)',
    )


def _unlike(given: str) -> DataError:
    return DataError(
        given=given,
        rule="the samples of a batch have the same names, shapes and dtypes",
        consequence="they cannot be stacked",
        nearest="pad or crop in the dataset, in the loader's transform or in a collate_fn, and give the loss a weight of 0 there",
    )
