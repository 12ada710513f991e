"""Writes checkpoints outside of a run: an existing one again, or the tensors of a model.

Any checkpoint loads under any plan without conversion; ``convert`` is for passing one on, in another number of files, without
optimizer state, or with averaged weights. One block of rows is in memory at a time.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import xxhash
from torch import Tensor

from unisono.checkpoint.commit import (
    commit_checkpoint,
    create_temporary_directory,
    describe_pieces,
    problems_of,
    shard_entries,
    tensor_table,
)
from unisono.checkpoint.folder import open_root, step_name
from unisono.checkpoint.host_snapshot import BLOCK_BYTES
from unisono.checkpoint.integrity import verify
from unisono.checkpoint.manifest import Manifest, json_meta, shard_name, versions
from unisono.checkpoint.reader import CheckpointReader, open_checkpoint
from unisono.checkpoint.safetensors_format import num_bytes
from unisono.checkpoint.shard_assignment import ShardFileLayout, TensorPiece, lay_out_shard
from unisono.errors import CheckpointError
from unisono.storage.files import open_new


def convert(source: Path, root: Path, *, files: int, keep_optimizer: bool = True, average: bool = False) -> Path:
    """Write the checkpoint ``source`` to ``root/step-…`` in ``files`` files; returns that folder.

    Args:
        source: Folder of a committed checkpoint.
        root: Folder in which the new checkpoint gets the name of its step.
        files: Number of files that the tensors are divided among.
        keep_optimizer: False keeps only the model's tensors and their averages: the result can be evaluated and exported, but
            not resumed.
        average: Replace the weights by their averages, and drop optimizer state.

    Raises:
        CheckpointError: The source is damaged, the target exists, there is too little space, or there are no averages.
    """
    if problems := verify(source):
        raise CheckpointError(*problems)
    snapshot = open_checkpoint(source)
    names = _chosen(snapshot, keep_optimizer=keep_optimizer, average=average)
    table = {name: ((spec := snapshot.spec(inner)).shape, spec.dtype) for name, inner in names.items()}
    return _commit(
        root,
        replace(snapshot.manifest, versions=versions(), files={}, tensors={}),
        [lay_out_shard(table, {}, {}, rank=number, world_size=files) for number in range(files)],
        lambda piece: _blocks(snapshot, names[piece.name], piece),
        what=f"converting {source} to {root}",
    )


def write_model(root: Path, tensors: Mapping[str, Tensor], *, step: int, meta: Mapping[str, Any]) -> Path:
    """Write a model's tensors as the checkpoint ``root/step-…``, which can be evaluated and exported, but not resumed.

    Args:
        root: Folder of the checkpoints of a run; made where it is missing.
        tensors: The tensors of the model by their names in its ``state_dict``, each of them once.
        step: Step of the checkpoint.
        meta: ``meta`` of its manifest; JSON types.

    Raises:
        CheckpointError: The checkpoint exists, there is too little space, or the folder cannot be written.
    """
    saved = {f"model/{name}": tensor for name, tensor in tensors.items()}
    table = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in saved.items()}
    return _commit(
        root,
        Manifest(step=step, world=1, attempt=1, versions=versions(), meta=json_meta(meta), files={}, tensors={}),
        [lay_out_shard(table, {}, {}, rank=0, world_size=1)],
        lambda piece: iter([_bytes(saved[piece.name].detach().cpu())]),
        what=f"writing {root}",
    )


def _commit(
    root: Path,
    manifest: Manifest,
    layouts: Sequence[ShardFileLayout],
    blocks: Callable[[TensorPiece], Iterator[memoryview]],
    *,
    what: str,
) -> Path:
    """Write the files of ``layouts`` and commit them.

    Args:
        root: Folder of the checkpoints.
        manifest: The manifest without files and tensors.
        layouts: The layout of each file.
        blocks: The bytes of a piece, a block at a time.
        what: Name of the operation, for errors.
    """
    open_root(root)
    final = root / step_name(manifest.step)
    temporary = final.with_name(f"{final.name}.tmp-0")
    shutil.rmtree(temporary, ignore_errors=True)
    create_temporary_directory(root, manifest.step, temporary, layouts[0].total_bytes)
    try:
        reports = [
            _write(blocks, layout, temporary / shard_name(number, len(layouts)))
            for number, layout in enumerate(layouts)
        ]
        whole = replace(
            manifest,
            files=shard_entries(reports),
            tensors=tensor_table([describe_pieces(layout) for layout in layouts], {}),
        )
        commit_checkpoint(temporary, final, manifest=whole, fault=lambda _point: None)
    except OSError as error:
        raise CheckpointError(*problems_of(error, what)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return final


def _chosen(snapshot: CheckpointReader, *, keep_optimizer: bool, average: bool) -> dict[str, str]:
    """The tensors to write: new name -> name in the source."""
    names = snapshot.names()
    averages = {name for name in names if name.startswith("ema/")}
    if average:
        if not averages:
            raise CheckpointError(
                given=f"the checkpoint {snapshot.path} has no averaged weights",
                rule="they are kept by a run with train.ema_decay above 0",
                consequence="nothing was written",
                nearest="leave --average out",
            )
        weights = [name for name in names if name.startswith("model/")]
        return {name: ema if (ema := name.replace("model/", "ema/", 1)) in averages else name for name in weights}
    chosen = [name for name in names if keep_optimizer or name.startswith(("model/", "ema/"))]
    return {name: name for name in chosen}


def _write(
    blocks: Callable[[TensorPiece], Iterator[memoryview]], layout: ShardFileLayout, path: Path
) -> dict[str, Any]:
    running = xxhash.xxh3_128(layout.header)
    with open_new(path) as file:
        file.write(layout.header)
        for piece in layout.pieces:
            for block in blocks(piece):
                running.update(block)
                file.write(block)
    return {"bytes": layout.size, "digest": running.hexdigest()}


def _blocks(snapshot: CheckpointReader, name: str, piece: TensorPiece) -> Iterator[memoryview]:
    """The bytes of a piece, a block of rows at a time."""
    if 0 in piece.extent:
        return
    rows, row_shape = (piece.extent[0], piece.extent[1:]) if piece.extent else (1, ())
    step = max(1, BLOCK_BYTES // num_bytes(piece.dtype, row_shape))
    for begin in range(0, rows, step):
        out = torch.empty(
            (min(step, rows - begin), *row_shape) if piece.extent else (), dtype=piece.dtype, device="cpu"
        )
        offset = (piece.offset[0] + begin, *piece.offset[1:]) if piece.extent else ()
        snapshot.read_part(name, out, offset)
        yield _bytes(out)


def _bytes(tensor: Tensor) -> memoryview:
    return cast(Any, tensor.contiguous().reshape(-1).view(torch.uint8).numpy()).data
