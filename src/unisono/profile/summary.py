"""The profile of a rank from its trace, or of any trace of PyTorch's profiler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from unisono.observe.events import as_mapping
from unisono.profile.communication import collective_table, collectives_by_axis, overlaps
from unisono.profile.host_events import (
    ENGINE_PREFIX,
    LOADER_PREFIX,
    OPTIMIZER_PREFIX,
    PHASE_PREFIX,
    STEP_PREFIX,
    HostEvents,
    PythonFrames,
    host_events,
)
from unisono.profile.intervals import NONE, Intervals, intersection, length, union, without
from unisono.profile.memory import HeldMemory, memory_profile
from unisono.profile.operators import (
    device_times,
    kernel_table,
    operator_table,
    patterns,
    product_table,
    subtree_sums,
    sync_points,
)
from unisono.profile.rank_profile import (
    Clock,
    CompileCounts,
    LaunchTime,
    PhaseSpan,
    PhaseTime,
    RankProfile,
    StepTime,
    SyncPoint,
)
from unisono.profile.trace_file import ANNOTATION, KERNEL, OPERATOR, PYTHON, Trace

SHORT_US: Final = 10.0  # calling an operator or kernel takes about as long
_BRIDGE_US: Final = 200.0  # on the CPU, shorter gaps between two operators are Python's work, not waiting
_WAITING: Final = ("data_wait", "bubble", "ckpt_stall", "eval")
_MAX_SPANS: Final = 400
_COMPILES: Final = "_compile.compile_inner"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfiledRun:
    """Facts about a window of a run that are not in its trace.

    Attributes:
        rank: The rank.
        world_size: Number of ranks.
        device: ``cpu``, or the type of the accelerator.
        mesh: Sizes of the axes of the mesh.
        held: Bytes of the run's tensors.
        compiled: What torch.compile did.
        clock: The rank's clock.
        sync_points: Where the host read from the device, with lines of the source; None where they are taken from the trace.
        has_stacks: Whether Python's stacks were recorded.
        notes: What is missing, and why.
    """

    rank: int
    world_size: int
    device: str
    mesh: Mapping[str, int]
    held: HeldMemory
    compiled: CompileCounts
    clock: Clock
    sync_points: Sequence[SyncPoint] | None = None
    has_stacks: bool = False
    notes: Sequence[str] = ()


def summarise_trace(trace: Trace, run: ProfiledRun | None = None) -> RankProfile:
    """The profile of a trace: of a window of a run, or with ``run`` None of another program."""
    host = host_events(trace)
    steps, is_numbered = _steps(trace, host)
    begin_us, end_us = (steps[0][1], steps[-1][2]) if steps else _span(trace)
    window = np.array([[begin_us, end_us]])
    starts = trace.start_us[host.place]
    within = (starts >= begin_us) & (starts < end_us)
    device = device_times(trace, host)
    kernels = device.kernels[(trace.start_us[device.kernels] >= begin_us) & (trace.start_us[device.kernels] < end_us)]
    distributed = as_mapping(trace.meta.get("distributedInfo"))
    world_size = run.world_size if run is not None else _count(distributed.get("world_size"))
    collectives = [
        event
        for event in collectives_by_axis(trace, host, None if run is None else run.mesh, world_size)
        if event.start_us < end_us and event.end_us > begin_us
    ]
    loading = _loading(trace, host)
    waiting = _joined(_waits(trace), loading)
    compute = without(_compute(trace, host, kernels), waiting if not len(kernels) else NONE)
    # on the CPU, the host also waits while a collective runs and nothing is computed; on any device while it compiles
    overlappable = [event for event in collectives if event.can_overlap]
    communication = union([event.start_us for event in overlappable], [event.end_us for event in overlappable])
    exposed = without(communication, compute) if not len(kernels) else NONE
    compiling = host.place[trace.named(lambda name: name.startswith(_COMPILES))[host.place]]
    waits = _joined(waiting, exposed, union(trace.start_us[compiling], trace.end_us[compiling]))
    operator_us = subtree_sums(host, device.launched_us) if len(kernels) else trace.duration_us[host.place]
    num_steps = len(steps) if is_numbered else _optimizer_steps(trace, host, within)
    clock = Clock(base_ns=_count(trace.meta.get("baseTimeNanoseconds"))) if run is None else run.clock
    return RankProfile(
        rank=run.rank if run is not None else _count(distributed.get("rank")),
        world_size=world_size,
        is_foreign=run is None,
        device=run.device if run is not None else "accelerator" if len(kernels) else "cpu",
        num_events=trace.num_events,
        num_steps=num_steps,
        wall_s=(end_us - begin_us) / 1e6,
        steps=tuple(
            StepTime(step=number, start_s=(start - begin_us) / 1e6, wall_s=(end - start) / 1e6)
            for number, start, end in steps
        ),
        began_s=clock.base_ns / 1e9 + begin_us / 1e6 - clock.offset_s,
        phases=_phase_table(trace, host, within, (end_us - begin_us)),
        spans=_phase_spans(trace, host, *steps[0][1:]) if steps else (),
        operators=operator_table(trace, host, device, within),
        kernels=kernel_table(trace, kernels),
        products=product_table(trace, host, device, within),
        collectives=collective_table(collectives),
        overlaps=overlaps(collectives, compute, window),
        launch=_launch(trace, host, within, kernels, window, waits),
        syncs=tuple(run.sync_points)
        if run is not None and run.sync_points is not None
        else sync_points(trace, host, PythonFrames(trace), within),
        compiled=_compiled(trace, host, within, run),
        loader_wait_s=length(
            without(intersection(loading, window), union(trace.start_us[kernels], trace.end_us[kernels]))
        )
        / 1e6,
        recompute_s=float(operator_us[host.is_recompute & within].sum()) / 1e6,
        patterns=patterns(trace, host, device, within),
        memory=memory_profile(trace, host, begin_us, end_us, None if run is None else run.held),
        clock=clock,
        has_stacks=run.has_stacks if run is not None else bool((trace.kind == PYTHON).any()),
        notes=(
            *(run.notes if run is not None else ()),
            *((f"{trace.num_damaged:,} events could not be read",) if trace.num_damaged else ()),
        ),
    )


def _count(value: Any) -> int:
    return value if isinstance(value, int) and 0 <= value < 1 << 62 else 0


def _span(trace: Trace) -> tuple[float, float]:
    chosen = trace.of_kind(OPERATOR, ANNOTATION, KERNEL)
    if not len(chosen):
        return 0.0, 0.0
    return float(trace.start_us[chosen].min()), float(trace.end_us[chosen].max())


def _steps(trace: Trace, host: HostEvents) -> tuple[list[tuple[int, float, float]], bool]:
    """Number, begin and end of each step, and whether the trace marks them."""
    marks = trace.named(lambda name: name.startswith(STEP_PREFIX)) & (trace.kind == ANNOTATION)
    marks &= trace.thread == host.main_thread
    found: list[tuple[int, float, float]] = []
    for at in np.flatnonzero(marks).tolist():
        number = trace.names[trace.name[at]][len(STEP_PREFIX) :]
        step = int(number) if number.isdecimal() and len(number) < 16 else -1
        found.append((step, float(trace.start_us[at]), float(trace.end_us[at])))
    return sorted(found, key=lambda step: step[1]), bool(found)


def _optimizer_steps(trace: Trace, host: HostEvents, within: NDArray[np.bool_]) -> int:
    """Updates of optimizers, which are steps in a trace without marks of steps; those of several count as one."""
    marked = trace.named(lambda name: name.startswith(OPTIMIZER_PREFIX))[host.place] & within
    marked &= trace.kind[host.place] == ANNOTATION
    return int(np.bincount(trace.name[host.place[marked]], minlength=1).max())


def _waits(trace: Trace) -> Intervals:
    """When the training thread waits for other ranks or for data, by our annotations."""
    waits = trace.named(
        lambda name: name.startswith((f"{PHASE_PREFIX}comm_exposed", *(PHASE_PREFIX + phase for phase in _WAITING)))
    )
    at = np.flatnonzero(waits & (trace.kind == ANNOTATION))
    return union(trace.start_us[at], trace.end_us[at])


def _loading(trace: Trace, host: HostEvents) -> Intervals:
    """When the training thread waits for a batch: of our loaders, or of torch's, which mark the calls of ``__next__``."""
    waits = trace.named(lambda name: name.startswith((LOADER_PREFIX, f"{PHASE_PREFIX}data_wait")))
    at = np.flatnonzero(waits & (trace.kind == ANNOTATION) & (trace.thread == host.main_thread))
    return union(trace.start_us[at], trace.end_us[at])


def _joined(*intervals: Intervals) -> Intervals:
    """The union of lists of intervals."""
    together = np.concatenate(intervals)
    return union(together[:, 0], together[:, 1])


def _compute(trace: Trace, host: HostEvents, kernels: Any) -> Intervals:
    """When something is computed: by kernels that are no collectives, or on the CPU by operators of the training threads."""
    if len(kernels):
        is_comm = trace.named(lambda name: "nccl" in name.lower() or "rccl" in name.lower())
        chosen = kernels[~is_comm[trace.name[kernels]]]
        return union(trace.start_us[chosen], trace.end_us[chosen])
    chosen = host.place[host.is_root & host.is_training]
    return union(trace.start_us[chosen], trace.end_us[chosen], bridge=_BRIDGE_US)


def _phase_table(trace: Trace, host: HostEvents, within: NDArray[np.bool_], window_us: float) -> tuple[PhaseTime, ...]:
    """Phases of the training thread, without those inside them. A foreign trace has them by autograd and the optimizer's mark."""
    chosen = np.flatnonzero(within & (trace.thread[host.place] == host.main_thread))
    places = host.place[chosen]
    ours = trace.named(lambda name: name.startswith(PHASE_PREFIX))[places] & (trace.kind[places] == ANNOTATION)
    calls = np.zeros(len(host.phases), np.int64)
    total = np.zeros(len(host.phases))
    if ours.any():
        begins = {int(at) for at in chosen[ours].tolist()}
        for at in begins:
            took = float(trace.duration_us[host.place[at]])
            calls[host.phase[at]] += 1
            total[host.phase[at]] += took
            above = int(host.parent[at])
            while above >= 0 and above not in begins:
                above = int(host.parent[above])
            if above >= 0:
                total[host.phase[above]] -= took
        names, counts, times = list(host.phases), calls.tolist(), total.tolist()
    else:
        names, counts, times = _foreign_phases(trace, host, chosen)
    rows = [
        PhaseTime(name=name, calls=int(count), total_s=max(0.0, took) / 1e6)
        for name, count, took in zip(names, counts, times, strict=True)
        if name != "other" and count
    ]
    rest = window_us / 1e6 - sum(row.total_s for row in rows)
    return (*sorted(rows, key=lambda row: -row.total_s), PhaseTime(name="other", calls=0, total_s=max(0.0, rest)))


def _phase_spans(trace: Trace, host: HostEvents, begin_us: float, end_us: float) -> tuple[PhaseSpan, ...]:
    """The passes through phases of the training thread that begin in the given time."""
    starts = trace.start_us[host.place]
    ours = trace.named(lambda name: name.startswith(PHASE_PREFIX))[host.place] & (trace.kind[host.place] == ANNOTATION)
    ours &= (trace.thread[host.place] == host.main_thread) & (starts >= begin_us) & (starts < end_us)
    return tuple(
        PhaseSpan(
            name=host.phases[int(host.phase[at])],
            start_s=float(starts[at] - begin_us) / 1e6,
            wall_s=float(trace.duration_us[host.place[at]]) / 1e6,
        )
        for at in np.flatnonzero(ours)[:_MAX_SPANS].tolist()
    )


def _foreign_phases(
    trace: Trace, host: HostEvents, chosen: NDArray[np.int64]
) -> tuple[list[str], list[int], list[float]]:
    """Phases by marks of optimizers and loaders, by autograd's engine, and by computing operators outside of these."""
    spent: dict[str, tuple[int, float]] = {}
    for phase in ("optimizer", "data_wait"):
        number = host.phases.index(phase) if phase in host.phases else -1
        marks = [
            at
            for at in chosen[host.phase[chosen] == number].tolist()
            if host.parent[at] < 0 or host.phase[host.parent[at]] != number
        ]
        spent[phase] = (len(marks), float(trace.duration_us[host.place[marks]].sum()))
    free = chosen[host.phase[chosen] == 0]
    engine = trace.named(lambda name: name.startswith(ENGINE_PREFIX))[host.place[free]]
    roots = host.is_root[free] & ~host.in_backward[free]
    for phase, mask in (("backward", engine), ("forward", roots)):
        at = host.place[free[mask]]
        spent[phase] = (len(at), length(union(trace.start_us[at], trace.end_us[at], bridge=_BRIDGE_US)))
    names = list(spent)
    return names, [spent[name][0] for name in names], [spent[name][1] for name in names]


def _launch(
    trace: Trace, host: HostEvents, within: NDArray[np.bool_], kernels: Any, window: Intervals, waits: Intervals
) -> LaunchTime:
    """See ``LaunchTime``; ``waits`` are when the host waits or compiles."""
    waits = intersection(waits, window)
    compute_us = length(window) - length(waits)
    waiting = np.array([name in _WAITING or name.startswith("comm_exposed") for name in host.phases], bool)
    operators = within & host.is_training & (trace.kind[host.place] == OPERATOR) & ~waiting[host.phase]
    num_operators = int(operators.sum())
    if len(kernels):
        busy = union(trace.start_us[kernels], trace.end_us[kernels])
        return LaunchTime(
            compute_s=compute_us / 1e6,
            work_s=length(without(intersection(busy, window), waits)) / 1e6,
            num_operators=num_operators,
            num_kernels=len(kernels),
            num_short=int((trace.duration_us[kernels] < SHORT_US).sum()),
        )
    counted = np.flatnonzero(operators & trace.named(lambda name: "::" in name)[host.place])
    work_us = float(host.self_us[counted][_is_long(trace, host, counted)].sum())
    roots = host.place[operators & host.is_root]
    return LaunchTime(
        compute_s=compute_us / 1e6,
        work_s=min(compute_us, work_us) / 1e6,
        num_operators=num_operators,
        num_kernels=0,
        num_short=int((trace.duration_us[roots] < SHORT_US).sum()),
    )


def _is_long(trace: Trace, host: HostEvents, chosen: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether operators ``chosen`` work for ``SHORT_US`` or longer, in the median of calls of the same name and shapes: other
    processes may hold up single ones."""
    if not len(chosen):
        return np.zeros(0, bool)
    places = host.place[chosen]
    keys = trace.name[places].astype(np.int64) * (len(trace.shapes) + 1) + trace.shape[places] + 1
    _, kind = np.unique(keys, return_inverse=True)
    own_us = host.self_us[chosen]
    order = np.lexsort((own_us, kind))
    counts = np.bincount(kind)
    middles = np.cumsum(counts) - counts + (counts - 1) // 2
    return (own_us[order][middles] >= SHORT_US)[kind]


def _compiled(trace: Trace, host: HostEvents, within: NDArray[np.bool_], run: ProfiledRun | None) -> CompileCounts:
    """Compilations in the window: those that the trace shows, or that torch has counted."""
    marks = host.place[within & trace.named(lambda name: name.startswith(_COMPILES))[host.place]]
    counted = run.compiled if run is not None else CompileCounts()
    return CompileCounts(
        compilations=max(len(marks), counted.compilations),
        total_s=float(trace.duration_us[marks].sum()) / 1e6,
        graph_breaks=counted.graph_breaks,
    )
