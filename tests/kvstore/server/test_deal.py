"""Every unit is done exactly once in the end, whoever dies, joins or comes back; fences hold; state survives."""

from __future__ import annotations

import json
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import CommError
from unisono.kvstore.server.deal import Deal

# (what, worker): a dead worker may still say done, for it may have been thought dead only
moves = st.lists(
    st.tuples(st.sampled_from(["claim", "done", "die", "late", "restart"]), st.integers(0, 3)), max_size=60
)


@given(st.integers(0, 8), moves)
def test_no_unit_is_skipped(units: int, moves) -> None:
    deal = Deal(units)
    holds: dict[int, list[int]] = {worker: [] for worker in range(4)}
    ghosts: list[int] = []  # units of the dead
    counted: list[int] = []
    for what, worker in moves:
        if what == "claim":
            unit = deal.claim(worker)
            if isinstance(unit, int):
                assert unit not in counted
                assert all(unit not in units for units in holds.values())
                holds[worker].append(unit)
        elif what == "done" and holds[worker]:
            unit = holds[worker].pop()
            if deal.done(unit):
                counted.append(unit)
        elif what == "die":
            given_back = deal.give_back(worker)
            assert set(given_back) == set(holds[worker]) - set(counted)
            ghosts += holds[worker]
            holds[worker] = []
        elif what == "late" and ghosts:
            unit = ghosts.pop()
            if deal.done(unit):
                counted.append(unit)
        elif what == "restart":
            deal = Deal.restored(json.loads(json.dumps(deal.json())))
            ghosts += [unit for units in holds.values() for unit in units]
            holds = {worker: [] for worker in range(4)}
    for worker in holds:
        deal.give_back(worker)
    while isinstance(unit := deal.claim(9), int):
        assert deal.done(unit)
        counted.append(unit)
    assert unit == "end"
    assert sorted(counted) == list(range(units))
    assert deal.num_done == units


def test_units_before_the_fence_become_quiet_and_none_behind_it_is_dealt() -> None:
    deal = Deal(10)
    deal.fence(2)
    assert [deal.claim(0), deal.claim(1), deal.claim(0)] == [0, 1, "wait"]
    assert not deal.quiet(2, 0.0)
    finishing = threading.Timer(0.1, lambda: (deal.done(0), deal.done(1)))
    finishing.start()
    assert deal.quiet(2, 10.0)
    finishing.join()
    assert deal.claim(0) == "wait"
    deal.fence(None)
    assert deal.claim(0) == 2


def test_a_claim_waits_for_what_comes_back() -> None:
    deal = Deal(1)
    assert deal.claim(0) == 0
    assert deal.claim(1) == "wait"
    dying = threading.Timer(0.1, lambda: deal.give_back(0))
    dying.start()
    assert deal.claim(1, timeout_s=10.0) == 0
    dying.join()
    deal.done(0)
    assert deal.claim(0, timeout_s=10.0) == "end"


def test_a_unit_that_is_none_cannot_be_done() -> None:
    for unit in (-1, 5):
        with pytest.raises(CommError, match=f"unit {unit} is said to be done\n.*has the units 0 to 4"):
            Deal(5).done(unit)


def test_what_was_dealt_before_a_restart_may_be_done_after_it() -> None:
    deal = Deal(3)
    assert [deal.claim(0), deal.claim(1), deal.done(0)] == [0, 1, True]
    again = Deal.restored(deal.json())
    assert again.done(1)
    assert again.claim(0) == 2


def test_close_ends_a_wait() -> None:
    deal = Deal(1)
    deal.claim(0)
    closing = threading.Timer(0.1, deal.close)
    closing.start()
    assert deal.claim(1, timeout_s=30.0) == "wait"
    closing.join()
