"""Communication in a trace by collective and axis, with bandwidths as nccl-tests defines them, and its overlap.

Algorithm bandwidth is size by time. Bus bandwidth is that times a factor of the number of ranks n, which makes it comparable with
the speed of the links: all-reduce 2 (n - 1) / n; all-gather, reduce-scatter and all-to-all (n - 1) / n; all others 1
(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md). The size is that of all-reduce's tensor, of
all-gather's output, of reduce-scatter's and all-to-all's input.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from unisono.observe.meters import axis_of_group
from unisono.profile.host_events import COLLECTIVE_PREFIX, PHASE_PREFIX, HostEvents
from unisono.profile.intervals import Intervals, intersection, length, overlap, union
from unisono.profile.rank_profile import Collective, Overlap
from unisono.profile.trace_file import ANNOTATION, CollectiveEvent, Trace

DTYPE_BYTES: Final = {
    **dict.fromkeys(("double", "long", "long int", "int64_t", "c10::complex<float>"), 8),
    **dict.fromkeys(("float", "int", "int32_t"), 4),
    **dict.fromkeys(("half", "bfloat16", "c10::half", "c10::bfloat16", "short", "short int"), 2),
    **dict.fromkeys(("byte", "char", "signed char", "unsigned char", "bool", "float8_e4m3fn", "float8_e5m2"), 1),
}
_KINDS: Final = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "send": "send",
    "recv": "recv",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
}
# sums through shared memory, which no backend reports: kind, axis, ranks, bytes
_SHARED_MEMORY_SUM: Final = re.compile(re.escape(COLLECTIVE_PREFIX) + r"(\S+) (\S+) ([0-9]{1,9}) ([0-9]{1,18})")


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisCollective:
    """One collective with its mesh axis: when it ran, and how many bytes it moved, as nccl-tests counts them."""

    name: str
    axis: str
    group_size: int
    num_bytes: int
    start_us: float
    end_us: float
    can_overlap: bool


def bus_factor(name: str, group_size: int) -> float:
    """Bus bandwidth by algorithm bandwidth of a collective of ``group_size`` ranks; 0 where the size is not known."""
    if group_size < 1:
        return 0.0
    if name == "all_reduce":
        return 2 * (group_size - 1) / group_size
    if name in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        return (group_size - 1) / group_size
    return 1.0


def collective_kind(name: str) -> str:
    """The kind of a collective by any of its names, such as ``all_gather`` of ``_allgather_base``; else the name."""
    plain = name.lower().replace("_", "")
    return next((kind for start, kind in _KINDS.items() if plain.startswith(start)), name)


def collectives_by_axis(
    trace: Trace, host: HostEvents, mesh: Mapping[str, int] | None, world_size: int
) -> list[AxisCollective]:
    """The collectives of a trace. ``mesh``: sizes of the axes of a run of this library; None for a foreign trace."""
    waits = _waits(trace, host)
    collectives = [
        _axis_collective(event, _axis(event, waits, mesh), mesh, world_size)
        for event in trace.collectives
        if event.duration_us > 0
    ]
    for at in np.flatnonzero(trace.named(lambda name: name.startswith(COLLECTIVE_PREFIX))).tolist():
        words = _SHARED_MEMORY_SUM.fullmatch(trace.names[trace.name[at]])
        if trace.kind[at] != ANNOTATION or words is None:
            continue
        name, axis, ranks, num_bytes = words.groups()
        collectives.append(
            AxisCollective(
                name=name,
                axis=axis,
                group_size=int(ranks),
                num_bytes=int(num_bytes),
                start_us=float(trace.start_us[at]),
                end_us=float(trace.end_us[at]),
                can_overlap=False,
            )
        )
    return collectives


def _waits(trace: Trace, host: HostEvents) -> dict[str, Intervals]:
    """When the host waits for each axis, by our annotations ``comm_exposed_AXIS``."""
    found: dict[str, Intervals] = {}
    for number, name in enumerate(trace.names):
        axis = name.removeprefix(f"{PHASE_PREFIX}comm_exposed_")
        if axis != name:
            at = np.flatnonzero((trace.name == number) & (trace.kind == ANNOTATION))
            found[axis] = union(trace.start_us[at], trace.end_us[at])
    return found


def _axis(event: CollectiveEvent, waits: Mapping[str, Intervals], mesh: Mapping[str, int] | None) -> str:
    if mesh is None:
        return event.group or "not known"
    if (axis := axis_of_group(event.group)) is not None:
        return axis
    for axis, intervals in waits.items():
        at = int(np.searchsorted(intervals[:, 0], event.start_us, side="right")) - 1
        if at >= 0 and intervals[at, 1] >= event.start_us:
            return axis
    if collective_kind(event.name) in ("send", "recv"):
        return "pp"
    used = [axis for axis, size in mesh.items() if size > 1]
    return used[0] if len(used) == 1 else "dp"


def _axis_collective(
    event: CollectiveEvent, axis: str, mesh: Mapping[str, int] | None, world_size: int
) -> AxisCollective:
    name = collective_kind(event.name)
    size = event.group_size or (world_size if mesh is None else mesh.get(axis, world_size))
    elements = max(0, event.elements_in)
    if name == "all_gather":
        elements = event.elements_out if event.elements_out > 0 else elements * max(1, size)
    item = DTYPE_BYTES.get(event.dtype.lower(), 4)
    return AxisCollective(
        name=name,
        axis=axis,
        group_size=size,
        num_bytes=elements * item,
        start_us=event.start_us,
        end_us=event.start_us + event.duration_us,
        can_overlap=True,
    )


def collective_table(collectives: Sequence[AxisCollective]) -> tuple[Collective, ...]:
    """Calls, bytes and bandwidths by collective, axis and size of group; most time first."""
    groups: dict[tuple[str, str, int, bool], list[AxisCollective]] = {}
    for event in collectives:
        groups.setdefault((event.name, event.axis, event.group_size, event.can_overlap), []).append(event)
    rows: list[Collective] = []
    for (name, axis, group_size, can_overlap), events in groups.items():
        total_s = sum(event.end_us - event.start_us for event in events) / 1e6
        num_bytes = sum(event.num_bytes for event in events)
        speed = num_bytes / total_s if total_s > 0 else 0.0
        rows.append(
            Collective(
                name=name,
                axis=axis,
                group_size=group_size,
                calls=len(events),
                num_bytes=num_bytes,
                total_s=total_s,
                algorithm_bytes_per_s=speed,
                bus_bytes_per_s=speed * bus_factor(name, group_size),
                can_overlap=can_overlap,
            )
        )
    return tuple(sorted(rows, key=lambda row: -row.total_s))


def overlaps(collectives: Sequence[AxisCollective], compute: Intervals, within: Intervals) -> tuple[Overlap, ...]:
    """Time of the collectives of each axis, and the part of it in which nothing is computed, inside of ``within`` (the steps).

    Collectives that cannot overlap are left out. Unions of intervals count two collectives at a time once.
    """
    found: list[Overlap] = []
    for axis in sorted({event.axis for event in collectives}):
        events = [event for event in collectives if event.axis == axis and event.can_overlap]
        runs = intersection(union([event.start_us for event in events], [event.end_us for event in events]), within)
        total = length(runs)
        if total > 0:
            exposed = total - overlap(runs, compute)
            found.append(Overlap(axis=axis, total_s=total / 1e6, exposed_s=exposed / 1e6))
    return tuple(found)
