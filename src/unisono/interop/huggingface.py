"""Export to the Hugging Face folder layout: ``model.safetensors``, ``config.json`` and, where there is one, the tokenizer.

The reference GPT is a Llama, so its export opens with ``LlamaForCausalLM.from_pretrained``. Any other model gets its own
parameter names and no ``config.json``: its class is known to its author only. Of several names for one tensor the file
holds one and lists the others, as ``safetensors.torch.load_model`` expects.

Tensors are written one after the other and dropped: with ``read`` the model itself may be on the meta device. Above
``max_shard_bytes`` they are spread over several files, with ``model.safetensors.index.json`` that says which is where.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from unisono.errors import CheckpointError, Problem
from unisono.models.gpt import GPT
from unisono.train.checkpoint.tensorfile import build_header

_WEIGHTS, _CONFIG, _TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"
_INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors")
_FORMAT = {"format": "pt"}
MAX_SHARD_BYTES = 5 << 30
_Named = tuple[str, str, Tensor]  # name in the file, name in the model, the model's tensor
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
    model: nn.Module,
    folder: Path,
    *,
    max_length: int,
    end_of_document: int | None,
    tokenizer: Path | None,
    read: Callable[[str, Tensor], None] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Write the model to ``folder`` and return it; an export that was there is replaced only when the new one is complete.

    ``max_length`` in tokens is what the model was trained on; ``tokenizer`` is a Hugging Face tokenizer.json to copy.
    ``read(name, out)`` overwrites ``out`` with the values of the model's tensor ``name``; by default they are the model's.
    A file has at most ``max_shard_bytes`` of tensors, or one tensor.
    Raises CheckpointError where ``folder`` holds anything but an earlier export, or cannot be written.
    """
    target = Path(os.path.abspath(folder))
    _refuse_other_contents(target, folder)
    partial: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        write_weights(model, partial, read=read, max_shard_bytes=max_shard_bytes)
        if isinstance(model, GPT):
            config = _llama_config(model, max_length, end_of_document)
            (partial / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if tokenizer is not None:
            shutil.copyfile(tokenizer, partial / _TOKENIZER)
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
    ours = {_WEIGHTS, _INDEX, _CONFIG, _TOKENIZER}
    others = (
        sorted(name for name in os.listdir(target) if name not in ours and not _SHARD.fullmatch(name))
        if target.is_dir() and not target.is_symlink()
        else [target.name]
    )
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


def write_weights(
    model: nn.Module, folder: Path, *, read: Callable[[str, Tensor], None] | None, max_shard_bytes: int
) -> None:
    """The model's tensors as safetensors files in ``folder``, one tensor in memory at a time."""
    named, tied = _llama_names(model) if isinstance(model, GPT) else _own_names(model)
    files = _spread(named, max_shard_bytes)
    one = len(files) == 1
    names = [_WEIGHTS if one else f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    for name, tensors in zip(names, files, strict=True):
        # wide elements first, as safetensors orders them
        ordered = sorted(tensors, key=lambda each: (-each[2].dtype.itemsize, each[0]))
        header, _ = build_header([(key, t.dtype, tuple(t.shape)) for key, _, t in ordered], {**_FORMAT, **tied})
        with (folder / name).open("wb") as file:
            file.write(header)
            for _, inner, tensor in ordered:
                file.write(_bytes_of(inner, tensor, read))
    if not one:
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for _, _, tensor in named)},
            "weight_map": {key: name for name, tensors in zip(names, files, strict=True) for key, _, _ in tensors},
        }
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _bytes_of(name: str, tensor: Tensor, read: Callable[[str, Tensor], None] | None) -> memoryview:
    if read is None:
        values = tensor.detach().cpu().contiguous()
    else:
        values = torch.empty(tensor.shape, dtype=tensor.dtype)
        read(name, values)
    return cast(Any, values.reshape(-1).view(torch.uint8).numpy()).data


def _spread(named: Sequence[_Named], limit: int) -> list[list[_Named]]:
    files: list[list[_Named]] = [[]]
    size = 0
    for each in named:
        size += each[2].nbytes
        if files[-1] and size > limit:
            files.append([])
            size = each[2].nbytes
        files[-1].append(each)
    return files


def _llama_names(model: GPT) -> tuple[list[_Named], dict[str, str]]:
    named: list[_Named] = []
    for name, parameter in model.named_parameters():
        if name.startswith("blocks."):
            _, number, rest = name.split(".", 2)
            key = f"model.layers.{number}.{_BLOCK_NAMES[rest.removesuffix('.weight')]}.weight"
        else:
            key = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}[name.partition(".")[0]]
            key += ".weight"
        named.append((key, name, parameter))
    return named, {}


def _own_names(model: nn.Module) -> tuple[list[_Named], dict[str, str]]:
    """Every tensor once, and of those with several names the others: other name -> the name it is under."""
    first: dict[Any, str] = {}
    named: list[_Named] = []
    tied: dict[str, str] = {}
    for name, tensor in cast("dict[str, Tensor]", model.state_dict(keep_vars=True)).items():
        known = first.setdefault(tensor, name)
        if known == name:
            named.append((name, name, tensor))
        else:
            tied[name] = known
    return named, tied


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
