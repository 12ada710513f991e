"""Units of work: each is dealt until it is done, to one worker at a time.

Unit u stands for a fixed share of the run's samples, a pure function of u. Which worker computes it is open; that it is
computed is not: when a worker's lease ends, the units it holds are dealt again. A unit that two workers computed, because
the first came back after all, is applied once: its pushes carry its number.

A fence stops the dealing at a unit, so that all before it can be waited for: what the servers hold then is exactly a step.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

from unisono.errors import CommError, Problem
from unisono.kvstore.server.ranges import RangeSet


class Deal:
    """Units ``0 .. units - 1``. Times out with the injected monotonic clock ``now``."""

    def __init__(self, units: int, *, now: Callable[[], float] = time.monotonic) -> None:
        self.units = units
        self._now = now
        self._done = RangeSet()
        self._next = 0  # never dealt so far
        self._back: list[int] = []  # dealt, and given back; a heap
        self._held: dict[int, int] = {}  # unit -> worker
        self._fence = units
        self._closed = False
        self._change = threading.Condition()

    def claim(self, worker: int, timeout_s: float = 0.0) -> int | Literal["wait", "end"]:
        """The lowest free unit before the fence; ``"wait"`` if none gets free in time; ``"end"`` when all units are done."""
        with self._change:
            self._wait(lambda: self._done.prefix >= self.units or self._free() is not None, timeout_s)
            if self._done.prefix >= self.units:
                return "end"
            unit = self._free()
            if unit is None:
                return "wait"
            if self._back and self._back[0] == unit:
                heapq.heappop(self._back)
            else:
                self._next = unit + 1
            self._held[unit] = worker
            return unit

    def done(self, unit: int) -> bool:
        """All pushes of ``unit`` are acknowledged; whether that is new.

        The holder says so, or one that was thought dead, or one that was dealt the unit before this server restarted.
        """
        with self._change:
            if not 0 <= unit < self.units:
                raise CommError(
                    Problem(
                        given=f"unit {unit} is said to be done",
                        rule=f"this run has the units 0 to {self.units - 1}",
                        consequence="it was not counted",
                        nearest="claim units from the coordinator, server 0",
                    )
                )
            new = self._done.add(unit)
            self._held.pop(unit, None)
            if unit in self._back:
                self._back.remove(unit)
                heapq.heapify(self._back)
            self._change.notify_all()
            return new

    def give_back(self, worker: int) -> list[int]:
        """The worker is gone: what it held is dealt again."""
        with self._change:
            units = sorted(unit for unit, holder in self._held.items() if holder == worker)
            for unit in units:
                del self._held[unit]
                heapq.heappush(self._back, unit)
            self._change.notify_all()
            return units

    def fence(self, unit: int | None) -> None:
        """Deal no unit from ``unit`` on; None releases."""
        with self._change:
            self._fence = self.units if unit is None else unit
            self._change.notify_all()

    def quiet(self, unit: int, timeout_s: float) -> bool:
        """Wait until all units before ``unit`` are done; whether they are."""
        with self._change:
            return self._wait(lambda: self._done.prefix >= unit, timeout_s)

    def close(self) -> None:
        """Nobody waits any longer."""
        with self._change:
            self._closed = True
            self._change.notify_all()

    def json(self) -> dict[str, Any]:
        """What a snapshot keeps: which units are done. Those held are dealt again after a restart."""
        with self._change:
            return {"units": self.units, "done": self._done.json()}

    @classmethod
    def restored(cls, state: dict[str, Any], *, now: Callable[[], float] = time.monotonic) -> Deal:
        """From ``json``."""
        deal = cls(state["units"], now=now)
        deal._done = RangeSet(state["done"])
        return deal

    @property
    def num_done(self) -> int:
        """How many units are done."""
        with self._change:
            return sum(end - first for first, end in self._done.json())

    def _free(self) -> int | None:
        while self._next in self._done:  # done without having been dealt: by a worker that knew us before a restart
            self._next += 1
        unit = self._back[0] if self._back else self._next
        return unit if unit < min(self._fence, self.units) else None

    def _wait(self, over: Callable[[], bool], timeout_s: float) -> bool:
        deadline = self._now() + timeout_s
        while not over() and not self._closed and (left := deadline - self._now()) > 0:
            self._change.wait(left)
        return over()
