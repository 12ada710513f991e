"""Permissions of what a test has made, and a umask for as long as it makes it."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FILE, FOLDER, PRIVATE, PRIVATE_FOLDER = 0o644, 0o755, 0o600, 0o700  # before the umask


@contextmanager
def umask(mask: int) -> Iterator[None]:
    """Inside, and in processes that are started there, new files are made under this umask."""
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def public_folder() -> Iterator[Path]:
    """A folder that other users reach, unlike pytest's; only this one can write to it. It goes with the block."""
    folder = Path(tempfile.mkdtemp(prefix="unisono-test-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def left(mode: int) -> int:
    """What the umask of this process leaves of ``mode``."""
    mask = os.umask(0)
    os.umask(mask)
    return mode & ~mask


def mode_of(path: Path) -> int:
    """The permissions of ``path`` itself; not of what a link leads to."""
    return stat.S_IMODE(path.lstat().st_mode)


def modes(folder: Path) -> dict[str, int]:
    """Permissions of ``folder`` (as ``.``) and of all below it, by relative path; links have none of their own."""
    paths = [path for path in (folder, *folder.rglob("*")) if not path.is_symlink()]
    return {path.relative_to(folder).as_posix(): mode_of(path) for path in paths}


def writable_by_others(folder: Path) -> dict[str, str]:
    """What a group or anybody can write to in ``folder``, and it, with its mode."""
    return {name: oct(mode) for name, mode in modes(folder).items() if mode & (stat.S_IWGRP | stat.S_IWOTH)}
