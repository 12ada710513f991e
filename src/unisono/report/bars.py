"""Stacked horizontal bars, as plotly describes them: what parts of a whole each rank, stage or attempt has."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

MAX_ROWS: Final = 64  # bars of a chart
_ROW_PX: Final = 26
_FRAME_PX: Final = 130  # title of the axis, margins, one line of legend


def plain(name: str) -> str:
    """A text in which plotly finds no markup."""
    return re.sub(r"[^\w/.:%+\-(),= ]", "_", name)


def stacked_bars(
    chart_id: str,
    rows: Sequence[str],
    series: Mapping[str, Sequence[float]],
    *,
    x_title: str,
    unit: str,
    colours: Mapping[str, str],
    hidden: str = "",
) -> dict[str, Any]:
    """A chart of one bar a row, the first on top.

    Args:
        rows: Names of the bars [rows].
        series: Parts of each bar by name, in the order in which they are stacked [rows].
        unit: Shown after a value.
        colours: Colour of each part; others are grey.
        hidden: A part that only keeps room free before the others.
    """
    names = [plain(row) for row in rows]
    bars = [
        {
            "type": "bar",
            "orientation": "h",
            "name": plain(name).replace("_", " "),
            "x": [float(f"{value:.5g}") for value in values],
            "y": names,
            "hovertemplate": f"%{{y}}, %{{fullData.name}}: %{{x:.4g}} {unit}<extra></extra>",
            "marker": {"color": colours.get(name, "#6e7781")},
        }
        if name != hidden
        else {
            "type": "bar",
            "orientation": "h",
            "name": "",
            "x": [float(f"{value:.5g}") for value in values],
            "y": names,
            "hoverinfo": "skip",
            "showlegend": False,
            "marker": {"color": "rgba(0,0,0,0)"},
        }
        for name, values in series.items()
        if any(value > 0 for value in values)
    ]
    layout = {
        "barmode": "stack",
        "bargap": 0.25,
        "height": _FRAME_PX + _ROW_PX * len(rows),
        "margin": {"l": 20, "r": 20, "t": 40, "b": 45},
        "hovermode": "closest",
        "font": {"family": "system-ui, sans-serif", "size": 12},
        "xaxis": {"title": {"text": x_title}, "zeroline": False, "rangemode": "tozero"},
        "yaxis": {"autorange": "reversed", "automargin": True, "type": "category", "ticks": ""},
        "legend": {
            "orientation": "h",
            "traceorder": "normal",
            "x": 0,
            "xanchor": "left",
            "y": 1.0,
            "yanchor": "bottom",
        },
    }
    # a legend of many entries would lie under the tool bar, which shows nothing of bars that the pointer does not
    return {"id": chart_id, "data": bars, "layout": layout, "bare": True}
