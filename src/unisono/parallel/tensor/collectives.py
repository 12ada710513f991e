"""Differentiable collectives for tensor-parallel (tp) and sequence-parallel (sp) regions, named as in Megatron-LM.

                                   forward           backward          used
    copy_to_tp_region              identity          all-reduce        before column-wise layers
    reduce_from_tp_region          all-reduce        identity          after the row-wise layer
    gather_from_sp_region          all-gather        reduce-scatter    before column-wise layers, with sequence parallelism
    reduce_scatter_to_sp_region    reduce-scatter    all-gather        after the row-wise layer, with sequence parallelism
    scatter_to_sp_region           split             all-gather        from replicated activations to a part of the sequence
    gather_from_tp_region          all-gather        split             from parts to replicated activations

Parts are in order of the group's ranks. ``sizes`` are their sizes along ``dim`` where these differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from unisono.parallel.timed_collectives import all_gather_single, all_reduce, reduce_scatter_single

_Exchange = Callable[[Tensor], Tensor]


def copy_to_tp_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """``x`` itself; its gradient is summed over the group."""
    return _pair(x, _same, partial(_sum, group=group))


def reduce_from_tp_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of ``x`` over the group."""
    return _pair(x, partial(_sum, group=group), _same)


def gather_from_sp_region(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """All ranks' ``x``, concatenated; the ranks' gradients, which differ, are summed and split."""
    return _pair(x, partial(_gather, dim=dim, group=group), partial(_reduce_scatter, dim=dim, group=group))


def reduce_scatter_to_sp_region(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """This rank's part of the sum of ``x`` over the group."""
    return _pair(x, partial(_reduce_scatter, dim=dim, group=group), partial(_gather, dim=dim, group=group))


def scatter_to_sp_region(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """This rank's part of ``x``, which is equal on all ranks; so is its gathered gradient."""
    return _pair(x, partial(_own, dim=dim, group=group), partial(_gather, dim=dim, group=group))


def gather_from_tp_region(x: Tensor, dim: int, group: ProcessGroup, sizes: Sequence[int] = ()) -> Tensor:
    """All ranks' ``x``, concatenated, as input of what every rank then computes alike; each keeps its part of the gradient."""
    return _pair(
        x, partial(_gather, dim=dim, group=group, sizes=sizes), partial(_own, dim=dim, group=group, sizes=sizes)
    )


def _pair(x: Tensor, forward: _Exchange, backward: _Exchange) -> Tensor:
    return _Pair.apply(x, forward, backward)  # pyright: ignore[reportReturnType]


class _Pair(torch.autograd.Function):
    """One collective in the forward pass, another in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: _Exchange, backward: _Exchange) -> Tensor:
        ctx.exchange_gradient = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.exchange_gradient(gradients[0]), None, None


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, group: ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    all_reduce(total, group)
    return total


def _gather(x: Tensor, dim: int, group: ProcessGroup, sizes: Sequence[int] = ()) -> Tensor:
    part, sizes = x.movedim(dim, 0), sizes or [x.shape[dim]] * group.size()
    padded = part.new_zeros(max(sizes), *part.shape[1:])  # the collective wants parts of one size
    padded[: part.shape[0]] = part
    gathered = padded.new_empty(group.size() * padded.shape[0], *padded.shape[1:])
    all_gather_single(gathered, padded, group)
    parts = zip(gathered.split(padded.shape[0]), sizes, strict=True)
    return torch.cat([block[:size].movedim(0, dim) for block, size in parts], dim)


def _reduce_scatter(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    contiguous = x.movedim(dim, 0).contiguous()
    part = contiguous.new_empty(contiguous.shape[0] // group.size(), *contiguous.shape[1:])
    reduce_scatter_single(part, contiguous, group)
    return part.movedim(0, dim).contiguous()


def _own(x: Tensor, dim: int, group: ProcessGroup, sizes: Sequence[int] = ()) -> Tensor:
    parts = x.split(list(sizes), dim) if sizes else x.chunk(group.size(), dim)
    return parts[group.rank()].contiguous()
