"""A tensor in a file of weights, whose values are read when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from unisono.storage.limits import num_elements

Piece = bytes | bytearray | memoryview


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A tensor in a file. ``load`` reads its values; the tensor it returns is contiguous, of ``shape`` and ``dtype``."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    load: Callable[[], Tensor]


def dense(dtype: torch.dtype, shape: Sequence[int], pieces: Sequence[Piece]) -> StoredTensor:
    """The tensor whose little-endian values, in row-major order, are ``pieces`` one after the other.

    Raises:
        ValueError: They are not as many bytes as its shape needs (``LimitError`` if that is no possible number).
    """
    wanted, found = num_elements(shape, dtype.itemsize) * dtype.itemsize, sum(map(len, pieces))
    if wanted != found:
        raise ValueError(f"a tensor of shape {list(shape)} in {_name(dtype)} takes {wanted} bytes, and has {found}")
    return StoredTensor(dtype=dtype, shape=tuple(shape), load=lambda: _from_bytes(dtype, shape, b"".join(pieces)))


def _from_bytes(dtype: torch.dtype, shape: Sequence[int], content: Piece) -> Tensor:
    """The tensor with these little-endian values, which are copied."""
    if not len(content):
        return torch.empty(tuple(shape), dtype=dtype)
    if dtype is torch.bool:  # any byte but 0 is true in a file; in a tensor only 1 is
        return torch.frombuffer(bytearray(content), dtype=torch.uint8).reshape(tuple(shape)) != 0
    return torch.frombuffer(bytearray(content), dtype=dtype).reshape(tuple(shape))


def to_bytes(tensor: Tensor) -> memoryview:
    """The little-endian values of a tensor in row-major order."""
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    return cast(Any, plain.view(torch.uint8).numpy()).data


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
