"""The global gradient norm and the clip coefficient, both as tensors on the gradients' device.

Neither synchronises with the device. The optimizer multiplies the gradients: with ``grad_scale = loss_scale / coefficient`` the
update kernel does it in the same pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from unisono.optim import kernels


def global_norm(grads: Sequence[Tensor]) -> Tensor:
    """The Euclidean norm over all elements of all tensors.

    Args:
        grads: Tensors of any shapes and floating dtypes.

    Returns:
        A 0-dim tensor on the device of the first gradient, reduced in float32, or in float64 if a gradient is float64. It is
        non-finite if any element is. Without gradients it is 0 on the CPU.

    >>> float(global_norm([torch.tensor([3.0]), torch.tensor([[4.0]])]))
    5.0
    """
    if not grads:
        return torch.zeros(())
    dtype = reduce(torch.promote_types, {grad.dtype for grad in grads}, torch.float32)
    return kernels.norm_of_norms(kernels.norms(grads, dtype))


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """Factor that scales gradients of global norm ``norm`` to a norm of at most ``max_norm``.

    It is exactly 1 if the norm is within the limit; torch's ``clip_grad_norm_`` divides by ``norm + 1e-6`` and shrinks
    gradients just below the limit too. It is NaN for a NaN norm and 0 for an infinite one; the trainer skips such steps.

    Args:
        norm: 0-dim.
        max_norm: Limit; 0 turns clipping off.

    >>> [float(clip_coefficient(torch.tensor(norm), 1.0)) for norm in (0.0, 1.0, 4.0)]
    [1.0, 1.0, 0.25]
    """
    return max_norm / norm.clamp(min=max_norm) if max_norm > 0 else torch.ones_like(norm)
