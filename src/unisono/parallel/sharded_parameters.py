"""What one rank holds of a model whose parameters may be spread over ranks.

The optimizer, the moving average and the checkpoint work on this rank's pieces: plain tensors, under the model's names, that
share memory with it. Nothing behind this page needs to know how a parameter is spread, and an update is the same arithmetic as
on one process.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Shard

from unisono.optim import global_norm
from unisono.parallel.expert import expert_dims
from unisono.parallel.global_spec import GlobalParameterSpec
from unisono.parallel.mesh import ParallelDims
from unisono.parallel.shard_notes import blocks, grad_reduce_dtypes
from unisono.parallel.sharding import TensorShard


class ShardedParameters:
    """``parameters``: by first name, the model's own where they are whole, else this rank's piece of them.

    Along ``pp`` each rank has some of them; along ``tp`` a rule cuts a parameter or leaves it whole and equal; ``ep`` cuts the
    experts; FSDP2 then cuts what is there over the other ranks that share a copy of the state, mostly by rows, but for what the
    plan leaves whole. ``repeated`` are names of what an earlier stage has too. ``summed``: ranks, and the names of parameters
    beside a sharded state whose gradients are still to be summed over them.
    """

    def __init__(
        self, model: nn.Module, grid: ParallelDims, whole: GlobalParameterSpec, repeated: Collection[str] = ()
    ) -> None:
        self._grid, self._whole = grid, whole
        # a stage may have only a later name of a parameter that is used twice
        self._live = {whole.first_names[name]: parameter for name, parameter in model.named_parameters()}
        noted = {whole.first_names[name]: block for name, block in blocks(model).items()}
        self._blocks = {name: block for name, block in noted.items() if name in self._live}
        self._experts = expert_dims(model) if grid.plan.mesh.ep > 1 else {}
        self.parameters = {name: _piece(parameter) for name, parameter in self._live.items()}
        for piece in self.parameters.values():
            # small gradients pile up, and moments of them are made: more digits than a bf16 parameter's
            if grid.plan.precision.dtype_rules and piece.dtype == torch.bfloat16:
                piece.grad_dtype = torch.float32
        # in what gradients travel between data ranks where it is not their own dtype
        self.grad_reduce_dtypes = {
            whole.first_names[name]: dtype
            for name, dtype in grad_reduce_dtypes(model).items()
            if whole.first_names[name] in self.parameters
        }
        self._cut = {self.parameters[name]: block for name, block in self._blocks.items()}
        # those that FSDP2 was not given; experts among them, which are others on each rank, are not equal
        uncut = [name for name, live in self._live.items() if grid.plan.uses_fsdp and not isinstance(live, DTensor)]
        equal = [name for name in uncut if name not in self._experts]
        sums = [(grid.group(line), names) for line, names in (("shard", equal), ("dp_replicate", uncut)) if names]
        self.replicated_grad_groups: list[tuple[ProcessGroup, list[str]]] = [
            each for each in sums if each[0].size() > 1
        ]
        first_of_shard = not grid.plan.uses_fsdp or grid.rank_along("shard") == 0
        self._counted_before = {self.parameters[name] for name in ([] if first_of_shard else equal)}
        self._repeated = {self.parameters[name] for name in repeated if name in self.parameters} | self._counted_before

    @property
    def is_sharded(self) -> bool:
        """Whether any parameter is not whole."""
        return self._grid.plan.uses_fsdp or bool(self._cut)

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the whole model."""
        return self._whole.num_parameters

    def shard_of(self, name: str, tensor: Tensor) -> TensorShard | None:
        """``tensor`` (the parameter ``name`` here, or anything of its shape) as a block of the whole; None where it is whole."""
        live, block, experts = self._live[name], self._blocks.get(name), self._experts.get(name)
        # DTensors of the plan's placements lie along tp, and have blocks
        by_fsdp, sizes = isinstance(live, DTensor) and self._grid.plan.uses_fsdp, self._grid.sizes
        sharded = by_fsdp or experts is not None
        if not (sharded or block) or tensor.shape != self.parameters[name].shape:
            return None
        shape, offset = self._whole.parameters[name].shape, [0] * live.ndim
        if isinstance(live, DTensor) and by_fsdp:
            line, placed = "shard" if experts is None else "experts", live.placements[-1]
            along = placed.dim if isinstance(placed, Shard) else 0
            size = -(-live.shape[along] // sizes[line])
            offset[along] = min(self._grid.rank_along(line) * size, live.shape[along])
        if experts is not None:
            offset[experts] += self._grid.rank_along("ep") * live.shape[experts]
        replica = 0
        for axis, cuts in (("dp_replicate", False), ("shard", sharded), ("tp", block is not None)):
            replica = replica if cuts else replica * sizes[axis] + self._grid.rank_along(axis)
        if block is None:
            return TensorShard(tensor=tensor, global_shape=shape, offset=tuple(offset), replica=replica)
        runs = _within(block.runs, offset[block.dim], tensor.shape[block.dim])
        offset[block.dim] = runs[0][0]
        return TensorShard(
            tensor=tensor,
            global_shape=shape,
            offset=tuple(offset),
            replica=replica + block.replica,
            dim=block.dim,
            runs=runs if len(runs) > 1 else (),
        )

    def global_norm(self, gradients: Iterable[Tensor]) -> Tensor:
        """The norm of all gradients together, whose pieces here are ``gradients``, in order of the trained parameters."""
        trained = [p for p in self.parameters.values() if p.requires_grad]
        pairs = [(p, g) for p, g in zip(trained, gradients, strict=True) if p not in self._repeated]
        if not self.is_sharded and self._grid.plan.mesh.pp == 1:
            return global_norm([g for _, g in pairs])
        cut = global_norm([g for p, g in pairs if p in self._cut and not self._cut[p].replica]).square()
        rest = global_norm([g for p, g in pairs if p not in self._cut]).square()
        of_stage = self._grid.sum(self._grid.sum(cut, "tp") + rest, "shard")
        return self._grid.sum(of_stage, "pp").sqrt()

    def sum_over_shards(self, pieces: Sequence[nn.Parameter], values: Tensor) -> Tensor:
        """``values`` [n], one of each piece, summed over the pieces of the same parameters."""
        if self._cut:
            cut = torch.tensor([piece in self._cut for piece in pieces], device=values.device)
            counted = torch.tensor([piece in self._cut and not self._cut[piece].replica for piece in pieces])
            total = self._grid.sum(torch.where(counted.to(values.device), values, 0), "tp")
            values = torch.where(cut, total, values)
        if self._counted_before:
            again = torch.tensor([piece in self._counted_before for piece in pieces], device=values.device)
            values = torch.where(again, 0, values)
        return self._grid.sum(values, "shard")

    def sum_over_data_ranks(self, values: Tensor) -> Tensor:
        """``values`` of this rank's tokens between the cut layers, summed over all tokens of the step, in place."""
        values = self._grid.sum(self._grid.sum(values, "dp_replicate"), "shard")
        return self._grid.sum(values, "tp") if self._grid.plan.tensor_parallel.sequence_parallel else values

    def max_over_shards(self, values: Tensor) -> Tensor:
        """The largest of ``values`` [n] over all ranks that hold pieces; NaN where one has it."""
        return self._grid.max(self._grid.max(values, "tp"), "shard")

    def global_norms(self, pieces: Sequence[nn.Parameter], norms: Tensor) -> Tensor:
        """Norms [n] of whole parameters, or of anything of their shapes, from those of the pieces."""
        return self.sum_over_shards(pieces, norms.square()).sqrt()

    def gather_stages(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """``values`` by parameter name, with those of the other stages of a pipeline, in the model's order."""
        if self._grid.plan.mesh.pp == 1:
            return dict(values)
        found = {name: value for each in self._grid.world.gather_json(values) for name, value in each.items()}
        return {name: found[name] for name in self._whole.parameters if name in found}

    def collect_grads(self) -> None:
        """Give each piece its gradient: that of its parameter, zeros where no sample used it."""
        for name, piece in self.parameters.items():
            if not piece.requires_grad:
                continue
            gradient = self._live[name].grad
            if isinstance(gradient, DTensor):
                gradient = gradient.to_local()
            dtype = piece.grad_dtype or piece.dtype
            piece.grad = torch.zeros_like(piece, dtype=dtype) if gradient is None else gradient.to(dtype)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in (*self._live.values(), *self.parameters.values()):
            parameter.grad = None


def _piece(parameter: nn.Parameter) -> nn.Parameter:
    if not isinstance(parameter, DTensor):
        return parameter
    return nn.Parameter(parameter.to_local().detach(), requires_grad=parameter.requires_grad)


def _within(runs: tuple[tuple[int, int], ...], start: int, length: int) -> tuple[tuple[int, int], ...]:
    """What ``runs`` (offset, length), laid one behind the other, are from ``start`` on for ``length``."""
    found: list[tuple[int, int]] = []
    for offset, size in runs:
        begin, end = max(start, 0), min(start + length, size)
        if begin < end:
            found.append((offset + begin, end - begin))
        start -= size
    return tuple(found) or ((runs[-1][0] + runs[-1][1], 0),)
