"""Bytes of collectives by group: payload, on the wire, and of the sums that they are compared with."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import torch
from pool import Pool

from unisono.observe.meters import StepTimers
from unisono.parallel.timed_collectives import (
    all_gather_single,
    all_reduce,
    all_to_all_single,
    count_message,
    recording_exposed_time,
    reduce_scatter_single,
)
from unisono.parallel.traffic import Traffic


def exchanged(world: Any) -> list[tuple[Any, ...]]:
    """What is counted of each kind of collective over three ranks: 12,000 bytes, or parts of 4,000."""
    names = ("shard", "tp", "cp", "ep", "stage 1 to 2", "stages 0, 2", "alone")
    lists = {name: [[rank] for rank in range(3)] if name == "alone" else [[0, 1, 2]] for name in names}
    groups = world.groups(lists)
    traffic = Traffic(world)
    part, whole = torch.zeros(1000), torch.zeros(3000)
    uneven = [500, 1500, 1000]  # to ranks 0, 1 and 2, from each of them
    with recording_exposed_time(StepTimers(), traffic):
        all_reduce(whole, groups["shard"])
        all_reduce(whole, groups["shard"])
        all_reduce(torch.zeros(2), world.group)
        all_gather_single(whole, part, groups["tp"])
        reduce_scatter_single(part, whole, groups["cp"])
        all_to_all_single(torch.zeros(3 * uneven[world.rank]), whole, groups["ep"], [uneven[world.rank]] * 3, uneven)
        count_message(groups["stage 1 to 2"], part)
        all_reduce(part, groups["stages 0, 2"])
        all_reduce(part, groups["alone"])
    all_reduce(whole, groups["shard"])  # not in a step
    rows = traffic.take()
    assert traffic.take() == []
    assert {(row.transport, row.ranks, row.hosts) for row in rows} == {("gloo", 3, 1)}
    return [(row.axis, row.group, row.operation, *map(astuple, row.messages.values())) for row in rows]


def test_what_each_kind_of_collective_counts(pool: Pool) -> None:
    for rank, rows in enumerate(pool.run(exchanged, ranks=3)):
        own = (2000, 6000, 4000)[rank]
        assert rows == [
            ("dp", "shard", "all_reduce", (2, 24_000, 32_000, 24_000)),
            ("dp", "all", "all_reduce", (1, 8, 10, 8)),
            ("tp", "tp", "all_reduce", (1, 12_000, 8000, 6000)),
            ("cp", "cp", "all_reduce", (1, 12_000, 8000, 12_000)),  # Gloo sums all of it
            ("ep", "ep", "all_reduce", (1, 12_000, 12_000 - own, 6000)),
            ("pp", "stages", "send", (1, 4000, 4000, 4000)),
            ("pp", "shared parameters", "all_reduce", (1, 4000, 5333, 4000)),
        ]
