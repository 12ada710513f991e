"""Step timers and throughput meters. Needs the standard library only.

``StepTimers`` splits wall time into phases that add up to it exactly. ``RateMeter`` computes tokens per second and an ETA
from finished steps, without first steps, compilation, evaluation and checkpoints. Both take an injected clock. On an accelerator,
which executes asynchronously, ``StepTimers`` measures with device events (``EventMarks``): a host clock would time the launches.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Final

from unisono.device.adapter import DeviceEvent, DeviceStream

PHASES: Final = (
    *("data_wait", "h2d", "forward", "backward", "bubble", "comm_exposed"),
    *("optimizer", "ckpt_stall", "eval"),
)
# of exposed communication: data ranks (replicated and sharded), context, tensor, expert and pipeline parallelism
COMM_AXES: Final = ("dp", "cp", "tp", "ep", "pp")
ALL_PHASES: Final = (*PHASES, "other")
COMM_PHASES: Final = tuple(f"comm_exposed_{axis}" for axis in COMM_AXES)  # parts of comm_exposed
# axes of process groups by their description; those of a pipeline's stages begin with "stage"
_AXES_OF_GROUPS: Final = {
    **{"cp": "cp", "tp": "tp", "ep": "ep", "pp": "pp"},
    **{"dp": "dp", "dp_replicate": "dp", "dp_shard": "dp", "shard": "dp", "data": "dp", "experts": "dp"},
}
_NS_PER_S: Final = 1_000_000_000
_NS_PER_MS: Final = 1_000_000


def axis_of_group(description: str) -> str | None:
    """The axis (``COMM_AXES``) of the process group with this ``group_desc``; None of a group that the library has not made."""
    return "pp" if description.startswith("stage") else _AXES_OF_GROUPS.get(description)


class _Phase:
    """Context manager that adds time to one phase. Created once per phase, so entering allocates nothing."""

    __slots__ = ("_enter", "_leave", "elapsed_ns")

    def __init__(self, enter: Callable[[_Phase], None], leave: Callable[[], None]) -> None:
        self._enter, self._leave = enter, leave
        self.elapsed_ns = 0

    def __enter__(self) -> None:
        self._enter(self)

    def __exit__(self, *exc: object) -> None:
        self._leave()


class EventMarks:
    """Times phases with device events: records one at the end of each phase, and reads it once the device has reached it.

    A phase lasts from the event at its beginning to the event at its end: the work that the host launched in it, and the time in
    which the device was idle. No method waits for the device. Events are pooled.

    Args:
        new_event: Makes an event that takes times.
        stream: Returns the stream that the training thread computes on; asked at each ``restart``.
    """

    __slots__ = ("_free", "_last", "_new_event", "_pending", "_stream", "_stream_of")

    def __init__(self, new_event: Callable[[], DeviceEvent], stream: Callable[[], DeviceStream]) -> None:
        self._new_event, self._stream_of = new_event, stream
        self._free: list[DeviceEvent] = []
        self._pending: deque[tuple[_Phase, DeviceEvent]] = deque()
        self._stream = stream()
        self._last = self._record()

    def restart(self) -> None:
        """Drop the events that are not read yet; time counts from here on."""
        self._free += [self._last, *(event for _, event in self._pending)]
        self._pending.clear()
        self._stream = self._stream_of()
        self._last = self._record()

    def end(self, phase: _Phase) -> None:
        """Record the end of ``phase`` behind all work launched so far; the next phase begins there."""
        if not self._free:
            self.read()  # returns events that the device has passed to the pool
        self._pending.append((phase, self._record()))

    def read(self) -> None:
        """Add the elapsed times of the phases whose ends the device has reached."""
        while self._pending and self._pending[0][1].query():
            phase, event = self._pending.popleft()
            phase.elapsed_ns += round(self._last.elapsed_time(event) * _NS_PER_MS)
            self._free.append(self._last)
            self._last = event

    def _record(self) -> DeviceEvent:
        event = self._free.pop() if self._free else self._new_event()
        event.record(self._stream)
        return event


class StepTimers:
    """Timers of one training thread: ``with timers.phase("forward"): ...``.

    Exactly one phase runs at a time: entering an inner phase pauses the outer one, and time outside all phases counts as
    ``other``. The phases therefore add up to wall time to the nanosecond. Not thread-safe. ``phase`` raises ``KeyError`` for a
    name outside ``PHASES``, ``comm_exposed`` for one outside ``COMM_AXES``.

    Args:
        clock: Monotonic clock of the host in nanoseconds.
        marks: Takes the time of a device instead.
    """

    __slots__ = ("_clock", "_comm", "_current", "_mark_ns", "_marks", "_outer", "_phases", "comm_exposed", "phase")

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns, *, marks: EventMarks | None = None) -> None:
        self._clock, self._marks = clock, marks
        self._phases = {name: _Phase(self._enter, self._leave) for name in ALL_PHASES if name != "comm_exposed"}
        self._comm = {axis: _Phase(self._enter, self._leave) for axis in COMM_AXES}
        self._current = self._phases["other"]
        self._outer: list[_Phase] = []  # the phases that are paused
        self._mark_ns = clock()
        # plain look-ups: these run in the hot loop
        self.phase: Callable[[str], AbstractContextManager[None]] = self._phases.__getitem__
        self.comm_exposed: Callable[[str], AbstractContextManager[None]] = self._comm.__getitem__

    @contextmanager
    def wrapped(
        self, wrap: Callable[[str, AbstractContextManager[None]], AbstractContextManager[None]]
    ) -> Generator[None]:
        """Inside, each phase is entered through ``wrap(name, phase)``; the phase of an axis has the name ``comm_exposed_<axis>``.

        ``wrap`` is called once for each phase. Outside, entering a phase costs what it did before.
        """
        phases = {name: wrap(name, phase) for name, phase in self._phases.items()}
        comm = {axis: wrap(f"comm_exposed_{axis}", phase) for axis, phase in self._comm.items()}
        plain = self.phase, self.comm_exposed
        self.phase, self.comm_exposed = phases.__getitem__, comm.__getitem__
        try:
            yield
        finally:
            self.phase, self.comm_exposed = plain

    def _enter(self, phase: _Phase) -> None:
        self._outer.append(self._current)
        self._switch(phase)

    def _leave(self) -> None:
        self._switch(self._outer.pop())

    def _switch(self, phase: _Phase) -> None:
        if self._marks is not None:
            self._marks.end(self._current)
        else:
            now = self._clock()
            self._current.elapsed_ns += now - self._mark_ns
            self._mark_ns = now
        self._current = phase

    def start(self) -> None:
        """Begin the first window here; earlier time is not counted."""
        if self._marks is not None:
            self._marks.restart()
        self._mark_ns = self._clock()
        for phase in (*self._phases.values(), *self._comm.values()):
            phase.elapsed_ns = 0

    def take(self) -> TimeSplit:
        """Return the times since the last ``take`` or ``start``, and begin the next window. Allowed inside a phase.

        On an accelerator, phases whose end the device has not reached count in the next window.
        """
        self._switch(self._current)
        if self._marks is not None:
            self._marks.read()
        comm_exposed_s = {axis: _taken_s(phase) for axis, phase in self._comm.items()}
        seconds = {name: _taken_s(phase) for name, phase in self._phases.items()}
        seconds["comm_exposed"] = sum(comm_exposed_s.values())
        return TimeSplit(wall_s=sum(seconds.values()), seconds=seconds, comm_exposed_s=comm_exposed_s)


class GarbageTimer:
    """Measures the time of Python's cyclic garbage collections, in any thread, inside its ``with`` statement.

    No Python code of the process runs during a collection. The time is also part of the phases of ``StepTimers``.
    """

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock = clock
        self._began_ns = self._elapsed_ns = 0

    def __enter__(self) -> GarbageTimer:
        gc.callbacks.append(self._observe)
        return self

    def __exit__(self, *exc: object) -> None:
        gc.callbacks.remove(self._observe)

    def take_s(self) -> float:
        """Seconds since the last call, or since it was entered."""
        seconds, self._elapsed_ns = self._elapsed_ns / _NS_PER_S, 0
        return seconds

    def _observe(self, event: str, info: Mapping[str, int]) -> None:
        if event == "start":
            self._began_ns = self._clock()
        else:
            self._elapsed_ns += self._clock() - self._began_ns


@contextmanager
def collecting_every(steps: int) -> Generator[Callable[[int], None]]:
    """Collect garbage only after every ``steps``-th step, so that all ranks collect at the same time; 0 leaves it to Python.

    The context's value is called after each finished step with its number. Objects that exist at the start are frozen: a
    collection does not look at them (``gc.freeze``).
    """
    if not steps:
        yield lambda step: None
        return

    def after_step(step: int) -> None:
        if step % steps == 0:
            gc.collect()

    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield after_step
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def _taken_s(phase: _Phase) -> float:
    seconds, phase.elapsed_ns = phase.elapsed_ns / _NS_PER_S, 0
    return seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeSplit:
    """Seconds per phase: ``seconds`` by name (``PHASES`` and ``other``) add up to ``wall_s`` seconds of wall time, and
    ``comm_exposed_s`` by axis (``COMM_AXES``) to the exposed communication."""

    wall_s: float
    seconds: Mapping[str, float]
    comm_exposed_s: Mapping[str, float]

    def fields(self) -> dict[str, float]:
        """``time/window_s`` [seconds] and ``time/<phase>_frac``, its fractions from 0 to 1, for an event; empty if no time
        passed. ``time/comm_exposed_<axis>_frac`` for each axis that took any."""
        if self.wall_s <= 0:
            return {}
        fractions = {f"time/{name}_frac": seconds / self.wall_s for name, seconds in self.seconds.items()}
        by_axis = {
            f"time/comm_exposed_{axis}_frac": seconds / self.wall_s
            for axis, seconds in self.comm_exposed_s.items()
            if seconds
        }
        return {"time/window_s": self.wall_s, **fractions, **by_axis}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Speed over the last window of steady steps.

    Attributes:
        step_s: Mean seconds per step, without pauses such as evaluations.
        tokens_per_s: Tokens per second of all devices.
        tokens_per_s_device: Tokens per second of one device.
        eta_s: Seconds to the end of the run, at the speed of the window with its pauses.
    """

    step_s: float
    tokens_per_s: float
    tokens_per_s_device: float
    eta_s: float

    def fields(self) -> dict[str, float]:
        """The fields of a ``step`` event."""
        return {
            "perf/step_s": self.step_s,
            "perf/tokens_per_s": self.tokens_per_s,
            "perf/tokens_per_s_device": self.tokens_per_s_device,
            "eta_s": self.eta_s,
        }


@dataclass(frozen=True, slots=True)
class _Reading:
    """Steps counted at one reading; a device that runs ahead of the host is read only every few steps."""

    steps: int
    tokens: int
    busy_ns: int  # without the pauses
    wall_ns: int


class RateMeter:
    """Rolling step time, token rates and ETA of a run.

    Args:
        steps_total: Last step of the run.
        devices: Number of devices that share the tokens.
        window_steps: Length of the rolling window in steps.
        warmup_steps: Steps after each start or restart that are excluded because they allocate and initialise lazily.
        clock: Monotonic clock in nanoseconds.
    """

    def __init__(
        self,
        *,
        steps_total: int,
        devices: int = 1,
        window_steps: int = 50,
        warmup_steps: int = 2,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._steps_total = steps_total
        self._devices = devices
        self._warmup_left = warmup_steps
        self._clock = clock
        self._window_steps = window_steps
        self._window: deque[_Reading] = deque()
        self._steps_done = 0
        self._paused_ns = 0
        self._mark_ns = clock()

    @property
    def is_warming_up(self) -> bool:
        """Whether the next step is one of the first after a start, as far as steps have been recorded."""
        return self._warmup_left > 0

    def start(self) -> None:
        """Mark the begin of the first step; earlier time belongs to no step. Default: the time of construction."""
        self._mark_ns = self._clock()
        self._paused_ns = 0

    @contextmanager
    def paused(self) -> Generator[None]:
        """Exclude the time inside, such as evaluation or a checkpoint, from step times; the ETA includes it."""
        begin = self._clock()
        try:
            yield
        finally:
            self._paused_ns += self._clock() - begin

    def step_done(self, steps_done: int, *, tokens: int, steps: int = 1, exclude: bool = False) -> None:
        """Record finished steps; call it once per step, or once per reading of a device that is read every few steps.

        Args:
            steps_done: Number of updates finished so far.
            tokens: Tokens of all devices since the last call.
            steps: Steps since the last call.
            exclude: Leave these steps out of every rate, because they compiled or recaptured a graph.
        """
        now = self._clock()
        reading = _Reading(steps, tokens, now - self._mark_ns - self._paused_ns, now - self._mark_ns)
        self._mark_ns, self._paused_ns, self._steps_done = now, 0, steps_done
        if self._warmup_left > 0:
            self._warmup_left -= steps
        elif not exclude:
            self._window.append(reading)
            while sum(old.steps for old in self._window) - self._window[0].steps >= self._window_steps:
                self._window.popleft()

    def rates(self) -> Rates | None:
        """Rates over the window, or None before the first steady step."""
        busy_s = sum(reading.busy_ns for reading in self._window) / _NS_PER_S
        if busy_s <= 0:
            return None
        steps = sum(reading.steps for reading in self._window)
        tokens_per_s = sum(reading.tokens for reading in self._window) / busy_s
        wall_s = sum(reading.wall_ns for reading in self._window) / _NS_PER_S
        return Rates(
            step_s=busy_s / steps,
            tokens_per_s=tokens_per_s,
            tokens_per_s_device=tokens_per_s / self._devices,
            eta_s=max(0, self._steps_total - self._steps_done) * wall_s / steps,
        )
