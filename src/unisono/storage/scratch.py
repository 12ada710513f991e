"""Folders of temporary files that are removed at the end, or, where their process was killed, by a later process.

Each has a locked file for as long as its process lives. Another process of the same user that gets the lock knows that the folder
is left over. Where the file system has no locks, nothing is removed but by its own process.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Final

from unisono.storage.files import PRIVATE_MODE

_LOCK: Final = ".scratch.lock"


@contextmanager
def scratch_folder(prefix: str) -> Generator[Path]:
    """A new folder, in the folder of temporary files, for what is needed until the end of the block; this user alone reads it.

    The first use of a ``prefix`` in a process removes the folders of that prefix which killed processes left.

    Raises:
        OSError: It cannot be made.
    """
    # of this host alone: locks of a network file system may count on one host only
    prefix = f"{prefix}{socket.gethostname()}-"
    _remove_leftovers(tempfile.gettempdir(), prefix)
    with tempfile.TemporaryDirectory(prefix=prefix) as name:
        folder = Path(name)
        with _locked(folder):
            content = folder / "content"  # without the lock
            content.mkdir(mode=0o700)
            yield content


@contextmanager
def _locked(folder: Path) -> Generator[None]:
    """Hold the lock of a new folder. Its file gets its name once it is locked: nobody finds it without the lock."""
    unlocked = folder / f"{_LOCK}.new"
    fd = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, PRIVATE_MODE)
    try:
        with suppress(OSError):  # no locks here
            fcntl.flock(fd, fcntl.LOCK_EX)
        unlocked.rename(folder / _LOCK)
        yield
    finally:
        os.close(fd)


@cache
def _remove_leftovers(parent: str, prefix: str) -> None:
    """Remove the folders with this prefix whose process is dead, and that this user owns. What cannot be removed stays."""
    for folder in _folders(parent, prefix):
        with suppress(OSError), _dead(folder):
            shutil.rmtree(folder, ignore_errors=True)  # follows no links, also none that takes the place of a folder


def _folders(parent: str, prefix: str) -> Iterator[str]:
    with suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith(prefix) and entry.is_dir(follow_symlinks=False):
                yield entry.path


@contextmanager
def _dead(folder: str) -> Generator[None]:
    """Hold the lock of a folder that a dead process left. Raises OSError if it is alive, another user's, or has no lock."""
    parent_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fd = os.open(_LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent_fd)
        try:
            for found in (os.fstat(parent_fd), os.fstat(fd)):
                if found.st_uid != os.geteuid():
                    raise PermissionError(folder)
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise FileNotFoundError(folder)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        finally:
            os.close(fd)
    finally:
        os.close(parent_fd)
