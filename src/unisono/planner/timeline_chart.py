"""The passes of a pipeline over time, as a chart. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from unisono.plan.pipeline_schedule import Kind
from unisono.planner.pipeline_timeline import TimedPass
from unisono.report.bars import plain, stacked_bars
from unisono.report.charts import PHASE_COLOURS

_KINDS: Final[dict[Kind, tuple[str, str]]] = {
    "F": ("forward", PHASE_COLOURS["forward"]),
    "B": ("backward", PHASE_COLOURS["backward"]),
    "I": ("backward, inputs", PHASE_COLOURS["backward"]),
    "W": ("backward, weights", "#8250df"),
}


def timeline_chart(chart_id: str, timeline: Sequence[Sequence[TimedPass]]) -> dict[str, Any]:
    """The passes of each rank of a pipeline over time, as plotly describes them."""
    ranks = [f"pipeline rank {number}" for number in range(len(timeline))]
    passes = [(rank, each) for rank, row in zip(ranks, timeline, strict=True) for each in row]
    bars = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "x": [float(f"{each.end_s - each.begin_s:.5g}") for _, each in chosen],
            "base": [float(f"{each.begin_s:.5g}") for _, each in chosen],
            "y": [rank for rank, _ in chosen],
            "text": [plain(f"stage {each.action.stage}, micro-batch {each.action.micro}") for _, each in chosen],
            "textposition": "none",
            "hovertemplate": "%{y}, %{text}: %{x:.4g} s<extra>%{fullData.name}</extra>",
            "marker": {"color": colour, "line": {"width": 1, "color": "#ffffff"}},
        }
        for kind, (name, colour) in _KINDS.items()
        if (chosen := [(rank, each) for rank, each in passes if each.action.kind == kind])
    ]
    return stacked_bars(chart_id, ranks, {}, x_title="seconds", unit="s", colours={}) | {"data": bars}
