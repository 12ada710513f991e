"""The format of a checkpoint's metadata: ``manifest.json`` describes all files and tensors, ``COMMIT`` seals it.

Both are plain JSON, decoded into typed records; a newer schema is an error. The xxh3-128 digests detect accidental
damage, not tampering.
"""

from __future__ import annotations

import math
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib import metadata
from typing import Any, Final, cast

import msgspec
import torch
import xxhash

from unisono.checkpoint.coverage_check import first_coverage_error
from unisono.checkpoint.safetensors_format import dtype_from_code
from unisono.errors import CheckpointError
from unisono.storage.limits import MAX_PIECE_DIMS, decode_json, num_elements

SCHEMA = 1
MANIFEST = "manifest.json"
COMMIT = "COMMIT"
_NON_FINITE: Final = "float"

_SHARD = re.compile(r"shard-(\d{5,})-of-(\d{5,})\.safetensors")


def shard_name(rank: int, world_size: int) -> str:
    """The file name of a rank's shard, such as ``shard-00000-of-00002.safetensors``."""
    return f"shard-{rank:05d}-of-{world_size:05d}.safetensors"


def digest(data: bytes) -> str:
    """xxh3-128 as 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """Size and xxh3-128 digest of a shard file."""

    bytes: int
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PieceEntry:
    """A block of a tensor: ``key`` in ``file`` holds the elements of ``shape`` at ``offset``."""

    file: str
    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """A tensor of the training state: global shape, dtype by its safetensors name, and its pieces."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[PieceEntry, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """All metadata of one checkpoint. ``world`` is the number of ranks. ``score``: lower is better, None if unknown."""

    schema: int = SCHEMA
    step: int
    world: int
    attempt: int
    score: float | None = None
    versions: dict[str, str] = field(default_factory=dict[str, str])
    meta: dict[str, Any] = field(default_factory=dict[str, Any])
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]

    @property
    def bytes(self) -> int:
        """Size of all shard files."""
        return sum(entry.bytes for entry in self.files.values())


def versions() -> dict[str, str]:
    """The versions of Python, torch and unisono that write the checkpoint."""
    try:
        own = metadata.version("unisono")
    except metadata.PackageNotFoundError:
        own = "source tree"
    return {"python": platform.python_version(), "torch": str(torch.__version__), "unisono": own}


def encode(manifest: Manifest) -> bytes:
    """The bytes of ``manifest.json``, one line for each file and tensor, for readability."""
    lines: list[str] = []
    for name in (entry.name for entry in fields(manifest)):
        value: Any = getattr(manifest, name)
        if name in ("files", "tensors"):
            entries = (f"  {_json(key)}: {_json(entry)}" for key, entry in value.items())
            lines.append(f" {_json(name)}: {{\n" + ",\n".join(entries) + "\n }")
        else:
            lines.append(f" {_json(name)}: {_json(value)}")
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def json_meta(value: Any) -> Any:
    """``value`` with NaN and infinities, which JSON does not have, as ``{"float": "nan"}``."""
    if isinstance(value, float) and not math.isfinite(value):
        return {_NON_FINITE: str(float(value))}
    if isinstance(value, Mapping):
        return {key: json_meta(entry) for key, entry in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [json_meta(entry) for entry in cast("list[Any]", value)]
    return value


def meta_of_json(value: Any) -> Any:
    """The inverse of ``json_meta``, apart from the kind of mappings and sequences."""
    if isinstance(value, dict):
        entries = cast("dict[str, Any]", value)
        text = entries.get(_NON_FINITE)
        if len(entries) == 1 and text in ("nan", "inf", "-inf"):
            return float(text)
        return {key: meta_of_json(entry) for key, entry in entries.items()}
    return [meta_of_json(entry) for entry in cast("list[Any]", value)] if isinstance(value, list) else value


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def encode_commit_marker(manifest: bytes, step: int) -> bytes:
    """The bytes of ``COMMIT``, a function of the manifest's bytes: any other content is damage."""
    return msgspec.json.encode({"schema": SCHEMA, "step": step, "manifest": digest(manifest)}) + b"\n"


def decode(data: bytes) -> Manifest:
    """Decode and check a manifest. Raises ValueError if it is damaged, CheckpointError if a newer unisono wrote it."""
    manifest: Manifest = decode_json(data, _decode_known_schema)
    for name in manifest.files:
        if not _SHARD.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a shard file")
    for name, tensor in manifest.tensors.items():
        fault = _fault(tensor, manifest)
        if fault:
            raise ValueError(f"tensor {name!r}: {fault}")
    return manifest


def _decode_known_schema(data: bytes) -> Manifest:
    schema = msgspec.json.decode(data, type=dict[str, msgspec.Raw]).get("schema")
    number = msgspec.json.decode(schema, type=int) if schema is not None else 0
    if number > SCHEMA:
        raise CheckpointError(
            given=f"a checkpoint of schema {number}",
            rule=f"this unisono reads schema {SCHEMA}",
            consequence="it was not loaded, and left as it is",
            nearest="install the unisono that wrote it, or a newer one",
        )
    return msgspec.json.decode(data, type=Manifest)


def _fault(tensor: TensorEntry, manifest: Manifest) -> str:
    try:
        num_elements(tensor.shape, dtype_from_code(tensor.dtype).itemsize)
    except ValueError as error:
        return str(error)
    for piece in tensor.pieces:
        if piece.file not in manifest.files:
            return f"its file {piece.file!r} is not listed"
    return pieces_fault(tensor)


def pieces_fault(tensor: TensorEntry) -> str:
    """The fault of a tensor's pieces, or an empty string if they hold each of its elements exactly once.

    A tensor without elements has one piece too.
    """
    shape, count = tensor.shape, len(tensor.pieces)
    for piece in tensor.pieces:
        if not len(piece.offset) == len(piece.shape) == len(shape):
            return f"piece {piece.key!r} of {piece.file} has another number of dims than {list(shape)}"
        for offset, size, extent in zip(piece.offset, piece.shape, shape, strict=True):
            if offset < 0 or size < 0 or offset + size > extent:
                return (
                    f"piece {piece.key!r} of {piece.file}, from {list(piece.offset)} on, lies outside of {list(shape)}"
                )
    if count == 1 and (tensor.pieces[0].shape == shape or 0 in shape):
        return ""
    wrong = f"its {count} pieces do not make up {list(shape)}"
    if count == 0 or 0 in shape:
        return wrong
    if len(shape) > MAX_PIECE_DIMS:
        return f"{wrong}: a tensor in pieces has at most {MAX_PIECE_DIMS} dims"
    error = first_coverage_error(shape, ((piece.offset, piece.shape) for piece in tensor.pieces))
    return f"{wrong}: element {error[0]} is in {error[1] or 'none'} of them" if error else ""
