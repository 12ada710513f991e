"""Collectives inside a model, each with its own derivative, in pairs: what one does forward the other does backward.

    enter    identity          sum                 before layers cut by columns, where x is whole
    leave    sum               identity            behind the layer cut by rows
    gather   gather            reduce-scatter      before layers cut by columns, where x is cut along ``dim``
    scatter  reduce-scatter    gather              behind the layer cut by rows
    split    own part          gather              from what is equal on all ranks to parts of it
    join     gather            own part            and back

Parts are in order of the group's ranks. ``sizes`` are their extents along ``dim`` where they are not equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

_Exchange = Callable[[Tensor], Tensor]
# torch 2.13 calls them so, and warns of the names that 2.11 and 2.12 have
_torch: Any = dist
all_gather_single = getattr(dist, "all_gather_single", None) or _torch.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or _torch.reduce_scatter_tensor


def copy_to_tp_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """``x`` as it is; its gradient is summed."""
    return _pair(x, _same, partial(_sum, group=group))


def reduce_from_tp_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of all ranks' ``x``."""
    return _pair(x, partial(_sum, group=group), _same)


def gather_from_sp_region(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """All ranks' ``x`` behind each other; its gradient, a different one on every rank, is summed and cut."""
    return _pair(x, partial(_gather, dim=dim, group=group), partial(_reduce_scatter, dim=dim, group=group))


def reduce_scatter_to_sp_region(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """This rank's part of the sum of all ranks' ``x``."""
    return _pair(x, partial(_reduce_scatter, dim=dim, group=group), partial(_gather, dim=dim, group=group))


def scatter_to_sp_region(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """This rank's part of ``x``, which is equal on all ranks; its gradient is whole and equal too."""
    return _pair(x, partial(_own, dim=dim, group=group), partial(_gather, dim=dim, group=group))


def gather_from_tp_region(x: Tensor, dim: int, group: ProcessGroup, sizes: Sequence[int] = ()) -> Tensor:
    """All ranks' ``x`` behind each other, for what all ranks then compute alike: the gradient's own part is all of it."""
    there = partial(_gather, dim=dim, group=group, sizes=sizes)
    return _pair(x, there, partial(_own, dim=dim, group=group, sizes=sizes))


def _pair(x: Tensor, there: _Exchange, back: _Exchange) -> Tensor:
    return _Pair.apply(x, there, back)  # pyright: ignore[reportReturnType]


class _Pair(torch.autograd.Function):
    """``there`` forward, ``back`` backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: _Exchange, back: _Exchange) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradients[0]), None, None


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, group: ProcessGroup) -> Tensor:
    whole = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(whole, group=group)
    return whole


def _gather(x: Tensor, dim: int, group: ProcessGroup, sizes: Sequence[int] = ()) -> Tensor:
    part, sizes = x.movedim(dim, 0), sizes or [x.shape[dim]] * group.size()
    room = part.new_zeros(max(sizes), *part.shape[1:])  # the collective wants parts of one size
    room[: part.shape[0]] = part
    whole = room.new_empty(group.size() * room.shape[0], *room.shape[1:])
    all_gather_single(whole, room, group=group)
    parts = zip(whole.split(room.shape[0]), sizes, strict=True)
    return torch.cat([each[:size].movedim(0, dim) for each, size in parts], dim)


def _reduce_scatter(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    whole = x.movedim(dim, 0).contiguous()
    part = whole.new_empty(whole.shape[0] // group.size(), *whole.shape[1:])
    reduce_scatter_single(part, whole, group=group)
    return part.movedim(0, dim).contiguous()


def _own(x: Tensor, dim: int, group: ProcessGroup, sizes: Sequence[int] = ()) -> Tensor:
    parts = x.split(list(sizes), dim) if sizes else x.chunk(group.size(), dim)
    return parts[group.rank()].contiguous()
