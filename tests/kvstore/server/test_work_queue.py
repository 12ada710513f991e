"""Every piece of work is done once in the end, whoever dies, joins or comes back; saves come at their steps; state survives."""

from __future__ import annotations

import json
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import CommError
from unisono.kvstore.server.work_queue import BEGIN, WAIT, WorkItem, WorkQueue

# (what, worker): a dead worker may still say done, for it may have been thought dead only
moves = st.lists(
    st.tuples(st.sampled_from(["claim", "claim", "done", "die", "late", "restart", "stop"]), st.integers(0, 3)),
    max_size=80,
)


def begun(units: int, first: int = 0, **more: int | None) -> WorkQueue:
    deal = WorkQueue(units, **more)
    assert deal.claim(9) == BEGIN
    assert deal.mark_done(WorkItem("begin", first))
    return deal


class Run:
    """What workers see and say; checks each answer against what was done before."""

    def __init__(self, deal: WorkQueue, first: int, per_step: int, staleness: int | None) -> None:
        self.deal, self.per_step, self.staleness = deal, per_step, staleness
        self.holds: dict[int, list[WorkItem]] = {worker: [] for worker in range(4)}
        self.ghosts: list[WorkItem] = []  # of the dead
        self.units = list(range(first))
        self.saves: list[int] = []

    def claim(self, worker: int) -> WorkItem:
        work = self.deal.claim(worker)
        if work.kind in ("unit", "save"):
            assert all(work not in held for held in self.holds.values())
            if work.kind == "unit":
                assert work.number not in self.units
                if self.staleness is not None:
                    old = (work.number // self.per_step - self.staleness) * self.per_step
                    assert set(range(old)) <= set(self.units)
            else:
                assert sorted(self.units) == list(range(work.number)), "a save sees all units before it, and no other"
                # who still computes one computes it in vain
                assert all(other.number in self.units for held in self.holds.values() for other in held)
            self.holds[worker].append(work)
        return work

    def done(self, work: WorkItem) -> None:
        if self.deal.mark_done(work):
            (self.units if work.kind == "unit" else self.saves).append(work.number)

    def die(self, worker: int) -> None:
        counted = {
            *(WorkItem("unit", number) for number in self.units),
            *(WorkItem("save", number) for number in self.saves),
        }
        assert set(self.deal.give_back(worker)) == set(self.holds[worker]) - counted
        self.ghosts += self.holds[worker]
        self.holds[worker] = []


@given(
    st.integers(1, 9),
    st.integers(0, 4),
    st.sampled_from([1, 2, 3]),
    st.integers(0, 2),
    st.sampled_from([None, 0, 1]),
    moves,
)
def test_nothing_is_skipped(units: int, every: int, per_step: int, first: int, staleness: int | None, moves) -> None:
    units *= per_step
    first = min(first * per_step, units)
    deal = begun(
        units, first, batch_shards_per_save=every * per_step, batch_shards_per_step=per_step, staleness=staleness
    )
    run = Run(deal, first, per_step, staleness)
    goal = units
    for what, worker in moves:
        if what == "claim":
            run.claim(worker)
        elif what == "done" and run.holds[worker]:
            run.done(run.holds[worker].pop())
        elif what == "die":
            run.die(worker)
        elif what == "late" and run.ghosts and run.ghosts[-1].kind == "unit":
            run.done(run.ghosts.pop())
        elif what == "stop":
            run.deal.stop()
        elif what == "restart":
            run.deal = WorkQueue.from_json(json.loads(json.dumps(run.deal.to_json())))
            run.ghosts += [work for held in run.holds.values() for work in held]
            run.holds = {worker: [] for worker in range(4)}
        goal = run.deal.to_json()["goal"]
    for worker in run.holds:
        run.die(worker)
    while (work := run.claim(0)).kind in ("unit", "save"):
        run.done(work)
        run.holds[0].remove(work)
    assert work == (("stopped" if goal < units else "end"), goal)
    assert sorted(run.units) == list(range(max(goal, max(run.units, default=-1) + 1)))
    assert len(run.units) == len(set(run.units))
    assert goal % per_step == 0
    between = range(first // (every * per_step) * every * per_step, goal, every * per_step) if every else ()
    assert run.saves == sorted(
        {*(point for point in between if first < point < goal), *([goal] if goal > first else [])}
    )


def test_a_save_comes_when_all_before_it_are_done_and_holds_up_what_is_behind() -> None:
    deal = begun(4, batch_shards_per_save=2)
    assert [deal.claim(0), deal.claim(1)] == [WorkItem("unit", 0), WorkItem("unit", 1)]
    assert deal.claim(0) == WAIT
    finishing = threading.Timer(0.1, lambda: (deal.mark_done(WorkItem("unit", 0)), deal.mark_done(WorkItem("unit", 1))))
    finishing.start()
    assert deal.claim(1, timeout_s=10.0) == WorkItem("save", 2)
    finishing.join()
    assert deal.claim(0) == WAIT
    assert deal.give_back(1) == [WorkItem("save", 2)]
    assert deal.claim(0) == WorkItem("save", 2)
    assert deal.mark_done(WorkItem("save", 2))
    assert deal.claim(1) == WorkItem("unit", 2)


def test_one_worker_begins_and_the_others_wait_for_it() -> None:
    deal = WorkQueue(6)
    assert deal.claim(0) == BEGIN
    assert deal.claim(1) == WAIT
    assert deal.give_back(0) == [BEGIN]
    assert deal.claim(1) == BEGIN
    assert deal.mark_done(WorkItem("begin", 4))
    assert not deal.mark_done(WorkItem("begin", 0))  # the first comes late
    assert deal.claim(0) == WorkItem("unit", 4)


def test_a_stop_ends_the_run_at_a_step() -> None:
    deal = begun(9, batch_shards_per_step=3)
    assert [deal.claim(worker).number for worker in range(4)] == [0, 1, 2, 3]
    deal.stop()
    deal.stop()
    assert [deal.claim(0), deal.claim(1), deal.claim(2)] == [WorkItem("unit", 4), WorkItem("unit", 5), WAIT]
    for unit in range(6):
        deal.mark_done(WorkItem("unit", unit))
    assert deal.claim(0) == WorkItem("save", 6)
    deal.mark_done(WorkItem("save", 6))
    assert deal.claim(1) == WorkItem("stopped", 6)


def test_a_run_that_ends_early_has_not_been_stopped() -> None:
    deal = begun(9, batch_shards_per_step=3)
    assert deal.claim(0) == WorkItem("unit", 0)
    deal.stop(finished=True)
    for unit in range(3):
        assert deal.mark_done(WorkItem("unit", unit), weight=0.5)
        assert not deal.mark_done(WorkItem("unit", unit), weight=0.5)
    assert deal.total_weight == 1.5
    again = WorkQueue.from_json(deal.to_json())
    assert again.mark_done(WorkItem("save", 3))
    assert (again.claim(1), again.total_weight) == (WorkItem("end", 3), 1.5)


def test_who_leads_begins_and_saves() -> None:
    deal, leader = WorkQueue(1), [0]
    assert deal.claim(1, leads=lambda: leader[0] == 1) == WAIT
    assert deal.claim(0) == BEGIN
    deal.mark_done(WorkItem("begin", 0))
    assert deal.claim(1, leads=lambda: leader[0] == 1) == WorkItem("unit", 0)
    deal.mark_done(WorkItem("unit", 0))

    def gone() -> None:
        leader[0] = 1
        deal.give_back(0)

    dying = threading.Timer(0.1, gone)
    dying.start()
    assert deal.claim(1, timeout_s=10.0, leads=lambda: leader[0] == 1) == WorkItem("save", 1)
    dying.join()


def test_a_claim_waits_for_what_comes_back() -> None:
    deal = begun(1)
    assert deal.claim(0) == WorkItem("unit", 0)
    assert deal.claim(1) == WAIT
    dying = threading.Timer(0.1, lambda: deal.give_back(0))
    dying.start()
    assert deal.claim(1, timeout_s=10.0) == WorkItem("unit", 0)
    dying.join()
    deal.mark_done(WorkItem("unit", 0))
    assert deal.claim(0) == WorkItem("save", 1)
    deal.mark_done(WorkItem("save", 1))
    assert deal.claim(0, timeout_s=10.0) == WorkItem("end", 1)


def test_work_that_is_none_cannot_be_done() -> None:
    for work in (WorkItem("unit", -1), WorkItem("unit", 5), WorkItem("save", 6), WorkItem("wait")):
        with pytest.raises(
            CommError, match=f"{work.kind} {work.number} is done\n.*a unit is a batch shard, 0 to 4 in this run"
        ):
            WorkQueue(5).mark_done(work)


def test_what_was_dealt_before_a_restart_may_be_done_after_it() -> None:
    deal = begun(3)
    assert [deal.claim(0).number, deal.claim(1).number, deal.mark_done(WorkItem("unit", 0))] == [0, 1, True]
    again = WorkQueue.from_json(deal.to_json())
    assert again.mark_done(WorkItem("unit", 1))
    assert again.claim(0) == WorkItem("unit", 2)


def test_what_was_claimed_in_another_history_is_handed_out_again() -> None:
    deal = begun(3)
    assert [deal.claim(0).number, deal.claim(1).number] == [0, 1]
    moved = WorkQueue.from_json(deal.to_json())  # with all that was pushed
    older = WorkQueue.from_json(deal.to_json() | {"history_id": None})
    assert moved.history_id == deal.history_id != older.history_id
    assert moved.mark_done(WorkItem("unit", 0), 4.0, deal.history_id)
    assert not older.mark_done(WorkItem("unit", 0), 4.0, deal.history_id)
    assert older.total_weight == 0.0
    assert older.claim(0) == WorkItem("unit", 0)
    assert older.mark_done(WorkItem("unit", 0), 4.0, older.history_id)
    assert older.mark_done(WorkItem("unit", 1))  # a worker of an earlier release does not say


def test_close_ends_a_wait_and_without_units_there_is_no_work() -> None:
    deal = begun(1)
    deal.claim(0)
    closing = threading.Timer(0.1, deal.close)
    closing.start()
    assert deal.claim(1, timeout_s=30.0) == WAIT
    closing.join()
    assert WorkQueue(0).claim(0) == WorkItem("end", 0)
