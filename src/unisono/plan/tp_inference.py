"""Infers tensor-parallel rules from the trace of a model, for models that no built-in set of rules matches.

Every linear layer is assumed to be column-wise (Shoeybi et al. 2019, Megatron-LM): its output is sharded by features, and the
sharding is propagated through the trace (``sharding_propagation``). If ranks can compute their parts alone up to one linear
layer that consumes the sharded features, that layer is row-wise, and all layers whose outputs met on the way form one group.
Otherwise the layer is replicated, and the reason is recorded. ``tp_trial`` turns a group into a rule and tries it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from unisono.errors import PlanError
from unisono.plan.rules import BUILT_IN_RULES, ColwiseRowwise, EmbeddingRule, OutputRule, Rule, match_modules
from unisono.plan.sharding_propagation import FUSED, CannotPropagate, NeedsFusedSplit, ValueSharding, propagate
from unisono.plan.tp_trial import LayerGroup, build_rule, common_parent
from unisono.plan.trace import Trace, TracedOp, trace


@dataclass(frozen=True, kw_only=True, slots=True)
class InferredRules:
    """``rules`` for a strategy file; ``replicated``: by name pattern, why other layers with matrices have no rule."""

    rules: tuple[Rule, ...]
    replicated: Mapping[str, str]


def infer_rules(model: nn.Module, inputs: Mapping[str, Tensor]) -> InferredRules:
    """Infer the rules for ``model`` from its trace on ``inputs``, those of any micro-batch. The model does not change."""
    if all(tensor.dim() and len(tensor) == 1 for tensor in inputs.values()):
        # a batch dim of size 1 could not be told from a dim that reshaping adds
        inputs = {name: torch.cat([tensor, tensor]) for name, tensor in inputs.items()}
    seen = trace(model, inputs)
    modules = dict(model.named_modules())
    search = _Search(seen, modules)
    by_pattern: dict[str, list[ColwiseRowwise]] = {}
    results: dict[object, ColwiseRowwise | str] = {}
    for group in search.groups():
        key = tuple((name_pattern(name), tuple(sorted(group.parts.get(name, ())))) for name in group.layers)
        if key not in results:
            results[key] = _without_conflict(build_rule(group, model, inputs, seen), by_pattern)
        result = results[key]
        if isinstance(result, ColwiseRowwise):
            rule = replace(result, module=common_parent(group.layers))
            by_pattern.setdefault(name_pattern(result.module), []).append(rule)
        else:
            search.replicated.update({name_pattern(name): result for name in group.layers})
    rules: list[Rule] = [rule for members in by_pattern.values() for rule in _merge_rules(members, modules)]
    rules += _tables(seen, modules, search.replicated)
    return InferredRules(rules=tuple(rules), replicated=search.replicated)


def require_rules(inferred: InferredRules, model: str, tp: int) -> tuple[Rule, ...]:
    """The rules inferred for ``model``. Raises PlanError, with the reasons, if no ``ColwiseRowwise`` is among them."""
    if any(isinstance(rule, ColwiseRowwise) for rule in inferred.rules):
        return inferred.rules
    reasons = "; ".join(f"{name}: {why}" for name, why in inferred.replicated.items())
    raise PlanError(
        given=f"plan.tp={tp} for {model}",
        rule=f"layers are sharded by rules; the built-in ones ({', '.join(BUILT_IN_RULES)}) do not name its modules, and no pair "
        f"of layers was found in what it computes ({reasons or 'it has no linear layers'})",
        consequence="every rank would compute the same",
        nearest="tensor_parallel.rules in a strategy file, or plan.tp=1 with plan.dp_shard to shard the state",
    )


def name_pattern(name: str) -> str:
    """``name`` with ``*`` for each number: the pattern of the corresponding modules of all blocks."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _without_conflict(
    result: ColwiseRowwise | str, by_pattern: Mapping[str, list[ColwiseRowwise]]
) -> ColwiseRowwise | str:
    """``result``, or a reason if it would divide an attribute that another rule of the same module divides."""
    if isinstance(result, ColwiseRowwise):
        divided = {name for rule in by_pattern.get(name_pattern(result.module), ()) for name in rule.local_attrs}
        twice = divided.intersection(result.local_attrs)
        if twice:
            return f"{', '.join(sorted(twice))} is of another pair too"
    return result


def _merge_rules(members: list[ColwiseRowwise], modules: Mapping[str, nn.Module]) -> list[ColwiseRowwise]:
    """One rule with a pattern for all modules that are sharded alike, if the pattern matches no other module."""
    merged: dict[ColwiseRowwise, None] = {}
    for member in members:
        pattern = name_pattern(member.module)
        alike = {rule.module for rule in members if replace(rule, module="") == replace(member, module="")}
        merged[member if alike != set(match_modules(pattern, modules)) else replace(member, module=pattern)] = None
    return list(merged)


@dataclass(slots=True)
class _PassState:
    """State of a pass over the operations: sharded values, and groups of layers whose outputs met. Layers are named by path."""

    shardings: dict[int, ValueSharding] = field(default_factory=dict[int, ValueSharding])
    unknown: set[int] = field(default_factory=set[int])  # values behind an operation that could not be propagated
    replicated_because: dict[str, str] = field(default_factory=dict[str, str])  # layer -> why it is replicated
    maybe_fused: set[str] = field(default_factory=set[str])
    doubtful: set[str] = field(default_factory=set[str])
    undecided: set[str] = field(default_factory=set[str])  # layers whose outputs met an unknown value
    groups: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    fed: dict[str, int] = field(default_factory=dict[str, int])  # layer -> input value
    parts: dict[str, set[int]] = field(default_factory=dict[str, set[int]])  # layer -> sizes along the sharded dim
    rows: dict[str, set[str]] = field(default_factory=dict[str, set[str]])  # row-wise layer -> its group
    between: dict[str, set[str]] = field(
        default_factory=dict[str, set[str]]
    )  # layer -> replicated parameters on the way

    def group_of(self, origins: frozenset[str]) -> set[str]:
        """All layers that are in a group with one of ``origins``."""
        return set[str]().union(*(self.groups[name] for name in origins))

    def join(self, origins: frozenset[str]) -> None:
        """Put these layers into one group."""
        joint = self.group_of(origins)
        self.groups |= dict.fromkeys(joint, joint)

    def replicate(self, origins: frozenset[str], why: CannotPropagate) -> None:
        """Replicate these layers and all in a group with them."""
        joint = self.group_of(origins)
        self.replicated_because |= dict.fromkeys(joint, f"its result {why}")
        if isinstance(why, NeedsFusedSplit):
            self.maybe_fused |= joint


class _Search:
    """Passes over the operations until no layer is replicated: without such a layer, other groups may be possible."""

    def __init__(self, seen: Trace, modules: Mapping[str, nn.Module]) -> None:
        self._seen, self._modules = seen, modules
        self.replicated: dict[str, str] = {}  # by pattern
        self._layers = self._candidates()
        self._fused: set[str] = set()
        self._single: set[str] = set()

    def groups(self) -> list[LayerGroup]:
        """The groups, in the order of their row-wise layers."""
        while True:
            state = self._walk()
            if not state.replicated_because:
                break
            fused = {name_pattern(name) for name in state.maybe_fused if len(state.groups[name]) == 1} - self._fused
            single = {name_pattern(name) for name in state.doubtful & state.replicated_because.keys()} - self._single
            self._fused |= fused
            self._single |= single
            for name, why in state.replicated_because.items():
                if not {name_pattern(other) for other in state.groups[name]} & (fused | single):
                    self.replicated.setdefault(name_pattern(name), why)
        groups = [
            LayerGroup(
                columns=tuple(name for name in self._layers if name in state.groups[next(iter(origins))]),
                fused=frozenset(name for name in origins if name_pattern(name) in self._fused),
                row=row,
                fed=state.fed,
                parts=state.parts,
                sharded_dims={
                    value: sharding.dim for value, sharding in state.shardings.items() if sharding.origins & origins
                },
                between=frozenset().union(*(state.between.get(name, ()) for name in origins)),
            )
            for row, origins in state.rows.items()
        ]
        grouped = {name_pattern(name) for group in groups for name in group.layers}
        self.replicated = {pattern: why for pattern, why in self.replicated.items() if pattern not in grouped}
        return groups

    def _candidates(self) -> list[str]:
        """Linear layers that run once and share no parameter. Other modules with matrices go to ``replicated``."""
        holders: dict[nn.Parameter, int] = {}
        for module in self._modules.values():
            for parameter in module.parameters(recurse=False):
                holders[parameter] = holders.get(parameter, 0) + 1
        layers: list[str] = []
        for path, module in self._modules.items():
            matrices = [name for name, p in module.named_parameters(recurse=False) if p.dim() > 1]
            if not matrices or isinstance(module, nn.Embedding):
                continue
            own = [op for op in self._seen.ops if op.module == path and f"{path}.weight" in op.parameters]
            if type(module).forward is not nn.Linear.forward:
                if path:
                    self.replicated[name_pattern(path)] = f"there is no rule for {type(module).__name__}"
                else:
                    self.replicated |= {
                        name_pattern(name): "it is a parameter of the model itself" for name in matrices
                    }
            elif any(holders[p] > 1 for p in module.parameters(recurse=False)):
                self.replicated[name_pattern(path)] = "it shares its weight"
            elif f"{path}.weight" in self._seen.returned:
                self.replicated[name_pattern(path)] = "its weight is what the model returns"
            elif len(own) != 1 or own[0].name != "linear" or len(own[0].inputs) != 1:
                self.replicated[name_pattern(path)] = f"it runs {len(own)} times in a forward pass"
            else:
                layers.append(path)
        return layers

    def _walk(self) -> _PassState:
        state = _PassState()
        layers = {name for name in self._layers if name_pattern(name) not in self.replicated}
        for op in self._seen.ops:
            if not state.unknown.isdisjoint(op.inputs):
                state.unknown.update(op.outputs)
                state.undecided.update(
                    *(state.shardings[value].origins for value in op.inputs if value in state.shardings)
                )
            elif any(value in state.shardings for value in op.inputs):
                self._propagate(op, state)
            elif op.name == "linear" and op.module in layers:
                fused = FUSED if name_pattern(op.module) in self._fused else 1
                state.groups[op.module] = {op.module}
                state.fed[op.module] = op.inputs[0]
                single = name_pattern(op.module) in self._single
                self._record(op, [ValueSharding(len(op.shapes[0]) - 1, frozenset({op.module}), fused, single)], state)
        self._check_ends(state)
        return state

    def _propagate(self, op: TracedOp, state: _PassState) -> None:
        shardings = {value: state.shardings[value] for value in op.inputs if value in state.shardings}
        origins = frozenset[str]().union(*(sharding.origins for sharding in shardings.values()))
        state.join(origins)
        try:
            if op.name == "linear":
                self._end_group(op, shardings, state)
                return
            outputs = propagate(op, shardings)
        except CannotPropagate as why:
            state.replicate(origins, why)
            state.unknown.update(op.outputs)
            return
        for name in origins:
            state.between.setdefault(name, set()).update(op.parameters)
        self._record(op, outputs, state)

    def _end_group(self, op: TracedOp, shardings: Mapping[int, ValueSharding], state: _PassState) -> None:
        """A linear layer consumes the sharded features: it is row-wise, and its summed output is not sharded."""
        (first, sharding), *_ = shardings.items()
        shape = next(operand.shape for operand in op.operands() if operand.value == first)
        if op.module not in self._layers or len(op.inputs) > 1:
            raise CannotPropagate("goes into a matrix product that is no layer of its own")
        if sharding.dim != len(shape) - 1 or sharding.fused > 1:
            raise CannotPropagate(f"goes into {name_pattern(op.module)} sharded in another way than by its features")
        group = state.group_of(sharding.origins)
        ends = [row for row, columns in state.rows.items() if columns & group]
        if ends:
            raise CannotPropagate(
                f"goes into {name_pattern(op.module)} and {name_pattern(ends[0])}: a pair ends in one layer"
            )
        state.rows[op.module] = group

    def _record(self, op: TracedOp, outputs: list[ValueSharding | None], state: _PassState) -> None:
        for value, shape, sharding in zip(op.outputs, op.shapes, outputs, strict=True):
            if sharding is not None:
                state.shardings[value] = sharding
                for name in sharding.origins:
                    state.parts.setdefault(name, set()).add(shape[sharding.dim] // sharding.fused)
                if sharding.doubtful and len(sharding.origins) == 1:
                    state.doubtful |= sharding.origins

    def _check_ends(self, state: _PassState) -> None:
        """Replicate layers whose sharded output leaves the model, or is not consumed by exactly one row-wise layer."""
        for value in self._seen.outputs:
            if value in state.shardings:
                state.replicate(state.shardings[value].origins, CannotPropagate("is what the model returns"))
        state.rows = {row: state.groups[next(iter(origins))] for row, origins in state.rows.items()}
        ended = set[str]().union(*state.rows.values())
        for name in state.fed:
            if name not in ended | state.replicated_because.keys() and not state.groups[name] & state.undecided:
                state.replicate(frozenset({name}), CannotPropagate("ends in no linear layer"))
        for first, origins in state.rows.items():
            for second, others in state.rows.items():
                if first != second and origins is others and not origins & state.replicated_because.keys():
                    text = f"goes into {name_pattern(first)} and {name_pattern(second)}: a pair ends in one layer"
                    state.replicate(frozenset(origins), CannotPropagate(text))


def _tables(seen: Trace, modules: Mapping[str, nn.Module], replicated: dict[str, str]) -> list[Rule]:
    """Rules for the largest embedding that is indexed by the batch, and for the layer that computes logits over it."""
    uses: dict[str, list[TracedOp]] = {}
    for op in seen.ops:
        for name in op.parameters:
            uses.setdefault(name, []).append(op)
    heads: dict[str, str] = {}  # parameter -> the layer that computes the model's output with it
    for name, ops in uses.items():
        for op in ops:
            ends = op.name == "linear" and op.outputs[0] in seen.outputs and op.parameters[0] == name
            if ends and type(modules[op.module]).forward is nn.Linear.forward:
                heads[name] = op.module
    tables: dict[str, int] = {}  # path -> number of rows
    for path, module in modules.items():
        if not isinstance(module, nn.Embedding) or not path:
            continue
        weight = f"{path}.weight"
        reads = [op for op in uses.get(weight, []) if op.name == "embedding"]
        others = [op for op in uses.get(weight, []) if op.name != "embedding" and op.module != heads.get(weight)]
        if weight in seen.returned or others:
            replicated[name_pattern(path)] = "its table is used for more than looking up"
        elif module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
            replicated[name_pattern(path)] = "it has max_norm, sparse or scale_grad_by_freq"
        elif len(reads) == 1 and reads[0].inputs and reads[0].inputs[0] in seen.inputs:
            tables[path] = module.num_embeddings
        else:
            replicated[name_pattern(path)] = "what is looked up in it is no entry of the batch"
    if not tables:
        return []
    table = max(tables, key=lambda path: tables[path])
    replicated.update({name_pattern(path): "it is not the largest table" for path in tables if path != table})
    rules: list[Rule] = [EmbeddingRule(module=table)]
    for name, layer in heads.items():
        tied = name == f"{table}.weight"
        rows = getattr(modules[layer], "out_features", 0)
        if tied or (rows == tables[table] and len(uses[name]) == 1 and name_pattern(layer) in replicated):
            rules.append(OutputRule(module=layer))
            replicated.pop(name_pattern(layer), None)
    return rules
