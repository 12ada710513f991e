"""Verifies checkpoints: digests of all files, headers against the manifest; finds the newest valid one.

Damage is never repaired or skipped silently: a damaged checkpoint is moved into ``quarantine/`` with the reason, an
event reports it, and the one before is tried.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from pathlib import Path

from unisono.checkpoint.folder import list_checkpoints
from unisono.checkpoint.manifest import Manifest
from unisono.checkpoint.reader import CheckpointDamage, damage_text, holds_piece, read_header, sealed_manifest
from unisono.checkpoint.safetensors_format import dtype_from_code
from unisono.dist import World
from unisono.errors import CheckpointError, Problem
from unisono.storage.directory import quarantine_directory
from unisono.storage.files import file_digest, os_reason

_LOG = logging.getLogger(__name__)


def verify(path: Path) -> list[Problem]:
    """Read a whole checkpoint; returns all its problems, none if every byte is as it was written.

    Raises CheckpointError if a newer unisono wrote it.
    """
    try:
        manifest = sealed_manifest(path)
    except (OSError, CheckpointDamage) as error:
        return [_problem(path, damage_text(error))]
    return [_problem(path, text) for text in _faults(path, manifest, manifest.files)]


def find_latest(
    root: Path,
    world: World,
    *,
    digests: bool = True,
    quarantine: bool = True,
    emit: Callable[..., None] | None = None,
) -> Path | None:
    """Find the newest valid committed checkpoint. A collective of ``world``.

    Every rank digests its share of the files, and all ranks get the same answer.

    Args:
        root: Folder of the run's checkpoints, which all ranks see.
        world: The ranks that share the work.
        digests: Whether file contents are read and compared with their digests; False checks only seal, names and sizes.
        quarantine: Move damaged checkpoints into ``quarantine/``; False leaves them, for readers of a run, with a warning.
        emit: Called as ``emit(kind, **fields)`` with an event ``checkpoint_quarantined`` for each damaged checkpoint.

    Returns:
        The checkpoint's folder, or None if none was ever committed.

    Raises:
        CheckpointError: There are checkpoints, also in quarantine, and none is valid; or a newer unisono wrote the newest.
    """
    committed = (
        [entry.step for entry in list_checkpoints(root) if entry.state == "committed"] if world.rank == 0 else None
    )
    steps: list[int] = world.broadcast_json(committed)
    paths = {entry.step: entry.path for entry in list_checkpoints(root) if entry.state == "committed"}
    bad: list[str] = []
    for step in reversed(steps):
        path = paths.get(step)
        found = _share_of_faults(path, world, digests) if path else [f"rank {world.rank} does not see it"]
        faults: list[str] = sorted({text for texts in world.all_gather_json(found) for text in texts})
        if not faults:
            return path
        reason = "; ".join(faults)
        bad.append(f"step {step}: {reason}")
        if not quarantine:
            _LOG.warning("%s is damaged and was not taken: %s", path, reason)
            continue
        moved: str = world.broadcast_json(_quarantine(path, reason) if world.rank == 0 and path else None)
        if emit is not None:
            emit("checkpoint_quarantined", step=step, path=moved, reason=reason)
    if not bad and not steps:
        bad = [
            f"step {entry.step} is in quarantine" for entry in list_checkpoints(root) if entry.state == "quarantined"
        ]
        bad = world.broadcast_json(bad if world.rank == 0 else None)
    if not bad:
        return None
    look = f"look into {root / 'quarantine'}" if quarantine else f"unisono checkpoint verify {root.parent}"
    raise CheckpointError(
        given=f"none of the {len(bad)} checkpoints in {root} is valid: {'; '.join(bad)}",
        rule="a run resumes from the newest checkpoint whose files are as they were written",
        consequence="nothing was loaded, and no new run was begun over the old one",
        nearest=f'{look}; to start over, choose another run.dir or resume = "never"',
    )


def scored_checkpoints(root: Path) -> list[tuple[float, int, Path]]:
    """(score, step, path) of the committed checkpoints that have a score, best first; of equal ones the newer. Not verified."""
    scores: list[tuple[float, int, Path]] = []
    for entry in list_checkpoints(root):
        if entry.state == "committed":
            try:
                score = sealed_manifest(entry.path).score
            except (OSError, CheckpointDamage):
                continue
            if score is not None and math.isfinite(score):
                scores.append((score, entry.step, entry.path))
    return sorted(scores, key=lambda found: (found[0], -found[1]))


def find_best(root: Path) -> Path:
    """The valid committed checkpoint with the lowest score, its held-out loss; the newer of equal ones.

    Raises:
        CheckpointError: No checkpoint under ``root`` has a score and is valid.
    """
    for _, _, path in scored_checkpoints(root):
        if not verify(path):
            return path
    raise CheckpointError(
        given=f"the best checkpoint of {root.parent}",
        rule="a checkpoint is compared by its held-out loss, if the run was evaluated at its step",
        consequence=f"none of the {len(list_checkpoints(root))} checkpoints can be chosen",
        nearest="the newest one, without --best; train.eval_every_steps and checkpoint.every_steps at the same steps",
    )


def _share_of_faults(path: Path, world: World, digests: bool) -> list[str]:
    try:
        manifest = sealed_manifest(path)
    except (OSError, CheckpointDamage) as error:
        return [damage_text(error)]
    names = sorted(manifest.files)[world.rank :: world.world_size] if digests else []
    return _faults(path, manifest, names)


def _faults(path: Path, manifest: Manifest, names: Iterable[str]) -> list[str]:
    """The faults of the files ``names``, one line each."""
    faults: list[str] = []
    for name in names:
        try:
            if file_digest(path / name) != manifest.files[name].digest:
                faults.append(f"{name} has another digest than when it was written")
            else:
                faults += _disagreements(path, manifest, name)
        except (OSError, CheckpointDamage) as error:
            faults.append(damage_text(error))
    return faults


def _disagreements(path: Path, manifest: Manifest, name: str) -> list[str]:
    extents = read_header(path, name, manifest.files[name])
    return [
        f"{name} does not hold {piece.key!r} as the manifest says"
        for tensor in manifest.tensors.values()
        for piece in tensor.pieces
        if piece.file == name and not holds_piece(extents, piece, dtype_from_code(tensor.dtype))
    ]


def _quarantine(path: Path, reason: str) -> str:
    try:
        return str(quarantine_directory(path, reason))
    except OSError as error:
        return f"{path} (left in place: {os_reason(error)})"


def _problem(path: Path, text: str) -> Problem:
    return Problem(
        given=f"{path}: {text}",
        rule="every file of a checkpoint has the size and digest its manifest says, and COMMIT seals the manifest",
        consequence="it will not be resumed from",
        nearest='resume = "auto" moves it into quarantine and takes the one before',
    )
