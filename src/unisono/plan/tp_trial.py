"""Turns a group of layers into a tensor-parallel rule, by trial.

A rule also names the attributes with the numbers of heads and sizes that a forward pass reads. Candidates are the integer
attributes of the module, and of its configuration, whose value is a size in the trace. Each candidate is tried: the model runs
on fake tensors with the weights and sizes of one of several ranks, and each value must have the shape of that rank's part. Names
of attributes only decide between attributes of equal value.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import gcd
from operator import attrgetter
from typing import Any, cast

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from unisono.plan.rules import ColwiseRowwise, Rule, local_sizes, match_modules
from unisono.plan.trace import Trace, TracedOp, trace

_MOST_TRIES = 64
# errors that a forward pass raises for sizes that do not fit
_MISFITS = (RuntimeError, ValueError, TypeError, IndexError, ZeroDivisionError, AssertionError)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerGroup:
    """Column-wise layers and the row-wise layer ``row`` that consumes their outputs.

    ``fused`` are columns of three matrices side by side; ``fed`` has the input value of each layer, ``parts`` the sizes of its
    output along the sharded dim, ``sharded_dims`` that of each value. ``between`` are replicated parameters on the way.
    """

    columns: tuple[str, ...]
    fused: frozenset[str]
    row: str
    fed: Mapping[str, int]
    parts: Mapping[str, set[int]]
    sharded_dims: Mapping[int, int]
    between: frozenset[str]

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of all layers, the row-wise one last."""
        return (*self.columns, self.row)


def build_rule(group: LayerGroup, model: nn.Module, inputs: Mapping[str, Tensor], seen: Trace) -> ColwiseRowwise | str:
    """The rule that shards ``group``, or the reason why there is none."""
    path = common_parent(group.layers)
    if not path:
        return "no module encloses the layers of its pair"
    input_module = _find_input_module(group, path, model, seen)
    if input_module is None:
        return f"no module holds its layers and {', '.join(sorted(group.between))} alone"
    module = model.get_submodule(path)
    units = {name: min(group.parts[name]) for name in group.columns}
    heads = max((size for name, size in units.items() if size < _width(model, name, group)), default=0)
    shared = {units[name] for name in group.columns if heads and units[name] < heads}
    if len(shared) > 1 or any(heads % size or group.fused for size in shared):
        return f"its heads ({', '.join(map(str, sorted({heads, *shared})))}) do not fit together"
    if heads and any(units[name] % heads for name in group.columns if units[name] > heads):
        return f"its result is split unevenly: {heads} heads do not divide it"

    def relative(names: Any) -> tuple[str, ...]:
        return tuple(name[len(path) + 1 :] for name in group.columns if name in names)

    fewer = {name for name in group.columns if heads and units[name] < heads}
    plain = ColwiseRowwise(
        module=path,
        colwise=relative(set(group.columns) - fewer - group.fused),
        kv_colwise=relative(fewer),
        fused_colwise=relative(group.fused),
        rowwise=group.row[len(path) + 1 :],
        input_module=input_module,
    )
    few = shared.pop() if shared else 0
    widths = [_width(model, name, group) for name in group.columns]
    counts = _counts([heads, few] if heads else widths, few)
    if not counts:
        return f"its {'width' if not heads else 'only head' if heads == 1 else f'{heads} heads'} cannot be sharded"
    sizes = {size for name in group.columns for size in group.parts[name]} | {w * 3 for w in widths if group.fused}
    tries = itertools.islice(_with_attributes(plain, module, heads, few, sizes), _MOST_TRIES)
    if heads and not _attributes_of_value(module, heads):
        return f"no attribute of {type(module).__name__} holds its number of heads, {heads}"
    for pair in tries:
        if all(_works(pair, count, few, group, model, inputs, seen) for count in counts):
            return pair
    return f"its forward pass has sizes that no attribute of {type(module).__name__} holds"


def pairs_with_extra_parameters(rules: Iterable[Rule], model: nn.Module) -> list[tuple[ColwiseRowwise, nn.Module]]:
    """Pairs among ``rules``, and the modules they match, whose input module has parameters that belong to none of the layers."""
    modules = dict(model.named_modules())

    def has_extra(pair: ColwiseRowwise, module: nn.Module) -> bool:
        layers = {id(p) for name in pair.layers for p in module.get_submodule(name).parameters()}
        inputs = () if pair.input_module == "*" else module.get_submodule(pair.input_module).parameters()
        return any(id(parameter) not in layers for parameter in inputs)

    return [
        (rule, modules[path])
        for rule in rules
        if isinstance(rule, ColwiseRowwise)
        for path in match_modules(rule.module, modules)
        if has_extra(rule, modules[path])
    ]


def runs_with_shards(rules: Iterable[Rule], count: int, model: nn.Module, inputs: Mapping[str, Tensor]) -> bool:
    """Whether ``model`` runs with the shards that one of ``count`` ranks has of such pairs.

    Parameters between the layers are replicated: a norm of single heads (Qwen3) fits a part of the heads, one over all heads
    together (OLMo 2) does not.
    """
    with ExitStack() as parts:
        for pair, module in pairs_with_extra_parameters(rules, model):
            few = attrgetter(pair.num_kv_heads_attr)(module) if pair.num_kv_heads_attr else 0
            parts.enter_context(_as_one_of(count, few, pair, module))
        try:
            trace(model, inputs)
        except _MISFITS:
            return False
    return True


def common_parent(names: tuple[str, ...]) -> str:
    """The innermost module that contains all modules of these names."""
    common: list[str] = []
    for parts in zip(*(name.split(".")[:-1] for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


def _width(model: nn.Module, name: str, group: LayerGroup) -> int:
    layer = cast(nn.Linear, model.get_submodule(name))
    return layer.out_features // (3 if name in group.fused else 1)


def _find_input_module(group: LayerGroup, path: str, model: nn.Module, seen: Trace) -> str | None:
    """The outermost module in ``path`` whose first argument only the columns read, else "*"; None if neither is possible."""
    fed = {group.fed[name] for name in group.columns}
    for call in sorted(seen.calls, key=lambda call: len(call.module)):
        inside = call.module == path or call.module.startswith(path + ".")
        first, *others = call.arguments or (("", ()),)
        if not inside or len(fed) > 1 or set(first[1]) != fed or any(fed & set(values) for _, values in others):
            continue
        readers = {op.module for op in seen.ops[call.first : call.end] if fed & set(op.inputs)}
        own = {f"{call.module}.{name}" for name, _ in model.get_submodule(call.module).named_parameters()}
        plain = frozenset(name for name in own if name.rpartition(".")[0] not in group.layers)
        if readers == set(group.columns) and plain == group.between:
            return call.module[len(path) + 1 :]
    if group.between:
        return None
    return group.columns[0][len(path) + 1 :] if len(group.columns) == 1 else "*"


def _counts(sizes: list[int], few: int) -> list[int]:
    """Numbers of ranks to try: the smallest that divides all sizes, and with key/value heads the number of query heads."""
    common = gcd(*(size for size in sizes if size))
    smallest = next((n for n in range(2, common + 1) if common % n == 0), 0)
    return [n for n in (smallest, sizes[0] if few else 0) if n > 1]


def _attributes_of_value(module: nn.Module, value: int) -> list[str]:
    """Names of the attributes of the module, its submodules and its configuration that equal ``value``."""
    owners = [*module.named_modules(), *([("config", config)] if (config := getattr(module, "config", None)) else [])]
    return [
        f"{path}.{name}" if path else name
        for path, owner in owners
        for name, held in vars(owner).items()
        if type(held) is int and held == value
    ]


def _likely(names: list[str], *signs: str, against: str = "^$") -> list[str]:
    """The three names that match most of ``signs``; those of a configuration come after those of modules."""

    def rank(name: str) -> tuple[Any, ...]:
        doubt = bool(re.search(against, name))
        return (doubt, *(not re.search(sign, name) for sign in signs), name.startswith("config."))

    return sorted(names, key=rank)[:3]


def _with_attributes(
    plain: ColwiseRowwise, module: nn.Module, heads: int, few: int, sizes: set[int]
) -> Iterator[ColwiseRowwise]:
    """``plain`` with combinations of candidate attributes, fewest size attributes first."""
    head_attrs = _likely(_attributes_of_value(module, heads), "head", against="kv|key") if heads else [""]
    kv_attrs = _likely(_attributes_of_value(module, few), "head", "kv|key") if few else [""]
    group_attrs = [""]
    if few:
        names = [name for name in _attributes_of_value(module, heads // few) if _is_own_size(name)]
        group_attrs = sorted(["", *names], key=lambda name: 1 if not name else 0 if re.search("group|rep", name) else 2)
    numbers = [name for size in sorted(sizes) for name in _attributes_of_value(module, size) if _is_own_size(name)]
    for length in range(min(3, len(numbers)) + 1):
        for attrs in itertools.product(head_attrs, kv_attrs, group_attrs[:3]):
            named = [name for name in attrs if name]
            if len(set(named)) < len(named):
                continue
            heads_attr, kv_attr, group_attr = attrs
            free = [name for name in dict.fromkeys(numbers) if name not in attrs]
            for size_attrs in itertools.combinations(free, length):
                yield replace(
                    plain,
                    num_heads_attr=heads_attr,
                    num_kv_heads_attr=kv_attr,
                    kv_group_size_attr=group_attr,
                    size_attrs=size_attrs,
                )


def _is_own_size(name: str) -> bool:
    """Whether a rank may have its own value: a configuration is shared by all modules, a layer's sizes follow from its weight."""
    return not name.startswith("config.") and name.rpartition(".")[2] not in ("in_features", "out_features")


def _works(
    pair: ColwiseRowwise,
    count: int,
    few: int,
    group: LayerGroup,
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    seen: Trace,
) -> bool:
    """Whether the model computes the same on a rank's part, judged by shapes and by constant factors."""
    with _as_one_of(count, few, pair, model.get_submodule(pair.module)):
        try:
            again = trace(model, inputs)
        except _MISFITS:
            return False
    if _constants(seen, pair.module) != _constants(again, pair.module):  # a scale must not depend on a rank's sizes
        return False
    if few and few % count:  # the model may no longer take its branch for fewer key/value heads than query heads
        rows = [[op.shapes for op in run.ops if op.module == group.row] for run in (seen, again)]
        return rows[0] == rows[1] and not any(map(_has_uneven_heads, again.ops))
    return len(seen.ops) == len(again.ops) and all(
        there.name == here.name and here.shapes == tuple(_shapes(there, group, count))
        for there, here in zip(seen.ops, again.ops, strict=True)
    )


def _shapes(op: TracedOp, group: LayerGroup, count: int) -> Iterator[tuple[int, ...]]:
    """Shapes of one of ``count`` ranks' parts of the outputs of ``op``."""
    for value, shape in zip(op.outputs, op.shapes, strict=True):
        at = group.sharded_dims.get(value)
        yield shape if at is None else (*shape[:at], shape[at] // count, *shape[at + 1 :])


def _has_uneven_heads(op: TracedOp) -> bool:
    """Whether ``op`` is attention without key heads, or with numbers of heads that fit by broadcasting only."""
    if op.name != "scaled_dot_product_attention":
        return False
    query, key, *_ = (operand.shape[-3] for operand in op.operands())
    return not key or query % key > 0 or (query != key and not op.keywords.get("enable_gqa"))


def _constants(seen: Trace, path: str) -> set[float]:
    """Float arguments of the operations in the module ``path``."""
    leaves = [
        leaf
        for op in seen.ops
        if op.module == path or op.module.startswith(path + ".")
        for leaf in (*op.arguments, *op.keywords.values())
    ]
    return {leaf for leaf in leaves if isinstance(leaf, float)}


@contextmanager
def _as_one_of(count: int, few: int, pair: ColwiseRowwise, module: nn.Module) -> Generator[None]:
    """Inside, the module has the weights (without values) and sizes of one of ``count`` ranks."""
    undo: list[tuple[Any, str, Any]] = []

    def change(owner: Any, name: str, value: Any) -> None:
        undo.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def narrow(layer: Any, name: str, dim: int, parts: int) -> None:
        full: Tensor | None = getattr(layer, name)
        if full is not None:
            shape = [size // parts if at == dim else size for at, size in enumerate(full.shape)]
            empty = torch.zeros((), dtype=full.dtype, device=full.device).expand(shape)
            change(layer, name, nn.Parameter(empty, requires_grad=full.requires_grad))

    try:
        for name in (*pair.colwise, *pair.fused_colwise, *pair.kv_colwise):
            layer: Any = module.get_submodule(name)
            parts = min(count, few) if name in pair.kv_colwise else count
            for own in ("weight", "bias"):
                narrow(layer, own, 0, parts)
            change(layer, "out_features", layer.out_features // parts)
        last: Any = module.get_submodule(pair.rowwise)
        narrow(last, "weight", 1, count)
        change(last, "in_features", last.in_features // count)
        for name, value in local_sizes(pair, module, count).items():
            path, _, attribute = name.rpartition(".")
            if path != "config":
                change(attrgetter(path)(module) if path else module, attribute, value)
        yield
    finally:
        for owner, name, value in reversed(undo):
            setattr(owner, name, value)
