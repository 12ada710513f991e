"""Gradients of parameters that several ranks hold alike and to which each of them contributes a part.

The gradient synchronisation does not see them. Examples: a key/value head that serves query heads on several ranks; norms
between layers whose activations are cut along the sequence; beside a sharded state, what a plan leaves whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from unisono.dist import World
from unisono.parallel.sharding import ShardedParameters


class ReplicatedGradients:
    """``groups``: ranks, and the names of parameters whose pieces' gradients are summed over them, once per step.

    All ranks of a group pass the same names, and hold equal pieces of them. What is not trained, or has no piece here, is left
    out.
    """

    def __init__(self, groups: Sequence[tuple[ProcessGroup, Sequence[str]]], world: World) -> None:
        self._groups, self._world = groups, world

    @torch.no_grad()
    def reduce(self, pieces: ShardedParameters) -> None:
        """Sum, in place: after the gradients have been summed over data ranks, before anyone reads them."""
        for group, names in self._groups:
            gradients = [pieces.parameters[name].grad for name in names if name in pieces.parameters]
            by_dtype: dict[torch.dtype, list[Tensor]] = {}
            for gradient in gradients:
                if gradient is not None:
                    by_dtype.setdefault(gradient.dtype, []).append(gradient)
            for members in by_dtype.values():
                flat = torch.cat([member.flatten() for member in members])
                with self._world.guard("sum of shared gradients", flat.nbytes):
                    dist.all_reduce(flat, group=group)
                for member, total in zip(members, flat.split([m.numel() for m in members]), strict=True):
                    member.copy_(total.view_as(member))
