"""Links between real ranks: what was measured, agreed by all of them."""

from __future__ import annotations

import threading
from dataclasses import asdict
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool

from unisono.measure.links import clock_offsets, probe_all_reduce, probe_pairs, tournament

CPU = torch.device("cpu")
SIZES = (4, 4096, 1 << 20)


def measured(world: Any, late_rank: int = -1, ahead_s: float = 0.0) -> dict[str, Any]:
    def reduce(tensor: torch.Tensor) -> None:
        if world.rank == late_rank:
            late.wait(0.02)
        dist.all_reduce(tensor, group=world.group)

    late = threading.Event()
    sums = probe_all_reduce(world, reduce, transport="gloo", hosts=["h"], device=CPU, sizes=SIZES, budget_s=0.02)
    pairs = probe_pairs(world, transport="gloo", hosts=["h"], device=CPU, nbytes=65536)
    with pytest.MonkeyPatch.context() as patch:
        from unisono.measure import links

        now = links.time.time
        if world.rank == 1:
            patch.setattr(links.time, "time", lambda: now() + ahead_s)
        offsets = clock_offsets(world)
    return {"sums": [asdict(rate) for rate in sums], "pairs": [asdict(rate) for rate in pairs], "offsets": offsets}


def test_three_ranks_agree_on_sums_pairs_and_clocks(pool: Pool) -> None:
    outcomes = pool.run(measured, ranks=3, ahead_s=100.0)
    for outcome in outcomes:
        assert [(rate["nbytes"], rate["ranks"], rate["hosts"]) for rate in outcome["sums"]] == [
            (size, 3, ("h",)) for size in SIZES
        ]
        assert all(rate["seconds"] > 0 for rate in outcome["sums"])
        assert sorted(rate["pair"] for rate in outcome["pairs"]) == [(0, 1), (0, 2), (1, 2)]
        slowest_first = [rate["seconds"] for rate in outcome["pairs"]]
        assert slowest_first == sorted(slowest_first, reverse=True)
        assert outcome["offsets"] == outcomes[0]["offsets"]
    same, ahead, other = outcomes[0]["offsets"]
    assert same == 0.0
    assert ahead == pytest.approx(100.0, abs=5.0)
    assert abs(other) < 5.0


def test_the_slowest_rank_counts(pool: Pool) -> None:
    for outcome in pool.run(measured, ranks=2, late_rank=1):
        assert all(rate["seconds"] >= 0.02 for rate in outcome["sums"])


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8, 9])
def test_every_two_ranks_meet_once(ranks: int) -> None:
    rounds = list(tournament(ranks))
    assert sorted(pair for pairs in rounds for pair in pairs) == sorted(combinations(range(ranks), 2))
    for pairs in rounds:
        met = [rank for pair in pairs for rank in pair]
        assert len(met) == len(set(met))


def test_of_very_many_ranks_some_pairs_are_left_out() -> None:
    assert len(list(tournament(1000))) == 63


def slow_sums(world: Any) -> list[int]:
    late = threading.Event()
    rates = probe_all_reduce(
        world,
        lambda tensor: late.wait(0.02 * len(tensor) / (1 << 18)),
        transport="gloo",
        hosts=["h"],
        device=CPU,
        sizes=(4, 1 << 20, 4 << 20, 8 << 20),
        budget_s=0.02,
    )
    return [rate.nbytes for rate in rates]


def test_sizes_that_take_too_long_are_left_out(pool: Pool) -> None:
    assert pool.run(slow_sums, ranks=2) == [[4, 1 << 20]] * 2
