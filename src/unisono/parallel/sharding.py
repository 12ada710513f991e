"""How parameters are split over ranks: one description of a shard, and one table of the shards that this rank holds.

A transform that splits parameters replaces each by this rank's part and records in the table where the part lies: tensor
parallelism first, then expert parallelism, then FSDP2, each of which splits what the one before it left. The optimizer, the
moving average, the checkpoint and the gradient norm read the table, and need not know which transform split a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from unisono.errors import ConfigError
from unisono.optim import global_norm
from unisono.parallel.mesh import ParallelDims
from unisono.parallel.timed_collectives import all_reduce

# process groups, and names of the parameters whose gradients are summed over them
GradGroups = Sequence[tuple[ProcessGroup, Sequence[str]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorShard:
    """The place of a rank's part of a tensor in the global tensor.

    A tensor may be split along several dims; parts may be uneven, and empty on ranks behind the end of a short tensor.

    Attributes:
        global_shape: Shape of the global tensor.
        offset: Index of the part's first element in the global tensor.
        dim: The dim of ``runs``.
        runs: (offset, length) pairs along ``dim`` of the blocks that make up the part, one after the other, if matrices are fused
            along ``dim`` and each is split (fused query, key and value: three runs); empty if the part is one block.
        replica_id: Number of ranks before this one that hold an equal part. The parts with replica_id 0 tile the global tensor,
            and a checkpoint has only those.
    """

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    dim: int = 0
    runs: tuple[tuple[int, int], ...] = ()
    replica_id: int = 0

    @staticmethod
    def whole(shape: Sequence[int]) -> TensorShard:
        """The global tensor itself."""
        return TensorShard(global_shape=tuple(shape), offset=(0,) * len(shape))

    def select(self, dim: int, runs: Sequence[tuple[int, int]], *, replica_id: int = 0) -> TensorShard:
        """The ``runs`` along ``dim`` of a tensor that is not split yet."""
        return replace(
            self, offset=self._offset_with(dim, runs[0][0]), dim=dim, runs=tuple(runs), replica_id=replica_id
        )

    def narrow(self, dim: int, start: int, length: int) -> TensorShard:
        """The ``length`` elements of this part along ``dim`` from its element ``start`` on."""
        if not self.runs or dim != self.dim:
            return replace(self, offset=self._offset_with(dim, self.offset[dim] + start))
        runs: list[tuple[int, int]] = []
        for offset, size in self.runs:
            begin, end = max(start, 0), min(start + length, size)
            if begin < end:
                runs.append((offset + begin, end - begin))
            start -= size
        runs = runs or [(sum(self.runs[-1]), 0)]
        return replace(self, offset=self._offset_with(dim, runs[0][0]), runs=tuple(runs))

    def blocks(self) -> Iterator[tuple[tuple[slice, ...], tuple[int, ...]]]:
        """The contiguous blocks of the part: the index of each in the part, and its offset in the global tensor."""
        if len(self.runs) < 2:
            yield (), self.offset
            return
        start = 0
        for offset, length in self.runs:
            index = (*(slice(None) for _ in range(self.dim)), slice(start, start + length))
            yield index, self._offset_with(self.dim, offset)
            start += length

    def _offset_with(self, dim: int, value: int) -> tuple[int, ...]:
        return (*self.offset[:dim], value, *self.offset[dim + 1 :])


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterSpec:
    """One parameter of the global model."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool

    @property
    def numel(self) -> int:
        """Number of elements of the parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class GlobalParameterSpec:
    """The parameters of the global model: what all ranks together must hold.

    ``parameters`` by first name; ``first_names`` from every name, as a parameter that is used twice has several.
    """

    parameters: dict[str, ParameterSpec]
    first_names: dict[str, str]

    @staticmethod
    def from_model(model: nn.Module) -> GlobalParameterSpec:
        """Describe a model that is not split yet; its parameters may be on the meta device."""
        names = {parameter: name for name, parameter in model.named_parameters()}
        return GlobalParameterSpec(
            parameters={
                name: ParameterSpec(shape=tuple(p.shape), dtype=p.dtype, trained=p.requires_grad)
                for name, p in model.named_parameters()
            },
            first_names={alias: names[p] for alias, p in model.named_parameters(remove_duplicate=False)},
        )

    @property
    def num_parameters(self) -> int:
        """Number of elements of all parameters."""
        return sum(parameter.numel for parameter in self.parameters.values())


class ShardTable:
    """The places of this rank's parts of the parameters, by first name, and how their gradients are reduced.

    ``spec`` describes the global model. ``shards`` holds the parameters that any transform has split; ``tensor_parallel`` those
    that tensor parallelism has split, as it left them. ``grad_reduce_dtypes`` has, by every name, the dtype in which a gradient
    is reduced over data ranks where that is not its own. ``shard_dims`` has, by first name, the dim along which FSDP2 splits a
    parameter where that is pinned.
    """

    def __init__(self, model: nn.Module, grad_reduce_dtypes: Mapping[str, torch.dtype] | None = None) -> None:
        self.spec = GlobalParameterSpec.from_model(model)
        self.grad_reduce_dtypes = dict(grad_reduce_dtypes or {})
        self.shards: dict[str, TensorShard] = {}
        self.tensor_parallel: dict[str, TensorShard] = {}
        self.shard_dims: dict[str, int] = {}
        self._axes: dict[str, set[str]] = {}
        self._partial_grads: dict[str, ProcessGroup] = {}

    def select(self, name: str, dim: int, runs: Sequence[tuple[int, int]], *, replica_id: int = 0) -> None:
        """Tensor parallelism left this rank ``runs`` of a parameter along ``dim``, as it did ``replica_id`` ranks before it."""
        first = self.spec.first_names[name]
        shard = TensorShard.whole(self.spec.parameters[first].shape).select(dim, runs, replica_id=replica_id)
        self.shards[first] = self.tensor_parallel[first] = shard
        self._axes.setdefault(first, set()).add("tp")

    def narrow(self, name: str, axis: str, dim: int, start: int, length: int) -> None:
        """A split over the ranks of ``axis`` (ep or shard) left this rank ``length`` elements along ``dim`` from ``start`` on."""
        first = self.spec.first_names[name]
        shard = self.shards.get(first) or TensorShard.whole(self.spec.parameters[first].shape)
        self.shards[first] = shard.narrow(dim, start, length)
        self._axes.setdefault(first, set()).add(axis)

    def number_replicas(self, dims: ParallelDims) -> None:
        """Number the equal parts on several ranks. Called once, after the last split."""
        for name, shard in self.shards.items():
            axes, replica_id = self._axes[name], 0
            for axis, splits in (("dp_replicate", set[str]()), ("shard", {"shard", "ep"}), ("tp", {"tp"})):
                if not axes & splits:
                    replica_id = replica_id * dims.sizes[axis] + dims.rank_along(axis)
            self.shards[name] = replace(shard, replica_id=replica_id + shard.replica_id)

    def split_over(self, axis: str) -> set[str]:
        """First names of the parameters that ``axis`` (tp, ep or shard) has split."""
        return {name for name, axes in self._axes.items() if axis in axes}

    def sum_grad(self, name: str, group: ProcessGroup) -> None:
        """Each rank of ``group`` holds this parameter and computes a part of its gradient: the parts are summed."""
        self._partial_grads[self.spec.first_names[name]] = group

    @property
    def partial_grad_groups(self) -> list[tuple[ProcessGroup, Sequence[str]]]:
        """Groups of ranks, and the parameters whose gradients are summed over them, in the order of the model."""
        groups: dict[ProcessGroup, list[str]] = {}
        for name in self.spec.parameters:
            if name in self._partial_grads:
                groups.setdefault(self._partial_grads[name], []).append(name)
        return list(groups.items())


def even_sizes(size: int, count: int) -> list[int]:
    """Sizes of ``count`` parts of ``size`` that differ by one at most."""
    return [size // count + (n < size % count) for n in range(count)]


class ParameterSharder:
    """Replaces parameters by this rank's shard along ``tp``, in every module that holds them, and records it in ``table``.

    ``rank`` and ``num_ranks`` are along ``tp``, whose process group is ``group``.
    """

    def __init__(self, model: nn.Module, dims: ParallelDims, table: ShardTable) -> None:
        self.rank, self.num_ranks, self.group = dims.rank_along("tp"), dims.plan.mesh.tp, dims.group("tp")
        self._table = table
        self._paths = {module: path for path, module in model.named_modules()}
        self._holders: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                self._holders.setdefault(parameter, []).append((module, name))

    def shard(self, layer: nn.Module, name: str, dim: int, *, max_shards: int = 0, fused: int = 1) -> None:
        """Shard ``layer``'s parameter ``name`` along ``dim``, if the layer has it.

        ``max_shards``: at most this many different shards (key/value heads); with more ranks, neighbours hold the same one;
        0: one per rank. ``fused``: the number of equal matrices side by side, each of which is split.
        """
        parameter: nn.Parameter | None = getattr(layer, name, None)
        if parameter is None or parameter not in self._holders:  # none, or sharded under another name
            return
        size = parameter.shape[dim] // fused
        copies = self.num_ranks // max_shards if 0 < max_shards < self.num_ranks else 1
        sizes = even_sizes(size, self.num_ranks // copies)
        index = self.rank // copies
        begin = list(accumulate(sizes, initial=0))[index]
        runs = [(n * size + begin, sizes[index]) for n in range(fused)]
        local = torch.cat([parameter.detach().narrow(dim, *run) for run in runs], dim)
        shard = nn.Parameter(local.clone(memory_format=torch.contiguous_format), requires_grad=parameter.requires_grad)
        for holder, held_as in self._holders.pop(parameter):
            setattr(holder, held_as, shard)
        self._table.select(self._name(layer, name), dim, runs, replica_id=self.rank % copies)

    def is_sharded(self, module: nn.Module, name: str) -> bool:
        """Whether ``module``'s parameter ``name`` has been sharded."""
        return self._table.spec.first_names[self._name(module, name)] in self._table.tensor_parallel

    def sum_grad(self, module: nn.Module, name: str, group: ProcessGroup) -> None:
        """Sum the gradient of ``module``'s parameter ``name`` over ``group``, whose ranks each compute a part of it."""
        self._table.sum_grad(self._name(module, name), group)

    def _name(self, module: nn.Module, name: str) -> str:
        return f"{self._paths[module]}.{name}".lstrip(".")


class ShardedParameters:
    """This rank's shards of the parameters as plain tensors that share the model's memory.

    The optimizer, the moving average and the checkpoint work on these, so that an update is the same arithmetic as on one
    process.

    Args:
        model: The model after all transforms.
        dims: The mesh of the ranks.
        table: The places of this rank's shards in the global parameters.
        duplicated: Names of the parameters that an earlier pipeline stage has too; norms do not count them here.

    Attributes:
        parameters: By first name, the model's own parameter if it is no DTensor, else its local tensor.
        grad_reduce_dtypes: By first name, the dtype in which a gradient is reduced over data ranks, if it is not its own.
        unsharded_grad_groups: Groups of ranks, and names of the parameters, not sharded by FSDP2, whose gradients must be summed
            over the group.
    """

    def __init__(
        self, model: nn.Module, dims: ParallelDims, table: ShardTable, duplicated: Collection[str] = ()
    ) -> None:
        self._dims, self._table = dims, table
        plan, first_names = dims.plan, table.spec.first_names
        # a stage may have only a later name of a parameter that is used twice
        self._model_parameters = {first_names[name]: parameter for name, parameter in model.named_parameters()}
        self._trained = {name: parameter.requires_grad for name, parameter in self._model_parameters.items()}
        self.parameters = {name: _local_parameter(parameter) for name, parameter in self._model_parameters.items()}
        for parameter in self.parameters.values():
            # small gradients accumulate, and moments are made of them: more digits than a bf16 parameter has
            if plan.precision.dtype_rules and parameter.dtype == torch.bfloat16:
                parameter.grad_dtype = torch.float32
        self.grad_reduce_dtypes = {
            first_names[name]: dtype
            for name, dtype in table.grad_reduce_dtypes.items()
            if first_names[name] in self.parameters
        }
        self._tp_shards = {
            self.parameters[name]: shard for name, shard in table.tensor_parallel.items() if name in self.parameters
        }
        replicated = [
            name for name, live in self._model_parameters.items() if plan.uses_fsdp and not isinstance(live, DTensor)
        ]
        # ranks of the shard axis hold different experts, so that only replicas of the state hold equal ones
        experts = table.split_over("ep")
        equal = [name for name in replicated if name not in experts]
        axes = {"shard": equal, "dp_replicate": replicated}
        self.unsharded_grad_groups: list[tuple[ProcessGroup, list[str]]] = [
            (dims.group(axis), names) for axis, names in axes.items() if names and dims.group(axis).size() > 1
        ]
        first_of_shard = not plan.uses_fsdp or dims.rank_along("shard") == 0
        self._counted_before = {self.parameters[name] for name in ([] if first_of_shard else equal)}
        self._duplicated = {self.parameters[name] for name in duplicated if name in self.parameters}
        self._duplicated |= self._counted_before

    @property
    def is_sharded(self) -> bool:
        """Whether any parameter is split."""
        return self._dims.plan.uses_fsdp or bool(self._tp_shards)

    @property
    def num_parameters(self) -> int:
        """Number of elements of the global model."""
        return self._table.spec.num_parameters

    def require_same_trained(self) -> None:
        """Raise ConfigError where ``requires_grad`` of a parameter of the model is not what it was at construction."""
        for name, parameter in self._model_parameters.items():
            if parameter.requires_grad != self._trained[name]:
                raise ConfigError(
                    given=f"requires_grad of {name!r} was set to {parameter.requires_grad} after the run was entered",
                    rule="optimizer, gradients and checkpoints are made of the parameters that are trained when the run is "
                    "entered",
                    consequence="the step was not made",
                    nearest="frozen_until_step in a group of the optimizer",
                )

    def shard_of(self, name: str, tensor: Tensor) -> TensorShard | None:
        """The place of ``tensor``, the local parameter ``name`` or anything of its shape; None if it is not split."""
        if tensor.shape != self.parameters[name].shape:
            return None
        return self._table.shards.get(name)

    def global_shape(self, name: str) -> tuple[int, ...]:
        """Shape of the global parameter ``name``."""
        return self._table.spec.parameters[name].shape

    def global_norm(self, gradients: Iterable[Tensor]) -> Tensor:
        """Norm [] of the gradient of the global model; ``gradients`` are this rank's, in order of the trained parameters."""
        trained = [p for p in self.parameters.values() if p.requires_grad]
        pairs = [(p, g) for p, g in zip(trained, gradients, strict=True) if p not in self._duplicated]
        if not self.is_sharded and self._dims.plan.mesh.pp == 1:
            return global_norm([g for _, g in pairs])
        shards = self._tp_shards
        split = global_norm([g for p, g in pairs if p in shards and not shards[p].replica_id]).square()
        rest = global_norm([g for p, g in pairs if p not in shards]).square()
        of_stage = self._dims.sum(self._dims.sum(split, "tp") + rest, "shard")
        return self._dims.sum(of_stage, "pp").sqrt()

    def sum_over_shards(self, parameters: Sequence[nn.Parameter], values: Tensor) -> Tensor:
        """``values`` [n, …], a row of each local parameter, summed over the shards of the same global parameters."""
        shards = self._tp_shards

        def rows(chosen: list[bool]) -> Tensor:
            return torch.tensor(chosen, device=values.device).view(-1, *(1 for _ in values.shape[1:]))

        if shards:
            counted = rows([p in shards and not shards[p].replica_id for p in parameters])
            total = self._dims.sum(torch.where(counted, values, 0), "tp")
            values = torch.where(rows([p in shards for p in parameters]), total, values)
        if self._counted_before:
            values = torch.where(rows([p in self._counted_before for p in parameters]), 0, values)
        return self._dims.sum(values, "shard")

    def sum_over_data_ranks(self, values: Tensor) -> Tensor:
        """``values`` computed from this rank's tokens, summed over all tokens of the step, in place."""
        values = self._dims.sum(self._dims.sum(values, "dp_replicate"), "shard")
        return self._dims.sum(values, "tp") if self._dims.plan.tensor_parallel.sequence_parallel else values

    def max_over_shards(self, values: Tensor) -> Tensor:
        """The largest of ``values`` [n] over all ranks that hold shards; NaN where one has it."""
        return self._dims.max(self._dims.max(values, "tp"), "shard")

    def global_norms(self, parameters: Sequence[nn.Parameter], norms: Tensor) -> Tensor:
        """Norms [n] of global parameters, or of anything of their shapes, from ``norms`` [n] of this rank's shards."""
        return self.sum_over_shards(parameters, norms.square()).sqrt()

    def gather_stages(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """``values`` by parameter name, with those of the other stages of a pipeline, in the model's order."""
        if self._dims.plan.mesh.pp == 1:
            return dict(values)
        merged = {name: value for stage in self._dims.world.all_gather_json(values) for name, value in stage.items()}
        return {name: merged[name] for name in self._table.spec.parameters if name in merged}

    def collect_grads(self) -> None:
        """Set every local parameter's gradient: that of the model's parameter, or zeros where no sample used it."""
        for name, parameter in self.parameters.items():
            if not parameter.requires_grad:
                continue
            gradient = self._model_parameters[name].grad
            if isinstance(gradient, DTensor):
                gradient = gradient.to_local()
            dtype = parameter.grad_dtype or parameter.dtype
            parameter.grad = torch.zeros_like(parameter, dtype=dtype) if gradient is None else gradient.to(dtype)

    @torch.no_grad()
    def sum_partial_grads(self, groups: GradGroups) -> None:
        """Sum, in place, the gradients of replicated parameters of which each rank has computed a part.

        Examples are a key/value head that serves query heads on several ranks, norms in a sequence-parallel region, and
        parameters that FSDP2 does not shard. Called once per step, after the reduction over data ranks.

        Args:
            groups: Process groups and names of the parameters, which are equal on all ranks of the group. Names of parameters
                that are not trained, or not on this rank, are skipped.
        """
        for group, names in groups:
            by_dtype: dict[torch.dtype, list[Tensor]] = {}
            for name in names:
                gradient = self.parameters[name].grad if name in self.parameters else None
                if gradient is not None:
                    by_dtype.setdefault(gradient.dtype, []).append(gradient)
            for members in by_dtype.values():
                flat = torch.cat([member.flatten() for member in members])
                with self._dims.world.explain_errors("sum of shared gradients", flat.nbytes):
                    all_reduce(flat, group)
                for member, total in zip(members, flat.split([m.numel() for m in members]), strict=True):
                    member.copy_(total.view_as(member))

    def gradients(self) -> list[Tensor]:
        """This rank's gradients, in parameter order."""
        return [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]

    def zero_grad(self) -> None:
        """Set the gradients of all parameters to None."""
        for parameter in (*self._model_parameters.values(), *self.parameters.values()):
            parameter.grad = None


def _local_parameter(parameter: nn.Parameter) -> nn.Parameter:
    if not isinstance(parameter, DTensor):
        return parameter
    return nn.Parameter(parameter.to_local().detach(), requires_grad=parameter.requires_grad)
