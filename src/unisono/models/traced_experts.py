"""What experts compute where a step is traced with fake tensors: those have no values, so no counts of rows per expert.

Each expert is taken to get an equal share of the rows. With other shares a rank's memory differs.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor  # has no public name; torch 2.13 tested
from torch.utils._python_dispatch import TorchDispatchMode  # has no public name either


def is_traced(tensor: Tensor) -> bool:
    """Whether ``tensor`` has no values."""
    return isinstance(tensor, FakeTensor)


def host_counts(counts: Tensor, num_rows: int) -> list[int]:
    """``counts`` [n] of rows as numbers; an equal split of ``num_rows`` where they have no values."""
    if not is_traced(counts):
        return counts.tolist()
    bounds = [num_rows * place // len(counts) for place in range(len(counts) + 1)]
    return [end - start for start, end in pairwise(bounds)]


def split_at_limit(order: Tensor, place: Tensor, limit: int, num_experts: int) -> tuple[Tensor, Tensor]:
    """``order`` [n] of choices whose ``place`` [n] in the rows of their expert is below ``limit``, and of the others. Without
    values each expert gets an equal share, or ``limit`` rows where that is less."""
    if not is_traced(order):
        return order[place < limit], order[place >= limit]
    num_kept = min(order.numel(), limit * num_experts)
    return order[:num_kept].clone(), order[num_kept:].clone()


class GroupedProducts(TorchDispatchMode):
    """Gives grouped products of fake tensors their shapes, which torch 2.13 does in bf16 alone."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten._grouped_mm.default:
            return func(*args, **(kwargs or {}))
        left, right = args[:2]
        if right.dim() == 3:  # rows [M, I] and stack [E, I, O]
            return left.new_empty(left.shape[0], right.shape[2])
        offsets = args[2] if len(args) > 2 else (kwargs or {})["offs"]
        return left.new_empty(offsets.shape[0], left.shape[0], right.shape[1])  # the gradient of a stack
