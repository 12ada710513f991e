"""The report of a run: one self-contained HTML file, written from the events in the run folder alone.

It shows the outcome in one sentence, then figures, time shares, curves, a text sample, events, environment and settings.
Plotly draws the charts and is embedded. The report can be written at any time, also of a killed run.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, cast

import jinja2
from markupsafe import Markup

from unisono.errors import DataError
from unisono.observe.events import (
    ENVELOPE,
    SERIES,
    Event,
    EventHistory,
    collapse_repeated,
    events_path,
    number,
    read_events,
)
from unisono.observe.formatting import event_message, percent, run_verdict, unit_of
from unisono.observe.report_page import DRAW_SCRIPT, PAGE
from unisono.observe.run_summary import (
    RunSummary,
    decimate,
    duration,
    eval_metrics,
    format_gib,
    short_number,
    short_time,
    summarise,
)
from unisono.sanitize import printable
from unisono.storage.files import write_atomically
from unisono.storage.run_folder import EVENTS_FOLDER

_POINTS: Final = 2000  # per curve
_HAPPENINGS: Final = 500
_QUIET_KINDS: Final = frozenset({*SERIES, "sample", "gradient_stats"})
_WARNING_KINDS: Final = frozenset(
    {
        "checkpoint_failed",
        "checkpoint_upload_failed",
        "checkpoint_quarantined",
        "skipped_step",
        "sink_failed",
        "events_lost",
        "preempt",
        "warning",
    }
)
_OWN_PLACE: Final = frozenset({"config", "origins", "flops_convention"})  # fields of run_start shown elsewhere
_COLOURS: Final = {
    "h2d": "#e85aad",
    "forward": "#4c9be8",
    "backward": "#1f6feb",
    "optimizer": "#8250df",
    "comm_exposed": "#d29922",
    "bubble": "#d4a72c",
    "data_wait": "#cf222e",
    "ckpt_stall": "#bc4c00",
    "eval": "#2da44e",
    "other": "#afb8c1",
}

# title, unit of the axis, series as (name, field of a step event)
_STEP_CURVES: Final[tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...]] = (
    ("Learning rate", "", (("learning rate", "train/lr"),)),
    ("Gradient norm", "", (("gradient norm", "train/grad_norm"),)),
    ("Throughput", "tokens/s", (("all devices", "perf/tokens_per_s"), ("per device", "perf/tokens_per_s_device"))),
    ("Step time", "s", (("step", "perf/step_s"),)),
)


@dataclass(frozen=True, slots=True)
class _Figure:
    label: str
    value: str


def write_report(run_dir: Path) -> Path:
    """Write ``report.html`` into ``run_dir`` and return its path; an older report is replaced atomically.

    Raises:
        DataError: The folder has no events of rank 0.
    """
    path = events_path(run_dir, 0)
    history = read_events(path) if path.exists() else EventHistory(path=path, events=())
    if not history.events:
        raise DataError(
            given=f"{path} {'holds no event' if path.exists() else 'does not exist'}",
            rule="a report is made from the events of rank 0 in the run folder",
            consequence="no report was written",
            nearest="give the folder of a run (run.dir), or start one: unisono train",
        )
    page = render(history, _other_ranks(run_dir))
    target = run_dir / "report.html"
    write_atomically(target, page.encode())
    return target


def render(history: EventHistory, others: Sequence[EventHistory] = ()) -> str:
    """Render the HTML page from the events of rank 0 and the warnings and step times of the ``others``."""
    summary = summarise(history.events)
    events = collapse_repeated(history.events)
    start = _last(events, "run_start")
    sample = _last(events, "sample")
    restarts = [int(event["step"]) for event in events if event["kind"] == "resumed" and "step" in event]
    curves = list(_curves(events, restarts))
    time_chart = _time_chart(summary)
    happenings = sorted(_happenings(events, others), key=lambda row: cast(float, row["t"]))
    offline: Any = importlib.import_module("plotly.offline")  # only when a page is made, and without type stubs
    scripts = [str(offline.get_plotlyjs()), DRAW_SCRIPT]
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    return environment.from_string(PAGE).render(
        title=f"Run {printable(str(history.events[-1]['run']))}",
        verdict=run_verdict(summary) + _time_clause(summary),
        figures=list(_figures(summary)),
        notes=[note for source in (history, *others) for note in source.notes()],
        time_chart=time_chart["id"] if time_chart else None,
        curves=[curve["id"] for curve in curves],
        sample=printable(str(sample.get("text", "")), newlines=True),
        sample_caption=_caption(sample),
        happenings=happenings[-_HAPPENINGS:],
        happenings_left_out=max(0, len(happenings) - _HAPPENINGS),
        ranks=_rank_rows([history, *others]) if others else [],
        sections=list(_sections(start)),
        settings=list(_settings(start)),
        conventions=printable(str(start.get("flops_convention", ""))),
        charts=[*([time_chart] if time_chart else []), *curves],
        # Markup: the only values that are not escaped
        plotly_script=Markup(scripts[0]),
        draw_script=Markup(scripts[1]),
        script_sources=Markup(" ".join(_script_hash(script) for script in scripts)),
    )


def _last(events: Sequence[Event], kind: str) -> Event:
    nothing: Event = {}
    return next((event for event in reversed(events) if event["kind"] == kind), nothing)


def _script_hash(script: str) -> str:
    # HTML parsing turns CR LF into LF before the browser hashes
    digest = hashlib.sha256(script.replace("\r\n", "\n").replace("\r", "\n").encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _other_ranks(run_dir: Path) -> list[EventHistory]:
    paths = sorted((run_dir / EVENTS_FOLDER).glob("rank*.jsonl"))
    return [read_events(path) for path in paths if path != events_path(run_dir, 0)]


def _time_clause(summary: RunSummary) -> str:
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


def _figures(summary: RunSummary) -> Iterator[_Figure]:
    if summary.train_loss is not None:
        yield _Figure("train loss, last logged", f"{summary.train_loss:.4g}")
    for name, value in summary.eval_metrics.items():
        yield _Figure("bits per byte, last eval" if name == "bits_per_byte" else f"{name}, last eval", f"{value:.4g}")
    if summary.tokens_per_s is not None:
        yield _Figure(f"{summary.unit}/s, all devices", short_number(summary.tokens_per_s))
    if summary.tokens_per_s_device is not None:
        yield _Figure(f"{summary.unit}/s per device", short_number(summary.tokens_per_s_device))
    if summary.step_s is not None:
        yield _Figure("per step", short_time(summary.step_s))
    if summary.utilization is not None:
        name, value = summary.utilization
        yield _Figure("MFU" if name == "mfu" else "of the measured matmul ceiling", percent(value))
    if summary.tokens_total is not None and summary.unit == "tokens":
        yield _Figure("tokens trained on", short_number(summary.tokens_total))
    if summary.peak_bytes is not None:
        yield _Figure("peak memory, rank 0", format_gib(summary.peak_bytes))
    yield _Figure("wall time", duration(summary.wall_s))
    yield _Figure("attempt" if summary.attempts == 1 else "attempts", str(summary.attempts))


def _layout(title: str, y_title: str, restarts: Sequence[int] = (), **more: Any) -> dict[str, Any]:
    lines = [
        {
            "type": "line",
            "xref": "x",
            "yref": "paper",
            "x0": step,
            "x1": step,
            "y0": 0,
            "y1": 1,
            "line": {"color": "#8c959f", "width": 1, "dash": "dot"},
        }
        for step in restarts
    ]
    return {
        "title": {"text": title, "font": {"size": 14}, "x": 0.01, "xanchor": "left"},
        "height": 300,
        "margin": {"l": 60, "r": 20, "t": 40, "b": 45},
        "hovermode": "x unified",
        "paper_bgcolor": "#fff",
        "plot_bgcolor": "#fff",
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": "#1d2733"},
        "xaxis": {"title": {"text": "step"}, "gridcolor": "#eef1f4", "zeroline": False},
        "yaxis": {"title": {"text": y_title}, "gridcolor": "#eef1f4", "zeroline": False, "exponentformat": "e"},
        "legend": {"orientation": "h", "x": 1, "xanchor": "right", "y": 1.02, "yanchor": "bottom"},
        "shapes": lines,
        **more,
    }


def _line(name: str, points: Sequence[tuple[int, float]], **more: Any) -> dict[str, Any]:
    drawn = decimate(points, _POINTS)
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(drawn) < 3 else "lines",
        "name": re.sub(r"[^\w/.\- ]", "_", name),  # plotly reads some markup in names
        "x": [step for step, _ in drawn],
        "y": [value if math.isfinite(value) else None for _, value in drawn],
        **more,
    }


def _curves(events: Sequence[Event], restarts: Sequence[int]) -> Iterator[dict[str, Any]]:
    steps = [event for event in events if event["kind"] == "step"]
    evals = [event for event in events if event["kind"] == "eval"]
    metrics = sorted({name for event in evals for name in eval_metrics(event)})
    losses = (
        [_line("train loss", points, line={"color": "#1f6feb"})] if (points := _points(steps, "train/loss")) else []
    )
    if "loss" in metrics:
        shown = {"mode": "lines+markers", "line": {"color": "#cf222e"}}
        losses.append(_line("eval loss", _points(evals, "eval/loss"), **shown))
    if losses:
        caption = "Loss (dotted: restarts)" if restarts else "Loss"
        yield {"id": "loss", "data": losses, "layout": _layout(caption, "", restarts, height=380)}
    for index, name in enumerate(metric for metric in metrics if metric != "loss"):
        line = _line(name, _points(evals, f"eval/{name}"), mode="lines+markers")
        title = "Bits per byte (eval)" if name == "bits_per_byte" else f"{line['name']} (eval)"
        yield {"id": f"metric{index}", "data": [line], "layout": _layout(title, "", restarts)}
    logged = [event for event in events if event["kind"] == "log"]
    names = sorted({name for event in logged for name in event if name not in (*ENVELOPE, "step")})
    for index, name in enumerate(names):
        line = _line(name, _points(logged, name), mode="lines+markers")
        yield {"id": f"log{index}", "data": [line], "layout": _layout(line["name"], "", restarts)}
    for index, (title, unit, series) in enumerate(_STEP_CURVES):
        curves = [(name, points) for name, field in series if (points := _points(steps, field))]
        if len(curves) == 2 and curves[0][1] == curves[1][1]:  # one device: its rate is the rate of all
            curves = curves[:1]
        if curves:
            unit = f"{unit_of(steps[-1])}/s" if title == "Throughput" else unit
            data = [_line(name, points) for name, points in curves]
            yield {"id": f"curve{index}", "data": data, "layout": _layout(title, unit, restarts)}


def _points(events: Sequence[Event], field: str) -> list[tuple[int, float]]:
    return [(int(event["step"]), value) for event in events if (value := number(event.get(field))) is not None]


def _time_chart(summary: RunSummary) -> dict[str, Any] | None:
    if not summary.time_frac:
        return None
    bars = [
        {
            "type": "bar",
            "orientation": "h",
            "name": re.sub(r"[^\w ]", "_", name).replace("_", " "),
            "x": [round(100 * frac, 2)],
            "y": ["step"],
            "text": [percent(frac) if frac >= 0.03 else ""],
            "textposition": "inside",
            "insidetextanchor": "middle",
            "hovertemplate": "%{fullData.name}: %{x:.2f}%<extra></extra>",
            "marker": {"color": _COLOURS.get(name, "#6e7781")},
        }
        for name, frac in sorted(summary.time_frac.items(), key=lambda item: -item[1])
    ]
    axes = {
        "xaxis": {"title": {"text": "% of wall time"}, "range": [0, 100], "gridcolor": "#eef1f4"},
        "yaxis": {"visible": False},
        "legend": {"orientation": "h", "traceorder": "normal", "y": 1.35},
    }
    layout = _layout("", "", barmode="stack", height=170) | axes | {"hovermode": "closest"}
    return {"id": "time", "data": bars, "layout": layout | {"margin": {"l": 20, "r": 20, "t": 50, "b": 45}}}


def _caption(sample: Event) -> str:
    parts = [f"after step {sample['step']}"] if "step" in sample else []
    if sample.get("prompt"):
        parts.append(f"prompt: {printable(str(sample['prompt']))}")
    return "; ".join(parts)


def _happenings(events: Sequence[Event], others: Sequence[EventHistory]) -> Iterator[dict[str, Any]]:
    """Rows of the event table: all events of rank 0 besides steps, and the warnings of other ranks."""
    foreign = [event for history in others for event in history.events if event["kind"] in _WARNING_KINDS]
    for event in [*(event for event in events if event["kind"] not in _QUIET_KINDS), *foreign]:
        said = event_message(event)
        yield {
            "t": event["t"],
            "time": datetime.fromtimestamp(event["t"], UTC).strftime("%Y-%m-%d %H:%M:%S"),
            "attempt": event["attempt"],
            "rank": event["rank"],
            "kind": printable(event["kind"]),
            "text": said.text if said is not None else _facts(event),
            "warning": event["kind"] in _WARNING_KINDS,
        }


def _facts(event: Event) -> str:
    """The scalar fields of an event that has no message."""
    scalars = {name: value for name, value in event.items() if not isinstance(value, dict | list)}
    shown = [(name, _written(value)) for name, value in scalars.items() if name not in ENVELOPE]
    return ", ".join(f"{name} {text}" for name, text in shown if "\n" not in text)


def _rank_rows(histories: Sequence[EventHistory]) -> list[list[str]]:
    rows: list[list[str]] = []
    for history in histories:
        summary = summarise(history.events)
        logged = sum(event["kind"] == "step" for event in collapse_repeated(history.events))
        if not logged:
            continue
        rows.append(
            [
                str(history.events[0]["rank"]),
                str(logged),
                "" if summary.step_s is None else short_time(summary.step_s),
                percent(summary.time_frac.get("data_wait", 0.0)),
                percent(summary.time_frac.get("comm_exposed", 0.0)),
                "" if summary.peak_bytes is None else format_gib(summary.peak_bytes),
            ]
        )
    return rows if len(rows) > 1 else []


def _sections(start: Event) -> Iterator[dict[str, Any]]:
    """Tables of ``run_start``: first its scalar fields, then one table for each mapping but the configuration."""
    facts = {name: value for name, value in start.items() if name not in ENVELOPE | _OWN_PLACE}
    loose = [(name, _written(value)) for name, value in facts.items() if not isinstance(value, dict)]
    if loose:
        yield {"title": "Run", "rows": loose}
    for name, value in facts.items():
        if isinstance(value, dict) and value:
            rows = [(key, _written(leaf)) for key, leaf in _leaves(cast("dict[str, Any]", value))]
            yield {"title": printable(name.replace("_", " ").capitalize()), "rows": rows}


def _settings(start: Event) -> Iterator[dict[str, Any]]:
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
