"""Resolves tensor-parallel rules on a model, and validates that its layers can be sharded as they say."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter

from torch import Tensor, nn

from unisono.errors import PlanError, Problem, nearest_name
from unisono.models import moe
from unisono.plan.plan import Plan
from unisono.plan.rules import (
    BUILT_IN_RULES,
    ColwiseRowwise,
    EmbeddingRule,
    ExpertRule,
    OutputRule,
    Rule,
    SequenceRule,
    built_in_rules,
    match_modules,
    module_patterns,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleMatch:
    """A module that a rule matches."""

    rule: Rule
    path: str
    module: nn.Module


def resolve_rules(model: nn.Module, plan: Plan) -> list[RuleMatch]:
    """The modules of ``model`` that the rules of ``plan`` match, or the built-in ones if the plan has none.

    Raises PlanError with all problems of the rules and layers.
    """
    modules = {path: module for path, module in model.named_modules() if path}
    rules = plan.tensor_parallel.rules or built_in_rules(modules)
    if not rules:
        raise PlanError(
            given=f"plan.tp={plan.mesh.tp} for {type(model).__name__}",
            rule=f"layers are sharded by rules, and the built-in ones ({', '.join(BUILT_IN_RULES)}) do not name its modules",
            consequence="every rank would compute the same",
            nearest="tensor_parallel.rules in a strategy file, or plan.tp=1 with plan.dp_shard to shard the state",
        )
    problems = list(_unmatched(rules, modules))
    if not problems:
        matches = [
            RuleMatch(rule=rule, path=path, module=modules[path])
            for rule in rules
            for pattern in module_patterns(rule)
            for path in match_modules(pattern, modules)
        ]
        problems = list(_wrong_layers(matches, model, modules)) or [*_sizes(matches, plan.mesh.tp), *_widths(matches)]
        problems += _partly_recomputed(matches, plan, modules)
        if plan.tensor_parallel.sequence_parallel and not any(isinstance(rule, SequenceRule) for rule in rules):
            problems.append(
                Problem(
                    given=f"sequence_parallel for {type(model).__name__}",
                    rule="a rule says between which modules activations may be sharded along the sequence",
                    consequence="it would change nothing",
                    nearest='{"rule": "sequence", "modules": […]} among tensor_parallel.rules, or sequence_parallel=False',
                )
            )
        if not problems:
            return matches
    raise PlanError(*problems)


def _partly_recomputed(matches: list[RuleMatch], plan: Plan, modules: Mapping[str, nn.Module]) -> Iterator[Problem]:
    """A recomputed module contains all layers of a pair, one or none: between them a rank draws from its own stream (``rng``)."""
    named = [name for pattern in plan.recompute.modules for name in match_modules(pattern, modules)]
    for match in matches:
        pair_layers = match.rule.layers if isinstance(match.rule, ColwiseRowwise) else ()
        layers = [f"{match.path}.{layer}" for layer in pair_layers]
        for name in named:
            inside = [layer for layer in layers if layer.startswith(f"{name}.")]
            if inside and len(inside) < len(layers):
                (other, *_) = (layer for layer in layers if layer not in inside)
                yield Problem(
                    given=f"recompute.modules for {name} with plan.tp={plan.mesh.tp}, which holds {inside[0]} and not {other}",
                    rule="between the layers of a pair each rank draws numbers of its own; a recomputed module holds all of "
                    "them, or is one of them, or holds none",
                    consequence="dropout would draw other numbers in the backward pass",
                    nearest=f"{match.path}, or modules between those layers",
                )
                return  # the other blocks have the same problem


def attribute_value(match: RuleMatch, name: str) -> int:
    """The value of an attribute of the module, by its dotted name."""
    return int(attrgetter(name)(match.module))


def weight_dims(layer: nn.Module) -> tuple[int, int]:
    """The dims of output and of input features in a layer's weight; those of GPT-2's ``Conv1D`` are swapped."""
    return (0, 1) if isinstance(layer, nn.Linear) else (1, 0)


def _unmatched(rules: tuple[Rule, ...], modules: Mapping[str, nn.Module]) -> Iterator[Problem]:
    """Problems of rules that match no module, or whose layers or attributes a module lacks."""
    kinds = {re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path) for path in modules}
    for rule in rules:
        for pattern in module_patterns(rule):
            paths = match_modules(pattern, modules)
            if not paths:
                yield Problem(
                    given=f"a rule for {pattern!r}",
                    rule="a rule names modules of the model",
                    consequence="it would change nothing",
                    nearest=nearest_name(pattern, kinds),
                )
            if isinstance(rule, ColwiseRowwise):
                yield from _incomplete(rule)
                for path in paths:
                    missing = [layer for layer in rule.layers if f"{path}.{layer}" not in modules]
                    absent = [name for name in _attributes(rule) if not _has_int(modules[path], name)]
                    if missing or absent:
                        inside = [other.removeprefix(path + ".") for other in modules if other.startswith(path + ".")]
                        yield Problem(
                            given=f"a rule for {pattern!r} with {', '.join(missing + absent)}",
                            rule=f"the layers and attributes it names are in each of those modules, as in {path}",
                            consequence="there is nothing to shard there",
                            nearest=nearest_name(missing[0], inside) if missing else "the attribute that counts heads",
                        )
                        break


def _incomplete(pair: ColwiseRowwise) -> Iterator[Problem]:
    if len(pair.layers) == 1:
        yield Problem(
            given=f"a pair for {pair.module!r} with row {pair.rowwise!r} alone",
            rule="the rowwise layer of a pair consumes the outputs of its colwise layers",
            consequence="it would get unsharded inputs with a sharded weight",
            nearest='those layers as "colwise", "kv_colwise" or "fused_colwise"',
        )
    if pair.kv_group_size_attr and not (pair.num_heads_attr and pair.num_kv_heads_attr):
        yield Problem(
            given=f"a pair for {pair.module!r} with kv_group_size_attr {pair.kv_group_size_attr!r}",
            rule="it is set to the number of heads per key/value head",
            consequence="it would be unclear what it is set to",
            nearest='"num_heads_attr" and "num_kv_heads_attr" as well, or no "kv_group_size_attr"',
        )


def _attributes(rule: ColwiseRowwise) -> list[str]:
    return [*rule.local_attrs, *filter(None, [rule.kv_group_size_attr])]


def _has_int(module: nn.Module, path: str) -> bool:
    try:
        return isinstance(attrgetter(path)(module), int)
    except AttributeError:
        return False


def _wrong_layers(matches: list[RuleMatch], model: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[Problem]:
    """Problems of layers that cannot be sharded, match two rules, or share a weight with a layer that is sharded differently."""
    claims: dict[str, tuple[Rule, str]] = {}
    for match in matches:
        for path, cut in _claimed(match):
            if path in claims:
                yield Problem(
                    given=f"{path}, which is named by {_describe(claims[path][0])} and by {_describe(match.rule)}",
                    rule="a layer is sharded in one way",
                    consequence="it would be unclear which of the two counts",
                    nearest="leave one of them out",
                )
            elif not _fits(modules[path], cut):
                yield Problem(
                    given=f"{path}, a {type(modules[path]).__name__}, as {cut}",
                    rule="experts are models.moe.Experts"
                    if cut == "experts"
                    else "pairs and outputs are linear layers; embeddings are nn.Embedding without max_norm, sparse "
                    "and scale_grad_by_freq",
                    consequence="it cannot be sharded",
                    nearest="leave it out: what no rule names stays whole",
                )
            claims[path] = match.rule, cut
    cut_of = {path: cut for path, (_, cut) in claims.items()}
    holders: dict[nn.Parameter, list[str]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if name == "weight":
                holders.setdefault(parameter, []).append(path)
    for paths in holders.values():
        if len({cut_of.get(path, "whole") for path in paths}) > 1:
            yield Problem(
                given=f"{' and '.join(paths)}, which share a weight",
                rule="both uses of a parameter are sharded alike",
                consequence="one of them would compute with a part",
                nearest="a rule for each (embedding, output), or for none",
            )


def _claimed(rule_match: RuleMatch) -> Iterator[tuple[str, str]]:
    match rule_match.rule:
        case ColwiseRowwise() as pair:
            for layer in pair.layers:
                yield f"{rule_match.path}.{layer}", "row" if layer == pair.rowwise else "column"
        case ExpertRule():
            yield rule_match.path, "experts"
        case EmbeddingRule() | OutputRule():
            yield rule_match.path, "vocabulary"
        case SequenceRule():
            pass


def _fits(layer: nn.Module, cut: str) -> bool:
    if cut == "experts":
        return isinstance(layer, moe.Experts)
    if cut == "vocabulary" and isinstance(layer, nn.Embedding):
        return layer.max_norm is None and not layer.sparse and not layer.scale_grad_by_freq
    # GPT-2's layers of transformers, linear with the weight turned round, know their width as nf
    return isinstance(layer, nn.Linear) or (cut != "vocabulary" and hasattr(layer, "nf"))


def _describe(rule: Rule) -> str:
    return f"the {rule.__struct_config__.tag} rule for {', '.join(map(repr, module_patterns(rule)))}"


def _sizes(matches: list[RuleMatch], count: int) -> Iterator[Problem]:
    reported: set[tuple[str, ...]] = set()
    for match in matches:
        for name, size, shared in _counts(match):
            legal = [n for n in range(1, count + 1) if size % n == 0 or (shared and n % size == 0)]
            if count not in legal and (key := (*module_patterns(match.rule), name)) not in reported:
                reported.add(key)
                yield Problem(
                    given=f"plan.tp={count} for {match.path}, whose {name} is {size}",
                    rule="each rank has equally many heads and hidden units"
                    + (", or ranks share whole key/value heads" if shared else ""),
                    consequence="the layer cannot be sharded",
                    nearest=f"plan.tp={max(legal)}",
                )


def _widths(matches: list[RuleMatch]) -> Iterator[Problem]:
    """Without heads, the output features of the column-wise layers must equal the input features of the row-wise layer."""
    reported: set[tuple[ColwiseRowwise, str]] = set()
    for match in matches:
        pair = match.rule
        if not isinstance(pair, ColwiseRowwise) or pair.num_heads_attr:
            continue
        into = _width(match, pair.rowwise, 1)
        for name in (*pair.colwise, *pair.kv_colwise, *pair.fused_colwise):
            width, due = _width(match, name, 0), into * 3 if name in pair.fused_colwise else into
            if width != due and (pair, name) not in reported:
                reported.add((pair, name))
                yield Problem(
                    given=f"{match.path}.{name}, of {width} output features, before {pair.rowwise}, of {into} input features",
                    rule="without num_heads_attr, colwise layers have as many outputs as the rowwise layer has inputs "
                    "(fused ones three times)",
                    consequence="a rank would compute with features that do not belong together",
                    nearest="num_heads_attr, the attribute that counts heads; a gate and its values as two layers",
                )


def _width(match: RuleMatch, name: str, which: int) -> int:
    layer = match.module.get_submodule(name)
    weight: Tensor = layer.weight  # pyright: ignore[reportAssignmentType]
    return weight.shape[weight_dims(layer)[which]]


def _counts(match: RuleMatch) -> Iterator[tuple[str, int, bool]]:
    """Sizes that must be divisible by ``tp``: (name, size, whether several ranks may hold the same part)."""
    if isinstance(match.module, moe.Experts):
        yield "number of hidden units of an expert", match.module.gate.shape[1], False
    if not isinstance(match.rule, ColwiseRowwise):
        return
    pair = match.rule
    if pair.num_heads_attr:
        yield pair.num_heads_attr, attribute_value(match, pair.num_heads_attr), False
    if pair.num_kv_heads_attr:
        yield pair.num_kv_heads_attr, attribute_value(match, pair.num_kv_heads_attr), True
    yield f"width of {pair.rowwise}", _width(match, pair.rowwise, 1), False
