"""Exponential moving average of the weights (Polyak averaging)."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn


class WeightAverage:
    """average ← average + (1 − decay) · (weight − average), for each of ``parameters`` that requires a gradient."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        self._decay = decay
        self._weights = {name: p for name, p in parameters.items() if p.requires_grad}
        # in the gradients' dtype: a bf16 average soon differs from its weight by less than bf16 can add
        self._averages = {name: p.detach().to(p.grad_dtype or p.dtype, copy=True) for name, p in self._weights.items()}

    @torch.no_grad()
    def update(self, good: Tensor) -> None:
        """Move each average towards its weight; where ``good`` [] bool is false all stay bit-equal."""
        step = ((1.0 - self._decay) * good).float()
        for name, average in self._averages.items():
            average.lerp_(self._weights[name].detach().to(average.dtype), step.to(average.dtype))

    def swapped_in(self) -> AbstractContextManager[None]:
        """Inside, the model has the averaged weights."""
        return swapped_values(self._weights, self._averages)

    def state(self) -> dict[str, Tensor]:
        """Named tensors of the mutable state."""
        return {f"ema/{name}": average for name, average in self._averages.items()}


@contextmanager
def swapped_values(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> Generator[None]:
    """Inside, each of ``parameters`` holds the value of its name; afterwards its own again."""
    with torch.no_grad():
        originals = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        for name, parameter in parameters.items():
            parameter.copy_(values[name])
    try:
        yield
    finally:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(originals[name])
