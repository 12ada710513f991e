"""Sharded data parallelism (ZeRO, Rajbhandari et al. 2020) on torch's FSDP2.

A block's parameters are gathered before its forward pass; its gradients are reduce-scattered. The stages differ:

    1   parameters stay gathered until the step's last backward pass; gradients accumulate unsharded and are reduced once
    2   parameters stay gathered likewise; the gradients of each micro-batch are reduced at once
    3   parameters are freed after use and gathered again for the backward pass

Experts that ``ep`` has distributed are a unit of their own, over the ranks that hold the same experts. A stack whose number of
experts is not divisible by the ranks is sharded along its next dimension, if that is divisible; otherwise some ranks would hold
nothing. A placement may pin the dimension (``tensor.pinned_dims``). Parameters below the plan's threshold, and experts that only
one rank holds, are not sharded: their gradients are summed once per step (``ShardedParameters.unsharded_grad_groups``).

With ``dp_replicate`` above 1 (hybrid sharding) the reduced shards are summed over the replicas in the last micro-batch only.
Gradients are summed, never averaged. All ranks must run the same number of passes, which the plan ensures.

In 16-bit runs, parameters of blocks that forward passes only convert to 16 bits (``weight_casts``) are converted before they are
gathered. Shards, accumulated gradients and sums over ranks stay in 32 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param  # has no public name; torch 2.13 tested
from torch.distributed.tensor import DTensor, Shard

from unisono.errors import PlanError, nearest_name
from unisono.parallel.device import COMPUTE_DTYPES
from unisono.parallel.expert import expert_layers
from unisono.parallel.mesh import ParallelDims, clear_mesh_caches
from unisono.parallel.sharding import ShardedParameters, ShardTable
from unisono.parallel.timed_collectives import (
    FSDP_ALL_GATHER,
    FSDP_REDUCE_SCATTER,
    all_reduce,
    count_replica_sum,
)
from unisono.plan.plan import Plan
from unisono.plan.rules import match_modules


def apply_fsdp(
    model: nn.Module,
    blocks: list[nn.Module],
    dims: ParallelDims,
    table: ShardTable,
    cast_before_gather: Collection[str] = (),
) -> None:
    """Shard the parameters of ``model``, in place. Each block is a unit, and the rest of the model another.

    Args:
        model: The model.
        blocks: Its repeated blocks.
        dims: The mesh of the ranks.
        table: Gets the shards of this rank.
        cast_before_gather: First names of parameters that are gathered in the dtype that the plan computes in, if in a block.
    """
    plan, spec = dims.plan, table.spec
    stacks = {parameter for _, experts in expert_layers(model) for parameter in experts.parameters()}
    ranks = {
        parameter: plan.shard_degree_of(
            spec.first_names[name], spec.parameters[spec.first_names[name]].numel, expert=parameter in stacks
        )
        for name, parameter in model.named_parameters()
    }
    dims_given = {
        parameter: table.shard_dims[first]
        for name, parameter in model.named_parameters()
        if (first := spec.first_names[name]) in table.shard_dims
    }
    replicated = {parameter for parameter, count in ranks.items() if count == 1}

    def placement(parameter: nn.Parameter) -> Shard:
        if parameter in dims_given:
            return Shard(dims_given[parameter])
        experts, units, *_ = *parameter.shape, 1
        count = ranks[parameter]
        return Shard(1 if parameter in stacks and experts % count and units % count == 0 else 0)

    paths = {module: path for path, module in model.named_modules()}

    def reduce_dtype(module: nn.Module, name: str, parameter: nn.Parameter) -> torch.dtype:
        default_dtype = torch.float32 if parameter.dtype == torch.bfloat16 else parameter.dtype
        return table.grad_reduce_dtypes.get(f"{paths[module]}.{name}".lstrip("."), default_dtype)

    shard_unit = partial(_shard_unit, replicated=replicated, placement=placement, reduce_dtype=reduce_dtype)
    if plan.mesh.ep > 1 and plan.mesh.shard_degree > plan.mesh.ep:
        for _, experts in expert_layers(model):
            shard_unit(experts, dims.expert_mesh, reshard=plan.fsdp.zero == 3)
    for block in blocks:
        shard_unit(block, dims.fsdp_mesh, reshard=plan.fsdp.zero == 3)
    # it stays gathered: the loss reads the head's weight after the forward pass, and the backward pass starts with it
    shard_unit(model, dims.fsdp_mesh, reshard=False)
    units: Any = blocks
    for number in range(len(blocks) if plan.fsdp.prefetch_blocks else 0):
        units[number].set_modules_to_forward_prefetch(units[number + 1 : number + 1 + plan.fsdp.prefetch_blocks])
        units[number].set_modules_to_backward_prefetch(units[max(0, number - plan.fsdp.prefetch_blocks) : number][::-1])
    sharded_units: Iterable[Any] = _units(model)
    for unit in sharded_units:
        unit.set_gradient_divide_factor(1.0)
        # a rank whose samples did not use a parameter sends zeros; otherwise ranks would reduce buffers of different lengths
        unit.set_reduce_scatter_unused_params(True)
        # otherwise the collective multiplies by a factor, which gloo does not support
        unit.set_force_sum_reduction_for_comms(True)
        _time_collectives(unit, dims)
    names = {parameter: spec.first_names[name] for name, parameter in model.named_parameters()}
    for unit in (unit for block in blocks for unit in _units(block)):
        for group in _param_groups(unit):
            for shard in group.fsdp_params:
                if names[shard.sharded_param] in cast_before_gather:
                    _cast_before_gather(shard, group, COMPUTE_DTYPES[plan.precision.compute])
    _record(model, dims, table)


def _param_groups(unit: Any) -> list[Any]:
    """FSDP2's own groups of the parameters of ``unit``, for which it has no public name."""
    return unit._get_fsdp_state()._fsdp_param_groups


def _cast_before_gather(shard: Any, group: Any, dtype: torch.dtype) -> None:
    """Have FSDP2 gather a parameter in ``dtype``, and add and reduce its gradient in that of the shard.

    A policy of FSDP2 holds for a whole group, which also has the norms of a block. But each parameter has dtypes of its own; only
    gradients are expected in one, so they are converted before they are added or reduced.
    """
    set_dtypes, accumulate, wide = (
        shard.init_dtype_attrs,
        shard.accumulate_unsharded_grad_if_needed,
        shard.sharded_param.dtype,
    )

    def accumulate_in_32_bits() -> None:
        accumulate()
        if not hasattr(shard, "_unsharded_param"):  # never used
            return
        shard.to_accumulated_grad_if_needed()
        if group.reduce_grads and shard.unsharded_accumulated_grad is None and shard.sharded_param.requires_grad:
            shard.unsharded_accumulated_grad = torch.zeros_like(shard.unsharded_param, dtype=wide)

    group.mp_policy = replace(group.mp_policy, reduce_dtype=wide)
    shard.init_dtype_attrs = lambda _policy: set_dtypes(MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=wide))
    shard.accumulate_unsharded_grad_if_needed = accumulate_in_32_bits


def _time_collectives(unit: Any, dims: ParallelDims) -> None:
    unit.set_custom_all_gather(FSDP_ALL_GATHER)
    unit.set_custom_reduce_scatter(FSDP_REDUCE_SCATTER)
    if dims.plan.mesh.dp_replicate > 1:
        unit.set_all_reduce_hook(partial(count_replica_sum, dims.group("dp_replicate")))


def _record(model: nn.Module, dims: ParallelDims, table: ShardTable) -> None:
    """Record in ``table`` which elements of each parameter are on this rank."""
    experts = table.split_over("ep")
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            continue
        axis, placement = "experts" if table.spec.first_names[name] in experts else "shard", parameter.placements[-1]
        dim = placement.dim if isinstance(placement, Shard) else 0
        size = -(-parameter.shape[dim] // dims.sizes[axis])
        start = min(dims.rank_along(axis) * size, parameter.shape[dim])
        table.narrow(name, "shard", dim, start, parameter.to_local().shape[dim])


def check_unsharded(model: nn.Module, plan: Plan) -> None:
    """Raises PlanError if ``plan.fsdp.ignored_modules`` matches no module, or experts that ``ep`` distributes, or if this torch
    cannot reduce the gradients."""
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise PlanError(
            given=f"parameters sharded over {plan.mesh.shard_degree} ranks, with torch {torch.__version__}",
            rule="where a rank's samples did not use a parameter it sends zeros, which torch's FSDP2 does from 2.13 on",
            consequence="ranks would reduce buffers of different lengths",
            nearest="torch 2.13 or later, or a plan with dp_shard=1, cp=1 and ep=1",
        )
    paths = [path for path, _ in model.named_modules() if path]
    layers = [path for path, _ in expert_layers(model)] if plan.mesh.ep > 1 else []
    for pattern in plan.fsdp.ignored_modules:
        named = match_modules(pattern, paths)
        experts = [path for path in layers if any(f"{path}.".startswith(f"{name}.") for name in named)]
        if not named or experts:
            raise PlanError(
                given=f"fsdp.ignored_modules {pattern!r}" + (f", which holds {experts[0]}" if experts else ""),
                rule="it names modules of the model, without experts that ep spreads",
                consequence="experts would not be where tokens are sent" if experts else "it would change nothing",
                nearest="modules outside them, or ep=1" if experts else nearest_name(pattern, paths),
            )


Kind = tuple[torch.dtype, torch.dtype]


def _shard_unit(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    replicated: set[nn.Parameter],
    placement: Callable[[nn.Parameter], Shard],
    reduce_dtype: Callable[[nn.Module, str, nn.Parameter], torch.dtype],
    reshard: bool,
) -> None:
    """Make ``module``, without the ``replicated`` parameters, a unit of FSDP2.

    A unit has one dtype of parameters and one of their reduction. Modules inside with other dtypes become units of their own, one
    per pair of dtypes. The unit has the dtypes of its last matrix, because the loss reads a head's weight outside of its module.
    """
    kinds: dict[nn.Module, Kind] = {}
    matrices: list[Kind] = []
    for inner in module.modules():
        for name, parameter in inner.named_parameters(recurse=False, remove_duplicate=False):
            if parameter in replicated or isinstance(parameter, DTensor):  # of a unit inside this one
                continue
            kinds[inner] = parameter.dtype, reduce_dtype(inner, name, parameter)
            matrices += [kinds[inner]] * (parameter.dim() > 1)
    main = (matrices or list(kinds.values()) or [(torch.float32, torch.float32)])[-1]
    units: list[tuple[Any, Kind]] = [
        ([inner for inner, own in kinds.items() if own == kind], kind)
        for kind in dict.fromkeys(kinds.values())
        if kind != main
    ]
    for unit, kind in (*units, (module, main)):
        stored, reduced = kind
        fully_shard(
            unit,
            mesh=mesh,
            mp_policy=MixedPrecisionPolicy(
                reduce_dtype=None if reduced == stored else reduced, cast_forward_inputs=False
            ),
            reshard_after_forward=reshard,
            shard_placement_fn=placement,
            ignored_params=replicated,
        )


def reshard(model: nn.Module) -> None:
    """Free parameters that are still gathered. Without a backward pass nothing else does, and the next forward pass would use the
    values from before the update."""
    for unit in _units(model):
        unit.reshard()


@dataclass(frozen=True, slots=True)
class _Chunks:
    """The shards of a parameter, each cut when it is asked for; those beyond its rows are empty."""

    tensor: Tensor
    count: int
    dim: int

    def __getitem__(self, number: int) -> Tensor:
        size = self.tensor.shape[self.dim]
        length = -(-size // self.count)
        if number and number * length >= size:
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, number * length, min(length, size - number * length))


@contextmanager
def traced_shards() -> Generator[None]:
    """Inside, FSDP2 does as much for shards without values as a trace needs.

    Uneven ones are padded once, as those with values are: FSDP2 tells it by their addresses. And a rank cuts its own shard alone,
    not those of thousands of ranks.
    """
    param: Any = _fsdp_param.FSDPParam
    reset, chunk = param.reset_sharded_param, vars(_fsdp_param)["_chunk_with_empty"]

    def reset_if_replaced(shard: Any) -> None:
        padded: Any = shard._sharded_param_data.untyped_storage()
        current: Any = getattr(shard._module_info.module, shard._module_info.param_name)._local_tensor.untyped_storage()
        if padded._cdata != current._cdata:
            reset(shard)

    param.reset_sharded_param = reset_if_replaced
    setattr(_fsdp_param, "_chunk_with_empty", _Chunks)  # noqa: B010
    try:
        yield
    finally:
        param.reset_sharded_param = reset
        setattr(_fsdp_param, "_chunk_with_empty", chunk)  # noqa: B010


class FSDPGradients:
    """The gradient synchronisation of a sharded model: tells FSDP2 when to reduce."""

    def __init__(self, model: nn.Module, sharded: ShardedParameters, dims: ParallelDims) -> None:
        self._plan, self._sharded, self._world = dims.plan, sharded, dims.world
        self._units = list(_units(model))
        self.gradients = sharded.gradients
        self._set(self._units, last=False)

    def _set(self, units: Iterable[FSDPModule], *, last: bool) -> None:
        for unit in units:
            unit.set_requires_gradient_sync(last or self._plan.fsdp.zero > 1, recurse=False)
            unit.set_requires_all_reduce(last, recurse=False)
            unit.set_reshard_after_backward(last or self._plan.fsdp.zero == 3, recurse=False)

    def prepare_last_backward(self, part: Sequence[nn.Module] | None = None) -> None:
        """The next backward pass is the step's last, or the last through a ``part`` of the model."""
        units = self._units if part is None else [unit for module in part for unit in _units(module)]
        self._set(units, last=True)

    def wait(self, totals: Tensor) -> None:
        """Sum ``totals`` [k] over all ranks, and set the gradient of every shard."""
        with self._world.explain_errors("gradient totals"):
            all_reduce(totals, self._world.group)
        self._sharded.collect_grads()
        self._sharded.sum_partial_grads(self._sharded.unsharded_grad_groups)

    def zero_grad(self) -> None:
        """Set gradients to None; the next backward pass is not the step's last."""
        self._sharded.zero_grad()
        self._set(self._units, last=False)

    def close(self) -> None:
        """Free the gradients, and torch's caches of the mesh."""
        self._sharded.zero_grad()
        clear_mesh_caches()


def _units(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))
