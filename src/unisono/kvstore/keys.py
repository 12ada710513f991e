"""Keys, values and futures, as all kinds of stores use them.

A key is the global name of one tensor: a string, or a whole number, which is stored and saved under its digits. ``init``
fixes its shape and dtype, and workers compare the table of all three, so that two different tensors are never added.
(MXNet numbers string keys in each worker's own order.)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from unisono.errors import ConfigError, nearest_name

T = TypeVar("T")
Key = str | int
"""The name of a tensor. The keys of one store are all strings or all whole numbers."""


def nothing_sent(given: str, rule: str, nearest: str) -> ConfigError:
    """The error of a call that was refused before anything was sent."""
    return ConfigError(given=given, rule=rule, consequence="nothing was sent", nearest=nearest)


class SparseRows(NamedTuple):
    """Rows of a tensor that is zero in all other rows."""

    ids: Tensor
    """[n] int64, in any order; a row that occurs twice counts twice."""
    values: Tensor
    """[n, ...], the rows."""


PushValue = Tensor | tuple[Tensor, Tensor]
"""A tensor, or (row ids, rows)."""
PushValues = PushValue | list[PushValue] | list[Tensor] | list[tuple[Tensor, Tensor]]
"""What one worker pushes under one key: one value, or one for each of its devices, which are added in the list's order."""


class Future(Generic[T]):
    """A result that may need other workers. ``wait`` returns it or raises the error that prevented it."""

    def __init__(self, finish: Callable[[], T], ready: Callable[[], bool] = lambda: True) -> None:
        self._finish: Callable[[], T] | None = finish
        self._ready = ready
        self._result: list[T] = []

    def __repr__(self) -> str:
        return f"Future(done={self.done()})"

    def wait(self) -> T:
        """The result; a second call returns the same."""
        if self._finish is not None:
            self._result.append(self._finish())
            self._finish = None
        return self._result[0]

    def done(self) -> bool:
        """Whether ``wait`` would return without waiting for another worker. Sends nothing, so it may stay False until
        ``wait``."""
        return self._finish is None or self._ready()


@dataclass(slots=True)
class KeyTable:
    """Shape and dtype by key, and the validation of keys and values."""

    specs: dict[str, tuple[torch.Size, torch.dtype]] = field(default_factory=dict)
    sort: type[str] | type[int] | None = None
    """Of all keys; None until it is known."""

    def pairs(self, key: object, value: object) -> list[tuple[str, Any]]:
        """``key_value_pairs`` by stored names. Raises ConfigError for keys of another sort than the earlier ones."""
        pairs = key_value_pairs(key, value)
        sort = self.sort if self.specs else None
        for name, _ in pairs:
            own = str if isinstance(name, str) else int
            if sort not in (None, own):
                given = f"key {name!r} of type {own.__name__} in a store of {sort.__name__} keys"
                nearest = repr(str(name)) if own is int else "the number that init was given"
                raise nothing_sent(given, "the keys of a store are all strings or all whole numbers", nearest)
            sort = own
        self.sort = sort
        return [(str(name), part) for name, part in pairs]

    def given(self, name: str) -> Key:
        """The key of a stored name, as the user gives it."""
        return int(name) if self.sort is int else name

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Register new keys. Raises ConfigError for a key that exists."""
        for key in values:
            if key in self.specs:
                raise ConfigError(
                    given=f"init of key {key!r}, which has a value",
                    rule="a key is initialised once",
                    consequence="the stored value was not touched",
                    nearest="push without an optimizer to replace the value, or load_state_dict",
                )
        self.specs |= {key: (value.shape, value.dtype) for key, value in values.items()}

    def lookup(self, key: str) -> tuple[torch.Size, torch.dtype]:
        """Shape and dtype of ``key``. Raises ConfigError for a key that was never initialised."""
        if key not in self.specs:
            nearest = nearest_name(key, self.specs) if self.specs else f"init({key!r}, value) on every worker first"
            raise nothing_sent(f"key {key!r}", "a key is initialised before it is pushed or pulled", nearest)
        return self.specs[key]

    def check_value(self, key: str, value: PushValue) -> None:
        """Raise ConfigError unless ``value`` has the key's shape and dtype."""
        shape, dtype = self.lookup(key)
        if isinstance(value, Tensor):
            same, given = value.shape == shape, f"a value of shape {list(value.shape)} and dtype {value.dtype}"
            want = f"{key!r} was initialised with shape {list(shape)} and dtype {dtype}"
        else:
            value = as_sparse_rows(key, value, shape)
            same = len(shape) > 0 and value.values.shape == (len(value.ids), *shape[1:])
            given = f"rows of shape {list(value.values.shape)} and dtype {value.values.dtype} for {len(value.ids)} ids"
            want = f"rows of {key!r} have shape [ids, {', '.join(map(str, shape[1:]))}] and dtype {dtype}"
            value = value.values
        if not same or value.dtype != dtype:
            raise nothing_sent(given, want, "the gradient as autograd leaves it")


def as_sparse_rows(key: str, value: tuple[Tensor, Tensor], shape: torch.Size) -> SparseRows:
    """``value`` with int64 ids. Raises ConfigError for ids that are not row numbers of ``shape``."""
    ids = value[0]
    if ids.ndim != 1 or ids.dtype not in (torch.int64, torch.int32):
        problem = f"row ids of shape {list(ids.shape)} and dtype {ids.dtype}"
    elif len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < (shape[0] if shape else 0)):
        problem = f"row ids from {int(ids.min())} to {int(ids.max())}"
    else:
        return SparseRows(ids.long(), value[1])
    rule = f"row ids are a vector of whole numbers from 0 to {shape[0] - 1 if shape else -1}"
    raise nothing_sent(f"{problem} for key {key!r}", rule, "torch.tensor([0, 2]) for the first and the third row")


def to_dense(rows: SparseRows, shape: torch.Size) -> Tensor:
    """The dense tensor; rows that occur twice are added in their order."""
    return rows.values.new_zeros(shape).index_add_(0, rows.ids.to(rows.values.device), rows.values)


def sum_rows(ids: Tensor, rows: Tensor) -> SparseRows:
    """The rows sorted by id and distinct; rows with one id are added in their order. ``ids`` [n] int64, ``rows`` [n, ...]."""
    distinct, places = ids.unique(return_inverse=True)
    return SparseRows(distinct, rows.new_zeros(len(distinct), *rows.shape[1:]).index_add_(0, places, rows))


def key_value_pairs(key: object, value: object) -> list[tuple[Key, Any]]:
    """Pairs from a mapping, a key with its value, or a list of keys with as many values. Raises ConfigError for keys
    that are neither strings nor whole numbers."""
    if isinstance(key, Mapping):
        pairs = list(cast("Mapping[object, Any]", key).items())
    elif isinstance(key, Sequence) and not isinstance(key, str):
        names, values = list(cast("Sequence[object]", key)), cast("list[Any]", value)
        if not isinstance(value, list | tuple) or len(values) != len(names):
            count = f"{len(values)} values" if isinstance(value, list | tuple) else "one value"
            rule = "every key has one entry in the list of values"
            raise nothing_sent(f"{len(names)} keys with {count}", rule, "a mapping from key to value")
        pairs = list(zip(names, values, strict=True))
    else:
        pairs = [(key, value)]
    for name, _ in pairs:
        if not isinstance(name, str) and type(name) is not int:
            given = f"key {name!r} of type {type(name).__name__}"
            raise nothing_sent(given, "keys are strings or whole numbers, the same on all workers", f"{str(name)!r}")
    return cast("list[tuple[Key, Any]]", pairs)


def describe_tensors(values: Mapping[str, Tensor]) -> dict[str, str]:
    """Shape and dtype by name, as text."""
    return {name: f"{list(value.shape)} {value.dtype}" for name, value in values.items()}


def hash_tensors(values: Mapping[str, Tensor]) -> str:
    """Sixteen hex digits over all names, shapes and dtypes."""
    return hashlib.sha256(json.dumps(describe_tensors(values), sort_keys=True).encode()).hexdigest()[:16]
