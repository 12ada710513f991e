"""The figures of one run that are compared with those of another, from the events of all its ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from unisono.compare.differences import environment_of, settings_of
from unisono.errors import DataError
from unisono.observe.events import ENVELOPE, Event, number
from unisono.observe.goodput import CATEGORIES, GoodputLedger, launch_spans
from unisono.observe.history import Counts, Floats, RankHistory, of_one_run, read_history, steady_readings
from unisono.observe.meters import ALL_PHASES, COMM_PHASES
from unisono.observe.run_summary import RunSummary, eval_metrics, summarise
from unisono.storage.run_folder import EVENTS_FOLDER

_PAUSES: Final = ("ckpt_stall", "eval")  # no part of a step
_TIMES: Final = (*ALL_PHASES, *COMM_PHASES)
_RATES: Final = ("perf/tokens_per_s", "perf/tokens_per_s_device", "perf/mfu", "perf/matmul_ceiling_frac")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFigures:
    """One run.

    Attributes:
        run_dir: Its folder.
        summary: Facts of rank 0.
        samples: Figures of a step after warm-up, the mean over ranks, by name [readings].
        weights: Weight of each of them in the mean over all time: the steps of its reading, of rates their seconds [readings].
        values: Figures of the whole run, by name.
        loss_steps: Number of each step [steps].
        losses: Its training loss [steps].
        evaluations: Metrics by the step of their evaluation, by name.
        settings: Options of the run, as text.
        environment: Versions, devices, data and plan, as text.
        notes: What could not be read.
    """

    run_dir: Path
    summary: RunSummary
    samples: Mapping[str, Floats]
    weights: Mapping[str, Floats]
    values: Mapping[str, float]
    loss_steps: Counts
    losses: Floats
    evaluations: Mapping[str, Mapping[int, float]]
    settings: Mapping[str, str]
    environment: Mapping[str, str]
    notes: Sequence[str]


def read_figures(run_dir: Path) -> RunFigures:
    """Read a run, which may be finished, killed or still under way.

    Raises:
        DataError: The folder has no events.
        ConfigError: A file of events is no regular file, or cannot be opened.
    """
    ledger, times = GoodputLedger(), _StepTimes()
    first: RankHistory | None = None
    peak_bytes, notes, num_ranks = 0.0, list[str](), 0
    for history in of_one_run(map(read_history, sorted((run_dir / EVENTS_FOLDER).glob("rank*.jsonl")))):
        notes += history.notes
        if history.is_empty or history.rank is None:
            continue
        num_ranks += 1
        ledger.add(history)
        times.add(history)
        peaks = history.columns["mem/peak_bytes"]
        peak_bytes = max(peak_bytes, float(np.max(peaks[np.isfinite(peaks)], initial=0.0)))
        if first is None:
            first = history
    if first is None:
        raise DataError(
            given=f"{run_dir / EVENTS_FOLDER} has no events of a rank",
            rule="runs are compared by their events (events/rank00000.jsonl …)",
            consequence="nothing was compared",
            nearest="give folders of runs (run.dir), or start one: unisono train",
        )
    start = next((event for event in reversed(first.all_events) if event["kind"] == "run_start"), {})
    summary = summarise(first)
    values = times.shares() | _logged(first.events)
    values |= {"train/steps": float(summary.steps), "train/skipped_steps": float(summary.skipped_steps)}
    values["run/ranks"] = float(num_ranks)
    if peak_bytes:
        values["mem/peak_bytes"] = peak_bytes
    if goodput := ledger.result(launch_spans(run_dir)):
        values |= {"goodput/wall_s": goodput.wall_s, "goodput/goodput_frac": goodput.goodput_frac}
        values |= {f"goodput/{name}_s": goodput.seconds[name] for name in CATEGORIES}
    seconds, rates = times.samples(), _rates(first, times.step_s())
    weights = dict.fromkeys(seconds, times.num_steps) | dict.fromkeys(rates, times.num_steps * times.step_s())
    losses = first.columns["train/loss"]
    has_losses = len(losses) > 0 and not np.isnan(losses).all()
    evaluations: dict[str, dict[int, float]] = {}
    for event in first.events:
        step = event.get("step")
        if event["kind"] == "eval" and isinstance(step, int):
            for name, value in eval_metrics(event).items():
                evaluations.setdefault(f"eval/{name}", {})[step] = value
    return RunFigures(
        run_dir=run_dir,
        summary=summary,
        samples=seconds | rates,
        weights=weights,
        values=values,
        loss_steps=first.steps if has_losses else first.steps[:0],
        losses=losses if has_losses else losses[:0],
        evaluations=evaluations,
        settings=settings_of(start, run_dir),
        environment=environment_of(start),
        notes=notes,
    )


class _StepTimes:
    """Seconds of the phases of a step, summed over ranks at the readings that all ranks have."""

    def __init__(self) -> None:
        self.num_steps: Floats = np.zeros(0)  # of each reading, on the first rank [readings]
        self._steps: Counts = np.zeros(0, np.int64)
        self._seconds: Floats = np.zeros((len(_TIMES), 0))  # of a step [times, readings]
        self._wall_s: Floats = np.zeros(0)
        self._num_ranks = 0

    def add(self, history: RankHistory) -> None:
        readings = steady_readings(history)
        rows = readings.rows
        if not len(rows):
            return
        window_s = readings.wall_s / readings.num_steps
        shares = np.stack([history.columns[f"time/{name}_frac"][rows] for name in _TIMES])
        seconds = np.clip(np.where(np.isfinite(shares), shares, 0.0), 0.0, 1.0) * window_s
        steps, places = np.unique(history.steps[rows], return_index=True)
        seconds, window_s = seconds[:, places], window_s[places]
        if not self._num_ranks:
            self._steps, self._seconds, self._wall_s = steps, seconds, window_s
            self.num_steps = readings.num_steps[places].astype(np.float64)
        else:
            common, mine, its = np.intersect1d(self._steps, steps, assume_unique=True, return_indices=True)
            if not len(common):
                return
            self._steps, self.num_steps = common, self.num_steps[mine]
            self._seconds = self._seconds[:, mine] + seconds[:, its]
            self._wall_s = self._wall_s[mine] + window_s[its]
        self._num_ranks += 1

    def step_s(self) -> Floats:
        """Seconds of a step without evaluations and checkpoints [readings]."""
        pauses = sum((self._seconds[_TIMES.index(name)] for name in _PAUSES), np.zeros(len(self._steps)))
        return np.maximum(self._wall_s - pauses, 1e-12) / max(1, self._num_ranks)

    def samples(self) -> dict[str, Floats]:
        """The step and its phases; evaluations and checkpoints are in few steps, their share tells more."""
        if not self._num_ranks:
            return {}
        found = {"perf/step_s": self.step_s()}
        for name, seconds in zip(_TIMES, self._seconds, strict=True):
            if name not in _PAUSES and seconds.any():
                found[f"time/{name}_s"] = seconds / self._num_ranks
        return found

    def shares(self) -> dict[str, float]:
        """Share of each phase in the time of all readings."""
        total_s = self._wall_s @ self.num_steps
        shares = zip(_TIMES, self._seconds @ self.num_steps, strict=True)
        return {f"time/{name}_frac": float(each / total_s) for name, each in shares if each > 0} if total_s > 0 else {}


def _rates(history: RankHistory, step_s: Floats) -> dict[str, Floats]:
    """Rates of the readings: the run writes means over many steps, which with their time tell what one step has done."""
    readings, found = steady_readings(history), dict[str, Floats]()
    seconds = history.columns["perf/step_s"][readings.rows]
    for name in _RATES:
        work = history.columns[name][readings.rows] * seconds
        known = np.isfinite(work)
        if known.any() and len(step_s):
            found[name] = np.average(work[known], weights=readings.num_steps[known]) / step_s
    return found


def _logged(events: Sequence[Event]) -> dict[str, float]:
    """The last number of each name that the script logged."""
    found: dict[str, Any] = {}
    for event in events:
        if event["kind"] == "log":
            found |= {name: value for name, value in event.items() if name not in (*ENVELOPE, "step")}
    return {name: value for name, raw in found.items() if (value := number(raw)) is not None}
