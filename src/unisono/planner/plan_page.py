"""The page of a search: the plan's time and memory, time against memory of others, and what other values of an axis cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from unisono.observe.run_summary import format_gib
from unisono.planner.answer import Answer
from unisono.planner.layout import Layout
from unisono.planner.layout_space import Job, value_text
from unisono.planner.layout_timeline import layout_timeline
from unisono.planner.number_sources import LAYOUT_SOURCES
from unisono.planner.peak_memory import COUNTED
from unisono.planner.search import SearchResult
from unisono.planner.simulate import Prediction
from unisono.planner.timeline_chart import timeline_chart
from unisono.report.bars import stacked_bars
from unisono.report.charts import PHASE_COLOURS, curve_layout
from unisono.report.html import render_page
from unisono.report.page import SUMMARY
from unisono.report.section import Section, Table
from unisono.report.tables import Figure
from unisono.sanitize import printable
from unisono.storage.files import write_atomically
from unisono.units import GIB

_FILLS: Final = 3  # micro-batches of the chart of passes, as a multiple of the ranks of the pipeline
_STEP_NOTE: Final = "Means over the pipeline ranks; bubble and imbalance are what these wait for each other."
_COLOURS: Final = {
    "matmul": "#1f6feb",
    "expert": "#4c9be8",
    "attention": "#8250df",
    "lm_head": "#2da44e",
    "memory_bound": PHASE_COLOURS["h2d"],
    "tensor_parallel": PHASE_COLOURS["comm_exposed_tp"],
    "expert_parallel": PHASE_COLOURS["comm_exposed_ep"],
    "context_parallel": PHASE_COLOURS["comm_exposed_cp"],
    "offload": "#953800",
    "imbalance": "#5c3d00",
    "bubble": PHASE_COLOURS["bubble"],
    "sharding": PHASE_COLOURS["comm_exposed_dp"],
    "gradients": "#cf222e",
    "optimizer": "#953800",
    "stragglers": "#bc4c00",
    "states": "#1f6feb",
    "gathered": "#4c9be8",
    "activations": "#8250df",
    "recomputed": "#bf8700",
    "logits": "#2da44e",
    "traced": "#1f6feb",
}


def write_plan_page(path: Path, job: Job, answer: Answer) -> None:
    """Write the page of a search that has found a plan.

    Args:
        path: A file, which is replaced.
        job: What was searched for.
        answer: What was found; ``answer.best`` is not None.

    Raises:
        OSError: It cannot be written.
    """
    found, best = answer.found, answer.prediction
    assert found.best is not None
    assert best is not None
    sections = [
        _ledger("Time of a step", "time", best.parts_s, "s", 1.0, _STEP_NOTE),
        _ledger("Memory", "memory", best.memory, "GiB", GIB, "Of the device that needs most."),
        *_finalists(answer),
        *([_stages(answer)] if answer.stages else []),
        *_passes(found.best.layout, best),
        _front(found),
        _flips(answer),
        _device_counts(answer),
        _changes(answer),
        _refused(found),
    ]  # fmt: skip
    low, high = best.step_s / (1 + best.spread), best.step_s * (1 + best.spread)
    figures = [
        Figure("step", f"{best.step_s:.4g} s"),
        Figure("nine of ten such runs", f"{low:.4g} to {high:.4g} s"),
        Figure("tokens per second and device", f"{best.tokens_per_s:,.0f}"),
        Figure("of the peak", f"{best.utilization:.1%}"),
        Figure("memory that must fit", f"{format_gib(best.needed_bytes)} of {format_gib(found.limit_bytes)}"),
        *(
            [Figure("learned", f"times {answer.learned.factor:.3g} by {answer.learned.runs} runs")]
            if answer.learned.runs
            else []
        ),
        *(
            [Figure("blocks of each stage", ", ".join(map(str, cut)))]
            if (cut := found.best.layout.layers_per_stage)
            else []
        ),
        *([Figure("on the host, of each device", format_gib(best.host_bytes))] if best.host_bytes else []),
        Figure("layouts compared", f"{found.num_layouts:,}; {found.num_fitting:,} fit"),
    ]
    page = render_page(
        SUMMARY,
        [chart for section in sections for chart in section.charts],
        title=f"{job.model.params / 1e9:.3g}B parameters on {job.num_devices:,} {printable(job.device.name)}",
        verdict=f"Fastest layout that fits: {found.best.axes_text}.",
        figures=figures,
        sections=sections,
    )
    write_atomically(path, page.encode())


def _ledger(title: str, name: str, parts: Mapping[str, float], unit: str, scale: float, note: str) -> Section:
    """Parts as one bar and as a table, from the largest on."""
    total = sum(parts.values())
    largest = sorted(((part, value) for part, value in parts.items() if value > 0), key=lambda item: -item[1])
    chart = stacked_bars(
        name,
        ["best"],
        {part: [value / scale] for part, value in largest},
        x_title=unit,
        unit=unit,
        colours=_COLOURS,
    )
    rows = [
        [
            part.replace("_", " "),
            f"{value / scale:.4g} {unit}",
            f"{value / total:.1%}",
            LAYOUT_SOURCES[part].kind,
            LAYOUT_SOURCES[part].text,
        ]
        for part, value in largest
    ]
    head = ("part", "", "share", "known", "from")
    return Section(title=title, note=note, charts=[chart], tables=[Table(head=head, rows=rows)])


def _passes(layout: Layout, best: Prediction) -> Iterator[Section]:
    """The pipeline over time, of as many micro-batches as show how it fills, runs and drains."""
    if layout.pp == 1 or layout.pp * max(1, layout.stages_per_rank) > layout.model.layers:
        return
    shown = min(int(layout.num_micro_batches), _FILLS * layout.pp)
    of = "All" if shown == layout.num_micro_batches else f"The first {shown} of {layout.num_micro_batches:g}"
    chart = timeline_chart("passes", layout_timeline(layout, best.parts_s, shown))
    yield Section(
        title="Passes of the pipeline", note=f"{of} micro-batches of a step, without messages.", charts=[chart]
    )


def _front(found: SearchResult) -> Section:
    """Step time against memory: no other layout is both faster and smaller."""
    texts = [each.axes_text for each in found.pareto]
    times = [each.step_s for each in found.pareto]
    front: dict[str, Any] = {
        "type": "scatter",
        "mode": "lines+markers",
        "name": "no other is faster and smaller",
        "x": [each.needed_bytes / GIB for each in found.pareto],
        "y": times,
        "text": texts,
    }
    limit = found.limit_bytes / GIB
    fits: dict[str, Any] = {
        "type": "scatter",
        "mode": "lines",
        "name": "what fits",
        "x": [limit, limit],
        "y": [0, max(times)],
        "line": {"dash": "dot"},
    }
    layout = curve_layout("", "s", height=360) | {
        "xaxis": {"title": {"text": "memory of a device in GiB"}, "type": "log"}
    }
    table = Table(
        head=("layout", "step", "memory"),
        rows=[
            [text, f"{each.step_s:.4g} s", format_gib(each.needed_bytes)]
            for text, each in zip(texts, found.pareto, strict=True)
        ],
    )
    return Section(
        title="Time against memory",
        note="Layouts of which no other is both faster and smaller.",
        charts=[{"id": "front", "data": [front, fits], "layout": layout}],
        tables=[table],
    )


def _stages(answer: Answer) -> Section:
    """Memory of ranks of the pipeline, by part."""
    rows = [
        [
            name,
            *(
                f"{value:.4g}"
                for value in (
                    stage.rank,
                    stage.blocks,
                    stage.recomputed_blocks,
                    *(size / GIB for size in (*stage.parts, stage.counted)),
                )
            ),
        ]
        for name, stage in answer.stages.items()
    ]
    return Section(
        title="Memory by stage",
        note="In GiB, of the first and the last rank of the pipeline and of the one between them that needs most. "
        + (f"The layout {answer.fits_with}." if answer.fits_with else ""),
        tables=[Table(head=("stage", "rank", "blocks", "recomputed blocks", *COUNTED, "all"), rows=rows)],
    )


def _finalists(answer: Answer) -> Iterator[Section]:
    """The traced layouts."""
    if answer.finalists is None:
        return
    rows = [
        [
            each.predicted.axes_text,
            f"{each.step_s:.4g} s",
            format_gib(each.counted_bytes),
            "" if each.traced.refused else format_gib(each.traced.peak_bytes),
            each.traced.refused or ("fits" if each.fits else "does not fit"),
        ]
        for each in answer.finalists.traced
    ]
    yield Section(
        title="Traced layouts",
        note=f"Not traced: {answer.finalists.refused}."
        if answer.finalists.refused
        else "Exact bytes of tensors as unisono runs them, in the order in which they were traced. Memory of other layouts on "
        "this page is counted, and corrected by these.",
        tables=[Table(head=("layout", "step", "counted", "traced", ""), rows=rows)],
    )


def _flips(answer: Answer) -> Section:
    rows = [
        [
            flip.text,
            "none" if flip.best is None else "another" if flip.is_other else "the same",
            flip.best.axes_text if flip.best else flip.reason,
            f"{flip.best.step_s:.4g} s" if flip.best else "",
        ]
        for flip in answer.sensitivity.perturbations
    ]
    return Section(
        title="What would change the decision",
        note="The best layout with one property halved or doubled.",
        tables=[Table(head=("change", "layout", "", "step"), rows=rows)],
    )


def _device_counts(answer: Answer) -> Section:
    rows = [
        [
            f"{each.num_devices:,}",
            f"{layout.step_s:.4g} s",
            format_gib(layout.needed_bytes),
            f"{answer.tokens_per_step / layout.step_s / each.num_devices:,.0f}",
            layout.axes_text,
        ]
        for each in answer.sensitivity.device_counts
        for layout in each.front
    ]
    rows += [
        [f"{each.num_devices:,}", "", "", "", each.reason] for each in answer.sensitivity.device_counts if each.reason
    ]
    return Section(
        title="Time, memory and devices",
        note="Layouts that fit, of which no other one on as many devices or fewer is both faster and smaller.",
        tables=[Table(head=("devices", "step", "memory", "tokens/s of each device", "layout"), rows=rows)],
    )


def _changes(answer: Answer) -> Section:
    """Each other value of an axis with the best of the other axes."""
    rows = [
        [f"{axis}={value_text(value)}", reason, format_gib(each.needed_bytes), each.axes_text]
        for (axis, value, each), reason in zip(answer.found.changes, answer.reasons, strict=True)
    ]
    return Section(
        title="Other values",
        note="Each with the best of the other axes. Differences below the intervals are guesses.",
        tables=[Table(head=("axis", "step", "memory", "layout"), rows=rows)],
    )


def _refused(found: SearchResult) -> Section:
    rows = [[f"{axis}={value_text(value)}", reason] for axis, value, reason in found.refused]
    return Section(
        title="Values that no layout has",
        note="With the rule that such layouts break." if rows else "There are none.",
        tables=[Table(head=("axis", "rule"), rows=rows)],
    )
