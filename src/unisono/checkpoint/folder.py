"""The folder of a run's checkpoints: names, listing, quarantine, retention, deletion.

    step-00000120/              committed once it holds COMMIT
    step-00000120.tmp-2/        being written by attempt 2, or left behind by it
    step-00000120.tmp-2-1/      the same, of worker 1 of an asynchronous run
    step-00000120.trash/        being deleted, or left behind by an interrupted deletion
    quarantine/step-00000120/   found damaged, with reason.txt

Only rank 0 moves or deletes. ``unisono.storage.directory`` has the rules for names and the commit itself.
"""

from __future__ import annotations

import math
import re
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from unisono.checkpoint.manifest import COMMIT
from unisono.checkpoint.options import CheckpointOptions
from unisono.errors import CheckpointError
from unisono.storage.directory import (
    QUARANTINE,
    has_marker,
    make_folder,
    number_of,
    numbered_directories,
    numbered_name,
    quarantine_directory,
    remove_directory,
    subdirectories,
)
from unisono.storage.files import open_new, os_reason

_PREFIX = "step"
_LEFTOVER = re.compile(r"step-\d{8,18}\.(tmp-\d+(-\d+)?|trash(-\d+)?)", re.ASCII)

State = Literal["committed", "uncommitted", "quarantined"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointEntry:
    """One checkpoint of a run."""

    step: int
    path: Path
    state: State


def step_name(step: int) -> str:
    """The directory name of a step, such as ``step-00000120``."""
    return numbered_name(_PREFIX, step)


def step_of(name: str) -> int | None:
    """The step in a directory name, or None if it is not the name of a checkpoint."""
    return number_of(_PREFIX, name)


def list_checkpoints(root: Path) -> list[CheckpointEntry]:
    """The checkpoints under ``root`` by step, quarantined ones last. Empty if ``root`` is missing or a link."""
    if root.is_symlink():
        return []
    entries = [
        CheckpointEntry(step=step, path=path, state="committed" if is_committed(path) else "uncommitted")
        for step, path in numbered_directories(root, _PREFIX).items()
    ]
    quarantined = [
        CheckpointEntry(step=step, path=path, state="quarantined")
        for path in sorted(subdirectories(root / QUARANTINE))
        if (step := step_of(path.name.partition(".")[0])) is not None
    ]
    return entries + quarantined


def is_committed(path: Path) -> bool:
    """Whether the directory holds a regular file COMMIT. ``verify`` checks its content."""
    return has_marker(path, COMMIT)


def open_root(root: Path) -> None:
    """Create ``root`` if needed and check that it can be written. Raises CheckpointError if not."""
    try:
        make_folder(root)
        if root.is_symlink() or not root.is_dir():
            raise CheckpointError(
                given=f"{root} is {'a link' if root.is_symlink() else 'no directory'}",
                rule="checkpoints lie in a real directory inside the run's folder",
                consequence="nothing was read or written there",
                nearest="remove it, or choose another run.dir (which may itself be a link)",
            )
        probe = root / f".probe-{secrets.token_hex(8)}"
        open_new(probe).close()
        probe.unlink()
    except OSError as error:
        raise CheckpointError(
            given=f"the checkpoint folder {root}: {os_reason(error)}",
            rule="the folder can be made and written by this user",
            consequence="the run could not save itself, so it was not started",
            nearest=f"choose another run.dir, or give yourself write permission on {root.parent}",
        ) from error


def remove_leftovers(root: Path) -> list[str]:
    """Delete the leftovers of crashed saves and deletions; returns their names. Call it only while no save is under way."""
    leftovers = [path for path in subdirectories(root) if _LEFTOVER.fullmatch(path.name)]
    for path in leftovers:
        shutil.rmtree(path)
    return sorted(path.name for path in leftovers)


def remove(path: Path) -> None:
    """Delete a checkpoint. Interrupted at any point, it leaves no committed checkpoint."""
    remove_directory(path, marker=COMMIT)


def quarantine_after(root: Path, step: int) -> list[Path]:
    """Quarantine all checkpoints newer than ``step``: the run resumes there and will write those steps again."""
    newer = [entry for entry in list_checkpoints(root) if entry.state != "quarantined" and entry.step > step]
    reason = f"the run was resumed from step {step}, before this checkpoint"
    return [quarantine_directory(entry.path, reason) for entry in newer]


def expired_checkpoints(scores: Mapping[int, float | None], options: CheckpointOptions) -> list[int]:
    """The committed steps to delete, oldest first, given ``{step: score}``.

    It keeps the newest ``keep_last``, every step divisible by ``keep_every_steps``, and the ``keep_best`` lowest scores
    (the newer of equal ones). The newest is always retained; a missing or non-finite score is never among the best.
    """
    steps = sorted(scores)
    retained = set(steps[-max(1, options.keep_last) :])
    if options.keep_every_steps:
        retained |= {step for step in steps if step % options.keep_every_steps == 0}
    ranked = sorted((score, -step) for step, score in scores.items() if score is not None and math.isfinite(score))
    retained |= {-step for _, step in ranked[: options.keep_best]}
    return [step for step in steps if step not in retained]
