from __future__ import annotations

import mmap
import resource
from pathlib import Path

import numpy as np
import psutil
import pytest

from unisono.observe.monitor import anonymous_memory_bytes, host_memory_limit_bytes, peak_rss_bytes


def machine(tmp_path: Path, groups: str, limits: dict[str, str]) -> tuple[Path, Path]:
    """A made-up /proc and /sys/fs/cgroup."""
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(groups)
    for name, text in limits.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return proc, root


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": "4096", "memory.max": "max"}, 4096),
        ("0::/a/b\n", {"a/b/memory.max": "1024", "a/memory.max": "4096"}, 1024),
        ("0::/host/path/not/visible\n", {"memory.max": "2048"}, 2048),  # inside a container
        ("4:memory:/x\n", {"memory/x/memory.limit_in_bytes": "8192"}, 8192),
        ("4:cpu,memory:/x\n", {"memory/x/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("4:memory:/x\n0::/u\n", {"memory/x/memory.limit_in_bytes": "8192", "unified/u/memory.max": "4096"}, 4096),
        ("0::/\n", {}, None),
        ("0::/a\n", {"a/memory.max": "nonsense"}, None),
    ],
)
def test_cgroup_limits(tmp_path: Path, groups: str, limits: dict[str, str], expected: int | None) -> None:
    total = psutil.virtual_memory().total
    assert host_memory_limit_bytes(*machine(tmp_path, groups, limits)) == (total if expected is None else expected)


def test_no_proc_at_all(tmp_path: Path) -> None:
    assert host_memory_limit_bytes(tmp_path / "none", tmp_path / "none") == psutil.virtual_memory().total


def test_the_peak_does_not_go_down() -> None:
    block = bytearray(64 * 2**20)
    block[:: resource.getpagesize()] = b"\1" * len(block[:: resource.getpagesize()])
    peak = peak_rss_bytes()
    assert peak > len(block)
    del block
    assert peak_rss_bytes() > peak - 2**20  # the kernel updates its counters in batches


def test_memory_of_files_is_not_counted(tmp_path: Path) -> None:
    size = 64 << 20
    (tmp_path / "file").write_bytes(bytes(size))
    before = anonymous_memory_bytes()
    mapped = np.memmap(tmp_path / "file", mode="r")
    assert mapped.sum() == 0  # all of it is resident
    assert anonymous_memory_bytes() - before < size / 2
    # new pages: an array may take some that were freed before
    kept = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for begin in range(0, size, resource.getpagesize()):
        kept[begin] = 1
    assert size / 2 < anonymous_memory_bytes() - before < 2 * size
    assert len(kept) == len(mapped)
