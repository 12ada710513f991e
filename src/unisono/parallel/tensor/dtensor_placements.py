"""Tensor parallelism on torch's DTensor, for models that no rule of ``tensor`` matches: the user places some parameters.

    shard_module(model, {"blocks.*.up.weight": ("tp", None), "blocks.*.down.weight": (None, "tp")}, dims)

sets for parameters, by name or pattern, the dim along which they are sharded over the ranks of ``tp``. All other parameters and
buffers are replicated. In the forward pass of the model they are DTensors: DTensor propagates placements through operations and
inserts the collectives (as GSPMD, Xu et al. 2021). Outside of it, and for all else that shards or reduces parameters, a rank has
plain tensors: its part of each. ``shard_function`` sets the placements of a function's inputs and outputs. Placements of a
strategy file may name ``dp_shard`` and ``ep`` too (``pinned_dims``): these split what a rank keeps, not what it computes.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.utils import _pytree as pytree

from unisono.errors import PlanError, Problem, nearest_name
from unisono.parallel.expert import expert_layers
from unisono.parallel.hooks import wrap_forward
from unisono.parallel.mesh import ParallelDims
from unisono.parallel.sharding import ShardTable
from unisono.plan import rules
from unisono.plan.plan import Plan
from unisono.plan.rules import axes_problem, match_modules
from unisono.plan.trace import trace

AXIS = "tp"
Dims = tuple[str | None, ...]


def shard_module(model: nn.Module, placements: Mapping[str, Dims], dims: ParallelDims) -> dict[str, Dims]:
    """Shard the parameters of ``model`` that ``placements`` names and replicate the others, in place.

    Each rank has its part of a sharded parameter, in blocks of equal size of which the last may be smaller, as a plain parameter.
    Its gradient is that of the part; that of a replicated one is complete, and equal on the ranks. Inputs and outputs of the
    model are plain tensors that are equal on the ranks. All ranks call this, with equal models.

    Args:
        model: A model, or a part of one.
        placements: By pattern of names (``fnmatch``): for each dim "tp" or None. The axes "dp_shard" and "ep" are those of a
            strategy file (``tensor_parallel.placements``), whose run shards states and experts.
        dims: The mesh of the ranks.

    Returns:
        The placement of each parameter, by name.

    Raises:
        PlanError: A pattern or placement does not fit; nothing was changed. In a forward pass: DTensor has no rule for an
            operation.
    """
    problems = [axes_problem(repr(pattern), of_pattern, (AXIS,)) for pattern, of_pattern in placements.items()]
    if wrong := [problem for problem in problems if problem is not None]:
        raise PlanError(*wrong)
    return _shard(model, placements, dims, lambda *part: None)


def _shard(
    model: nn.Module, placements: Mapping[str, Dims], dims: ParallelDims, record: Callable[[str, int, int, int], None]
) -> dict[str, Dims]:
    """``shard_module``; ``record`` is called with name, dim, first element and number of elements of each part."""
    names = names_of(model)
    chosen, problems = match_parameters(names, placements)
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
    placed = {aliases[0]: chosen.get(parameter, (None,) * parameter.dim()) for parameter, aliases in names.items()}
    parts: dict[nn.Parameter, nn.Parameter] = {}
    tensors: list[_PlacedTensor] = []
    for module in model.modules():
        if any(parameter in chosen for parameter in module.parameters(recurse=False)):
            module.register_forward_pre_hook(_reduce_gradients)
            module.register_forward_hook(_reduce_outputs)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            layout = chosen.get(parameter, ())
            if AXIS in layout:
                if parameter not in parts:
                    dim, begin, length = _own_part(parameter, layout, dims)
                    parts[parameter] = _part(parameter, dim, begin, length)
                    record(names[parameter][0], dim, begin, length)
                setattr(module, name, parts[parameter])
            tensors.append(_PlacedTensor.of(module._parameters, name, parameter, layout))  # pyright: ignore[reportPrivateUsage]
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            tensors.append(_PlacedTensor.of(module._buffers, name, buffer, ()))  # pyright: ignore[reportPrivateUsage]
    _compute_with_dtensors(model, tensors, _mesh(dims))
    return placed


class _PlacedTensor(NamedTuple):
    """A parameter or buffer, in the dict of a module that has it, and what its DTensor is."""

    own: dict[str, Any]
    name: str
    placements: list[Placement]
    shape: torch.Size
    stride: tuple[int, ...]

    @staticmethod
    def of(own: dict[str, Any], name: str, whole: Tensor, dims: Dims) -> _PlacedTensor:
        """That of a tensor that is ``whole``."""
        stride = torch.empty(whole.shape, device="meta").stride()
        return _PlacedTensor(own, name, _torch_placements(dims), whole.shape, stride)


def _own_part(parameter: nn.Parameter, layout: Dims, dims: ParallelDims) -> tuple[int, int, int]:
    """The dim along which a parameter is sharded, and this rank's first element and number of elements, as DTensor has them."""
    dim = layout.index(AXIS)
    whole = parameter.shape[dim]
    size = -(-whole // dims.plan.mesh.tp)
    begin = min(dims.rank_along(AXIS) * size, whole)
    return dim, begin, min(size, whole - begin)


def _part(parameter: nn.Parameter, dim: int, begin: int, length: int) -> nn.Parameter:
    part = parameter.detach().narrow(dim, begin, length).clone(memory_format=torch.contiguous_format)
    return nn.Parameter(part, requires_grad=parameter.requires_grad)


def check_placements(model: nn.Module, plan: Plan, blocks: Sequence[nn.Module]) -> None:
    """Raises PlanError with all problems of the placements over ``tp`` in ``model``, whose repeated blocks are ``blocks``."""
    placed, _ = resolve_placements(model, plan)
    paths = {module: path for path, module in model.named_modules()}
    in_blocks = [paths[block] for block in blocks]
    experts = [path for path, _ in expert_layers(model)]
    problems: list[Problem] = []
    for path in placed:
        if plan.mesh.pp > 1 and not any(_is_in(path, block) for block in in_blocks):
            problems.append(
                Problem(
                    given=f"placements in {path or 'the model'!r} with pp {plan.mesh.pp}",
                    rule="a stage has some of the blocks, and parts of a module outside of them on other stages are left out",
                    consequence="a stage would place what it does not have",
                    nearest="placements in modules of a block, or pp=1",
                )
            )
        met = [expert for expert in experts if _is_in(expert, path) or _is_in(path, expert)]
        if plan.mesh.ep > 1 and met:
            problems.append(
                Problem(
                    given=f"placements in {path or 'the model'!r}, which has the experts {met[0]}, with ep {plan.mesh.ep}",
                    rule="tokens are sent to experts as plain tensors, and inside of a module with placements all are DTensors",
                    consequence="the experts would get what they cannot send",
                    nearest="placements in other modules, or ep=1",
                )
            )
    raise_problems(problems)


def check_placed_reads(model: nn.Module, plan: Plan, inputs: Mapping[str, Tensor]) -> None:
    """Raises PlanError where a placed parameter is read outside of the module that is placed: a rank would take its part for the
    whole. ``inputs`` are those of any micro-batch."""
    try:
        traced = trace(model, inputs)
    except Exception as error:  # whatever the user's code raises
        raise PlanError(
            given=f"placements for {type(model).__name__}, whose forward pass fails without values: "
            f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
            rule="where placed parameters are read is found by a pass with shapes alone",
            consequence="a part of a parameter could be taken for the whole",
            nearest="tensor_parallel.rules in place of placements, or plan.dp_shard",
        ) from error
    names, called = names_of(model), {call.module for call in traced.calls}
    problems: list[Problem] = []
    for path, placements in resolve_placements(model, plan)[0].items():
        module = model.get_submodule(path)
        chosen = {
            alias for parameter in match_parameters(names_of(module), placements)[0] for alias in names[parameter]
        }
        readers = [op for op in traced.ops if not chosen.isdisjoint(op.parameters) and not _is_in(op.module, path)]
        if readers or (path and path not in called):
            where = f"reads it in {readers[0].module or 'its own forward pass'}" if readers else "never calls it"
            problems.append(
                Problem(
                    given=f"placements in {path or 'the model'!r}: the model {where}",
                    rule="a placed parameter is a DTensor in the forward pass of the module that is placed, and elsewhere the "
                    "part of a rank",
                    consequence="the part would be taken for the whole",
                    nearest="placements in the module around what reads it",
                )
            )
        if plan.mesh.cp > 1 and any(
            op.name == "scaled_dot_product_attention" and _is_in(op.module, path) for op in traced.ops
        ):
            problems.append(
                Problem(
                    given=f"placements in {path or 'the model'!r}, which computes attention, with cp {plan.mesh.cp}",
                    rule="attention over shared sequences runs on plain tensors, and inside of a module with placements all are "
                    "DTensors",
                    consequence="the ranks could not exchange their keys and values",
                    nearest="placements in modules without attention, or cp=1",
                )
            )
    raise_problems(problems)


def resolve_placements(
    model: nn.Module, plan: Plan
) -> tuple[dict[str, dict[str, Dims]], dict[str, rules.ParameterPlacement]]:
    """The placements over ``tp`` of parameters (dims by pattern), and those of inputs and outputs, by module.

    Raises PlanError with all problems of the placements of ``plan``.
    """
    modules = dict(model.named_modules())
    placed: dict[str, dict[str, Dims]] = {}
    redistributed: dict[str, rules.ParameterPlacement] = {}
    problems: list[Problem] = []
    for placement in plan.tensor_parallel.dtensor_placements:
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
    problems += [
        problem for path, own in placed.items() for problem in match_parameters(names_of(modules[path]), own)[1]
    ]
    raise_problems(problems)
    return placed, redistributed


def raise_problems(problems: Sequence[Problem]) -> None:
    """Raise PlanError with ``problems``, if any; of those of repeated blocks with that of the first."""
    if problems:
        alike = {re.sub(r"\.\d+", ".*", problem.given): problem for problem in reversed(problems)}
        raise PlanError(*reversed(alike.values()))


def apply_placements(model: nn.Module, dims: ParallelDims, table: ShardTable) -> dict[str, Dims]:
    """Shard ``model`` in place by the placements of the plan, set those of inputs and outputs of modules, and record the shards
    in ``table``. Returns the placement of each parameter, by name."""
    modules = dict(model.named_modules())
    placed, redistributed = resolve_placements(model, dims.plan)
    found: dict[str, Dims] = {name: (None,) * parameter.dim() for name, parameter in model.named_parameters()}
    for path, placements in placed.items():

        def record(name: str, dim: int, begin: int, length: int, path: str = path) -> None:
            table.select(_joined(path, name), dim, [(begin, length)])

        own = _shard(modules[path], placements, dims, record)
        found |= {_joined(path, name): layout for name, layout in own.items()}
    for path, placement in redistributed.items():
        pinned = shard_function(modules[path].forward, inputs=placement.inputs, outputs=placement.outputs)
        wrap_forward(modules[path], partial(_call, pinned))
    return found


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}".lstrip(".")


def _call(pinned: Callable[..., Any], _forward: Any, *args: Any, **kwargs: Any) -> Any:
    return pinned(*args, **kwargs)


def _overlapping(model: nn.Module, placed: Collection[str]) -> Iterator[Problem]:
    """Problems of modules with placements inside each other, or that share a parameter with other modules."""
    holders = names_of(model)
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


def names_of(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Names of each parameter."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def _within(name: str, path: str) -> bool:
    return not path or name.startswith(path + ".")


def _is_in(path: str, outer: str) -> bool:
    return path == outer or _within(path, outer)


def shard_function(
    function: Callable[..., Any], *, inputs: Sequence[Dims | None] = (), outputs: Dims | None = None
) -> Callable[..., Any]:
    """``function`` with its positional inputs and its outputs redistributed to these placements; None changes nothing.

    It is used inside a model that ``shard_module`` has sharded. Raises PlanError, in a call, for a value that is no DTensor or
    has another number of dims.
    """
    for number, dims in enumerate([*inputs, outputs]):
        problem = None if dims is None else axes_problem(f"value {number} of {_name(function)}", dims, (AXIS,))
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


def match_parameters(
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
        problem = axes_problem(repr(pattern), dims)
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


def _compute_with_dtensors(model: nn.Module, tensors: Sequence[_PlacedTensor], mesh: DeviceMesh) -> None:
    """Let ``model`` compute with DTensors of its parameters, buffers and inputs, and return plain tensors."""

    def replicated(x: Tensor) -> Tensor:
        return DTensor.from_local(x, mesh, [Replicate()], run_check=False)

    def with_dtensors(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map_only(Tensor, replicated, (args, kwargs))
        try:
            with _as_dtensors(tensors, mesh):
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


@contextmanager
def _as_dtensors(tensors: Sequence[_PlacedTensor], mesh: DeviceMesh) -> Generator[None]:
    """Inside, ``tensors`` are DTensors whose gradients go to the plain ones; a partial sum of a gradient is completed."""
    plain = [each.own[each.name] for each in tensors]
    converted: dict[int, DTensor] = {}  # what is tied stays one tensor
    try:
        for each, tensor in zip(tensors, plain, strict=True):
            if id(tensor) not in converted:
                converted[id(tensor)] = DTensor.from_local(
                    tensor, mesh, each.placements, run_check=False, shape=each.shape, stride=each.stride
                )
            each.own[each.name] = converted[id(tensor)]
        yield
    finally:
        for each, tensor in zip(tensors, plain, strict=True):
            each.own[each.name] = tensor


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", function))
