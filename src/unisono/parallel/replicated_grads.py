"""Gradients of replicated parameters to which each rank contributes a part, outside of data parallelism.

Examples: a key/value head that serves query heads on several ranks; norms in a sequence-parallel region; parameters that FSDP2
leaves replicated.
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
    """Sums gradients over ``groups``: ranks, and the names of the parameters, once per step.

    All ranks of a group pass the same names and hold equal shards of them. Parameters that are not trained, or not on this
    rank, are skipped.
    """

    def __init__(self, groups: Sequence[tuple[ProcessGroup, Sequence[str]]], world: World) -> None:
        self._groups, self._world = groups, world

    @torch.no_grad()
    def reduce(self, sharded: ShardedParameters) -> None:
        """Sum in place. Called after the reduction over data ranks, before the gradients are read."""
        for group, names in self._groups:
            gradients = [sharded.parameters[name].grad for name in names if name in sharded.parameters]
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
