"""Name maps of BERT, GPT-2 and Llama to the classes of transformers.

The numbers of heads, and where libraries differ from program to program also epsilons, activations and rotary bases, are no
tensors: they are settings. Libraries have these of their own:

    GluonNLP BERT       LayerNorm epsilon 1e-12, exact GELU
    MindSpore BERT      LayerNorm epsilon 1e-7 (the default of ``nn.LayerNorm``), GELU by tanh (the default of ``nn.GELU``)
    GPT-2 of both       LayerNorm epsilon 1e-5, GELU by tanh; the class has its matrices transposed, MindFormers some of them

Source:
    gluonnlp.model.bert and scripts/text_generation/model/gpt.py of GluonNLP 0.10, official/nlp/Bert of mindspore-ai/models,
    mindformers.models.gpt2 and mindformers.models.llama of MindFormers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from unisono.interop.name_map import Dim, Files, Found, NameMap, Place, Setting, refused, under_own_names

_NO_TOKENS: Final = {"bos_token_id": None, "eos_token_id": None}  # a tokenizer tells them
_HEADS: Final = Setting(
    name="num_attention_heads", kind=int, rule="it must be given: weights do not tell the number of heads"
)
_WEIGHT: Final = {"weight": "weight"}
_WEIGHT_AND_BIAS: Final = {"weight": "weight", "bias": "bias"}
_NORM: Final = {"weight": "gamma", "bias": "beta"}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Module:
    """A module that both have: an embedding, a norm, or a dense layer.

    Attributes:
        theirs: Its names in the file; ``{}`` is the number of a layer. Several are one in the class, below each other.
        ours: Its name in the class.
        shape: Of each weight.
        bias: Size of each bias.
        tensors: Its tensors in the class → in the file.
        transposed: Whether the class has the weight transposed.
    """

    theirs: tuple[str, ...]
    ours: str
    shape: tuple[Dim, ...] = ()
    bias: Dim = "width"
    tensors: Mapping[str, str] = field(default_factory=lambda: _WEIGHT_AND_BIAS)
    transposed: bool = False


def _norm(theirs: str, ours: str) -> _Module:
    return _Module(theirs=(theirs,), ours=ours, shape=("width",), tensors=_NORM)


def _dense(theirs: str | tuple[str, ...], ours: str, out: Dim, inner: Dim, *, transposed: bool = False) -> _Module:
    names = (theirs,) if isinstance(theirs, str) else theirs
    return _Module(theirs=names, ours=ours, shape=(out, inner), bias=out, transposed=transposed)


def _conv1d(theirs: str, ours: str, inner: Dim, out: Dim) -> _Module:
    """A dense layer whose weight is [inner, out], in the class as in the file."""
    return _Module(theirs=(theirs,), ours=ours, shape=(inner, out), bias=out)


def _table(theirs: str, ours: str, rows: Dim, tensor: str = "weight") -> _Module:
    return _Module(theirs=(theirs,), ours=ours, shape=(rows, "width"), tensors={"weight": tensor})


def _bias(theirs: str, ours: str, size: Dim, tensor: str) -> _Module:
    return _Module(theirs=(theirs,), ours=ours, bias=size, tensors={"bias": tensor})


def _joined(*values: Tensor, transposed: bool) -> Tensor:
    whole = values[0] if len(values) == 1 else torch.cat(values)
    return whole.T if transposed else whole


def _module_places(module: _Module, layer: int) -> list[Place]:
    return [
        Place(
            name=f"{module.ours.format(layer)}.{kind}",
            shape=module.shape if kind == "weight" else (module.bias,),
            sources=tuple(f"{theirs.format(layer)}.{tensor}" for theirs in module.theirs),
            make=partial(_joined, transposed=kind == "weight" and module.transposed),
        )
        for kind, tensor in module.tensors.items()
    ]


def _places(
    modules: Sequence[_Module], layers: Sequence[_Module], optional: Sequence[Sequence[_Module]], stored: Files
) -> list[Place]:
    """The class's tensors.

    Args:
        modules: Modules outside of the layers.
        layers: Those of each layer.
        optional: Groups of modules, of which a file has all or none.
        stored: The file's tensors.
    """
    places = [place for module in modules for place in _module_places(module, 0)]
    layer = 0
    while layer == 0 or _module_places(layers[0], layer)[0].sources[0] in stored:
        places += [place for module in layers for place in _module_places(module, layer)]
        layer += 1
    for group in optional:
        each = [place for module in group for place in _module_places(module, 0)]
        if any(name in stored for place in each for name in place.sources):
            places += each
    return places


def _num_layers(found: Found, name: str) -> int:
    layer = 0
    while name.format(layer) in found.places:
        layer += 1
    return layer


def _head_width(label: str, found: Found) -> int:
    heads, width = found.settings["num_attention_heads"], found.sizes["width"]
    if width % heads:
        raise refused(
            label,
            f"num_attention_heads={heads} for a width of {width}",
            rule="the width is divisible by the number of heads",
            nearest="--set num_attention_heads=…, as the model was trained with",
        )
    return width // heads


# --- BERT ------------------------------------------------------------------------------------------------------------

_LAYER: Final = "bert.encoder.layer.{}."


def _bert_names(anchor: str, tensors: Files) -> dict[str, str] | None:
    """Names that begin with ``bert.``, or with that of a head: a model alone, in one with heads, or in a step of training."""
    found = min((name for name in tensors if name.endswith(anchor)), key=len, default=None)  # an optimizer's are longer
    if found is None:
        return None
    inner = found.removesuffix(anchor)  # such as "", "bert." or "bert.bert."
    outer = inner.removesuffix("bert.") if inner.endswith("bert.") else None
    names: dict[str, str] = {}
    for name in tensors:
        if name.startswith(inner):
            own = "bert." + name.removeprefix(inner)
        else:
            own = name if outer is None else name.removeprefix(outer)
        names[own if own not in names else name] = name
    return names


def _bert_layer(begin: str, names: Mapping[str, str], norms: Mapping[str, str]) -> list[_Module]:
    """The modules of a layer: dense ones and norms by their names in the class."""
    sizes = {"intermediate.dense": ("inner", "width"), "output.dense": ("width", "inner")}
    modules = [
        _dense(begin + theirs, _LAYER + ours, *sizes.get(ours, ("width", "width"))) for ours, theirs in names.items()
    ]
    return modules + [_norm(begin + theirs, _LAYER + ours) for ours, theirs in norms.items()]


_GLUON_BERT: Final = (
    _table("bert.word_embed.0", "bert.embeddings.word_embeddings", "vocabulary"),
    _table("bert.token_type_embed.0", "bert.embeddings.token_type_embeddings", "segments"),
    _table("bert.encoder", "bert.embeddings.position_embeddings", "positions", "position_weight"),
    _norm("bert.encoder.layer_norm", "bert.embeddings.LayerNorm"),
)
_GLUON_BERT_LAYER: Final = _bert_layer(
    "bert.encoder.transformer_cells.{}.",
    {
        "attention.self.query": "attention_cell.proj_query",
        "attention.self.key": "attention_cell.proj_key",
        "attention.self.value": "attention_cell.proj_value",
        "attention.output.dense": "proj",
        "intermediate.dense": "ffn.ffn_1",
        "output.dense": "ffn.ffn_2",
    },
    {"attention.output.LayerNorm": "layer_norm", "output.LayerNorm": "ffn.layer_norm"},
)
_GLUON_BERT_HEADS: Final = (
    (_dense("bert.pooler", "bert.pooler.dense", "width", "width"),),
    (_dense("bert.classifier", "cls.seq_relationship", 2, "width"),),
    (
        _dense("bert.decoder.0", "cls.predictions.transform.dense", "width", "width"),
        _norm("bert.decoder.2", "cls.predictions.transform.LayerNorm"),
        _bias("bert.decoder.3", "cls.predictions", "vocabulary", "bias"),
    ),
    (_dense("classifier.0", "classifier", "classes", "width"),),
    (_dense("classifier.1", "classifier", "classes", "width"),),
)
_MINDSPORE_BERT: Final = (
    _table("bert.bert_embedding_lookup", "bert.embeddings.word_embeddings", "vocabulary", "embedding_table"),
    _table(
        "bert.bert_embedding_postprocessor.token_type_embedding",
        "bert.embeddings.token_type_embeddings",
        "segments",
        "embedding_table",
    ),
    _table(
        "bert.bert_embedding_postprocessor.full_position_embedding",
        "bert.embeddings.position_embeddings",
        "positions",
        "embedding_table",
    ),
    _norm("bert.bert_embedding_postprocessor.layernorm", "bert.embeddings.LayerNorm"),
)
_MINDSPORE_BERT_LAYER: Final = _bert_layer(
    "bert.bert_encoder.layers.{}.",
    {
        "attention.self.query": "attention.attention.query_layer",
        "attention.self.key": "attention.attention.key_layer",
        "attention.self.value": "attention.attention.value_layer",
        "attention.output.dense": "attention.output.dense",
        "intermediate.dense": "intermediate",
        "output.dense": "output.dense",
    },
    {"attention.output.LayerNorm": "attention.output.layernorm", "output.LayerNorm": "output.layernorm"},
)
_MINDSPORE_BERT_HEADS: Final = (
    (_dense("bert.dense", "bert.pooler.dense", "width", "width"),),
    (_dense("cls2.dense", "cls.seq_relationship", 2, "width"),),
    (
        _dense("cls1.dense", "cls.predictions.transform.dense", "width", "width"),
        _norm("cls1.layernorm", "cls.predictions.transform.LayerNorm"),
        _bias("cls1", "cls.predictions", "vocabulary", "output_bias"),
    ),
)


def _bert_config(found: Found, *, label: str) -> dict[str, Any]:
    _head_width(label, found)
    sizes = found.sizes
    has_masked = "cls.predictions.bias" in found.places
    has_next = "cls.seq_relationship.weight" in found.places
    is_classifier = "classifier.weight" in found.places
    kind = "ForPreTraining" if has_masked and has_next else "ForMaskedLM" if has_masked else "Model"
    return {
        "architectures": ["BertForSequenceClassification" if is_classifier else f"Bert{kind}"],
        "model_type": "bert",
        "vocab_size": sizes["vocabulary"],
        "hidden_size": sizes["width"],
        "num_hidden_layers": _num_layers(found, f"{_LAYER}output.dense.weight"),
        "intermediate_size": sizes["inner"],
        "max_position_embeddings": sizes["positions"],
        "type_vocab_size": sizes["segments"],
        "hidden_dropout_prob": 0.1,  # as both libraries and transformers have it by default
        "tie_word_embeddings": True,
        "pad_token_id": None,
        **found.settings,
    } | ({"num_labels": sizes["classes"]} if is_classifier else {})


def _bert_map(
    label: str,
    anchor: str,
    modules: tuple[Sequence[_Module], Sequence[_Module], Sequence[Sequence[_Module]]],
    *,
    eps: float,
    activation: str,
    ties: tuple[tuple[str, str], ...] = (),
) -> NameMap:
    return NameMap(
        family="bert",
        label=label,
        find=partial(_bert_names, anchor),
        places=partial(_places, *modules),
        config=partial(_bert_config, label=label),
        ties=ties,
        settings=(
            _HEADS,
            Setting(
                name="layer_norm_eps",
                kind=float,
                rule="the number that a layer norm adds to the variance; weights do not tell it",
                default=eps,
            ),
            Setting(
                name="hidden_act",
                kind=str,
                rule="the activation of feed-forward layers; weights do not tell it",
                default=activation,
                choices=("gelu", "gelu_pytorch_tanh", "relu"),
            ),
        ),
    )


# --- GPT-2 and Llama -------------------------------------------------------------------------------------------------

_GLUON_GPT2: Final = (
    _table("_embed", "transformer.wte", "vocabulary"),
    _table("_pos_embed", "transformer.wpe", "positions"),
    _norm("_final_ln", "transformer.ln_f"),
)
_GLUON_GPT2_LAYER: Final = (
    _norm("_attn_ln.{}", "transformer.h.{}.ln_1"),
    _dense(
        "_self_attention_layers.{}._multi_head_qkv_proj",
        "transformer.h.{}.attn.c_attn",
        "3 width",
        "width",
        transposed=True,
    ),
    _dense("_self_attention_layers.{}._out_proj", "transformer.h.{}.attn.c_proj", "width", "width", transposed=True),
    _norm("_ffn_ln.{}", "transformer.h.{}.ln_2"),
    _dense("_ffn_layers.{}._hidden_map", "transformer.h.{}.mlp.c_fc", "inner", "width", transposed=True),
    _dense("_ffn_layers.{}._out_map", "transformer.h.{}.mlp.c_proj", "width", "inner", transposed=True),
)
_MINDFORMERS_GPT2: Final = (
    _table("backbone.embedding.word_embedding", "transformer.wte", "vocabulary", "embedding_table"),
    _table("backbone.embedding.position_embedding", "transformer.wpe", "positions", "embedding_table"),
    _norm("backbone.layernorm", "transformer.ln_f"),
)
_BLOCK: Final = "backbone.blocks.{}."
_MINDFORMERS_GPT2_LAYER: Final = (
    _norm(f"{_BLOCK}layernorm1", "transformer.h.{}.ln_1"),
    _dense(
        (f"{_BLOCK}attention.dense1", f"{_BLOCK}attention.dense2", f"{_BLOCK}attention.dense3"),
        "transformer.h.{}.attn.c_attn",
        "width",
        "width",
        transposed=True,
    ),
    _conv1d(f"{_BLOCK}attention.projection", "transformer.h.{}.attn.c_proj", "width", "width"),
    _norm(f"{_BLOCK}layernorm2", "transformer.h.{}.ln_2"),
    _conv1d(f"{_BLOCK}output.mapping", "transformer.h.{}.mlp.c_fc", "width", "inner"),
    _conv1d(f"{_BLOCK}output.projection", "transformer.h.{}.mlp.c_proj", "inner", "width"),
)


def _gpt2_config(found: Found, *, label: str) -> dict[str, Any]:
    _head_width(label, found)
    sizes = found.sizes
    if sizes.get("3 width", 3 * sizes["width"]) != 3 * sizes["width"]:
        raise refused(
            label,
            f"queries, keys and values of {sizes['3 width']} in all, for a width of {sizes['width']}",
            rule="each of the three is as wide as the model",
            nearest="the file under its own names, without --as",
        )
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": sizes["vocabulary"],
        "n_positions": sizes["positions"],
        "n_embd": sizes["width"],
        "n_layer": _num_layers(found, "transformer.h.{}.ln_1.weight"),
        "n_head": found.settings["num_attention_heads"],
        "n_inner": sizes["inner"],
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        **_NO_TOKENS,
    }


def _gpt2_map(
    label: str, anchors: tuple[str, ...], modules: Sequence[_Module], layers: Sequence[_Module], *ties: tuple[str, str]
) -> NameMap:
    return NameMap(
        family="gpt2",
        label=label,
        find=partial(_with, anchors),
        places=partial(_places, modules, layers, ()),
        config=partial(_gpt2_config, label=label),
        ties=ties,
        settings=(_HEADS,),
    )


def _llama_dense(theirs: str, ours: str, out: Dim, inner: Dim) -> _Module:
    return _Module(
        theirs=(f"model.layers.{{}}.{theirs}",),
        ours=f"model.layers.{{}}.{ours}",
        shape=(out, inner),
        tensors=_WEIGHT,
    )


_LLAMA: Final = (
    _table("model.tok_embeddings", "model.embed_tokens", "vocabulary", "embedding_weight"),
    _Module(theirs=("model.norm_out",), ours="model.norm", shape=("width",), tensors=_WEIGHT),
)
_LLAMA_LAYER: Final = (
    _llama_dense("attention.wq", "self_attn.q_proj", "width", "width"),
    _llama_dense("attention.wk", "self_attn.k_proj", "key width", "width"),
    _llama_dense("attention.wv", "self_attn.v_proj", "key width", "width"),
    _llama_dense("attention.wo", "self_attn.o_proj", "width", "width"),
    _llama_dense("feed_forward.w1", "mlp.gate_proj", "inner", "width"),
    _llama_dense("feed_forward.w2", "mlp.down_proj", "width", "inner"),
    _llama_dense("feed_forward.w3", "mlp.up_proj", "inner", "width"),
    *(
        _Module(
            theirs=(f"model.layers.{{}}.{theirs}",),
            ours=f"model.layers.{{}}.{ours}",
            shape=("width",),
            tensors=_WEIGHT,
        )
        for theirs, ours in (("attention_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm"))
    ),
)
_LLAMA_HEAD: Final = ((_Module(theirs=("lm_head",), ours="lm_head", shape=("vocabulary", "width"), tensors=_WEIGHT),),)
_LLAMA_LABEL: Final = "Llama of MindFormers"


def _llama_config(found: Found) -> dict[str, Any]:
    sizes, settings, width = found.sizes, dict(found.settings), _head_width(_LLAMA_LABEL, found)
    heads, key_heads = settings["num_attention_heads"], sizes["key width"] // width
    if sizes["key width"] % width or heads % max(1, key_heads) or width % 2:
        raise refused(
            _LLAMA_LABEL,
            f"num_attention_heads={heads}, which makes heads of {width}, for keys of {sizes['key width']}",
            rule="a head has an even width, keys are a number of whole heads, and query heads are divisible by it",
            nearest="--set num_attention_heads=…, as the model was trained with",
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": sizes["vocabulary"],
        "hidden_size": sizes["width"],
        "intermediate_size": sizes["inner"],
        "num_hidden_layers": _num_layers(found, "model.layers.{}.mlp.down_proj.weight"),
        "num_key_value_heads": key_heads,
        "head_dim": width,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "lm_head.weight" not in found.places,
        **_NO_TOKENS,
        **settings,
    }


def _with(anchors: tuple[str, ...], tensors: Files) -> dict[str, str] | None:
    return under_own_names(tensors) if all(name in tensors for name in anchors) else None


TRANSFORMER_MAPS: Final = (
    _bert_map(
        "BERT of GluonNLP",
        "word_embed.0.weight",
        (_GLUON_BERT, _GLUON_BERT_LAYER, _GLUON_BERT_HEADS),
        eps=1e-12,
        activation="gelu",
        ties=(("bert.decoder.3.weight", "bert.word_embed.0.weight"),),
    ),
    _bert_map(
        "BERT of mindspore/models",
        "bert_embedding_lookup.embedding_table",
        (_MINDSPORE_BERT, _MINDSPORE_BERT_LAYER, _MINDSPORE_BERT_HEADS),
        eps=1e-7,
        activation="gelu_pytorch_tanh",
    ),
    _gpt2_map(
        "GPT-2 of GluonNLP",
        ("_embed.weight", "_pos_embed.weight"),
        _GLUON_GPT2,
        _GLUON_GPT2_LAYER,
        ("_logits_proj.weight", "_embed.weight"),
    ),
    _gpt2_map(
        "GPT-2 of MindFormers",
        ("backbone.embedding.word_embedding.embedding_table", f"{_BLOCK.format(0)}attention.dense1.weight"),
        _MINDFORMERS_GPT2,
        _MINDFORMERS_GPT2_LAYER,
    ),
    NameMap(
        family="llama",
        label=_LLAMA_LABEL,
        find=partial(_with, ("model.tok_embeddings.embedding_weight",)),
        places=partial(_places, _LLAMA, _LLAMA_LAYER, _LLAMA_HEAD),
        config=_llama_config,
        settings=(
            _HEADS,
            Setting(
                name="rms_norm_eps",
                kind=float,
                rule="it must be given: weights do not tell the number that an RMS norm adds to the mean square",
            ),
            Setting(
                name="rope_theta",
                kind=float,
                rule="it must be given: weights do not tell the base of the rotary positions",
            ),
            Setting(
                name="max_position_embeddings",
                kind=int,
                rule="it must be given: weights do not tell the longest sequence, as rotary positions have no table",
            ),
        ),
    ),
)
