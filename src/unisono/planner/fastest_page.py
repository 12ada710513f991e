"""The page of a search of the fastest plan: the step and the memory of each plan, the order of passes, and why not others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from unisono.planner.fastest import Candidate, changes_in_words
from unisono.planner.timed_plan import SPREAD
from unisono.planner.timeline_chart import timeline_chart
from unisono.planner.why_fastest import CANDIDATE_SOURCES, flips, neighbours
from unisono.report.bars import stacked_bars
from unisono.report.charts import PHASE_COLOURS
from unisono.report.html import render_page
from unisono.report.page import SUMMARY
from unisono.report.section import Section, Table
from unisono.report.tables import Figure
from unisono.storage.files import write_atomically
from unisono.units import GIB

_COLOURS: Final = {
    "work": PHASE_COLOURS["backward"],
    "pipeline": PHASE_COLOURS["bubble"],
    "slowest rank": PHASE_COLOURS["other"],
}


def write_fastest_page(
    path: Path, candidates: Sequence[Candidate], best: Candidate, *, num_ranks: int, memory_bytes: int
) -> None:
    """Write the page of a search that has found a plan.

    Args:
        path: A file, which is replaced.
        candidates: All that were considered.
        best: The fastest of them.
        num_ranks: Ranks of the job.
        memory_bytes: Bytes that the tensors of a rank may take.

    Raises:
        OSError: It cannot be written.
    """
    assert best.timed is not None
    timed = sorted((each for each in candidates if each.timed is not None), key=lambda each: each.step_s)
    sections = [_step_section(timed), _memory_section(candidates, memory_bytes)]
    pipelined = next((each for each in timed if each.timed is not None and each.timed.timeline), None)
    if pipelined is not None and pipelined.timed is not None:
        name = changes_in_words(pipelined.settings)
        sections.append(
            Section(
                title="Passes of a pipeline",
                note=f"One step of each pipeline rank, with {name}. Work outside of the passes is left out.",
                charts=[timeline_chart("passes", pipelined.timed.timeline)],
            )
        )
    sections.append(_why_section(candidates, best))
    figures = [
        Figure("step", f"{best.step_s:.4g} s"),
        Figure("nine of ten such steps", f"{best.step_s / (1 + SPREAD):.4g} to {best.step_s * (1 + SPREAD):.4g} s"),
        Figure("memory of a rank", f"{(best.peak_bytes or 0) / GIB:.4g} GiB of {memory_bytes / GIB:.4g} GiB"),
        Figure("plans considered", f"{len(candidates)}; {len(timed)} timed"),
    ]
    page = render_page(
        SUMMARY,
        [chart for section in sections for chart in section.charts],
        title=f"The fastest plan of {num_ranks} {'rank' if num_ranks == 1 else 'ranks'}",
        verdict=f"Fastest: {changes_in_words(best.settings)}.",
        figures=figures,
        sections=sections,
    )
    write_atomically(path, page.encode())


def _step_section(timed: Sequence[Candidate]) -> Section:
    rows = [
        (
            changes_in_words(each.settings),
            {name: seconds * each.learned.factor for name, seconds in each.timed.parts_s.items()},
        )
        for each in timed
        if each.timed is not None
    ]
    names = list(dict.fromkeys(name for _, parts in rows for name in parts))
    chart = stacked_bars(
        "steps",
        [text for text, _ in rows],
        {name: [parts.get(name, 0.0) for _, parts in rows] for name in names},
        x_title="seconds of a step",
        unit="s",
        colours={
            **_COLOURS,
            **{name: PHASE_COLOURS.get(f"comm_exposed_{name}", "#d29922") for name in names if name not in _COLOURS},
        },
    )
    table = Table(head=("number", "source"), rows=[[name, source] for name, source in CANDIDATE_SOURCES.items()])
    return Section(title="Time of a step", note="Predicted, of each plan that fits.", charts=[chart], tables=[table])


def _memory_section(candidates: Sequence[Candidate], memory_bytes: int) -> Section:
    traced = [each for each in candidates if each.peak_bytes is not None]
    chart = stacked_bars(
        "memory",
        [changes_in_words(each.settings) for each in traced],
        {"fits": [_gib(each) if each.timed is not None else 0.0 for each in traced],
         "does not fit": [_gib(each) if each.timed is None else 0.0 for each in traced]},
        x_title="GiB of tensors of the rank with most",
        unit="GiB",
        colours={"fits": "#2da44e", "does not fit": "#cf222e"},
    )  # fmt: skip
    note = f"Tensors of a rank may take {memory_bytes / GIB:.4g} GiB."
    return Section(title="Memory", note=note, charts=[chart])


def _gib(candidate: Candidate) -> float:
    return (candidate.peak_bytes or 0) / GIB


def _why_section(candidates: Sequence[Candidate], best: Candidate) -> Section:
    assert best.timed is not None
    others = [
        [
            changes_in_words(each.settings),
            each.refused if each.timed is None else f"{each.step_s / best.step_s - 1:+.1%}",
        ]
        for each in candidates
        if each is not best
    ]
    tables = [
        Table(head=("other plan", "why not"), rows=others),
        Table(
            head=("one setting changed", "step"),
            rows=[
                [each.change, each.reason if each.slower_frac is None else f"{each.slower_frac:+.1%}"]
                for each in neighbours(candidates, best)
            ],
        ),
        Table(
            head=("change", "other plan"),
            rows=[[each.change, each.plan] for each in flips(candidates, best)],
        ),
    ]
    return Section(title="Why not another", tables=[table for table in tables if table.rows])
