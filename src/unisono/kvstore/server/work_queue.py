"""The work of an asynchronous run: workers claim items one by one.

    begin 0      initialise the servers; ``mark_done`` reports the first batch shard left to do
    unit n       compute batch shard n, a fixed share of the run's samples, a pure function of n
    save n       all batch shards before n are done and no later one is claimed: the servers hold exactly a step
    end n        no work is left: the run ended at batch shard n
    stopped n    a stop was requested; all batch shards before n are done and saved

Any worker may compute a batch shard, and every one is computed: when a worker's lease ends, its items can be claimed
again. A batch shard that two workers computed, because the first came back, is applied once: its pushes carry its
number. Only the leading worker begins and saves.
"""

from __future__ import annotations

import heapq
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from unisono.errors import CommError
from unisono.kvstore.server.range_set import RangeSet

# sent and stored; "unit" is the first release's name for a batch shard
WorkKind = Literal["begin", "unit", "save", "wait", "end", "stopped"]


class WorkItem(NamedTuple):
    """An item of work. ``wait``: none is available now; ``end`` and ``stopped``: none is left."""

    kind: WorkKind
    number: int = 0


WAIT, BEGIN = WorkItem("wait"), WorkItem("begin")


class WorkQueue:
    """Batch shards ``0 .. num_batch_shards - 1``, ``batch_shards_per_step`` per step, with a save at every
    ``batch_shards_per_save``-th (0: only at the end).

    With a ``staleness`` of s no batch shard of step t is handed out before all steps below t - s are done: stale
    synchronous parallel (Ho et al. 2013), whichever workers are slow, join or leave. ``before_unlock`` gets the state
    (``to_json``) after every report of finished work and every stop, before any later item is handed out. Waits use the
    monotonic clock ``now``.

    ``history_id`` names the history of this queue and of the values beside it. After a restart from an older snapshot it is
    another one: what was pushed and done since is forgotten.
    """

    def __init__(
        self,
        num_batch_shards: int,
        *,
        batch_shards_per_save: int = 0,
        batch_shards_per_step: int = 1,
        staleness: int | None = None,
        before_unlock: Callable[[Mapping[str, Any]], None] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_batch_shards, self._staleness, self._now = num_batch_shards, staleness, now
        self._before_unlock = before_unlock
        self._batch_shards_per_save, self._batch_shards_per_step = batch_shards_per_save, batch_shards_per_step
        self.history_id = secrets.token_hex(8)
        self.end_shard = num_batch_shards  # where the run ends; earlier after ``stop``
        self._end_kind: WorkKind = "end"
        self.total_weight = 0.0  # of the finished batch shards, as their workers reported it
        self._is_begun = False
        self._saved = 0  # the last point at which a save was made, or the run began
        self._done = RangeSet()
        self._next = 0  # lowest never claimed
        self._returned: list[int] = []  # claimed, and returned; a heap
        self._claimed_by: dict[WorkItem, int] = {}
        self._closed = False
        self._changed = threading.Condition()  # its lock is reentrant

    def claim(self, worker: int, timeout_s: float = 0.0, leads: Callable[[], bool] = lambda: True) -> WorkItem:
        """The next item; ``WAIT`` if none becomes available in time. ``leads()``: whether this worker begins and saves,
        evaluated again whenever a worker has gone."""
        with self._changed:
            deadline = self._now() + timeout_s
            while (
                (work := self._next_item(leads)) == WAIT and not self._closed and (left := deadline - self._now()) > 0
            ):
                self._changed.wait(left)
            if work.kind == "unit":
                if self._returned and self._returned[0] == work.number:
                    heapq.heappop(self._returned)
                else:
                    self._next = work.number + 1
            if work.kind in ("begin", "unit", "save"):
                self._claimed_by[work] = worker
            return work

    def mark_done(self, work: WorkItem, weight: float = 0.0, history_id: str | None = None) -> bool:
        """Record a finished item, a batch shard once all its pushes are acknowledged; returns whether that is new.
        ``begin``'s number is the first batch shard left to do. ``weight``: of the shard's samples, or of all samples
        before the beginning. A batch shard that was claimed in another history than this one (``history_id``) stays to be
        done: its pushes may be among those that are forgotten.

        Called for the holder, for a worker that was presumed dead, or for one that claimed the item before this server
        restarted.
        """
        with self._changed:
            if work.kind == "unit" and history_id not in (None, self.history_id):
                return False
            new = self._finish(work)
            self.total_weight += weight if new else 0.0
            self._claimed_by.pop(BEGIN if work.kind == "begin" else work, None)
            self._has_changed()
            return new

    def stop(self, *, finished: bool = False) -> None:
        """End the run, with a save, at the next step that was not begun. ``finished``: the run is complete."""
        with self._changed:
            per_step = self._batch_shards_per_step
            self.end_shard = min(self.end_shard, -(-max(self._next, self._saved) // per_step) * per_step)
            self._end_kind = "end" if finished else "stopped"
            self._has_changed()

    def give_back(self, worker: int) -> list[WorkItem]:
        """Return a lost worker's items to the queue."""
        with self._changed:
            items = sorted(work for work, holder in self._claimed_by.items() if holder == worker)
            for work in items:
                del self._claimed_by[work]
                if work.kind == "unit":
                    heapq.heappush(self._returned, work.number)
            self._changed.notify_all()
            return items

    def close(self) -> None:
        """Wake all waiting claims."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def to_json(self) -> dict[str, Any]:
        """The state that a snapshot keeps. Claimed items can be claimed again after a restart."""
        with self._changed:
            return {  # stored names of the first release
                "units": self.num_batch_shards,
                "every": self._batch_shards_per_save,
                "per_step": self._batch_shards_per_step,
                "staleness": self._staleness,
                "goal": self.end_shard,
                "early": self._end_kind,
                "weight": self.total_weight,
                "begun": self._is_begun,
                "saved": self._saved,
                "dealt": self._next,
                "done": self._done.to_json(),
                "history_id": self.history_id,
            }

    @classmethod
    def from_json(
        cls,
        state: Mapping[str, Any],
        *,
        before_unlock: Callable[[Mapping[str, Any]], None] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> WorkQueue:
        """A queue that continues from ``state`` (``to_json``); without a ``history_id`` there, in a history of its own."""
        queue = cls(
            state["units"],
            batch_shards_per_save=state["every"],
            batch_shards_per_step=state["per_step"],
            staleness=state["staleness"],
            before_unlock=before_unlock,
            now=now,
        )
        queue.history_id = str(state.get("history_id") or queue.history_id)
        queue.end_shard, queue._is_begun, queue._saved = state["goal"], state["begun"], state["saved"]
        queue._end_kind, queue.total_weight = state["early"], state["weight"]
        queue._done, queue._next = RangeSet(state["done"]), state["dealt"]
        queue._returned = [shard for shard in range(queue._saved, queue._next) if shard not in queue._done]
        return queue

    @property
    def num_done(self) -> int:
        """The number of finished batch shards, including those before the run began."""
        with self._changed:
            return sum(end - first for first, end in self._done.to_json())

    def _has_changed(self) -> None:
        """Tell the replica, then those that wait. Raises what the replica raises; the report is then sent again."""
        try:
            if self._before_unlock is not None:
                self._before_unlock(self.to_json())
        finally:
            self._changed.notify_all()

    def _next_item(self, leads: Callable[[], bool]) -> WorkItem:
        if self.num_batch_shards == 0 or (self._is_begun and self._saved >= self.end_shard):
            return WorkItem(self._end_kind if self.end_shard < self.num_batch_shards else "end", self.end_shard)
        if not self._is_begun:
            return BEGIN if BEGIN not in self._claimed_by and leads() else WAIT
        while self._next in self._done:  # done by a worker that claimed it before a restart
            self._next += 1
        next_save = self._next_save()
        batch_shard = self._returned[0] if self._returned else self._next
        if batch_shard < next_save:
            return WAIT if self._too_early(batch_shard) else WorkItem("unit", batch_shard)
        save = WorkItem("save", next_save)
        return save if self._done.prefix >= next_save and save not in self._claimed_by and leads() else WAIT

    def _too_early(self, batch_shard: int) -> bool:
        if self._staleness is None:
            return False
        per_step = self._batch_shards_per_step
        return self._done.prefix < (batch_shard // per_step - self._staleness) * per_step

    def _next_save(self) -> int:
        per_save = self._batch_shards_per_save
        return min(self.end_shard, (self._saved // per_save + 1) * per_save) if per_save else self.end_shard

    def _finish(self, work: WorkItem) -> bool:
        match work.kind:
            case "begin" if 0 <= work.number <= self.num_batch_shards:
                new, self._is_begun = not self._is_begun, True
                if new and work.number:
                    self._done, self._saved, self._next = RangeSet([[0, work.number]]), work.number, work.number
                return new
            case "unit" if 0 <= work.number < self.num_batch_shards:
                if work.number in self._returned:
                    self._returned.remove(work.number)
                    heapq.heapify(self._returned)
                return self._done.add(work.number)
            case "save" if 0 <= work.number <= self.num_batch_shards:
                new = work.number > self._saved
                self._saved = max(self._saved, work.number)
                return new
            case _:
                end = self.num_batch_shards
                raise CommError(
                    given=f"a report that {work.kind} {work.number} is done",
                    rule=f"a unit is a batch shard, 0 to {end - 1} in this run; saves go up to {end}",
                    consequence="the report was ignored",
                    nearest="claim work from the coordinator, server 0",
                )
