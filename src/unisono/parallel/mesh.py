"""The mesh of ranks of a plan: this rank's index along each axis, and the process groups of the axes.

axes      pp, dp_replicate, dp_shard, cp, tp      row-major, in this order
shard     dp_shard x cp                           ranks that share one copy of the state
data      dp_replicate x dp_shard                 ranks that compute different samples
ep        shard, in runs of plan.ep               ranks that share the experts of a layer
experts   shard, every plan.ep-th                 ranks that share one copy of the same experts
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed.tensor.debug
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily  # has no public name; torch 2.13 tested
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.device_mesh import DeviceMesh

from unisono.dist import World
from unisono.parallel.timed_collectives import all_reduce
from unisono.plan.plan import Plan

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
GROUP_NAMES = (*AXES, "shard", "data", "ep", "experts")


class ParallelDims:
    """Sizes, indices and process groups of the mesh axes. All ranks create it together; it creates the groups the plan needs."""

    def __init__(self, plan: Plan, world: World) -> None:
        self.plan, self.world = plan, world
        clear_mesh_caches()  # a job before this one in the same process may have had an equal mesh
        mesh = plan.mesh
        sizes = mesh.pp, mesh.dp_replicate, mesh.dp_shard, mesh.cp, mesh.tp
        ranks = np.arange(mesh.world_size).reshape(sizes)
        shard = ranks.reshape(*sizes[:2], -1, mesh.tp)  # pp, dp_replicate, shard, tp
        experts = shard.reshape(*sizes[:2], -1, mesh.ep, mesh.tp)  # pp, dp_replicate, experts, ep, tp
        along = {axis: np.moveaxis(ranks, dim, -1) for dim, axis in enumerate(AXES)}
        data = np.moveaxis(ranks, (1, 2), (-2, -1))
        along |= {"data": data.reshape(*data.shape[:-2], -1), "shard": np.moveaxis(shard, 2, -1)}
        along |= {"ep": np.moveaxis(experts, 3, -1), "experts": np.moveaxis(experts, 2, -1)}
        self._lines = {name: grid.reshape(-1, grid.shape[-1]) for name, grid in along.items()}
        self.sizes = {name: lines.shape[1] for name, lines in self._lines.items()}
        self._groups: dict[str, ProcessGroup] = {}
        if plan.is_model_sharded:
            # gradients are also summed over groups of one rank
            sums = {"dp_replicate", "shard"} | ({"experts"} if plan.mesh.ep > 1 else set())
            wanted = [name for name in GROUP_NAMES if self.sizes[name] > 1 or name in sums]
            self._groups = world.groups({name: self._lines[name].tolist() for name in wanted})
        elif world.group is not None:
            # a group of its own, because all-reduces of gradients may be in flight in the world's group
            self._groups = world.groups({"data": self._lines["data"].tolist()}) | {"dp_replicate": world.group}

    def ranks_along(self, name: str) -> list[int]:
        """The ranks that differ from this one along ``name`` only, this one included, in order."""
        lines = self._lines[name]
        (row,) = np.flatnonzero((lines == self.world.rank).any(1))
        return lines[row].tolist()

    def rank_along(self, name: str) -> int:
        """This rank's index along ``name``."""
        return self.ranks_along(name).index(self.world.rank)

    @property
    def data_rank(self) -> int:
        """Index of the batch shard that this rank computes, together with other ranks along cp, tp and pp."""
        return self.rank_along("dp_replicate") * self.plan.mesh.dp_shard + self.rank_along("dp_shard")

    @property
    def rng_rank(self) -> int:
        """Index of this rank's random stream: ranks along tp draw equal numbers, all others their own."""
        return (
            self.rank_along("pp") * self.plan.mesh.dp_world_size + self.data_rank
        ) * self.plan.mesh.cp + self.rank_along("cp")

    def group(self, name: str) -> ProcessGroup:
        """The process group along ``name``."""
        return self._groups[name]

    @cached_property
    def fsdp_mesh(self) -> DeviceMesh:
        """The mesh of FSDP2: replicas of the state, if there are several, and ranks that shard it."""
        return self._mesh("shard")

    @cached_property
    def expert_mesh(self) -> DeviceMesh:
        """The mesh of FSDP2 for experts, which ``ep`` has distributed already."""
        return self._mesh("experts")

    def _mesh(self, name: str) -> DeviceMesh:
        with unset_fake_temporarily():  # numbers of ranks are values, also where a step is traced
            line = torch.tensor(self.ranks_along(name), device="cpu")
            if self.plan.mesh.dp_replicate == 1:
                return DeviceMesh.from_group(self.group(name), self.plan.mesh.device, mesh=line, mesh_dim_names=(name,))
            copies = torch.tensor(self.ranks_along("dp_replicate"), device="cpu")
            return DeviceMesh.from_group(
                [self.group("dp_replicate"), self.group(name)],
                self.plan.mesh.device,
                mesh=line + (copies - self.world.rank)[:, None],
                mesh_dim_names=("dp_replicate", name),
            )

    def sum(self, values: Tensor, name: str) -> Tensor:
        """``values`` summed over the ranks along ``name``, in place."""
        if self.sizes[name] > 1:
            with self.world.explain_errors(f"sum over {name}", values.nbytes):
                all_reduce(values, self.group(name))
        return values

    def max(self, values: Tensor, name: str) -> Tensor:
        """Maximum of ``values`` along ``name``; NaN if any rank has NaN, which gloo's maximum may ignore."""
        if self.sizes[name] == 1:
            return values
        missing = self.sum(values.isnan().to(values.dtype), name)
        with self.world.explain_errors(f"maximum over {name}", values.nbytes):
            all_reduce(values, self.group(name), ReduceOp.MAX)
        return torch.where(missing > 0, torch.nan, values)


def clear_mesh_caches() -> None:
    """Clear torch's cache of DTensor placements.

    It keeps the sockets of process groups open, and gives results of DTensor operations the mesh with which they were first
    computed. That may be one of an earlier job: meshes of the same ranks are equal, even if this process had another rank then or
    their process groups are gone.
    """
    debug: Any = torch.distributed.tensor.debug
    debug._clear_sharding_prop_cache()
