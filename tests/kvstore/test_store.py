"""Gradient synchronisation: sums equal one process's, bucket order fixed by name, tables compared, views repaired."""

from __future__ import annotations

import pytest
import torch
from pool import Pool
from torch import nn

from unisono.errors import CommError
from unisono.kvstore import create_kvstore
from unisono.kvstore.allreduce.buckets import BucketedAllReduce, _partition


def network(seed: int = 0, width: int = 8) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3))


def reduce_once(world, bucket_bytes: int, accumulate: int) -> tuple[list[list[float]], float]:
    model = network()
    sync = BucketedAllReduce(dict(model.named_parameters()), world, bucket_bytes)
    rows = torch.arange(48.0).view(12, 4).sin()
    mine = rows.tensor_split(world.world_size)[world.rank].tensor_split(accumulate)
    totals = torch.tensor([float(world.rank + 1)], dtype=torch.float64)
    for number, part in enumerate(mine, start=1):
        if number == len(mine):
            sync.prepare_last_backward()
        model(part).square().sum().backward()
    sync.wait(totals)
    gradients = [g.flatten().tolist() for g in sync.gradients()]
    sync.close()
    return gradients, float(totals)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("bucket_bytes", "accumulate"), [(1, 1), (200, 2), (1 << 20, 3)])
def test_sums_equal_one_process(pool: Pool, ranks: int, bucket_bytes: int, accumulate: int) -> None:
    model = network()
    model(torch.arange(48.0).view(12, 4).sin()).square().sum().backward()
    outcomes = pool.run(reduce_once, bucket_bytes, accumulate, ranks=ranks)
    for gradients, totals in outcomes:
        assert totals == sum(range(1, ranks + 1))
        for got, parameter in zip(gradients, model.parameters(), strict=True):
            assert got == pytest.approx(parameter.grad.flatten().tolist(), rel=1e-5, abs=1e-6)
    for other, _ in outcomes[1:]:
        assert other == outcomes[0][0]  # bit for bit


def test_buckets_are_a_function_of_the_parameters_alone() -> None:
    parameters = dict(network(width=64).named_parameters())
    sent = {name: p.dtype for name, p in parameters.items()}
    names = [[name for name, _ in bucket] for bucket in _partition(parameters, 1024, sent)]
    assert names == [["2.bias", "2.weight"], ["0.bias"], ["0.weight"]] or names == [
        ["2.bias", "2.weight"],
        ["0.bias", "0.weight"],
    ]
    mixed = {"a": nn.Parameter(torch.zeros(2)), "b": nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))}
    assert [len(bucket) for bucket in _partition(mixed, 1 << 20, {"a": torch.float32, "b": torch.bfloat16})] == [1, 1]
    several = dict.fromkeys("ab", nn.Parameter(torch.zeros(2)))
    assert [len(bucket) for bucket in _partition(several, 1 << 20, {"a": torch.float32, "b": torch.bfloat16})] == [1, 1]


def replaced_views(world) -> bool:
    """A user who clears gradients the usual way must not break the buckets."""
    model = network()
    sync = BucketedAllReduce(dict(model.named_parameters()), world)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        sync.prepare_last_backward()
        model(torch.ones(2, 4) * (world.rank + 1)).square().sum().backward()
        sync.wait(torch.zeros(1))
        pairs = zip(model.parameters(), sync.gradients(), strict=True)
        views = [p.grad is not None and p.grad.data_ptr() == g.data_ptr() for p, g in pairs]
        sums = [g.clone() for g in sync.gradients()]
        sync.zero_grad()
    sync.close()
    other = network()
    for rank in range(world.world_size):
        other(torch.ones(2, 4) * (rank + 1)).square().sum().backward()
    close = [torch.allclose(a, p.grad, rtol=1e-5) for a, p in zip(sums, other.parameters(), strict=True)]
    return all(views) and all(close)


def test_replaced_gradients_are_taken_over(pool: Pool) -> None:
    assert pool.run(replaced_views, ranks=2) == [True, True]


def init_with(world, width: int) -> list[float]:
    store = create_kvstore("dist_sync", world)
    model = network(seed=world.rank, width=width + (world.rank == 1) * (width == 5))
    try:
        store.init(dict(model.state_dict()))
    except CommError as error:
        return [str(error)]
    return model[0].weight.flatten()[:3].tolist()


def test_init_gives_every_worker_rank_zeros_values(pool: Pool) -> None:
    first, second = pool.run(init_with, 8, ranks=2)
    assert first == second == network(seed=0)[0].weight.flatten()[:3].tolist()


def test_init_refuses_different_tables_naming_the_rank(pool: Pool) -> None:
    for (text,) in pool.run(init_with, 5, ranks=2):
        assert "parameter table is" in text
        assert "on rank 1" in text


def store_facts(world) -> tuple[int, int, str]:
    store = create_kvstore("dist_sync" if world.world_size > 1 else "local", world)
    return store.rank, store.num_workers, store.kind


def test_rank_and_workers(pool: Pool) -> None:
    assert pool.run(store_facts, ranks=2) == [(0, 2, "dist_sync"), (1, 2, "dist_sync")]
    assert pool.run(store_facts, ranks=1) == [(0, 1, "local")]
