"""Calls of torch functions outside torch's documented interface; no other module of this package makes any.

Tested with torch 2.13.0. ``torch.optim.adam.adam`` and ``torch.optim.sgd.sgd`` implement ``torch.optim.Adam`` and ``SGD``; torch
exports them as "functional API" without a promise. ``torch._foreach_*`` act on a list of tensors at once. torch's fused updates
have requirements that they do not check (on a CPU: wrong results without an error): see ``fused_supported`` and ``skippable``.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

_CPU_PIECE_ELEMENTS = 1 << 16


def fused_supported(params: Iterable[Tensor], *, momentum_kernel: bool) -> bool:
    """Whether torch's fused update (SGD's if ``momentum_kernel``, else Adam's) supports these parameters.

    The kernels read memory linearly, so a parameter must be dense (state from ``zeros_like`` then has the same strides), and
    its gradient must have its dtype. On a CPU, SGD's kernel does not update most fp16 and bf16 elements (pytorch#191763, torch
    2.12 and 2.13).
    """
    devices = frozenset(_get_fused_kernels_supported_devices())
    return all(
        p.device.type in devices
        and p.dtype.is_floating_point
        and torch.empty_like(p).stride() == p.stride()
        and p.grad_dtype in (None, p.dtype)
        and not (momentum_kernel and p.device.type == "cpu" and p.dtype.itemsize < 4)
        for p in params
    )


def norms(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The Euclidean norm of each tensor, as 0-dim tensors accumulated in ``dtype``.

    On a CPU long tensors are split first: torch's kernel sums squares one after the other, and its norm of 50 million float32
    elements is 0.4 % too small. Split, the error is about 1e-7 and the time a fifth longer.
    """
    together = [tensor for tensor in tensors if not _is_split(tensor)]
    short = iter(torch._foreach_norm(together, 2.0, dtype) if together else ())
    return [_norm_of_pieces(tensor, dtype) if _is_split(tensor) else next(short) for tensor in tensors]


def norm_of_norms(parts: Sequence[Tensor]) -> Tensor:
    """The norm of all parts together, on the device of the first; 0-dim."""
    if len(parts) == 1:
        return parts[0]
    stacked = torch.stack([part.to(parts[0].device) for part in parts])
    return _norm(stacked)


def _is_split(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.numel() > _CPU_PIECE_ELEMENTS


def _norm_of_pieces(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    in_memory_order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    flat = tensor.permute(in_memory_order).reshape(-1)
    if tensor.dtype != dtype:  # torch's kernel for rows takes five times as long where it also converts
        pieces = cast("tuple[Tensor, ...]", flat.split(_CPU_PIECE_ELEMENTS))  # pyright: ignore[reportUnknownMemberType]
        return norm_of_norms(torch._foreach_norm(pieces, 2.0, dtype))
    # one operation for all full pieces: a trace of a large model would mostly consist of pieces
    num_full = flat.numel() // _CPU_PIECE_ELEMENTS
    full, rest = flat.tensor_split([num_full * _CPU_PIECE_ELEMENTS])
    parts = _norm(full.view(num_full, _CPU_PIECE_ELEMENTS), dim=1)
    return _norm(torch.cat([parts, _norm(rest)[None]]) if rest.numel() else parts)


def _norm(tensor: Tensor, dim: int | None = None) -> Tensor:
    return cast(Tensor, torch.linalg.vector_norm(tensor, dim=dim))  # pyright: ignore[reportUnknownMemberType]


def add_(tensors: Sequence[Tensor], others: Sequence[Tensor], alpha: float) -> None:
    """``tensor += alpha * other`` for each pair."""
    torch._foreach_add_(list(tensors), list(others), alpha=alpha)


def scaled(tensors: Sequence[Tensor], factors: Sequence[Tensor]) -> list[Tensor]:
    """``tensor * factor`` for each pair; factors are 0-dim."""
    return list(torch._foreach_mul(list(tensors), list(factors)))


def add_scaled_(tensors: Sequence[Tensor], others: Sequence[Tensor], factors: Sequence[Tensor]) -> None:
    """``tensor += other * factor`` for each triple; factors are 0-dim."""
    torch._foreach_addcmul_(list(tensors), list(others), list(factors))


def divide_(tensors: Sequence[Tensor], divisor: Tensor) -> None:
    """``tensor /= divisor`` for each; the divisor is 0-dim."""
    torch._foreach_div_(list(tensors), divisor)


def adam_directions(
    grads: Sequence[Tensor],
    states: Sequence[Mapping[str, Tensor]],
    *,
    betas: tuple[float, float],
    eps: float,
    fused: bool,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> list[Tensor]:
    """Advance Adam's moments and step counts in place; return ``mean_hat / (sqrt(square_hat) + eps)`` per tensor.

    Runs Adam's update with learning rate -1 on parameters that are 0. With ``found_inf`` = 1 (fused only) no state changes and
    the directions are +0.0.

    Args:
        states: ``exp_avg``, ``exp_avg_sq`` and ``step`` of each gradient.
    """
    exp_avgs, exp_avg_sqs, steps = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step"))
    directions = [torch.zeros_like(mean) for mean in exp_avgs]
    adam(
        directions,
        list(grads),
        exp_avgs,
        exp_avg_sqs,
        [],
        steps,
        capturable=False,
        differentiable=False,
        fused=fused or None,  # None: torch picks foreach or a loop, by device
        grad_scale=grad_scale,
        found_inf=found_inf,
        has_complex=False,
        amsgrad=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=-1.0,
        weight_decay=0.0,
        eps=eps,
        maximize=False,
    )
    return directions


def momentum_step(
    params: Sequence[Tensor],
    updates: Sequence[Tensor],
    buffers: Sequence[Tensor] | None,
    *,
    momentum: float,
    fused: bool,
    found_inf: Tensor | None,
) -> None:
    """``buffer = momentum * buffer + update; param -= buffer`` in place; ``buffers`` is None without momentum."""
    sgd(
        list(params),
        list(updates),
        cast("list[Tensor | None]", list(buffers) if buffers is not None else [None] * len(params)),
        has_sparse_grad=False,
        fused=fused or None,
        grad_scale=None,
        found_inf=found_inf,
        weight_decay=0.0,
        momentum=momentum,
        lr=1.0,
        dampening=0.0,
        nesterov=False,
        maximize=False,
    )
