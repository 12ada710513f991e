"""Export of the reference GPT to Hugging Face transformers: tensor names, transforms and config.json.

A dense GPT is a Llama. With experts it is a Mixtral, or, if a bias balances the experts, an Ernie 4.5 MoE, which adds the bias
to a softmax. Ernie rotates pairs (2i, 2i + 1), Llama and this library (i, i + half), so the rows of its query and key matrices
are permuted; their products are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from operator import itemgetter
from typing import Any

from torch import Tensor

from unisono.errors import CheckpointError
from unisono.interop.exported_tensor import ExportedTensor
from unisono.models.gpt import GPT
from unisono.models.options import ModelOptions

_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}
_MIXTRAL = {
    "ffn.router": "block_sparse_moe.gate",
    "ffn.experts.gate": "block_sparse_moe.experts.{}.w1",
    "ffn.experts.down": "block_sparse_moe.experts.{}.w2",
    "ffn.experts.up": "block_sparse_moe.experts.{}.w3",
}
_ERNIE = {
    "ffn.router": "mlp.gate",
    "ffn.experts.gate": "mlp.experts.{}.gate_proj",
    "ffn.experts.down": "mlp.experts.{}.down_proj",
    "ffn.experts.up": "mlp.experts.{}.up_proj",
}
TIED = ("lm_head",)  # may be the table of tokens, and have no tensor of its own
# what a layer has, as it is or quantized (``models.quantized``)
_KINDS = ("weight", "weight_packed", "weight_scale", "input_scale")


def gpt_tensors(model: GPT) -> Iterator[ExportedTensor]:
    """Yield the tensors of the export.

    Raises:
        CheckpointError: No architecture computes the same.
    """
    options = model.options
    if options.num_experts and options.num_experts_per_token == 1:
        raise CheckpointError(
            given="a model with num_experts_per_token 1",
            rule="it weighs its expert with the score; Mixtral and its like would weigh it with 1",
            consequence="the export would compute something else, and nothing was exported",
            nearest="num_experts_per_token=2 or more, or the checkpoint itself",
        )
    names = _BLOCK | (_ERNIE if options.balance == "bias" else _MIXTRAL)
    turned = ("attention.q", "attention.k") if options.num_experts and options.balance == "bias" else ()
    yield ExportedTensor("model.embed_tokens.weight", "embedding.weight")
    for inner_name in model.blocks.state_dict(keep_vars=True):
        number, _, rest = inner_name.partition(".")
        name, layer = f"blocks.{inner_name}", f"model.layers.{number}."
        inner, kind = _split(rest)
        if inner == "ffn.router.bias":
            yield ExportedTensor(f"{layer}mlp.moe_statics.e_score_correction_bias", name, itemgetter(None))
        elif inner.startswith("ffn.experts."):
            for expert in range(options.num_experts):
                key = f"{layer}{names[inner].format(expert)}.{kind}"
                yield ExportedTensor(key, name, itemgetter(expert))
        elif inner in turned and kind != "input_scale":
            yield ExportedTensor(f"{layer}{names[inner]}.{kind}", name, partial(_interleave_rotary, options=options))
        else:
            yield ExportedTensor(f"{layer}{names[inner]}.{kind}", name)
    yield ExportedTensor("model.norm.weight", "norm.weight")
    if model.head is not None:
        yield ExportedTensor("lm_head.weight", "head.weight")


def _split(name: str) -> tuple[str, str]:
    """A layer's name and what of it a tensor is; experts are parameters without a name of their own."""
    layer, _, kind = name.rpartition(".")
    return (layer, kind) if kind in _KINDS else (name, "weight")


def gpt_config(model: GPT, max_length: int, end_of_document: int | None) -> dict[str, Any]:
    """Content of config.json.

    Args:
        max_length: Longest sequence in tokens.
        end_of_document: Token that ends a document, or None.
    """
    options = model.options
    common = {
        "vocab_size": options.vocab_size,
        "hidden_size": options.dim,
        "intermediate_size": options.hidden_ffn,
        "num_hidden_layers": options.num_layers,
        "num_attention_heads": options.num_heads,
        "num_key_value_heads": options.num_kv_heads,
        "head_dim": options.head_width,
        "hidden_act": "silu",
        "max_position_embeddings": max_length,
        "rms_norm_eps": options.norm_eps,
        "rope_theta": options.rope_theta,
        "tie_word_embeddings": options.tied,
        "bos_token_id": end_of_document,
        "eos_token_id": end_of_document,
        "torch_dtype": "float32",
    }
    if not options.num_experts:
        names = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        return names | common | {"attention_bias": False, "mlp_bias": False}
    if options.balance != "bias":
        names = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
        experts = {"num_local_experts": options.num_experts, "num_experts_per_tok": options.num_experts_per_token}
        return names | common | experts | {"sliding_window": None}
    names = {"architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe"}
    experts = {
        "moe_num_experts": options.num_experts,
        "moe_k": options.num_experts_per_token,
        "moe_intermediate_size": options.hidden_ffn,
        "moe_num_shared_experts": 0,
        "moe_layer_start_index": 0,
        "moe_layer_interval": 1,
    }
    return names | common | experts | {"use_bias": False, "pad_token_id": None}


def _interleave_rotary(weight: Tensor, options: ModelOptions) -> Tensor:
    """Reorder rows (i, i + half) of each head of ``weight`` [heads · width, ...] to (2i, 2i + 1)."""
    half = options.head_width // 2
    return weight.unflatten(0, (-1, 2, half)).transpose(1, 2).flatten(0, 2)
