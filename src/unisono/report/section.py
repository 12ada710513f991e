"""A section of the report: a title, a note, charts and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Cells as text; ``left_out`` rows more are not shown."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    left_out: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A part of the page.

    Attributes:
        title: Its heading.
        note: What the figures are, in a sentence.
        charts: As plotly describes them, each with an ``id``.
        pictures: Addresses of images, such as ``data:`` addresses, below the charts.
        tables: Below the pictures.
        in_grid: Whether charts stand side by side where the page is wide enough.
    """

    title: str
    note: str = ""
    charts: Sequence[dict[str, Any]] = ()
    pictures: Sequence[str] = ()
    tables: Sequence[Table] = ()
    in_grid: bool = False
