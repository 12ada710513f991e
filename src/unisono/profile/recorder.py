"""Records a window of steps with torch's profiler, and leaves its summary and trace in the run's folder.

    warm-up     one step with the profiler prepared: its first events would measure its own start
    window      each step, phase and collective has a span; the profiler records operators, kernels, shapes and allocations
    end         trace written, read back and summarised on each rank; rank 0 merges the traces

Outside a window nothing is hooked: the loop compares two numbers a step.
"""

from __future__ import annotations

import gzip
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Final, cast

from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

from unisono.dist import World
from unisono.dist.progress import note_progress
from unisono.observe.events import EventLog
from unisono.observe.meters import StepTimers
from unisono.profile.clock import measure_clocks
from unisono.profile.compile_counts import compile_counts, compiled_since
from unisono.profile.growth_watch import GrowthWatch
from unisono.profile.host_events import PHASE_PREFIX, STEP_PREFIX
from unisono.profile.memory import HeldMemory
from unisono.profile.merge import merge_traces
from unisono.profile.rank_profile import (
    Clock,
    CompileCounts,
    GrowingAllocation,
    RankProfile,
    profile_folder,
    read_profiles,
    remove_earlier,
    remove_unfinished,
)
from unisono.profile.spans import recording
from unisono.profile.summary import ProfiledRun, summarise_trace
from unisono.profile.sync_watch import SyncWatch
from unisono.profile.trace_file import read_trace
from unisono.profile.window import ProfileWindow
from unisono.storage.directory import make_folder
from unisono.storage.files import new_file, os_reason, write_atomically

MAX_RAW_EVENTS: Final = 1_000_000  # of one rank; a larger trace is dropped, its summary kept
_COMPRESSION: Final = 3
_PIECE_BYTES: Final = 1 << 20
# ranks wait so long for each other's traces, and for the merge
_MAX_WAIT_S: Final = 600.0
_LOG: Final = logging.getLogger("unisono.profile")


class _Span:
    """Enters a phase of the step timers, and records it as a span of the trace. Re-entrant, as phases are."""

    __slots__ = ("_current", "_name", "_on_enter", "_phase", "_records")

    def __init__(
        self, name: str, phase: AbstractContextManager[None], current: list[str], on_enter: Callable[[str], None]
    ) -> None:
        self._name, self._phase, self._current, self._on_enter = name, phase, current, on_enter
        self._records: list[Any] = []

    def __enter__(self) -> None:
        record = record_function(PHASE_PREFIX + self._name)
        record.__enter__()
        self._records.append(record)
        self._current.append(self._name)
        self._on_enter(self._name)
        self._phase.__enter__()

    def __exit__(self, *exc: Any) -> None:
        self._phase.__exit__(*exc)
        self._current.pop()
        self._records.pop().__exit__(*exc)


class Recording:
    """The profile of one window on one rank: ``prepare``, ``begin``, ``start_step`` for each step, ``finish``.

    ``begin`` and ``finish`` are collectives, the others are not.

    Args:
        window: The steps.
        run_dir: Folder of the run.
        world: Ranks that profile the same steps.
        events: This rank's event log.
        timers: The timers whose phases become spans.
        device: ``cpu``, or the type of the accelerator.
        mesh: Sizes of the axes of the mesh.
        held: Returns bytes of the run's tensors by category.
        planned: Bytes by category that follow from the plan.
        limit_bytes: The memory there is.
        lines: Whether to find the source lines that read from tensors, or whose allocations stay. Not for compiled code, which
            the watching modes would make torch.compile compile again.
        made_at_s: When this attempt of the run began, in seconds since 1970. What is in the window's folder of an earlier one,
            which may have had more ranks, is removed.
    """

    def __init__(
        self,
        window: ProfileWindow,
        *,
        run_dir: Path,
        world: World,
        events: EventLog,
        timers: StepTimers,
        device: str,
        mesh: Mapping[str, int],
        held: Callable[[], Mapping[str, int]],
        planned: Mapping[str, int],
        limit_bytes: int,
        lines: bool,
        made_at_s: float,
    ) -> None:
        self.window = window
        self._run_dir, self._world, self._events, self._timers = run_dir, world, events, timers
        self._device, self._mesh, self._held, self._planned = device, mesh, held, planned
        self._limit_bytes, self._made_at_s = limit_bytes, made_at_s
        self._rank = world.job.rank
        self._folder = profile_folder(run_dir, window.first)
        self._phases: list[str] = ["other"]
        self._sync_watch = SyncWatch(lambda: self._phases[-1]) if window.stacks and lines else None
        self._growth_watch = GrowthWatch(lambda: self._phases[-1]) if window.stacks and lines else None
        self._growing: tuple[GrowingAllocation, ...] = ()
        self._stack = ExitStack()
        self._step: Any = None
        self._profiler = _profiler(device, stacks=window.stacks)
        self._clock, self._compiled = Clock(), CompileCounts()
        self._at_start: Mapping[str, int] = {}
        self._gradients_bytes = 0
        self._error = ""  # why there will be no profile

    def prepare(self) -> None:
        """Prepare the profiler, before the step that warms it up."""
        with suppress(Exception):  # an error comes again, and is reported, in ``begin``
            self._profiler.prepare_trace()

    def begin(self) -> None:
        """Begin to record. A collective."""
        remove_earlier(self._folder, None if self._rank == 0 else self._rank, self._made_at_s)
        remove_unfinished(self._run_dir, self._rank, self._made_at_s)
        self._clock = measure_clocks(self._world)[self._world.rank]
        self._at_start, self._compiled = dict(self._held()), compile_counts()
        try:
            self._profiler.start_trace()
        except Exception as error:  # such as another active profiler; it must not end the run
            self._error = f"the profiler did not start: {type(error).__name__}: {error}"
            return
        self._stack.enter_context(self._timers.wrapped(self._span))
        self._stack.enter_context(recording())
        if self._sync_watch is not None:
            self._stack.enter_context(self._sync_watch)
        if self._growth_watch is not None:
            self._stack.enter_context(self._growth_watch)

    def _span(self, name: str, phase: AbstractContextManager[None]) -> _Span:
        return _Span(name, phase, self._phases, self._on_phase)

    def _on_phase(self, name: str) -> None:
        if name == "optimizer" and not self._gradients_bytes:
            self._gradients_bytes = self._held().get("gradients", 0)

    def start_step(self, number: int) -> None:
        """End the span of the step before, and begin that of step ``number``."""
        self._end_step()
        if self._growth_watch is not None:
            self._growth_watch.next_step()
        self._step = record_function(f"{STEP_PREFIX}{number}")
        self._step.__enter__()

    def _end_step(self) -> None:
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None

    def abandon(self) -> None:
        """Stop without a result. Idempotent."""
        self._end_step()
        self._stack.close()
        with suppress(Exception):  # it may not have been started
            self._profiler.stop_trace()

    def finish(self, before_writing: Callable[[], None]) -> None:
        """Stop, and write summary and trace; rank 0 merges the traces. A collective. Failures are logged, and not raised.

        ``before_writing`` is called when the profiler has stopped. It ends what other threads do with other ranks: torch may hold
        the interpreter for longer than a collective may last while it writes the trace.
        """
        began_s = time.monotonic()
        self._end_step()
        if self._growth_watch is not None and not self._error:
            try:
                self._growing = self._growth_watch.growing()
            except Exception as failure:  # the rest of the profile is still good
                _LOG.warning("allocations that stay are not known: %s: %s", type(failure).__name__, failure)
        self._stack.close()
        profile, error = None, self._error
        try:
            if not error:
                self._profiler.stop_trace()
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
        before_writing()
        try:
            if not error:
                profile = self._write()
        except OSError as failure:
            error = os_reason(failure)
        except Exception as failure:  # a failed observation must not end the run
            error = f"{type(failure).__name__}: {failure}"
        self._world.meet(_MAX_WAIT_S)
        merged: tuple[int, ...] = ()
        if self._rank == 0 and not error:
            try:
                merged = merge_traces(self._folder, read_profiles(self._folder)[0])
            except OSError as failure:
                error = os_reason(failure)
            except Exception as failure:
                error = f"{type(failure).__name__}: {failure}"
        self._world.meet(_MAX_WAIT_S)  # else the next collective of the others would wait for the merge
        if error:
            _LOG.warning("the profile of step %s is not complete: %s", self.window.first, error)
        self._events.emit(
            "profile",
            step=self.window.first + self.window.num_steps - 1,
            first_step=self.window.first,
            folder=str(self._folder),
            trace_events=profile.num_events if profile is not None else 0,
            stopped_s=time.monotonic() - began_s,
            **({"error": error} if error else {}),
            **({"merged_ranks": len(merged)} if self._rank == 0 else {}),
        )

    def _write(self) -> RankProfile:
        """Write the summary, and the trace if it is not too large; returns the summary. Raises OSError, DataError."""
        make_folder(self._folder)
        name = f"rank-{self._rank}.trace.json.gz"
        raw = self._folder / f"{name}.json"
        try:
            self._profiler.export_chrome_trace(str(raw))
            note_progress()
            trace = read_trace(raw)
            is_kept = trace.num_events <= MAX_RAW_EVENTS
            notes = () if is_kept else (f"the trace of {trace.num_events:,} events was dropped; record fewer steps",)
            profile = summarise_trace(trace, self._facts(trace.meta, notes))
            note_progress()
            if is_kept:
                with raw.open("rb") as source, new_file(self._folder / name) as target:
                    packed: IO[bytes] = cast(
                        "IO[bytes]", gzip.GzipFile(fileobj=target, mode="wb", compresslevel=_COMPRESSION, mtime=0)
                    )
                    with packed:
                        while piece := source.read(_PIECE_BYTES):
                            packed.write(piece)
                            note_progress()
        finally:
            for path in (raw, raw.with_name(f"{raw.name}.tmp")):  # torch writes the latter first
                path.unlink(missing_ok=True)
        profile = replace(profile, trace_file=name if is_kept else "", grows=self._growing)
        write_atomically(self._folder / f"rank-{self._rank}.json", profile.to_bytes())
        return profile

    def _facts(self, meta: Mapping[str, Any], notes: tuple[str, ...]) -> ProfiledRun:
        base_ns = meta.get("baseTimeNanoseconds")
        return ProfiledRun(
            rank=self._rank,
            world_size=self._world.world_size,
            device=self._device,
            mesh=self._mesh,
            held=HeldMemory(
                at_start=self._at_start,
                gradients_bytes=self._gradients_bytes,
                planned=self._planned,
                limit_bytes=self._limit_bytes,
            ),
            compiled=compiled_since(self._compiled),
            clock=replace(self._clock, base_ns=base_ns if isinstance(base_ns, int) else 0),
            sync_points=self._sync_watch.points() if self._sync_watch is not None else None,
            has_stacks=self.window.stacks,
            notes=notes,
        )


def _profiler(device: str, *, stacks: bool) -> profile:
    activities = [ProfilerActivity.CPU]
    own = getattr(ProfilerActivity, device.upper(), None)
    if own is not None and own is not ProfilerActivity.CPU and own in supported_activities():
        activities.append(own)
    return profile(activities=activities, record_shapes=True, profile_memory=True, with_stack=stacks)
