"""The figures and tables of a report, as text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, cast

from unisono.observe.events import ENVELOPE, SERIES, Event, number
from unisono.observe.formatting import event_message, percent
from unisono.observe.history import RankHistory
from unisono.observe.run_summary import RunSummary, duration, format_gib, short_number, short_time, summarise
from unisono.sanitize import printable

MAX_HAPPENINGS: Final = 500  # rows of the event table
_MAX_TIME_S: Final = 1e11  # since 1970, that a calendar has
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
        "sink_failed",
        "events_lost",
        "preempt",
        "warning",
    }
)
_OWN_PLACE: Final = frozenset({"config", "origins", "flops_convention"})  # fields of run_start shown elsewhere


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure with what it is of."""

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


def happenings_of(history: RankHistory, warnings: Sequence[Event]) -> Iterator[dict[str, Any]]:
    """Rows of the event table: all events of rank 0 besides steps, and the ``warnings`` of other ranks."""
    for event in [*(event for event in history.events if event["kind"] not in _QUIET_KINDS), *warnings]:
        said, at_s = event_message(event), number(event.get("t"))
        if at_s is None or not 0 <= at_s < _MAX_TIME_S:
            continue  # nobody can say when it was
        yield {
            "t": at_s,
            "time": datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S"),
            "attempt": event.get("attempt"),
            "rank": event.get("rank"),
            "kind": printable(event["kind"]),
            "text": said.text if said is not None else _facts(event),
            "warning": event["kind"] in _WARNING_KINDS,
        }


def _facts(event: Event) -> str:
    """The scalar fields of an event that has no message."""
    scalars = {name: value for name, value in event.items() if not isinstance(value, dict | list)}
    shown = [(name, _written(value)) for name, value in scalars.items() if name not in ENVELOPE]
    return ", ".join(f"{name} {text}" for name, text in shown if "\n" not in text)


def warnings_of(history: RankHistory) -> list[Event]:
    """The last warnings of a rank."""
    return [event for event in history.events if event["kind"] in _WARNING_KINDS][-MAX_HAPPENINGS:]


def rank_row(history: RankHistory) -> list[str]:
    """Rank, steps, median step, shares of waiting, and memory; empty for a rank without steps."""
    if not len(history.steps):
        return []
    summary = summarise(history)
    return [
        str(history.rank),
        str(len(history.steps)),
        "" if summary.step_s is None else short_time(summary.step_s),
        percent(summary.time_frac.get("data_wait", 0.0)),
        percent(summary.time_frac.get("comm_exposed", 0.0)),
        "" if summary.peak_bytes is None else format_gib(summary.peak_bytes),
    ]


def sections_of(start: Event) -> Iterator[dict[str, Any]]:
    """Tables of ``run_start``: first its scalar fields, then one table for each mapping but the configuration."""
    facts = {name: value for name, value in start.items() if name not in ENVELOPE | _OWN_PLACE}
    loose = [(name, _written(value)) for name, value in facts.items() if not isinstance(value, dict)]
    if loose:
        yield {"title": "Run", "rows": loose}
    for name, value in facts.items():
        if isinstance(value, dict) and value:
            rows = [(key, _written(leaf)) for key, leaf in _leaves(cast("dict[str, Any]", value))]
            yield {"title": printable(name.replace("_", " ").capitalize()), "rows": rows}


def settings_of(start: Event) -> Iterator[dict[str, Any]]:
    origins = cast("Mapping[str, str]", start.get("origins") or {})
    for key, value in _leaves(cast("Mapping[str, Any]", start.get("config") or {})):
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
