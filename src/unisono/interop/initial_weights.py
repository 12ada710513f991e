"""Initial values of a model from weights that exist: a run, a checkpoint, a Hugging Face folder, a safetensors file.

A tensor has the name of the model's, or the one under which ``interop.huggingface.export`` writes it. Safetensors files are
mapped into memory, so that a model that is built without its values (``parallel.deferred_init``) takes them one tensor at a time;
tensors of a checkpoint are read whole.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor, nn

from unisono.checkpoint import list_checkpoints, open_checkpoint, verify
from unisono.checkpoint.folder import is_committed
from unisono.checkpoint.safetensors_format import header_length, parse_header
from unisono.errors import CheckpointError, UnisonoError
from unisono.interop.huggingface import exported_config, exported_names
from unisono.parallel.sharding import GlobalParameterSpec
from unisono.sanitize import listed, quoted
from unisono.storage.files import look_up, open_regular, os_reason
from unisono.storage.limits import read_json
from unisono.storage.run_folder import CHECKPOINTS_FOLDER, RUN_FILE

_WEIGHTS, _INDEX, _CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
_PREFIXES: Final = ("bert.", "model.")  # which the files of a model without a head have not
# of config.json what does not change the outputs, or is compared as shapes
_NOT_COMPARED: Final = frozenset(
    {"architectures", "torch_dtype", "dtype", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"}
    | {"num_labels", "classifier_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", "tie_word_embeddings"}
)
_SHOWN: Final = 300  # characters of a list of names
_LOG: Final = logging.getLogger("unisono")


def load_weights(model: nn.Module, source: str, *, new_head: bool) -> None:
    """Set the values of a model's parameters and buffers from ``source``.

    Args:
        model: The model, with values, or while it is built without them.
        source: The folder of a run (its newest checkpoint), of a checkpoint, or in Hugging Face's layout; or a safetensors file.
        new_head: Whether tensors whose names begin with ``head`` keep their values where the source has none of their shape, as
            for other classes.

    Raises:
        CheckpointError: There are no weights, they are damaged, or of another model.
    """
    path, fault = look_up(source)
    if fault or not path.exists():
        raise _refused(
            source, fault or "there is no such file or folder", "the weights are read before training starts"
        )
    try:
        stored = _stored(path)
        if path.is_dir() and (path / _CONFIG).is_file():
            _compare_configs(model, path, source)
    except (OSError, ValueError) as error:
        reason = os_reason(error) if isinstance(error, OSError) else str(error)
        raise _refused(source, reason, "weights are whole safetensors files, or a committed checkpoint") from error
    first = GlobalParameterSpec.from_model(model).first_names
    tensors = {
        name: tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if first.get(name, name) == name  # a tied parameter has one set of values
    }
    values = _matched(model, tensors, stored)
    wrong = {
        name: "is missing" if name not in values else f"has shape {list(values[name].shape)}, not {list(tensor.shape)}"
        for name, tensor in tensors.items()
        if name not in values or values[name].shape != tensor.shape
    }
    kept = [name for name in wrong if new_head and name.startswith("head")]
    for name in kept:
        del wrong[name]
    if wrong:
        name, reason = next(iter(wrong.items()))
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise _refused(
            source,
            f"{quoted(name)} {reason}{more}; it has {listed(sorted(stored), _SHOWN)}",
            f"it has every tensor of {type(model).__name__}, under its name here or in an export",
        )
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name not in kept:
                tensor.detach().copy_(values[name])
    if kept:
        _LOG.info("%s has no weights for %s: they are new", source, listed(kept, _SHOWN))


def _refused(source: str, reason: str, rule: str) -> CheckpointError:
    return CheckpointError(
        given=f"model.weights {quoted(source)}: {reason}",
        rule=rule,
        consequence="nothing was started",
        nearest="the folder of a run, or what unisono checkpoint export or import wrote of a model with these settings",
    )


def _stored(path: Path) -> dict[str, Callable[[], Tensor]]:
    """How to read each tensor of the source, by its name there. Raises OSError, ValueError or CheckpointError."""
    if path.is_file():
        return _of_file(path)
    if (path / RUN_FILE).is_file():
        committed = [e.path for e in list_checkpoints(path / CHECKPOINTS_FOLDER) if e.state == "committed"]
        if not committed:
            raise ValueError("the run has no committed checkpoint")
        return _of_checkpoint(max(committed))
    if is_committed(path):
        return _of_checkpoint(path)
    if (path / _WEIGHTS).is_file():
        return _of_file(path / _WEIGHTS)
    if not (path / _INDEX).is_file():
        raise ValueError(f"the folder has neither {RUN_FILE} nor {_WEIGHTS} nor {_INDEX}")
    index = read_json(path / _INDEX)
    names = cast("dict[str, Any]", index).get("weight_map") if isinstance(index, dict) else None
    files = set(cast("dict[str, Any]", names).values()) if isinstance(names, dict) else set[Any]()
    if not files or not all(isinstance(name, str) and Path(name).name == name for name in files):
        raise ValueError(f"{_INDEX} has no weight_map with the names of files in the folder")
    return {name: load for file in sorted(files) for name, load in _of_file(path / file).items()}


def _of_checkpoint(path: Path) -> dict[str, Callable[[], Tensor]]:
    if problems := verify(path):
        raise CheckpointError(*problems)
    reader = open_checkpoint(path)
    names = set(reader.names())

    def load(name: str) -> Tensor:
        spec = reader.spec(name)
        out = _of_array(np.empty(spec.shape, _raw(spec.dtype)), spec.dtype)
        reader.read_into(name, out)
        return out

    # averages, where there are any, are what the run is evaluated with
    chosen = {
        name.partition("/")[2]: name for section in ("model/", "ema/") for name in names if name.startswith(section)
    }
    return {inner: partial(load, name) for inner, name in sorted(chosen.items())}


def _of_file(path: Path) -> dict[str, Callable[[], Tensor]]:
    with open_regular(path) as file:
        size = path.stat().st_size
        length = header_length(file.read(8), size)
        extents = parse_header(file.read(length), size)

    def load(name: str) -> Tensor:
        extent = extents[name]
        if extent.begin == extent.end:
            return _of_array(np.empty(extent.shape, _raw(extent.dtype)), extent.dtype)
        array = np.memmap(path, _raw(extent.dtype), mode="c", offset=extent.begin, shape=extent.shape or (1,))
        return _of_array(array.reshape(extent.shape), extent.dtype)

    return {name: partial(load, name) for name in extents}


def _raw(dtype: torch.dtype) -> np.dtype[Any]:
    return np.dtype(f"u{dtype.itemsize}") if dtype.itemsize <= 8 else np.dtype("c16")


def _of_array(array: Any, dtype: torch.dtype) -> Tensor:
    # no operation here makes a tensor of its own: while a model is built without its values, that would have none either
    return torch.from_numpy(array).view(dtype)


def _matched(
    model: nn.Module, tensors: Mapping[str, Tensor], stored: Mapping[str, Callable[[], Tensor]]
) -> dict[str, Tensor]:
    """The stored values of the model's tensors, by the model's names, as far as there are any."""
    if sum(name in stored for name in tensors) > len(tensors) // 2:
        return {name: stored[name]() for name in tensors if name in stored}
    try:
        exported = exported_names(model)
    except UnisonoError:  # no class of transformers computes the same
        exported = []
    found: dict[str, Tensor] = {}
    rows: dict[str, set[int]] = {}
    for entry in exported:
        short = next((entry.key.removeprefix(prefix) for prefix in _PREFIXES if entry.key.startswith(prefix)), "")
        load = stored.get(entry.key) or stored.get(short)
        if load is None or entry.name not in tensors:
            continue
        tensor, value = tensors[entry.name].detach(), load()
        if entry.transform(tensor) is tensor:
            found[entry.name] = value
            continue
        shape, raw = tensor.shape, _raw(value.dtype)
        # the rows of the model's tensor that the exported one has, in its order
        numbers = _of_array(np.arange(shape[0]).reshape(-1, *(1,) * (len(shape) - 1)), torch.int64)
        places = entry.transform(numbers.expand(shape))
        if places.shape != value.shape:
            found[entry.name] = value  # whose shape is reported
            continue
        whole = found.setdefault(entry.name, _of_array(np.empty(shape, raw), value.dtype))
        one = places.numel() < shape.numel()  # such as an expert
        chosen = places.reshape(1 if one else shape[0], -1)[:, 0].tolist()
        whole.view(_integers(value.dtype)).numpy()[chosen] = (
            value.contiguous().view(_integers(value.dtype)).numpy().reshape(len(chosen), *shape[1:])
        )
        rows.setdefault(entry.name, set()).update(chosen)
    for name, filled in rows.items():
        if len(filled) < tensors[name].shape[0]:
            del found[name]
    return found


def _integers(dtype: torch.dtype) -> torch.dtype:
    return {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}.get(dtype.itemsize, torch.uint64)


def _compare_configs(model: nn.Module, path: Path, source: str) -> None:
    """Refuse a folder whose ``config.json`` describes another function than the model computes."""
    given = read_json(path / _CONFIG)
    try:
        own = exported_config(model)
    except UnisonoError:
        return
    if not own or not isinstance(given, dict):
        return
    theirs = cast("dict[str, Any]", given)
    rope = theirs.get("rope_parameters") or theirs.get("rope_scaling")
    nested: dict[str, Any] = cast("dict[str, Any]", rope) if isinstance(rope, dict) else {}
    if str(nested.get("rope_type", nested.get("type", "default"))) != "default":
        raise _refused(
            source, f"its rotary positions are scaled ({json.dumps(nested)[:_SHOWN]})", "positions are not scaled"
        )
    if theirs.get("quantization_config"):
        raise _refused(source, "its weights are quantized", "a model starts with floating-point weights")
    theirs = {**nested, **theirs}
    other = [
        f"{name} {theirs[name]!r}, here {value!r}"
        for name, value in own.items()
        if name not in _NOT_COMPARED and theirs.get(name) is not None and theirs[name] != value
    ]
    if other:
        raise _refused(
            source,
            f"its {_CONFIG} has {listed(other, _SHOWN)}",
            "the settings of section model are those of the weights: else they would compute something else",
        )
