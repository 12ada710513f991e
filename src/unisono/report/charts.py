"""The charts of a report, as plotly describes them. Colours of text, grid and background are set where the page is drawn."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from unisono.diagnose import RunFacts
from unisono.diagnose.figures import has_enough_readings, lower_medians
from unisono.diagnose.run_facts import COMPUTE_PHASES
from unisono.observe.events import ENVELOPE, Event, event_step, number
from unisono.observe.formatting import percent
from unisono.observe.history import Counts, Floats, RankHistory
from unisono.observe.run_summary import RunSummary, decimate, eval_metrics

POINTS: Final = 1000  # per curve
_CELLS: Final = 8000  # of the map of ranks
PHASE_COLOURS: Final = {
    "h2d": "#e85aad",
    "forward": "#4c9be8",
    "backward": "#1f6feb",
    "optimizer": "#8250df",
    "comm_exposed": "#d29922",
    "comm_exposed_dp": "#d29922",
    "comm_exposed_cp": "#e6b450",
    "comm_exposed_tp": "#9a6700",
    "comm_exposed_ep": "#bf8700",
    "comm_exposed_pp": "#7d4e00",
    "bubble": "#1b7c83",
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
    ("MFU", "of the peak rate", (("model FLOPs utilisation", "perf/mfu"),)),
)


def chart_title(text: str) -> dict[str, Any]:
    """A title at the top of a chart, beside the tool bar: below it a legend has any number of lines."""
    place = {"x": 0.01, "xanchor": "left", "yref": "container", "y": 1, "yanchor": "top", "pad": {"t": 8}}
    return {"text": text, "font": {"size": 14}, **place}


def curve_layout(title: str, y_title: str, restarts: Sequence[int] = (), **more: Any) -> dict[str, Any]:
    """Layout of a chart of curves over steps, with a dotted line at each of ``restarts``; ``more`` are other parts of it."""
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
        "title": chart_title(title),
        "height": 300,
        "margin": {"l": 60, "r": 20, "t": 60, "b": 45},
        "hovermode": "x unified",
        "font": {"family": "system-ui, sans-serif", "size": 12},
        "xaxis": {"title": {"text": "step"}, "zeroline": False},
        "yaxis": {"title": {"text": y_title}, "zeroline": False, "exponentformat": "e"},
        # on the left, under the title: the tool bar is on the right
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.0, "yanchor": "bottom"},
        "shapes": lines,
        **more,
    }


def _line(name: str, points: tuple[Counts, Floats], **more: Any) -> dict[str, Any]:
    steps, values = points
    drawn = decimate(values, POINTS)
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(drawn) < 3 else "lines",
        "name": re.sub(r"[^\w/.\- ]", "_", name),  # plotly reads some markup in names
        "x": steps[drawn].tolist(),
        "y": [_finite(float(f"{value:.5g}")) for value in values[drawn].tolist()],
        **more,
    }


def _finite(value: float) -> float | None:
    """The value, or None for a gap: JSON has no other numbers, and rounding makes an infinity of the largest."""
    return value if math.isfinite(value) else None


def curves_of(history: RankHistory) -> Iterator[dict[str, Any]]:
    """Loss, metrics, values that the script logged, learning rate, norm and speed over steps."""
    resumed = (event_step(event) for event in history.events if event["kind"] == "resumed")
    restarts = [step for step in resumed if step is not None]
    evals = [event for event in history.events if event["kind"] == "eval"]
    metrics = sorted({name for event in evals for name in eval_metrics(event)})
    points = history.points("train/loss")
    losses = [_line("train loss", points, line={"color": "#1f6feb"})] if len(points[0]) else []
    if "loss" in metrics:
        shown = {"mode": "lines+markers", "line": {"color": "#cf222e"}}
        losses.append(_line("eval loss", _points(evals, "eval/loss"), **shown))
    if losses:
        caption = "Loss (dotted: restarts)" if restarts else "Loss"
        yield {"id": "loss", "data": losses, "layout": curve_layout(caption, "", restarts, height=380)}
    for index, name in enumerate(metric for metric in metrics if metric != "loss"):
        line = _line(name, _points(evals, f"eval/{name}"), mode="lines+markers")
        title = "Bits per byte (eval)" if name == "bits_per_byte" else f"{line['name']} (eval)"
        yield {"id": f"metric{index}", "data": [line], "layout": curve_layout(title, "", restarts)}
    logged = [event for event in history.events if event["kind"] == "log"]
    names = sorted({name for event in logged for name in event if name not in (*ENVELOPE, "step")})
    for index, name in enumerate(names):
        line = _line(name, _points(logged, name), mode="lines+markers")
        yield {"id": f"log{index}", "data": [line], "layout": curve_layout(line["name"], "", restarts)}
    for index, (title, unit, series) in enumerate(_STEP_CURVES):
        found = [(name, history.points(field)) for name, field in series]
        curves = [(name, points) for name, points in found if len(points[0])]
        if len(curves) == 2 and all(
            map(np.array_equal, curves[0][1], curves[1][1])
        ):  # one device: its rate is that of all
            curves = curves[:1]
        if curves:
            unit = f"{history.unit}/s" if title == "Throughput" else unit
            data = [_line(name, points) for name, points in curves]
            yield {"id": f"curve{index}", "data": data, "layout": curve_layout(title, unit, restarts)}


def _points(events: Sequence[Event], field: str) -> tuple[Counts, Floats]:
    """Step and value of the events that have a number in ``field``."""
    found = [(event_step(event), number(event.get(field))) for event in events]
    points = [(step, value) for step, value in found if step is not None and value is not None]
    return np.array([step for step, _ in points], np.int64), np.array([value for _, value in points], np.float64)


def time_chart(summary: RunSummary) -> dict[str, Any] | None:
    if not summary.time_frac:
        return None
    bars = [
        {
            "type": "bar",
            "orientation": "h",
            "name": re.sub(r"[^\w ]", "_", name).replace("_", " "),
            "x": [round(min(100 * frac, 100.0), 2)],
            "y": ["step"],
            "text": [percent(frac) if frac >= 0.03 else ""],
            "textposition": "inside",
            "insidetextanchor": "middle",
            "hovertemplate": "%{fullData.name}: %{x:.2f}%<extra></extra>",
            "marker": {"color": PHASE_COLOURS.get(name, "#6e7781")},
        }
        for name, frac in sorted(summary.time_frac.items(), key=lambda item: -item[1])
        if frac > 0
    ]
    axes = {
        "xaxis": {"title": {"text": "% of wall time"}, "range": [0, 100]},
        "yaxis": {"visible": False},
        "legend": {"orientation": "h", "traceorder": "normal", "y": 1.05, "yanchor": "bottom"},
    }
    layout = curve_layout("", "", barmode="stack", height=190) | axes | {"hovermode": "closest"}
    return {
        "id": "time",
        "data": bars,
        "layout": layout | {"margin": {"l": 20, "r": 20, "t": 70, "b": 45}},
        "bare": True,
    }


def rank_map(facts: RunFacts) -> dict[str, Any] | None:
    """How long each rank computes, compared with the median rank, over the run; None for one rank or few readings."""
    if len(facts.ranks) < 2 or not facts.steps_together or not has_enough_readings(facts):
        return None
    own, steps = facts.phase_s(*COMPUTE_PHASES), facts.common_steps()
    columns = max(1, min(len(steps), 60, _CELLS // len(facts.ranks)))
    stretches = [part for part in np.array_split(np.arange(len(steps)), columns) if len(part)]
    means = np.stack([own[:, part].mean(axis=1) for part in stretches], axis=1)  # [ranks, columns]
    relative = means / np.maximum(lower_medians(means), 1e-12)
    chart = {
        "type": "heatmap",
        "z": [[_finite(round(value, 2)) for value in row] for row in relative.tolist()],
        "x": [int(steps[part[-1]]) for part in stretches],
        "y": [f"rank {rank}" for rank in facts.rank_numbers],
        "zmin": 0.5,
        "zmid": 1.0,
        "zmax": 1.5,
        "colorscale": "RdBu",
        "hovertemplate": "%{y}, up to step %{x}: %{z} times the median<extra></extra>",
    }
    title = "Time that each rank computes, times the median rank"
    layout = curve_layout(title, "", height=max(180, min(600, 100 + 22 * len(facts.ranks)))) | {"hovermode": "closest"}
    return {"id": "ranks", "data": [chart], "layout": layout}
