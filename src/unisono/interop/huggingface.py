"""Export to the Hugging Face folder layout: ``model.safetensors``, ``config.json`` and, if given, the tokenizer.

The reference GPT loads with ``LlamaForCausalLM.from_pretrained``, or with experts with the class under ``architectures`` in
``config.json``; the reference BERT loads with ``BertForMaskedLM``. Any other model is written with its own parameter names and
without ``config.json``. A tensor with several names is written once, and the file lists its other names, as
``safetensors.torch.load_model`` expects.

Tensors are written one at a time: with ``read`` the model may be on the meta device. Above ``max_shard_bytes`` they are split
over several files, and ``model.safetensors.index.json`` maps tensors to files.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from unisono.checkpoint.safetensors_format import build_header
from unisono.errors import CheckpointError
from unisono.interop import gpt
from unisono.interop.bert import bert_config, bert_tensors
from unisono.interop.exported_tensor import ExportedTensor
from unisono.models.bert import BERT
from unisono.models.gpt import GPT

_WEIGHTS, _CONFIG, _TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"
_INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors")
_FORMAT = {"format": "pt"}
MAX_SHARD_BYTES = 5 << 30


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
    """Write the model to ``folder`` in the Hugging Face layout and return ``folder``.

    A ``GPT`` and a ``BERT`` load with the transformers package; any other model gets no ``config.json``. An earlier export
    is replaced only after the new one is complete.

    Args:
        model: The model. One that is neither ``GPT`` nor ``BERT`` keeps its own parameter names.
        folder: Folder of the export: a new one, or that of an earlier export.
        max_length: Sequence length of the training, in tokens.
        end_of_document: Token that ends a document, or None.
        tokenizer: Hugging Face tokenizer.json to copy.
        read: ``read(name, out)`` copies the model's tensor ``name`` into ``out``; default: the values of ``model``, which
            else may be on the meta device.
        max_shard_bytes: Maximum bytes of tensors in one file; a larger tensor has a file of its own.

    Raises:
        CheckpointError: ``folder`` has other contents than an earlier export or cannot be written, or no class of
            transformers computes the same as the model.
    """
    target = Path(os.path.abspath(folder))
    _refuse_other_contents(target, folder)
    partial: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        write_weights(model, partial, read=read, max_shard_bytes=max_shard_bytes)
        config = _config(model, max_length, end_of_document)
        if config is not None:
            (partial / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if tokenizer is not None:
            shutil.copyfile(tokenizer, partial / _TOKENIZER)
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
    except OSError as error:
        raise CheckpointError(
            given=f"export to {str(folder)!r}: {error.strerror}",
            rule="an export is a new folder, or takes the place of an earlier export",
            consequence="nothing was exported",
            nearest="a path in a folder you may write to, with room for the model's weights",
        ) from error
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def _refuse_other_contents(target: Path, given: Path) -> None:
    """Raise ``CheckpointError`` if the folder has other contents than an earlier export."""
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
            given=f"export to {str(given)!r}, where there is {', '.join(others[:3])}"
            + (f" and {len(others) - 3} more" if len(others) > 3 else ""),
            rule="an export is a new folder, or takes the place of an earlier export",
            consequence="nothing was exported and nothing was removed",
            nearest=f"a folder inside it, such as {str(given / 'export')!r}",
        )


def write_weights(
    model: nn.Module, folder: Path, *, read: Callable[[str, Tensor], None] | None, max_shard_bytes: int
) -> None:
    """Write the model's tensors as safetensors files in ``folder``, with one tensor in memory at a time."""
    tensors: dict[str, Tensor] = model.state_dict(keep_vars=True)
    named, tied = _names(model)
    # views, of which only shapes and dtypes are read
    views = {entry.key: entry.transform(tensors[entry.name].detach()) for entry in named}
    files = _split_into_files(named, views, max_shard_bytes)
    one = len(files) == 1
    names = [_WEIGHTS if one else f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    loaded: tuple[str, Tensor] = "", torch.empty(0)  # several entries in a row may be of one tensor, such as experts
    for file_name, members in zip(names, files, strict=True):
        # wide elements first, in the order of safetensors
        ordered = sorted(members, key=lambda entry: -views[entry.key].dtype.itemsize)
        layout = [(entry.key, views[entry.key].dtype, tuple(views[entry.key].shape)) for entry in ordered]
        header, _ = build_header(layout, {**_FORMAT, **tied})
        with (folder / file_name).open("wb") as file:
            file.write(header)
            for entry in ordered:
                if loaded[0] != entry.name:
                    loaded = "", torch.empty(0)  # free the last tensor first
                    loaded = entry.name, _values(entry.name, tensors[entry.name], read)
                part = entry.transform(loaded[1]).contiguous()
                file.write(cast(Any, part.reshape(-1).view(torch.uint8).numpy()).data)
    if not one:
        index = {
            "metadata": {"total_size": sum(view.nbytes for view in views.values())},
            "weight_map": {entry.key: name for name, members in zip(names, files, strict=True) for entry in members},
        }
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _values(name: str, tensor: Tensor, read: Callable[[str, Tensor], None] | None) -> Tensor:
    if read is None:
        return tensor.detach().cpu()
    values = torch.empty(tensor.shape, dtype=tensor.dtype)
    read(name, values)
    return values


def _split_into_files(
    named: Sequence[ExportedTensor], views: Mapping[str, Tensor], limit: int
) -> list[list[ExportedTensor]]:
    files: list[list[ExportedTensor]] = [[]]
    size = 0
    for entry in named:
        size += views[entry.key].nbytes
        if files[-1] and size > limit:
            files.append([])
            size = views[entry.key].nbytes
        files[-1].append(entry)
    return files


def _names(model: nn.Module) -> tuple[list[ExportedTensor], dict[str, str]]:
    if isinstance(model, GPT):
        return list(gpt.gpt_tensors(model)), {}
    if isinstance(model, BERT):
        return bert_tensors(model), {}
    return _own_names(model)


def _config(model: nn.Module, max_length: int, end_of_document: int | None) -> dict[str, Any] | None:
    if isinstance(model, GPT):
        return gpt.gpt_config(model, max_length, end_of_document)
    return bert_config(model) if isinstance(model, BERT) else None


def _own_names(model: nn.Module) -> tuple[list[ExportedTensor], dict[str, str]]:
    """Each tensor under its first name, and the other names: other name -> first name."""
    first: dict[Any, str] = {}
    named: list[ExportedTensor] = []
    tied: dict[str, str] = {}
    for name, tensor in cast("dict[str, Tensor]", model.state_dict(keep_vars=True)).items():
        first_name = first.setdefault(tensor, name)
        if first_name == name:
            named.append(ExportedTensor(name, name))
        else:
            tied[name] = first_name
    return named, tied
