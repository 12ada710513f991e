"""Leases and clocks of workers, and bounded staleness.

Stale synchronous parallel (Ho et al. 2013): a worker that has finished clock c goes on when every live worker has
finished clock c - s. ``staleness = 0`` is synchronous, None unbounded. It absorbs jitter, not a worker that is always
slow.

A worker is live while its lease runs: 6 s from its last heartbeat or request, or 2 s from the loss of its last
connection. A worker without a lease does not block the others; it may join again, at the slowest clock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from unisono.errors import CommError, Problem

LEASE_S = 6.0
GRACE_S = 2.0


@dataclass(kw_only=True, slots=True)
class _Member:
    incarnation: int
    clock: int
    until_s: float


class Clocks:
    """The workers of a run. ``on_end(worker)`` is called, without a lock, when a lease ended or its worker left."""

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
        self._start = 0  # the clock of the first to join

    def join(self, worker: int, incarnation: int) -> int:
        """Start or restart a worker's lease; returns its clock, that of the slowest. CommError for an older restart
        count."""
        with self._change:
            member = self._members.get(worker)
            if member is not None and incarnation < member.incarnation:
                raise CommError(_fenced(worker, incarnation, member.incarnation))
            if member is None or incarnation > member.incarnation:
                begun_again = member is not None
                if begun_again:
                    self._remove(worker)
                self._members[worker] = _Member(incarnation=incarnation, clock=self.slowest_clock, until_s=0.0)
                self._change.notify_all()
            else:
                begun_again = False
            self._members[worker].until_s = self._now() + LEASE_S
            clock = self._members[worker].clock
        if begun_again:  # what its earlier self held goes back
            self._on_end(worker)
        return clock

    def seen(self, worker: int, incarnation: int) -> None:
        """Renew the lease. Raises CommError if it has ended: the worker must join again."""
        with self._change:
            self._alive(worker, incarnation).until_s = self._now() + LEASE_S

    def connection_closed(self, worker: int, incarnation: int) -> None:
        """The worker's last connection was lost: shorten its lease to 2 s."""
        with self._change:
            member = self._members.get(worker)
            if member is not None and member.incarnation == incarnation:
                member.until_s = min(member.until_s, self._now() + GRACE_S)

    def extend_leases(self, seconds: float) -> None:
        """Extend all leases after this server itself stood still."""
        with self._change:
            for member in self._members.values():
                member.until_s += seconds

    def leave(self, worker: int, incarnation: int) -> None:
        """End the lease of a worker that is done; idempotent."""
        with self._change:
            member = self._members.get(worker)
            if member is None or member.incarnation != incarnation:
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

    def tick(self, worker: int, incarnation: int, clock: int) -> int:
        """Record that the worker has finished ``clock``; returns the slowest clock once it is at least ``clock -
        staleness``.

        A worker whose lease ends while it waits keeps waiting: it may join again. Raises CommError when its newer
        process takes over or the server stops.
        """
        with self._change:
            self._alive(worker, incarnation)
            while True:
                if worker in self._members:
                    member = self._alive(worker, incarnation)
                    if member.clock < clock:  # new, or it was away and joined again at the slowest
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
            raise CommError(
                given="the server is stopping",
                rule="a worker waits while its servers run",
                consequence="the wait has ended without an answer",
                nearest="connect again: the launcher starts the server from its last snapshot",
            )

    def _alive(self, worker: int, incarnation: int) -> _Member:
        self._running()
        member = self._members.get(worker)
        if member is None:
            raise CommError(
                given=f"worker {worker}, whose lease has ended",
                rule=f"a worker gives a sign of life every {LEASE_S:g} s; a lost connection comes back in {GRACE_S:g} s",
                consequence="the others no longer wait for it, and its units of work were dealt to them",
                nearest="say hello again: it joins at the clock of the slowest",
            )
        if member.incarnation != incarnation:
            raise CommError(_fenced(worker, incarnation, member.incarnation))
        return member


def _fenced(worker: int, older: int, newer: int) -> Problem:
    return Problem(
        given=f"worker {worker} in its incarnation {older}",
        rule=f"a worker has one incarnation at a time, and {newer} has taken over",
        consequence="nothing of the older one is applied",
        nearest="let the older process end",
    )
