"""Export to the Hugging Face folder layout: ``model.safetensors``, ``config.json`` and, if given, the tokenizer.

The reference GPT loads with ``LlamaForCausalLM.from_pretrained``, or with experts with the class under ``architectures`` in
``config.json``; the reference BERT loads with ``BertForMaskedLM``. A model of transformers is written with its own names,
configuration and settings of generation. Quantized layers of these are in the format of compressed-tensors. Of a ``PeftModel``
only the adapter is written, in peft's layout. Any other model is written with its own parameter names and without
``config.json``. A tensor with several names is written once, and the file lists its other names, as
``safetensors.torch.load_model`` expects.

Tensors are written one at a time: with ``read`` the model may be on the meta device. Above ``max_shard_bytes`` they are split
over several files, and ``model.safetensors.index.json`` maps tensors to files.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from unisono.checkpoint.safetensors_format import build_header
from unisono.errors import CheckpointError
from unisono.interop import gpt
from unisono.interop.bert import TIED, bert_config, bert_tensors
from unisono.interop.compressed_tensors import compressed_tensors, quantization_config
from unisono.interop.exported_tensor import ExportedTensor
from unisono.models.bert import BERT
from unisono.models.gpt import GPT
from unisono.storage.directory import make_folder
from unisono.storage.files import FOLDER_MODE, opener, write_atomically

_WEIGHTS, _CONFIG, _GENERATION = "model.safetensors", "config.json", "generation_config.json"
_INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors")
_ADAPTER_WEIGHTS, _ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_TOKENIZER = "tokenizer.json"
# files beside tokenizer.json, or in place of it, in the folder of a tokenizer
_TOKENIZER_FILES = (
    _TOKENIZER,
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model"),
)
_TASK = "task.json"
_CARD = "README.md"
_FORMAT = {"format": "pt"}
MAX_SHARD_BYTES = 5 << 30


def export(
    model: nn.Module,
    folder: Path,
    *,
    max_length: int,
    end_of_document: int | None,
    tokenizer: Path | None,
    task: Mapping[str, Any] | None = None,
    card: str = "",
    read: Callable[[str, Tensor], None] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Write the model to ``folder`` in the Hugging Face layout and return ``folder``.

    A ``GPT``, a ``BERT`` and a model of transformers load with the transformers package, an adapter with
    ``PeftModel.from_pretrained(base, folder)``; any other model gets no ``config.json``. An earlier export is replaced only after
    the new one is complete.

    Args:
        model: The model. One that is neither ``GPT`` nor ``BERT`` keeps its own parameter names.
        folder: Folder of the export: a new one, or that of an earlier export.
        max_length: Sequence length of the training, in tokens.
        end_of_document: Token that ends a document, or None.
        tokenizer: Hugging Face tokenizer.json to copy, with the other files of the tokenizer in its folder, or such a folder.
        task: What inputs and outputs of the model mean, written to ``task.json``; its ``classes`` become the labels of a model
            of transformers. Default: nothing is written.
        card: Text of the model card, ``README.md``. Default: none is written.
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
        unfinished = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        make_folder(target.parent)
        unfinished.mkdir(mode=FOLDER_MODE)
        partial = unfinished
        write_weights(model, partial, read=read, max_shard_bytes=max_shard_bytes)
        for name, content in _configs(model, max_length, end_of_document).items():
            if name == _CONFIG and task and task.get("classes"):
                content |= _labels(task["classes"])
            _write_json(partial / name, content)
        if task:
            _write_json(partial / _TASK, task)
        if card:
            write_atomically(partial / _CARD, card.encode())
        if tokenizer is not None:
            _copy_tokenizer(tokenizer, partial)
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
    except OSError as error:
        raise CheckpointError(
            given=f"export to {str(folder)!r}: {error.strerror}",
            rule="an export is a new folder, or takes the place of an earlier export",
            consequence="nothing was exported",
            nearest="a path in a folder you may write to, with room for the weights: unisono checkpoint export RUN PATH",
        ) from error
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def _refuse_other_contents(target: Path, given: Path) -> None:
    """Raise ``CheckpointError`` if the folder has other contents than an earlier export."""
    if not os.path.lexists(target):
        return
    ours = {_WEIGHTS, _INDEX, _CONFIG, _GENERATION, _TASK, _CARD, _ADAPTER_WEIGHTS, _ADAPTER_CONFIG, *_TOKENIZER_FILES}
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


def weights_bytes(model: nn.Module) -> int:
    """Bytes of the ``model.safetensors`` that ``export`` writes of the model, if it is one file."""
    tensors: dict[str, Tensor] = model.state_dict(keep_vars=True)
    named, tied = _exported(model)
    views = [(entry.key, entry.transform(tensors[entry.name].detach())) for entry in named]
    layout = [(key, view.dtype, tuple(view.shape)) for key, view in views]
    return len(build_header(layout, {**_FORMAT, **tied})[0]) + sum(view.nbytes for _, view in views)


def write_weights(
    model: nn.Module, folder: Path, *, read: Callable[[str, Tensor], None] | None, max_shard_bytes: int
) -> None:
    """Write the model's tensors as safetensors files in ``folder``, with one tensor in memory at a time."""
    tensors: dict[str, Tensor] = model.state_dict(keep_vars=True)
    named, tied = _exported(model)
    # views, of which only shapes and dtypes are read
    views = {entry.key: entry.transform(tensors[entry.name].detach()) for entry in named}
    adapter = _is_adapter(model)
    files = _split_into_files(named, views, sys.maxsize if adapter else max_shard_bytes)
    one = len(files) == 1
    only = _ADAPTER_WEIGHTS if adapter else _WEIGHTS
    names = [only if one else f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    loaded: tuple[str, Tensor] = "", torch.empty(0)  # several entries in a row may be of one tensor, such as experts
    for file_name, members in zip(names, files, strict=True):
        # wide elements first, in the order of safetensors
        ordered = sorted(members, key=lambda entry: -views[entry.key].dtype.itemsize)
        layout = [(entry.key, views[entry.key].dtype, tuple(views[entry.key].shape)) for entry in ordered]
        header, _ = build_header(layout, {**_FORMAT, **tied})
        with open(folder / file_name, "wb", opener=opener) as file:
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
        _write_json(folder / _INDEX, index)


def _values(name: str, tensor: Tensor, read: Callable[[str, Tensor], None] | None) -> Tensor:
    if read is None:
        return tensor.detach().cpu()
    values = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
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


def exported_names(model: nn.Module) -> list[ExportedTensor]:
    """The tensors of an export. Raises CheckpointError if no class of transformers computes the same as the model."""
    return _exported(model)[0]


def exported_config(model: nn.Module) -> dict[str, Any]:
    """``config.json`` of an export without lengths and tokens; empty for a model of no class of transformers."""
    return _configs(model, 0, None).get(_CONFIG, {})


def _exported(model: nn.Module) -> tuple[list[ExportedTensor], dict[str, str]]:
    if isinstance(model, GPT):
        return list(compressed_tensors(model, list(gpt.gpt_tensors(model)))), {}
    if isinstance(model, BERT):
        return list(compressed_tensors(model, bert_tensors(model))), {}
    if _is_adapter(model):
        return _adapter_names(model), {}
    named, tied = _own_names(model)
    return (list(compressed_tensors(model, named)) if _is_of_transformers(model) else named), tied


def _configs(model: nn.Module, max_length: int, end_of_document: int | None) -> dict[str, dict[str, Any]]:
    """The contents of the configuration files, by file name."""
    if isinstance(model, GPT):
        config = gpt.gpt_config(model, max_length, end_of_document)
        return {_CONFIG: config | quantization_config(model, _exported(model)[0], gpt.TIED)}
    if isinstance(model, BERT):
        return {_CONFIG: bert_config(model) | quantization_config(model, _exported(model)[0], TIED)}
    if _is_adapter(model):
        adapter: Any = cast(Any, model).peft_config[_active_adapter(model)]
        content: dict[str, Any] = {name: _plain(value) for name, value in adapter.to_dict().items()}
        return {_ADAPTER_CONFIG: content | {"inference_mode": True}}
    if not _is_of_transformers(model):
        return {}
    theirs = cast(Any, model)
    config: dict[str, Any] = json.loads(theirs.config.to_json_string(use_diff=True))
    named, tied = _exported(model)
    outputs = [name.removesuffix(".weight") for name in tied]
    config |= {"architectures": [_class_name(model)], **quantization_config(model, named, outputs)}
    configs = {_CONFIG: config}
    if theirs.can_generate() and theirs.generation_config is not None:
        configs[_GENERATION] = json.loads(theirs.generation_config.to_json_string(use_diff=True))
    return configs


def _labels(classes: Sequence[str]) -> dict[str, Any]:
    """Names of the classes as a configuration of transformers has them."""
    return {
        "id2label": {str(number): name for number, name in enumerate(classes)},
        "label2id": {name: number for number, name in enumerate(classes)},
    }


def _class_name(model: nn.Module) -> str:
    """The name of the model's class of transformers, also after FSDP2 has made a subclass of it."""
    return next(
        kind.__name__
        for kind in type(model).__mro__
        if "fully_shard" not in kind.__module__ and not kind.__name__.startswith("FSDP")
    )


def _is_of_transformers(model: nn.Module) -> bool:
    return any(
        (kind.__module__, kind.__name__) == ("transformers.modeling_utils", "PreTrainedModel")
        for kind in type(model).__mro__
    )


def _is_adapter(model: nn.Module) -> bool:
    return any((kind.__module__, kind.__name__) == ("peft.peft_model", "PeftModel") for kind in type(model).__mro__)


def _active_adapter(model: nn.Module) -> str:
    return str(cast(Any, model).active_adapter)


def _plain(value: Any) -> Any:
    """``value`` as JSON has it: the settings of peft have sets, enumerations and nested configurations."""
    if isinstance(value, set | frozenset | tuple):
        members = cast("Iterable[Any]", value)
        return sorted(members) if isinstance(value, set | frozenset) else list(members)
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in cast("dict[Any, Any]", value).items()}
    return value


def _copy_tokenizer(tokenizer: Path, folder: Path) -> None:
    """Copy a tokenizer.json, under whatever name, and the other files of its folder; or those of a folder."""
    if not tokenizer.is_dir():
        write_atomically(folder / _TOKENIZER, tokenizer.read_bytes())
        if tokenizer.name != _TOKENIZER:
            return  # the other files of its folder are of another tokenizer
    source = tokenizer if tokenizer.is_dir() else tokenizer.parent
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            write_atomically(folder / name, (source / name).read_bytes())


def _adapter_names(model: nn.Module) -> list[ExportedTensor]:
    """The tensors of the active adapter of a ``PeftModel``, under peft's names; not the tables of the base model."""
    from peft import get_peft_model_state_dict

    state = cast("dict[str, Tensor]", model.state_dict(keep_vars=True))
    names = {id(tensor): name for name, tensor in reversed(state.items())}
    chosen: dict[str, Tensor] = get_peft_model_state_dict(
        cast(Any, model), state_dict=state, adapter_name=_active_adapter(model), save_embedding_layers=False
    )
    return [ExportedTensor(key, names[id(tensor)]) for key, tensor in chosen.items()]


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


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with open(path, "w", encoding="utf-8", opener=opener) as file:
        file.write(json.dumps(content, indent=2) + "\n")
