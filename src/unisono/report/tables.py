"""The figures and tables of a report, as text."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, cast

from unisono.observe.events import ENVELOPE, SERIES, Event, as_mapping, number
from unisono.observe.formatting import event_message, percent
from unisono.observe.history import RankHistory
from unisono.observe.run_summary import (
    RunSummary,
    duration,
    format_gib,
    largest,
    median,
    short_number,
    short_time,
    time_frac,
)
from unisono.sanitize import printable

MAX_EVENT_ROWS: Final = 500  # rows of the event table
_QUIET_KINDS: Final = frozenset(
    {*SERIES, "sample", "log_text", "log_image", "histograms", "gradient_stats", "tap", "system", "links"}
)
_WARNING_KINDS: Final = frozenset(
    {
        "checkpoint_failed",
        "checkpoint_upload_failed",
        "checkpoint_quarantined",
        "skipped_step",
        "nonfinite",
        "corruption",
        "sink_failed",
        "events_lost",
        "preempt",
        "warning",
    }
)
_SHOWN_ELSEWHERE: Final = frozenset({"config", "origins", "flops_convention"})  # fields of run_start


@dataclass(frozen=True, slots=True)
class Figure:
    """A number of the report with its label."""

    label: str
    value: str


def time_clause(summary: RunSummary) -> str:
    shares = summary.time_frac
    compute = sum(shares.get(name, 0.0) for name in ("forward", "backward", "optimizer"))
    waits = [
        f"{percent(shares[name])} {label}"
        for name, label in (
            ("data_wait", "data wait"),
            ("comm_exposed", "exposed communication"),
            ("bubble", "pipeline bubble"),
            ("ckpt_stall", "checkpoints"),
        )
        if shares.get(name, 0.0) >= 0.005
    ]
    return f"; time: {', '.join([f'{percent(compute)} compute', *waits])}" if shares else ""


def figures_of(summary: RunSummary) -> Iterator[Figure]:
    if summary.train_loss is not None:
        yield Figure("train loss, last logged", f"{summary.train_loss:.4g}")
    for name, value in summary.eval_metrics.items():
        yield Figure("bits per byte, last eval" if name == "bits_per_byte" else f"{name}, last eval", f"{value:.4g}")
    if summary.tokens_per_s is not None:
        yield Figure(f"{summary.unit}/s, all devices", short_number(summary.tokens_per_s))
    if summary.tokens_per_s_device is not None:
        yield Figure(f"{summary.unit}/s per device", short_number(summary.tokens_per_s_device))
    if summary.step_s is not None:
        yield Figure("per step", short_time(summary.step_s))
    if summary.utilization is not None:
        name, value = summary.utilization
        yield Figure("MFU" if name == "mfu" else "of the measured matmul ceiling", percent(value))
    if summary.tokens_total is not None and summary.unit == "tokens":
        yield Figure("tokens trained on", short_number(summary.tokens_total))
    if summary.peak_bytes is not None:
        yield Figure("peak memory, rank 0", format_gib(summary.peak_bytes))
    yield Figure("wall time", duration(summary.wall_s))
    yield Figure("attempt" if summary.attempts == 1 else "attempts", str(summary.attempts))


def caption(sample: Event) -> str:
    parts = [f"after step {sample['step']}"] if "step" in sample else []
    if sample.get("prompt"):
        parts.append(f"prompt: {printable(str(sample['prompt']))}")
    return "; ".join(parts)


def shown_events(history: RankHistory) -> list[Event]:
    """Events of rank 0 for the event table: all but series, samples and statistics."""
    return [event for event in history.events if event["kind"] not in _QUIET_KINDS]


def newest_events(events: Iterable[Event]) -> list[Event]:
    """The last events that the event table has room for, by time."""
    return sorted(events, key=_time_s)[-MAX_EVENT_ROWS:]


def event_row(event: Event) -> dict[str, Any]:
    """A row of the event table."""
    return {
        "time": _time(event),
        "attempt": _written(event.get("attempt", "")),
        "rank": _written(event.get("rank", "")),
        "kind": printable(event["kind"]),
        "text": _text(event),
        "warning": event["kind"] in _WARNING_KINDS,
    }


def _time_s(event: Event) -> float:
    """Seconds since 1970; 0 where the event does not say."""
    at_s = number(event.get("t"))
    return at_s if at_s is not None and math.isfinite(at_s) else 0.0


def _time(event: Event) -> str:
    try:
        return datetime.fromtimestamp(_time_s(event), UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):  # in a year that has no date
        return "?"


def _text(event: Event) -> str:
    try:
        message = event_message(event)
    except Exception:  # fields of other types than unisono writes: shown without a message
        message = None
    return _facts(event) if message is None else message.text


def _facts(event: Event) -> str:
    """The scalar fields of an event that has no message."""
    scalars = {name: value for name, value in event.items() if not isinstance(value, dict | list)}
    shown = [(name, _written(value)) for name, value in scalars.items() if name not in ENVELOPE]
    return ", ".join(f"{name} {text}" for name, text in shown if "\n" not in text)


def warnings_of(history: RankHistory) -> list[Event]:
    """The warnings of a rank."""
    return [event for event in history.events if event["kind"] in _WARNING_KINDS]


def rank_row(history: RankHistory) -> list[str]:
    """Rank, steps, median step, shares of waiting, and memory."""
    step_s, shares, peak_bytes = median(history, "perf/step_s"), time_frac(history), largest(history, "mem/peak_bytes")
    return [
        str(history.rank),
        str(len(history.steps)),
        "" if step_s is None else short_time(step_s),
        percent(shares.get("data_wait", 0.0)),
        percent(shares.get("comm_exposed", 0.0)),
        "" if peak_bytes is None else format_gib(peak_bytes),
    ]


def sections_of(start: Event) -> Iterator[dict[str, Any]]:
    """Tables of ``run_start``: first its scalar fields, then one table for each mapping but the configuration."""
    facts = {name: value for name, value in start.items() if name not in ENVELOPE | _SHOWN_ELSEWHERE}
    loose = [(name, _written(value)) for name, value in facts.items() if not isinstance(value, dict)]
    if loose:
        yield {"title": "Run", "rows": loose}
    for name, value in facts.items():
        if isinstance(value, dict) and value:
            rows = [(key, _written(leaf)) for key, leaf in _leaves(cast("dict[str, Any]", value))]
            yield {"title": printable(name.replace("_", " ").capitalize()), "rows": rows}


def settings_of(start: Event) -> Iterator[dict[str, Any]]:
    origins = as_mapping(start.get("origins"))
    for key, value in _leaves(as_mapping(start.get("config"))):
        origin = printable(str(origins.get(key, "")))
        yield {"key": key, "value": _written(value), "origin": origin, "changed": origin not in ("", "default")}


def _leaves(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, item in value.items():
        key = printable(f"{prefix}{name}")
        if isinstance(item, dict) and item:
            yield from _leaves(cast("dict[str, Any]", item), f"{key}.")
        else:
            yield key, item


def _written(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return printable(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), newlines=True)
