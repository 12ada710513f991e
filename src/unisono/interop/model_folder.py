"""Weights of other frameworks as a folder that transformers loads: ``config.json`` and ``model.safetensors``."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from unisono.interop.name_map import NameMap, Renamed, find_name_map, rename
from unisono.interop.resnet_names import RESNET_MAPS
from unisono.interop.stored_tensor import StoredTensor
from unisono.interop.transformer_names import TRANSFORMER_MAPS
from unisono.interop.weight_file import write_weights_file
from unisono.storage.directory import commit_directory
from unisono.storage.files import FOLDER_MODE

NAME_MAPS: Final[tuple[NameMap, ...]] = RESNET_MAPS + TRANSFORMER_MAPS


def known_model(tensors: Mapping[str, StoredTensor]) -> NameMap | None:
    """The map of the model whose names a file has, if it is one that is known."""
    return next((name_map for name_map in NAME_MAPS if name_map.find(tensors) is not None), None)


def as_model(family: str, source: Path, tensors: Mapping[str, StoredTensor], settings: Mapping[str, str]) -> Renamed:
    """The weights of a file under the names of a class of transformers.

    Args:
        family: "resnet", "bert", "gpt2" or "llama"; with "auto" the names say which.
        source: The file, for errors.
        tensors: Its tensors by name.
        settings: What ``config.json`` needs beside the weights, as text.

    Raises:
        CheckpointError: The names or shapes are those of no such model.
        ConfigError: A setting is missing or wrong, or no class of transformers computes the same.
    """
    return rename(find_name_map(NAME_MAPS, family, source, tensors), source, tensors, settings)


def write_model_folder(folder: Path, model: Renamed) -> None:
    """Write a new folder, with one tensor in memory at a time. It appears whole or not at all.

    Raises:
        CheckpointError: A dtype is none of safetensors.
        OSError: The folder cannot be written.
    """
    unfinished = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    try:
        unfinished.mkdir(mode=FOLDER_MODE)
        layout = [(name, tensor.dtype, tensor.shape) for name, tensor in model.tensors.items()]
        write_weights_file(
            unfinished / "model.safetensors", "safetensors", layout, lambda name: model.tensors[name].load()
        )
        content = json.dumps(model.config, indent=2) + "\n"
        commit_directory(unfinished, folder, manifest=("config.json", content.encode()))
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
