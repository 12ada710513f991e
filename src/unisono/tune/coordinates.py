"""Coordinate check of muP: whether the changes of activations in the first steps are of one size at all widths.

The slope of log(change) against log(width) is 0 where the parametrization is right, and up to 2 in a model whose learning rate
does not follow its width. Parts of the change that come from random initial values fade as the model gets wider, so slopes of a
right parametrization lie between about -0.7 and 0.

Source:
    Yang et al. 2022, "Tensor Programs V" (arXiv:2203.03466), section D.1.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from unisono.errors import ConfigError
from unisono.report.charts import curve_layout
from unisono.report.html import render_page
from unisono.report.page import SUMMARY
from unisono.report.section import Section, Table
from unisono.report.tables import Figure
from unisono.storage.files import write_atomically
from unisono.storage.ownership import read_own_json

_GROWS: Final = 0.25  # a slope above this
_SHRINKS: Final = -0.8  # or below this is no flat curve
# Three widths tell a slope less surely. In 66 checks with muP, of widths 16 to 256 and three seeds each, the largest slope was
# 0.49 and the smallest -1.08; without muP the largest of each of 9 was above 1.6
_OF_THREE: Final = 2.0
FEWEST_WIDTHS: Final = 3
JSON_FILE: Final = "report.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinateCheck:
    """Changes of activations by width, after the last step.

    Attributes:
        base_dim: ``model.mup_base_dim``; 0 without muP.
        widths: Widths, rising.
        steps: Number of steps.
        changes: Root mean square of the change over all seeds, by name of the activation, one for each width.
    """

    base_dim: int
    widths: Sequence[int]
    steps: int
    changes: Mapping[str, Sequence[float]]

    @property
    def slopes(self) -> dict[str, float]:
        """Slope of log(change) against log(width) by name; NaN where a change is not finite or 0."""
        return {name: _slope(self.widths, values) for name, values in self.changes.items()}

    @property
    def limits(self) -> tuple[float, float]:
        """Smallest and largest slope of a flat curve."""
        factor = _OF_THREE if len(self.widths) == FEWEST_WIDTHS else 1.0
        return factor * _SHRINKS, factor * _GROWS

    @property
    def growing(self) -> list[str]:
        """Names of activations whose change grows with the width, or is not finite."""
        return [name for name, slope in self.slopes.items() if not slope <= self.limits[1]]

    @property
    def shrinking(self) -> list[str]:
        """Names of activations whose change shrinks as the model gets wider."""
        return [name for name, slope in self.slopes.items() if slope < self.limits[0]]

    @property
    def is_flat(self) -> bool:
        """Whether all changes are of one size at all widths."""
        return not self.growing and not self.shrinking

    def verdict(self) -> str:
        """The result in a sentence."""
        kind = f"muP of base width {self.base_dim}" if self.base_dim else "no muP (model.mup_base_dim=0)"
        slopes = self.slopes
        for names, word in ((self.growing, "grow with the width"), (self.shrinking, "shrink as the model gets wider")):
            if names:
                steepest = max(names, key=lambda name: abs(slopes[name]) if math.isfinite(slopes[name]) else math.inf)
                return (
                    f"Wrong: with {kind} the changes of {len(names)} of {len(slopes)} activations {word}, "
                    f"{steepest} as width^{slopes[steepest]:.2f}."
                )
        low, high = min(slopes.values()), max(slopes.values())
        return f"Flat: with {kind} the changes of {len(slopes)} activations go as width^{low:.2f} to width^{high:.2f}."

    def to_json(self) -> dict[str, Any]:
        """The same as JSON types, with slopes."""
        return {
            "is_flat": self.is_flat,
            "base_dim": self.base_dim,
            "widths": list(self.widths),
            "steps": self.steps,
            "changes": {name: list(values) for name, values in self.changes.items()},
            "slopes": {name: slope if math.isfinite(slope) else None for name, slope in self.slopes.items()},
        }


def _slope(widths: Sequence[int], values: Sequence[float]) -> float:
    """Slope of the line of least squares through (log width, log value)."""
    if not all(math.isfinite(value) and value > 0 for value in values):
        return math.nan
    x, y = [math.log(width) for width in widths], [math.log(value) for value in values]
    x_mean, y_mean = sum(x) / len(x), sum(y) / len(y)
    above = sum((a - x_mean) * (b - y_mean) for a, b in zip(x, y, strict=True))
    return above / sum((a - x_mean) ** 2 for a in x)


def write_coordinates(folder: Path, found: CoordinateCheck) -> None:
    """Write ``report.html`` with the curves, and then ``report.json``."""
    slopes = found.slopes
    data = [
        {"type": "scatter", "mode": "lines+markers", "name": name, "x": list(found.widths), "y": list(values)}
        for name, values in found.changes.items()
    ]
    axis = {"type": "log", "zeroline": False}
    layout = curve_layout("", "", height=460) | {
        "xaxis": axis | {"title": {"text": "width (model.dim)"}},
        "yaxis": axis | {"title": {"text": f"change after {found.steps} steps"}},
        "hovermode": "closest",
    }
    rows = [
        [name, f"{slopes[name]:.2f}", *(f"{value:.3g}" for value in values)] for name, values in found.changes.items()
    ]
    section = Section(
        title="Changes by width",
        note="Root mean square of how far the activations of the same samples moved from their initial values. "
        f"A slope from {found.limits[0]:g} to {found.limits[1]:g} counts as flat.",
        charts=[{"id": "changes", "data": data, "layout": layout}],
        tables=[Table(head=["activation", "slope", *map(str, found.widths)], rows=rows)],
    )
    figures = [
        Figure("widths", ", ".join(map(str, found.widths))),
        Figure("largest slope", f"{max(slopes.values()):.2f}"),
        Figure("smallest slope", f"{min(slopes.values()):.2f}"),
    ]
    page = render_page(
        SUMMARY,
        section.charts,
        title="Coordinate check",
        verdict=found.verdict(),
        figures=figures,
        sections=[section],
    )
    write_atomically(folder / "report.html", page.encode())
    write_atomically(folder / JSON_FILE, json.dumps(found.to_json(), indent=1).encode() + b"\n")


def read_coordinates(folder: Path) -> CoordinateCheck:
    """What ``write_coordinates`` wrote into a folder.

    Raises:
        ConfigError: The report is damaged, or another user can have written it.
    """
    path = folder / JSON_FILE
    try:
        found = msgspec.convert(read_own_json(path), CoordinateCheck)
        if not found.changes or any(len(values) != len(found.widths) for values in found.changes.values()):
            raise ValueError("it has no change for each width")
    except (ValueError, OSError) as error:
        raise ConfigError(
            given=f"{path}, which is no report of a coordinate check: {error}",
            rule="unisono tune coord-check writes it",
            consequence="nothing was started",
            nearest="remove it, and the check is made again",
        ) from error
    return found
