"""What each process gets of the host, and that it really gets it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.launch import LaunchOptions
from unisono.launch.resources import (
    FRUGAL_ALLOCATOR,
    TUNED_ALLOCATOR,
    Core,
    allowed_cores,
    core_shares,
    cpu_quota,
    divide_host,
    host_busy_frac,
)


@given(cores=st.integers(1, 200), processes=st.integers(1, 200), hyperthreads=st.integers(1, 2))
def test_shares_are_whole_disjoint_even_and_neighbourly(cores: int, processes: int, hyperthreads: int) -> None:
    host = [Core(node=0, cpus=tuple(range(core, core + cores * hyperthreads, cores))) for core in range(cores)]
    divided = core_shares(host, processes)
    if cores < processes:
        assert divided is None
        return
    assert divided is not None
    assert sorted(cpu for share in divided for cpu in share) == list(range(cores * hyperthreads))
    sizes = {len(share) // hyperthreads for share in divided}
    assert max(sizes) - min(sizes) <= 1
    first_threads = [[cpu for cpu in share if cpu < cores] for share in divided]
    assert all(part == list(range(part[0], part[-1] + 1)) for part in first_threads)


def test_this_host() -> None:
    cores = allowed_cores()
    assert {cpu for core in cores for cpu in core.cpus} == os.sched_getaffinity(0)
    assert len(cores) <= len(os.sched_getaffinity(0))
    quota = cpu_quota()
    assert quota is None or quota > 0


def test_a_narrowed_mask_narrows_the_share() -> None:
    code = (
        "import os; os.sched_setaffinity(0, [max(os.sched_getaffinity(0))])\n"
        "from unisono.launch import LaunchOptions\n"
        "from unisono.launch.resources import divide_host\n"
        "share = divide_host(LaunchOptions(num_processes=1), {})\n"
        "print(share.cores_allowed, share.threads)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "1"]


def test_threads_come_from_option_then_environment_then_the_host() -> None:
    by_option = divide_host(LaunchOptions(num_processes=2, num_threads=3), {"OMP_NUM_THREADS": "5"})
    assert (by_option.threads, by_option.threads_from) == (3, "launch.num_threads")
    by_user = divide_host(LaunchOptions(num_processes=2), {"OMP_NUM_THREADS": "5"})
    assert (by_user.threads, by_user.threads_from) == (5, "environment OMP_NUM_THREADS")
    by_host = divide_host(LaunchOptions(num_processes=1000), {})
    assert by_host.threads == 1
    assert by_host.threads_from.endswith(" usable cores / 1000 processes")
    assert by_host.environ()["OMP_NUM_THREADS"] == by_host.environ()["MKL_NUM_THREADS"] == "1"


def test_allocator_settings_are_explicit_and_the_users_own_stay() -> None:
    assert divide_host(LaunchOptions(num_processes=1), {}).allocator == TUNED_ALLOCATOR
    assert TUNED_ALLOCATOR == {
        "MALLOC_MMAP_THRESHOLD_": "4294967296",
        "MALLOC_TRIM_THRESHOLD_": "4294967296",
        "MALLOC_TOP_PAD_": "268435456",
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    }
    kept = divide_host(LaunchOptions(num_processes=1), {"MALLOC_TOP_PAD_": "1"})
    assert kept.allocator["MALLOC_TOP_PAD_"] == "1"
    assert divide_host(LaunchOptions(num_processes=1, allocator="system"), {}).allocator == {}


def test_under_a_limit_of_the_address_space_freed_tensors_give_their_addresses_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("unisono.launch.resources.address_space_limit_bytes", lambda: 2**32)
    assert divide_host(LaunchOptions(num_processes=1), {}).allocator == FRUGAL_ALLOCATOR


@pytest.mark.parametrize(
    ("options", "numa"),
    [
        (LaunchOptions(num_processes=1), "not pinned: one process has the whole host"),
        (LaunchOptions(num_processes=5000), f"not pinned: 5000 processes on {len(allowed_cores())} cores"),
    ],
)
def test_no_pinning_says_why(options: LaunchOptions, numa: str) -> None:
    share = divide_host(options, {})
    assert share.affinity is None
    assert share.numa == numa


@pytest.mark.skipif(sys.platform != "linux", reason="the tuned settings are glibc's")
def test_the_tuned_allocator_keeps_memory_between_steps(tmp_path: Path) -> None:
    """Freed blocks of 64 MiB are not faulted in again, which is what the settings are for."""
    code = (
        "import ctypes, json, resource\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]\n"
        "def step():\n"
        "    block = libc.malloc(64 * 2**20); ctypes.memset(block, 1, 64 * 2**20); libc.free(block)\n"
        "step()\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "for _ in range(4): step()\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)"
    )

    def faults(environ: dict[str, str]) -> int:
        base = {name: value for name, value in os.environ.items() if name not in TUNED_ALLOCATOR}
        done = subprocess.run(
            [sys.executable, "-c", code], env=base | environ, capture_output=True, text=True, check=True
        )
        return int(json.loads(done.stdout))

    assert faults({}) > 4 * 64 * 2**20 // 2**21
    assert faults(TUNED_ALLOCATOR) < 100


def test_waiting_threads_give_way_on_a_busy_host_unless_the_user_says_otherwise() -> None:
    two = LaunchOptions(num_threads=2)
    busy, quiet = (divide_host(two, {}, busy_frac=frac) for frac in (0.42, 0.02))
    assert busy.environ()["GOMP_SPINCOUNT"] == "1000"
    assert busy.waiting_from == "short: others use 42 % of this host"
    assert "GOMP_SPINCOUNT" not in quiet.environ()
    assert quiet.waiting_from == "the library's own: others use 2 % of this host"
    given = divide_host(two, {"GOMP_SPINCOUNT": "9"}, busy_frac=0.42)
    assert (given.environ()["GOMP_SPINCOUNT"], given.waiting_from) == ("9", "environment")
    alone = divide_host(LaunchOptions(num_threads=1), {}, busy_frac=0.42)
    assert (alone.waiting, alone.waiting_from) == ({}, "not set: one thread")


def test_a_busy_host_is_seen_as_busy() -> None:
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in allowed_cores()]
    try:
        time.sleep(0.5)
        assert max(host_busy_frac() for _ in range(5)) > 0.5
    finally:
        for process in spinning:
            process.kill()
            process.wait()
