"""Gradients of linear layers' weights, computed later than those of their inputs (Qi et al. 2023, Zero Bubble).

A stage waits for the gradient of its output; the stage before it, for the gradient of its input. Nobody waits for gradients of
weights. So in a backward pass a linear layer computes ∂x = ∂y W at once and only keeps x and ∂y for ∂W = ∂yᵀ x. Everything
else (biases, norms, embeddings) is computed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unisono.models.layers import matmul_dtype
from unisono.parallel.hooks import wrap_forward

PendingGradients = list[tuple[Tensor, Tensor, Tensor]]


class WeightGradients:
    """What backward passes inside ``collect`` still owe: (input [N, in], gradient of the output [N, out], weight) per layer."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        self._owed: PendingGradients | None = None
        for block in blocks:
            for layer in block.modules():
                # a layer of another class, or with a forward of its own, does more than this
                if type(layer) is nn.Linear and "forward" not in vars(layer):
                    wrap_forward(layer, self._linear(layer))

    def _linear(self, layer: nn.Linear) -> Callable[..., Tensor]:
        def linear(_forward: Any, input: Tensor) -> Tensor:
            return _Linear.apply(input, layer.weight, layer.bias, self)  # pyright: ignore[reportReturnType]

        return linear

    @contextmanager
    def collect(self) -> Generator[PendingGradients]:
        """Backward passes inside leave the gradients of weights to ``settle``, which wants what this yields."""
        self._owed = owed = []
        try:
            yield owed
        finally:
            self._owed = None

    def defer(self, x: Tensor, gradient: Tensor, weight: Tensor) -> bool:
        """Take it on, if anyone collects."""
        if self._owed is None:
            return False
        self._owed.append((x, gradient, weight))
        return True

    @staticmethod
    def accumulate(owed: PendingGradients) -> None:
        """Add the gradients to those of the weights, as autograd does, and forget the rest.

        Hooks that wait for a weight's gradient run here, and ran in the backward pass before, which had none for it.
        """
        while owed:
            x, gradient, weight = owed.pop()
            torch.autograd.backward(weight, _product(x, gradient, weight))


def _product(x: Tensor, gradient: Tensor, weight: Tensor) -> Tensor:
    return (gradient.mT @ x).to(weight.dtype)


class _Linear(torch.autograd.Function):
    """torch's linear layer, autocast included."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, store: WeightGradients) -> Tensor:
        compute = matmul_dtype(x)
        ctx.store, ctx.dtype, ctx.bias_dtype = store, x.dtype, None if bias is None else bias.dtype
        cast, cast_weight = x.to(compute), weight.to(compute)
        ctx.save_for_backward(cast, cast_weight)
        ctx.weight = weight  # recompute gives saved tensors back without what they are leaves of
        return F.linear(cast, cast_weight, None if bias is None else bias.to(compute))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (gradient,) = gradients
        (x, cast_weight), weight = ctx.saved_tensors, ctx.weight
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        rows = gradient.flatten(0, -2)  # [N, out]
        of_x = (gradient @ cast_weight).to(ctx.dtype) if need_x else None
        of_bias = rows.sum(0).to(ctx.bias_dtype) if need_bias else None
        of_weight = None
        if need_weight and not ctx.store.defer(x.flatten(0, -2), rows, weight):
            of_weight = _product(x.flatten(0, -2), rows, weight)
        return of_x, of_weight, of_bias, None
