"""The reference GPT as a model of Hugging Face transformers: names, tensors and config.json.

Dense it is a Llama. With experts it is a Mixtral, and where a bias takes part in the choice an Ernie 4.5 MoE, the one that adds
it to a softmax. Ernie turns neighbours (2i, 2i + 1) where Llama and this library turn (i, i + half), so rows of its query and
key matrices are in another order; their products are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from unisono.errors import CheckpointError, Problem
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


def tensors(model: GPT) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of the export. Raises CheckpointError where no architecture computes the same."""
    options = model.options
    if options.experts and options.experts_per_token == 1:
        raise CheckpointError(
            Problem(
                given="a model with experts_per_token 1",
                rule="it weighs its expert with the score; Mixtral and its like would weigh it with 1",
                consequence="the export would compute something else, and nothing was exported",
                nearest="experts_per_token=2 or more, or the checkpoint itself",
            )
        )
    names = _BLOCK | (_ERNIE if options.balance == "bias" else _MIXTRAL)
    yield "model.embed_tokens.weight", model.embedding.weight.detach()
    for name, tensor in model.blocks.state_dict().items():
        number, _, rest = name.partition(".")
        layer, inner = f"model.layers.{number}.", rest.removesuffix(".weight")
        if inner == "ffn.router.bias":
            yield f"{layer}mlp.moe_statics.e_score_correction_bias", tensor[None]
        elif inner.startswith("ffn.experts."):
            for expert, matrix in enumerate(tensor):
                yield f"{layer}{names[inner].format(expert)}.weight", matrix
        else:
            turned = inner in ("attention.q", "attention.k") and options.experts and options.balance == "bias"
            yield f"{layer}{names[inner]}.weight", _neighbours(tensor, options) if turned else tensor
    yield "model.norm.weight", model.norm.weight.detach()
    if model.head is not None:
        yield "lm_head.weight", model.head.weight.detach()


def config(model: GPT, max_length: int, end_of_document: int | None) -> dict[str, Any]:
    """The content of config.json; ``max_length`` in tokens."""
    options = model.options
    common = {
        "vocab_size": options.vocab_size,
        "hidden_size": options.dim,
        "intermediate_size": options.hidden_ffn,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "num_key_value_heads": options.kv_heads,
        "head_dim": options.dim // options.heads,
        "hidden_act": "silu",
        "max_position_embeddings": max_length,
        "rms_norm_eps": options.norm_eps,
        "rope_theta": options.rope_theta,
        "tie_word_embeddings": options.tied,
        "bos_token_id": end_of_document,
        "eos_token_id": end_of_document,
        "torch_dtype": "float32",
    }
    if not options.experts:
        names = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        return names | common | {"attention_bias": False, "mlp_bias": False}
    if options.balance != "bias":
        names = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
        experts = {"num_local_experts": options.experts, "num_experts_per_tok": options.experts_per_token}
        return names | common | experts | {"sliding_window": None}
    names = {"architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe"}
    experts = {
        "moe_num_experts": options.experts,
        "moe_k": options.experts_per_token,
        "moe_intermediate_size": options.hidden_ffn,
        "moe_num_shared_experts": 0,
        "moe_layer_start_index": 0,
        "moe_layer_interval": 1,
    }
    return names | common | experts | {"use_bias": False, "pad_token_id": None}


def _neighbours(weight: Tensor, options: ModelOptions) -> Tensor:
    """Rows (i, i + half) of each head [heads · width, D] as (2i, 2i + 1)."""
    half = options.dim // options.heads // 2
    return weight.unflatten(0, (-1, 2, half)).transpose(1, 2).flatten(0, 2)
