"""Memory through a window, by category: what the run says that it holds, and what the trace says was allocated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from unisono.profile.host_events import HostEvents
from unisono.profile.intervals import Floats
from unisono.profile.rank_profile import MEMORY_CATEGORIES, MemoryProfile
from unisono.profile.trace_file import Trace

MAX_POINTS: Final = 500
_PARAMETERS, _GRADIENTS, _OPTIMIZER, _ACTIVATIONS, _OTHER = range(5)
_OF_PHASE: Final = {"forward": _ACTIVATIONS, "backward": _ACTIVATIONS}


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldMemory:
    """Bytes of a run's tensors, as their storages have them.

    Attributes:
        at_start: By category, when the window begins: ``parameters``, ``gradients``, ``optimizer``, ``other``.
        gradients_bytes: Bytes of gradients when the optimizer begins, also of those that are freed in every step.
        planned: By category, what follows from the plan.
        limit_bytes: The memory there is.
    """

    at_start: Mapping[str, int]
    gradients_bytes: int
    planned: Mapping[str, int]
    limit_bytes: int


def memory_profile(
    trace: Trace, host: HostEvents, begin_us: float, end_us: float, held: HeldMemory | None
) -> MemoryProfile:
    """The memory of an accelerator if the trace has any, else that of the host. Without ``held`` it has no categories.

    What is allocated in forward and backward passes is activations, apart from gradients that the step allocates; anything else
    is other. Freeing what the window did not allocate lowers other.
    """
    events = trace.memory
    chosen = events.is_device if events.is_device.any() else ~events.is_device
    order = np.flatnonzero(chosen)
    order = order[np.argsort(events.at_us[order], kind="stable")]
    at_us, sizes = events.at_us[order], events.num_bytes[order]
    planned, limit = (held.planned, held.limit_bytes) if held is not None else ({}, 0)
    if not len(order):
        return MemoryProfile(planned=planned, limit_bytes=limit)
    if held is None:
        absolute = bool(events.is_device.any())
        totals = events.total_bytes[order] if absolute else np.cumsum(sizes)
        rows = _thinned(np.stack([(at_us - begin_us) / 1e6, totals.astype(np.float64)], axis=1), 1)
        return MemoryProfile(peak_bytes=int(totals.max()), timeline=rows)
    held_now = [held.at_start.get(name, 0) for name in MEMORY_CATEGORIES]
    if events.is_device.any():  # the allocator counts everything, also what no tensor of the run holds
        before = int(events.total_bytes[order[0]] - sizes[0])
        held_now[_OTHER] = max(held_now[_OTHER], before - sum(held_now[:_OTHER]))
    rows = np.zeros((len(order), 1 + len(MEMORY_CATEGORIES)))
    rows[:, 0] = (at_us - begin_us) / 1e6
    live: dict[int, tuple[int, int]] = {}
    categories = _categories(trace, host, at_us)
    for at, (address, size, category) in enumerate(
        zip(events.address[order].tolist(), sizes.tolist(), categories, strict=True)
    ):
        if size >= 0:
            live[address] = (size, category)
            held_now[category] += size
        else:
            # a memory block of the host may be given back to another allocator, which knows its address only
            _, category = live.pop(address, (0, _OTHER))
            held_now[category] = max(0, held_now[category] + size)
        rows[at, 1:] = held_now
    # of the activations, gradients that are allocated in each backward pass
    own = max(0, held.gradients_bytes - held.at_start.get("gradients", 0))
    moved = np.minimum(own, rows[:, 1 + _ACTIVATIONS])
    rows[:, 1 + _GRADIENTS] += moved
    rows[:, 1 + _ACTIVATIONS] -= moved
    inside = (at_us >= begin_us) & (at_us <= end_us)
    rows = rows[inside] if inside.any() else rows
    totals = rows[:, 1:].sum(axis=1)
    peak = int(totals.argmax())
    return MemoryProfile(
        peak_bytes=int(totals[peak]),
        at_peak={name: int(value) for name, value in zip(MEMORY_CATEGORIES, rows[peak, 1:], strict=True)},
        planned=planned,
        limit_bytes=limit,
        timeline=_thinned(rows, slice(1, None)),
    )


def _categories(trace: Trace, host: HostEvents, at_us: Floats) -> list[int]:
    """The category of what is allocated at each time, by the phase of the training thread then."""
    of_phase = [_OF_PHASE.get(name, _OTHER) for name in host.phases]
    chosen = np.flatnonzero(host.is_training & (trace.thread[host.place] == host.main_thread))
    starts = trace.start_us[host.place[chosen]]
    ends = trace.end_us[host.place[chosen]]
    found: list[int] = []
    at_first = np.searchsorted(starts, at_us, side="right") - 1
    for at, now in zip(at_first.tolist(), at_us.tolist(), strict=True):
        place = int(chosen[at]) if at >= 0 else -1
        end = float(ends[at]) if at >= 0 else 0.0
        while place >= 0 and end < now:
            place = int(host.parent[place])
            end = float(trace.end_us[host.place[place]]) if place >= 0 else 0.0
        found.append(of_phase[host.phase[place]] if place >= 0 else _OTHER)
    return found


def _thinned(rows: Floats, summed: int | slice) -> tuple[tuple[float, ...], ...]:
    """At most ``MAX_POINTS`` rows: of each part that with the largest sum over the columns ``summed``."""
    totals = rows[:, summed] if isinstance(summed, int) else rows[:, summed].sum(axis=1)
    bounds = np.unique(np.linspace(0, len(rows), MAX_POINTS + 1).astype(np.int64))
    picked = [first + int(totals[first:last].argmax()) for first, last in pairwise(bounds.tolist())]
    return tuple(tuple(float(round(value, 6)) for value in rows[at].tolist()) for at in picked)
