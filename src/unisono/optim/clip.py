"""The global gradient norm and the clip coefficient, both as tensors on the gradients' device.

Nothing here waits for the device. Multiplying the gradients is left to the optimizer: ``grad_scale = loss_scale /
coefficient`` lets the update kernel do it in the pass it makes anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from unisono.optim import kernels


def global_norm(grads: Sequence[Tensor]) -> Tensor:
    """The Euclidean norm over all elements of all tensors.

    ``grads``: any shapes and floating dtypes; reduced in float32 (float64 if one of them is). Returns a 0-dim tensor on
    the device of the first; NaN or Inf anywhere makes it non-finite. No tensors: 0 on the CPU.

    >>> float(global_norm([torch.tensor([3.0]), torch.tensor([[4.0]])]))
    5.0
    """
    if not grads:
        return torch.zeros(())
    dtype = reduce(torch.promote_types, {grad.dtype for grad in grads}, torch.float32)
    return kernels.norm_of_norms(kernels.norms(grads, dtype))


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """What to multiply gradients of this norm by so that it becomes at most ``max_norm``; ``max_norm = 0`` means never.

    Exactly 1 where the norm is within the limit (torch's ``clip_grad_norm_`` divides by ``norm + 1e-6`` and so shrinks
    gradients just below it too). NaN stays NaN, Inf gives 0: such a step is the guard's to skip.

    >>> [float(clip_coefficient(torch.tensor(norm), 1.0)) for norm in (0.0, 1.0, 4.0)]
    [1.0, 1.0, 0.25]
    """
    return max_norm / norm.clamp(min=max_norm) if max_norm > 0 else torch.ones_like(norm)
