"""What experts compute where a step is traced with fake tensors: those have no values, so no counts of rows per expert.

Each expert is taken to get an equal share of the rows. With other shares a rank's memory differs.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor  # has no public name; torch 2.13 tested


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


def grouped_matmul_shapes(rows: Tensor, stack: Tensor) -> Tensor:
    """A tensor [M, O] like that of ``grouped_mm`` of rows [M, I] and stack [E, O, I], which torch 2.13 traces in bf16 alone."""
    return _GroupedMatmul.apply(rows, stack)  # pyright: ignore[reportReturnType]


class _GroupedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, stack: Tensor) -> Tensor:
        ctx.save_for_backward(rows, stack)
        return rows.new_empty(rows.shape[0], stack.shape[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        rows, stack = ctx.saved_tensors
        return torch.empty_like(rows), torch.empty_like(stack)
