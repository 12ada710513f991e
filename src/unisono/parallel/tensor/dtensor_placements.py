"""Tensor parallelism on torch's DTensor, for models that no rule of ``tensor`` matches: the user places some parameters.

    shard_module(model, {"blocks.*.up.weight": ("tp", None), "blocks.*.down.weight": (None, "tp")}, dims)

sets for parameters, by name or pattern, the dim along which they are sharded over the ranks of ``tp``. All other parameters and
buffers are replicated. DTensor propagates placements through operations and inserts the collectives (as GSPMD, Xu et al. 2021).
``shard_function`` sets the placements of a function's inputs and outputs. Only ``tp`` may be named: along ``dp_shard`` FSDP2
shards all parameters by rows, and ranks of the other axes compute different samples or layers.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.utils import _pytree as pytree

from unisono.errors import PlanError, Problem, nearest_name
from unisono.parallel.hooks import wrap_forward
from unisono.parallel.mesh import ParallelDims, clear_mesh_caches
from unisono.parallel.sharding import ShardedParameters, ShardTable
from unisono.parallel.timed_collectives import all_reduce
from unisono.plan import rules
from unisono.plan.plan import Plan
from unisono.plan.rules import match_modules

AXIS = "tp"
Dims = tuple[str | None, ...]


def shard_module(model: nn.Module, placements: Mapping[str, Dims], dims: ParallelDims) -> None:
    """Shard the parameters of ``model`` that ``placements`` names and replicate the others, in place.

    Inside the model all tensors are DTensors; its inputs and outputs are plain tensors that are equal on the ranks. All ranks
    call this, with equal models.

    Args:
        model: A model, or a part of one.
        placements: By pattern of names (``fnmatch``): for each dim "tp" or None.

    Raises:
        PlanError: A pattern or placement does not fit; nothing was changed. In a forward pass: DTensor has no rule for an
            operation.
    """
    names = _names(model)
    chosen, problems = _match(names, placements)
    if dims.plan.mesh.tp == 1:
        problems.append(
            Problem(
                given=f"placements with plan.{AXIS}=1",
                rule=f"they shard parameters over the ranks of {AXIS}",
                consequence="they would act on nothing",
                nearest=f"plan.{AXIS}=2, or no placements",
            )
        )
    if problems:
        raise PlanError(*problems)
    mesh = _mesh(dims)
    distributed = {
        parameter: nn.Parameter(
            distribute_tensor(
                parameter.detach(), mesh, _torch_placements(chosen.get(parameter, ())), src_data_rank=None
            ),
            requires_grad=parameter.requires_grad,
        )
        for parameter in names
    }
    for module in model.modules():
        if any(p in chosen for p in module.parameters(recurse=False)):
            module.register_forward_pre_hook(_reduce_gradients)
            module.register_forward_hook(_reduce_outputs)
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(module, name, distributed[parameter])
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(module, name, distribute_tensor(buffer, mesh, [Replicate()], src_data_rank=None))
    _convert_at_boundary(model, mesh)


def resolve_placements(
    model: nn.Module, plan: Plan
) -> tuple[dict[str, dict[str, Dims]], dict[str, rules.ParameterPlacement]]:
    """The placements of parameters (dims by pattern), and those of inputs and outputs, by module.

    Raises PlanError with all problems of the placements of ``plan``.
    """
    modules = dict(model.named_modules())
    placed: dict[str, dict[str, Dims]] = {}
    redistributed: dict[str, rules.ParameterPlacement] = {}
    problems: list[Problem] = []
    for placement in plan.tensor_parallel.placements:
        paths = match_modules(placement.module, modules)
        if not paths:
            problems.append(
                Problem(
                    given=f"a placement in {placement.module!r}",
                    rule="it names modules of the model, by pattern",
                    consequence="it would act on nothing",
                    nearest=nearest_name(placement.module, modules),
                )
            )
        for path in paths:
            if placement.parameter:
                twice = placed.setdefault(path, {}).setdefault(placement.parameter, placement.dims) != placement.dims
            else:
                twice = redistributed.setdefault(path, placement) is not placement
            if twice:
                subject = repr(placement.parameter) if placement.parameter else "the inputs and outputs"
                problems.append(
                    Problem(
                        given=f"two placements of {subject} of {path or 'the model'!r}",
                        rule="a parameter has one placement, and so have the inputs and outputs of a module",
                        consequence="it is unclear which counts",
                        nearest="one of them, or patterns that do not overlap",
                    )
                )
    problems += [*_overlapping(model, placed), *_outside(redistributed, placed)]
    problems += [problem for path, own in placed.items() for problem in _match(_names(modules[path]), own)[1]]
    if problems:
        alike = {re.sub(r"\.\d+", ".*", problem.given): problem for problem in reversed(problems)}
        raise PlanError(*reversed(alike.values()))  # of repeated blocks those of the first
    return placed, redistributed


def apply_placements(model: nn.Module, dims: ParallelDims, table: ShardTable) -> None:
    """Shard ``model`` in place by the placements of the plan, set those of inputs and outputs of modules, and record the shards
    in ``table``."""
    modules = dict(model.named_modules())
    placed, redistributed = resolve_placements(model, dims.plan)
    for path, placements in placed.items():
        shard_module(modules[path], placements, dims)
        _record(modules[path], path, dims, table)
    for path, placement in redistributed.items():
        pinned = shard_function(modules[path].forward, inputs=placement.inputs, outputs=placement.outputs)
        wrap_forward(modules[path], partial(_call, pinned))


def _call(pinned: Callable[..., Any], _forward: Any, *args: Any, **kwargs: Any) -> Any:
    return pinned(*args, **kwargs)


def _overlapping(model: nn.Module, placed: Collection[str]) -> Iterator[Problem]:
    """Problems of modules with placements inside each other, or that share a parameter with other modules."""
    holders = _names(model)
    for path in placed:
        inside = [other for other in placed if other != path and _within(other, path)]
        shared = [names for names in holders.values() if any(_within(name, path) for name in names)]
        outside = [name for names in shared for name in names if not _within(name, path)]
        if inside or outside:
            yield Problem(
                given=f"placements in {path or 'the model'!r} and placements of {', '.join(inside + outside)}",
                rule="modules with placements hold no others, and share no parameter with the rest of the model",
                consequence="a value would be asked for both as a DTensor and as a plain tensor",
                nearest="placements in one module that holds both",
            )


def _outside(redistributed: Collection[str], placed: Collection[str]) -> Iterator[Problem]:
    for path in redistributed:
        if not any(_within(path, outer) and path != outer for outer in placed):
            yield Problem(
                given=f"a placement of the inputs or outputs of {path or 'the model'!r}",
                rule="it is of a module inside one whose parameters are placed: outside values are plain tensors",
                consequence="there would be nothing to move",
                nearest="a placement of parameters in a module around it",
            )


def _names(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Names of each parameter."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def _within(name: str, path: str) -> bool:
    return not path or name.startswith(path + ".")


def _record(module: nn.Module, path: str, dims: ParallelDims, table: ShardTable) -> None:
    """Record in ``table`` which elements of each parameter of ``module``, at ``path``, are on this rank."""
    for name, parameter in module.named_parameters():
        placement = _dims(parameter)
        if AXIS in placement:
            dim = placement.index(AXIS)
            size = -(-parameter.shape[dim] // dims.plan.mesh.tp)
            start = min(dims.rank_along(AXIS) * size, parameter.shape[dim])
            length = cast(DTensor, parameter).to_local().shape[dim]
            table.select(f"{path}.{name}".lstrip("."), dim, [(start, length)])


class DTensorGradients:
    """The gradient synchronisation of a model with placements: completes DTensor's partial sums at the end of a step."""

    def __init__(self, model: nn.Module, sharded: ShardedParameters, dims: ParallelDims) -> None:
        self._model, self._sharded, self._dims = model, sharded, dims
        self.gradients, self.zero_grad = sharded.gradients, sharded.zero_grad

    def prepare_last_backward(self, part: Sequence[nn.Module] | None = None) -> None:
        """Does nothing: gradients are sent at the end of the step only."""

    def wait(self, totals: Tensor) -> None:
        """Sum ``totals`` [k] over all ranks, and set the gradient of every shard."""
        world = self._dims.world
        with world.explain_errors("gradient totals"):
            all_reduce(totals, world.group)
        redistribute_grads(self._model)
        self._sharded.collect_grads()
        for gradient in self.gradients():
            self._dims.sum(gradient, "dp_replicate")

    def close(self) -> None:
        """Free the gradients, and torch's caches of the mesh."""
        self._sharded.zero_grad()
        clear_mesh_caches()


def shard_function(
    function: Callable[..., Any], *, inputs: Sequence[Dims | None] = (), outputs: Dims | None = None
) -> Callable[..., Any]:
    """``function`` with its positional inputs and its outputs redistributed to these placements; None changes nothing.

    It is used inside a model that ``shard_module`` has sharded. Raises PlanError, in a call, for a value that is no DTensor or
    has another number of dims.
    """
    for number, dims in enumerate([*inputs, outputs]):
        problem = None if dims is None else _wrong_axes(f"value {number} of {_name(function)}", dims)
        if problem is not None:
            raise PlanError(problem)

    @functools.wraps(function)
    def pinned(*args: Any, **kwargs: Any) -> Any:
        values = [
            value if dims is None else _redistribute(value, dims, f"input {number} of {_name(function)}")
            for number, (value, dims) in enumerate(zip(args, [*inputs, *[None] * len(args)], strict=False))
        ]
        result = function(*values, **kwargs)
        return result if outputs is None else _redistribute(result, outputs, f"the output of {_name(function)}")

    return pinned


def parameter_placements(model: nn.Module) -> dict[str, Dims]:
    """Placement of each parameter, by name; all None for a replicated one."""
    return {name: _dims(parameter) for name, parameter in model.named_parameters()}


def redistribute_grads(model: nn.Module) -> None:
    """Give every gradient the placement of its parameter; that of a replicated parameter may still be a partial sum."""
    for parameter in model.parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            placements = cast(DTensor, parameter).placements
            if gradient.placements != placements:
                parameter.grad = gradient.redistribute(placements=placements)


def _reduce_gradients(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Reduce the gradients of inputs here. DTensor would otherwise reduce them later, scattered along the batch, which it cannot
    always split."""
    return pytree.tree_map_only(DTensor, lambda x: x.redistribute(placements=x.placements), args)


def _reduce_outputs(_module: nn.Module, _args: tuple[Any, ...], outputs: Any) -> Any:
    """Reduce the outputs of a module here, for the same reason."""

    def summed(x: DTensor) -> DTensor:
        return x.redistribute(placements=[Replicate()]) if x.placements[0].is_partial() else x

    return pytree.tree_map_only(DTensor, summed, outputs)


def _mesh(dims: ParallelDims) -> DeviceMesh:
    line = torch.tensor(dims.ranks_along(AXIS), device="cpu")
    return DeviceMesh.from_group(dims.group(AXIS), dims.plan.mesh.device, mesh=line, mesh_dim_names=(AXIS,))


def _torch_placements(dims: Dims) -> list[Placement]:
    return [Shard(dims.index(AXIS)) if AXIS in dims else Replicate()]


def _dims(tensor: Tensor) -> Dims:
    (placement,) = tensor.placements if isinstance(tensor, DTensor) else (Replicate(),)
    return tuple(AXIS if isinstance(placement, Shard) and placement.dim == dim else None for dim in range(tensor.dim()))


def _match(
    names: Mapping[nn.Parameter, list[str]], placements: Mapping[str, Dims]
) -> tuple[dict[nn.Parameter, Dims], list[Problem]]:
    chosen: dict[nn.Parameter, Dims] = {}
    problems: list[Problem] = []
    for pattern, dims in placements.items():
        matched = {p: name for p, aliases in names.items() for name in aliases if fnmatchcase(name, pattern)}
        if not matched:
            problems.append(
                Problem(
                    given=f"a placement of {pattern!r}",
                    rule="a placement names parameters of the model, by name or pattern",
                    consequence="it would act on nothing",
                    nearest=nearest_name(pattern, [name for aliases in names.values() for name in aliases]),
                )
            )
        problem = _wrong_axes(repr(pattern), dims)
        if problem is not None:
            problems.append(problem)
            continue
        for parameter, name in matched.items():
            if parameter.dim() != len(dims):
                problems.append(_wrong_length(f"{name} of shape {list(parameter.shape)}", dims, parameter.dim()))
            elif chosen.setdefault(parameter, dims) != dims:
                problems.append(
                    Problem(
                        given=f"{name} placed as {chosen[parameter]} and, by {pattern!r}, as {dims}",
                        rule="a parameter has one placement",
                        consequence="it is unclear which counts",
                        nearest="patterns that do not overlap",
                    )
                )
    return chosen, problems


def _wrong_axes(what: str, dims: Dims) -> Problem | None:
    if all(dim in (AXIS, None) for dim in dims) and dims.count(AXIS) <= 1:
        return None
    return Problem(
        given=f"the placement {dims} of {what}",
        rule=f"a placement has {AXIS!r} for one dim at most and None for the others",
        consequence="there are no other ranks that compute the same samples and could share it",
        nearest=f"plan.{AXIS} for what is pinned, plan.dp_shard for the state of all parameters",
    )


def _wrong_length(what: str, dims: Dims, wanted: int) -> Problem:
    return Problem(
        given=f"the placement {dims} of {what}",
        rule="a placement says for each dim whether it is cut",
        consequence="it is unclear which dim is meant",
        nearest=f"{wanted} entries of {AXIS!r} or None",
    )


def _redistribute(value: Any, dims: Dims, what: str) -> Any:
    if not isinstance(value, DTensor):
        raise PlanError(
            given=f"{what}: {type(value).__name__}",
            rule="a value can be moved inside a model whose parameters shard() has placed",
            consequence="its placement would act on nothing",
            nearest="shard(model, …) first, and None for what is no tensor",
        )
    if value.dim() != len(dims):
        raise PlanError(_wrong_length(f"{what} of shape {list(value.shape)}", dims, value.dim()))
    return value.redistribute(placements=_torch_placements(dims))


def _convert_at_boundary(model: nn.Module, mesh: DeviceMesh) -> None:
    """Convert the inputs of ``model`` to DTensors, and its outputs to plain tensors."""

    def replicated(x: Tensor) -> Tensor:
        return DTensor.from_local(x, mesh, [Replicate()], run_check=False)

    def with_dtensors(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map_only(Tensor, replicated, (args, kwargs))
        try:
            outputs = forward(*args, **kwargs)
        # torch raises this or a subclass for an operation without a sharding strategy
        except RuntimeError as error:
            text = str(error)
            if "sharding strategy" not in text and "mixed torch.Tensor and DTensor" not in text:
                raise
            raise PlanError(
                given=f"{type(model).__name__} with pinned placements: {text.splitlines()[0]}",
                rule="DTensor has a rule for every operation, and tensors made in the forward pass come from inputs",
                consequence="the operation cannot run on parts",
                nearest="shard() on a part of the model, such as a feed-forward layer, or plan.dp_shard",
            ) from error
        return pytree.tree_map_only(DTensor, lambda x: x.full_tensor(), outputs)

    wrap_forward(model, with_dtensors)


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", function))
