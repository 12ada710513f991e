"""``CheckpointReader``: reads the manifest on opening, and each tensor on request, assembled from all ranks' pieces.

Only JSON and raw bytes are read, links are never followed, and every size is checked before memory is allocated for
it. Digests are checked by ``integrity``, not here.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from unisono.checkpoint.folder import step_of
from unisono.checkpoint.host_snapshot import BLOCK_BYTES, Bytes
from unisono.checkpoint.manifest import (
    COMMIT,
    MANIFEST,
    FileEntry,
    Manifest,
    PieceEntry,
    TensorEntry,
    decode,
    encode_commit_marker,
    meta_of_json,
)
from unisono.checkpoint.safetensors_format import TensorExtent, dtype_from_code, header_length, num_bytes, parse_header
from unisono.errors import CheckpointError, nearest_name
from unisono.storage.files import os_reason
from unisono.storage.limits import MAX_JSON_BYTES, read_open


class CheckpointDamage(ValueError):
    """The files of a checkpoint contradict each other; the message says how."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """Global shape and dtype of a saved tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointReader:
    """A committed checkpoint. Keeps no file open; tensors are read on request."""

    path: Path
    manifest: Manifest
    _headers: dict[str, dict[str, TensorExtent]] = field(default_factory=dict[str, dict[str, TensorExtent]])

    @property
    def step(self) -> int:
        """The number of finished optimizer updates."""
        return self.manifest.step

    @property
    def world_size(self) -> int:
        """The number of ranks that saved it."""
        return self.manifest.world

    @property
    def meta(self) -> dict[str, Any]:
        """The metadata passed to ``Checkpointer.save``."""
        return meta_of_json(self.manifest.meta)

    def names(self) -> list[str]:
        """Names of all tensors, sorted."""
        return sorted(self.manifest.tensors)

    def spec(self, name: str) -> TensorSpec:
        """Shape and dtype of a tensor, without reading it. Raises CheckpointError for an unknown name."""
        entry = self._entry(name)
        return TensorSpec(shape=entry.shape, dtype=dtype_from_code(entry.dtype))

    def tensor(self, name: str) -> Tensor:
        """Read a whole tensor into host memory. Raises CheckpointError: unknown name, file damaged or missing."""
        spec = self.spec(name)
        out = torch.empty(spec.shape, dtype=spec.dtype, device="cpu")
        self.read_into(name, out)
        return out

    def read_into(self, name: str, out: Tensor) -> None:
        """Read a tensor into ``out``, which has its shape and dtype, on any device, without a second full copy on the host.

        Raises CheckpointError: unknown name, other shape or dtype, file damaged or missing.
        """
        spec = self.spec(name)
        if (tuple(out.shape), out.dtype) != (spec.shape, spec.dtype):
            raise CheckpointError(
                given=f"{name!r} is {list(spec.shape)} {spec.dtype} in {self.path}, "
                f"and {list(out.shape)} {out.dtype} here",
                rule="a tensor is loaded into one of the same shape and dtype",
                consequence="it was not loaded",
                nearest="use the configuration the checkpoint was saved with",
            )
        self._read_box(name, out, [0] * out.dim())

    def read_part(self, name: str, out: Tensor, offset: Sequence[int]) -> None:
        """Read the block at ``offset`` of a tensor into ``out``, which has its dtype, on any device.

        Only the needed rows of each piece are read, directly into ``out`` if it has the same layout as the file. An
        empty ``out`` reads nothing, whatever the offset.

        Raises CheckpointError: unknown name, other dtype, a block outside of the tensor, file damaged or missing.
        """
        spec = self.spec(name)
        if out.dtype != spec.dtype:
            raise CheckpointError(
                given=f"{name!r} is {spec.dtype} in {self.path}, and {out.dtype} here",
                rule="a part is loaded into a tensor of the same dtype",
                consequence="it was not loaded",
                nearest="use the configuration the checkpoint was saved with",
            )
        if out.numel() and not (
            len(offset) == out.dim() == len(spec.shape)
            and all(0 <= at <= n - m for at, m, n in zip(offset, out.shape, spec.shape, strict=True))
        ):
            raise CheckpointError(
                given=f"{name!r} is {list(spec.shape)} in {self.path}, and {list(out.shape)} from {list(offset)} on "
                "were asked for",
                rule="a part lies inside of the saved tensor and has as many dims",
                consequence="it was not loaded",
                nearest="use the configuration the checkpoint was saved with, or other offsets",
            )
        self._read_box(name, out, offset)

    def _entry(self, name: str) -> TensorEntry:
        entry = self.manifest.tensors.get(name)
        if entry is None:
            raise CheckpointError(
                given=f"the checkpoint {self.path} has no tensor {name!r}",
                rule="only what was saved can be loaded",
                consequence="it was not loaded",
                nearest=nearest_name(name, self.manifest.tensors),
            )
        return entry

    def _read_box(self, name: str, out: Tensor, offset: Sequence[int]) -> None:
        """Read the block at ``offset``, which lies inside the tensor, into ``out``."""
        if not out.numel():
            return
        out = out.detach()
        if not out.dim():
            out, offset = out.unsqueeze(0), (0,)
        try:
            for piece in self._entry(name).pieces:
                self._read_piece(piece, out, offset)
        except (OSError, CheckpointDamage) as error:
            raise unreadable_error(self.path, error) from error

    def _read_piece(self, piece: PieceEntry, out: Tensor, offset: Sequence[int]) -> None:
        """Read the intersection of ``piece`` with the block at ``offset`` into ``out``. A scalar counts as one row."""
        origin, shape = piece.offset or (0,), piece.shape or (1,)
        boxes = list(zip(origin, shape, offset, out.shape, strict=True))
        begins = [max(mine, wanted) for mine, _, wanted, _ in boxes]
        ends = [min(mine + size, wanted + extent) for mine, size, wanted, extent in boxes]
        if any(begin >= end for begin, end in zip(begins, ends, strict=True)):
            return
        window = out
        for dim, (begin, end, zero) in enumerate(zip(begins, ends, offset, strict=True)):
            window = window.narrow(dim, begin - zero, end - begin)
        row_bytes = num_bytes(out.dtype, shape[1:])
        position = self._begin(piece, out.dtype) + (begins[0] - origin[0]) * row_bytes
        path = self.path / piece.file
        if window.shape[1:] == shape[1:] and _has_file_layout(window):
            _read_exactly(path, position, window)
            return
        inside = [slice(begin - zero, end - zero) for begin, end, zero in zip(begins, ends, origin, strict=True)]
        rows = max(1, BLOCK_BYTES // row_bytes)
        buffer = torch.empty((min(rows, len(window)), *shape[1:]), dtype=out.dtype, device="cpu")
        for target in window.split(rows):
            block = buffer[: len(target)]
            _read_exactly(path, position, block)
            target.copy_(block[(slice(None), *inside[1:])])
            position += len(target) * row_bytes

    def _begin(self, piece: PieceEntry, dtype: torch.dtype) -> int:
        """The byte position of a piece in its file. Raises CheckpointDamage if header and manifest differ, or OSError."""
        extents = self._headers.get(piece.file)
        if extents is None:
            extents = read_header(self.path, piece.file, self.manifest.files[piece.file])
            self._headers[piece.file] = extents
        if not holds_piece(extents, piece, dtype):
            raise CheckpointDamage(f"{piece.file} does not hold {piece.key!r} as {MANIFEST} says")
        return extents[piece.key].begin


def open_checkpoint(path: Path) -> CheckpointReader:
    """Open a committed checkpoint; checks its seal and the sizes of its files.

    Raises CheckpointError: not a checkpoint, not committed, damaged, or of a newer schema.
    """
    return CheckpointReader(path=path, manifest=read_manifest(path))


def read_manifest(path: Path) -> Manifest:
    """The manifest of a committed checkpoint. Checks and raises as ``open_checkpoint``."""
    try:
        return sealed_manifest(path)
    except (OSError, CheckpointDamage) as error:
        raise unreadable_error(path, error) from error


def sealed_manifest(path: Path) -> Manifest:
    """The manifest under ``path``, after checking its seal and the sizes of all files.

    Raises CheckpointDamage or OSError if a check fails, CheckpointError for a newer schema.
    """
    if path.is_symlink() or step_of(path.name) is None:
        given = "a link" if path.is_symlink() else repr(path.name)
        raise CheckpointDamage(f"{given} is no checkpoint; those are directories called like step-00000120")
    mark = _small_file(path / COMMIT)
    data = _small_file(path / MANIFEST)
    try:
        manifest = decode(data)
    except ValueError as error:
        raise CheckpointDamage(f"{MANIFEST}: {error}") from error
    if mark != encode_commit_marker(data, manifest.step):
        raise CheckpointDamage(f"{COMMIT} does not seal this {MANIFEST}")
    if step_of(path.name) != manifest.step:
        raise CheckpointDamage(f"{MANIFEST} is of step {manifest.step}")
    for name, entry in manifest.files.items():
        status = (path / name).lstat()
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointDamage(f"{name} is no regular file")
        if status.st_size != entry.bytes:
            raise CheckpointDamage(f"{name} has {status.st_size} bytes instead of {entry.bytes}")
    files_bytes = manifest.bytes
    for name, tensor in manifest.tensors.items():  # before memory is allocated for it
        if (size := num_bytes(dtype_from_code(tensor.dtype), tensor.shape)) > files_bytes:
            raise CheckpointDamage(
                f"tensor {name!r}: its {size:,} bytes are more than the {files_bytes:,} of all files"
            )
    return manifest


def read_header(path: Path, name: str, entry: FileEntry) -> dict[str, TensorExtent]:
    """The tensors of a shard file. Raises CheckpointDamage or OSError."""
    fd = _open(path / name)
    try:
        length = header_length(os.pread(fd, 8, 0), entry.bytes)
        return parse_header(os.pread(fd, length, 8), entry.bytes)
    except ValueError as error:
        raise CheckpointDamage(f"{name}: {error}") from error
    finally:
        os.close(fd)


def holds_piece(extents: Mapping[str, TensorExtent], piece: PieceEntry, dtype: torch.dtype) -> bool:
    """Whether a file with these tensors holds ``piece`` with its shape and dtype."""
    extent = extents.get(piece.key)
    return extent is not None and (extent.shape, extent.dtype) == (piece.shape, dtype)


def unreadable_error(path: Path, error: OSError | CheckpointDamage) -> CheckpointError:
    """The error for a checkpoint that cannot be loaded."""
    return CheckpointError(
        given=f"{path}: {damage_text(error)}",
        rule="a checkpoint is loaded only if it is committed and whole",
        consequence="nothing was loaded from it",
        nearest="'unisono checkpoint ls' shows what there is; resume = \"auto\" takes the newest valid one",
    )


def damage_text(error: OSError | CheckpointDamage) -> str:
    """The damage in one line, with the file's name but not its folder."""
    if isinstance(error, CheckpointDamage):
        return str(error)
    name = os.path.basename(os.fsdecode(error.filename)) if error.filename else "a file"
    if error.errno == errno.ENOENT:
        return f"{name} is missing"
    if error.errno == errno.ELOOP:
        return f"{name} is a link"
    return f"{name}: {os_reason(error)}"


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)


def _small_file(path: Path) -> bytes:
    fd = _open(path)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_JSON_BYTES:
            raise CheckpointDamage(f"{path.name} is no regular file of at most {MAX_JSON_BYTES} bytes")
        with open(fd, "rb", closefd=False) as file:
            return read_open(file, MAX_JSON_BYTES)
    finally:
        os.close(fd)


def _has_file_layout(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _read_exactly(path: Path, position: int, target: Tensor) -> None:
    """Fill the contiguous host tensor ``target`` from the file."""
    fd = _open(path)
    try:
        view = cast(Bytes, target.reshape(-1).view(torch.uint8).numpy()).data
        while view:
            count = os.preadv(fd, [view], position)
            if count == 0:
                raise CheckpointDamage(f"{path.name} ends at byte {position}")
            view, position = view[count:], position + count
    finally:
        os.close(fd)
