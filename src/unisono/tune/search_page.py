"""The report of a search: values by trial, parallel coordinates, the importance of each setting, and a table of the trials."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

from unisono.observe.run_summary import duration
from unisono.report.charts import curve_layout
from unisono.report.html import escaped, render_page
from unisono.report.page import SUMMARY
from unisono.report.section import Section, Table
from unisono.report.tables import Figure
from unisono.sanitize import printable
from unisono.storage.files import write_atomically
from unisono.tune.space import Choice, Range, Space
from unisono.tune.study import MIN_TRIALS, StudyOptions, TrialRecord
from unisono.tune.transfer import WidthTransfer

REPORT_FILE: Final = "report.html"
_MAX_LINES: Final = 300  # of the chart with a line for each trial
_MAX_ROWS: Final = 500
_WORDS: Final = {"out_of_memory": "out of memory"}
_BLUE, _RED, _GREY = "#1f6feb", "#cf222e", "#8c959f"


def write_search_page(
    path: Path,
    space: Space,
    options: StudyOptions,
    records: Sequence[TrialRecord],
    best: TrialRecord | None,
    importances: Mapping[str, float],
    transfer: WidthTransfer | None = None,
    *,
    num_eval_samples: int = 0,
) -> None:
    """Write the page of a search to ``path``; an older one is replaced atomically.

    Args:
        path: The file.
        space: The settings that are searched.
        options: How the search chooses.
        records: Its trials, by number.
        best: The one with the best value; None if none is done.
        importances: Share of each setting in how the better trials differ from the others.
        transfer: The widths, if the result is for a wider model than that of the trials.
        num_eval_samples: Samples by which trials are compared, at most; 0: all, or not the same ones in each.
    """
    done = [record for record in records if record.outcome == "done" and record.value is not None]
    sections = [
        section
        for section in (
            None if transfer is None else transfer.section(),
            _by_trial(options, done),
            _parallel_coordinates(space, options, done),
            _importances(importances, len(done)),
            _by_setting(space, options, done),
            _trials(space, options, records, best),
        )
        if section is not None
    ]
    page = render_page(
        SUMMARY,
        [chart for section in sections for chart in section.charts],
        title=f"Search {printable(path.absolute().parent.name)}",
        verdict=printable(verdict(options, best)),
        figures=[
            *_figures(records),
            *_eval_figures(num_eval_samples),
            *([] if transfer is None else transfer.figures()),
        ],
        sections=sections,
    )
    write_atomically(path, page.encode())


def verdict(options: StudyOptions, best: TrialRecord | None) -> str:
    """The best trial in one sentence."""
    if best is None:
        return f"No trial has a value of {options.metric} yet."
    settings = ", ".join(f"{name}={text}" for name, text in best.settings.items())
    return f"{options.metric} {best.value:.6g} in trial {best.number}: {settings}."


def outcome_words(record: TrialRecord) -> str:
    """How a trial ended, in words."""
    if record.outcome == "pruned" and record.curve:
        return f"pruned at step {max(record.curve)}"
    return _WORDS.get(record.outcome, record.outcome)


def _figures(records: Sequence[TrialRecord]) -> Iterator[Figure]:
    yield Figure("trials", str(len(records)))
    for outcome in dict.fromkeys(record.outcome for record in records):
        yield Figure(_WORDS.get(outcome, outcome), str(sum(record.outcome == outcome for record in records)))
    for record in records:
        if record.from_configuration and record.value is not None:
            yield Figure("with the configuration's values", f"{record.value:.6g}")
    yield Figure("time of all trials", duration(sum(record.took_s for record in records)))


def _eval_figures(num_eval_samples: int) -> list[Figure]:
    return [Figure("held-out samples compared", f"at most {num_eval_samples}")] if num_eval_samples else []


def _by_trial(options: StudyOptions, done: Sequence[TrialRecord]) -> Section | None:
    if not done:
        return None
    values = [record.value or 0.0 for record in done]
    best = list(accumulate(values, max if options.maximize else min))
    numbers = [record.number for record in done]
    data = [
        {"type": "scatter", "mode": "markers", "name": "trial", "x": numbers, "y": values, "marker": {"color": _BLUE}},
        {"type": "scatter", "mode": "lines", "name": "best so far", "x": numbers, "y": best, "line": {"color": _RED}},
    ]
    layout = curve_layout("", options.metric, height=320) | {"xaxis": {"title": {"text": "trial"}, "zeroline": False}}
    return Section(title="By trial", charts=[{"id": "by-trial", "data": data, "layout": layout}])


def _parallel_coordinates(space: Space, options: StudyOptions, done: Sequence[TrialRecord]) -> Section | None:
    """A line for each trial over all settings and the metric, each axis from its smallest to its largest value."""
    if len(done) < 2:
        return None
    sign = -1.0 if options.maximize else 1.0
    ordered = sorted(done, key=lambda record: -sign * (record.value or 0.0))[-_MAX_LINES:]  # the best drawn last
    values = [record.value or 0.0 for record in ordered]
    low, high = min(values), max(values)
    names = [*space, options.metric]
    lines: list[dict[str, Any]] = []
    for rank, record in enumerate(ordered):
        heights = [_height(parameter, record.settings.get(name)) for name, parameter in space.items()]
        heights.append(((record.value or 0.0) - low) / (high - low) if high > low else 0.5)
        share = rank / (len(ordered) - 1)
        is_best = rank == len(ordered) - 1
        text = [printable(f"{name}: {value}") for name, value in record.settings.items()]
        lines.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": f"trial {record.number}",
                "x": names,
                "y": heights,
                "line": {"color": _RED if is_best else _BLUE if share > 0.75 else _GREY, "width": 3 if is_best else 1},
                "opacity": 1.0 if is_best else 0.25 + 0.5 * share,
                "hovertemplate": "<br>".join(
                    [f"trial {record.number}", *map(escaped, text), f"{escaped(options.metric)}: {record.value:.6g}"]
                )
                + "<extra></extra>",
                "showlegend": False,
            }
        )
    layout = curve_layout("", "", height=380) | {
        "xaxis": {"zeroline": False, "type": "category"},
        "yaxis": {"visible": False, "range": [-0.05, 1.05]},
        "hovermode": "closest",
    }
    note = (
        "Each line is a trial. Each axis goes from the lowest value at the bottom up; red is the best trial, blue the "
        "best quarter."
    )
    return Section(
        title="Parallel coordinates", note=note, charts=[{"id": "parallel", "data": lines, "layout": layout}]
    )


def _height(parameter: Choice | Range, text: str | None) -> float | None:
    """Place of a value on an axis from 0 to 1."""
    if text is None:
        return None
    if isinstance(parameter, Choice):
        return parameter.values.index(text) / max(1, len(parameter.values) - 1)
    low, high, value = parameter.low, parameter.high, float(text)
    if parameter.is_log:
        low, high, value = math.log(low), math.log(high), math.log(value)
    return (value - low) / (high - low)


def why_no_importance(num_done: int) -> str:
    """Why the importance of settings is not known after so many completed trials, in a sentence; empty if they are enough."""
    if num_done >= MIN_TRIALS:
        return ""
    return f"The importance of settings needs {MIN_TRIALS} completed trials; {num_done} {'is' if num_done == 1 else 'are'}."


def _importances(importances: Mapping[str, float], num_done: int) -> Section | None:
    title = "Importance of settings"
    if not importances:
        return Section(title=title, note=why_no_importance(num_done)) if num_done < MIN_TRIALS else None
    names = sorted(importances, key=lambda name: importances[name])
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "x": [round(100 * importances[name], 1) for name in names],
            "y": names,
            "marker": {"color": _BLUE},
            "hovertemplate": "%{y}: %{x}%<extra></extra>",
        }
    ]
    layout = curve_layout("", "", height=max(160, 90 + 28 * len(names))) | {
        "xaxis": {"title": {"text": "% of how the better trials differ"}, "rangemode": "tozero"},
        "yaxis": {"automargin": True, "type": "category"},
        "hovermode": "closest",
    }
    note = "Share of each setting in how the better trials differ from the others (PED-ANOVA). Of few trials it is a guess."
    return Section(title=title, note=note, charts=[{"id": "importances", "data": data, "layout": layout}])


def _by_setting(space: Space, options: StudyOptions, done: Sequence[TrialRecord]) -> Section | None:
    if len(done) < 2:
        return None
    charts: list[dict[str, Any]] = []
    for index, (name, parameter) in enumerate(space.items()):
        shown = [(record.settings[name], record) for record in done if name in record.settings]
        x: list[Any] = [text if isinstance(parameter, Choice) else float(text) for text, _ in shown]
        data = [
            {
                "type": "scatter",
                "mode": "markers",
                "x": x,
                "y": [record.value for _, record in shown],
                "text": [f"trial {record.number}" for _, record in shown],
                "hovertemplate": "%{text}: %{y}<br>%{x}<extra></extra>",
                "marker": {"color": _BLUE},
            }
        ]
        kind = "category" if isinstance(parameter, Choice) else "log" if parameter.is_log else "linear"
        axis: dict[str, Any] = {"title": {"text": name}, "zeroline": False, "type": kind}
        layout = curve_layout("", options.metric, height=280) | {"xaxis": axis, "hovermode": "closest"}
        charts.append({"id": f"setting{index}", "data": data, "layout": layout})
    return Section(title="By setting", charts=charts, in_grid=True)


def _trials(
    space: Space, options: StudyOptions, records: Sequence[TrialRecord], best: TrialRecord | None
) -> Section | None:
    if not records:
        return None
    rows = [
        [
            " ".join([str(record.number), *(f"({mark})" for mark in _marks(record, best))]),
            outcome_words(record),
            "" if record.value is None else f"{record.value:.6g}",
            *(printable(record.settings.get(name, "")) for name in space),
            duration(record.took_s),
            printable(record.reason.partition("\n")[0]),
        ]
        for record in records[-_MAX_ROWS:]
    ]
    head = ["trial", "end", options.metric, *space, "time", "why"]
    table = Table(head=head, rows=rows, left_out=max(0, len(records) - _MAX_ROWS))
    note = "unisono compare trials/0000 trials/0001 shows two of them side by side."
    if any(record.from_configuration for record in records):
        note += " The trial marked 'configuration' has the configuration's own values."
    return Section(title="Trials", note=note, tables=[table])


def _marks(record: TrialRecord, best: TrialRecord | None) -> Iterator[str]:
    if best is not None and record.number == best.number:
        yield "best"
    if record.from_configuration:
        yield "configuration"
