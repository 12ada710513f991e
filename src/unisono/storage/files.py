"""Files that are whole or not there, after a crash too."""

from __future__ import annotations

import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


def sync_folder(folder: Path) -> None:
    """Make renames inside ``folder`` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def new_file(path: Path) -> Generator[IO[Any]]:
    """A binary file under a temporary name, which becomes ``path`` when the block ends normally: fsync, then rename."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_atomically(path: Path, *parts: Any) -> None:
    """Write the parts (bytes-like) so that ``path`` holds its old content or all of the new one."""
    with new_file(path) as file:
        for part in parts:
            file.write(part)
