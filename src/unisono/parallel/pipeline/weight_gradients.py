"""Delays the weight gradients of linear layers in a backward pass (Qi et al. 2023, Zero Bubble).

The previous stage waits for the gradient of this stage's input, but no stage waits for weight gradients. So in a backward pass a
linear layer computes ∂x = ∂y W at once and only stores x and ∂y for ∂W = ∂yᵀ x. All other gradients (biases, norms,
embeddings) are computed at once.
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

# per layer: input [N, in], gradient of the output [N, out], weight
PendingGradients = list[tuple[Tensor, Tensor, Tensor]]


class WeightGradients:
    """Delayed weight gradients of the linear layers in ``blocks``, which are changed in place."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        self._pending: PendingGradients | None = None
        for block in blocks:
            for layer in block.modules():
                # subclasses, and layers with a replaced forward, compute something else
                if type(layer) is nn.Linear and "forward" not in vars(layer):
                    wrap_forward(layer, self._linear(layer))

    def _linear(self, layer: nn.Linear) -> Callable[..., Tensor]:
        def linear(_forward: Any, input: Tensor) -> Tensor:
            return _Linear.apply(input, layer.weight, layer.bias, self)  # pyright: ignore[reportReturnType]

        return linear

    @contextmanager
    def collect(self) -> Generator[PendingGradients]:
        """Backward passes inside add their weight gradients to the yielded list, for ``accumulate``."""
        self._pending = pending = []
        try:
            yield pending
        finally:
            self._pending = None

    def defer(self, x: Tensor, gradient: Tensor, weight: Tensor) -> bool:
        """Delay one weight gradient; False outside of ``collect``."""
        if self._pending is None:
            return False
        self._pending.append((x, gradient, weight))
        return True

    @staticmethod
    def accumulate(pending: PendingGradients) -> None:
        """Compute the delayed gradients, add them to those of the weights as autograd does, and empty the list.

        Hooks on a weight's gradient run here; they also ran in the backward pass, which had no gradient for the weight.
        """
        while pending:
            x, gradient, weight = pending.pop()
            torch.autograd.backward(weight, _product(x, gradient, weight))


def _product(x: Tensor, gradient: Tensor, weight: Tensor) -> Tensor:
    return (gradient.mT @ x).to(weight.dtype)


class _Linear(torch.autograd.Function):
    """torch's linear layer, with autocast, whose weight gradient can be delayed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, store: WeightGradients) -> Tensor:
        compute = matmul_dtype(x)
        ctx.store, ctx.dtype, ctx.bias_dtype = store, x.dtype, None if bias is None else bias.dtype
        cast, cast_weight = x.to(compute), weight.to(compute)
        ctx.save_for_backward(cast, cast_weight)
        ctx.weight = weight  # with recompute, the saved tensor would not be the leaf itself
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
