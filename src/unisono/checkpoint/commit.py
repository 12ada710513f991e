"""The last part of a save, on rank 0: from shards in a temporary directory to one committed checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from unisono.checkpoint.folder import is_committed, remove, step_name
from unisono.checkpoint.manifest import (
    COMMIT,
    MANIFEST,
    FileEntry,
    Manifest,
    PieceEntry,
    TensorEntry,
    encode,
    encode_commit_marker,
    pieces_fault,
    shard_name,
)
from unisono.checkpoint.safetensors_format import dtype_code
from unisono.checkpoint.shard_assignment import ShardFileLayout, TensorSpecs
from unisono.errors import CheckpointError, Problem, UnisonoError
from unisono.observe.run_summary import format_gib
from unisono.storage.directory import commit_directory
from unisono.storage.files import FOLDER_MODE, os_reason

# Free space asked for, as a multiple of the checkpoint's size.
_HEADROOM = 1.2


def describe_pieces(layout: ShardFileLayout) -> list[list[Any]]:
    """The pieces of one shard as JSON: a list of ``[name, shape, dtype, key, offset, extent]``."""
    return [
        [piece.name, piece.shape, dtype_code(piece.dtype), piece.key, piece.offset, piece.extent]
        for piece in layout.pieces
    ]


def tensor_table(shards: Sequence[Sequence[Sequence[Any]]], sharded: TensorSpecs) -> dict[str, TensorEntry]:
    """Merge every rank's ``describe_pieces`` into the manifest's tensor table. ``sharded`` are the tensors sharded over ranks.

    Raises CheckpointError if ranks contradict each other or the blocks do not cover a tensor exactly once.
    """
    tensors: dict[str, tuple[tuple[int, ...], str, list[PieceEntry]]] = {
        name: (shape, str(dtype_code(dtype)), []) for name, (shape, dtype) in sharded.items()
    }
    for rank, pieces in enumerate(shards):
        file = shard_name(rank, len(shards))
        for name, shape, dtype, key, offset, extent in pieces:
            entry = PieceEntry(file=file, key=key, offset=tuple(offset), shape=tuple(extent))
            known_shape, known_dtype, parts = tensors.setdefault(name, (tuple(shape), dtype, []))
            again = (known_shape, known_dtype) != (tuple(shape), dtype) or entry.shape == known_shape
            if parts and again and name not in sharded:
                raise CheckpointError(
                    given=f"tensor {name!r} comes from {parts[0].file} and from {file}",
                    rule="a rank's own tensors have names no other rank uses",
                    consequence="the checkpoint was not written",
                    nearest=f"put the rank into the name, such as '{name}/rank-{rank:05d}'",
                )
            parts.append(entry)
    table = {
        name: TensorEntry(shape=shape, dtype=dtype, pieces=tuple(parts))
        for name, (shape, dtype, parts) in sorted(tensors.items())
    }
    for name, entry in table.items():
        fault = pieces_fault(entry)
        if fault:
            raise CheckpointError(
                given=f"tensor {name!r}: {fault}",
                rule="the blocks with replica_id 0 on all ranks hold each element of a tensor once, and no others",
                consequence="the checkpoint was not written",
                nearest="compare shape, offset and replica_id of this part on all ranks",
            )
    return table


def create_temporary_directory(root: Path, step: int, temporary: Path, need_bytes: int) -> None:
    """Create the temporary directory of a save that needs ``need_bytes``.

    Raises CheckpointError: too little free space, or step ``step`` is already committed.
    """
    final = root / step_name(step)
    if final.is_symlink() or is_committed(final):
        raise CheckpointError(
            given=f"{final} exists already",
            rule="a committed checkpoint is never overwritten",
            consequence=f"step {step} was not saved again",
            nearest="resume from the newest checkpoint, move the later ones away first, or use another run.dir",
        )
    space = os.statvfs(root)
    free = space.f_bavail * space.f_frsize
    # some network file systems report no sizes at all
    if space.f_blocks and free < _HEADROOM * need_bytes:
        raise CheckpointError(
            given=f"{root} has {format_gib(free)} free, a checkpoint of step {step} takes {format_gib(need_bytes)}",
            rule=f"{_HEADROOM} times its size is free before a checkpoint is begun",
            consequence=f"step {step} was not saved; earlier checkpoints are untouched",
            nearest=f"free {format_gib(_HEADROOM * need_bytes - free)} there, or keep fewer with checkpoint.keep_last",
        )
    if final.exists():
        remove(final)  # renamed but not committed: an earlier attempt died in between
    temporary.mkdir(mode=FOLDER_MODE)


def commit_checkpoint(temporary: Path, final: Path, *, manifest: Manifest, fault: Callable[[str], None]) -> None:
    """Turn the temporary directory with all its shards into the committed checkpoint ``final``. Raises OSError."""
    data = encode(manifest)
    marker = encode_commit_marker(data, manifest.step)
    commit_directory(temporary, final, manifest=(MANIFEST, data), marker=(COMMIT, marker), fault=fault)


def problems_of(error: BaseException, what: str) -> list[Problem]:
    """The problems of a failed save; ``what`` names the operation."""
    if isinstance(error, UnisonoError):
        return list(error.problems)
    return [
        Problem(
            given=f"{what}: {reason_of(error)}",
            rule="a checkpoint counts only when every rank has written all of it",
            consequence="nothing was committed; earlier checkpoints are untouched",
            nearest="free space or repair the storage; the next save tries again",
        )
    ]


def reason_of(error: BaseException) -> str:
    """What went wrong, as text."""
    if isinstance(error, OSError):
        return os_reason(error)
    if isinstance(error, MemoryError):
        return "out of memory"
    return str(error) if isinstance(error, UnisonoError) else f"{type(error).__name__}: {error}"


def shard_entries(reports: Sequence[Mapping[str, Any]]) -> dict[str, FileEntry]:
    """The manifest's file entries, from each rank's report with ``bytes`` and ``digest``."""
    return {
        shard_name(rank, len(reports)): FileEntry(bytes=report["bytes"], digest=report["digest"])
        for rank, report in enumerate(reports)
    }
