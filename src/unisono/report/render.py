"""The report of a run: one self-contained HTML file, written from the events in the run folder alone.

It shows the outcome in one sentence and what a diagnosis finds, then figures, time shares, curves, ranks, a text sample, events,
environment and settings. Plotly draws the charts and is embedded, compressed. The report can be written at any time, also of a
killed run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np

from unisono.diagnose import Finding, RunFacts, diagnose
from unisono.diagnose.finding_text import confidence_word, finding_title, gain_text
from unisono.diagnose.overlay import patch_text
from unisono.diagnose.run_facts import facts_of, with_run_files
from unisono.errors import DataError
from unisono.observe.events import Event, events_path
from unisono.observe.formatting import run_verdict
from unisono.observe.goodput import Goodput, GoodputLedger, launch_spans
from unisono.observe.history import RankHistory, of_one_run, read_history
from unisono.observe.run_summary import summarise
from unisono.report.charts import curves_of, rank_map, time_chart
from unisono.report.goodput_section import goodput_section
from unisono.report.html import render_page
from unisono.report.monitor_section import MonitorCurves, monitor_section
from unisono.report.page import RUN
from unisono.report.parent_section import parent_section
from unisono.report.profile_sections import profile_sections
from unisono.report.rank_sections import (
    communication_section,
    loading_section,
    memory_section,
    pipeline_section,
    step_section,
)
from unisono.report.section import Section
from unisono.report.tables import (
    caption,
    event_row,
    figures_of,
    newest_events,
    rank_row,
    sections_of,
    settings_of,
    shown_events,
    time_clause,
    warnings_of,
)
from unisono.sanitize import printable
from unisono.storage.files import write_atomically
from unisono.storage.run_folder import EVENTS_FOLDER, REPORT_FILE

_MAX_RANK_ROWS: Final = 200


@dataclass(frozen=True, slots=True)
class Report:
    """A report that was written, and the goodput ledger in it."""

    path: Path
    goodput: Goodput | None


def write_report(run_dir: Path) -> Path:
    """Write ``report.html`` into ``run_dir`` and return its path; an older report is replaced atomically.

    Raises:
        DataError: The folder has no events of rank 0.
        ConfigError: A file of events cannot be read.
    """
    return make_report(run_dir).path


@np.errstate(over="ignore", invalid="ignore")  # figures of a damaged file may be of any size
def make_report(run_dir: Path) -> Report:
    """Write the report as ``write_report`` does; returns its path and the goodput ledger.

    Raises:
        DataError: The folder has no events of rank 0.
        ConfigError: A file of events cannot be read.
    """
    path = events_path(run_dir, 0)
    history = read_history(path)
    if history.is_empty:
        raise DataError(
            given=f"{path} {'holds no event' if path.exists() else 'does not exist'}",
            rule="a report is made from the events of rank 0 in the run folder",
            consequence="no report was written",
            nearest="give the folder of a run (run.dir), or start one: unisono train",
        )
    ranks = _ShownRanks()
    others = (other for other in sorted((run_dir / EVENTS_FOLDER).glob("rank*.jsonl")) if other != path)
    histories = of_one_run(chain([history], map(read_history, others)))
    facts = facts_of(map(ranks.collect, histories))
    facts = with_run_files(facts, run_dir)
    goodput = ranks.goodput.result(launch_spans(run_dir))
    findings = diagnose(facts)
    page = render(
        history,
        facts,
        findings,
        ranks,
        goodput=None if goodput is None else goodput_section(goodput),
        parent=parent_section(history, run_dir, facts, findings),
    )
    target = run_dir / REPORT_FILE
    write_atomically(target, page.encode())
    return Report(target, goodput)


def _rank_sections(facts: RunFacts, monitor: MonitorCurves) -> list[Section]:
    sections = [step_section(facts) if len(facts.ranks) > 1 else None, loading_section(facts), pipeline_section(facts)]
    sections += [communication_section(facts), memory_section(facts), monitor_section(monitor)]
    sections += profile_sections(facts.profiles)
    return [section for section in sections if section is not None]


class _ShownRanks:
    """What the page shows of each rank, collected while histories are read one by one: all of them would need much memory."""

    def __init__(self) -> None:
        self.count = 0  # of ranks that have steps
        self.rows: list[list[str]] = []  # of the first of them
        self.num_events = 0
        self.newest: list[Event] = []  # events of the table
        self.goodput = GoodputLedger()
        self.monitor = MonitorCurves()

    def collect(self, history: RankHistory) -> RankHistory:
        """Take what the page shows of a rank; returns ``history``, for the next reader."""
        if len(history.steps):
            self.count += 1
            if len(self.rows) < _MAX_RANK_ROWS:
                self.rows.append(rank_row(history))
        if shown := warnings_of(history) if history.rank else shown_events(history):
            self.num_events += len(shown)
            self.newest = newest_events([*self.newest, *shown])
        self.goodput.add(history)
        self.monitor.add(history)
        return history


def render(
    history: RankHistory,
    facts: RunFacts,
    findings: Sequence[Finding],
    shown: _ShownRanks,
    *,
    goodput: Section | None,
    parent: Section | None,
) -> str:
    """Render the HTML page from the history of rank 0, the facts of all ranks, their findings, and what is shown of them.

    Args:
        history: History of rank 0.
        facts: Facts of all ranks.
        findings: What the diagnosis says of them.
        shown: Tables of events and ranks.
        goodput: Section about the time of all attempts.
        parent: Section about the parent run.
    """
    summary = summarise(history)
    start, sample = _last(history.events, "run_start"), _last(history.events, "sample")
    curves, shares, ranks = list(curves_of(history)), time_chart(summary), rank_map(facts)
    rank_sections = _rank_sections(facts, shown.monitor)
    charts = [*([shares] if shares else []), *curves, *([ranks] if ranks else [])]
    charts += [chart for section in (*([goodput] if goodput else []), *rank_sections) for chart in section.charts]
    return render_page(
        RUN,
        charts,
        title=f"Run {printable(str(_last(history.all_events, '').get('run', '')))}",
        verdict=run_verdict(summary) + time_clause(summary),
        findings=[_shown(finding, is_script=facts.is_script) for finding in findings],
        figures=list(figures_of(summary)),
        notes=facts.notes,
        time_chart=shares["id"] if shares else None,
        curves=[curve["id"] for curve in curves],
        rank_map=ranks["id"] if ranks else None,
        sample=printable(str(sample.get("text", "")), newlines=True),
        sample_caption=caption(sample),
        event_rows=list(map(event_row, shown.newest)),
        events_left_out=shown.num_events - len(shown.newest),
        ranks=shown.rows if shown.count > 1 else [],
        ranks_left_out=shown.count - len(shown.rows),
        goodput=goodput,
        rank_sections=rank_sections,
        parent=parent,
        sections=list(sections_of(start)),
        settings=list(settings_of(start)),
        conventions=printable(str(start.get("flops_convention", ""))),
    )


def _shown(finding: Finding, *, is_script: bool) -> dict[str, Any]:
    word = confidence_word(finding)
    return {
        "title": f"{finding.id}{f' ({word})' if word else ''}: {finding_title(finding)}",
        "cost": f"costs {finding.cost_frac:.0%} of the time" if finding.cost_frac else finding.severity,
        "is_critical": finding.severity == "critical",
        "evidence": [printable(line) for line in finding.evidence],
        "advice": finding.advice,
        "settings": printable(patch_text(finding.patch, is_script=is_script)),
        "gain": gain_text(finding),
    }


def _last(events: Sequence[Event], kind: str) -> Event:
    """The last event of a kind, of any for an empty one; no event where there is none."""
    nothing: Event = {}
    return next((event for event in reversed(events) if kind in ("", event["kind"])), nothing)
