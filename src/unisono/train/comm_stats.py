"""Communication statistics: the bytes a rank exchanges with each peer, their rate, and how long its steps wait for them.

Under ``dist_async`` each server is a peer; its bytes are those of the socket and of memory shared with it, headers included.
``dist_sync`` and ``dist_local`` have one peer, all other ranks; its bytes are this rank's inputs to sums and their results. A
transport may send more: a ring sends 2 (n - 1) / n of them, shared memory exactly them. Traffic of FSDP2 and DTensor is not
counted, and such runs have no event.

Where ``unisono doctor --bench`` has measured such sums between as many ranks of this host, the event also has the rate that it
found at the sizes of this run's sums, and the share of it that was used.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from unisono.measure.calibration import read_calibration
from unisono.observe.events import EventLog

_EVENT_EVERY_STEPS = 100


@dataclass(frozen=True, slots=True)
class PeerTraffic:
    """Bytes exchanged with one peer since the start. ``peer`` is a server's address or the transport of sums.

    ``facts`` are added to the event; of them ``measured_bytes_per_s`` is what the link was measured to do. Of ``counters`` the
    event has what they grew by since the previous one.
    """

    peer: str
    sent_bytes: int
    received_bytes: int
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    counters: Mapping[str, float] = field(default_factory=dict[str, float])


@runtime_checkable
class ReportsTraffic(Protocol):
    """A gradient synchronisation that counts its traffic."""

    def peer_traffic(self) -> Sequence[PeerTraffic]:
        """Traffic with each peer, always in the same order."""
        ...


class CommStats:
    """Emits a ``links`` event every hundred steps of this rank (batch shards under ``dist_async``) and after its last one.

    It has the bytes and bytes per second of each peer since the previous event, ``wall_s`` seconds ago; the ``steps`` since then
    waited ``comm_exposed_s`` for communication.
    """

    def __init__(self, events: EventLog, read: Callable[[], Sequence[PeerTraffic]]) -> None:
        self._events, self._read = events, read
        self._begin(time.monotonic(), read())

    def add(self, step: int, steps: int, exposed_s: float) -> None:
        """Count ``steps`` more finished steps, up to ``step``, which waited ``exposed_s``."""
        self._step = step
        self._steps += steps
        self._exposed_s += exposed_s
        if self._steps >= _EVENT_EVERY_STEPS:
            self.emit()

    def emit(self) -> None:
        """Emit the event of the steps since the previous one, if there are any."""
        if not self._steps:
            return
        now_s, links = time.monotonic(), self._read()
        wall_s = now_s - self._began_s
        rows: list[dict[str, Any]] = []
        for link, before in zip(links, self._before, strict=True):
            sent, received = link.sent_bytes - before.sent_bytes, link.received_bytes - before.received_bytes
            rows.append(
                {
                    "peer": link.peer,
                    "sent_bytes": sent,
                    "received_bytes": received,
                    "sent_bytes_per_s": sent / wall_s,
                    "received_bytes_per_s": received / wall_s,
                    **link.facts,
                    **_growth(before.counters, link.counters),
                }
            )
            if measured_rate := link.facts.get("measured_bytes_per_s"):
                rows[-1]["used_frac"] = sent / wall_s / measured_rate
        measured = {"steps": self._steps, "wall_s": wall_s, "comm_exposed_s": self._exposed_s}
        self._events.emit("links", step=self._step, **measured, links=rows)
        self._begin(now_s, links)

    def _begin(self, now_s: float, links: Sequence[PeerTraffic]) -> None:
        self._began_s, self._before = now_s, links
        self._step = self._steps = 0
        self._exposed_s = 0.0


def _growth(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """Growth of each counter; from zero where the peer was started again."""
    restarted = any(value < before.get(name, 0) for name, value in now.items())
    return {name: value - (0 if restarted else before.get(name, 0)) for name, value in now.items()}


def measured_link(cache: Path, transport: str, sizes: Sequence[int], *, ranks: int, num_hosts: int) -> dict[str, Any]:
    """Facts of a link over which sums of ``sizes`` bytes go in each step: its measured rate, and the network interface.

    Args:
        cache: The calibration file.
        transport: Its name, with the reason for it after a colon.
        ranks: Number of ranks that sum.
        num_hosts: Number of their hosts.
    """
    name = transport.partition(":")[0]
    known, host = read_calibration(cache), socket.gethostname()
    seconds = [known.all_reduce_s(size, transport=name, ranks=ranks, host=host, num_hosts=num_hosts) for size in sizes]
    variable = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}.get(name, "")
    facts: dict[str, Any] = {"interface": os.environ[variable]} if os.environ.get(variable) else {}
    if seconds and None not in seconds:
        facts["measured_bytes_per_s"] = sum(sizes) / sum(second for second in seconds if second is not None)
    return facts
