"""What the events of a run say, as arrays over its ranks and readings: the input of diagnosis rules.

A rank reads its device and its timers after one step or several, and writes the reading into the ``step`` event of the last of
them. Readings of the first steps of an attempt, and of steps that compiled, are left out: they allocate and initialise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from unisono.errors import DataError
from unisono.observe.events import Event, event_step, number
from unisono.observe.history import Floats, RankHistory, read_history
from unisono.observe.meters import COMM_AXES, PHASES
from unisono.storage.run_folder import EVENTS_FOLDER

ALL_PHASES: Final = (*PHASES, "other")
# what a rank does itself, without waiting
COMPUTE_PHASES: Final = tuple(
    phase for phase in ALL_PHASES if phase not in ("data_wait", "bubble", "comm_exposed", "ckpt_stall", "eval")
)
# parts of comm_exposed; 0 in events of earlier releases
COMM_PHASES: Final = tuple(f"comm_exposed_{axis}" for axis in COMM_AXES)
_WARM_UP_READINGS: Final = 2


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
        wall_s: Seconds of each reading [readings].
        phase_s: Seconds of each phase of ``ALL_PHASES`` and ``COMM_PHASES`` in each reading [readings].
        num_steps: Number of steps that the attempt has made, warm-up included.
        peak_bytes: Most memory in use, in bytes; 0 if not known.
        limit_bytes: The memory there is, in bytes; 0 if not known.
        memory_bytes: Memory in use at each reading, in bytes; 0 where not known [readings].
        skipped: Steps that the guard skipped.
    """

    rank: int
    steps: NDArray[np.int64]
    wall_s: Floats
    phase_s: Mapping[str, Floats]
    num_steps: int
    peak_bytes: float = 0.0
    limit_bytes: float = 0.0
    memory_bytes: Floats = field(default_factory=lambda: np.zeros(0))
    skipped: tuple[SkippedStep, ...] = ()


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
    """

    steps: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    losses: Floats = field(default_factory=lambda: np.zeros(0))
    grad_norms: Floats = field(default_factory=lambda: np.zeros(0))
    eval_steps: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    eval_losses: Floats = field(default_factory=lambda: np.zeros(0))
    layer_steps: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    layer_norms: Mapping[str, Floats] = field(default_factory=dict[str, Floats])


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """All ranks of a run.

    Attributes:
        ranks: The ranks that have events, ascending.
        training: Losses and gradients, as the lowest rank wrote them.
        settings: Options of the run by dotted name; empty for a run of a Python script.
        plan: The run's strategy, as in a strategy file.
        notes: What could not be read.
    """

    ranks: Sequence[RankFacts]
    training: TrainingFacts = field(default_factory=lambda: TrainingFacts())
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    plan: Mapping[str, Any] = field(default_factory=dict[str, Any])
    notes: Sequence[str] = ()

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
    facts = facts_of(map(read_history, sorted((run_dir / EVENTS_FOLDER).glob("rank*.jsonl"))))
    if not facts.ranks:
        raise DataError(
            given=f"{run_dir / EVENTS_FOLDER} has no events of a rank",
            rule="a diagnosis is made from the events of a run (events/rank00000.jsonl …)",
            consequence="nothing was diagnosed",
            nearest="give the folder of a run (run.dir), or start one: unisono train",
        )
    return facts


def facts_of(histories: Iterable[RankHistory]) -> RunFacts:
    """The facts of ranks whose events have been read, the lowest rank first; without ranks where there are no events."""
    ranks: list[RankFacts] = []
    notes: list[str] = []
    start: Event = {}
    training: tuple[int, TrainingFacts] | None = None
    began_s = 0.0  # wall-clock time at which the last attempt of the lowest rank began
    for history in histories:
        notes += history.notes
        rank = history.rank
        if history.is_empty or rank is None:
            continue
        last = max(history.attempt_s)
        events = [event for event in history.all_events if event.get("attempt") == last]
        at_s = history.columns["t"][history.attempts == last]
        at_s = at_s[np.isfinite(at_s)]
        times = [at for event in events if (at := number(event.get("t"))) is not None and math.isfinite(at)]
        times += [float(at_s.min()), float(at_s.max())] if len(at_s) else []
        if max(times, default=0.0) < began_s:
            continue  # of an earlier attempt, which had more ranks
        began_s = began_s or min(times, default=0.0)
        start = start or next((event for event in events if event["kind"] == "run_start"), start)
        ranks.append(_rank_facts(rank, history, events, last))
        if training is None or rank < training[0]:
            training = rank, _training_facts(history, events, last)
    ranks.sort(key=lambda facts: facts.rank)
    return RunFacts(
        ranks=ranks,
        training=TrainingFacts() if training is None else training[1],
        settings=_mapping(start.get("config")),
        plan=_mapping(start.get("plan")),
        notes=tuple(notes),
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def _rank_facts(rank: int, history: RankHistory, events: Sequence[Event], attempt: int) -> RankFacts:
    """Facts of the ``attempt``, whose other events are ``events``."""
    rows = np.flatnonzero(history.attempts == attempt)

    def column(field: str, rows: NDArray[np.int64]) -> Floats:
        return history.columns[field][rows]

    num_steps = len(rows)
    peaks, limits = column("mem/peak_bytes", rows), column("mem/limit_bytes", rows)
    readings = rows[~np.isnan(column("time/other_frac", rows))]  # the last step of each reading
    wall_s = column("time/window_s", readings)
    if np.isnan(wall_s).all():  # events of an earlier release
        wall_s = np.diff(column("m", readings), prepend=np.nan)
    steps = history.steps[readings]
    compiled = [event_step(event) for event in events if event["kind"] == "compiled"]
    keep = (wall_s > 0) & np.isfinite(wall_s)
    keep[:_WARM_UP_READINGS] = False
    keep[1:] &= steps[1:] > np.maximum.accumulate(steps)[:-1]
    if compiled := [step for step in compiled if step]:
        keep &= ~np.isin(steps, compiled)
    kept, wall_s = readings[keep], wall_s[keep]
    return RankFacts(
        rank=rank,
        steps=history.steps[kept],
        wall_s=wall_s,
        phase_s={phase: _seconds(column(f"time/{phase}_frac", kept), wall_s) for phase in (*ALL_PHASES, *COMM_PHASES)},
        num_steps=num_steps,
        peak_bytes=float(np.nanmax(peaks, initial=0.0)) if num_steps else 0.0,
        limit_bytes=float(limits[~np.isnan(limits)][-1]) if (~np.isnan(limits)).any() else 0.0,
        memory_bytes=_zeros_for_none(column("mem/now_bytes", kept)),
        skipped=tuple(
            _skipped(event) for event in events if event["kind"] == "skipped_step" and event_step(event) is not None
        ),
    )


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
        (step, _mapping(event.get("layers")))
        for event in events
        if event["kind"] == "gradient_stats" and (step := event_step(event)) is not None
    ]
    names = list(stats[-1][1]) if stats else []
    norms = {name: [number(_mapping(layers.get(name)).get("norm")) for _, layers in stats] for name in names}
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
    )


def _seconds(shares: Floats, wall_s: Floats) -> Floats:
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
    return float("nan") if found is None else found
