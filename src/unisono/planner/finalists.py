"""The layouts that a search might answer with, and their traced memory: what is counted is corrected until one fits.

The fastest layout that fits is traced (``traced_layout``). If it does not fit as traced, bytes traced over bytes counted correct
all layouts with the same kind of recompute, and the search chooses again. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from unisono.planner.layout import Layout, Recompute
from unisono.planner.layout_space import PARTIAL, RECOMPUTE, Job
from unisono.planner.model_shape import ModelShape
from unisono.planner.peak_memory import peak_memory
from unisono.planner.search import LayoutTable, PredictedLayout, compare, memory_limit, needed_bytes

MOST_FINALISTS: Final = 8
_EQUAL: Final = 1e-9  # as times of many layouts are summed in another order
_NEAR: Final = (
    1.1  # of the limit: what corrected counts put further above it is not traced to see whether it fits after all
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedMemory:
    """What the rank of a layout that needs most holds at its peak.

    Attributes:
        peak_bytes: Bytes of its tensors.
        rank: Its place in the pipeline.
        refused: Why there is no trace; empty if there is one. The other fields are then 0.
    """

    peak_bytes: float = 0
    rank: int = 0
    refused: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finalist:
    """A traced layout.

    Attributes:
        layout: The layout.
        step_s: Predicted seconds of a step.
        counted_bytes: What it needs as counted from shapes.
        traced: Its traced memory.
        limit_bytes: The most that it may need.
    """

    layout: Layout
    step_s: float
    counted_bytes: float
    traced: TracedMemory
    limit_bytes: float

    @property
    def needed_bytes(self) -> float:
        """As traced; of a layout without a trace no memory is enough."""
        return np.inf if self.traced.refused else self.traced.peak_bytes

    @property
    def fits(self) -> bool:
        """Whether it fits as traced."""
        return self.needed_bytes <= self.limit_bytes

    @property
    def predicted(self) -> PredictedLayout:
        """The layout with the memory as traced."""
        return PredictedLayout(layout=self.layout, step_s=self.step_s, needed_bytes=self.needed_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finalists:
    """The traced layouts of a search.

    Attributes:
        traced: In the order in which they were traced.
        nearest: If none fits, the fastest that fits by corrected counts; None if none does.
        refused: Why no layout of the job was traced; empty if some were.
    """

    traced: Sequence[Finalist] = ()
    nearest: PredictedLayout | None = None
    refused: str = ""

    def of(self, layout: Layout) -> Finalist | None:
        """The trace of ``layout``; None if it was not traced."""
        return next((each for each in self.traced if each.layout == layout), None)


def untraceable(model: ModelShape) -> str:
    """Why no model of unisono's own that can be built from a shape is like ``model``; empty if one is."""
    for is_other, reason in (
        (model.traced is not None, "the model is one of your own"),
        (not model.gated, "feed-forward layers of the model have no gate"),
        (model.kv_rank > 0, "the model has latent attention"),
        (model.shared_ffn > 0, "all tokens go to a shared expert of the model"),
        (model.dense_layers > 0 or model.expert_period > 1, "some blocks of the model have no experts"),
        (
            model.other_params not in (0, (2 * model.layers + 1) * model.hidden),
            "the model has biases or other parameters",
        ),
    ):
        if is_other:
            return f"{reason}, and a trace is of unisono's gpt or moe"
    return ""


@dataclass(slots=True)
class _Search:
    """A search whose counts are corrected by traces."""

    job: Job
    memory_of: Callable[[Layout], TracedMemory]
    traced: list[Finalist] = field(default_factory=list[Finalist])
    factors: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def corrected(self) -> Job:
        """The job with corrected counts; of kinds of recompute that were not traced by the least factor."""
        least = min((factor for kind, factor in self.factors.items() if kind != PARTIAL), default=1.0)
        factors = {kind: self.factors.get(kind, least) for kind in RECOMPUTE} | {
            PARTIAL: self.factors.get(PARTIAL, 1.0)
        }
        return replace(self.job, traced_over_counted=factors)

    def table(self) -> LayoutTable:
        """All layouts as corrected; the traced ones as traced."""
        table = compare(self.corrected)
        needs = table.needed_bytes.copy()
        for each in self.traced:
            for index in _places_of(table, each.layout):
                needs[index] = each.needed_bytes
        known = [table.layouts[index] for index in range(len(needs))]
        # those whose recomputed blocks were found for an earlier correction
        lost = [each for each in self.traced if each.layout not in known]
        return LayoutTable(
            layouts=[*known, *(each.layout for each in lost)],
            step_s=np.append(table.step_s, [each.step_s for each in lost]),
            needed_bytes=np.append(needs, [each.needed_bytes for each in lost]),
            refused=table.refused,
        )

    def trace(self, table: LayoutTable, index: int) -> None:
        """Trace the layout at ``index``. If it does not fit, the same layout without recompute and with full recompute, which
        takes little time (``traced_layout``), correct the counts of others."""
        layout = table.layouts[index]
        made = Finalist(
            layout=layout,
            step_s=float(table.step_s[index]),
            counted_bytes=float(peak_memory([layout]).counted[0]),
            traced=self.memory_of(layout),
            limit_bytes=memory_limit(self.job),
        )
        self.traced.append(made)
        if made.traced.refused:
            return
        kinds: list[Recompute] = []
        if layout.recompute != PARTIAL:
            kinds.append(layout.recompute)
        if layout.recompute == PARTIAL or (not made.fits and layout.passes != "zbv"):
            kinds += ("none", "full")
        for kind in dict.fromkeys(kinds):
            # a pipeline with ZeRO 1 takes the fewest traces, and is what an answer often is
            zero = min(layout.zero, 1) if layout.pp > 1 and layout.recompute != PARTIAL else layout.zero
            other = replace(layout, recompute=kind, recomputed_blocks=(), zero=zero)
            if kind == layout.recompute:
                other, traced = layout, made.traced
            else:
                traced = self.memory_of(other)
            if not traced.refused:
                self.factors[kind] = traced.peak_bytes / float(peak_memory([other]).counted[0])
        if layout.recompute == PARTIAL:
            self.factors[PARTIAL] = 1.0
            self.factors[PARTIAL] = made.traced.peak_bytes / float(needed_bytes(self.corrected, [layout])[0])

    def next_of(self, table: LayoutTable) -> int | None:
        """The layout to be traced next: the fastest that fits. If it was traced, the one that needs least of those that are
        faster and a little too large by corrected counts; if none fits, the one that needs least. None: nothing more to learn."""
        limit, needs = memory_limit(self.job), table.needed_bytes
        untraced = np.ones(len(needs), bool)
        for each in self.traced:
            untraced[_places_of(table, each.layout)] = False
        if not (needs <= limit).any():
            least = int(np.argmin(needs))
            return least if untraced[least] else None
        best = table.fastest(needs <= limit)
        if untraced[best]:
            return best
        faster = np.flatnonzero(untraced & (table.step_s < table.step_s[best]) & (needs <= _NEAR * limit))
        return int(faster[np.argmin(needs[faster])]) if len(faster) else None


def trace_finalists(job: Job, memory_of: Callable[[Layout], TracedMemory]) -> tuple[Job, LayoutTable, Finalists]:
    """The job with corrected counts, its layouts, and those that were traced.

    Layouts that keep activations on the host are left out. The table has no layout that fits but was not traced and would be
    the best; nor any that fits if none of the traced ones does.

    Args:
        job: The job, whose model is not ``untraceable``.
        memory_of: Traces a layout.

    Raises:
        LayoutError: No layout is legal.
    """
    search = _Search(job=job, memory_of=memory_of)
    table = search.table()
    while len(search.traced) < MOST_FINALISTS and (index := search.next_of(table)) is not None:
        search.trace(table, index)
        table = search.table()
    fitting = [each for each in search.traced if each.fits]
    limit = memory_limit(job)
    nearest = None if fitting else table.best(limit)
    fastest_s = min((each.step_s for each in fitting), default=np.inf)
    unknown = (table.needed_bytes <= limit) & (table.step_s <= fastest_s * (1 + _EQUAL))
    for each in search.traced:
        unknown[_places_of(table, each.layout)] = False
    kept = ~unknown
    table = LayoutTable(
        layouts=[layout for layout, is_kept in zip(table.layouts, kept, strict=True) if is_kept],
        step_s=table.step_s[kept],
        needed_bytes=table.needed_bytes[kept],
        refused=table.refused,
    )
    return search.corrected, table, Finalists(traced=search.traced, nearest=nearest)


def _places_of(table: LayoutTable, layout: Layout) -> list[int]:
    return [index for index, each in enumerate(table.layouts) if each == layout]
