"""dist_sync as a store: order as a function of the calls, fused buffers, sums by host, workers out of step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pool import Pool, WorkersFailed

import unisono.kvstore.allreduce.network as network
from unisono.errors import CommError, ConfigError
from unisono.kvstore import create_kvstore
from unisono.kvstore.allreduce import shared_memory
from unisono.kvstore.allreduce.network import is_hierarchy_useful
from unisono.kvstore.backends.allreduce import QUEUE_BYTES


def launches(store: Any) -> list[list[str]]:
    """From now on: the keys of every buffer that leaves."""
    seen: list[list[str]] = []
    launch = store._backend._launch
    store._backend._launch = lambda entries: (seen.append([entry.key for entry in entries]), launch(entries))[1]
    return seen


def what_leaves_when(world) -> dict[str, list[list[str]]]:
    store = create_kvstore("dist_sync", world, shared_memory=False)
    large = QUEUE_BYTES // 16  # elements: a quarter of a queue travels alone
    sizes = {"a": 3, "b": 3, "c": 3, "large": large}
    store.init({key: torch.zeros(size) for key, size in sizes.items()} | {"wide": torch.zeros(3, dtype=torch.float64)})
    seen = launches(store)
    outcomes: dict[str, list[list[str]]] = {}

    def note(what: str) -> None:
        outcomes[what] = list(seen)
        seen.clear()

    ones = {key: torch.ones(size) for key, size in sizes.items()}
    first = store.push("a", ones["a"])
    store.push("b", ones["b"], priority=1)
    store.pull("a")
    note("nothing before someone waits")
    first.wait()
    note("small ones in one buffer, highest priority first")
    store.push({"a": ones["a"], "large": ones["large"], "wide": ones["a"].double(), "b": ones["b"], "c": ones["c"]})
    store.barrier()
    note("large ones and other dtypes in buffers of their own")
    store.push("a", ones["a"])
    store.push("a", ones["a"])
    note("a second push sends the first")
    store.barrier()
    seen.clear()
    store.init("huge", torch.zeros(QUEUE_BYTES // 4))
    store.push("huge", torch.ones(QUEUE_BYTES // 4))
    note("a full queue leaves")
    store.close()
    return outcomes


def test_what_leaves_when(pool: Pool) -> None:
    one, other = pool.run(what_leaves_when)
    assert one == other
    assert one == {
        "nothing before someone waits": [],
        "small ones in one buffer, highest priority first": [["b", "a"]],
        "large ones and other dtypes in buffers of their own": [["a"], ["large"], ["wide"], ["b", "c"]],
        "a second push sends the first": [["a"]],
        "a full queue leaves": [["huge"]],
    }


def sums(world, **how: Any) -> list[Any]:
    store = create_kvstore("dist_sync", world, **how)
    shapes = {"w": (40, 30), "b": (40,), "large": (600, 500), "n": ()}
    store.init({key: torch.zeros(shape) for key, shape in shapes.items()})
    torch.manual_seed(world.rank)
    values = {key: torch.randn(shape) for key, shape in shapes.items()}
    values["w"] = values["w"].t().contiguous().t()
    pulled = store.pushpull(values).wait()
    ids = torch.tensor([world.rank, 39, 0])
    pulled.append(store.pushpull("w", (ids, torch.randn(3, 30))).wait())
    store.close()
    return [each.numpy() for each in pulled]


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_are_bit_identical_on_all_workers(pool: Pool, ranks: int) -> None:
    expected = [torch.zeros(40, 30), torch.zeros(40), torch.zeros(600, 500), torch.zeros(()), torch.zeros(40, 30)]
    for rank in range(ranks):
        torch.manual_seed(rank)
        for total in expected[:4]:
            total += torch.randn(total.shape)
        expected[4].index_add_(0, torch.tensor([rank, 39, 0]), torch.randn(3, 30))
    first, *others = pool.run(sums, ranks=ranks, shared_memory=False)
    for got, want in zip(first, expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(got), want)
    for other in others:
        assert all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))
    for pulled in pool.run(sums, ranks=ranks):
        # through memory, so added in the order of ranks, as above
        assert all(np.array_equal(a, b.numpy()) for a, b in zip(pulled, expected, strict=True))


def where_memory_cannot_be_shared(world) -> list[Any]:
    able = shared_memory._able
    if world.rank == 1:
        shared_memory._able = lambda: False
    try:
        with pytest.raises(ConfigError, match="is not on Linux and x86-64"):
            create_kvstore("dist_sync", world, shared_memory=True)
        return sums(world)
    finally:
        shared_memory._able = able


def test_without_shared_memory_sums_go_over_the_network(pool: Pool) -> None:
    for got, want in zip(pool.run(where_memory_cannot_be_shared), pool.run(sums, shared_memory=False), strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))


def other_order(world, shared_memory: bool) -> str:
    store = create_kvstore("dist_sync", world, shared_memory=shared_memory)
    store.init({key: torch.zeros(3) for key in "abc"})
    store.push("a", torch.ones(3)).wait()
    for key in "bc" if world.rank == 0 else "cb":
        store.push(key, torch.ones(3))
    with pytest.raises(CommError) as caught:
        store.pull("b").wait()
    return str(caught.value)


@pytest.mark.parametrize("shared_memory", [True, False])
def test_another_order_ends_in_an_error_that_names_the_keys(pool: Pool, shared_memory: bool) -> None:
    for text in pool.run(other_order, shared_memory):
        assert "the order of store calls is" in text
        assert '"call 2": "push \'c\' priority 0 dense"' in text
        assert '"call 2": "push \'b\' priority 0 dense"' in text
        assert "call 1" not in text


def one_push_more(world, shared_memory: bool) -> str:
    store = create_kvstore("dist_sync", world, shared_memory=shared_memory)
    store.init({"a": torch.zeros(3), "b": torch.zeros(3)})
    store.push("a", torch.ones(3))
    if world.rank == 1:
        store.push("b", torch.ones(3))
    with pytest.raises(CommError) as caught:
        store.barrier()
    return str(caught.value)


@pytest.mark.parametrize("shared_memory", [True, False])
def test_one_push_more_is_named(pool: Pool, shared_memory: bool) -> None:
    for text in pool.run(one_push_more, shared_memory):
        assert "push 'b' priority 0 dense" in text


def dies(world) -> str:
    store = create_kvstore("dist_sync", world)
    store.init("a", torch.zeros(3))
    if world.rank == 1:
        raise SystemExit(3)
    with pytest.raises(CommError) as caught:
        store.pushpull("a", torch.ones(3)).wait()
    return str(caught.value)


def test_a_worker_that_is_gone_is_a_comm_error(pool: Pool) -> None:
    with pytest.raises(WorkersFailed) as caught:
        pool.run(dies, comm_timeout_s=3.0)
    assert caught.value.outcomes[0] == "ok"


def by_host(world, hosts: list[str]) -> tuple[bool, list[Any]]:
    used: list[int] = []
    hierarchical, this_host = network.hierarchical_all_reduce, network.host_id
    network.host_id = lambda: hosts[world.rank]
    network.hierarchical_all_reduce = lambda *args: (used.append(1), hierarchical(*args))[1]
    try:
        pulled = sums(world, shared_memory=False)
    finally:
        network.hierarchical_all_reduce = hierarchical
        network.host_id = this_host
    return bool(used), pulled


@pytest.mark.full
@pytest.mark.parametrize(
    ("hosts", "hierarchical"), [(["x", "x", "y"], True), (["x", "y", "x"], True), (["x", "y", "z"], False)], ids=str
)
def test_sums_go_by_host(pool: Pool, hosts: list[str], hierarchical: bool) -> None:
    flat = pool.run(sums, ranks=3)[0]
    outcomes = pool.run(by_host, hosts, ranks=3)
    for used, pulled in outcomes:
        assert used is hierarchical
        for got, want in zip(pulled, flat, strict=True):
            torch.testing.assert_close(torch.from_numpy(got), torch.from_numpy(want))
        assert all(np.array_equal(a, b) for a, b in zip(pulled, outcomes[0][1], strict=True))


def test_when_a_hierarchy_is_worth_it() -> None:
    assert is_hierarchy_useful("xxyy")
    assert not is_hierarchy_useful("xxxx")
    assert not is_hierarchy_useful("xyz")


def other_optimizer(world) -> str:
    store = create_kvstore("dist_sync", world)
    with pytest.raises(CommError) as caught:
        store.set_optimizer("sgd", lr=0.1 + world.rank)
    return str(caught.value)


def test_different_optimizers_are_refused(pool: Pool) -> None:
    for text in pool.run(other_optimizer):
        assert "the store's optimizer is" in text
        assert "on rank 1" in text


def large_pushes(world, shared_memory: bool) -> list[bool]:
    """Three pushes of 20 MB from one tensor that changes between them, pulled late."""
    store = create_kvstore("dist_sync", world, shared_memory=shared_memory)
    value = torch.arange(5_000_000, dtype=torch.float32)
    store.init({"large": torch.zeros_like(value), "other": torch.zeros(2)})
    found: list[bool] = []
    for number in range(3):
        given = value * (world.rank + 1) + number
        store.push("large", given)
        given.zero_()  # the store has its own copy
        store.push("other", torch.ones(2))
        found.append(torch.equal(store.pull("large").wait(), 3 * value + 2 * number))
    store.close()
    return found


@pytest.mark.parametrize("shared_memory", [True, False])
def test_large_pushes_share_memory_with_nobody(pool: Pool, shared_memory: bool) -> None:
    assert pool.run(large_pushes, shared_memory, ranks=2) == [[True] * 3] * 2
