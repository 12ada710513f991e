"""Sums through shared memory: right, equal on all ranks, and bounded when a worker is gone."""

from __future__ import annotations

import gc
import os
import signal
import time
from pathlib import Path

import plans
import pytest
import torch
from pool import Pool, WorkersFailed

from unisono.errors import CommError, ConfigError
from unisono.kvstore.allreduce import shared_memory
from unisono.kvstore.allreduce.shared_memory import SharedMemoryAllReduce

SLOT_BYTES = 4096
CASES = [
    (torch.float32, 0),
    (torch.float32, 1),
    (torch.float32, 1024),
    (torch.float64, 1300),
    (torch.bfloat16, 5000),
    (torch.int64, 77),
]


def value(rank: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(count, generator=generator) * 100).to(dtype)


def sums(world) -> list[list[float]]:
    shared = SharedMemoryAllReduce(world, SLOT_BYTES)
    totals = [value(world.rank, dtype, count) for dtype, count in CASES]
    for _ in range(20):  # pieces of one call follow those of another without a gap
        again = [value(world.rank, dtype, count) for dtype, count in CASES]
        for each in again:
            work = shared.all_reduce(each)
            assert work.done()
            work.wait()
    for total in totals:
        shared.all_reduce(total)
    assert all(torch.equal(a, b) for a, b in zip(totals, again, strict=True))
    shared.close()
    return [total.tolist() for total in totals]


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_in_the_order_of_ranks(pool: Pool, ranks: int) -> None:
    first, *others = pool.run(sums, ranks=ranks)
    for got, (dtype, count) in zip(first, CASES, strict=True):
        want = value(0, dtype, count)
        for rank in range(1, ranks):
            want = want + value(rank, dtype, count)
        assert got == want.tolist()  # bit for bit
    assert all(other == first for other in others)


def compared_by_a_slow_worker(world) -> list[bool]:
    shared = SharedMemoryAllReduce(world, SLOT_BYTES)
    meet = shared._meet

    def meet_and_sleep(num_bytes: int) -> None:
        meet(num_bytes)
        time.sleep(0.2)

    if world.rank == 0:
        shared._meet = meet_and_sleep
    alike = [shared.all_equal(7), shared.all_equal(8), shared.all_equal(9 + world.rank), shared.all_equal(11)]
    shared.close()
    return alike


def test_a_worker_that_reads_late_reads_what_was_meant(pool: Pool) -> None:
    """The others have written their next number by then."""
    assert pool.run(compared_by_a_slow_worker) == [[True, True, False, True]] * 2


def gone_or_late(world, how: str) -> str:
    shared = SharedMemoryAllReduce(world, SLOT_BYTES)
    shared.all_reduce(torch.ones(10))
    if world.rank == 1 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if world.rank == 1 and how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)  # until the other lets it go on
    text = ""
    if world.rank == 0:
        with pytest.raises(CommError) as caught:
            shared.all_reduce(torch.ones(10))
        text = str(caught.value)
        Path("said").write_text(text)
        if how == "stopped":
            os.kill(shared._peers[1]["pid"], signal.SIGCONT)
    else:
        while not Path("said").exists():
            os.sched_yield()
    shared.close()
    return text


@pytest.mark.full
def test_a_late_worker_is_named(pool: Pool, tmp_path: Path) -> None:
    text, _ = pool.run(in_folder, str(tmp_path), "late", comm_timeout_s=1.5)
    assert "rank 1 has not arrived" in text
    assert "within 1.5 s" in text


@pytest.mark.full
def test_a_stopped_worker_is_named(pool: Pool, tmp_path: Path) -> None:
    text, _ = pool.run(in_folder, str(tmp_path), "stopped", comm_timeout_s=1.5)
    assert "rank 1 (pid " in text
    assert ") is stopped" in text


def test_a_killed_worker_is_named_long_before_the_time_out(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(WorkersFailed) as caught:
        pool.run(in_folder, str(tmp_path), "killed", comm_timeout_s=120.0, timeout_s=20.0)
    assert caught.value.outcomes == ["ok", "exit code -9"]
    text = (tmp_path / "said").read_text()
    assert "rank 1 (pid " in text
    assert "has ended" in text


def in_folder(world, folder: str, how: str) -> str:
    os.chdir(folder)
    return gone_or_late(world, how)


def refused(world, how: str) -> str:
    identity, able = shared_memory.identity, shared_memory._able
    if how == "several hosts":
        shared_memory.identity = lambda: identity() | {"host": str(world.rank)}
    elif how == "other processor":
        shared_memory._able = lambda: world.rank == 0
    try:
        with pytest.raises(ConfigError) as caught:
            SharedMemoryAllReduce(world)
    finally:
        shared_memory.identity, shared_memory._able = identity, able
    return str(caught.value)


@pytest.mark.full
@pytest.mark.parametrize(
    ("how", "ranks", "given"),
    [
        ("alone", 1, "with 1 worker"),
        ("several hosts", 2, "with workers on several hosts"),
        ("other processor", 2, "with a worker that is not on Linux and x86-64"),
    ],
)
def test_refusals_are_alike_on_all_workers(pool: Pool, how: str, ranks: int, given: str) -> None:
    for text in pool.run(refused, how, ranks=ranks):
        assert f"sums through shared memory {given}" in text


def leaves(world) -> tuple[int, int]:
    gc.collect()  # memory of stores of earlier tests in this process
    files, mappings = set(os.listdir("/proc/self/fd")), mapped()
    shared = SharedMemoryAllReduce(world)
    shared.all_reduce(torch.ones(3))
    assert len(mapped() - mappings) == 1
    shared.close()
    return len(set(os.listdir("/proc/self/fd")) - files), len(mapped() - mappings)


def mapped() -> set[str]:
    """The memory of this process that is shared for sums, as lines of /proc/self/maps."""
    return {line for line in Path("/proc/self/maps").read_text().splitlines() if "unisono-sum" in line}


def test_nothing_is_left_behind(pool: Pool) -> None:
    assert pool.run(leaves) == [(0, 0)] * 2


def run_leaves(world, run_dir: str) -> int:
    gc.collect()  # memory of stores of earlier tests in this process
    before = mapped()
    plans.on_ranks(world, run_dir, {})
    return len(mapped() - before)


def test_a_run_leaves_none(pool: Pool, tmp_path: Path) -> None:
    for number in range(2):
        assert pool.run(run_leaves, str(tmp_path / str(number))) == [0, 0]
