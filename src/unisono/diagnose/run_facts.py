"""Facts of a run from its events, as arrays over ranks and readings: the input of diagnosis rules.

A rank reads its device and its timers after one step or several, and writes the reading into the ``step`` event of the last of
them. Readings of the first steps of an attempt, and of steps that compiled or were profiled, are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from unisono.config.toml_file import read_toml
from unisono.diagnose.corruption_facts import CorruptionFact, read_corruptions
from unisono.diagnose.ending import Ending, read_ending
from unisono.diagnose.memory_ending import with_memory
from unisono.diagnose.monitor_facts import MonitorSamples, read_monitor
from unisono.diagnose.tap_facts import Tap, read_taps
from unisono.errors import ConfigError, DataError
from unisono.observe.events import Event, as_mapping, bounded_number, event_step, number
from unisono.observe.history import Floats, RankHistory, of_one_run, read_history, steady_readings
from unisono.observe.link_events import AxisTraffic, LinkTraffic, read_axes, read_links, rms_lag
from unisono.observe.meters import ALL_PHASES, COMM_PHASES
from unisono.observe.nonfinite_events import NonfiniteOrigin, read_origins
from unisono.profile import RankProfile, newest_profiles, read_trace, summarise_trace
from unisono.storage.run_folder import EVENTS_FOLDER, RUN_FILE

# phases in which a rank works itself, and does not wait
COMPUTE_PHASES: Final = tuple(
    phase for phase in ALL_PHASES if phase not in ("data_wait", "bubble", "comm_exposed", "ckpt_stall", "eval")
)
# stages of the work of loader workers
LOADER_STAGES: Final = ("read", "transform", "collate")
# what a plan has a rank hold throughout
HELD_CATEGORIES: Final = ("parameters", "gradients", "optimizer")
_MAX_HOST: Final = 255  # characters of a name
_MAX_BYTES: Final = 1e18
_MAX_S: Final = 1e12
_MAX_FLOPS_PER_S: Final = 1e24


@dataclass(frozen=True, kw_only=True, slots=True)
class SkippedStep:
    """A step that the guard skipped.

    Attributes:
        step: Number of the step, from 1.
        loss: Mean loss over the global batch.
        grad_norm: Norm of the gradient of the mean loss.
        rank_loss: Sum of the losses of this rank's samples; None in events of an earlier release.
        sample_ids: The first samples of this rank in the step.
    """

    step: int
    loss: float
    grad_norm: float
    rank_loss: float | None
    sample_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFacts:
    """The last attempt of one rank.

    Attributes:
        rank: The rank.
        steps: Last step of each reading [readings].
        steps_per_reading: Number of steps of each reading [readings].
        wall_s: Seconds of each reading [readings].
        phase_s: Seconds of each phase of ``ALL_PHASES`` and ``COMM_PHASES`` in each reading [readings].
        num_steps: Number of steps that the attempt has made, warm-up included.
        peak_bytes: Most memory in use, in bytes; 0 if not known.
        limit_bytes: The memory there is, in bytes; 0 if not known.
        memory_bytes: Memory in use at each reading, in bytes; 0 where not known [readings].
        skipped: Steps that the guard skipped.
        gc_s: Seconds of each reading in which Python collected garbage, which are part of its phases [readings].
        loader_s: Seconds that loader workers spent on its batches, by stage of ``LOADER_STAGES`` [readings].
        peak_reserved_bytes: Most that the allocator of the device held, in bytes; 0 on the CPU.
        num_alloc_retries: Allocations that succeeded only after the allocator gave back its free blocks.
        links: Traffic with each peer.
        axes: Traffic by mesh axis; empty in runs of earlier releases.
        origins: First non-finite tensors of skipped steps, on this rank.
        corruptions: Silent corruption that this rank reported, in all attempts, as later ones may use the same faulty host.
        device: ``cpu``, or type and number of the accelerator; empty if not known.
        held_bytes: Bytes of ``parameters``, ``gradients`` and ``optimizer`` state that the plan has the rank hold; empty if not
            known.
        baseline_flops_per_s: Rate of products that ``unisono doctor --bench`` measured on the rank's node; 0 if nothing.
        ceiling_frac: Model FLOP/s over the measured rate of a product, in the median reading; 0 if not known.
        mfu: The same over the data sheet; 0 if not known.
        host: Name of its host; empty if not known.
        monitor: Samples of the load of process, host and device, from the first reading on.
    """

    rank: int
    steps: NDArray[np.int64]
    steps_per_reading: NDArray[np.int64]
    wall_s: Floats
    phase_s: Mapping[str, Floats]
    num_steps: int
    peak_bytes: float = 0.0
    limit_bytes: float = 0.0
    memory_bytes: Floats = field(default_factory=lambda: np.zeros(0))
    skipped: tuple[SkippedStep, ...] = ()
    gc_s: Floats = field(default_factory=lambda: np.zeros(0))
    loader_s: Mapping[str, Floats] = field(default_factory=dict[str, Floats])
    peak_reserved_bytes: float = 0.0
    num_alloc_retries: int = 0
    links: tuple[LinkTraffic, ...] = ()
    axes: tuple[AxisTraffic, ...] = ()
    origins: tuple[NonfiniteOrigin, ...] = ()
    corruptions: tuple[CorruptionFact, ...] = ()
    device: str = ""
    held_bytes: Mapping[str, float] = field(default_factory=dict[str, float])
    baseline_flops_per_s: float = 0.0
    ceiling_frac: float = 0.0
    mfu: float = 0.0
    host: str = ""
    monitor: MonitorSamples = field(default_factory=lambda: MonitorSamples())


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingFacts:
    """Losses and gradients of the last attempt, which are of the whole model and batch.

    Attributes:
        steps: Number of each step [steps].
        losses: Mean loss over the global batch [steps].
        grad_norms: Norm of the gradient of the mean loss, before clipping [steps].
        eval_steps: Steps after which an evaluation was made [evaluations].
        eval_losses: Its loss [evaluations].
        layer_steps: Steps of which there are gradient statistics [statistics].
        layer_norms: Gradient norm of each parameter in these steps, by name [statistics].
        lag_steps: Last step of each ``links`` event of a run with parameter servers [events].
        lags: Number of other workers' pushes between the values that a push was computed from and its arrival, as the root
            mean square over pushes [events].
        taps: Tapped steps, ascending.
    """

    steps: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    losses: Floats = field(default_factory=lambda: np.zeros(0))
    grad_norms: Floats = field(default_factory=lambda: np.zeros(0))
    eval_steps: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    eval_losses: Floats = field(default_factory=lambda: np.zeros(0))
    layer_steps: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    layer_norms: Mapping[str, Floats] = field(default_factory=dict[str, Floats])
    lag_steps: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    lags: Floats = field(default_factory=lambda: np.zeros(0))
    taps: tuple[Tap, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """All ranks of a run.

    Attributes:
        ranks: The ranks that have events, ascending.
        training: Losses and gradients, as the lowest rank wrote them.
        settings: Options of the run by dotted name.
        plan: The run's strategy, as in a strategy file.
        profiles: The last profile of the run by rank, or the one of a foreign trace; empty without.
        notes: What could not be read.
        last_progress_at_s: Wall-clock time of the newest step, or of the start of the attempt, in seconds since 1970; 0 if not
            known.
        is_script: Whether a Python script made the run, rather than ``unisono train``.
        num_parameters: Parameters of the model; 0 if not known.
        ending: Why the attempt failed, or why its ranks do not meet; None if it goes on, or has ended without an error.
    """

    ranks: Sequence[RankFacts]
    training: TrainingFacts = field(default_factory=lambda: TrainingFacts())
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    plan: Mapping[str, Any] = field(default_factory=dict[str, Any])
    profiles: Sequence[RankProfile] = ()
    notes: Sequence[str] = ()
    last_progress_at_s: float = 0.0
    is_script: bool = False
    num_parameters: float = 0.0
    ending: Ending | None = None

    @property
    def steps_together(self) -> bool:
        """Whether the ranks wait for each other in every step, so that a slow one delays all."""
        sync = self.plan.get("sync")
        kind = cast("Mapping[str, Any]", sync).get("kind") if isinstance(sync, Mapping) else None
        return kind != "dist_async"

    @property
    def rank_numbers(self) -> tuple[int, ...]:
        """The ranks, in the order of the rows below."""
        return tuple(facts.rank for facts in self.ranks)

    def common_steps(self) -> NDArray[np.int64]:
        """The steps at which all ranks have a reading [readings]."""
        return self._common[0]

    @cached_property
    def _common(self) -> tuple[NDArray[np.int64], list[NDArray[np.int64] | slice]]:
        """The steps at which all ranks have a reading, and where each rank has them."""
        steps = self.ranks[0].steps if self.ranks else np.zeros(0, np.int64)
        for facts in self.ranks[1:]:
            if not np.array_equal(steps, facts.steps):
                steps = np.intersect1d(steps, facts.steps, assume_unique=True)
        steps.flags.writeable = False  # it is kept, and given to every rule
        whole = slice(None)
        return steps, [
            whole if len(steps) == len(facts.steps) else np.searchsorted(facts.steps, steps) for facts in self.ranks
        ]

    def wall_s(self) -> Floats:
        """Seconds of the common readings [ranks, readings]."""
        return self._rows([facts.wall_s for facts in self.ranks])

    def phase_s(self, *phases: str) -> Floats:
        """Seconds of ``phases`` together in the common readings [ranks, readings]."""
        total = self._rows([facts.phase_s[phases[0]] for facts in self.ranks])
        with np.errstate(over="ignore"):  # figures of a damaged file may be of any size
            for phase in phases[1:]:
                total += self._rows([facts.phase_s[phase] for facts in self.ranks])
        return total

    def _rows(self, rows: Sequence[Floats]) -> Floats:
        steps, places = self._common
        chosen = [row[place] for place, row in zip(places, rows, strict=True)]
        return np.array(chosen, dtype=np.float64).reshape(len(self.ranks), len(steps))


def read_run(run_dir: Path) -> RunFacts:
    """Read the events of all ranks in ``run_dir``. Lines that cannot be read are left out, and noted.

    Raises:
        DataError: The folder has no events.
        ConfigError: A file of events is no regular file, or cannot be opened.
    """
    facts = facts_of(of_one_run(map(read_history, sorted((run_dir / EVENTS_FOLDER).glob("rank*.jsonl")))))
    if not facts.ranks:
        raise DataError(
            given=f"{run_dir / EVENTS_FOLDER} has no events of a rank",
            rule="a diagnosis is made from the events of a run (events/rank00000.jsonl …)",
            consequence="nothing was diagnosed",
            nearest="give the folder of a run (run.dir), or start one: unisono train; or the file of a profiler's trace",
        )
    return with_run_files(facts, run_dir)


def _settings_of_script(run_dir: Path) -> dict[str, Any]:
    """The options of a run that a Python script made, by dotted name; empty where its ``config.toml`` cannot be read."""
    try:
        sections = read_toml(run_dir / RUN_FILE).values
    except (OSError, ConfigError):
        return {}
    return {
        f"{section}.{name}": value
        for section, options in sections.items()
        for name, value in as_mapping(options).items()
    }


def with_run_files(facts: RunFacts, run_dir: Path) -> RunFacts:
    """``facts`` with what other files of the run say: its last profile, why it failed or hangs, and the options of a script."""
    profiles, notes = newest_profiles(run_dir)
    is_recorded, ending = read_ending(run_dir, since_s=facts.last_progress_at_s)
    ending = with_memory(ending if is_recorded else ending or facts.ending, run_dir, since_s=facts.last_progress_at_s)
    facts = replace(facts, profiles=profiles, ending=ending, notes=(*facts.notes, *notes))
    return facts if facts.settings else replace(facts, settings=_settings_of_script(run_dir), is_script=True)


def read_trace_facts(path: Path) -> RunFacts:
    """The facts of one rank, from the trace of PyTorch's profiler at ``path``. Raises DataError."""
    profile = summarise_trace(read_trace(path))
    return RunFacts(ranks=(), profiles=(profile,), notes=profile.notes)


def facts_of(histories: Iterable[RankHistory]) -> RunFacts:
    """The facts of ranks whose events have been read, the lowest rank first; without ranks where there are no events."""
    ranks: list[RankFacts] = []
    notes: list[str] = []
    start: Event = {}
    training: tuple[int, TrainingFacts] | None = None
    errors: list[tuple[int, Event]] = []
    last_progress_at_s = 0.0
    began_s = 0.0  # wall-clock time at which the last attempt of the lowest rank began
    for history in histories:
        notes += history.notes
        rank = history.rank
        if history.is_empty or rank is None:
            continue
        newest = max(history.attempt_s)
        # a run that is started again after its end, or that has not got far yet, is judged by its last steps
        last = int(history.attempts.max()) if len(history.attempts) else newest
        if last != newest and not ranks:
            notes.append(f"attempt {newest} has made no step yet: the figures are those of attempt {last}")
        events = [event for event in history.all_events if event.get("attempt") == last]
        # wall-clock times: of the steps, and of all events
        step_times = history.columns["t"][history.attempts == last]
        step_times = step_times[np.isfinite(step_times)]
        times = [at for event in events if (at := number(event.get("t"))) is not None and math.isfinite(at)]
        times += [float(step_times.min()), float(step_times.max())] if len(step_times) else []
        if max(times, default=0.0) < began_s:
            continue  # of an earlier attempt, which had more ranks
        errors += [
            (rank, event) for event in history.all_events if _is_failure(event) and event.get("attempt") == newest
        ]
        began_s = began_s or min(times, default=0.0)
        start = start or next((event for event in events if event["kind"] == "run_start"), start)
        ranks.append(_rank_facts(rank, history, events, last))
        last_progress_at_s = max(last_progress_at_s, began_s, float(step_times.max(initial=0.0)))
        if training is None or rank < training[0]:
            training = rank, _training_facts(history, events, last)
    ranks.sort(key=lambda facts: facts.rank)
    return RunFacts(
        ranks=ranks,
        training=TrainingFacts() if training is None else training[1],
        settings=as_mapping(start.get("config")),
        plan=as_mapping(start.get("plan")),
        notes=tuple(notes),
        last_progress_at_s=last_progress_at_s,
        num_parameters=number(start.get("parameters")) or 0.0,
        ending=_ending_of(errors),
    )


def _is_failure(event: Event) -> bool:
    return event["kind"] == "run_end" and event.get("reason") == "failed"


def _ending_of(errors: Sequence[tuple[int, Event]]) -> Ending | None:
    """The ending of an attempt that no launcher has recorded, by the errors of its ranks; None if there are none."""
    if not errors:
        return None
    # that others are gone is not what it began with
    rank, event = min(errors, key=lambda error: (error[1].get("error") == "CommError", error[0]))
    name = str(event.get("error"))
    return Ending(
        kind="corruption" if name == "CorruptionError" else "error",
        ranks=(rank,),
        sentence=f"rank {rank}: {name}: {event.get('message', '')}",
        words="an error in the program",
    )


def _rank_facts(rank: int, history: RankHistory, events: Sequence[Event], attempt: int) -> RankFacts:
    """Facts of the ``attempt``, whose other events are ``events``."""
    rows = np.flatnonzero(history.attempts == attempt)

    def column(field: str, rows: NDArray[np.int64]) -> Floats:
        return history.columns[field][rows]

    num_steps = len(rows)
    peaks, limits = column("mem/peak_bytes", rows), column("mem/limit_bytes", rows)
    readings = steady_readings(history)
    readings = readings.where(history.attempts[readings.rows] == attempt)
    steps = history.steps[readings.rows]
    readings = readings.where(steps > np.append(-1, np.maximum.accumulate(steps))[:-1])
    kept, wall_s = readings.rows, readings.wall_s
    start = next((event for event in events if event["kind"] == "run_start"), {})
    return RankFacts(
        rank=rank,
        steps=history.steps[kept],
        steps_per_reading=readings.num_steps,
        wall_s=wall_s,
        phase_s={
            phase: _shares_in_s(column(f"time/{phase}_frac", kept), wall_s) for phase in (*ALL_PHASES, *COMM_PHASES)
        },
        num_steps=num_steps,
        peak_bytes=float(np.nanmax(peaks, initial=0.0)) if num_steps else 0.0,
        limit_bytes=float(limits[~np.isnan(limits)][-1]) if (~np.isnan(limits)).any() else 0.0,
        memory_bytes=_zeros_for_none(column("mem/now_bytes", kept)),
        gc_s=_shares_in_s(column("time/gc_frac", kept), wall_s),
        loader_s={
            stage: np.clip(_zeros_for_none(column(f"time/loader_{stage}_s", kept)), 0.0, _MAX_S)
            for stage in LOADER_STAGES
        },
        peak_reserved_bytes=float(np.max(_zeros_for_none(column("mem/peak_reserved_bytes", rows)), initial=0.0)),
        num_alloc_retries=int(np.max(_zeros_for_none(column("mem/alloc_retries", rows)), initial=0.0)),
        skipped=tuple(
            _skipped(event) for event in events if event["kind"] == "skipped_step" and event_step(event) is not None
        ),
        links=read_links(events),
        axes=read_axes(events),
        origins=read_origins(events),
        corruptions=read_corruptions(history.all_events),
        device=str(start.get("device") or ""),
        held_bytes={
            name: bounded_number(value, _MAX_BYTES)
            for name, value in as_mapping(start.get("held_bytes")).items()
            if name in HELD_CATEGORIES
        },
        baseline_flops_per_s=bounded_number(start.get("baseline_flops_per_s"), _MAX_FLOPS_PER_S),
        ceiling_frac=_median(column("perf/matmul_ceiling_frac", kept)),
        mfu=_median(column("perf/mfu", kept)),
        host=host[:_MAX_HOST] if isinstance(host := start.get("host"), str) else "",
        monitor=read_monitor(events, int(history.steps[kept[0]]) if len(kept) else 0),
    )


def _median(values: Floats) -> float:
    """The median of the positive values; 0 without one."""
    known = values[np.isfinite(values) & (values > 0)]
    return float(np.median(known)) if len(known) else 0.0


def _training_facts(history: RankHistory, events: Sequence[Event], attempt: int) -> TrainingFacts:
    rows = history.attempts == attempt
    evals = [
        (step, loss)
        for event in events
        if event["kind"] == "eval"
        and (step := event_step(event)) is not None
        and (loss := number(event.get("eval/loss"))) is not None
    ]
    stats = [
        (step, as_mapping(event.get("layers")))
        for event in events
        if event["kind"] == "gradient_stats" and (step := event_step(event)) is not None
    ]
    lags = [
        (step, lag)
        for event in events
        if event["kind"] == "links" and (step := event_step(event)) is not None and (lag := rms_lag(event)) is not None
    ]
    names = list(stats[-1][1]) if stats else []
    norms = {name: [number(as_mapping(layers.get(name)).get("norm")) for _, layers in stats] for name in names}
    return TrainingFacts(
        steps=history.steps[rows],
        losses=history.columns["train/loss"][rows],
        grad_norms=history.columns["train/grad_norm"][rows],
        eval_steps=np.array([step for step, _ in evals], dtype=np.int64),
        eval_losses=np.array([loss for _, loss in evals], dtype=np.float64),
        layer_steps=np.array([step for step, _ in stats], dtype=np.int64),
        layer_norms={
            name: np.array([np.nan if norm is None else norm for norm in values]) for name, values in norms.items()
        },
        lag_steps=np.array([step for step, _ in lags], dtype=np.int64),
        lags=np.array([lag for _, lag in lags], dtype=np.float64),
        taps=read_taps(events),
    )


def _shares_in_s(shares: Floats, wall_s: Floats) -> Floats:
    """Shares of ``wall_s`` in seconds, in place; 0 where there is no share."""
    shares[~np.isfinite(shares)] = 0.0
    np.maximum(shares, 0.0, out=shares)
    np.minimum(shares, 1.0, out=shares)
    shares *= wall_s
    return shares


def _zeros_for_none(values: Floats) -> Floats:
    return np.where(np.isfinite(values), values, 0.0)


def _skipped(event: Event) -> SkippedStep:
    samples = event.get("samples")
    ids = cast("list[Any]", samples) if isinstance(samples, list) else []
    return SkippedStep(
        step=event_step(event) or 0,
        loss=_or_nan(event.get("loss")),
        grad_norm=_or_nan(event.get("grad_norm")),
        rank_loss=number(event.get("rank_loss")),
        sample_ids=tuple(sample for sample in ids if isinstance(sample, int)),
    )


def _or_nan(value: Any) -> float:
    found = number(value)
    return math.nan if found is None else found
