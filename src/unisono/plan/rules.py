"""Rules of tensor parallelism as data: which layers of a model are cut, and how. They are part of a strategy file.

    pair        layers cut by output features, and behind them one cut by input features (Shoeybi et al. 2019)
    experts     stacks of experts, cut by the hidden units of each
    embedding   a table cut by vocabulary
    output      the matrix that makes logits, cut by vocabulary
    sequence    modules between whose cut layers activations are cut along the sequence (Korthikanti et al. 2022)

What no rule names stays whole. Modules are named by pattern: ``*`` stands for one part of a name, ``**`` for any number of them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Literal

from msgspec import Struct


class ColwiseRowwise(
    Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    tag_field="rule",
    tag="colwise_rowwise",
):
    """``column`` layers of ``module`` are cut by output features, ``row`` by input features.

    ``units`` is the attribute that says into how many equal parts (heads) the columns may be cut. ``shared`` layers have
    ``shared_units`` parts (key/value heads); where those are fewer than ranks, several ranks hold the same one. ``fused``
    layers are column layers that hold three side by side. Attributes in ``divided`` count output features of this rank's
    part; ``ratio`` is set to units per shared unit. ``enter`` is the submodule whose input the columns read, ``module``
    itself if empty; ``*`` where there is none: each of them then sums the gradient of its input by itself. Names are relative
    to ``module``; where the owner of an attribute is no module (a configuration) it is read and left as it is.
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
        """All that are cut."""
        return (*self.colwise, *self.kv_colwise, *self.fused_colwise, self.rowwise)

    @property
    def local_attrs(self) -> tuple[str, ...]:
        """The attributes that are divided."""
        return tuple(name for name in (self.num_heads_attr, self.num_kv_heads_attr, *self.size_attrs) if name)

    @property
    def input_modules(self) -> tuple[str, ...]:
        """The submodules whose inputs the columns read."""
        return self.layers[:-1] if self.input_module == "*" else (self.input_module,)


class ExpertRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="rule", tag="experts"):
    """``module`` is a ``models.moe.Experts``: every rank has some of the hidden units of each expert, and the router is whole."""

    module: str


class EmbeddingRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="rule", tag="embedding"):
    """``module`` is an ``nn.Embedding``; every rank looks up the tokens it has, and the sum is everyone's."""

    module: str


class OutputRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="rule", tag="output"):
    """``module`` makes logits: all of them are gathered on every rank, unless the model returns a ``models.loss.Head``."""

    module: str


class SequenceRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="rule", tag="sequence"):
    """With ``plan.sequence_parallel`` the input of the first of ``modules`` is cut along the sequence, and the output of the
    last is joined again."""

    modules: tuple[str, ...]


Rule = ColwiseRowwise | ExpertRule | EmbeddingRule | OutputRule | SequenceRule


Dims = tuple[Literal["tp"] | None, ...]


class ParameterPlacement(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Semi-automatic: parameters of ``module`` (a pattern; the whole model if empty) whose names fit ``parameter`` are cut along
    the dim that has "tp" in ``dims``; the others have null. What lies between, DTensor decides.

    Or, without ``parameter``, what goes into the module (``inputs``, by position; null as it comes) and what comes out
    (``outputs``) is moved to lie like that. Such a module lies in one whose parameters are placed.
    """

    module: str = ""
    parameter: str = ""
    dims: Dims = ()
    inputs: tuple[Dims | None, ...] = ()
    outputs: Dims | None = None


class DtypeRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Holds for the modules that ``module`` names (patterns as in ``rules``) and all in them; of a module and one in it that are
    both named, the inner one's rule counts there. "" leaves a field as it is.

    ``parameters``: how they are kept. Norms stay in fp32 unless named themselves. Gradients of bf16 parameters pile up, and
    moments are kept, in fp32. ``compute``: the products inside. ``gradients``: how they travel when ranks sum them.
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

# In order: the first set all of whose pairs and experts name something is taken.
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
    """The module names that ``pattern`` stands for, in order."""
    regular = "".join(_PIECES.get(piece, re.escape(piece)) for piece in re.split(r"(\*\*\.|\*)", pattern))
    return [name for name in names if re.fullmatch(regular, name)]


_PIECES = {"**.": r"(?:[^.]+\.)*", "*": r"[^.]+"}


def built_in_rules(names: Collection[str]) -> tuple[Rule, ...]:
    """The built-in rules for a model with modules of these ``names``, without those that name nothing in it; or ()."""
    for rules in BUILT_IN_RULES.values():
        if all(_names_layers(rule, names) for rule in rules if isinstance(rule, ColwiseRowwise | ExpertRule)):
            return tuple(
                rule for rule in rules if any(match_modules(pattern, names) for pattern in module_patterns(rule))
            )
    return ()


def module_patterns(rule: Rule) -> tuple[str, ...]:
    """The patterns of modules in a rule."""
    return rule.modules if isinstance(rule, SequenceRule) else (rule.module,)


def _names_layers(rule: ColwiseRowwise | ExpertRule, names: Collection[str]) -> bool:
    found, layers = match_modules(rule.module, names), rule.layers if isinstance(rule, ColwiseRowwise) else ()
    return bool(found) and all(f"{path}.{layer}" in names for path in found for layer in layers)
