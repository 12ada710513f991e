"""Now and then an event says what went over each of this rank's links, how fast, and how long its steps waited for it.

A link of ``dist_async`` is the connection to one server, and its bytes are those of the socket and of the memory shared with it,
headers too. ``dist_sync`` and ``dist_local`` have one link, all other ranks; its bytes are what this rank gave to sums and got of
them, which a transport may turn into more: a ring sends 2 (n - 1) / n of it, shared memory exactly it. What torch itself
sends for sharded or placed states is not counted, and such runs have no event.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from unisono.observe.events import EventLog

_EVENT_EVERY_STEPS = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerTraffic:
    """Bytes since the start, through sockets and memory alike, and ``facts`` for the event. ``peer``: a server's address, or how
    sums travel."""

    peer: str
    sent_bytes: int
    received_bytes: int
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])


@runtime_checkable
class ReportsTraffic(Protocol):
    """What keeps this rank in step, and counts what that takes."""

    def peer_traffic(self) -> Sequence[PeerTraffic]:
        """Always in the same order."""
        ...


class CommStats:
    """Emits ``links`` every hundred steps of this rank (units, under ``dist_async``), and at the end of its steps. Of each link
    bytes and bytes per second since the event before: ``wall_s`` seconds, in which ``steps`` steps waited ``comm_exposed_s``."""

    def __init__(self, events: EventLog, read: Callable[[], Sequence[PeerTraffic]]) -> None:
        self._events, self._read = events, read
        self._begin()

    def add(self, step: int, steps: int, exposed_s: float) -> None:
        """So many more steps are finished, up to ``step``."""
        self._step = step
        self._steps += steps
        self._exposed_s += exposed_s
        if self._steps >= _EVENT_EVERY_STEPS:
            self.emit()

    def emit(self) -> None:
        """Emit what there is to say of the steps since the last event, if there were any."""
        if not self._steps:
            return
        wall_s, links = time.monotonic() - self._began_s, self._read()
        told: list[dict[str, Any]] = []
        for link, before in zip(links, self._before, strict=True):
            sent, received = link.sent_bytes - before.sent_bytes, link.received_bytes - before.received_bytes
            told.append(
                {
                    "peer": link.peer,
                    "sent_bytes": sent,
                    "received_bytes": received,
                    "sent_bytes_per_s": sent / wall_s,
                    "received_bytes_per_s": received / wall_s,
                    **link.facts,
                }
            )
        measured = {"steps": self._steps, "wall_s": wall_s, "comm_exposed_s": self._exposed_s}
        self._events.emit("links", step=self._step, **measured, links=told)
        self._begin()

    def _begin(self) -> None:
        self._began_s, self._before = time.monotonic(), self._read()
        self._step = self._steps = 0
        self._exposed_s = 0.0
