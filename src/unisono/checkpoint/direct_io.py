"""Writes a file with O_DIRECT, past the page cache.

Direct writes make no copy into the page cache, evict nothing the data loader needs, and take almost no processor
time. On file systems that refuse them, the same blocks are written the ordinary way.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from unisono.checkpoint.host_snapshot import PAGE_BYTES
from unisono.storage.files import FILE_MODE

_DIRECT = getattr(os, "O_DIRECT", 0)


def write_blocks(path: Path, blocks: Iterable[memoryview], size: int, *, halfway: Callable[[], None]) -> Iterator[None]:
    """Write a new file of ``size`` bytes, yielding after every block; it is on disk when the iterator ends.

    ``halfway`` is called with about half of the bytes written. Raises OSError; a partial file may then remain.
    """
    # O_DIRECT only after opening: a file system without it would create the file and then refuse it
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_WRONLY | os.O_CLOEXEC, FILE_MODE)
    try:
        _set_direct(fd, True)
        half = size // 2 // PAGE_BYTES * PAGE_BYTES
        position = 0
        for view in blocks:
            if position <= half < position + len(view):
                _write(fd, view[: half - position], position)
                halfway()
                _write(fd, view[half - position :], half)
            else:
                _write(fd, view, position)
            position += len(view)
            yield
        os.fsync(fd)
    finally:
        os.close(fd)


def _write(fd: int, view: memoryview, position: int) -> None:
    while view:
        aligned = len(view) // PAGE_BYTES * PAGE_BYTES
        if aligned == 0:
            _set_direct(fd, False)  # the last bytes of a file rarely fill a page
        try:
            written = os.pwrite(fd, view[: aligned or len(view)], position)
        except OSError as error:
            if error.errno != errno.EINVAL or not _set_direct(fd, False):
                raise
            continue
        if written % PAGE_BYTES and written < len(view):
            _set_direct(fd, False)  # cut short inside a page: the rest is no longer aligned
        view, position = view[written:], position + written


def _set_direct(fd: int, on: bool) -> bool:
    """Switch direct writes; returns whether anything changed."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    wanted = flags | _DIRECT if on else flags & ~_DIRECT
    if wanted == flags:
        return False
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, wanted)
    except OSError:
        return False
    return True
