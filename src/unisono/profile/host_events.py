"""Operators and annotations of a trace as trees: the parent, phase and self time of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from unisono.profile.intervals import Counts, Floats
from unisono.profile.source_files import is_of_torch, is_own
from unisono.profile.trace_file import ANNOTATION, OPERATOR, PYTHON, RUNTIME, Trace

PHASE_PREFIX: Final = "unisono phase "  # of the annotations of our phases
COLLECTIVE_PREFIX: Final = "unisono collective "
STEP_PREFIX: Final = "ProfilerStep#"
ENGINE_PREFIX: Final = "autograd::engine::evaluate_function"
OPTIMIZER_PREFIX: Final = "Optimizer.step#"
LOADER_PREFIX: Final = "enumerate(DataLoader)#"
# namespaces of operators that wait, or only contain others
_NO_COMPUTE: Final = frozenset({"c10d", "_c10d_functional", "c10d_functional", "autograd", "torch", "fsdp", "profiler"})
_LIBRARY_FRAMES: Final = ("<", "nn.Module:", "threading.py", "contextlib.py", "functools.py")
# properties of a step, which read for their caller
_STEP_FILE: Final = "unisono/train/step.py("


def computes(name: str) -> bool:
    """Whether an operator of this name computes, such as ``aten::mm``."""
    namespace, separator, _ = name.partition("::")
    return bool(separator) and namespace not in _NO_COMPUTE


@dataclass(frozen=True, kw_only=True, slots=True)
class HostEvents:
    """Operators, annotations and calls of the runtime of all threads [events], by thread and begin; parents before children.

    Attributes:
        place: Index of each event in the trace.
        parent: Index of its parent in these arrays; -1 for none.
        self_us: Time without that of children.
        phase: Index into ``phases``.
        in_backward: Whether the event is part of autograd's backward pass.
        is_recompute: Whether it is a forward operator inside of the backward pass, and no such operator contains it.
        is_root: Whether it computes, and no computing operator contains it.
        is_training: Whether its thread makes steps, or runs their backward pass.
        phases: Names of phases.
        main_thread: The thread that makes steps.
    """

    place: Counts
    parent: Counts
    self_us: Floats
    phase: NDArray[np.int32]
    in_backward: NDArray[np.bool_]
    is_recompute: NDArray[np.bool_]
    is_root: NDArray[np.bool_]
    is_training: NDArray[np.bool_]
    phases: Sequence[str]
    main_thread: int


def _sorted_events(trace: Trace, *kinds: int) -> Counts:
    places = trace.of_kind(*kinds)
    keys = (-trace.duration_us[places], trace.start_us[places], trace.thread[places])
    return places[np.lexsort(keys)]


def host_events(trace: Trace) -> HostEvents:
    """The trees of a trace's host events."""
    place = _sorted_events(trace, OPERATOR, ANNOTATION, RUNTIME)
    phases, phase_of_name = _phases(trace.names)
    name = trace.name[place]
    own_phase = np.where(trace.kind[place] == RUNTIME, -1, phase_of_name[name])
    is_engine = trace.named(lambda text: text.startswith(ENGINE_PREFIX))[place]
    computing = trace.named(computes)[place] & (trace.kind[place] == OPERATOR)
    forward = (trace.sequence[place] >= 0) & (trace.sequence[place] % 2 == 0)
    count = len(place)
    parent, self_us = np.full(count, -1, np.int64), trace.duration_us[place].copy()
    phase, in_backward = np.zeros(count, np.int32), np.zeros(count, bool)
    is_recompute, is_root = np.zeros(count, bool), np.zeros(count, bool)
    recomputes, within = np.zeros(count, bool), np.zeros(count, bool)  # itself or a parent: recomputes, computes
    stack: list[int] = []
    ends: list[float] = []
    last_thread = -1
    rows = zip(
        trace.thread[place].tolist(),
        trace.start_us[place].tolist(),
        trace.end_us[place].tolist(),
        own_phase.tolist(),
        is_engine.tolist(),
        computing.tolist(),
        forward.tolist(),
        strict=True,
    )
    for at, (thread, start, end, of_own, engine, compute, is_forward) in enumerate(rows):
        if thread != last_thread:
            stack, ends, last_thread = [], [], thread
        while ends and ends[-1] <= start:
            stack.pop()
            ends.pop()
        above = stack[-1] if stack else -1
        inside = above >= 0
        if inside:
            parent[at] = above
            self_us[above] -= end - start
        phase[at] = of_own if of_own >= 0 else phase[above] if inside else 0
        backward_above = inside and in_backward[above]
        in_backward[at] = engine or backward_above
        again = is_forward and backward_above and compute
        is_recompute[at] = again and not (inside and recomputes[above])
        recomputes[at] = again or (inside and recomputes[above])
        is_root[at] = compute and not (inside and within[above])
        within[at] = compute or (inside and within[above])
        stack.append(at)
        ends.append(end)
    main = _main_thread(trace, place)
    training = np.unique(np.r_[main, trace.thread[place][is_engine]])
    return HostEvents(
        place=place,
        parent=parent,
        self_us=np.maximum(self_us, 0.0),
        phase=phase,
        in_backward=in_backward,
        is_recompute=is_recompute,
        is_root=is_root,
        is_training=np.isin(trace.thread[place], training),
        phases=phases,
        main_thread=main,
    )


def _phases(names: Sequence[str]) -> tuple[list[str], NDArray[np.int32]]:
    """Names of phases, and the phase that each of the names begins; -1 for none."""
    phases = ["other"]
    own = np.full(max(1, len(names)), -1, np.int32)
    for at, name in enumerate(names):
        phase = ""
        if name.startswith(PHASE_PREFIX):
            phase = name[len(PHASE_PREFIX) :]
        elif name.startswith(OPTIMIZER_PREFIX):
            phase = "optimizer"
        elif name.startswith(LOADER_PREFIX):
            phase = "data_wait"
        if phase:
            if phase not in phases:
                phases.append(phase)
            own[at] = phases.index(phase)
    return phases, own


def _main_thread(trace: Trace, place: Counts) -> int:
    """The thread that has marks of steps, or else most operators."""
    marks = place[trace.named(lambda name: name.startswith(STEP_PREFIX))[place] & (trace.kind[place] == ANNOTATION)]
    if len(marks):
        return int(trace.thread[marks[0]])
    operators = place[trace.kind[place] == OPERATOR]
    engine = trace.named(lambda name: name.startswith(ENGINE_PREFIX))
    weights = np.where(engine[operators], 0.0, trace.duration_us[operators])
    if not len(operators):
        return -1
    return int(np.bincount(trace.thread[operators], weights=weights).argmax())


class PythonFrames:
    """Finds the line of the user's code that an event was called from, by the Python functions of a trace."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._place = _sorted_events(trace, PYTHON)
        self._parent: list[int] = []
        stack: list[tuple[int, float]] = []
        last = -1
        threads = trace.thread[self._place].tolist()
        starts = trace.start_us[self._place].tolist()
        for at, (thread, start, end) in enumerate(
            zip(threads, starts, trace.end_us[self._place].tolist(), strict=True)
        ):
            if thread != last:
                stack, last = [], thread
            while stack and stack[-1][1] <= start:
                stack.pop()
            self._parent.append(stack[-1][0] if stack else -1)
            stack.append((at, end))
        self._threads, self._starts = np.array(threads, np.int64), np.array(starts, np.float64)

    @property
    def is_empty(self) -> bool:
        """Whether the trace has no Python functions."""
        return not len(self._place)

    def source(self, thread: int, at_us: float) -> str:
        """``file(line): function`` of the innermost function that is neither Python's nor torch's; empty if there is none.

        The line is where that function begins: a trace has no other.
        """
        first, last = np.searchsorted(self._threads, [thread, thread + 1])
        at = first + int(np.searchsorted(self._starts[first:last], at_us, side="right")) - 1
        while at >= first:
            place = self._place[at]
            name = self._trace.names[self._trace.name[place]]
            if self._trace.end_us[place] >= at_us and not is_library(name):
                return name
            at = self._parent[at]
        return ""


def is_library(frame: str) -> bool:
    """Whether a function of this name is Python's or torch's, or one of ours that reads for its caller."""
    return frame.startswith(_LIBRARY_FRAMES) or is_of_torch(frame) or (_STEP_FILE in frame and is_own(frame))
