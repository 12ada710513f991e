"""Rules of tensor parallelism read from what a model computes, for models that no built-in set of rules names.

Every linear layer is taken for the first of a pair (Shoeybi et al. 2019, Megatron-LM): its result is cut by output features, and
the trace (``plan.trace``) says where that goes. Where ranks can go on alone (``plan.flow``) up to one linear layer that takes
the cut features in, the two are a pair, with all layers whose results met on the way. Where they cannot, the layer stays
whole, and why is kept. How a pair is written down as a rule, and tried, is in ``plan.rehearse``.
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
    """``rules`` for a strategy file. ``left`` says of what has matrices, by pattern of names, why no rule cuts it."""

    rules: tuple[Rule, ...]
    left: Mapping[str, str]


def infer_rules(model: nn.Module, inputs: Mapping[str, Tensor]) -> InferredRules:
    """Rules for ``model``, seen on ``inputs``, those of any micro-batch. Nothing is computed or changed."""
    if all(tensor.dim() and len(tensor) == 1 for tensor in inputs.values()):
        inputs = {name: torch.cat([tensor, tensor]) for name, tensor in inputs.items()}  # dims of size 1 look like none
    seen = trace(model, inputs)
    modules = dict(model.named_modules())
    search = _Search(seen, modules)
    alike: dict[str, list[ColwiseRowwise]] = {}
    tried: dict[object, ColwiseRowwise | str] = {}
    for group in search.groups():
        key = tuple((name_pattern(name), tuple(sorted(group.parts.get(name, ())))) for name in group.layers)
        if key not in tried:
            tried[key] = _apart(build_rule(group, model, inputs, seen), alike)
        made = tried[key]
        if isinstance(made, ColwiseRowwise):
            alike.setdefault(name_pattern(made.module), []).append(replace(made, module=common_parent(group.layers)))
        else:
            search.left.update({name_pattern(name): made for name in group.layers})
    rules: list[Rule] = [rule for members in alike.values() for rule in _under_one_name(members, modules)]
    rules += _tables(seen, modules, search.left)
    return InferredRules(rules=tuple(rules), left=search.left)


def require_rules(found: InferredRules, model: str, tp: int) -> tuple[Rule, ...]:
    """The rules that were found for ``model``. Raises PlanError, with the reasons, where no pair is among them."""
    if any(isinstance(rule, ColwiseRowwise) for rule in found.rules):
        return found.rules
    reasons = "; ".join(f"{name}: {why}" for name, why in found.left.items())
    raise PlanError(
        given=f"plan.tp={tp} for {model}",
        rule=f"layers are cut by rules; the built-in ones ({', '.join(BUILT_IN_RULES)}) do not name its modules, and no pair of "
        f"layers was found in what it computes ({reasons or 'it has no linear layers'})",
        consequence="every rank would compute the same",
        nearest="plan.rules in a strategy file, or plan.tp=1 with plan.dp_shard to spread the state",
    )


def name_pattern(name: str) -> str:
    """``name`` with ``*`` for each number: the pattern of modules that are built alike."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _apart(made: ColwiseRowwise | str, alike: Mapping[str, list[ColwiseRowwise]]) -> ColwiseRowwise | str:
    """``made``, unless it would divide an attribute that another pair of the same module divides."""
    if isinstance(made, ColwiseRowwise):
        others = {name for pair in alike.get(name_pattern(made.module), ()) for name in pair.local_attrs}
        twice = others.intersection(made.local_attrs)
        if twice:
            return f"{', '.join(sorted(twice))} is of another pair too"
    return made


def _under_one_name(members: list[ColwiseRowwise], modules: Mapping[str, nn.Module]) -> list[ColwiseRowwise]:
    """One rule for modules that are cut alike, if their pattern names no others."""
    found: list[ColwiseRowwise] = []
    for pair in members:
        pattern = name_pattern(pair.module)
        same = {each.module for each in members if replace(each, module="") == replace(pair, module="")}
        rule = pair if same != set(match_modules(pattern, modules)) else replace(pair, module=pattern)
        if rule not in found:
            found.append(rule)
    return found


@dataclass(slots=True)
class _State:
    """One going through the operations: cut values, those nothing more is asked about, and how layers hang together."""

    cuts: dict[int, ValueSharding] = field(default_factory=dict[int, ValueSharding])
    given_up: set[int] = field(default_factory=set[int])
    lost: dict[str, str] = field(default_factory=dict[str, str])
    side_by_side: set[str] = field(default_factory=set[str])
    doubtful: set[str] = field(default_factory=set[str])
    undecided: set[str] = field(default_factory=set[str])  # they met what was given up
    together: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    fed: dict[str, int] = field(default_factory=dict[str, int])
    parts: dict[str, set[int]] = field(default_factory=dict[str, set[int]])  # by layer, sizes along the cut dim
    rows: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    between: dict[str, set[str]] = field(default_factory=dict[str, set[str]])

    def meet(self, origins: frozenset[str]) -> None:
        """These layers belong to one pair."""
        joint = set[str]().union(*(self.together[name] for name in origins))
        for name in joint:
            self.together[name] = joint

    def lose(self, origins: frozenset[str], why: CannotPropagate) -> None:
        """All that hang together with these layers stay whole."""
        for name in set[str]().union(*(self.together[name] for name in origins)):
            if isinstance(why, NeedsFusedSplit):
                self.side_by_side.add(name)
            self.lost[name] = f"its result {why}"


class _Search:
    """Goes through the operations until nothing more is lost: without a layer that was lost, others may be found."""

    def __init__(self, seen: Trace, modules: Mapping[str, nn.Module]) -> None:
        self._seen, self._modules = seen, modules
        self.left: dict[str, str] = {}  # by pattern
        self._layers = self._candidates()
        self._fused: set[str] = set()
        self._single: set[str] = set()

    def groups(self) -> list[LayerGroup]:
        """The pairs, in the order in which they end."""
        while True:
            state = self._walk()
            if not state.lost:
                break
            fused = {name_pattern(name) for name in state.side_by_side if len(state.together[name]) == 1} - self._fused
            single = {name_pattern(name) for name in state.doubtful & state.lost.keys()} - self._single
            self._fused |= fused
            self._single |= single
            for name, why in state.lost.items():
                if not {name_pattern(other) for other in state.together[name]} & (fused | single):
                    self.left.setdefault(name_pattern(name), why)
        found = [
            LayerGroup(
                columns=tuple(name for name in self._layers if name in state.together[next(iter(origins))]),
                fused=frozenset(name for name in origins if name_pattern(name) in self._fused),
                row=row,
                fed=state.fed,
                parts=state.parts,
                cuts={value: cut.dim for value, cut in state.cuts.items() if cut.origins & origins},
                between=frozenset().union(*(state.between.get(name, ()) for name in origins)),
            )
            for row, origins in state.rows.items()
        ]
        taken = {name_pattern(name) for group in found for name in group.layers}
        self.left = {kind: why for kind, why in self.left.items() if kind not in taken}
        return found

    def _candidates(self) -> list[str]:
        """Linear layers that run once and share nothing. What else has matrices is left."""
        holders: dict[nn.Parameter, int] = {}
        for module in self._modules.values():
            for parameter in module.parameters(recurse=False):
                holders[parameter] = holders.get(parameter, 0) + 1
        found: list[str] = []
        for path, module in self._modules.items():
            wide = [name for name, p in module.named_parameters(recurse=False) if p.dim() > 1]
            if not wide or isinstance(module, nn.Embedding):
                continue
            own = [op for op in self._seen.ops if op.module == path and f"{path}.weight" in op.parameters]
            if type(module).forward is not nn.Linear.forward:
                kind = f"there is no rule for {type(module).__name__}"
                for name in wide if not path else [""]:
                    self.left[name_pattern(path or name)] = kind if path else "it is a parameter of the model itself"
            elif any(holders[p] > 1 for p in module.parameters(recurse=False)):
                self.left[name_pattern(path)] = "it shares its weight"
            elif f"{path}.weight" in self._seen.returned:
                self.left[name_pattern(path)] = "its weight is what the model returns"
            elif len(own) != 1 or own[0].name != "linear" or len(own[0].inputs) != 1:
                self.left[name_pattern(path)] = f"it runs {len(own)} times in a forward pass"
            else:
                found.append(path)
        return found

    def _walk(self) -> _State:
        state = _State()
        layers = {name for name in self._layers if name_pattern(name) not in self.left}
        for op in self._seen.ops:
            if not state.given_up.isdisjoint(op.inputs):
                state.given_up.update(op.outputs)
                state.undecided.update(*(state.cuts[value].origins for value in op.inputs if value in state.cuts))
            elif any(value in state.cuts for value in op.inputs):
                self._go_on(op, state)
            elif op.name == "linear" and op.module in layers:
                fused = FUSED if name_pattern(op.module) in self._fused else 1
                state.together[op.module] = {op.module}
                state.fed[op.module] = op.inputs[0]
                single = name_pattern(op.module) in self._single
                self._keep(op, [ValueSharding(len(op.shapes[0]) - 1, frozenset({op.module}), fused, single)], state)
        self._see_ends(state)
        return state

    def _go_on(self, op: TracedOp, state: _State) -> None:
        cuts = {value: state.cuts[value] for value in op.inputs if value in state.cuts}
        origins = frozenset[str]().union(*(cut.origins for cut in cuts.values()))
        state.meet(origins)
        try:
            if op.name == "linear":
                self._end(op, cuts, state)
                return
            made = propagate(op, cuts)
            own = [name for name in op.parameters]
        except CannotPropagate as why:
            state.lose(origins, why)
            state.given_up.update(op.outputs)
            return
        for name in origins:
            state.between.setdefault(name, set()).update(own)
        self._keep(op, made, state)

    def _end(self, op: TracedOp, cuts: Mapping[int, ValueSharding], state: _State) -> None:
        """A linear layer takes the cut features in: its result is a sum over ranks, and whole."""
        (first, cut), *_ = cuts.items()
        shape = next(each.shape for each in op.operands() if each.value == first)
        if op.module not in self._layers or len(op.inputs) > 1:
            raise CannotPropagate("goes into a matrix product that is no layer of its own")
        if cut.dim != len(shape) - 1 or cut.fused > 1:
            raise CannotPropagate(f"goes into {name_pattern(op.module)} cut in another way than by its features")
        ends = {row for row, origins in state.rows.items() if origins & state.together[next(iter(cut.origins))]}
        if ends:
            raise CannotPropagate(
                f"goes into {name_pattern(op.module)} and {name_pattern(next(iter(ends)))}: a pair ends in one layer"
            )
        state.rows[op.module] = state.together[next(iter(cut.origins))]

    def _keep(self, op: TracedOp, made: list[ValueSharding | None], state: _State) -> None:
        for value, shape, cut in zip(op.outputs, op.shapes, made, strict=True):
            if cut is not None:
                state.cuts[value] = cut
                for name in cut.origins:
                    state.parts.setdefault(name, set()).add(shape[cut.dim] // cut.fused)
                if cut.doubtful and len(cut.origins) == 1:
                    state.doubtful |= cut.origins

    def _see_ends(self, state: _State) -> None:
        """Values that leave the model must be whole, and every pair has its last layer."""
        for value in self._seen.outputs:
            if value in state.cuts:
                state.lose(state.cuts[value].origins, CannotPropagate("is what the model returns"))
        state.rows = {row: state.together[next(iter(origins))] for row, origins in state.rows.items()}
        ended = set[str]().union(*state.rows.values())
        for name in state.fed:
            if name not in ended | state.lost.keys() and not state.together[name] & state.undecided:
                state.lose(frozenset({name}), CannotPropagate("ends in no linear layer"))
        for first, origins in state.rows.items():
            for second, others in state.rows.items():
                if first != second and origins is others and not origins & state.lost.keys():
                    text = f"goes into {name_pattern(first)} and {name_pattern(second)}: a pair ends in one layer"
                    state.lose(frozenset(origins), CannotPropagate(text))


def _tables(seen: Trace, modules: Mapping[str, nn.Module], left: dict[str, str]) -> list[Rule]:
    """The largest table that entries of the batch are looked up in, and the layer that makes logits over it."""
    uses: dict[str, list[TracedOp]] = {}
    for op in seen.ops:
        for name in op.parameters:
            uses.setdefault(name, []).append(op)
    heads: dict[str, str] = {}  # by parameter, the layer whose result with it is what the model returns
    for name, ops in uses.items():
        for op in ops:
            ends = op.name == "linear" and op.outputs[0] in seen.outputs and op.parameters[0] == name
            if ends and type(modules[op.module]).forward is nn.Linear.forward:
                heads[name] = op.module
    found: dict[str, int] = {}
    for path, module in modules.items():
        if not isinstance(module, nn.Embedding) or not path:
            continue
        weight = f"{path}.weight"
        reads = [op for op in uses.get(weight, []) if op.name == "embedding"]
        others = [op for op in uses.get(weight, []) if op.name != "embedding" and op.module != heads.get(weight)]
        if weight in seen.returned or others:
            left[name_pattern(path)] = "its table is used for more than looking up"
        elif module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
            left[name_pattern(path)] = "it has max_norm, sparse or scale_grad_by_freq"
        elif len(reads) == 1 and reads[0].inputs and reads[0].inputs[0] in seen.inputs:
            found[path] = module.num_embeddings
        else:
            left[name_pattern(path)] = "what is looked up in it is no entry of the batch"
    if not found:
        return []
    table = max(found, key=lambda path: found[path])
    left.update({name_pattern(path): "it is not the largest table" for path in found if path != table})
    rules: list[Rule] = [EmbeddingRule(module=table)]
    for name, layer in heads.items():
        tied = name == f"{table}.weight"
        rows = getattr(modules[layer], "out_features", 0)
        if tied or (rows == found[table] and len(uses[name]) == 1 and name_pattern(layer) in left):
            rules.append(OutputRule(module=layer))
            left.pop(name_pattern(layer), None)
    return rules
