"""Placements that name ``dp_shard`` or ``ep``: the dim along which a parameter is split over ranks that share states or experts.

FSDP2 shards each parameter along one dim, by default the first. ``["tp", "dp_shard"]`` of a placement pins the second. What a
module computes stays as it is: parameters are gathered before. ``ep`` always splits stacks of experts along dim 0; a placement
may say so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import nn

from unisono.errors import PlanError, Problem, nearest_name
from unisono.parallel.expert import expert_parameters
from unisono.parallel.sharding import ShardTable
from unisono.parallel.tensor.dtensor_placements import Dims, match_parameters, names_of, raise_problems
from unisono.plan.plan import Plan
from unisono.plan.rules import match_modules

STATES = "dp_shard"
EXPERTS = "ep"


def resolve_pinned_dims(model: nn.Module, plan: Plan) -> dict[str, Dims]:
    """The placements of ``plan`` that name ``dp_shard`` or ``ep``, by first name of the parameter, in the order of ``model``.

    Raises PlanError with all problems of them.
    """
    modules, names = dict(model.named_modules()), names_of(model)
    pinned: dict[str, Dims] = {}
    problems: list[Problem] = []
    others: list[tuple[nn.Parameter, Dims]] = []
    for placement in plan.tensor_parallel.placements:
        names_states = placement in plan.tensor_parallel.state_placements
        paths = match_modules(placement.module, modules)
        if not paths and placement not in plan.tensor_parallel.dtensor_placements:
            problems.append(
                Problem(
                    given=f"a placement in {placement.module!r}",
                    rule="it names modules of the model, by pattern",
                    consequence="it would act on nothing",
                    nearest=nearest_name(placement.module, modules),
                )
            )
        for path in paths if placement.parameter else []:
            chosen, wrong = match_parameters(names_of(modules[path]), {placement.parameter: placement.dims})
            if not names_states:
                others += chosen.items()
                continue
            problems += wrong
            for parameter, dims in chosen.items():
                name = names[parameter][0]
                if pinned.setdefault(name, dims) != dims:
                    problems.append(_two_placements(name, pinned[name], dims))
    for parameter, dims in others:
        name = names[parameter][0]
        if name in pinned and pinned[name] != dims:
            problems.append(_two_placements(name, pinned[name], dims))
    problems += _impossible(model, plan, pinned)
    raise_problems(problems)
    return {name: pinned[name] for name, _ in model.named_parameters() if name in pinned}


def _two_placements(name: str, one: Dims, other: Dims) -> Problem:
    return Problem(
        given=f"{name} placed as {one} and as {other}",
        rule="a parameter has one placement, which names all axes along which it is split",
        consequence="it is unclear which counts",
        nearest=f"{_together(one, other)}, or patterns that do not overlap",
    )


def _together(one: Dims, other: Dims) -> str:
    """Both placements in one, where they do not contradict each other."""
    if len(one) != len(other) or any(a and b and a != b for a, b in zip(one, other, strict=True)):
        return "one of them"
    return str(tuple(a or b for a, b in zip(one, other, strict=True)))


def _impossible(model: nn.Module, plan: Plan, pinned: dict[str, Dims]) -> Iterator[Problem]:
    stacks = expert_parameters(model)
    for name, parameter in model.named_parameters():
        dims = pinned.get(name, ())
        given = f"{name} of shape {list(parameter.shape)} placed as {dims}"
        if EXPERTS in dims and (name not in stacks or dims.index(EXPERTS) > 0):
            first = f"{(EXPERTS, *(dim if dim != EXPERTS else None for dim in dims[1:]))}"
            yield Problem(
                given=given,
                rule="ep gives each rank some of the experts of models.moe.Experts, which are dim 0 of their stacks",
                consequence="a rank would have parts of experts, and tokens are sent to whole ones"
                if name in stacks
                else "the parameter has no experts",
                nearest=first if name in stacks else "no 'ep' in this placement",
            )
        if STATES in dims:
            yield from _impossible_states(plan, name, parameter, given, dims.index(STATES), is_expert=name in stacks)


def _impossible_states(
    plan: Plan, name: str, parameter: nn.Parameter, given: str, dim: int, *, is_expert: bool
) -> Iterator[Problem]:
    ranks = plan.shard_degree_of(name, parameter.numel(), expert=is_expert)
    if ranks == 1:
        yield Problem(
            given=given,
            rule="FSDP2 leaves this parameter whole: it is in fsdp.ignored_modules, below fsdp.shard_threshold_numel, or an "
            "expert that one rank has",
            consequence="the placement would change nothing",
            nearest=f"no {STATES!r} in this placement",
        )
    elif dim and parameter.shape[dim] % ranks:
        even = [0, *(other for other, size in enumerate(parameter.shape) if other and size % ranks == 0)]
        size = math.gcd(parameter.shape[dim], ranks)
        yield Problem(
            given=f"{given}, over {ranks} ranks that share states",
            rule=f"FSDP2 splits a dim other than the first into equal parts, and {ranks} does not divide "
            f"{parameter.shape[dim]}",
            consequence="ranks would hold parts of different sizes",
            nearest=f"{STATES!r} on dim {' or '.join(map(str, even))}"
            + (f", or {size} ranks that share states" if size > 1 else ""),
        )


def pin_dims(table: ShardTable, pinned: dict[str, Dims]) -> None:
    """Record in ``table`` along which dim FSDP2 splits each parameter of ``pinned``."""
    table.shard_dims.update({name: dims.index(STATES) for name, dims in pinned.items() if STATES in dims})


def check_pinned_dims(table: ShardTable) -> None:
    """Raises PlanError if tensor parallelism has split a parameter along the dim that is pinned, but for the first.

    Its parts may be uneven or of several matrices, of which FSDP2 could not take equal parts.
    """
    problems = [
        Problem(
            given=f"{name} of shape {list(table.spec.parameters[name].shape)} with {STATES!r} on dim {dim}",
            rule=f"tp splits it along dim {dim}, and a dim other than the first is split over one axis",
            consequence="ranks could hold parts of different sizes",
            nearest=f"{STATES!r} on another dim",
        )
        for name, dim in table.shard_dims.items()
        if dim and name in table.tensor_parallel and table.tensor_parallel[name].dim == dim
    ]
    if problems:
        raise PlanError(*problems)
