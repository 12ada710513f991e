"""Report of the columns of tables: schema, differences between files, and a histogram of each numeric column."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from unisono.quality.columns.numeric_columns import NumericColumn
from unisono.quality.columns.sampling_times import SamplingTimes
from unisono.report.charts import curve_layout
from unisono.report.html import render_page
from unisono.report.page import SUMMARY
from unisono.report.section import Section, Table
from unisono.report.tables import Figure
from unisono.sanitize import printable
from unisono.storage.files import write_atomically

if TYPE_CHECKING:
    from unisono.quality.columns.check import ColumnsResult

_BLUE: Final = "#1f6feb"
_MAX_ROWS: Final = 500
_MAX_CHARTS: Final = 60


def write_columns_page(path: Path, name: str, result: ColumnsResult) -> None:
    """Write the report to ``path``."""
    sections = [
        *_differences(result),
        _table(
            "Columns",
            ("column", "type", "files", "without a value", "content of bytes"),
            [
                [
                    printable(column.name),
                    printable(column.type) + (", all texts of numbers" if column.is_numeric_text else ""),
                    f"{column.files:,}",
                    f"{column.missing:,}",
                    printable(", ".join(f"{content} {count:,}" for content, count in column.contents.items())),
                ]
                for column in result.columns
            ],
        ),
        *_changes(result),
        *_numeric(result),
        *([] if result.times is None else _times(result.times)),
        _table("Files", ("file", "rows"), [[printable(file), f"{rows:,}"] for file, rows in result.rows.items()]),
    ]
    files = len({difference.file for difference in result.differences})
    flagged = sum(column.outliers + column.non_finite + column.stuck_values for column in result.numeric)
    figures = [
        Figure("files", f"{len(result.rows):,}"),
        Figure("rows", f"{sum(result.rows.values()):,}"),
        Figure("columns", f"{len(result.columns):,}"),
        Figure("flagged numbers", f"{flagged:,}"),
        *([] if result.changes is None else [Figure("masked values", f"{sum(result.changes.masked.values()):,}")]),
    ]
    page = render_page(
        SUMMARY,
        [chart for section in sections for chart in section.charts],
        title=f"Columns of {printable(name)}",
        verdict=f"{files:,} of {len(result.rows):,} files differ from the schema of the data set.",
        figures=figures,
        sections=sections,
    )
    write_atomically(path, page.encode("utf-8", "replace"))


def _table(
    title: str, head: Sequence[str], rows: Sequence[Sequence[str]], note: str = "", *, left_out: int = 0
) -> Section:
    """A section with a table; ``left_out`` counts rows that are not in ``rows``."""
    shown = rows[:_MAX_ROWS]
    left_out += len(rows) - len(shown)
    return Section(title=title, note=note, tables=[Table(head=head, rows=shown, left_out=left_out)])


def _differences(result: ColumnsResult) -> Iterator[Section]:
    rows = [
        [
            printable(difference.file),
            printable(difference.column),
            difference.kind,
            printable(difference.given),
            printable(difference.expected),
            f"{difference.count:,}",
            "" if difference.row is None else f"{difference.row:,}",
        ]
        for difference in result.differences
    ]
    if rows:
        head = ("file", "column", "difference", "is", "in most files", "cells", "first row")
        yield _table("Differences", head, rows)


def _changes(result: ColumnsResult) -> Iterator[Section]:
    """What is another in the copy."""
    changes = result.changes
    if changes is None:
        return
    if changes.types:
        rows = [[printable(name), printable(kind)] for name, kind in changes.types.items()]
        yield _table("Schema of the copy", ("column", "type"), rows, "All files of the copy have these columns.")
    if changes.casts:
        cells = [
            [printable(each.file), printable(each.column), each.change, f"{each.count:,}"] for each in changes.casts
        ]
        note = "A column that a file had not was added without values."
        yield _table("Changed to fit the schema", ("file", "column", "change", "cells"), cells, note)
    if changes.masked:
        masked = [[printable(name), f"{count:,}"] for name, count in changes.masked.items()]
        note = "In the copy they have no value; masked.jsonl has each as it was."
        yield _table("Masked values", ("column", "values"), masked, note)
    if changes.dropped:
        dropped = [[printable(file), f"{count:,}"] for file, count in changes.dropped.items()]
        yield _table(
            "Rows left out", ("file", "rows"), dropped, "dropped.jsonl has each with the value that does not fit."
        )


def _numeric(result: ColumnsResult) -> Iterator[Section]:
    if not result.numeric:
        return
    rows = [
        [
            printable(column.name),
            f"{column.numbers:,}",
            *(
                f"{column.quantiles[fraction]:.6g}" if column.numbers else ""
                for fraction in ("0", "0.01", "0.5", "0.99", "1")
            ),
            "" if column.mad is None else f"{column.mad:.6g}",
            f"{column.outliers:,}" if column.scales else "not judged",
            f"{column.non_finite:,}",
            f"{column.stuck_values:,} in {column.stuck_runs:,} runs",
            "; ".join(f"{count:,} series: {reason}" for reason, count in column.not_judged.items()),
        ]
        for column in result.numeric
    ]
    head = (
        "column",
        "numbers",
        "smallest",
        "1 %",
        "median",
        "99 %",
        "largest",
        "MAD",
        "outliers",
        "not finite",
        "stuck",
        "not judged",
    )
    note = (
        f"Outliers are farther than {result.options.max_z:g} times 1.4826 MAD from the median of their series; "
        f"stuck are {result.options.stuck_run} equal values or more in a row. Histograms leave outliers out."
    )
    charts = [chart for number, column in enumerate(result.numeric) if (chart := _histogram(number, column))]
    yield Section(
        title="Numeric columns",
        note=note,
        tables=[Table(head=head, rows=rows[:_MAX_ROWS], left_out=max(0, len(rows) - _MAX_ROWS))],
        charts=charts[:_MAX_CHARTS],
        in_grid=True,
    )
    places = [[printable(column.name), *_cells(place)] for column in result.numeric for place in column.places]
    if places:
        yield _table(
            "Flagged values", ("column", "file", "row", "reason", "value", "more"), places, "The first of each reason."
        )
    groups = [
        [printable(column.name), printable(facts["group"]), *(f"{facts[name]:,.6g}" for name in _GROUP)]
        for column in result.numeric
        for facts in column.groups
    ]
    if groups:
        yield _table(
            "Groups with flagged values",
            ("column", "group", *(name.replace("_", " ") for name in _GROUP)),
            groups,
            "Of each column those with the most.",
            left_out=sum(column.groups_left_out for column in result.numeric),
        )


_GROUP: Final = ("numbers", "median", "outliers", "stuck_values")
_TIME_GROUP: Final = ("gaps", "back", "repeated")


def _cells(place: Mapping[str, Any]) -> list[str]:
    known = ("file", "row", "reason", "value")
    more = ", ".join(f"{name} {fact}" for name, fact in place.items() if name not in known)
    value = place.get("value", "")
    return [printable(place["file"]), f"{place['row']:,}", place["reason"], str(value), printable(more)]


def _histogram(number: int, column: NumericColumn) -> dict[str, Any] | None:
    bins = column.histogram
    if not bins:
        return None
    x = [bins["begin"] + bins["width"] * (place + 0.5) for place in range(len(bins["counts"]))]
    data = [{"type": "bar", "x": x, "y": bins["counts"], "marker": {"color": _BLUE}}]
    title = printable(column.name)
    if bins["below"] or bins["above"]:
        title += f" ({bins['below']:,} below, {bins['above']:,} above)"
    axes = {"xaxis": {"title": {"text": "value"}}, "bargap": 0}
    return {"id": f"histogram{number}", "data": data, "layout": curve_layout(title, "values", height=260) | axes}


def _times(times: SamplingTimes) -> Iterator[Section]:
    unit = f" {times.unit}" if times.unit else ""
    usual = "not known" if times.interval is None else f"{times.interval:.6g}{unit}"
    rows = [
        ["median interval", usual],
        ["gaps", f"{times.gaps:,}"],
        ["stamps that go back", f"{times.back:,}"],
        ["repeated stamps", f"{times.repeated:,}"],
        ["rows without a stamp", f"{times.missing:,}"],
        ["series not judged for gaps", f"{times.not_judged:,} of {times.series:,}"],
    ]
    yield _table(f"Stamps in {printable(times.column)}", ("", ""), rows)
    if times.places:
        places = [_cells(place) for place in times.places]
        yield _table(
            "Gaps and stamps out of order", ("file", "row", "reason", "value", "more"), places, "The later row."
        )
    if times.groups:
        groups = [
            [
                printable(facts["group"]),
                f"{facts['stamps']:,}",
                "not known" if facts["interval"] is None else f"{facts['interval']:.6g}{unit}",
                *(f"{facts[name]:,}" for name in _TIME_GROUP),
            ]
            for facts in times.groups
        ]
        head = ("group", "stamps", "median interval", *_TIME_GROUP)
        yield _table(
            "Groups with gaps or stamps out of order",
            head,
            groups,
            "Those with the most.",
            left_out=times.groups_left_out,
        )
