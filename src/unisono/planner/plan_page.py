"""The page of a search: the plan's time and memory, time against memory of others, and what other values of an axis cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from unisono.planner.layout_space import AXES, Job
from unisono.planner.search import Candidate, SearchResult
from unisono.planner.simulate import Prediction
from unisono.report.bars import stacked_bars
from unisono.report.charts import curve_layout
from unisono.report.html import render_page
from unisono.report.page import SUMMARY
from unisono.report.section import Section, Table
from unisono.report.tables import Figure
from unisono.storage.files import write_atomically

_GIB: Final = 2**30
_COLOURS: Final = {
    "matmul": "#1f6feb",
    "expert": "#4c9be8",
    "attention": "#8250df",
    "lm_head": "#2da44e",
    "memory_bound": "#1b7c83",
    "tensor_parallel": "#9a6700",
    "expert_parallel": "#bf8700",
    "context_parallel": "#e6b450",
    "imbalance": "#5c3d00",
    "bubble": "#7d4e00",
    "sharding": "#d29922",
    "gradients": "#cf222e",
    "stragglers": "#bc4c00",
    "states": "#1f6feb",
    "gathered": "#4c9be8",
    "activations": "#8250df",
    "recomputed": "#bf8700",
    "logits": "#2da44e",
}


def write_plan_page(path: Path, job: Job, found: SearchResult, best: Prediction) -> None:
    """Write the page of a search that has found a plan.

    Args:
        path: A file, which is replaced.
        job: What was searched for.
        found: What was found; ``found.best`` is not None.
        best: The prediction for it.

    Raises:
        OSError: It cannot be written.
    """
    assert found.best is not None
    sections = [
        _ledger("Time of a step", "time", best.parts_s, "s", 1.0, "What the step of the device that is slowest consists of."),
        _ledger("Memory", "memory", best.memory, "GiB", _GIB, "Of the device that needs most."),
        _front(found),
        _changes(found),
    ]  # fmt: skip
    low, high = best.step_s / (1 + best.spread), best.step_s * (1 + best.spread)
    figures = [
        Figure("step", f"{best.step_s:.4g} s"),
        Figure("nine of ten such runs", f"{low:.4g} to {high:.4g} s"),
        Figure("tokens per second and device", f"{best.tokens_per_s:,.0f}"),
        Figure("of the peak", f"{best.utilization:.1%}"),
        Figure("memory that must fit", f"{best.needed_bytes / _GIB:.3g} GiB of {found.limit_bytes / _GIB:.3g} GiB"),
        Figure("layouts compared", f"{found.num_layouts:,}; {found.num_fitting:,} fit"),
    ]
    page = render_page(
        SUMMARY,
        [chart for section in sections for chart in section.charts],
        title=f"{job.model.params / 1e9:.3g}B parameters on {job.num_devices:,} {job.device.name}",
        verdict=f"Fastest layout that fits: {layout_text(found.best)}.",
        figures=figures,
        sections=sections,
    )
    write_atomically(path, page.encode())


def layout_text(candidate: Candidate) -> str:
    """The axes that a layout uses, such as ``tp=8 pp=4``."""
    values = [(axis, getattr(candidate.layout, axis)) for axis in AXES]
    used = [(axis, value) for axis, value in values if (axis == "zero" and value) or value not in (0, 1, "none")]
    return " ".join(f"{axis}={value}" for axis, value in used) or "replicas alone"


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
    rows = [[part.replace("_", " "), f"{value / scale:.4g} {unit}", f"{value / total:.1%}"] for part, value in largest]
    return Section(title=title, note=note, charts=[chart], tables=[Table(head=("part", "", "share"), rows=rows)])


def _front(found: SearchResult) -> Section:
    """Step time against memory: no other layout is both faster and smaller."""
    texts = [layout_text(each) for each in found.pareto]
    times = [each.step_s for each in found.pareto]
    front: dict[str, Any] = {
        "type": "scatter",
        "mode": "lines+markers",
        "name": "no other is faster and smaller",
        "x": [each.needed_bytes / _GIB for each in found.pareto],
        "y": times,
        "text": texts,
    }
    limit = found.limit_bytes / _GIB
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
            [text, f"{each.step_s:.4g} s", f"{each.needed_bytes / _GIB:.3g} GiB"]
            for text, each in zip(texts, found.pareto, strict=True)
        ],
    )
    return Section(
        title="Time against memory",
        note="Layouts of which no other is both faster and smaller.",
        charts=[{"id": "front", "data": [front, fits], "layout": layout}],
        tables=[table],
    )


def _changes(found: SearchResult) -> Section:
    """Each other value of an axis with the best of the other axes."""
    assert found.best is not None
    rows = list(_change_rows(found, found.best))
    return Section(
        title="Other values",
        note="Each with the best of the other axes. Differences below the intervals are guesses.",
        tables=[Table(head=("axis", "step", "memory", "layout"), rows=rows)],
    )


def _change_rows(found: SearchResult, best: Candidate) -> Iterator[list[str]]:
    for axis, value, each in found.changes:
        fits = each.needed_bytes <= found.limit_bytes
        step = f"{each.step_s / best.step_s - 1:+.1%}" if fits else "does not fit"
        yield [f"{axis}={value}", step, f"{each.needed_bytes / _GIB:.3g} GiB", layout_text(each)]
