"""Traffic of a rank by peer and by mesh axis, from the ``links`` events of its last attempt."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from unisono.observe.events import MAX_COUNT, Event, as_mapping, bounded_number, number
from unisono.observe.meters import COMM_AXES

_MAX_BYTES: Final = 1e18
_MAX_S: Final = 1e12
_MAX_PEERS: Final = 64
_MAX_GROUPS: Final = 64
_NEGLIGIBLE_FRAC: Final = 0.05  # of the bytes of an axis: groups with less need no measured rate


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkTraffic:
    """Traffic of a rank with one peer in the steps of its last attempt; see ``unisono.train.comm_stats``.

    Attributes:
        peer: The transport of sums over all ranks, or a server's address.
        steps: Number of steps.
        sent_bytes: Bytes sent in them.
        received_bytes: Bytes received in them.
        measured_bytes_per_s: Rate of the link that ``unisono doctor --bench`` measured, at the sizes of this run; 0 if not known.
        interface: The network interface that the run was set to use; empty if none.
        wall_s: Seconds of these steps.
        busy_s: Seconds in which a server served values to any worker; 0 for other peers.
        served_s: The same, summed over its requests, several of which it serves at once.
        cpu_s: Processor seconds of the server meanwhile.
    """

    peer: str
    steps: int
    sent_bytes: float
    received_bytes: float = 0.0
    measured_bytes_per_s: float = 0.0
    interface: str = ""
    wall_s: float = 0.0
    busy_s: float = 0.0
    served_s: float = 0.0
    cpu_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisTraffic:
    """Traffic of a rank in one kind of group; see ``unisono.parallel.traffic``.

    Attributes:
        axis: Axis of the mesh, one of ``COMM_AXES``.
        group: The ranks that exchange, such as ``shard``.
        transport: torch's backend, or what else sends.
        ranks: Number of ranks in the group.
        hosts: Number of their hosts.
        interface: The network interface that the run was set to use; empty if none.
        steps: Number of steps.
        wall_s: Seconds of these steps.
        collectives: Number of collectives or messages in them.
        payload_bytes: Bytes that they exchanged.
        wire_bytes: Bytes that this rank put on the wire.
        expected_s: Seconds that ``unisono doctor --bench`` predicts for that; 0 if not known.
        expected_latency_s: The part of it that messages take however small they are.
    """

    axis: str
    group: str
    transport: str
    ranks: int = 0
    hosts: int = 0
    interface: str = ""
    steps: int = 0
    wall_s: float = 0.0
    collectives: float = 0.0
    payload_bytes: float = 0.0
    wire_bytes: float = 0.0
    expected_s: float = 0.0
    expected_latency_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisUse:
    """How a rank used the links of one axis; bytes and seconds are of all its steps.

    Attributes:
        main: The group with the most bytes.
        wire_bytes: Bytes on the wire in all groups.
        expected_s: Seconds that ``unisono doctor --bench`` predicts for them; 0 if not known.
        expected_latency_s: The part of it that messages take however small they are.
        used_frac: Share of the measured rate that was used; 0 if not known.
    """

    main: AxisTraffic
    wire_bytes: float
    expected_s: float
    expected_latency_s: float
    used_frac: float


def read_links(events: Sequence[Event]) -> tuple[LinkTraffic, ...]:
    """Traffic with each peer in all ``links`` events together. Entries that cannot be read are left out."""
    found: dict[str, LinkTraffic] = {}
    for event in events:
        steps = event.get("steps")
        if event["kind"] != "links" or not isinstance(steps, int) or not 0 < steps < MAX_COUNT:
            continue
        for link in _rows(event, "links"):
            peer, sent = str(link.get("peer")), number(link.get("sent_bytes"))
            if sent is None or not 0 <= sent < _MAX_BYTES or (peer not in found and len(found) >= _MAX_PEERS):
                continue
            known = found.get(peer, LinkTraffic(peer=peer, steps=0, sent_bytes=0.0))
            seconds = {name: bounded_number(link.get(name), _MAX_S) for name in ("busy_s", "served_s", "cpu_s")}
            found[peer] = LinkTraffic(
                peer=peer,
                steps=known.steps + steps,
                sent_bytes=known.sent_bytes + sent,
                received_bytes=known.received_bytes + bounded_number(link.get("received_bytes"), _MAX_BYTES),
                measured_bytes_per_s=bounded_number(link.get("measured_bytes_per_s"), _MAX_BYTES),
                interface=str(link.get("interface") or ""),
                wall_s=known.wall_s + bounded_number(event.get("wall_s"), _MAX_S),
                busy_s=known.busy_s + seconds["busy_s"],
                served_s=known.served_s + seconds["served_s"],
                cpu_s=known.cpu_s + seconds["cpu_s"],
            )
    return tuple(found.values())


def rms_lag(event: Event) -> float | None:
    """Root mean square of the lags of the pushes to all servers; None where the event has none.

    Their mean would say nothing: it is one less than the number of workers, however late some of them are.
    """
    links = list(_rows(event, "links"))
    pushes, squares = (
        sum(value for link in links if (value := number(link.get(name))) is not None and 0 <= value < _MAX_BYTES)
        for name in ("pushes", "lag_square_total")
    )
    return math.sqrt(squares / pushes) if pushes >= 1 else None


def read_axes(events: Sequence[Event]) -> tuple[AxisTraffic, ...]:
    """The traffic in all ``links`` events together, by axis and group. Entries that cannot be read are left out."""
    found: dict[tuple[str, str, str, int, int], AxisTraffic] = {}
    for event in events:
        steps, wall_s = event.get("steps"), bounded_number(event.get("wall_s"), _MAX_S)
        if event["kind"] != "links" or not isinstance(steps, int) or not 0 < steps < MAX_COUNT or not wall_s:
            continue
        for row in _rows(event, "axes"):
            axis, group, transport = (str(row.get(name) or "")[:100] for name in ("axis", "group", "transport"))
            ranks, hosts = (int(bounded_number(row.get(name), MAX_COUNT)) for name in ("ranks", "hosts"))
            wire_bytes = number(row.get("wire_bytes"))
            key = axis, group, transport, ranks, hosts
            if axis not in COMM_AXES or wire_bytes is None or not 0 <= wire_bytes < _MAX_BYTES:
                continue
            known = found.get(key)
            if known is None and len(found) >= _MAX_GROUPS:
                continue
            expected_s = bounded_number(row.get("expected_s"), _MAX_S)
            if known is not None and not (expected_s and known.expected_s):
                expected_s = -known.expected_s  # not known for all of the traffic
            known = known or AxisTraffic(axis=axis, group=group, transport=transport, ranks=ranks, hosts=hosts)
            found[key] = AxisTraffic(
                axis=axis,
                group=group,
                transport=transport,
                ranks=ranks,
                hosts=hosts,
                interface=str(row.get("interface") or "")[:100],
                steps=known.steps + steps,
                wall_s=known.wall_s + wall_s,
                collectives=known.collectives + bounded_number(row.get("collectives"), _MAX_BYTES),
                payload_bytes=known.payload_bytes + bounded_number(row.get("payload_bytes"), _MAX_BYTES),
                wire_bytes=known.wire_bytes + wire_bytes,
                expected_s=known.expected_s + expected_s,
                expected_latency_s=known.expected_latency_s + bounded_number(row.get("expected_latency_s"), _MAX_S),
            )
    return tuple(found.values())


def uses_by_axis(traffic: Sequence[AxisTraffic]) -> dict[str, AxisUse]:
    """The use of each axis, in the order of ``COMM_AXES``."""
    uses: dict[str, AxisUse] = {}
    for axis in COMM_AXES:
        groups = [group for group in traffic if group.axis == axis and group.wire_bytes]
        if not groups:
            continue
        main = max(groups, key=lambda group: group.wire_bytes)
        total = sum(group.wire_bytes for group in groups)
        measured = [group for group in groups if group.expected_s]
        is_known = sum(group.wire_bytes for group in measured) >= (1 - _NEGLIGIBLE_FRAC) * total
        expected_s = sum(group.expected_s for group in measured) if is_known else 0.0
        uses[axis] = AxisUse(
            main=main,
            wire_bytes=total,
            expected_s=expected_s,
            expected_latency_s=sum(group.expected_latency_s for group in measured),
            used_frac=expected_s / main.wall_s if main.wall_s else 0.0,
        )
    return uses


def _rows(event: Event, name: str) -> Iterator[dict[str, Any]]:
    rows = event.get(name)
    for row in cast("list[Any]", rows) if isinstance(rows, list) else ():
        yield dict(as_mapping(row))
