"""Sections about the last profile of a run: one step of each rank as a timeline, memory by category, and the tables of rank 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from unisono.profile import RankProfile
from unisono.profile.rank_profile import MEMORY_CATEGORIES, MemoryProfile, PhaseSpan
from unisono.profile.text import profile_tables
from unisono.report.bars import MAX_ROWS, plain
from unisono.report.charts import PHASE_COLOURS, chart_title
from unisono.report.section import Section, Table
from unisono.sanitize import printable

_MAX_SPANS: Final = 8_000  # of all ranks together
_SHADOWED: Final = "bubble"  # contains the passes of a pipeline: drawn below them
_MEMORY_COLOURS: Final = {
    "parameters": "#1f6feb",
    "gradients": "#d29922",
    "optimizer": "#8250df",
    "activations": "#2da44e",
    "other": "#afb8c1",
}


def profile_sections(profiles: Sequence[RankProfile]) -> list[Section]:
    """The sections; none without a profile."""
    if not profiles:
        return []
    first = profiles[0]
    steps = f"steps {first.steps[0].step} to {first.steps[-1].step}" if first.steps else "a window"
    charts = [chart] if (chart := _memory_chart(first.memory)) is not None else []
    tables = [
        Table(head=table.head, rows=[[printable(cell) for cell in row] for row in table.rows])
        for table in profile_tables(first)
    ]
    note = (
        f"{steps[0].upper()}{steps[1:]} of rank {first.rank}, recorded by PyTorch's profiler. Profiled steps take longer "
        "than others."
    )
    sections = [Section(title="Profile", note=note, charts=charts, tables=tables)]
    if any(profile.spans for profile in profiles):
        sections.insert(0, _timeline(profiles))
    return sections


def _timeline(profiles: Sequence[RankProfile]) -> Section:
    """When each rank was in which phase of the first profiled step: of a pipeline, its schedule."""
    shown = [profile for profile in profiles if profile.spans][:MAX_ROWS]
    origin_s = min(profile.began_s for profile in shown)
    passes: dict[str, list[tuple[int, float, PhaseSpan]]] = {}
    most = _MAX_SPANS // len(shown)
    for row, profile in enumerate(shown):
        for span in profile.spans[:most]:
            passes.setdefault(span.name, []).append((row, profile.began_s - origin_s + span.start_s, span))
    names = [f"rank {profile.rank}" for profile in shown]
    bars = [
        {
            "type": "bar",
            "orientation": "h",
            "name": plain(name).replace("_", " "),
            "base": [_ms(start_s) for _, start_s, _ in found],
            "x": [_ms(span.wall_s) for _, _, span in found],
            "y": [names[row] for row, _, _ in found],
            "hovertemplate": "%{y}, %{fullData.name}: %{x:.4g} ms from %{base:.4g}<extra></extra>",
            "marker": {"color": PHASE_COLOURS.get(name, "#6e7781")},
        }
        for name, found in sorted(passes.items(), key=lambda item: item[0] != _SHADOWED)
    ]
    layout = _layout("ms since the step began on the first rank", height=130 + 26 * len(names)) | {
        "barmode": "overlay",
        "bargap": 0.25,
        "yaxis": {"autorange": "reversed", "automargin": True, "type": "category", "ticks": ""},
    }
    step = shown[0].steps[0].step if shown[0].steps else 0
    left_out = sum(1 for profile in profiles if profile.spans) - len(shown)
    note = (
        "Phases of the thread that trains, on rank 0's clock; in a pipeline each pass is of one micro-batch, and a bubble is "
        "the time between them."
    ) + (f" {left_out} ranks more are not shown." if left_out else "")
    chart = {"id": "timeline", "data": bars, "layout": layout, "bare": True}
    return Section(title=f"Timeline of step {step}", note=note, charts=[chart])


def _memory_chart(memory: MemoryProfile) -> dict[str, Any] | None:
    """Tensor memory through the window, by category, and what the plan has of parameters, gradients and optimizer state."""
    rows = memory.timeline
    if len(rows) < 2 or any(len(row) != 1 + len(MEMORY_CATEGORIES) for row in rows):
        return None
    times = [_ms(row[0]) for row in rows]
    areas: list[Mapping[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines",
            "stackgroup": "memory",
            "name": name,
            "x": times,
            "y": [float(f"{row[1 + place] / 2**20:.5g}") for row in rows],
            "line": {"width": 0, "shape": "hv"},
            "fillcolor": _MEMORY_COLOURS[name],
        }
        for place, name in enumerate(MEMORY_CATEGORIES)
        if any(row[1 + place] for row in rows)
    ]
    if planned := sum(memory.planned.values()):
        mib = float(f"{planned / 2**20:.5g}")
        line = {"type": "scatter", "mode": "lines", "name": "planned without activations", "x": [times[0], times[-1]]}
        areas.append({**line, "y": [mib, mib], "line": {"color": "#cf222e", "dash": "dash", "width": 1}})
    layout = _layout("ms since the first step began", height=320) | {
        "title": chart_title("Memory"),
        "yaxis": {"title": {"text": "MiB"}, "zeroline": False, "rangemode": "tozero"},
    }
    return {"id": "profile-memory", "data": areas, "layout": layout}


def _layout(x_title: str, *, height: int) -> dict[str, Any]:
    return {
        "height": height,
        "margin": {"l": 60, "r": 20, "t": 60, "b": 45},
        "hovermode": "closest",
        "font": {"family": "system-ui, sans-serif", "size": 12},
        "xaxis": {"title": {"text": x_title}, "zeroline": False, "rangemode": "tozero"},
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.0, "yanchor": "bottom"},
    }


def _ms(seconds: float) -> float:
    return float(f"{1e3 * seconds:.6g}")
