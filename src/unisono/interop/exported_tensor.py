"""One tensor of an exported file and its source in the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ExportedTensor:
    """A tensor of an exported file: ``key`` in the file is ``transform`` of the model's tensor ``name``."""

    key: str
    name: str
    transform: Callable[[Tensor], Tensor] = lambda tensor: tensor
