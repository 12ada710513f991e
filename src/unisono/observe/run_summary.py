"""Summary of a whole run from its events, and the formatting of its numbers; used by the console and the report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np

from unisono.observe.events import Event, is_count, number
from unisono.observe.goodput import CATEGORIES, Goodput
from unisono.observe.history import Counts, Floats, RankHistory
from unisono.observe.meters import ALL_PHASES
from unisono.units import GIB

_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_ASCII_BLOCKS: Final = "_.-~=+*#"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """Facts of a run from its events; a fact that no event holds is None.

    Attributes:
        state: ``finished``, ``stopped early``, ``left`` (by the script, before the last step), ``preempted``, ``failed`` or
            ``interrupted``.
        steps: Last step that the run reached.
        steps_total: Number of steps that were asked for.
        attempts: Number of starts of the run.
        skipped_steps: Number of steps that the guard skipped.
        train_loss: Loss of the last logged step.
        eval_metrics: Values of the last evaluation by name; empty if there was none.
        unit: What throughput counts: tokens, samples or images.
        tokens_total: Tokens, or other units of weight, of all ranks up to the last logged step.
        tokens_per_s: Units per second of all devices, the median over the logged steps.
        tokens_per_s_device: Units per second of one device, the median over the logged steps.
        step_s: Seconds per step, the median over the logged steps.
        utilization: ``mfu`` or ``matmul_ceiling_frac`` with its median over the logged steps, from 0 to 1.
        peak_bytes: Largest memory in use, in bytes.
        wall_s: Seconds of all attempts, without the time between them.
        time_frac: Share of each phase in the wall time of the logged steps, from 0 to 1.
        losses: Train loss of every logged step, without steps that were repeated after a crash [steps].
        links: Entries of the last ``links`` event, one for each connection.
        axes: Its entries of traffic by mesh axis and group.
        goodput: Where the wall time of all attempts went; None where it is not known. ``summarise`` leaves it out.
    """

    state: str
    steps: int
    steps_total: int | None
    attempts: int
    skipped_steps: int
    train_loss: float | None
    eval_metrics: Mapping[str, float]
    unit: str
    tokens_total: float | None
    tokens_per_s: float | None
    tokens_per_s_device: float | None
    step_s: float | None
    utilization: tuple[str, float] | None
    peak_bytes: float | None
    wall_s: float
    time_frac: Mapping[str, float]
    losses: Floats
    links: Sequence[Mapping[str, Any]]
    axes: Sequence[Mapping[str, Any]] = ()
    goodput: Goodput | None = None

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of text in the last evaluation; None if it was not measured."""
        return self.eval_metrics.get("bits_per_byte")


def summarise(history: RankHistory) -> RunSummary:
    """Summarise the history of one rank, over all attempts."""
    events = history.all_events
    evals = [event for event in history.events if event["kind"] == "eval"]
    _, losses = history.points("train/loss")
    reached = [*history.steps[-1:].tolist(), *(_int(event.get("step")) for event in evals)]
    reached += [_int(_last_of(events, kind, "step")) for kind in ("resumed", "run_end")]
    return RunSummary(
        state=_state(history),
        steps=max((step for step in reached if step is not None), default=0),
        steps_total=_count(_last(history, "steps_total")) or _int(_last_of(events, "run_start", "steps_total")),
        attempts=max(history.attempt_s, default=0),
        skipped_steps=_skipped(history),
        train_loss=float(losses[-1]) if len(losses) else None,
        eval_metrics=eval_metrics(evals[-1]) if evals else {},
        unit=history.unit,
        tokens_total=_last(history, "train/tokens_total"),
        tokens_per_s=median(history, "perf/tokens_per_s"),
        tokens_per_s_device=median(history, "perf/tokens_per_s_device"),
        step_s=median(history, "perf/step_s"),
        utilization=_utilization(history),
        peak_bytes=largest(history, "mem/peak_bytes"),
        wall_s=sum(history.attempt_s.values()),
        time_frac=time_frac(history),
        losses=losses,
        links=_last_of(events, "links", "links") or (),
        axes=_mappings(_last_of(events, "links", "axes")),
    )


def goodput_text(goodput: Goodput) -> str:
    """``78% of 3h12 in steps that count; starting 12%, lost 6%, repeated 4%``: what took less than 0.5% is left out."""
    shares = {name: goodput.seconds[name] / goodput.wall_s for name in CATEGORIES if name != "useful"}
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    rest = ", ".join(f"{name} {share:.0%}" for name, share in ordered if share >= 0.005)
    return f"{goodput.goodput_frac:.0%} of {duration(goodput.wall_s)} in steps that count" + (
        f"; {rest}" if rest else ""
    )


def eval_metrics(event: Mapping[str, Any]) -> dict[str, float]:
    """The numbers under ``eval/`` of an eval event, by name without the prefix."""
    metrics = ((name.removeprefix("eval/"), number(value)) for name, value in event.items() if name.startswith("eval/"))
    return {name: value for name, value in metrics if value is not None}


def _state(history: RankHistory) -> str:
    """How the last attempt ended; a killed process wrote no ``run_end``, which reads as interrupted."""
    last_attempt = max(history.attempt_s, default=0)
    kinds = {event["kind"]: event for event in history.all_events if event.get("attempt") == last_attempt}
    if "preempt" in kinds:
        return "preempted"
    if "run_end" not in kinds:
        return "interrupted"
    reason = str(kinds["run_end"].get("reason") or "")
    if "error" in kinds["run_end"] or reason in ("failed", "error"):
        return "failed"
    if reason == "left":
        return "left"
    return "stopped early" if "early_stop" in kinds else "finished"


def _skipped(history: RankHistory) -> int:
    counted = sum(event["kind"] == "skipped_step" for event in history.events)
    return max(counted, _count(largest(history, "train/skipped_steps")) or 0)


def _utilization(history: RankHistory) -> tuple[str, float] | None:
    for name in ("mfu", "matmul_ceiling_frac"):
        value = median(history, f"perf/{name}")
        if value is not None:
            return name, value
    return None


def time_frac(history: RankHistory) -> dict[str, float]:
    """Share of each phase in the time of all readings."""
    shares = {name: history.columns[f"time/{name}_frac"] for name in ALL_PHASES}
    timed = np.zeros(len(history.steps), bool)
    for values in shares.values():
        timed |= np.isfinite(values)
    if not timed.any():
        return {}
    lengths_s = (
        history.columns[name][timed] for name in ("time/window_s", "perf/step_s")
    )  # older events have the latter alone
    weights = next((each for each in lengths_s if (each > 0).any()), np.ones(timed.sum()))
    weights = np.where((weights > 0) & np.isfinite(weights), weights, 0.0)  # NaN is not above 0
    means: dict[str, float] = {}
    with np.errstate(over="ignore", invalid="ignore"):  # of values that no run has
        total = weights.sum()
        for name, values in shares.items():
            is_known = np.isfinite(values[timed])
            if is_known.any():
                means[name] = float(values[timed][is_known] @ weights[is_known] / total)
    return {name: mean for name, mean in means.items() if math.isfinite(mean)}


def _last_of(events: Sequence[Event], kind: str, field: str) -> Any:
    return next((event.get(field) for event in reversed(events) if event["kind"] == kind), None)


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    return [entry for entry in cast("list[Any]", value) if isinstance(entry, dict)] if isinstance(value, list) else []


def _int(value: Any) -> int | None:
    return value if is_count(value) and not isinstance(value, bool) else None


def _count(value: float | None) -> int | None:
    return None if value is None else int(value)


def _finite(history: RankHistory, field: str) -> Floats:
    values = history.columns[field]
    return values[np.isfinite(values)]


def _last(history: RankHistory, field: str) -> float | None:
    """The number of the last step; None where it has none."""
    values = history.columns[field][-1:]
    return float(values[0]) if np.isfinite(values).any() else None


def largest(history: RankHistory, field: str) -> float | None:
    values = _finite(history, field)
    return float(values.max()) if len(values) else None


def median(history: RankHistory, field: str) -> float | None:
    values = _finite(history, field)
    return float(np.median(values)) if len(values) else None


def decimate(values: Floats, limit: int) -> Counts:
    """The places of about ``limit`` values that show a curve without losing spikes, ascending.

    Keeps the first, lowest, highest and first non-finite value of each stretch, and the last value of the curve.
    """
    count = len(values)
    if count <= limit:
        return np.arange(count)
    stretches = max(1, (limit - 1) // 4)
    chosen = [0, count - 1]
    for i in range(stretches):
        begin = i * count // stretches
        stretch = values[begin : (i + 1) * count // stretches]
        is_finite = np.isfinite(stretch)
        chosen.append(begin)
        if not is_finite.all():
            chosen.append(begin + int(is_finite.argmin()))
        if is_finite.any():
            chosen.append(begin + int(np.where(is_finite, stretch, np.inf).argmin()))
            chosen.append(begin + int(np.where(is_finite, stretch, -np.inf).argmax()))
    return np.unique(chosen)


def sparkline(values: Sequence[float] | Floats, width: int, *, ascii_only: bool = False) -> str:
    """Draw ``values`` in at most ``width`` characters, each a mean of neighbours; ``!`` marks a non-finite mean."""
    count = len(values)
    if not count or width < 1:
        return ""
    columns, numbers = min(width, count), np.asarray(values, dtype=np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        means = [float(numbers[i * count // columns : (i + 1) * count // columns].mean()) for i in range(columns)]
    finite = [mean for mean in means if math.isfinite(mean)]
    blocks = _ASCII_BLOCKS if ascii_only else _BLOCKS
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(blocks[round((mean - low) * scale)] if math.isfinite(mean) else "!" for mean in means)


def short_number(value: float) -> str:
    """Format with three digits and a decimal prefix: 41234 is ``41.2k``."""
    if not math.isfinite(value):
        return str(value)
    for limit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * limit:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """Format seconds as ``42s``, ``3m07``, ``3h12`` or ``2d04h``, with tenths below ten seconds."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f}s"
    total = round(seconds)
    minutes, rest_s = divmod(total, 60)
    hours, rest_min = divmod(minutes, 60)
    days, rest_h = divmod(hours, 24)
    if days:
        return f"{days}d{rest_h:02}h"
    if hours:
        return f"{hours}h{rest_min:02}"
    return f"{minutes}m{rest_s:02}" if minutes else f"{total}s"


def short_time(seconds: float) -> str:
    """Format seconds with three digits: ``2.5 s``, ``125 ms``."""
    return f"{seconds:.3g} s" if seconds >= 0.9995 else f"{1000 * seconds:.3g} ms"


def format_gib(count_bytes: float) -> str:
    """Format bytes as GiB (2^30), or as MiB below 0.1 GiB."""
    if count_bytes < 0.1 * GIB:
        return f"{count_bytes / 2**20:.3g} MiB"
    return f"{count_bytes / GIB:{'.3g' if count_bytes < 1000 * GIB else ',.0f'}} GiB"
