"""The report of a data set's class balance."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from unisono.report.charts import curve_layout
from unisono.report.html import render_page
from unisono.report.page import SUMMARY
from unisono.report.section import Section, Table
from unisono.report.tables import Figure
from unisono.sanitize import printable
from unisono.storage.files import write_atomically

if TYPE_CHECKING:
    from unisono.quality.balance import BalanceResult

_MAX_BARS: Final = 50
_MAX_ROWS: Final = 1000


def write_balance_page(path: Path, name: str, result: BalanceResult) -> None:
    """Write the report of a data set's class balance to ``path``."""
    bars = result.classes[:_MAX_BARS]
    labels = [printable(each.name) for each in bars]
    data = [
        {"type": "bar", "name": series, "x": labels, "y": shares}
        for series, shares in (
            ("in the data", [each.share for each in bars]),
            ("read with the weights", [each.weighted_share for each in bars]),
        )
    ]
    layout = curve_layout("", "share", height=320) | {"xaxis": {"type": "category"}, "barmode": "group"}
    rows = [
        [
            printable(each.name),
            f"{each.rows:,}",
            f"{each.share:.3%}",
            f"{each.weighted_share:.3%}",
            f"{each.reads_per_epoch:.4g}",
        ]
        for each in result.classes
    ]
    table = Table(
        head=("class", "rows", "share", "share with the weights", "reads of a row in an epoch"),
        rows=rows[:_MAX_ROWS],
        left_out=max(0, len(rows) - _MAX_ROWS),
    )
    left_out = len(result.classes) - len(bars)
    note = f"The {len(bars)} largest of {len(result.classes):,} classes." if left_out else ""
    sections = [
        Section(title="Classes", note=note, charts=[{"id": "classes", "data": data, "layout": layout}], tables=[table])
    ]
    limit = f", at most {result.max_repeats} reads of a row in an epoch" if result.max_repeats else ""
    figures = [
        Figure("rows", f"{result.rows:,}"),
        Figure("rows without a label", f"{result.unlabelled:,}"),
        Figure("classes", f"{len(result.classes):,}"),
        Figure("largest over smallest class", f"{result.imbalance:.4g}"),
        Figure("effective number of classes", f"{result.effective_classes:.4g}"),
        Figure("weights", f"rows of the class ^ -{result.power:g}{limit}"),
    ]
    page = render_page(
        SUMMARY,
        [chart for section in sections for chart in section.charts],
        title=f"Class balance of {printable(name)}",
        verdict=f"The largest class has {result.imbalance:.4g} times the rows of the smallest.",
        figures=figures,
        sections=sections,
    )
    write_atomically(path, page.encode("utf-8", "replace"))
