"""Samples and batches that nest: dicts, lists, tuples and dataclasses of arrays, tensors and strings."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, cast

import numpy as np


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with ``function`` applied to its arrays and tensors; strings and other values stay as they are."""
    if _is_array(value):
        return function(value)
    parts = children(value)
    return value if parts is None else rebuild(value, [map_leaves(function, part) for _, part in parts])


def _is_array(value: Any) -> bool:
    # a worker process whose data set has no tensors does not import torch
    torch = sys.modules.get("torch")
    return isinstance(value, np.ndarray | np.generic) or (torch is not None and isinstance(value, torch.Tensor))


def leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """(name, array, tensor, string or other value) of each leaf, in order; names are joined by dots."""
    parts = children(value)
    if parts is None:
        yield name, value
        return
    for key, part in parts:
        yield from leaves(part, f"{name}.{key}" if name else key)


def children(value: Any) -> list[tuple[str, Any]] | None:
    """Named parts of a container, None for a leaf."""
    if isinstance(value, Mapping):
        return [(str(key), part) for key, part in cast("Mapping[Any, Any]", value).items()]
    if isinstance(value, list | tuple):
        return [(str(number), part) for number, part in enumerate(cast("list[Any]", value))]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return None


def rebuild(like: Any, parts: list[Any]) -> Any:
    """A container of the kind of ``like`` with other parts; any mapping becomes a dict."""
    if isinstance(like, Mapping):
        return dict(zip(cast("Mapping[Any, Any]", like), parts, strict=True))
    if isinstance(like, list | tuple):
        kind = type(cast("list[Any]", like))
        return kind(*parts) if hasattr(kind, "_fields") else kind(parts)
    fields = dataclasses.fields(like)
    made = object.__new__(type(like))  # not its __init__, which may compute fields anew or take other arguments
    for field, part in zip(fields, parts, strict=True):
        object.__setattr__(made, field.name, part)
    return made


def encode(value: Any, put: Callable[[Any], int]) -> Any:
    """``value`` as JSON. ``put`` takes each array and returns its number. Raises TypeError for what JSON has not."""
    if isinstance(value, np.ndarray):
        return {"array": put(value)}
    parts = children(value)
    if parts is None:
        if value is None or isinstance(value, str | bool | int | float):
            return {"value": value}
        if isinstance(value, bytes):
            return {"bytes": value.hex()}
        raise TypeError(f"{type(value).__name__} in a batch")
    encoded = [encode(part, put) for _, part in parts]
    if isinstance(value, Mapping):
        keys = list(cast("Mapping[Any, Any]", value))
        if not all(isinstance(key, str | int) for key in keys):
            raise TypeError("a dict in a batch whose keys are not strings or integers")
        return {"keys": keys, "parts": encoded}
    kind = type(value)
    return {"class": [kind.__module__, kind.__qualname__], "parts": encoded}


def decode(encoded: Mapping[str, Any], get: Callable[[int], Any]) -> Any:
    """The inverse of ``encode``; ``get`` returns the array of a number."""
    if "array" in encoded:
        return get(encoded["array"])
    if "value" in encoded:
        return encoded["value"]
    if "bytes" in encoded:
        return bytes.fromhex(encoded["bytes"])
    parts = [decode(part, get) for part in encoded["parts"]]
    if "keys" in encoded:
        return dict(zip(encoded["keys"], parts, strict=True))
    module, qualname = encoded["class"]
    kind: Any = import_module(module)
    for name in qualname.split("."):
        kind = getattr(kind, name)
    if issubclass(kind, list | tuple):
        return kind(*parts) if hasattr(kind, "_fields") else kind(parts)
    return rebuild(object.__new__(kind), parts)
