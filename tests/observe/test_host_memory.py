from __future__ import annotations

import mmap
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from unisono.observe.host_memory import PeakMemory, anonymous_memory_bytes, host_memory_limit_bytes


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


PEAKS = """
import mmap, resource, sys
import numpy as np
from unisono.observe.host_memory import PeakMemory

peak, size = PeakMemory(), 128 << 20
readings = [peak.read()]
mapped = np.memmap(sys.argv[1], mode="r")
assert mapped.sum() == 0  # all of it is resident
readings.append(peak.read())
del mapped
readings.append(peak.read())
kept = []
for flags in (mmap.MAP_PRIVATE, mmap.MAP_SHARED):
    block = mmap.mmap(-1, size, flags=flags | mmap.MAP_ANONYMOUS)
    block[:: resource.getpagesize()] = b"1" * len(range(0, size, resource.getpagesize()))
    kept.append(block)
    readings.append(peak.read())
for block in kept:
    block.close()
readings.append(peak.read())
print(*readings)
"""


def test_the_peak_is_of_memory_that_belongs_to_no_file(tmp_path: Path) -> None:
    """In a process of its own, as what this one has used until now is more."""
    size = 128 << 20
    with (tmp_path / "file").open("wb") as file:
        file.truncate(size)
    done = subprocess.run(
        [sys.executable, "-c", PEAKS, str(tmp_path / "file")], capture_output=True, text=True, check=True, timeout=60
    )
    start, mapped, unmapped, private, shared, closed = map(int, done.stdout.split())
    assert mapped - start < size / 4
    assert 0 <= unmapped - mapped < size / 100  # between two readings the program itself takes a page now and then
    assert size / 2 < private - start < 1.5 * size
    assert size / 2 < shared - private < 1.5 * size
    assert 0 <= closed - shared < size / 100


def status(tmp_path: Path, **kib: int) -> Path:
    """A made-up /proc."""
    (tmp_path / "self").mkdir(exist_ok=True)
    (tmp_path / "self" / "status").write_text("".join(f"{name}:\t{size:8} kB\n" for name, size in kib.items()))
    return tmp_path


def test_readings_of_the_peak(tmp_path: Path) -> None:
    peak = PeakMemory()

    def read(**kib: int) -> int:
        return peak.read(status(tmp_path, **kib)) // 1024

    assert read(VmHWM=1000, RssAnon=300, RssFile=500, RssShmem=100) == 500
    assert read(VmHWM=1000, RssAnon=300, RssFile=100, RssShmem=100) == 500  # files were closed, no new peak
    assert read(VmHWM=1000, RssAnon=700, RssFile=100, RssShmem=100) == 800  # now
    assert read(VmHWM=1500, RssAnon=300, RssFile=500, RssShmem=100) == 1000  # between the readings
    assert read(VmHWM=1900, RssAnon=300, RssFile=1500, RssShmem=100) == 1000  # files alone
    assert PeakMemory().read(status(tmp_path, VmHWM=900)) == 900 * 1024  # an old kernel
    assert PeakMemory().read(tmp_path / "none") > 2**20


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
