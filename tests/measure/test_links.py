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

from unisono.measure.links import PAIR_SIZES, clock_offsets, probe_all_reduce, probe_pairs, tournament

CPU = torch.device("cpu")
SIZES = (4, 4096, 1 << 20)


def measured(world: Any, late_rank: int = -1, ahead_s: float = 0.0) -> dict[str, Any]:
    def reduce(tensor: torch.Tensor) -> None:
        if world.rank == late_rank:
            late.wait(0.02)
        dist.all_reduce(tensor, group=world.group)

    late = threading.Event()
    sums = probe_all_reduce(world, reduce, transport="gloo", hosts=["h"], device=CPU, sizes=SIZES, budget_s=0.02)
    pairs = probe_pairs(world, transport="gloo", hosts=["h"], device=CPU, sizes=(65536,))
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


SLOW_BYTES_PER_S = 2.5e6  # 20 Mbit/s
FAST_BYTES_PER_S = 1e9


def timed_pairs(world: Any, rates: dict[str, float], connecting_s: float = 0.0, **options: Any) -> dict[str, Any]:
    """Pairs whose messages go through, and take as long as over links of these rates [B/s], and once more to connect."""
    from unisono.measure import links

    exchange, taken_s, sizes, connected = links._there_and_back, [], [], set()

    def as_over_a_link(world: Any, tensor: torch.Tensor, pair: tuple[int, int], device: torch.device) -> float:
        exchange(world, tensor, pair, device)
        seconds = tensor.nbytes / rates.get(f"{pair[0]}-{pair[1]}", FAST_BYTES_PER_S)
        seconds += 0.0 if pair in connected else connecting_s
        connected.add(pair)
        taken_s.append(2 * seconds)
        sizes.append(tensor.nbytes)
        return seconds

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links, "_there_and_back", as_over_a_link)
        found = probe_pairs(world, transport="gloo", hosts=["h"], device=CPU, **options)
    rows = [(rate.nbytes, rate.pair, round(rate.bytes_per_s)) for rate in found]
    return {"rows": rows, "sizes": sizes, "taken_s": sum(taken_s)}


def test_pairs_over_fast_links_are_timed_with_all_sizes(pool: Pool) -> None:
    told = pool.run(timed_pairs, {"1-2": FAST_BYTES_PER_S / 2}, connecting_s=0.5, ranks=3)
    assert told[0]["rows"] == told[1]["rows"] == told[2]["rows"]
    rows = told[0]["rows"]
    assert [nbytes for nbytes, _, _ in rows] == [nbytes for nbytes in PAIR_SIZES for _ in range(3)]
    assert [(pair, rate) for _, pair, rate in rows[::3]] == [((1, 2), round(FAST_BYTES_PER_S / 2))] * 3


def test_one_slow_pair_makes_the_messages_of_all_smaller(pool: Pool) -> None:
    told = pool.run(timed_pairs, {"0-3": SLOW_BYTES_PER_S}, ranks=4)
    rows = told[0]["rows"]
    assert len(rows) == 12  # of two sizes: the third would take 20 s
    assert [(nbytes, pair) for nbytes, pair, _ in rows[::6]] == [(nbytes, (0, 3)) for nbytes in PAIR_SIZES[:2]]
    assert all(rank["sizes"] == told[0]["sizes"] and rank["rows"] == rows for rank in told)
    assert max(rank["taken_s"] for rank in told) < 10.0


def test_pairs_over_slow_links_take_no_longer_than_their_budget(pool: Pool) -> None:
    slow = {f"{first}-{second}": SLOW_BYTES_PER_S for first, second in combinations(range(4), 2)}
    told = pool.run(timed_pairs, slow, ranks=4, budget_s=3.0)
    assert {nbytes for nbytes, _, _ in told[0]["rows"]} == {PAIR_SIZES[0]}
    assert len(told[0]["rows"]) == 6
    assert max(rank["taken_s"] for rank in told) < 3.0


def test_of_a_link_that_is_too_slow_for_all_pairs_some_are_left_out(pool: Pool) -> None:
    slow = {f"{first}-{second}": 1e4 for first, second in combinations(range(4), 2)}
    told = pool.run(timed_pairs, slow, ranks=4, budget_s=3.0)
    first_round = sorted(next(tournament(4)))
    assert sorted(pair for _, pair, _ in told[0]["rows"]) == first_round
    assert all(rank["rows"] == told[0]["rows"] for rank in told)
