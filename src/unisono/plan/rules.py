"""Rules of tensor parallelism as data: which layers of a model are sharded, and how. They are part of a strategy file.

    colwise_rowwise   layers sharded by output features, followed by one sharded by input features (Shoeybi et al. 2019)
    experts           stacks of experts, sharded by the hidden units of each expert
    embedding         an embedding table, sharded by vocabulary
    output            the matrix that computes logits, sharded by vocabulary
    sequence          modules between whose sharded layers activations are split along the sequence (Korthikanti et al. 2022)

Modules matched by no rule are replicated. Modules are named by pattern: ``*`` matches one part of a name, ``**`` any number.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Final, Literal

from msgspec import Struct

from unisono.errors import PlanError, Problem, nearest_name
from unisono.storage.limits import MAX_PATTERN


class ColwiseRowwise(
    Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    tag_field="rule",
    tag="colwise_rowwise",
):
    """``colwise`` layers of ``module`` are sharded by output features, the ``rowwise`` layer by input features.

    All names are relative to ``module``. Attributes of a configuration, which is no module, are read but not changed.

    Args:
        num_heads_attr: Attribute with the number of equal parts (heads) that the column-wise layers consist of.
        kv_colwise: Column-wise layers of key/value heads. With fewer heads than ranks, several ranks hold the same head.
        num_kv_heads_attr: Attribute with the number of key/value heads.
        fused_colwise: Column-wise layers of three matrices side by side.
        size_attrs: Attributes that count output features; each is divided by the number of ranks.
        kv_group_size_attr: Attribute that is set to the number of heads per key/value head.
        input_module: Submodule whose input the column-wise layers read; "" is ``module``. With "*" there is no such module, and
            each column-wise layer sums the gradient of its own input.
    """

    module: str
    colwise: tuple[str, ...] = ()
    rowwise: str
    num_heads_attr: str = ""
    kv_colwise: tuple[str, ...] = ()
    num_kv_heads_attr: str = ""
    fused_colwise: tuple[str, ...] = ()
    size_attrs: tuple[str, ...] = ()
    kv_group_size_attr: str = ""
    input_module: str = ""

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of all sharded layers, the row-wise one last."""
        return (*self.colwise, *self.kv_colwise, *self.fused_colwise, self.rowwise)

    @property
    def local_attrs(self) -> tuple[str, ...]:
        """Names of the attributes that are divided by the number of ranks."""
        return tuple(name for name in (self.num_heads_attr, self.num_kv_heads_attr, *self.size_attrs) if name)

    @property
    def input_modules(self) -> tuple[str, ...]:
        """Names of the submodules whose inputs the column-wise layers read."""
        return self.layers[:-1] if self.input_module == "*" else (self.input_module,)


class ExpertRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="rule", tag="experts"):
    """``module`` is a ``models.moe.Experts``: each rank holds some hidden units of every expert; the router is replicated."""

    module: str


class EmbeddingRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="rule", tag="embedding"):
    """``module`` is an ``nn.Embedding``: each rank looks up the tokens in its rows, and the results are summed."""

    module: str


class OutputRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="rule", tag="output"):
    """``module`` computes logits. They are gathered on every rank, unless the model returns ``models.LazyLogits``."""

    module: str


class SequenceRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="rule", tag="sequence"):
    """With ``plan.sequence_parallel`` the input of the first of ``modules`` is split along the sequence, and the output of the
    last is gathered."""

    modules: tuple[str, ...]


Rule = ColwiseRowwise | ExpertRule | EmbeddingRule | OutputRule | SequenceRule


Dims = tuple[str | None, ...]
PLACED_AXES: Final = ("tp", "dp_shard", "ep")  # along which parameters are split
# why they are not along the others, and what is meant perhaps
_WHOLE_ALONG: Final = {
    "pp": (
        "a stage has whole parameters, those of its blocks",
        "pipeline.layers_per_stage, which says where blocks are",
    ),
    "cp": (
        "ranks of cp compute parts of a sequence with the same parameters",
        "'dp_shard', which names all dp_shard x cp ranks that share states",
    ),
    "dp_replicate": ("replicas of the model have the same parameters", "'dp_shard', with plan.dp_shard above 1"),
}


class ParameterPlacement(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How parameters of ``module`` that match ``parameter`` are split over ranks.

    Those that name ``tp`` are sharded with DTensor, which decides how activations are sharded. Those of ``dp_shard`` are split
    along the named dim by FSDP2, in place of dim 0, and gathered before they are used. Those of ``ep`` are stacks of experts,
    which are split along dim 0.

    Without ``parameter``, the inputs and outputs of the module are redistributed instead. Such a module is inside a module whose
    parameters are placed over ``tp``.

    Args:
        module: Pattern; "" is the whole model.
        parameter: Pattern of parameter names inside ``module``.
        dims: For each dim "tp", "dp_shard" or "ep", each once at most, or null if it is not split.
        inputs: For each positional input its ``dims``, of "tp" and null, or null to leave it as it is.
        outputs: The ``dims`` of the output.
    """

    module: str = ""
    parameter: str = ""
    dims: Dims = ()
    inputs: tuple[Dims | None, ...] = ()
    outputs: Dims | None = None


def axes_problem(what: str, dims: Dims, axes: Sequence[str] = PLACED_AXES) -> Problem | None:
    """The problem of a placement of ``what`` that names others than ``axes``, or one of them twice."""
    named = [dim for dim in dims if dim is not None]
    wrong = next((dim for dim in named if dim not in axes), None)
    if wrong is None and len(set(named)) == len(named):
        return None
    given = f"the placement {dims} of {what}"
    if len(axes) == 1:
        (axis,) = axes
        return Problem(
            given=given,
            rule=f"a placement has {axis!r} for one dim at most and None for the others",
            consequence="there are no other ranks that compute the same samples and could share it",
            nearest=f"{axis!r}; placements of parameters in a strategy file have 'dp_shard' and 'ep' too",
        )
    listed = f"{', '.join(axes[:-1])} and {axes[-1]}"
    if wrong in _WHOLE_ALONG:
        reason, nearest = _WHOLE_ALONG[wrong]
        return Problem(
            given=given,
            rule=f"parameters are split along {listed}: {reason}",
            consequence="there is nothing to split along it",
            nearest=nearest,
        )
    return Problem(
        given=given,
        rule=f"a placement names {listed}, each for one dim at most, and None for the other dims",
        consequence="it is unclear along which ranks the parameter is split",
        nearest=nearest_name(wrong, axes) if wrong else "each axis once",
    )


class DtypeRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Dtypes of the modules that match ``module``, and of all modules inside them; the rule of an inner module takes precedence.
    A field that is "" changes nothing.

    Args:
        parameters: Dtype of the parameters. Norms stay in fp32 unless they match themselves. Gradients of bf16 parameters
            accumulate in fp32; the optimizer's moments are fp32 too.
        compute: Dtype of matrix products.
        gradients: Dtype in which ranks sum gradients.
    """

    module: str
    parameters: Literal["", "fp32", "bf16"] = ""
    compute: Literal["", "fp32", "bf16", "fp16"] = ""
    gradients: Literal["", "fp32", "bf16"] = ""


_GPT_ATTENTION = ColwiseRowwise(
    module="blocks.*.attention",
    colwise=("q",),
    kv_colwise=("k", "v"),
    rowwise="out",
    num_heads_attr="heads",
    num_kv_heads_attr="kv_heads",
)
_GPT_REST = (EmbeddingRule(module="embedding"), OutputRule(module="head"), SequenceRule(modules=("blocks.*", "norm")))

# The first set whose pairs and experts all match modules of the model is used.
BUILT_IN_RULES: Mapping[str, tuple[Rule, ...]] = {
    "unisono gpt": (
        _GPT_ATTENTION,
        ColwiseRowwise(module="blocks.*.ffn", colwise=("gate", "up"), rowwise="down"),
        *_GPT_REST,
    ),
    "unisono gpt with experts": (_GPT_ATTENTION, ExpertRule(module="blocks.*.ffn.experts"), *_GPT_REST),
    "unisono bert": (
        ColwiseRowwise(module="blocks.*.attention", colwise=("q", "k", "v"), rowwise="out", num_heads_attr="heads"),
        ColwiseRowwise(module="blocks.*.ffn", colwise=("up",), rowwise="down"),
        SequenceRule(modules=("blocks.*",)),
    ),
    "llama": (
        ColwiseRowwise(
            module="**.layers.*.self_attn",
            colwise=("q_proj",),
            kv_colwise=("k_proj", "v_proj"),
            rowwise="o_proj",
            num_heads_attr="config.num_attention_heads",
            num_kv_heads_attr="config.num_key_value_heads",
            kv_group_size_attr="num_key_value_groups",
        ),
        ColwiseRowwise(module="**.layers.*.mlp", colwise=("gate_proj", "up_proj"), rowwise="down_proj"),
        EmbeddingRule(module="**.embed_tokens"),
        OutputRule(module="**.lm_head"),
        SequenceRule(modules=("**.layers.*", "**.norm")),
    ),
    "gpt2": (
        ColwiseRowwise(
            module="**.h.*.attn",
            fused_colwise=("c_attn",),
            rowwise="c_proj",
            num_heads_attr="num_heads",
            size_attrs=("split_size",),
            input_module="c_attn",
        ),
        ColwiseRowwise(module="**.h.*.mlp", colwise=("c_fc",), rowwise="c_proj", input_module="c_fc"),
        EmbeddingRule(module="**.wte"),
        OutputRule(module="**.lm_head"),
        SequenceRule(modules=("**.h.*", "**.ln_f")),
    ),
    "bert": (
        ColwiseRowwise(
            module="**.encoder.layer.*.attention",
            colwise=("self.query", "self.key", "self.value"),
            rowwise="output.dense",
            num_heads_attr="self.num_attention_heads",
            size_attrs=("self.all_head_size",),
            input_module="self",
        ),
        ColwiseRowwise(
            module="**.encoder.layer.*",
            colwise=("intermediate.dense",),
            rowwise="output.dense",
            input_module="intermediate",
        ),
        EmbeddingRule(module="**.embeddings.word_embeddings"),
        OutputRule(module="**.cls.predictions.decoder"),
        OutputRule(module="**.lm_head.decoder"),  # RoBERTa's
        SequenceRule(modules=("**.encoder.layer.*",)),
    ),
}


def match_modules(pattern: str, names: Collection[str]) -> list[str]:
    """The names that match ``pattern``, in order. Raises PlanError for a pattern of more than ``MAX_PATTERN`` characters."""
    regular = _regular_expression(pattern)
    return [name for name in names if regular.fullmatch(name)]


@lru_cache
def _regular_expression(pattern: str) -> re.Pattern[str]:
    """The pattern as a regular expression that never tries the same characters in more than two ways.

    Between two ``**`` the first match is as good as any, and likewise between two ``*`` of a component: what it matched is
    not given up again (``(?>…)``). Only the last ``**`` of the pattern and the last ``*`` of each component go back.
    """
    if len(pattern) > MAX_PATTERN:
        raise PlanError(
            given=f"a pattern of {len(pattern):,} characters, {pattern[:40]}…",
            rule=f"a pattern of module names has at most {MAX_PATTERN:,}",
            consequence="it was not compared with the model",
            nearest="several patterns, or ** in place of components",
        )
    first, *others = [_components(part) for part in re.split(r"(?:\*\*\.)+", pattern)]
    inner = "".join(rf"(?>(?:[^.]+\.)*?{part})" for part in others[:-1])
    return re.compile(first + inner + "".join(rf"(?:[^.]+\.)*{part}" for part in others[-1:]))


def _components(pattern: str) -> str:
    """Components of a name; in each, ``*`` is one or more characters."""
    return r"\.".join(map(_component, pattern.split(".")))


def _component(pattern: str) -> str:
    first, *others = map(re.escape, pattern.split("*"))
    inner = "".join(f"(?>[^.]+?{part})" if part else "[^.]" for part in others[:-1])
    return first + inner + "".join(f"[^.]+{part}" for part in others[-1:])


def built_in_rules(names: Collection[str]) -> tuple[Rule, ...]:
    """The built-in rules for a model with modules of these ``names``, without those that match none; () if no set fits."""
    for rules in BUILT_IN_RULES.values():
        if all(_names_layers(rule, names) for rule in rules if isinstance(rule, ColwiseRowwise | ExpertRule)):
            return tuple(
                rule for rule in rules if any(match_modules(pattern, names) for pattern in module_patterns(rule))
            )
    return ()


def module_patterns(rule: Rule) -> tuple[str, ...]:
    """The patterns of modules in a rule."""
    return rule.modules if isinstance(rule, SequenceRule) else (rule.module,)


def local_sizes(rule: ColwiseRowwise, module: object, num_ranks: int) -> dict[str, int]:
    """Values of the attributes that ``rule`` names in ``module``, by name, on one of ``num_ranks`` ranks."""
    local = {name: max(1, int(attrgetter(name)(module)) // num_ranks) for name in rule.local_attrs}
    if rule.kv_group_size_attr:
        local[rule.kv_group_size_attr] = local[rule.num_heads_attr] // local[rule.num_kv_heads_attr]
    return local


def _names_layers(rule: ColwiseRowwise | ExpertRule, names: Collection[str]) -> bool:
    paths, layers = match_modules(rule.module, names), rule.layers if isinstance(rule, ColwiseRowwise) else ()
    return bool(paths) and all(f"{path}.{layer}" in names for path in paths for layer in layers)
