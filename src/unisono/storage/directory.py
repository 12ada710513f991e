"""Directories that are complete or absent, also after a crash.

A directory is filled under a temporary name in the same folder; ``commit_directory`` then makes it count:

    manifest written ─► directory synced ─► renamed ─► parent synced ─► marker written (optional)

With a marker, a directory counts only once it holds the marker file: safe also where renaming is not atomic.
Numbered directories are called ``PREFIX-00000120``, zero-padded to eight digits, so names sort as numbers do up to 10^8.
Links, other spellings of a number, and paths that would lead out of the folder never count.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from unisono.storage.files import FOLDER_MODE, create_file, refuse_nul, sync_folder

QUARANTINE = "quarantine"
REASON = "reason.txt"


def make_folder(folder: Path, *, mode: int = FOLDER_MODE, may_be_link: bool = True) -> None:
    """Create a folder with the permissions ``mode`` less the umask, and those above it, to which only this user can write.

    A folder that exists is left as it is. Raises OSError, also where the name is a file's, or a link's unless ``may_be_link``.
    """
    refuse_nul(folder)
    for path in reversed(folder.parents):
        if not os.path.lexists(path):
            path.mkdir(mode=FOLDER_MODE, exist_ok=True)  # another rank may make it at the same time
    folder.mkdir(mode=mode, exist_ok=True)
    if not may_be_link and folder.is_symlink():
        raise NotADirectoryError(errno.ENOTDIR, f"{folder.name} is a link", str(folder))


def numbered_name(prefix: str, number: int) -> str:
    """The directory name for ``number``, such as ``step-00000120``."""
    return f"{prefix}-{number:08d}"


def number_of(prefix: str, name: str) -> int | None:
    """The number in a directory name, or None if the name is not one that ``numbered_name`` returns."""
    match = re.fullmatch(rf"{re.escape(prefix)}-(\d{{8,18}})", name, re.ASCII)
    if match is None:
        return None
    number = int(match[1])
    return number if numbered_name(prefix, number) == name else None


def subdirectories(folder: Path) -> Iterator[Path]:
    """The real directories in ``folder``, in no order. Nothing if it is missing or a link."""
    if folder.is_symlink():
        return
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield folder / entry.name


def numbered_directories(folder: Path, prefix: str) -> dict[int, Path]:
    """The directories of ``folder`` with ``prefix``, by rising number."""
    numbers = ((number_of(prefix, path.name), path) for path in subdirectories(folder))
    return dict(sorted((number, path) for number, path in numbers if number is not None))


def has_marker(path: Path, marker: str) -> bool:
    """Whether ``marker`` is a regular file in ``path``. Its content is not read."""
    try:
        return stat.S_ISREG((path / marker).lstat().st_mode)
    except OSError:
        return False


def commit_directory(
    temporary: Path,
    final: Path,
    *,
    manifest: tuple[str, bytes],
    marker: tuple[str, bytes] | None = None,
    fault: Callable[[str], None] = lambda point: None,
) -> None:
    """Turn ``temporary``, whose files are written and synced, into the committed directory ``final``.

    ``manifest`` and ``marker`` are (file name, content). ``fault`` is called at named points, where tests kill the process.
    Raises OSError; ``temporary`` or ``final`` is then left as it is.
    """
    fault("before_manifest")
    create_file(temporary / manifest[0], manifest[1])
    sync_folder(temporary)
    fault("before_rename")
    temporary.rename(final)
    sync_folder(final.parent)
    if marker is not None:
        fault("before_commit")
        name, content = marker
        create_file(final / f"{name}.tmp", content)
        (final / f"{name}.tmp").rename(final / name)
        sync_folder(final)
    fault("after_commit")


def remove_directory(path: Path, *, marker: str | None = None) -> None:
    """Delete a committed directory. Interrupted at any point, it leaves no committed directory, at most ``NAME.trash``."""
    if marker is not None:
        (path / marker).unlink(missing_ok=True)
    trash = _unused(path.with_name(f"{path.name}.trash"), "-")
    path.rename(trash)
    shutil.rmtree(trash)


def quarantine_directory(path: Path, reason: str) -> Path:
    """Move a damaged directory into ``quarantine/`` in the same folder and write ``reason`` into it; returns its new path.

    Raises OSError if it cannot be moved.
    """
    folder = path.parent / QUARANTINE
    folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
    if folder.is_symlink():
        raise NotADirectoryError(errno.ENOTDIR, "is a link", str(folder))
    target = _unused(folder / path.name, ".")
    path.rename(target)
    with contextlib.suppress(OSError):  # callers report the reason as well; a full disk must not stop a restart
        create_file(target / REASON, reason.encode() + b"\n")
    sync_folder(folder)
    sync_folder(path.parent)
    return target


def _unused(path: Path, separator: str) -> Path:
    """``path``, or with a number appended if that name is taken."""
    candidate, number = path, 0
    while os.path.lexists(candidate):
        number += 1
        candidate = path.with_name(f"{path.name}{separator}{number}")
    return candidate
