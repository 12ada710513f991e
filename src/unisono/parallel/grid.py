"""The ranks of a plan as a grid: where this one is along each axis, and whom it talks to there."""

from __future__ import annotations

import math
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from unisono.dist import World
from unisono.plan.plan import Plan

AXES = ("dp_replicate", "dp_shard", "tp")


class Grid:
    """Row-major over ``AXES``. Groups are made when a plan needs them: all ranks make a Grid together."""

    def __init__(self, plan: Plan, world: World) -> None:
        self.plan, self.world = plan, world
        self.sizes = {axis: int(getattr(plan, axis)) for axis in AXES}
        self._groups: dict[str, ProcessGroup] = {}
        if plan.sharded or plan.tp > 1:
            self._groups = world.groups_along(self.sizes)

    def index(self, axis: str) -> int:
        """This rank's place along ``axis``."""
        stride = math.prod(self.sizes[later] for later in AXES[AXES.index(axis) + 1 :])
        return self.world.rank // stride % self.sizes[axis]

    @property
    def data_rank(self) -> int:
        """Which part of a batch this rank computes, of ``plan.data_ranks``."""
        return self.world.rank // self.plan.tp

    def group(self, axis: str) -> ProcessGroup:
        """The ranks that differ from this one along ``axis`` only."""
        return self._groups[axis]

    @cached_property
    def data_mesh(self) -> DeviceMesh:
        """The ranks with this one's place along ``tp``, for FSDP2; one axis where there are no replicas."""
        plan = self.plan
        ranks = torch.arange(plan.world).view(plan.data_ranks, plan.tp)[:, self.index("tp")]
        if plan.dp_replicate == 1:
            return DeviceMesh.from_group(self.group("dp_shard"), plan.device, mesh=ranks, mesh_dim_names=("dp_shard",))
        return DeviceMesh.from_group(
            [self.group("dp_replicate"), self.group("dp_shard")],
            plan.device,
            mesh=ranks.view(plan.dp_replicate, plan.dp_shard),
            mesh_dim_names=("dp_replicate", "dp_shard"),
        )

    def sum(self, values: Tensor, axis: str) -> Tensor:
        """``values`` summed over the ranks along ``axis``, in place."""
        if self.sizes[axis] > 1:
            with self.world.guard(f"sum over {axis}", values.nbytes):
                dist.all_reduce(values, group=self.group(axis))
        return values

    def max(self, values: Tensor, axis: str) -> Tensor:
        """The largest of ``values`` along ``axis``; NaN where a rank has one, which gloo's maximum may lose."""
        if self.sizes[axis] == 1:
            return values
        missing = self.sum(values.isnan().to(values.dtype), axis)
        with self.world.guard(f"maximum over {axis}", values.nbytes):
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group(axis))
        return torch.where(missing > 0, torch.nan, values)
