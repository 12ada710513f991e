"""One process: gradients stay where autograd puts them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn


class LocalGradients:
    """Nothing to send; a parameter without gradient gets zeros, as it would where workers sum."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = list(parameters.values())

    def arm(self, part: Sequence[nn.Module] | None = None) -> None:
        """Nothing to prepare."""

    def finish(self, totals: Tensor) -> None:
        """Materialise the gradients no sample touched; ``totals`` is already complete."""
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)

    def gradients(self) -> list[Tensor]:
        """In parameter order."""
        return [p.grad for p in self._parameters if p.grad is not None]

    def reset(self) -> None:
        """Drop the gradients, so that the next backward stores its own instead of adding to zeros."""
        for parameter in self._parameters:
            parameter.grad = None

    def close(self) -> None:
        """Drop the gradients."""
        self.reset()
