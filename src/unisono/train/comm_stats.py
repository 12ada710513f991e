"""Communication statistics: bytes that a rank exchanges by mesh axis and by peer, their rate, and how long steps wait for them.

By axis and group of ranks an event has the collectives of ``unisono.parallel.traffic``: their number, payload, and bytes on the
wire. Exchanges of gradients, averages included, are counted where they are started; those of FSDP2, tensor, context, expert and
pipeline parallelism in ``unisono.parallel.timed_collectives``. What DTensor issues for pinned placements is counted in the first
step of each event, and taken to be the same in the others. What compiled layers exchange is not counted.

Under ``dist_async`` each server is a peer; its bytes are those of the socket and of memory shared with it, headers included.
``dist_sync`` and ``dist_local`` have one peer, all other ranks; its bytes are this rank's inputs to sums and their results.

Where ``unisono doctor --bench`` has measured the same transport between as many ranks on as many hosts, this one among them, the
event also has how long it needs for this traffic, one message after the other, and the share of it that was used: by group, and
by axis as ``comm/<axis>_used_frac``, which trackers show. Only all-reduce and point-to-point send are measured: an all-gather,
all-to-all or reduce-scatter is predicted as the all-reduce with as many bytes on the wire, and a reduce-scatter over Gloo as an
all-reduce of its whole input.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, runtime_checkable

from unisono.measure.calibration import SHARED_MEMORY, Calibration
from unisono.observe.events import EventLog
from unisono.observe.link_events import read_axes, uses_by_axis
from unisono.parallel.traffic import GroupTraffic, Messages, Traffic, all_reduce_wire_bytes, merged

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


class CountsCollectives(Protocol):
    """What counts the collectives that it has started, and their bytes, since the start."""

    sent_bytes: int
    received_bytes: int
    num_collectives: int


@runtime_checkable
class ReportsTraffic(Protocol):
    """A gradient synchronisation that counts its traffic."""

    def peer_traffic(self) -> Sequence[PeerTraffic]:
        """Traffic with each peer, always in the same order."""
        ...


class CommStats:
    """Emits a ``links`` event every hundred steps of this rank (batch shards under ``dist_async``) and after its last one.

    It has the bytes and bytes per second of each peer in the ``steps`` since the previous event, ``wall_s`` seconds ago. ``axes``
    has the traffic by axis and group.

    Args:
        events: Where it is written.
        peers: Returns the traffic with each peer since the start.
        traffic: What counts the collectives of the steps.
        sums: Returns collectives since its last call that ``traffic`` does not count.
        measured: What the links were measured to do.
        sample: Context manager that is entered for one step of each event; inside, DTensor's collectives are counted.
        sampled: What counts them; its numbers are multiplied by the number of steps.
    """

    def __init__(
        self,
        events: EventLog,
        peers: Callable[[], Sequence[PeerTraffic]],
        *,
        traffic: Traffic | None = None,
        sums: Callable[[], Sequence[GroupTraffic]] = tuple,
        measured: Calibration | None = None,
        sample: AbstractContextManager[Any] | None = None,
        sampled: Traffic | None = None,
    ) -> None:
        self._events, self._peers, self.traffic, self._sums = events, peers, traffic, sums
        self._sample, self._sampled = sample, sampled
        self._measured, self._host = measured or Calibration(), socket.gethostname()
        sums()
        self._begin(time.monotonic(), peers())

    def sampling(self) -> AbstractContextManager[Any]:
        """The context of a step."""
        if self._sample is None or self._has_sample:
            return nullcontext()
        self._has_sample = True
        return self._sample

    def add(self, step: int, steps: int) -> None:
        """Count ``steps`` more finished steps, up to ``step``."""
        self._step = step
        self._steps += steps
        if self._steps >= _EVENT_EVERY_STEPS:
            self.emit()

    def emit(self) -> None:
        """Emit the event of the steps since the previous one, if there are any."""
        if not self._steps:
            return
        now_s, links = time.monotonic(), self._peers()
        wall_s = now_s - self._began_s
        axes = [axis_row(group, self._measured, self._host, wall_s) for group in self.take_traffic()]
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
        times = {"steps": self._steps, "wall_s": wall_s}
        uses = uses_by_axis(read_axes([{"kind": "links", **times, "axes": axes}]))
        used = {f"comm/{axis}_used_frac": use.used_frac for axis, use in uses.items() if use.expected_s}
        self._events.emit("links", step=self._step, **times, **used, axes=axes, links=rows)
        self._begin(now_s, links)

    def take_traffic(self) -> list[GroupTraffic]:
        """What was exchanged in the steps since the last call, one entry for each kind of group."""
        groups = [*self._sums(), *(self.traffic.take() if self.traffic is not None else ())]
        groups += [group.times(self._steps) for group in (self._sampled.take() if self._sampled is not None else ())]
        return merged(groups)

    def _begin(self, now_s: float, links: Sequence[PeerTraffic]) -> None:
        self._began_s, self._before = now_s, links
        self._step = self._steps = 0
        self._has_sample = False


def axis_row(group: GroupTraffic, measured: Calibration, host: str, wall_s: float) -> dict[str, Any]:
    """The entry of ``group`` in the list ``axes`` of an event: what it exchanged in ``wall_s`` seconds.

    ``expected_s`` is the time that ``unisono doctor --bench`` predicts for it, ``expected_latency_s`` that of as many of the
    smallest messages. They are left out where nothing comparable was measured.
    """
    messages = list(group.messages.values())
    wire_bytes = sum(each.wire_bytes for each in messages)
    row: dict[str, Any] = {
        "axis": group.axis,
        "group": group.group,
        "transport": group.transport,
        "ranks": group.ranks,
        "hosts": group.hosts,
        "collectives": sum(each.count for each in messages),
        "payload_bytes": sum(each.payload_bytes for each in messages),
        "wire_bytes": wire_bytes,
        "wire_bytes_per_s": wire_bytes / wall_s,
        **_interface(group.transport),
    }
    expected_s, latency_s = expected_seconds(group, measured, host), _seconds_of(group, 0, measured, host)
    if group.wait_is_for_link and expected_s and latency_s is not None:
        row |= {
            "expected_s": expected_s,
            "expected_latency_s": latency_s * row["collectives"],
            "measured_bytes_per_s": wire_bytes / expected_s,
            "used_frac": expected_s / wall_s,
        }
    return row


def expected_seconds(group: GroupTraffic, measured: Calibration, host: str, *, in_step: bool = False) -> float | None:
    """Seconds that the traffic of ``group`` takes, one message after the other; None where nothing comparable was measured.

    Collectives take as long as sums do; ``in_step``, as sums and messages add to ranks that compute between them.
    """
    total = 0.0
    for messages in group.messages.values():
        seconds = _seconds_of(group, messages.all_reduce_bytes // messages.count, measured, host, in_step=in_step)
        if seconds is None:
            return None
        total += messages.count * seconds
    return total


def _seconds_of(
    group: GroupTraffic, nbytes: int, measured: Calibration, host: str, *, in_step: bool = False
) -> float | None:
    where: Any = {"transport": group.transport, "host": host, "num_hosts": group.hosts, "in_step": in_step}
    if group.operation == "send":
        return measured.send_s(nbytes, **where)
    return measured.all_reduce_s(nbytes, ranks=group.ranks, **where)


class GradientTraffic:
    """The exchanges of gradients, or of averages, of ``sync`` since its last call, as those of a group of ``ranks`` ranks.

    Codes that cannot be added are gathered: a rank then receives the bytes of all others. Shared memory has each rank write
    its values once.
    """

    def __init__(
        self,
        sync: CountsCollectives,
        transport: str,
        *,
        ranks: int,
        hosts: int,
        compressed: bool,
        sizes: Sequence[int] = (),
    ) -> None:
        """``sizes`` are the bytes of each sum of a step, where they are the same in all."""
        self._sync, self._sizes, self._begun = sync, sizes, (0, 0, 0)
        self._row = partial(
            GroupTraffic,
            axis="dp",
            group="dp_replicate",
            transport=transport.partition(":")[0],
            ranks=ranks,
            hosts=hosts,
            # a rank that waits for compressed sums also decodes them, which no link was measured with
            wait_is_for_link=not compressed,
        )

    def __call__(self) -> list[GroupTraffic]:
        """One entry; none where nothing was exchanged."""
        now = self._sync.sent_bytes, self._sync.received_bytes, self._sync.num_collectives
        sent, received, count = (value - before for value, before in zip(now, self._begun, strict=True))
        self._begun = now
        row = self._row()
        if count <= 0 or row.ranks < 2:
            return []
        num_steps, rest = divmod(sent, sum(self._sizes)) if self._sizes else (0, sent)
        if not rest:
            for nbytes in self._sizes:
                row.add(nbytes, self._wire_bytes(row, nbytes), nbytes, num_steps)
            return [row]
        gathered = (received - sent) // (row.ranks - 2) if row.ranks > 2 else 0
        wire_bytes = self._wire_bytes(row, sent - gathered) + gathered * (row.ranks - 1)
        row.messages[(wire_bytes // count).bit_length()] = Messages(count, sent, wire_bytes, sent)
        return [row]

    def _wire_bytes(self, row: GroupTraffic, nbytes: int) -> int:
        return nbytes if row.transport == SHARED_MEMORY else all_reduce_wire_bytes(nbytes, row.ranks)


def _growth(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """Growth of each counter; from zero where the peer was started again."""
    restarted = any(value < before.get(name, 0) for name, value in now.items())
    return {name: value - (0 if restarted else before.get(name, 0)) for name, value in now.items()}


def measured_link(
    known: Calibration, transport: str, sizes: Sequence[int], *, ranks: int, num_hosts: int
) -> dict[str, Any]:
    """Facts of a link over which sums of ``sizes`` bytes go in each step: its measured rate, and the network interface.

    Args:
        known: What was measured.
        transport: Its name, with the reason for it after a colon.
        ranks: Number of ranks that sum.
        num_hosts: Number of their hosts.
    """
    name = transport.partition(":")[0]
    host = socket.gethostname()
    seconds = [known.all_reduce_s(size, transport=name, ranks=ranks, host=host, num_hosts=num_hosts) for size in sizes]
    facts: dict[str, Any] = _interface(name)
    if seconds and None not in seconds:
        facts["measured_bytes_per_s"] = sum(sizes) / sum(second for second in seconds if second is not None)
    return facts


def _interface(transport: str) -> dict[str, Any]:
    """The network interface that the transport was set to use, where it was."""
    variable = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}.get(transport, "")
    return {"interface": os.environ[variable]} if os.environ.get(variable) else {}
