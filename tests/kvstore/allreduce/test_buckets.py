"""Gradient sums of one host go through shared memory: the same sums, said by ``transport``, bounded when a rank is gone."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pool import Pool, WorkersFailed
from torch import nn

from unisono.errors import CommError
from unisono.kvstore import create_kvstore
from unisono.kvstore.allreduce import buckets, shared_memory
from unisono.kvstore.allreduce.buckets import BucketedAllReduce
from unisono.kvstore.compression import find_codec

Array = np.ndarray[Any, Any]

# more than one piece of a slot, and pieces of all sizes
WIDTH = 1100


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))


def sums(world, how: str, travels: str = "", bucket_bytes: int = 1 << 20) -> tuple[str, list[Array], float, int]:
    """Transport, sums of three steps, totals, and what is left of shared memory."""
    before = mapped()
    able = shared_memory._able
    if how == "gloo":
        shared_memory._able = lambda: False
    try:
        model = network()
        sent = {name: getattr(torch, travels) for name, _ in model.named_parameters()} if travels else None
        sync = BucketedAllReduce(dict(model.named_parameters()), world, bucket_bytes, reduce_dtypes=sent)
    finally:
        shared_memory._able = able
    made: list[Array] = []
    totals = torch.zeros(2, dtype=torch.float64)
    threads = threading.active_count()
    for step in range(3):
        batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + world.rank))
        sync.prepare_last_backward()
        model(batch).square().sum().backward()
        totals = torch.tensor([world.rank + 1.0, 0.1])
        sync.wait(totals)
        made += [gradient.clone().numpy() for gradient in sync.gradients()]
        sync.zero_grad()
    assert threading.active_count() == threads
    transport = sync.transport
    sync.close()
    return transport, made, float(totals[0]), mapped() - before


def sums_by_host(world) -> tuple[str, list[Array], float, int]:
    """The first two ranks pretend to share a host, the third another."""
    real = buckets.host_id
    buckets.host_id = lambda: "one" if world.rank < 2 else "another"
    try:
        return sums(world, "memory")
    finally:
        buckets.host_id = real


def test_sums_go_inside_hosts_first(pool: Pool) -> None:
    outcomes = pool.run(sums_by_host, ranks=3)
    plain = pool.run(sums, "gloo", ranks=3)[0][1]
    for path, made, total, _ in outcomes:
        assert path == "gloo: over the workers of each host, then across 2 hosts"
        assert total == 6.0
        assert all(np.array_equal(a, b) for a, b in zip(made, outcomes[0][1], strict=True))
        assert all(np.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(made, plain, strict=True))


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("unisono-sum")


@pytest.mark.parametrize("travels", ["", "bfloat16"])
def test_two_ranks_get_the_bits_of_gloo(pool: Pool, travels: str) -> None:
    by_memory, by_gloo = (pool.run(sums, how, travels) for how in ("memory", "gloo"))
    assert [each[0] for each in by_memory] == ["shared memory"] * 2
    assert all(each[0].startswith("gloo: sums through shared memory with a worker that") for each in by_gloo)
    for _, made, total, left in by_memory:
        assert (total, left) == (3.0, 0)
        assert all(np.array_equal(a, b) for a, b in zip(made, by_gloo[0][1], strict=True))


def test_three_ranks_agree_bit_for_bit_in_every_run_and_cut(pool: Pool) -> None:
    first, *others = (pool.run(sums, "memory", "", size, ranks=3) for size in (1 << 20, 1 << 20, 5000, 64 << 20))
    (_, want, total, _), *_ = first
    assert total == 6.0
    for path, made, _, left in [*first, *(each for run in others for each in run)]:
        assert (path, left) == ("shared memory", 0)
        assert all(np.array_equal(a, b) for a, b in zip(made, want, strict=True))
    by_gloo = pool.run(sums, "gloo", ranks=3)[0][1]  # which adds in another order
    assert all(np.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(want, by_gloo, strict=True))


def transports(world) -> list[str]:
    parameters = dict(network().named_parameters())
    pair = world.groups({"pair": [[0, 1], [2]]})["pair"]
    store = create_kvstore("dist_sync", world)
    syncs = [
        BucketedAllReduce(parameters, world, codec=find_codec("int8")),
        BucketedAllReduce(parameters, world, group=pair),
        store.gradients(parameters),
    ]
    found = [sync.transport for sync in syncs]
    for each in (*syncs, store):
        each.close()
    return found


def test_the_transport_is_said(pool: Pool) -> None:
    pair = ["gloo: compressed", "gloo: a group of some of the workers", "shared memory"]
    third = [pair[0], "nothing is sent: no other rank has these parameters", pair[2]]
    assert pool.run(transports, ranks=3) == [pair, pair, third]


def gone(world, folder: str) -> None:
    model = network()
    sync = BucketedAllReduce(dict(model.named_parameters()), world)
    sync.prepare_last_backward()
    model(torch.ones(1, WIDTH)).sum().backward()
    if world.rank == 1:
        Path(folder, "killed").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CommError) as caught:
        sync.wait(torch.zeros(1))
    Path(folder, "noticed").write_text(str(time.monotonic()))
    sync.close()
    Path(folder, "said").write_text(str(caught.value))


def test_a_killed_rank_is_named_long_before_the_time_out(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(WorkersFailed) as caught:
        pool.run(gone, str(tmp_path), comm_timeout_s=120.0, timeout_s=20.0)
    assert caught.value.outcomes == ["ok", "exit code -9"]
    said = (tmp_path / "said").read_text()
    assert "rank 1 (pid " in said
    assert "has ended" in said
    killed_s, noticed_s = (float((tmp_path / name).read_text()) for name in ("killed", "noticed"))
    assert noticed_s - killed_s < 6
