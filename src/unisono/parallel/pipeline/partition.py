"""Splits a model into pipeline stages between its blocks, from a trace of one forward pass (``plan.trace``).

Stages pass on one tensor, the hidden state: a block's first argument, which is the first output of the block before it. A model
in which any other value that depends on parameters reaches another stage is rejected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from unisono.errors import PlanError, Problem
from unisono.plan.pipeline_schedule import balance_stages
from unisono.plan.trace import Trace, TracedCall, trace


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelinePartition:
    """Names of a model's blocks, the number of blocks of each stage, and the stages that use each parameter."""

    blocks: tuple[str, ...]
    layers_per_stage: tuple[int, ...]
    stages_of_parameter: Mapping[str, tuple[int, ...]]
    num_block_outputs: int  # length of the tuple that a block returns; 0 if it returns the hidden state alone

    @property
    def shared_parameters(self) -> dict[str, tuple[int, ...]]:
        """Parameters that several stages use, with these stages; their gradients must be summed over them."""
        return {name: stages for name, stages in self.stages_of_parameter.items() if len(stages) > 1}

    def blocks_of_stage(self, stage: int) -> range:
        """The numbers of the blocks of a stage."""
        start = sum(self.layers_per_stage[:stage])
        return range(start, start + self.layers_per_stage[stage])


def partition_model(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    inputs: Mapping[str, Tensor],
    num_stages: int,
    layers_per_stage: tuple[int, ...] = (),
    block_costs: Sequence[float] = (),
) -> PipelinePartition:
    """Choose how to split ``model`` into stages. The model does not change.

    Args:
        inputs: Those of any micro-batch, for the trace.
        num_stages: Number of stages.
        layers_per_stage: Number of blocks of each stage; empty balances the stages by cost.
        block_costs: Costs of what comes before the blocks, of each block, and of what follows them; empty counts the elements of
            the matrices that are multiplied there.

    Raises:
        PlanError: With all properties of the model that prevent the split.
    """
    names = {id(module): name for name, module in model.named_modules()}
    paths = tuple(names[id(block)] for block in blocks)
    _check_numbers(type(model).__name__, len(paths), num_stages, layers_per_stage, block_costs)
    seen = trace(model, inputs)
    calls = {path: [call for call in seen.calls if call.module == path] for path in paths}
    problems = _chain_problems(paths, calls)
    if problems:
        raise PlanError(*problems)
    ordered = [calls[path][0] for path in paths]
    users = _users(seen, ordered)
    problems = _bypass_problems(seen, ordered) + _shared_block_parameters(model, paths, users)
    if problems:
        raise PlanError(*problems)
    before, *inside, after = block_costs or _matrix_sizes(seen, ordered, model)
    layers_per_stage = layers_per_stage or balance_stages(inside, before, after, num_stages)
    stages = [0, *(stage for stage, count in enumerate(layers_per_stage) for _ in range(count)), num_stages - 1]
    stages_of_parameter: dict[str, tuple[int, ...]] = {}
    for name, _ in model.named_parameters():
        owner = [number for number, path in enumerate(paths, 1) if name.startswith(f"{path}.")]
        stages_of_parameter[name] = tuple(sorted({stages[section] for section in (owner or users.get(name) or [0])}))
    return PipelinePartition(
        blocks=paths,
        layers_per_stage=layers_per_stage,
        stages_of_parameter=stages_of_parameter,
        num_block_outputs=len(ordered[0].outputs) * ordered[0].returns_tuple,
    )


def _check_numbers(
    model: str, num_blocks: int, num_stages: int, layers_per_stage: tuple[int, ...], block_costs: Sequence[float]
) -> None:
    if not num_blocks:
        raise PlanError(
            given=f"plan.pp for {model}, which has no repeated blocks",
            rule="a pipeline cuts a model between the members of a ModuleList or Sequential of like modules",
            consequence="there is no place to cut",
            nearest="plan.pp=1 with plan.dp_shard to shard the state",
        )
    if layers_per_stage and (sum(layers_per_stage) != num_blocks or len(layers_per_stage) != num_stages):
        raise PlanError(
            given=f"layers_per_stage {list(layers_per_stage)} for {model} with {num_blocks} blocks in {num_stages} stages",
            rule="layers_per_stage has the number of blocks of each stage",
            consequence=f"{sum(layers_per_stage)} blocks would be on a stage",
            nearest="numbers that add up, or none (stages are balanced by cost)",
        )
    if block_costs and len(block_costs) != num_blocks + 2:
        raise PlanError(
            given=f"{len(block_costs)} block_costs for {model} with {num_blocks} blocks",
            rule="one cost for what comes before the blocks, one for each block, one for what follows them",
            consequence="it would be unclear what each of them is the cost of",
            nearest=f"{num_blocks + 2} numbers, or none (they are counted)",
        )


def _sections(seen: Trace, ordered: Sequence[TracedCall]) -> list[tuple[int, int]]:
    """Ranges of operations: before the blocks, in each block, and after them. Those between two blocks are in no section."""
    return [(0, ordered[0].first), *((call.first, call.end) for call in ordered), (ordered[-1].end, len(seen.ops))]


def _matrix_sizes(seen: Trace, ordered: Sequence[TracedCall], model: nn.Module) -> list[int]:
    """Number of elements of the matrices that each section multiplies or convolves with; look-ups cost nothing."""
    sections = [seen.ops[first:end] for first, end in _sections(seen, ordered)]
    used = [{name for op in ops if op.name != "embedding" for name in op.parameters} for ops in sections]
    used[-1].update(seen.returned)
    parameters = [[model.get_parameter(name) for name in names] for names in used]
    return [sum(parameter.numel() for parameter in section if parameter.dim() > 1) for section in parameters]


def _users(seen: Trace, ordered: Sequence[TracedCall]) -> dict[str, list[int]]:
    """The sections that read each parameter."""
    users: dict[str, list[int]] = {}
    sections = _sections(seen, ordered)
    for section, (first, end) in enumerate(sections):
        for name in {name for op in seen.ops[first:end] for name in op.parameters}:
            users.setdefault(name, []).append(section)
    for name in seen.returned:
        if len(sections) - 1 not in users.setdefault(name, []):
            users[name].append(len(sections) - 1)
    return users


def _chain_problems(paths: tuple[str, ...], calls: Mapping[str, list[TracedCall]]) -> list[Problem]:
    """Problems of blocks that do not pass one hidden state to the next block."""
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


def _bypass_problems(seen: Trace, ordered: Sequence[TracedCall]) -> list[Problem]:
    """Problems of values, other than the hidden state, that depend on parameters and are used in another section."""
    dependent = seen.parameter_dependent()
    sections = _sections(seen, ordered)
    section_of = {number: index for index, bounds in enumerate(sections) for number in range(*bounds)}
    origin: dict[int, int] = {}  # value -> section of the operation that computed it; -1 between two blocks
    for number, op in enumerate(seen.ops):
        for value in op.outputs:
            origin.setdefault(value, section_of.get(number, -1))
    violations: dict[str, None] = {}
    for call in ordered:
        for name, values in call.arguments[1:]:
            if not dependent.isdisjoint(values):
                argument = f"argument {name}" if name.isdigit() else f"{name!r}"
                violations[f"{call.module} is given {argument}, which depends on parameters outside it"] = None
    allowed = [{value for _, values in call.arguments for value in values} for call in ordered]
    allowed.append(set(ordered[-1].outputs[0]))
    for index in range(1, len(sections)):
        uses = [(op.module, op.inputs) for op in seen.ops[slice(*sections[index])]]
        if index == len(sections) - 1:
            uses.append(("", seen.outputs))
        for module, values in uses:
            if any(v in dependent and origin[v] != index and v not in allowed[index - 1] for v in values):
                violations[
                    f"{module or 'the model itself'} uses what another block, or what is before the blocks, computed"
                ] = None
    return [
        Problem(
            given=f"plan.pp for a model where {violation}",
            rule="stages pass on only the hidden state; each stage computes all else from the inputs",
            consequence="it would be computed from zeros, and get no gradient",
            nearest="plan.pp=1, or hand it on inside the hidden state",
        )
        for violation in violations
    ]


def _shared_block_parameters(model: nn.Module, paths: tuple[str, ...], users: Mapping[str, list[int]]) -> list[Problem]:
    problems: list[Problem] = []
    for name, _ in model.named_parameters():
        owner = next((place for place, path in enumerate(paths, 1) if name.startswith(f"{path}.")), 0)
        if owner and set(users.get(name, [owner])) != {owner}:
            problems.append(
                Problem(
                    given=f"plan.pp for a model whose {name} is used outside its block too",
                    rule="a block's parameters are on the block's stage",
                    consequence="another stage would have it under another name",
                    nearest="plan.pp=1, or keep the parameter in a module outside the blocks",
                )
            )
    return problems
