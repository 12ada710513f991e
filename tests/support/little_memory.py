"""A control group whose members the kernel kills when they take more memory than it has."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_memory(mebibytes: int) -> Iterator[Path]:
    """The file that a process writes its number into to join. Skips the test where no group can be made."""
    root = Path("/sys/fs/cgroup/memory")
    limit = "memory.limit_in_bytes"
    if not root.is_dir():
        root, limit = Path("/sys/fs/cgroup"), "memory.max"
    group = root / f"unisono-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(mebibytes << 20))
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    yield group / "cgroup.procs"
    group.rmdir()
