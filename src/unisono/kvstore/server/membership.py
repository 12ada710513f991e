"""The members of a run: connected peers and their restart counts, barriers, and the leases and clocks of workers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Set
from dataclasses import dataclass

from unisono.errors import CommError
from unisono.kvstore.wire.auth import Identity


class PeerTable:
    """Connections of workers or of servers. A peer may have several, and is gone with its last one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: dict[int, int] = {}
        self._open: dict[tuple[int, int], int] = {}

    def connect(self, peer: Identity) -> None:
        """Add a connection. Raises CommError when a newer process of the peer is known."""
        with self._lock:
            self._check(peer)
            self._newest[peer.index] = peer.worker_restart_count
            key = peer.index, peer.worker_restart_count
            self._open[key] = self._open.get(key, 0) + 1

    def disconnect(self, peer: Identity) -> bool:
        """Remove a connection; returns whether it was the last."""
        with self._lock:
            key = peer.index, peer.worker_restart_count
            self._open[key] -= 1
            if not self._open[key]:
                del self._open[key]
            return key not in self._open

    @property
    def num_ever_connected(self) -> int:
        """The number of peers that have connected so far."""
        with self._lock:
            return len(self._newest)

    def check(self, peer: Identity) -> None:
        """Raise CommError when a newer process of the peer has taken over."""
        with self._lock:
            self._check(peer)

    def _check(self, peer: Identity) -> None:
        newest = self._newest.get(peer.index, 0)
        if peer.worker_restart_count < newest:
            raise _replaced(peer.role, peer.index, peer.worker_restart_count, newest)


class NumberedBarriers:
    """Barriers of all live workers, with increasing numbers.

    A worker at one barrier has passed all earlier ones. So arriving twice, because an answer was lost, counts once, and
    a server that has lost its state does not wait for workers that passed before.
    """

    def __init__(self, live: Callable[[], Set[int]]) -> None:
        self._live = live
        self._change = threading.Condition()
        self._at: dict[int, int] = {}  # by worker: its highest barrier
        self._passed = -1
        self._closed = False

    def arrive(self, worker: int, number: int) -> None:
        """Return when all live workers have arrived at ``number``. Raises CommError when the server stops first."""
        with self._change:
            self._at[worker] = max(number, self._at.get(worker, -1))
            self._open(number)
            while self._passed < number:
                if self._closed:
                    raise _stopping(f"barrier {number} on a server that is stopping")
                self._change.wait()
                self._open(number)

    def recheck(self) -> None:
        """Re-evaluate the live workers after one has left."""
        with self._change:
            self._change.notify_all()

    def close(self) -> None:
        """Let every waiting call raise CommError."""
        with self._change:
            self._closed = True
            self._change.notify_all()

    def _open(self, number: int) -> None:
        if number > self._passed and all(self._at.get(worker, -1) >= number for worker in self._live()):
            self._passed = number
            self._change.notify_all()


LEASE_S = 6.0
GRACE_S = 2.0


@dataclass(kw_only=True, slots=True)
class _Member:
    restart_count: int
    clock: int
    until_s: float


class Clocks:
    """Leases and clocks of the workers of a run, with bounded staleness (stale synchronous parallel, Ho et al. 2013).

    A worker that has finished clock c continues when every live worker has finished clock c - s. ``staleness = 0`` is
    synchronous, None unbounded. This absorbs jitter, not a worker that is always slow.

    A worker is live while its lease runs: 6 s from its last heartbeat or request, or 2 s from the loss of its last
    connection. A worker without a lease does not block the others; it may join again, at the slowest clock.
    ``on_end(worker)`` is called, without a lock, when a lease ended or its worker left.
    """

    def __init__(
        self,
        staleness: int | None = None,
        *,
        on_end: Callable[[int], None] = lambda worker: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._staleness, self._on_end, self._now = staleness, on_end, now
        self._members: dict[int, _Member] = {}
        self._change = threading.Condition()
        self._closed = False
        self._start = 0  # the clock of the first worker to join

    def join(self, worker: int, restart_count: int) -> int:
        """Start or restart a worker's lease; returns its clock, that of the slowest. CommError for an older restart
        count."""
        with self._change:
            member = self._members.get(worker)
            if member is not None and restart_count < member.restart_count:
                raise _replaced("worker", worker, restart_count, member.restart_count)
            if member is None or restart_count > member.restart_count:
                begun_again = member is not None
                if begun_again:
                    self._remove(worker)
                self._members[worker] = _Member(restart_count=restart_count, clock=self.slowest_clock, until_s=0.0)
                self._change.notify_all()
            else:
                begun_again = False
            self._members[worker].until_s = self._now() + LEASE_S
            clock = self._members[worker].clock
        if begun_again:  # the items of its earlier process go back
            self._on_end(worker)
        return clock

    def seen(self, worker: int, restart_count: int) -> None:
        """Renew the lease. Raises CommError if it has ended: the worker must join again."""
        with self._change:
            self._alive(worker, restart_count).until_s = self._now() + LEASE_S

    def connection_closed(self, worker: int, restart_count: int) -> None:
        """The worker's last connection was lost: shorten its lease to 2 s."""
        with self._change:
            member = self._members.get(worker)
            if member is not None and member.restart_count == restart_count:
                member.until_s = min(member.until_s, self._now() + GRACE_S)

    def extend_leases(self, seconds: float) -> None:
        """Extend all leases after this server itself stood still."""
        with self._change:
            for member in self._members.values():
                member.until_s += seconds

    def leave(self, worker: int, restart_count: int) -> None:
        """End the lease of a worker that is done; idempotent."""
        with self._change:
            member = self._members.get(worker)
            if member is None or member.restart_count != restart_count:
                return
            self._remove(worker)
        self._on_end(worker)

    def end_expired_leases(self) -> list[int]:
        """End the expired leases; returns their workers."""
        with self._change:
            over = [worker for worker, member in self._members.items() if member.until_s <= self._now()]
            for worker in over:
                self._remove(worker)
        for worker in over:
            self._on_end(worker)
        return over

    def tick(self, worker: int, restart_count: int, clock: int) -> int:
        """Record that the worker has finished ``clock``; returns the slowest clock once it is at least ``clock -
        staleness``.

        A worker whose lease ends while it waits keeps waiting: it may join again. Raises CommError when its newer
        process takes over or the server stops.
        """
        with self._change:
            self._alive(worker, restart_count)
            while True:
                if worker in self._members:
                    member = self._alive(worker, restart_count)
                    if member.clock < clock:  # a new clock, or the worker joined again at the slowest
                        member.clock = clock
                        self._change.notify_all()
                if self._staleness is None or not self._members or self.slowest_clock >= clock - self._staleness:
                    return self.slowest_clock
                self._change.wait()
                self._running()

    def close(self) -> None:
        """Let every waiting call raise CommError."""
        with self._change:
            self._closed = True
            self._change.notify_all()

    @property
    def slowest_clock(self) -> int:
        """The clock of the slowest live worker; without live workers, that of the last one."""
        with self._change:
            return min((member.clock for member in self._members.values()), default=self._start)

    @property
    def live_clocks(self) -> dict[int, int]:
        """Clock by live worker."""
        with self._change:
            return {worker: member.clock for worker, member in sorted(self._members.items())}

    def start_at(self, clock: int) -> None:
        """Set the clock at which the first worker joins, from a snapshot."""
        with self._change:
            self._start = clock

    def _remove(self, worker: int) -> None:
        self._start = self.slowest_clock
        del self._members[worker]
        self._change.notify_all()

    def _running(self) -> None:
        if self._closed:
            raise _stopping("the server is stopping")

    def _alive(self, worker: int, restart_count: int) -> _Member:
        self._running()
        member = self._members.get(worker)
        if member is None:
            raise CommError(
                given=f"worker {worker}, whose lease has ended",
                rule=f"heartbeats are at most {LEASE_S:g} s apart, and a lost connection is back within {GRACE_S:g} s",
                consequence="the others no longer wait for it, and may claim its work",
                nearest="connect again: it joins at the clock of the slowest",
            )
        if member.restart_count != restart_count:
            raise _replaced("worker", worker, restart_count, member.restart_count)
        return member


def _stopping(given: str) -> CommError:
    return CommError(
        given=given,
        rule="a worker waits for the others while its servers run",
        consequence="the wait has ended without an answer",
        nearest="connect again: the launcher starts the server from its last snapshot",
    )


def _replaced(role: str, index: int, older: int, newer: int) -> CommError:
    return CommError(
        given=f"{role} {index} of restart {older}",
        rule=f"a {role} is one process at a time, and that of restart {newer} has taken over",
        consequence="nothing of the older one is applied",
        nearest="let the older process end",
    )
