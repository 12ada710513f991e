"""Placements pinned by hand, the rest by rule: tensor parallelism on torch's DTensor for models that no rule of ``tensor`` names.

    shard(model, {"blocks.*.up.weight": ("tp", None), "blocks.*.down.weight": (None, "tp")}, grid)

says for parameters, by name or pattern, along which dim they are cut over the ranks of ``tp``. All other parameters and buffers
are replicated; what each operation makes of its inputs' placements, and which sums or moves it needs, DTensor decides
(Xu et al. 2021, GSPMD, describe such propagation). ``shard_function`` pins what goes into a function and comes out of it. Only
``tp`` may be named: along ``dp_shard`` FSDP2 cuts everything by rows, and the ranks of other axes compute different things.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.utils import _pytree as pytree

from unisono.errors import PlanError, Problem, nearest_name
from unisono.parallel.hooks import wrap_forward
from unisono.parallel.mesh import ParallelDims, clear_mesh_caches
from unisono.parallel.sharding import ShardedParameters, ShardTable
from unisono.plan import rules
from unisono.plan.plan import Plan
from unisono.plan.rules import match_modules

AXIS = "tp"
Dims = tuple[str | None, ...]


def shard_module(model: nn.Module, placements: Mapping[str, Dims], grid: ParallelDims) -> None:
    """Cut the parameters of ``model`` that ``placements`` names (patterns as in ``fnmatch``) and replicate the rest, in place.

    A placement has for each dim "tp" or None. ``model``, which may be a part of a larger one, is called with plain tensors that
    are equal on the ranks, and returns plain ones; inside all are DTensors. All ranks call it, with equal models. Raises
    PlanError before anything is changed; an operation for which DTensor has no rule raises it when it runs.
    """
    names = _names(model)
    chosen, problems = _match(names, placements)
    if grid.plan.mesh.tp == 1:
        problems.append(_inert())
    if problems:
        raise PlanError(*problems)
    mesh = _mesh(grid)
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
            module.register_forward_pre_hook(_gradients_return_alike)
            module.register_forward_hook(_sum_at_once)
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(module, name, distributed[parameter])
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(module, name, distribute_tensor(buffer, mesh, [Replicate()], src_data_rank=None))
    _enter_and_leave(model, mesh)


def resolve_placements(
    model: nn.Module, plan: Plan
) -> tuple[dict[str, dict[str, Dims]], dict[str, rules.ParameterPlacement]]:
    """By module, the placements of its parameters (dims by pattern), and those of its inputs and outputs.

    Raises PlanError with everything that keeps the placements of ``plan`` from being followed.
    """
    modules = dict(model.named_modules())
    wanted: dict[str, dict[str, Dims]] = {}
    moved: dict[str, rules.ParameterPlacement] = {}
    problems: list[Problem] = []
    for placement in plan.tensor_parallel.placements:
        paths = match_modules(placement.module, modules)
        if not paths:
            problems.append(_no_module(placement.module, modules))
        for path in paths:
            if placement.parameter:
                twice = wanted.setdefault(path, {}).setdefault(placement.parameter, placement.dims) != placement.dims
            else:
                twice = moved.setdefault(path, placement) is not placement
            if twice:
                what = repr(placement.parameter) if placement.parameter else "what goes into or comes out"
                problems.append(_placed_twice(f"{what} of {path or 'the model'!r}"))
    problems += [*_not_apart(model, wanted), *_outside(moved, wanted)]
    problems += [problem for path, own in wanted.items() for problem in _match(_names(modules[path]), own)[1]]
    if problems:
        alike = {re.sub(r"\.\d+", ".*", problem.given): problem for problem in reversed(problems)}
        raise PlanError(*reversed(alike.values()))  # of repeated blocks those of the first
    return wanted, moved


def apply_placements(model: nn.Module, mesh: ParallelDims, table: ShardTable) -> None:
    """Shard ``model`` in place as the placements of the plan say, pin the inputs and outputs of modules, and record the shards in
    ``table``."""
    modules = dict(model.named_modules())
    wanted, moved = resolve_placements(model, mesh.plan)
    for path, placements in wanted.items():
        shard_module(modules[path], placements, mesh)
        _record(modules[path], path, mesh, table)
    for path, placement in moved.items():
        pinned = shard_function(modules[path].forward, inputs=placement.inputs, outputs=placement.outputs)
        wrap_forward(modules[path], partial(_call, pinned))


def _call(pinned: Callable[..., Any], _forward: Any, *args: Any, **kwargs: Any) -> Any:
    return pinned(*args, **kwargs)


def _no_module(pattern: str, modules: Mapping[str, nn.Module]) -> Problem:
    return Problem(
        given=f"a placement in {pattern!r}",
        rule="it names modules of the model, by pattern",
        consequence="it would act on nothing",
        nearest=nearest_name(pattern, modules),
    )


def _placed_twice(what: str) -> Problem:
    return Problem(
        given=f"two placements of {what}",
        rule="a parameter has one placement, and so has what a module takes and gives",
        consequence="it is unclear which counts",
        nearest="one of them, or patterns that do not overlap",
    )


def _not_apart(model: nn.Module, wanted: Collection[str]) -> Iterator[Problem]:
    """Modules with placements that lie in each other, or share a parameter with what is outside."""
    holders = _names(model)
    for path in wanted:
        inside = [other for other in wanted if other != path and (not path or other.startswith(path + "."))]
        outside = [n for names in holders.values() if any(_within(n, path) for n in names) for n in names]
        outside = [name for name in outside if not _within(name, path)]
        if inside or outside:
            yield Problem(
                given=f"placements in {path or 'the model'!r} beside {', '.join(inside + outside)}",
                rule="modules with placements hold no others, and share no parameter with the rest of the model",
                consequence="a value would be asked for both as a DTensor and as a plain tensor",
                nearest="placements in one module that holds both",
            )


def _outside(moved: Collection[str], wanted: Collection[str]) -> Iterator[Problem]:
    for path in moved:
        if not any(_within(path, outer) and path != outer for outer in wanted):
            yield Problem(
                given=f"a placement of what goes into or comes out of {path or 'the model'!r}",
                rule="it is of a module inside one whose parameters are placed: outside values are plain tensors",
                consequence="there would be nothing to move",
                nearest="a placement of parameters in a module around it",
            )


def _names(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """All names of each parameter."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def _within(name: str, path: str) -> bool:
    return not path or name.startswith(path + ".")


def _record(module: nn.Module, path: str, mesh: ParallelDims, table: ShardTable) -> None:
    """Note in ``table`` which elements of each parameter of ``module``, at ``path``, are on this rank."""
    for name, parameter in module.named_parameters():
        dims = _dims(parameter)
        if AXIS in dims:
            dim = dims.index(AXIS)
            size = -(-parameter.shape[dim] // mesh.plan.mesh.tp)
            start = min(mesh.rank_along(AXIS) * size, parameter.shape[dim])
            length = cast(DTensor, parameter).to_local().shape[dim]
            table.select(f"{path}.{name}".lstrip("."), dim, [(start, length)])


class DTensorGradients:
    """The gradient synchronisation of a model with placements: what DTensor left open is summed when the step ends."""

    def __init__(self, model: nn.Module, pieces: ShardedParameters, grid: ParallelDims) -> None:
        self._model, self._pieces, self._grid = model, pieces, grid

    def prepare_last_backward(self, part: Sequence[nn.Module] | None = None) -> None:
        """Nothing leaves before the end."""

    def wait(self, totals: Tensor) -> None:
        """Sum ``totals`` [k] over all ranks and give every piece its gradient."""
        world = self._grid.world
        with world.guard("gradient totals"):
            dist.all_reduce(totals, group=world.group)
        redistribute_grads(self._model)
        self._pieces.collect_grads()
        for gradient in self.gradients():
            self._grid.sum(gradient, "dp_replicate")

    def gradients(self) -> list[Tensor]:
        """This rank's pieces, in parameter order."""
        return [piece.grad for piece in self._pieces.parameters.values() if piece.grad is not None]

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self._pieces.zero_grad()

    def close(self) -> None:
        """Let the gradients go, and the mesh."""
        self._pieces.zero_grad()
        clear_mesh_caches()


def shard_function(
    function: Callable[..., Any], *, inputs: Sequence[Dims | None] = (), outputs: Dims | None = None
) -> Callable[..., Any]:
    """``function`` with its positional inputs, and what it returns, moved to these placements; None leaves one as it comes.

    Inside a model that ``shard`` has cut. Raises PlanError, when called, for what is no DTensor or has other dims.
    """
    for number, dims in enumerate([*inputs, outputs]):
        problem = None if dims is None else _wrong_axes(f"value {number} of {_name(function)}", dims)
        if problem is not None:
            raise PlanError(problem)

    @functools.wraps(function)
    def pinned(*args: Any, **kwargs: Any) -> Any:
        moved = [
            value if dims is None else _move(value, dims, f"input {number} of {_name(function)}")
            for number, (value, dims) in enumerate(zip(args, [*inputs, *[None] * len(args)], strict=False))
        ]
        result = function(*moved, **kwargs)
        return result if outputs is None else _move(result, outputs, f"the output of {_name(function)}")

    return pinned


def parameter_placements(model: nn.Module) -> dict[str, Dims]:
    """For each parameter by what its dims are cut; all None for one that stayed replicated."""
    return {name: _dims(parameter) for name, parameter in model.named_parameters()}


def redistribute_grads(model: nn.Module) -> None:
    """Give every gradient the placement of its parameter: a replicated one's may still be a sum to be made over ranks."""
    for parameter in model.parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            wanted = cast(DTensor, parameter).placements
            parameter.grad = gradient if gradient.placements == wanted else gradient.redistribute(placements=wanted)


def _gradients_return_alike(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Sums of gradients over ranks are made here. Left open, DTensor makes them where it likes, in parts of the batch that it
    cannot always cut."""
    return pytree.tree_map_only(DTensor, lambda x: x.redistribute(placements=x.placements), args)


def _sum_at_once(_module: nn.Module, _args: tuple[Any, ...], outputs: Any) -> Any:
    """The same for what a module gives."""

    def summed(x: DTensor) -> DTensor:
        return x.redistribute(placements=[Replicate()]) if x.placements[0].is_partial() else x

    return pytree.tree_map_only(DTensor, summed, outputs)


def _mesh(grid: ParallelDims) -> DeviceMesh:
    line = torch.tensor(grid.ranks_along(AXIS))
    return DeviceMesh.from_group(grid.group(AXIS), grid.plan.mesh.device, mesh=line, mesh_dim_names=(AXIS,))


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


def _inert() -> Problem:
    return Problem(
        given=f"placements with plan.{AXIS}=1",
        rule=f"they spread parameters over the ranks of {AXIS}",
        consequence="they would act on nothing",
        nearest=f"plan.{AXIS}=2, or no placements",
    )


def _move(value: Any, dims: Dims, what: str) -> Any:
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


def _enter_and_leave(model: nn.Module, mesh: DeviceMesh) -> None:

    def enter(x: Tensor) -> Tensor:
        return DTensor.from_local(x, mesh, [Replicate()], run_check=False)

    def with_dtensors(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map_only(Tensor, enter, (args, kwargs))
        try:
            outputs = forward(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
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
