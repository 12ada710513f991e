"""Rewrites a checkpoint: in another number of files, without optimizer state, or with averaged weights.

Any checkpoint loads under any plan without conversion; this is for passing one on. One block of rows is in memory at a time.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import xxhash

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
from unisono.checkpoint.manifest import shard_name, versions
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
    layouts = [lay_out_shard(table, {}, {}, rank=number, world_size=files) for number in range(files)]
    open_root(root)
    final = root / step_name(snapshot.step)
    temporary = final.with_name(f"{final.name}.tmp-0")
    shutil.rmtree(temporary, ignore_errors=True)
    create_temporary_directory(root, snapshot.step, temporary, layouts[0].total_bytes)
    try:
        reports = [
            _write(snapshot, names, layout, temporary / shard_name(number, files))
            for number, layout in enumerate(layouts)
        ]
        manifest = replace(
            snapshot.manifest,
            versions=versions(),
            files=shard_entries(reports),
            tensors=tensor_table([describe_pieces(layout) for layout in layouts], {}),
        )
        commit_checkpoint(temporary, final, manifest=manifest, fault=lambda _point: None)
    except OSError as error:
        raise CheckpointError(*problems_of(error, f"converting {source} to {root}")) from error
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


def _write(snapshot: CheckpointReader, names: dict[str, str], layout: ShardFileLayout, path: Path) -> dict[str, Any]:
    running = xxhash.xxh3_128(layout.header)
    with open_new(path) as file:
        file.write(layout.header)
        for piece in layout.pieces:
            for block in _blocks(snapshot, names[piece.name], piece):
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
        yield cast(Any, out.reshape(-1).view(torch.uint8).numpy()).data
