"""Where a model can be cut into pipeline stages, found by watching it run once (``plan.trace``), not by rules of names.

Between two stages only one tensor travels, the hidden state: a block's first argument, which is the first output of the
block before it. What else depends on parameters may not get from one stage to another, and a model where it does is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from unisono.errors import PlanError, Problem
from unisono.plan.pipeline_split import balance_stages
from unisono.plan.trace import Trace, TracedCall, trace


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelinePartition:
    """Where a model is cut: the names of its blocks, how many each stage has, and the stages that use each parameter."""

    blocks: tuple[str, ...]
    layers_per_stage: tuple[int, ...]
    stages_of_parameter: Mapping[str, tuple[int, ...]]
    num_block_outputs: int  # of the tuple that a block returns, the hidden state first; 0 where it returns that alone

    @property
    def shared_parameters(self) -> dict[str, tuple[int, ...]]:
        """Parameters of several stages, whose gradients are parts of a sum over these."""
        return {name: stages for name, stages in self.stages_of_parameter.items() if len(stages) > 1}

    def blocks_of_stage(self, stage: int) -> range:
        """The numbers of the blocks of a stage."""
        start = sum(self.layers_per_stage[:stage])
        return range(start, start + self.layers_per_stage[stage])


def partition_model(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    inputs: Mapping[str, Tensor],
    pieces: int,
    layers_per_stage: tuple[int, ...] = (),
    block_costs: Sequence[float] = (),
) -> PipelinePartition:
    """How to cut ``model`` into ``pieces`` stages; ``inputs`` are those of any micro-batch; nothing is computed or changed.

    Empty ``layers_per_stage`` are balanced by ``block_costs`` (what comes before the blocks, each block, what follows them);
    without those, by the multiplications counted there.

    Raises PlanError with everything about the model that keeps it from being cut.
    """
    names = {id(module): name for name, module in model.named_modules()}
    paths = tuple(names[id(block)] for block in blocks)
    if not paths:
        raise PlanError(
            given=f"plan.pp for {type(model).__name__}, which has no repeated blocks",
            rule="a pipeline cuts a model between the members of a ModuleList or Sequential of like modules",
            consequence="there is no place to cut",
            nearest="plan.pp=1 with plan.dp_shard to spread the state",
        )
    if layers_per_stage and (sum(layers_per_stage) != len(paths) or len(layers_per_stage) != pieces):
        raise PlanError(
            given=f"layers_per_stage {list(layers_per_stage)} for {type(model).__name__} with {len(paths)} blocks "
            f"in {pieces} stages",
            rule="layers_per_stage has the number of blocks of each stage",
            consequence=f"{sum(layers_per_stage)} blocks would be on a stage",
            nearest="numbers that add up, or none (stages are balanced by cost)",
        )
    if block_costs and len(block_costs) != len(paths) + 2:
        raise PlanError(
            given=f"{len(block_costs)} block_costs for {type(model).__name__} with {len(paths)} blocks",
            rule="one cost for what comes before the blocks, one for each block, one for what follows them",
            consequence="it would be unclear what each of them is the cost of",
            nearest=f"{len(paths) + 2} numbers, or none (they are counted)",
        )
    seen = trace(model, inputs)
    calls = {path: [call for call in seen.calls if call.module == path] for path in paths}
    _raise(_not_in_a_row(paths, calls))
    ordered = [calls[path][0] for path in paths]
    users = _users(seen, ordered)
    _raise(_ways_around(seen, ordered) + _shared_from_inside(model, paths, users))
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    before, *inside, behind = block_costs or _counted(seen, ordered, model)
    layers_per_stage = layers_per_stage or balance_stages(inside, before, behind, pieces)
    of_block = [stage for stage, count in enumerate(layers_per_stage) for _ in range(count)]
    places = [0, *of_block, pieces - 1]
    homes: dict[str, tuple[int, ...]] = {}
    for name in sizes:
        inside = [number for number, path in enumerate(paths, 1) if name.startswith(f"{path}.")]
        homes[name] = tuple(sorted({places[place] for place in (inside or users.get(name) or [0])}))
    return PipelinePartition(
        blocks=paths,
        layers_per_stage=layers_per_stage,
        stages_of_parameter=homes,
        num_block_outputs=len(ordered[0].outputs) * ordered[0].returns_tuple,
    )


def _raise(problems: Sequence[Problem]) -> None:
    if problems:
        raise PlanError(*problems)


def _bounds(seen: Trace, ordered: Sequence[TracedCall]) -> list[tuple[int, int]]:
    """The operations before the blocks, in each, and behind them. Those between two blocks are in none."""
    return [(0, ordered[0].first), *((call.first, call.end) for call in ordered), (ordered[-1].end, len(seen.ops))]


def _counted(seen: Trace, ordered: Sequence[TracedCall], model: nn.Module) -> list[int]:
    """What is before the blocks, each block, and what is behind them weigh: the numbers of their matrices."""
    used = [_multiplied(seen, *bounds, model) for bounds in _bounds(seen, ordered)]
    used[-1] |= {name for name in seen.returned if model.get_parameter(name).dim() > 1}
    return [sum(model.get_parameter(name).numel() for name in names) for names in used]


def _multiplied(seen: Trace, first: int, end: int, model: nn.Module) -> set[str]:
    """Parameters that go into matrix products or convolutions: the more numbers, the longer it takes. Look-ups cost nothing."""
    used = {name for op in seen.ops[first:end] if op.name != "embedding" for name in op.parameters}
    return {name for name in used if model.get_parameter(name).dim() > 1}


def _users(seen: Trace, ordered: Sequence[TracedCall]) -> dict[str, list[int]]:
    """By parameter, the places that read it: 0 before the blocks, then each block from 1, then behind them."""
    users: dict[str, list[int]] = {}
    bounds = _bounds(seen, ordered)
    for place, (first, end) in enumerate(bounds):
        for name in {name for op in seen.ops[first:end] for name in op.parameters}:
            users.setdefault(name, []).append(place)
    for name in seen.returned:
        if len(bounds) - 1 not in (places := users.setdefault(name, [])):
            places.append(len(bounds) - 1)
    return users


def _not_in_a_row(paths: tuple[str, ...], calls: Mapping[str, list[TracedCall]]) -> list[Problem]:
    """Blocks that do not hand one hidden state to the next."""
    problems: list[Problem] = []
    before: tuple[int, ...] | None = None
    end = 0
    for path in paths:
        given = ""
        if len(calls[path]) != 1 or calls[path][0].first < end:
            given = f"{path} runs {len(calls[path])} times, or out of order"
        else:
            (call,) = calls[path]
            end = call.end
            hidden = call.arguments[0][1] if call.arguments else ()
            if len(hidden) != 1 or not call.outputs or len(call.outputs[0]) != 1:
                given = f"{path} does not take and return one tensor first"
            elif any(call.outputs[1:]):
                given = f"{path} returns more tensors than the hidden state"
            elif before is not None and hidden != before:
                given = f"{path} is not called with what the block before it returned"
            before = call.outputs[0] if call.outputs else None
        if given:
            problems.append(
                Problem(
                    given=f"plan.pp for a model whose {given}",
                    rule="stages pass on one tensor: a block's first argument is the first output of the block before it",
                    consequence="what the next stage needs would be missing",
                    nearest="plan.pp=1, or a forward that hands one hidden state from block to block",
                )
            )
    return problems


def _ways_around(seen: Trace, ordered: Sequence[TracedCall]) -> list[Problem]:
    """Values that depend on parameters and come to a block, or behind the blocks, by another way than the hidden state."""
    weighed = seen.parameter_dependent()
    bounds = _bounds(seen, ordered)
    place = {number: index for index, (first, end) in enumerate(bounds) for number in range(first, end)}
    origin: dict[int, int] = {}  # value: place of the operation that made it; -1 between two blocks
    for number, op in enumerate(seen.ops):
        for value in op.outputs:
            origin.setdefault(value, place.get(number, -1))
    violations: dict[str, None] = {}
    for call in ordered:
        for name, values in call.arguments[1:]:
            if not weighed.isdisjoint(values):
                violations[f"{call.module} is given {_argument(name)}, which depends on parameters outside it"] = None
    incoming = [(), *(call.arguments[0][1] for call in ordered), ordered[-1].outputs[0]]
    for index in range(1, len(bounds)):
        allowed = {
            *incoming[index],
            *(value for call in ordered[index - 1 : index] for _, v in call.arguments for value in v),
        }
        uses = [(op.module, op.inputs) for op in seen.ops[slice(*bounds[index])]]
        if index == len(bounds) - 1:
            uses.append(("", seen.outputs))
            allowed = set(incoming[index])
        for module, values in uses:
            if any(value in weighed and origin[value] != index and value not in allowed for value in values):
                violations[
                    f"{module or 'the model itself'} uses what another block, or what is before the blocks, computed"
                ] = None
    return [
        Problem(
            given=f"plan.pp for a model where {violation}",
            rule="between stages only the hidden state travels; the rest is made from the inputs on every stage",
            consequence="it would be computed from zeros, and get no gradient",
            nearest="plan.pp=1, or hand it on inside the hidden state",
        )
        for violation in violations
    ]


def _argument(name: str) -> str:
    return f"argument {name}" if name.isdigit() else f"{name!r}"


def _shared_from_inside(model: nn.Module, paths: tuple[str, ...], users: Mapping[str, list[int]]) -> list[Problem]:
    problems: list[Problem] = []
    for name, _ in model.named_parameters():
        owner = next((place for place, path in enumerate(paths, 1) if name.startswith(f"{path}.")), 0)
        if owner and set(users.get(name, [owner])) != {owner}:
            problems.append(
                Problem(
                    given=f"plan.pp for a model whose {name} is used outside its block too",
                    rule="a block's parameters go where the block goes",
                    consequence="another stage would have it under another name",
                    nearest="plan.pp=1, or keep the parameter in a module outside the blocks",
                )
            )
    return problems
