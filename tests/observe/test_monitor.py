from __future__ import annotations

import resource
from pathlib import Path

import psutil
import pytest
import torch

from unisono.observe.monitor import Monitor, host_memory_limit_bytes, peak_rss_bytes


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


def test_sample_on_a_cpu() -> None:
    monitor = Monitor(torch.device("cpu"))
    block = bytearray(64 * 2**20)
    block[:: resource.getpagesize()] = b"\1" * len(block[:: resource.getpagesize()])
    taken = monitor.sample()
    assert set(taken) == {"sys/cpu_frac", "sys/rss_bytes", "sys/rss_peak_bytes", "mem/peak_bytes", "mem/limit_bytes"}
    assert 0 <= taken["sys/cpu_frac"] <= 1
    assert len(block) < taken["sys/rss_bytes"] <= taken["sys/rss_peak_bytes"] == taken["mem/peak_bytes"]
    del block
    assert monitor.sample()["sys/rss_peak_bytes"] >= taken["sys/rss_bytes"]  # a peak does not go down
    assert taken["mem/limit_bytes"] <= psutil.virtual_memory().total
    assert peak_rss_bytes() > 2**20


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_sample_on_an_accelerator() -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    block = torch.zeros(2**26, device=device)
    taken = Monitor(device).sample()
    assert block.numel() * 4 <= taken["mem/peak_bytes"] <= taken["mem/limit_bytes"]
