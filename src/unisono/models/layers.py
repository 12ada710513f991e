"""Parts that several models use: the dtype of matrix products under autocast, and RMSNorm."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def matmul_dtype(x: Tensor) -> torch.dtype:
    """Dtype of a matrix product with ``x``: autocast's if it is on for the device, else that of ``x``."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class RMSNorm(nn.Module):
    """x / √(mean(x²) + eps) · weight over the last dimension; [..., D] → [..., D].

    Computed in float32. Under autocast the result has autocast's dtype, so that the following matrix products share one
    rounded tensor. On the CPU, outside a compiled graph, the backward pass is explicit.

    Args:
        dim: Size of the last dimension (D).

    Source:
        Zhang and Sennrich 2019.
    """

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        dtype = matmul_dtype(x)
        if x.device.type != "cpu" or torch.compiler.is_compiling():
            return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(dtype)
        return _RMSNorm.apply(x.float(), self.weight.float(), self.eps).to(dtype)


class _RMSNorm(torch.autograd.Function):
    """RMSNorm with an explicit backward: ∂x = r·(g·w) − x·r³·mean(g·w·x), ∂w = Σ g·x·r, with r = 1/√(mean(x²) + eps).

    Autograd's derivative passes over the rows about twice as often, and they do not fit in the caches.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1])  # [..., 1]
        inverse = mean_square.add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, inverse = ctx.saved_tensors
        product = (gradient * x).flatten(0, -2)  # [N, D]
        along = (product @ weight).view_as(inverse) * inverse.pow(3) / x.shape[-1]  # [..., 1]
        return (gradient * weight).mul_(inverse).addcmul_(x, along, value=-1), product.T @ inverse.flatten(), None
