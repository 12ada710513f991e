"""The result of ``unisono plan --cluster …`` as JSON types and as lines of text."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.cli.prediction_text import layout_facts, prediction_lines

if TYPE_CHECKING:
    from unisono.planner.answer import Answer
    from unisono.planner.decision_flips import DeviceCount, Perturbation
    from unisono.planner.finalists import Finalists
    from unisono.planner.layout import Layout
    from unisono.planner.learned import Learned
    from unisono.planner.search import PredictedLayout


def search_json(answer: Answer) -> dict[str, Any]:
    """All that a search says."""
    from unisono.planner.number_sources import LAYOUT_SOURCES

    found, best = answer.found, None
    if found.best is not None and answer.prediction is not None:
        stages = {name: {**asdict(stage), "needed_bytes": stage.counted} for name, stage in answer.stages.items()}
        best = {
            **_facts(found.best),
            "prediction": asdict(answer.prediction),
            "stages": stages,
            "refused_by_runs": answer.refused_by_runs,
            "learned_factor": answer.learned.factor,
            "learned_runs": answer.learned.runs,
        }
    return {
        **({} if answer.finalists is None else {"traced": _traced(answer.finalists)}),
        "best": best,
        "simplest": found.simplest and _facts(found.simplest),
        "num_layouts": found.num_layouts,
        "num_fitting": found.num_fitting,
        "limit_bytes": found.limit_bytes,
        "changes": [
            {"axis": axis, "value": value, **_facts(each), "reason": reason}
            for (axis, value, each), reason in zip(found.changes, answer.reasons, strict=True)
        ],
        "refused": [{"axis": axis, "value": value, "reason": reason} for axis, value, reason in found.refused],
        "flips": [
            {
                "changed": flip.changed,
                "factor": flip.factor,
                "is_other": flip.is_other,
                "best": flip.best and _facts(flip.best),
                "reason": flip.reason,
            }
            for flip in answer.sensitivity.perturbations
        ],
        "device_counts": [
            {
                "num_devices": each.num_devices,
                "best": each.best and _facts(each.best),
                "tokens_per_s": each.tokens_per_s,
                "front": [_facts(layout) for layout in each.front],
                "reason": each.reason,
            }
            for each in answer.sensitivity.device_counts
        ],
        "pareto": [_facts(each) for each in found.pareto],
        "smallest": _facts(found.smallest),
        "without_limit": _facts(found.without_limit),
        "sources": {name: asdict(source) for name, source in LAYOUT_SOURCES.items()},
    }


def _traced(finalists: Finalists) -> dict[str, Any]:
    return {
        "refused": finalists.refused,
        "finalists": [
            {
                "layout": layout_facts(each.layout),
                "step_s": each.step_s,
                "counted_bytes": each.counted_bytes,
                "traced_bytes": None if each.traced.refused else each.traced.peak_bytes,
                "pipeline_rank": each.traced.rank,
                "confidence": None if each.traced.refused else "exact",
                "fits": each.fits,
                "refused": each.traced.refused,
            }
            for each in finalists.traced
        ],
        "nearest": finalists.nearest and _facts(finalists.nearest),
    }


def _facts(candidate: PredictedLayout) -> dict[str, Any]:
    return {
        "layout": layout_facts(candidate.layout),
        "step_s": candidate.step_s,
        "needed_bytes": candidate.needed_bytes,
    }


def search_lines(answer: Answer, applied: Path | None) -> Iterator[str]:
    """The same in text; ``applied`` is the strategy file that was written."""
    from unisono.observe.run_summary import format_gib

    found = answer.found
    yield f"{found.num_layouts:,} layouts compared; {found.num_fitting:,} fit into {format_gib(found.limit_bytes)} of a device"
    if found.best is None or answer.prediction is None:
        yield from _finalist_lines(answer)
        least = found.smallest
        yield f"none fits: the one that needs least takes {format_gib(least.needed_bytes)}, with {least.axes_text}"
        # what needs least has these unless they are pinned
        pins = [
            text
            for text, is_pinned in (
                ("full recompute", least.layout.recompute != "full"),
                ("a micro-batch of 1", least.layout.micro_batch > 1),
            )
            if is_pinned
        ]
        yield f"try {', '.join([*pins, 'more devices'])} or devices with more memory"
        yield from _flip_lines(answer.sensitivity.perturbations, "no layout fits either with")
        return
    yield from prediction_lines(found.best.layout, answer.prediction)
    if answer.learned.runs:
        yield learned_line(answer.learned, found.best.step_s)
    for name, stage in answer.stages.items():
        if name != "only":
            again = f", {stage.recomputed_blocks:g} recomputed" if found.best.layout.recompute == "partial" else ""
            yield f"  {name} stage{format_gib(stage.counted):>{18 - len(name) + 4}}    {stage.blocks:g} blocks{again}"
    yield from _finalist_lines(answer)
    if answer.fits_with:
        yield answer.fits_with
    if answer.refused_by_runs:
        yield f"unisono train refuses this layout: {answer.refused_by_runs}"
    if applied is not None:
        yield f"wrote {applied}; try: unisono train --plan {shlex.quote(str(applied))}"
    if found.simplest is not None and found.simplest.layout != found.best.layout:
        change = f"{found.simplest.step_s / found.best.step_s - 1:+.1%}"
        yield f"simplest within 3 %: {found.simplest.axes_text}, {change}, {format_gib(found.simplest.needed_bytes)}"
    free = found.without_limit
    if free.layout == found.best.layout:
        yield "memory does not decide: no other layout would be faster with more"
    else:
        less = f"{1 - free.step_s / found.best.step_s:.1%}"
        yield f"memory decides: with {format_gib(free.needed_bytes)} a step would take {less} less time, with {free.axes_text}"
    yield from _flip_lines(answer.sensitivity.perturbations, "the same layout with")
    yield from _count_lines(answer.sensitivity.device_counts)
    from unisono.planner.layout_space import value_text

    yield "other values, each with the best of the other axes"
    for (axis, value, each), reason in zip(found.changes, answer.reasons, strict=True):
        others = _differences(found.best.layout, each.layout, axis)
        yield f"  {axis + '=' + value_text(value):<20} {reason}{', with ' + others if others else ''}"
    if found.refused:
        yield "values that no layout has"
        for (axis, reason), group in groupby(found.refused, lambda each: (each[0], each[2])):
            yield f"  {axis + '=' + ', '.join(value_text(value) for _, value, _ in group):<20}  {reason}"


def _finalist_lines(answer: Answer) -> Iterator[str]:
    """What was traced, and what that changed."""
    from unisono.observe.run_summary import format_gib

    finalists = answer.finalists
    if finalists is None:
        return
    if finalists.refused:
        yield f"traced: no: {finalists.refused}; memory is as counted"
        return
    yield "traced as unisono runs them (exact); counts of other layouts are corrected by these"
    for each in finalists.traced:
        counted = f"counted {format_gib(each.counted_bytes)}"
        if each.traced.refused:
            traced = f"traced: no: {each.traced.refused}"
        else:
            traced = f"traced {format_gib(each.traced.peak_bytes)}: {'fits' if each.fits else 'does not fit'}"
        yield f"  {counted}, {traced}, {each.step_s:.4g} s, with {each.predicted.axes_text}"
    if not any(each.fits for each in finalists.traced):
        nearest = finalists.nearest
        yield f"none of {len(finalists.traced)} traced layouts fits; " + (
            "by corrected counts none does"
            if nearest is None
            else f"by corrected counts the fastest that does takes {format_gib(nearest.needed_bytes)}, {nearest.step_s:.4g} s, "
            f"with {nearest.axes_text}"
        )


def learned_line(learned: Learned, step_s: float) -> str:
    """What earlier runs correct in a predicted step."""
    return (
        f"earlier runs took {learned.factor:.3g} times as long as predicted, the median of {learned.runs}: "
        f"without that {step_s / learned.factor:.4g} s (unisono plan accuracy)"
    )


def _flip_lines(flips: Sequence[Perturbation], unchanged: str) -> Iterator[str]:
    """Changes with another best layout, then those without, which ``unchanged`` names."""
    yield "what would change the decision"
    for flip in flips:
        if flip.is_other:
            best = "" if flip.best is None else f"{flip.best.axes_text}, {flip.best.step_s:.4g} s"
            yield f"  {flip.text:<24}{best or flip.reason}"
    if same := [flip.text for flip in flips if not flip.is_other]:
        yield f"  {unchanged} {', '.join(same)}"


def _count_lines(counts: Sequence[DeviceCount]) -> Iterator[str]:
    yield "all devices, and fewer"
    for each in counts:
        if each.best is None:
            yield f"  {each.num_devices:<12,}{each.reason}"
            continue
        yield (
            f"  {each.num_devices:<12,}{each.best.step_s:.4g} s, {each.tokens_per_s:,.0f} tokens/s of each device, "
            f"with {each.best.axes_text}"
        )


def _differences(best: Layout, other: Layout, changed: str) -> str:
    """The other axes that are not those of the best layout."""
    from unisono.planner.layout_space import AXES, value_text

    return " ".join(
        f"{axis}={value_text(getattr(other, axis))}"
        for axis in AXES
        if axis != changed and getattr(other, axis) != getattr(best, axis)
    )
