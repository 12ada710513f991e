"""All that a search says of its best layout and of the others, for text, JSON and the page. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from unisono.errors import PlanError
from unisono.observe.run_summary import format_gib
from unisono.planner.decision_flips import Sensitivity
from unisono.planner.finalists import Finalists
from unisono.planner.layout import Layout
from unisono.planner.layout_space import Job
from unisono.planner.layout_strategy import plan_of
from unisono.planner.learned import Learned
from unisono.planner.peak_memory import ALLOCATOR_FACTOR, StageMemory, stage_memory
from unisono.planner.search import PredictedLayout, SearchResult, needed_bytes
from unisono.planner.simulate import Prediction, predict
from unisono.planner.why_not import why_not


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A search with what follows from it.

    Attributes:
        job: What was searched for; if layouts were traced, with corrected counts.
        found: The result of the search.
        sensitivity: What would change the decision, and what fewer devices would do.
        prediction: That of the best layout; None if none fits.
        stages: Memory of ranks of its pipeline, by name; empty if none fits.
        reasons: For each of ``found.changes``, why it was not chosen.
        refused_by_runs: Why unisono's own runs do not have the best layout; empty if they do.
        learned: By what earlier runs correct the time of the best layout.
        finalists: The layouts that were traced; None if none was to be. Memory of the others is then as these correct it.
    """

    job: Job
    found: SearchResult
    sensitivity: Sensitivity
    prediction: Prediction | None
    stages: Mapping[str, StageMemory]
    reasons: Sequence[str]
    refused_by_runs: str = ""
    learned: Learned = Learned()
    finalists: Finalists | None = None

    @property
    def best(self) -> PredictedLayout | None:
        """The fastest that fits; None if none fits."""
        return self.found.best

    @property
    def tokens_per_step(self) -> float:
        """Tokens of all ranks in a step."""
        layout = self.found.smallest.layout
        return layout.global_batch * layout.seq_len

    @property
    def fits_with(self) -> str:
        """How many blocks the best layout recomputes, if not all or none, and what that saves of each; else empty."""
        layout = self.best.layout if self.best else None
        if layout is None or layout.recompute != "partial":
            return ""
        ends = [replace(layout, recompute=mode, recomputed_blocks=()) for mode in ("none", "full")]
        none, full = _predicted(self.job, ends, self.finalists)
        counts, stages = layout.recomputed_blocks, len(layout.recomputed_blocks)
        where = "" if stages == 1 else f", {min(counts)} to {max(counts)} of each of {stages} stages"
        over = none.needed_bytes - self.found.limit_bytes
        without = f"without any it would need {format_gib(over)} too much" if over > 0 else "it would fit without any"
        assert self.prediction is not None
        slower = f"with all a step would take {full.step_s / self.prediction.step_s - 1:.1%} longer"
        return f"fits with {sum(counts)} of {layout.model.layers} blocks recomputed{where}; {without}, {slower}"

    @staticmethod
    def of(job: Job, found: SearchResult, sensitivity: Sensitivity, finalists: Finalists | None = None) -> Answer:
        """The answer of a search for ``job``."""
        if found.best is None:
            return Answer(
                job=job,
                found=found,
                sensitivity=sensitivity,
                prediction=None,
                stages={},
                reasons=["does not fit"] * len(found.changes),
                finalists=finalists,
            )
        layout = found.best.layout
        best, *others = _predicted(job, [layout, *(each.layout for _, _, each in found.changes)], finalists)
        refused = ""
        try:
            plan_of(layout)
        except PlanError as error:
            refused = "; ".join(f"{problem.given}: {problem.rule}" for problem in error.problems)
        return Answer(
            job=job,
            found=found,
            sensitivity=sensitivity,
            prediction=best,
            stages={} if "traced" in best.memory else stage_memory(layout),
            reasons=[why_not(best, other, found.limit_bytes) for other in others],
            refused_by_runs=refused,
            learned=job.learned.of(layout.shared_axes),
            finalists=finalists,
        )


def _predicted(job: Job, layouts: Sequence[Layout], finalists: Finalists | None) -> list[Prediction]:
    """Predictions with the memory as traced, of layouts that were not as traces of others correct it."""
    found = predict(layouts)
    if finalists is None or finalists.refused:
        return found
    corrected: list[Prediction] = []
    for layout, prediction, needs in zip(layouts, found, needed_bytes(job, layouts), strict=True):
        finalist = finalists.of(layout)
        if finalist is not None and not finalist.traced.refused:
            peak, room = finalist.traced.peak_bytes, layout.device.memory_bytes - finalist.traced.peak_bytes
            memory = {"traced": peak, "allocator": min(peak * (ALLOCATOR_FACTOR - 1), max(0.0, room))}
        else:
            factor = float(needs) / prediction.needed_bytes
            memory = {name: size * factor for name, size in prediction.memory.items()}
        corrected.append(replace(prediction, memory=memory))
    return corrected
