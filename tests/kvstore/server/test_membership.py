"""Bounded staleness and leases: the bound holds in any interleaving, and nobody waits for the dead."""

from __future__ import annotations

import random
import threading
import time

import pytest

from unisono.errors import CommError
from unisono.kvstore.server.membership import GRACE_S, LEASE_S, Clocks


class Hands:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_nobody_runs_further_ahead_than_the_bound(staleness: int) -> None:
    clocks, steps, workers = Clocks(staleness), 30, 4
    at, lock, seen = dict.fromkeys(range(workers), 0), threading.Lock(), []

    def work(worker: int) -> None:
        rng = random.Random(worker)
        for step in range(1, steps + 1):
            if rng.random() < 0.3:
                time.sleep(0.001 * (1 + worker))
            clocks.tick(worker, 1, step)
            with lock:
                at[worker] = step
                seen.append(step)
            # those that were let through are at most ``staleness`` clocks ahead of what the slowest has ticked
            assert step - clocks.slowest_clock <= staleness
        clocks.leave(worker, 1)

    for worker in range(workers):
        clocks.join(worker, 1)
    errors: list[BaseException] = []

    def guarded(worker: int) -> None:
        try:
            work(worker)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(worker,)) for worker in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not errors
    assert set(at.values()) == {steps}


def waiting(clocks: Clocks, worker: int, clock: int) -> tuple[threading.Thread, list[object]]:
    outcome: list[object] = []

    def wait() -> None:
        try:
            outcome.append(clocks.tick(worker, 1, clock))
        except CommError as error:
            outcome.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join(0.1)
    return thread, outcome


def test_a_dead_worker_holds_nobody_up() -> None:
    hands, ended = Hands(), []
    clocks = Clocks(0, on_end=ended.append, now=hands)
    clocks.join(0, 1)
    clocks.join(1, 1)
    thread, outcome = waiting(clocks, 0, 1)
    assert not outcome
    hands.now_s += LEASE_S - 1
    clocks.seen(0, 1)
    assert clocks.end_expired_leases() == []
    hands.now_s += 2
    assert clocks.end_expired_leases() == [1]
    thread.join(5)
    assert outcome == [1]
    assert ended == [1]
    assert clocks.live_clocks == {0: 1}
    with pytest.raises(CommError, match="worker 1, whose lease has ended"):
        clocks.seen(1, 1)
    assert clocks.join(1, 2) == 1  # back, at the clock of the slowest


def test_one_who_was_thought_dead_while_it_waited_still_waits_when_it_is_back() -> None:
    hands = Hands()
    clocks = Clocks(0, now=hands)
    clocks.join(0, 1)
    clocks.join(1, 1)
    thread, outcome = waiting(clocks, 0, 3)
    hands.now_s += LEASE_S - 1
    clocks.seen(1, 1)
    hands.now_s += 2
    assert clocks.end_expired_leases() == [0]
    assert clocks.join(0, 1) == 0
    assert clocks.tick(1, 1, 3) == 3
    thread.join(5)
    assert outcome == [3]


def test_a_lost_connection_shortens_the_lease_and_a_return_restores_it() -> None:
    hands = Hands()
    clocks = Clocks(now=hands)
    clocks.join(0, 1)
    clocks.connection_closed(0, 1)
    hands.now_s += GRACE_S - 0.5
    clocks.join(0, 1)
    hands.now_s += GRACE_S
    assert clocks.end_expired_leases() == []
    clocks.connection_closed(0, 1)
    hands.now_s += GRACE_S
    assert clocks.end_expired_leases() == [0]


def test_a_restarted_worker_fences_its_earlier_process() -> None:
    ended: list[int] = []
    clocks = Clocks(1, on_end=ended.append)
    clocks.join(0, 1)
    clocks.tick(0, 1, 5)
    assert clocks.join(0, 2) == 5
    assert ended == [0]
    with pytest.raises(CommError, match="worker 0 of restart 1"):
        clocks.tick(0, 1, 6)
    with pytest.raises(CommError, match="worker 0 of restart 1"):
        clocks.join(0, 1)


def test_unbounded_never_waits_and_close_ends_every_wait() -> None:
    free = Clocks(None)
    free.join(0, 1)
    free.join(1, 1)
    assert free.tick(0, 1, 1000) == 0
    clocks = Clocks(0)
    clocks.join(0, 1)
    clocks.join(1, 1)
    thread, outcome = waiting(clocks, 0, 1)
    clocks.close()
    thread.join(5)
    assert "the server is stopping" in str(outcome[0])


def test_the_first_after_a_restart_begins_where_the_snapshot_was() -> None:
    clocks = Clocks(2)
    clocks.start_at(7)
    assert clocks.join(3, 1) == 7
