"""Where shards lie: selected, narrowed, in blocks; and what the table says of replicas and partial gradients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from unisono.parallel.sharding import ShardTable, TensorShard, even_sizes


def read(shard: TensorShard, whole: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The part of ``whole`` that ``shard`` describes, of ``shape``."""
    part = torch.full(shape, torch.nan)
    for index, offset in shard.blocks():
        target = part[index]
        source = whole
        for dim, (begin, size) in enumerate(zip(offset, target.shape, strict=True)):
            source = source.narrow(dim, begin, size)
        target.copy_(source)
    return part


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("fused", [1, 3])
def test_runs_that_are_narrowed_are_the_rows_of_the_selected_part(ranks: int, fused: int) -> None:
    whole = torch.arange(12 * 5.0).view(12, 5)
    size = 12 // fused
    runs = [(n * size + 1, size - 2) for n in range(fused)]
    selected = torch.cat([whole.narrow(0, *run) for run in runs])
    shard = TensorShard.whole(whole.shape).select(0, runs)
    assert torch.equal(read(shard, whole, tuple(selected.shape)), selected)
    rows = -(-len(selected) // ranks)
    for rank in range(ranks + 1):  # the last one is behind the end
        start = min(rank * rows, len(selected))
        expected = selected[start : start + rows]
        narrow = shard.narrow(0, start, len(expected))
        assert torch.equal(read(narrow, whole, tuple(expected.shape)), expected)
        columns = expected[:, 2:4]
        assert torch.equal(read(narrow.narrow(1, 2, 2), whole, tuple(columns.shape)), columns)


def test_even_sizes_differ_by_one_at_most() -> None:
    assert even_sizes(7, 3) == [3, 2, 2]
    assert even_sizes(2, 3) == [1, 1, 0]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(4, 6)
        self.second.weight = self.first.weight


def test_a_table_knows_a_parameter_by_all_its_names() -> None:
    table = ShardTable(Tied())
    table.select("second.weight", 0, [(3, 3)])
    table.narrow("first.weight", "shard", 0, 1, 2)
    table.narrow("second.bias", "shard", 0, 4, 2)
    assert table.tensor_parallel == {"first.weight": TensorShard.whole((6, 4)).select(0, [(3, 3)])}
    assert table.shards["first.weight"].offset == (4, 0)
    assert table.shards["second.bias"] == TensorShard(global_shape=(6,), offset=(4,))
    assert table.split_over("tp") == {"first.weight"}
    assert table.split_over("shard") == {"first.weight", "second.bias"}


def test_replicas_are_numbered_along_the_axes_that_do_not_split() -> None:
    table = ShardTable(Tied())
    table.select("first.weight", 0, [(0, 3)], replica_id=1)
    table.narrow("second.bias", "shard", 0, 0, 3)
    ranks = {"dp_replicate": 1, "shard": 2, "tp": 1}
    dims: Any = SimpleNamespace(sizes={"dp_replicate": 2, "shard": 4, "tp": 2}, rank_along=ranks.__getitem__)
    table.number_replicas(dims)
    assert (
        table.shards["first.weight"].replica_id == 1 * 4 + 2 + 1
    )  # equal along dp_replicate and shard, and one before along tp
    assert table.shards["second.bias"].replica_id == 1 * 2 + 1


def test_partial_gradients_come_in_the_order_of_the_model() -> None:
    table, groups = ShardTable(Tied()), [object(), object()]
    for name, group in (("second.bias", groups[0]), ("second.weight", groups[1]), ("first.bias", groups[0])):
        table.sum_grad(name, group)  # type: ignore[arg-type]
    assert table.partial_grad_groups == [(groups[1], ["first.weight"]), (groups[0], ["first.bias", "second.bias"])]
