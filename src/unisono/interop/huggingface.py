"""Export to the Hugging Face folder layout: ``model.safetensors``, ``config.json`` and, where there is one, the tokenizer.

The reference GPT is a Llama, so its export opens with ``LlamaForCausalLM.from_pretrained``, the reference BERT with
``BertForMaskedLM``. Any other model gets its own parameter names and no ``config.json``: its class is known to its author
only. Of several names for one tensor the file holds one and lists the others, as ``safetensors.torch.load_model`` expects.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor, nn

from unisono.errors import CheckpointError, Problem
from unisono.interop.bert import bert_config, bert_tensors
from unisono.models.bert import BERT
from unisono.models.gpt import GPT

_WEIGHTS, _CONFIG, _TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"
_FORMAT = {"format": "pt"}
_BLOCK_NAMES = {
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


def export(
    model: nn.Module, folder: Path, *, max_length: int, end_of_document: int | None, tokenizer: Path | None
) -> Path:
    """Write the model to ``folder`` and return it; an export that was there is replaced only when the new one is complete.

    ``max_length`` in tokens is what the model was trained on; ``tokenizer`` is a Hugging Face tokenizer.json to copy.
    Raises CheckpointError where ``folder`` holds anything but an earlier export, or cannot be written.
    """
    target = Path(os.path.abspath(folder))
    _refuse_other_contents(target, folder)
    partial: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        _write(model, partial, max_length=max_length, end_of_document=end_of_document, tokenizer=tokenizer)
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
    except OSError as error:
        raise CheckpointError(
            Problem(
                given=f"export to {str(folder)!r}: {error.strerror}",
                rule="an export is a new folder, or takes the place of an earlier export",
                consequence="nothing was exported",
                nearest="a path in a folder you may write to, with room for the model's weights",
            )
        ) from error
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def _refuse_other_contents(target: Path, given: Path) -> None:
    """A folder is only replaced when an export is all there is in it."""
    if not os.path.lexists(target):
        return
    ours = {_WEIGHTS, _CONFIG, _TOKENIZER}
    others = sorted(set(os.listdir(target)) - ours) if target.is_dir() and not target.is_symlink() else [target.name]
    if others:
        raise CheckpointError(
            Problem(
                given=f"export to {str(given)!r}, where there is {', '.join(others[:3])}"
                + (f" and {len(others) - 3} more" if len(others) > 3 else ""),
                rule="an export is a new folder, or takes the place of an earlier export",
                consequence="nothing was exported and nothing was removed",
                nearest=f"a folder inside it, such as {str(given / 'export')!r}",
            )
        )


def _write(
    model: nn.Module, folder: Path, *, max_length: int, end_of_document: int | None, tokenizer: Path | None
) -> None:
    library: Any = safetensors.torch  # its functions are typed in part only
    if isinstance(model, GPT | BERT):
        if isinstance(model, GPT):
            named, config = dict(_llama_tensors(model)), _llama_config(model, max_length, end_of_document)
        else:
            named, config = bert_tensors(model), bert_config(model)
        tensors = {name: tensor.contiguous().cpu() for name, tensor in named.items()}
        library.save_file(tensors, folder / _WEIGHTS, _FORMAT)
        (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    else:
        library.save_model(model, str(folder / _WEIGHTS), dict(_FORMAT))
    if tokenizer is not None:
        shutil.copyfile(tokenizer, folder / _TOKENIZER)


def _llama_tensors(model: GPT) -> Iterator[tuple[str, Tensor]]:
    yield "model.embed_tokens.weight", model.embedding.weight.detach()
    for name, parameter in model.blocks.named_parameters():
        number, _, rest = name.partition(".")
        inner = rest.removesuffix(".weight")
        yield f"model.layers.{number}.{_BLOCK_NAMES[inner]}.weight", parameter.detach()
    yield "model.norm.weight", model.norm.weight.detach()
    if model.head is not None:
        yield "lm_head.weight", model.head.weight.detach()


def _llama_config(model: GPT, max_length: int, end_of_document: int | None) -> dict[str, Any]:
    options = model.options
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
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
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": end_of_document,
        "eos_token_id": end_of_document,
        "torch_dtype": "float32",
    }
