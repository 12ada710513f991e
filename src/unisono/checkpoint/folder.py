"""The folder of checkpoints: names, listing, moving aside, deleting.

    step-00000120/              committed once it holds COMMIT
    step-00000120.tmp-2/        being written by attempt 2, or left behind by it
    step-00000120.trash/        being deleted, or left behind by that
    quarantine/step-00000120/   found damaged, with reason.txt

A name means a checkpoint only if it is exactly such a name and a real directory: links, other spellings and anything
that would lead out of the folder do not count. Whoever moves or deletes is rank 0.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from unisono.checkpoint.manifest import COMMIT
from unisono.errors import CheckpointError

QUARANTINE = "quarantine"
REASON = "reason.txt"

_STEP = re.compile(r"step-(\d{8,18})", re.ASCII)
_LEFTOVER = re.compile(r"step-\d{8,18}\.(tmp-\d+|trash(-\d+)?)", re.ASCII)

State = Literal["committed", "uncommitted", "quarantined"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointEntry:
    """One checkpoint of a run."""

    step: int
    path: Path
    state: State


def step_name(step: int) -> str:
    """``step-00000120``: zero-padded, so that names sort as steps do up to 10^8."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step a directory name stands for, or None if it is no name of a checkpoint."""
    match = _STEP.fullmatch(name)
    if match is None:
        return None
    step = int(match[1])
    return step if step_name(step) == name else None


def list_checkpoints(root: Path) -> list[CheckpointEntry]:
    """The checkpoints under ``root`` by step, those in quarantine last. A missing folder or a link has none."""
    if root.is_symlink():
        return []
    set_aside = [
        CheckpointEntry(step=step, path=path, state="quarantined")
        for path in _directories(root / QUARANTINE)
        if (step := step_of(path.name.partition(".")[0])) is not None
    ]
    entries = [
        CheckpointEntry(step=step, path=path, state="committed" if is_committed(path) else "uncommitted")
        for path in _directories(root)
        if (step := step_of(path.name)) is not None
    ]
    return sorted(entries, key=lambda entry: entry.step) + sorted(set_aside, key=lambda entry: entry.path.name)


def _directories(folder: Path) -> Iterator[Path]:
    if folder.is_symlink():
        return
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield folder / entry.name


def is_committed(path: Path) -> bool:
    """Whether the directory holds a regular file COMMIT; what it says is for ``verify``."""
    try:
        return stat.S_ISREG((path / COMMIT).lstat().st_mode)
    except OSError:
        return False


def open_root(root: Path) -> None:
    """Make ``root`` if need be and see that it can be written; CheckpointError if not."""
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        if root.is_symlink() or not root.is_dir():
            raise CheckpointError(
                given=f"{root} is {'a link' if root.is_symlink() else 'no directory'}",
                rule="checkpoints lie in a real directory inside the run's folder",
                consequence="nothing was read or written there",
                nearest="remove it, or choose another run.dir (which may itself be a link)",
            )
        probe = root / f".probe-{secrets.token_hex(8)}"
        os.close(os.open(probe, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_WRONLY, 0o600))
        probe.unlink()
    except OSError as error:
        raise CheckpointError(
            given=f"the checkpoint folder {root}: {os_reason(error)}",
            rule="the folder can be made and written by this user",
            consequence="the run could not save itself, so it was not started",
            nearest=f"choose another run.dir, or give yourself write permission on {root.parent}",
        ) from error


def remove_leftovers(root: Path) -> list[str]:
    """Delete what crashed saves and deletions left behind; returns the names. Only when no save is under way."""
    found = [path for path in _directories(root) if _LEFTOVER.fullmatch(path.name)]
    for path in found:
        shutil.rmtree(path)
    return sorted(path.name for path in found)


def remove(path: Path) -> None:
    """Delete a checkpoint so that, whenever this is interrupted, what is left is no checkpoint."""
    with contextlib.suppress(FileNotFoundError):
        (path / COMMIT).unlink()
    trash = _free(path.with_name(f"{path.name}.trash"), "-")
    path.rename(trash)
    shutil.rmtree(trash)


def quarantine(path: Path, reason: str) -> Path:
    """Move a checkpoint out of the way, with ``reason`` beside its files; returns where it is now."""
    folder = path.parent / QUARANTINE
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink():
        raise NotADirectoryError(errno.ENOTDIR, "is a link", str(folder))
    target = _free(folder / path.name, ".")
    path.rename(target)
    write_file(target / REASON, reason.encode() + b"\n")
    sync_folder(folder)
    sync_folder(path.parent)
    return target


def quarantine_after(root: Path, step: int) -> list[Path]:
    """Quarantine all checkpoints newer than ``step``: the run goes on from there and will write those steps again."""
    newer = [entry for entry in list_checkpoints(root) if entry.state != "quarantined" and entry.step > step]
    return [quarantine(entry.path, f"the run was resumed from step {step}, before this checkpoint") for entry in newer]


def _free(path: Path, separator: str) -> Path:
    """``path``, or with a number behind it when that is taken."""
    candidate, number = path, 0
    while os.path.lexists(candidate):
        number += 1
        candidate = path.with_name(f"{path.name}{separator}{number}")
    return candidate


def write_file(path: Path, data: bytes) -> None:
    """A new small file, on disk when this returns."""
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(fd)


def sync_folder(path: Path) -> None:
    """Make the names inside a directory durable, where the file system knows how to."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        # some network file systems have no fsync of directories; they write names through anyway
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(fd)


def os_reason(error: OSError) -> str:
    """``ENOSPC, No space left on device``: what the system said, without the path."""
    name = errno.errorcode.get(error.errno, str(error.errno)) if error.errno else type(error).__name__
    return f"{name}, {error.strerror or error}"
