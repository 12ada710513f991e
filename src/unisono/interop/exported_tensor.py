"""One tensor of an exported file, and what of the model it is made from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


def _identity(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportedTensor:
    """``key`` in the file holds ``take(tensor)`` of the model's tensor ``name``, whole, on any device."""

    key: str
    name: str
    transform: Callable[[Tensor], Tensor] = _identity
