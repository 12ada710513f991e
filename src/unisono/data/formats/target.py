"""A new file that is there whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from unisono.files import sync_folder


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
