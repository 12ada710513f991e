"""Pictures of how long documents are and of what limits cut: histograms, with each limit as a line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

from unisono.quality.cleaning.measures import CHARS, LOGARITHMIC, NEW_CHARS, PIXELS, Distribution
from unisono.quality.documents import Content
from unisono.report.charts import curve_layout
from unisono.report.section import Section

_COLOURS: Final = {"read": "#afb8c1", "kept": "#1f6feb", "tried": "#1f6feb"}
_LIMIT: Final = "#cf222e"
_LENGTHS: Final[dict[Content, tuple[str, str]]] = {  # title, and what is counted
    "text": ("Lengths", "characters"),
    "images": ("Sizes", "pixels, width times height"),
}
_TITLES: Final = {
    "words": "words",
    "mean_word_chars": "mean length of words, characters",
    "symbol_ratio": "# and ellipses for each word",
    "bullet_line_frac": "share of lines that begin with a bullet",
    "ellipsis_line_frac": "share of lines that end with an ellipsis",
    "alphabetic_word_frac": "share of words with a letter",
    "duplicate_line_frac": "share of lines that are repeated",
    "top_bigram_frac": "share of characters covered by the repeated word pair that covers the most",
    "duplicate_5gram_frac": "share of characters in repeated sequences of five words",
    "language_prob": "probability of the language",
    "side_px": "pixels of the shorter side",
    "contrast": "standard deviation of the grey values",
    "blur": "blur, from 0 to 1",
}


def distribution_sections(distributions: Sequence[Distribution], content: Content) -> list[Section]:
    """The lengths before and after in one chart, and a chart for each measure with a limit."""
    lengths = [one for one in distributions if one.measure in (CHARS, NEW_CHARS, PIXELS) and one.counts]
    limits = [one for one in distributions if one.limits and one.counts]
    sections: list[Section] = []
    if lengths:
        heading, unit = _LENGTHS[content]
        layout = _layout("", lengths) | {"barmode": "overlay", "xaxis": _axis(unit, lengths)}
        chart = {"id": "lengths", "data": [_bars(one) for one in lengths], "layout": layout}
        note = "Of all documents that could be read, as they were, and of the kept ones, as they are now."
        sections.append(Section(title=heading, note=note, charts=[chart]))
    if limits:
        charts = [
            {
                "id": f"measure{number}",
                "data": [_bars(one)],
                "layout": _layout(_title(one), [one]) | {"xaxis": _axis(_TITLES[one.measure], [one])},
            }
            for number, one in enumerate(limits)
        ]
        note = (
            "Red lines are the limits. They are tried in this order, and a document is dropped by the first that it fails: "
            "each picture has the documents that pass all limits before it. Numbers of documents are logarithmic."
        )
        sections.append(Section(title="What the limits cut", note=note, charts=charts, in_grid=True))
    return sections


def _title(distribution: Distribution) -> str:
    title = f"{distribution.measure}: {distribution.documents:,} documents"
    if distribution.below or distribution.above:
        title += f" ({distribution.below:,} below, {distribution.above:,} above)"
    return title


def _place(value: float, measure: str) -> float:
    """Where a value stands on the axis: of a logarithmic measure its power of ten."""
    return math.log10(value) if measure in LOGARITHMIC else value


def _bars(distribution: Distribution) -> dict[str, Any]:
    """Bars at places of the axis, so that those of a logarithmic measure are of equal width."""
    edges = [_place(edge, distribution.measure) for edge in distribution.edges]
    spans = pairwise(distribution.edges)
    return {
        "type": "bar",
        "name": distribution.of,
        "x": [(low + high) / 2 for low, high in pairwise(edges)],
        "width": [high - low for low, high in pairwise(edges)],
        "y": list(distribution.counts),
        "hovertext": [f"{low:,.10g} to {high:,.10g}" for low, high in spans],
        "hovertemplate": "%{hovertext}: %{y:,} documents<extra>%{fullData.name}</extra>",
        "marker": {"color": _COLOURS[distribution.of]},
        "opacity": 0.75,
    }


def _layout(title: str, shown: Sequence[Distribution]) -> dict[str, Any]:
    limits = [(name, limit, one.measure) for one in shown for name, limit in one.limits.items()]
    places = [(f"{name[:3]} {limit:,.10g}", _place(limit, measure)) for name, limit, measure in limits]
    lines = [
        {
            "type": "line",
            "xref": "x",
            "yref": "paper",
            "x0": at,
            "x1": at,
            "y0": 0,
            "y1": 1,
            "line": {"color": _LIMIT, "width": 1.5},
        }
        for _, at in places
    ]
    low, high = _ends(shown)
    names = [
        {
            "x": at,
            "xanchor": "left" if at < (low + high) / 2 else "right",
            "xref": "x",
            "y": 1,
            "yref": "paper",
            "yanchor": "bottom",
            "text": name,
            "showarrow": False,
            "font": {"color": _LIMIT, "size": 11},
        }
        for name, at in places
    ]
    most = max(max(one.counts) for one in shown)
    scale: dict[str, Any] = {"type": "log", "dtick": 1, "range": [-0.3, math.log10(most) + 0.1]} if limits else {}
    more = {"bargap": 0, "hovermode": "closest", "shapes": lines, "annotations": names}
    layout: dict[str, Any] = curve_layout(title, "documents", height=280) | more
    return layout | {"yaxis": {**layout["yaxis"], **scale, "exponentformat": "none"}}


def _ends(shown: Sequence[Distribution]) -> tuple[float, float]:
    """Where the first and the last bar or limit stand on the axis."""
    values = [value for one in shown for value in (one.edges[0], one.edges[-1], *one.limits.values())]
    return _place(min(values), shown[0].measure), _place(max(values), shown[0].measure)


def _axis(title: str, shown: Sequence[Distribution]) -> dict[str, Any]:
    """The horizontal axis: it has all bars and limits, and of a logarithmic measure the powers of ten."""
    measure = shown[0].measure
    low, high = _ends(shown)
    margin = max(0.03 * (high - low), 0.01)
    axis: dict[str, Any] = {"title": {"text": title}, "zeroline": False, "range": [low - margin, high + margin]}
    if measure not in LOGARITHMIC:
        return axis
    powers = range(math.floor(low), math.ceil(high) + 1)
    steps = (1,) if high - low > 2 else (1, 2, 5)
    ticks = [step * 10**power for power in powers for step in steps]
    return axis | {"tickvals": [math.log10(tick) for tick in ticks], "ticktext": [f"{tick:,.10g}" for tick in ticks]}
