"""The full state of chunks as bytes, and as tensors of a checkpoint.

A state is JSON facts and named tensors, as ``ChunkStore.state`` returns them. Its bytes are a safetensors file with the
JSON in its metadata: one format for snapshots, replicas and checkpoints. ``merge_chunks`` names the tensors as an
optimizer's checkpoint does (``optim/<state>/<key>``), so a run can continue with other servers, or without.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from unisono.kvstore.server.placement import ChunkPlacement
from unisono.kvstore.wire.frame import protocol_error

_LENGTH_BYTES = 8


def encode_chunk_state(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    return save(dict(tensors), metadata={"unisono": json.dumps(facts)})


def decode_chunk_state(data: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The arguments of ``encode_chunk_state``. Raises CommError for invalid bytes."""
    try:
        length = int.from_bytes(data[:_LENGTH_BYTES], "little")
        tensors = load(data)  # checks the length and every offset against the bytes there are
        header = json.loads(data[_LENGTH_BYTES : _LENGTH_BYTES + length])
        return json.loads(header["__metadata__"]["unisono"]), tensors
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        given = f"a state of {len(data)} bytes that cannot be read: {error!r}"
        raise protocol_error(given, "it is a safetensors file with a JSON text in its metadata") from error


def merge_chunks(placement: ChunkPlacement, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The states of all chunks of all servers as whole tensors: ``<key>`` and ``optim/<state>/<key>``, sorted.

    A key's step count is the largest of its chunks'; they differ where a push of some was refused.
    """
    parts: dict[tuple[str, str], list[Tensor]] = {}
    for name in sorted(tensors, key=lambda name: int(name.partition("/")[0])):
        number, _, state = name.partition("/")
        parts.setdefault((state, placement.chunks[int(number)].key), []).append(tensors[name])
    merged: dict[str, Tensor] = {}
    for (state, key), values in parts.items():
        name = key if state == "value" else f"optim/{state}/{key}"
        if state != "step":
            merged[name] = torch.cat(values).view(placement.shapes[key])
        else:
            merged[name] = torch.stack(values).amax()
    return dict(sorted(merged.items()))


def split_into_chunks(placement: ChunkPlacement, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of ``merge_chunks``: ``<number>/value`` and ``<number>/<state>`` for every chunk."""
    chunks: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        _, state, key = name.split("/", 2) if name.startswith("optim/") else ("", "value", name)
        for chunk in placement.chunks_of(key):
            part = tensor.flatten()[chunk.start : chunk.start + chunk.num_elements] if state != "step" else tensor
            chunks[f"{chunk.number}/{state}"] = part.clone()
    return chunks
