"""The fastest layouts of a model on a cluster that fit into its memory, and why not others. Imports no torch.

Every layout of an axis' powers of two and divisors is counted (``step_work``, ``peak_memory``); there are some ten thousand, so
nothing is pruned but by rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from unisono.planner.layout import Layout, LayoutError, Numbers
from unisono.planner.layout_space import (
    AXES,
    OFFLOAD,
    PARTIAL,
    RECOMPUTE,
    RECOMPUTED_BLOCKS,
    SCHEDULES,
    WORDS,
    Job,
    Space,
    Value,
    value_text,
)
from unisono.planner.layout_time import layout_time
from unisono.planner.offloading import with_offload
from unisono.planner.partial_recompute import least_recompute, pinned_recompute
from unisono.planner.peak_memory import peak_memory

MEMORY_SHARE: Final = (
    0.92  # of the device's memory that a layout may take: the rest is for communicators and the driver
)
_SAME: Final = 0.03  # part of a step time, or of a memory: predictions are not more exact than this
# of an axis; the schedule that follows from the stages of a rank goes without saying
_UNUSED: Final = (0, 1, "none", None, "1f1b", "interleaved")
_EQUAL: Final = 1e-9  # as times of many layouts are summed in another order


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedLayout:
    """A layout with its prediction.

    Attributes:
        layout: The layout.
        step_s: Seconds of a step.
        needed_bytes: What must fit into the device that needs most (``MemoryParts.counted``).
    """

    layout: Layout
    step_s: float
    needed_bytes: float

    @property
    def axes_text(self) -> str:
        """The axes that the layout uses, such as ``tp=8 pp=4``."""
        values = [(axis, getattr(self.layout, axis)) for axis in AXES]
        used = [
            (axis, value) for axis, value in values if (axis in ("zero", OFFLOAD) and value) or value not in _UNUSED
        ]
        texts = [f"{axis}={value_text(value)}" for axis, value in used]
        if self.layout.recompute == PARTIAL:
            texts.append(f"({sum(self.layout.recomputed_blocks)} of {self.layout.model.layers} blocks)")
        return " ".join(texts) or "data parallel alone"


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """The result of a search.

    Attributes:
        best: The fastest that fits; None if none fits.
        simplest: Of those that fit and take at most 3 % longer, the one with the fewest axes; None if none fits.
        num_layouts: Layouts that were compared.
        num_fitting: Those that fit.
        limit_bytes: The most that ``needed_bytes`` may be.
        changes: Each other value of an axis, in the order of ``AXES``, with the best layout that has it.
        refused: Each value of an axis that no layout has, with the rule (``Space``).
        pareto: The fastest for each amount of memory: none is both faster and smaller.
        smallest: The one that needs least memory.
        without_limit: The fastest if memory did not count.
    """

    best: PredictedLayout | None
    simplest: PredictedLayout | None
    num_layouts: int
    num_fitting: int
    limit_bytes: float
    changes: Sequence[tuple[str, Value, PredictedLayout]]
    refused: Sequence[tuple[str, Value, str]]
    pareto: Sequence[PredictedLayout]
    smallest: PredictedLayout
    without_limit: PredictedLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutTable:
    """All layouts of a job with their predictions.

    Attributes:
        layouts: The layouts.
        step_s: Predicted seconds of a step [layouts].
        needed_bytes: Bytes that must fit into the device that needs most [layouts].
        refused: Values that no layout has (``Space``).
    """

    layouts: Sequence[Layout]
    step_s: Numbers
    needed_bytes: Numbers
    refused: Sequence[tuple[str, Value, str]]

    def row(self, index: int) -> PredictedLayout:
        """The layout at ``index``."""
        return PredictedLayout(
            layout=self.layouts[index],
            step_s=float(self.step_s[index]),
            needed_bytes=float(self.needed_bytes[index]),
        )

    def fastest(self, inside: NDArray[np.bool_]) -> int:
        """Index of the fastest of those that are ``inside``; of equal ones the simplest."""
        among = np.flatnonzero(inside)
        least = self.step_s[among].min()
        equal = among[self.step_s[among] <= least * (1 + _EQUAL)]
        return int(min(equal, key=lambda index: _complexity(self.layouts[index])))

    def best(self, limit_bytes: float) -> PredictedLayout | None:
        """The fastest that fits; None if none does."""
        fits = self.needed_bytes <= limit_bytes
        return self.row(self.fastest(fits)) if fits.any() else None

    def pareto(self) -> tuple[PredictedLayout, ...]:
        """From the fastest to the smallest: none is both faster and smaller than another."""
        return tuple(map(self.row, _pareto(self.step_s, self.needed_bytes)))


def memory_limit(job: Job) -> float:
    """The most that ``PredictedLayout.needed_bytes`` may be."""
    return MEMORY_SHARE * (job.memory_bytes or job.device.memory_bytes)


def compare(job: Job) -> LayoutTable:
    """Predictions for all layouts of ``job``. Raises LayoutError if none is legal."""
    space = Space(job)
    if not space.layouts and (pin := space.nearest_pin()):
        given, rule, nearest = pin
        raise LayoutError(job.given_text, f"{given}: {rule}", nearest)
    return _completed(job, _predicted(job, space.layouts, space.refused))


def with_other_memory(job: Job, compared: LayoutTable) -> LayoutTable:
    """``compare(job)``, where ``compared`` are the layouts of the same job for another memory. Raises as ``compare``."""
    if job.pins.get("recompute") == PARTIAL or job.pins.get(
        OFFLOAD
    ):  # the layouts that it is made from are not in the table
        return compare(job)
    kept = np.array([layout.recompute != PARTIAL and not layout.offload for layout in compared.layouts])
    modes = LayoutTable(
        layouts=[layout for layout, is_kept in zip(compared.layouts, kept, strict=True) if is_kept],
        step_s=compared.step_s[kept],
        needed_bytes=compared.needed_bytes[kept],
        refused=[each for each in compared.refused if each[:2] not in (("recompute", PARTIAL), (OFFLOAD, True))],
    )
    return _completed(job, modes)


def _predicted(job: Job, layouts: Sequence[Layout], refused: Sequence[tuple[str, Value, str]]) -> LayoutTable:
    if not layouts:
        return LayoutTable(layouts=(), step_s=np.zeros(0), needed_bytes=np.zeros(0), refused=refused)
    times = layout_time(layouts).total
    return LayoutTable(layouts=layouts, step_s=times, needed_bytes=needed_bytes(job, layouts), refused=refused)


def needed_bytes(job: Job, layouts: Sequence[Layout]) -> Numbers:
    """Counted bytes of ``layouts``, as traces of some layouts of ``job`` correct them. Partial recompute is corrected as much
    nearer to none than to full recompute as it is counted."""
    counted, factors = peak_memory(layouts).counted, job.traced_over_counted
    if not factors:
        return counted
    needs = counted * [factors[layout.recompute] for layout in layouts]
    partial = [index for index, layout in enumerate(layouts) if layout.recompute == PARTIAL]
    if partial:
        none, full = _ends([layouts[index] for index in partial])
        share = (counted[partial] - full) / (none - full)
        between = factors["full"] * full * (1 - share) + factors["none"] * none * share
        needs[partial] = factors[PARTIAL] * between
    return needs


def _ends(layouts: Sequence[Layout]) -> tuple[Numbers, Numbers]:
    """Counted bytes of ``layouts`` without recompute, and with full recompute."""
    none, full = (
        peak_memory([replace(layout, recompute=mode, recomputed_blocks=()) for layout in layouts]).counted
        for mode in ("none", "full")
    )
    return none, full


def _counted_limits(job: Job, layouts: Sequence[Layout]) -> float | Numbers:
    """The counted bytes with which partial recompute of ``layouts`` fits as corrected."""
    limit, factors = memory_limit(job), job.traced_over_counted
    if not factors or not layouts:
        return limit
    none, full = _ends(layouts)
    saved = np.maximum(1.0, factors["none"] * none - factors["full"] * full)  # bytes; zbv saves none
    share = (limit / factors[PARTIAL] - factors["full"] * full) / saved
    return full + share * (none - full)


def _completed(job: Job, modes: LayoutTable) -> LayoutTable:
    """``modes``, layouts without partial recompute, and those with it or with offload that fit the memory of ``job``."""
    pin = job.pins.get("recompute")
    partial = _predicted(job, _partial(job, modes.layouts, modes.needed_bytes), ())
    moved, rule_of_offload = list[Layout](), ""
    if job.traced_over_counted:
        rule_of_offload = "what waits in the memory of the host is not traced"
    elif OFFLOAD not in job.pins:
        moved, rule_of_offload = with_offload(job, modes.layouts, modes.needed_bytes, memory_limit(job))
    # those that partial recompute was made from have another value than the pin
    tables = [partial] if pin == PARTIAL else [modes, partial, _predicted(job, moved, ())]
    layouts = [layout for table in tables for layout in table.layouts]
    if not layouts:
        raise LayoutError(
            job.given_text,
            "axes divide the devices, the batch, the heads, the experts and the layers, and no layout does"
            + ("; partial recompute is that of fewer blocks than a stage has" if pin == PARTIAL else ""),
            "a batch that more numbers divide, such as a power of two, or fewer pins",
        )
    refused = modes.refused
    if rule_of_offload:
        refused = (*refused, (OFFLOAD, True, rule_of_offload))
    if pin is None and not partial.layouts:
        rule = "each layout fits without recompute, or not with full recompute either"
        refused = (*refused, ("recompute", PARTIAL, rule))
    return LayoutTable(
        layouts=layouts,
        step_s=np.concatenate([table.step_s for table in tables]),
        needed_bytes=np.concatenate([table.needed_bytes for table in tables]),
        refused=refused,
    )


def _partial(job: Job, layouts: Sequence[Layout], needs: Numbers) -> list[Layout]:
    """Layouts with partial recompute, made from those of ``layouts`` without recompute, which need so many bytes."""
    pin = job.pins.get("recompute")
    if pin == PARTIAL:
        count = job.pins.get(RECOMPUTED_BLOCKS)
        return (
            least_recompute(layouts, _counted_limits(job, layouts), is_pinned=True)
            if count is None
            else pinned_recompute(layouts, int(count))
        )
    over = [
        layout
        for layout, need in zip(layouts, needs, strict=True)
        if layout.recompute == "none" and need > memory_limit(job)
    ]
    return [] if pin or job.pins.get(OFFLOAD) else least_recompute(over, _counted_limits(job, over))


def choose(job: Job, compared: LayoutTable) -> SearchResult:
    """The fastest layout of ``job`` that fits, among those that are ``compared``. The same job has the same result."""
    times, needs, limit = compared.step_s, compared.needed_bytes, memory_limit(job)
    fits = needs <= limit
    best = compared.fastest(fits) if fits.any() else None
    simplest = None
    if best is not None:
        near = np.flatnonzero(fits & (times <= times[best] * (1 + _SAME)))
        least = min(map(int, near), key=lambda index: (_complexity(compared.layouts[index]), times[index]))
        simplest = compared.row(least)
    return SearchResult(
        best=None if best is None else compared.row(best),
        simplest=simplest,
        num_layouts=len(compared.layouts),
        num_fitting=int(fits.sum()),
        limit_bytes=limit,
        changes=tuple(
            (axis, value, compared.row(index))
            for axis, value, index in _changes(compared.layouts, fits, needs, best, compared.fastest)
        ),
        refused=compared.refused,
        pareto=compared.pareto(),
        smallest=compared.row(int(np.argmin(needs))),
        without_limit=compared.row(compared.fastest(np.ones(len(times), bool))),
    )


def _changes(
    layouts: Sequence[Layout],
    fits: NDArray[np.bool_],
    needs: Numbers,
    best: int | None,
    fastest: Callable[[NDArray[np.bool_]], int],
) -> Iterator[tuple[str, Value, int]]:
    """For each other value of an axis, the best layout with it: the fastest that fits, else the one that needs least memory."""
    for axis in AXES:
        values = [getattr(layout, axis) for layout in layouts]
        for value in sorted(set(values) - {None}, key=float if axis not in WORDS else str):
            if best is not None and value == values[best]:
                continue
            inside = np.array([each == value for each in values], bool)
            fitting = inside & fits
            smallest = int(np.flatnonzero(inside)[np.argmin(needs[inside])])
            yield axis, value, fastest(fitting) if fitting.any() else smallest


def _complexity(layout: Layout) -> tuple[float, ...]:
    """Fewer axes first, then fewer ranks of each; recompute and sharding count as axes."""
    axes = (layout.pp, layout.cp, layout.tp, layout.stages_per_rank, layout.ep)
    used = sum(axis > 1 for axis in axes) + (layout.state_ranks > 1) + (*RECOMPUTE, PARTIAL).index(layout.recompute)
    used += layout.offload
    return (used, *axes, layout.zero, layout.state_ranks, layout.micro_batch, SCHEDULES.index(layout.passes))


def _pareto(times: Numbers, needs: Numbers) -> list[int]:
    """From the fastest to the smallest."""
    found: list[int] = []
    least = np.inf
    for index in np.lexsort((needs, times)):
        if needs[index] < least * (1 - _SAME):
            found.append(int(index))
            least = needs[index]
    return found
