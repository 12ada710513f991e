"""Shapes of models by the ``config.json`` of a Hugging Face folder. Imports no torch, and no code of a folder is run.

Keys, what stands for those that are left out, and which layers have biases are those of the classes of transformers. Keys that
change no matrix, such as those of rotary positions, dropout or sliding windows, are not read. Heads of multi-token prediction
(``num_nextn_predict_layers`` or ``num_mtp_layers`` of DeepSeek-V3) are not counted, as those classes do not build them either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, cast

from unisono.config.values import shown
from unisono.errors import ConfigError
from unisono.models.options import MAX_EXPERTS, MAX_LAYERS, MAX_VOCABULARY, MAX_WIDTH
from unisono.planner.model_shape import ModelShape
from unisono.sanitize import quoted
from unisono.storage.files import os_reason
from unisono.storage.limits import MAX_MODEL_CONFIG_BYTES, read_json

CONFIG_FILE: Final = "config.json"
_MAX_TOKENS: Final = 1 << 31  # of a sequence
_SAVED: Final = "the config.json that was saved with the weights"
_BY_COLUMNS: Final = "a preset, or unisono plan simulate with the columns layers, hidden, heads"
# keys of parts that a model has only where its family reads them
_PARTS: Final = (
    *("kv_lora_rank", "q_lora_rank", "num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts"),
    *("moe_num_experts", "moe_intermediate_size", "shared_expert_intermediate_size", "pruned_heads", "is_decoder"),
    *("is_encoder_decoder", "add_cross_attention", "text_config", "vision_config"),
)
_LAYER_TYPES: Final = ("full_attention", "sliding_attention")


@dataclass(kw_only=True, slots=True)
class _Keys:
    """The keys of a file.

    Attributes:
        path: The file, for errors.
        values: Its keys and values.
        family: Its ``model_type``, for errors.
        read: Keys that were asked for.
    """

    path: Path
    values: Mapping[str, Any]
    family: str = ""
    read: set[str] = field(default_factory=set[str])

    def get(self, key: str) -> Any:
        """The value; None where there is none."""
        self.read.add(key)
        return self.values.get(key)

    def one_of(self, *names: str) -> str:
        """The name that the file has for a key, which versions of transformers write under several; the first if it has none."""
        there = [name for name in names if self.get(name) is not None] or [names[0]]
        for name in there[1:]:
            if self.values[name] != self.values[there[0]]:
                raise self.wrong(name, f"it is {there[0]}, {shown(self.values[there[0]])}")
        return there[0]

    def count(self, key: str, most: int = MAX_WIDTH, *, least: int = 1, default: int | None = None) -> int:
        """A whole number; ``default``, if there is one, where the key is left out or null."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise _refused(f"{self.path}: no {key}", f"a {CONFIG_FILE} of model_type {self.family} has it", _SAVED)
        if type(value) is not int or not least <= value <= most:
            raise self.wrong(key, f"it is a whole number from {least} to {most}")
        return value

    def flag(self, key: str, *, default: bool = False) -> bool:
        """True or false; ``default`` where the key is left out or null."""
        value = self.get(key)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.wrong(key, "it is true or false")
        return value

    def require(self, key: str, *values: object) -> None:
        """Raise ConfigError for a value that is none of ``values``; it may be left out or null."""
        value = self.get(key)
        if value is not None and not any(type(value) is type(each) and value == each for each in values):
            rule = f"the shape of a {self.family} has {key} {' or '.join(map(shown, values))}"
            raise self.wrong(key, rule, _BY_COLUMNS)

    def wrong(self, key: str, rule: str, nearest: str = _SAVED) -> ConfigError:
        """The error for a value that is there."""
        return _refused(f"{self.path}: {key} = {shown(self.values.get(key))}", rule, nearest)


def hugging_face_shape(path: Path) -> ModelShape:
    """The shape of a model by its ``config.json``, with all parameters of the class for language modelling.

    Raises:
        ConfigError: The file cannot be read, or describes no model that a shape can be of; it names the key.
    """
    try:
        content: Any = read_json(path, max_bytes=MAX_MODEL_CONFIG_BYTES)
    except (OSError, ValueError) as error:
        reason = os_reason(error) if isinstance(error, OSError) else str(error)
        raise _refused(f"{path}: {reason}", f"a model is described by a {CONFIG_FILE} in JSON", _SAVED) from error
    if not isinstance(content, dict):
        raise _refused(f"{path}: no object", f"{CONFIG_FILE} is an object with the keys of the model", _SAVED)
    keys = _Keys(path=path, values=cast("dict[str, Any]", content))
    family = keys.get("model_type")
    if not isinstance(family, str) or family not in _FAMILIES:
        raise keys.wrong("model_type", f"it is one of {', '.join(_FAMILIES)}", _BY_COLUMNS)
    keys.family = family
    class_name, read = _FAMILIES[family]
    _check_class(keys, class_name)
    shape = read(keys)
    if shape.heads % shape.kv_heads:
        raise keys.wrong("num_key_value_heads", f"it divides num_attention_heads, {shape.heads}")
    for key in _PARTS:
        if keys.values.get(key) and key not in keys.read:
            raise keys.wrong(key, f"the shape of a {family} has no such part", _BY_COLUMNS)
    return shape


def _check_class(keys: _Keys, class_name: str) -> None:
    """Raise ConfigError for a model with another head than that over the vocabulary, or with layers that are no attention."""
    classes = keys.get("architectures")
    if classes is not None and (not isinstance(classes, list) or class_name not in classes):
        raise keys.wrong(
            "architectures", f"the shape is that of {class_name}, whose output is the vocabulary", _BY_COLUMNS
        )
    layers = keys.get("layer_types")
    if layers is not None and not isinstance(layers, list):
        raise keys.wrong("layer_types", "it is a list of the kinds of layers")
    for kind in cast("list[object]", layers or []):
        if kind not in _LAYER_TYPES:
            given = f"{keys.path}: layer_types with {quoted(str(kind)) if isinstance(kind, str) else shown(kind)}"
            raise _refused(given, f"layers are {' or '.join(_LAYER_TYPES)}", _BY_COLUMNS)


def _decoder(keys: _Keys, *needed: str, tied: bool = False) -> ModelShape:
    """A decoder with a gate and without experts.

    Args:
        keys: The file.
        needed: Of ``num_key_value_heads`` and ``head_dim``, those that cannot be left out: what stands for them differs.
        tied: What stands for ``tie_word_embeddings``.
    """
    hidden, heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    is_known = "head_dim" in needed or keys.get("head_dim") is not None
    if not is_known and hidden % heads:
        raise keys.wrong("num_attention_heads", f"it divides hidden_size, {hidden}, where there is no head_dim")
    return ModelShape(
        layers=keys.count("num_hidden_layers", MAX_LAYERS),
        hidden=hidden,
        heads=heads,
        kv_heads=keys.count("num_key_value_heads", default=None if "num_key_value_heads" in needed else heads),
        head_dim=keys.count("head_dim", default=None if is_known else hidden // heads),
        ffn=keys.count("intermediate_size"),
        gated=True,
        vocab=keys.count("vocab_size", MAX_VOCABULARY),
        tied=keys.flag("tie_word_embeddings", default=tied),
        max_seq_len=keys.count("max_position_embeddings", _MAX_TOKENS, default=0),
    )


def _with_norms(shape: ModelShape, per_block: int = 0, beside: int = 0) -> ModelShape:
    """With two norms in each block and one behind them, ``per_block`` parameters more in each, and others ``beside``."""
    return replace(shape, other_params=shape.layers * (2 * shape.hidden + per_block) + shape.hidden + beside)


def _attention_biases(shape: ModelShape, *, has_inner: bool, has_outer: bool) -> int:
    """Biases of queries, keys and values of a block, and of the output."""
    return has_inner * (shape.heads + 2 * shape.kv_heads) * shape.head_dim + has_outer * shape.hidden


def _llama(keys: _Keys) -> ModelShape:
    shape = _decoder(keys)
    has_biases = keys.flag("attention_bias")
    feed_forward = keys.flag("mlp_bias") * (2 * shape.ffn + shape.hidden)
    return _with_norms(shape, _attention_biases(shape, has_inner=has_biases, has_outer=has_biases) + feed_forward)


def _mistral(keys: _Keys) -> ModelShape:
    return _with_norms(_decoder(keys, "num_key_value_heads"))


def _mixtral(keys: _Keys) -> ModelShape:
    return _with_norms(_experts(keys, _decoder(keys, "num_key_value_heads"), "num_local_experts"))


def _qwen2(keys: _Keys) -> ModelShape:
    shape = _decoder(keys, "num_key_value_heads")
    return _with_norms(shape, _attention_biases(shape, has_inner=True, has_outer=False))


def _qwen3(keys: _Keys) -> ModelShape:
    return _with_norms_of_heads(keys, _decoder(keys, "num_key_value_heads", "head_dim"))


def _qwen2_moe(keys: _Keys) -> ModelShape:
    shape = _sparse_steps(keys, _decoder(keys, "num_key_value_heads"))
    shape = replace(shape, shared_ffn=keys.count("shared_expert_intermediate_size"))
    biases = _attention_biases(shape, has_inner=keys.flag("qkv_bias", default=True), has_outer=False)
    return _with_norms(shape, biases, shape.expert_layers * shape.hidden)  # the shared expert has a gate of one output


def _qwen3_moe(keys: _Keys) -> ModelShape:
    return _with_norms_of_heads(keys, _sparse_steps(keys, _decoder(keys, "num_key_value_heads")))


def _with_norms_of_heads(keys: _Keys, shape: ModelShape) -> ModelShape:
    """With a norm of each query and one of each key, and perhaps biases."""
    has_biases = keys.flag("attention_bias")
    biases = _attention_biases(shape, has_inner=has_biases, has_outer=has_biases)
    return _with_norms(shape, 2 * shape.head_dim + biases)


def _experts(keys: _Keys, shape: ModelShape, *names: str, chosen: str = "num_experts_per_tok") -> ModelShape:
    """With experts, whose number has one of ``names``; ``chosen`` is how many of them a token goes to."""
    experts = keys.count(keys.one_of(*names), MAX_EXPERTS)
    return replace(shape, experts=experts, experts_per_token=keys.count(chosen, experts))


def _sparse_steps(keys: _Keys, shape: ModelShape) -> ModelShape:
    """With experts in each ``decoder_sparse_step``-th block."""
    keys.require("mlp_only_layers", [])
    return replace(
        _experts(keys, shape, "num_experts", "num_local_experts"),
        ffn=keys.count("moe_intermediate_size"),
        dense_ffn=shape.ffn,
        expert_period=keys.count("decoder_sparse_step", shape.layers, default=1),
    )


def _ernie_moe(keys: _Keys) -> ModelShape:
    shape = _decoder(keys, "num_key_value_heads", tied=True)
    keys.require("use_bias", False)
    keys.require("moe_layer_interval", 1)
    keys.require("moe_layer_end_index", -1, shape.layers - 1)
    units = keys.count("moe_intermediate_size")
    shape = replace(
        _experts(keys, shape, "moe_num_experts", "num_experts", chosen=keys.one_of("moe_k", "num_experts_per_tok")),
        ffn=units,
        dense_ffn=shape.ffn,
        dense_layers=keys.count("moe_layer_start_index", shape.layers - 1, least=0),
        shared_ffn=units * keys.count("moe_num_shared_experts", MAX_EXPERTS, least=0),
    )
    return _with_norms(shape)


def _deepseek(keys: _Keys) -> ModelShape:
    """Multi-head latent attention with experts (DeepSeek-V2, section 2)."""
    hidden, heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    layers = keys.count("num_hidden_layers", MAX_LAYERS)
    head_dim, query_rank = keys.count("qk_nope_head_dim"), keys.count("q_lora_rank", default=0)
    for key, value in (("v_head_dim", head_dim), ("moe_layer_freq", 1), ("attention_bias", False), ("mlp_bias", False)):
        keys.require(key, value)
    units = keys.count("moe_intermediate_size")
    shape = ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        ffn=units,
        gated=True,
        vocab=keys.count("vocab_size", MAX_VOCABULARY),
        tied=keys.flag("tie_word_embeddings"),
        shared_ffn=units * keys.count("n_shared_experts", MAX_EXPERTS, least=0, default=0),
        dense_layers=keys.count("first_k_dense_replace", layers - 1, least=0),
        dense_ffn=keys.count("intermediate_size"),
        query_rank=query_rank,
        kv_rank=keys.count("kv_lora_rank"),
        rope_dim=keys.count("qk_rope_head_dim"),
        max_seq_len=keys.count("max_position_embeddings", _MAX_TOKENS, default=0),
    )
    shape = _experts(keys, shape, "n_routed_experts", "num_local_experts", "num_experts")
    return _with_norms(shape, shape.query_rank + shape.kv_rank)  # norms behind both projections to a low rank


def _gpt2(keys: _Keys) -> ModelShape:
    hidden, heads = keys.count("n_embd"), keys.count("n_head")
    if hidden % heads:
        raise keys.wrong("n_head", f"it divides n_embd, {hidden}")
    positions = keys.count("n_positions", _MAX_TOKENS)
    shape = ModelShape(
        layers=keys.count("n_layer", MAX_LAYERS),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=keys.count("n_inner", default=4 * hidden),
        gated=False,
        vocab=keys.count("vocab_size", MAX_VOCABULARY),
        tied=keys.flag("tie_word_embeddings", default=True),
        max_seq_len=positions,
    )
    return with_layer_norms(shape, positions * hidden)


def _bert(keys: _Keys) -> ModelShape:
    hidden, heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    if hidden % heads:
        raise keys.wrong("num_attention_heads", f"it divides hidden_size, {hidden}")
    keys.require("position_embedding_type", "absolute")
    keys.require("tie_word_embeddings", True)
    return bert_shape(
        layers=keys.count("num_hidden_layers", MAX_LAYERS),
        hidden=hidden,
        heads=heads,
        ffn=keys.count("intermediate_size"),
        vocab=keys.count("vocab_size", MAX_VOCABULARY),
        positions=keys.count("max_position_embeddings", _MAX_TOKENS),
        segments=keys.count("type_vocab_size", default=2),
    )


def bert_shape(
    *, layers: int, hidden: int, heads: int, ffn: int, vocab: int, positions: int, segments: int
) -> ModelShape:
    """The shape of a BERT with its head over the vocabulary, which is counted for all tokens.

    Args:
        layers: Blocks.
        hidden: Width of the residual stream.
        heads: Attention heads.
        ffn: Hidden units of a feed-forward layer.
        vocab: Rows of the table of tokens.
        positions: Rows of the table of positions, as many as a text has tokens at most.
        segments: Rows of the table of segments.
    """
    shape = ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=ffn,
        gated=False,
        vocab=vocab,
        tied=True,
        max_seq_len=positions,
    )
    # a norm is behind the embeddings in place of the blocks; the head has a matrix, a norm and the biases of the vocabulary
    head = hidden * hidden + 3 * hidden + vocab
    return with_layer_norms(shape, (positions + segments) * hidden + head)


def with_layer_norms(shape: ModelShape, beside: int) -> ModelShape:
    """With biases in all layers and norms, two norms in each block and one outside, and others ``beside`` the blocks."""
    per_block = 6 * shape.hidden + 3 * shape.heads * shape.head_dim + shape.ffn
    return replace(shape, other_params=shape.layers * per_block + 2 * shape.hidden + beside)


_FAMILIES: Final[Mapping[str, tuple[str, Callable[[_Keys], ModelShape]]]] = {
    "llama": ("LlamaForCausalLM", _llama),
    "mistral": ("MistralForCausalLM", _mistral),
    "mixtral": ("MixtralForCausalLM", _mixtral),
    "qwen2": ("Qwen2ForCausalLM", _qwen2),
    "qwen2_moe": ("Qwen2MoeForCausalLM", _qwen2_moe),
    "qwen3": ("Qwen3ForCausalLM", _qwen3),
    "qwen3_moe": ("Qwen3MoeForCausalLM", _qwen3_moe),
    "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM", _ernie_moe),
    "deepseek_v2": ("DeepseekV2ForCausalLM", _deepseek),
    "deepseek_v3": ("DeepseekV3ForCausalLM", _deepseek),
    "gpt2": ("GPT2LMHeadModel", _gpt2),
    "bert": ("BertForMaskedLM", _bert),
}


def _refused(given: str, rule: str, nearest: str) -> ConfigError:
    return ConfigError(given=given, rule=rule, consequence="nothing was predicted", nearest=nearest)
