"""The fastest plan of a configured run for the ranks of this host, among plans whose ranks are tried on one device.

First each way to share the work between the ranks is tried as it is configured otherwise; one that does not fit is tried with
smaller micro-batches and more recompute. Then the micro-batch and recompute of the fastest are changed as long as that pays. A
plan is traced before it is timed, so that none is run that does not fit. What the user set stays as it is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Final, Literal

import torch

from unisono.config import Resolved
from unisono.dist import JobSpec
from unisono.errors import ConfigError, PlanError
from unisono.measure.calibration import Calibration
from unisono.plan.options import PlanOptions
from unisono.plan.plan import Plan, load_fields, option_of
from unisono.plan.resolve import with_strategy_file
from unisono.planner.fit import MAX_TENSOR_RANKS
from unisono.planner.layout_space import RECOMPUTE
from unisono.planner.learned import Learned
from unisono.planner.run_trials import RunTrials
from unisono.planner.timed_plan import TimedPlan, predict_step
from unisono.train.config import RunConfig
from unisono.train.setup import resolve_plan

_SHARED_FIELDS: Final = ("dp_shard", "zero", "tp", "sequence_parallel", "cp", "ep", "pp", "schedule")
_SEARCHED: Final = (*_SHARED_FIELDS, "micro_batch", "recompute")
_STEP_S: Final = attrgetter("step_s")
_GAIN: Final = 1.01  # what a change of micro-batch or recompute must bring: less lies within the scatter of times


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A plan that was considered.

    Attributes:
        settings: Settings of the plan that differ from the configuration, by name.
        plan: The plan; None where the settings make no legal one.
        peak_bytes: Peak bytes of tensors of the rank that holds most; None where it was not traced.
        confidence: Whether that is ``exact``, from a trace, or ``measured`` in a real step.
        timed: The predicted step; None where it was not timed.
        refused: Why it was not timed.
        learned: The correction of the prediction by earlier runs.
    """

    settings: Mapping[str, Any]
    plan: Plan | None = None
    peak_bytes: int | None = None
    confidence: Literal["exact", "measured"] = "exact"
    timed: TimedPlan | None = None
    refused: str = ""
    learned: Learned = Learned()

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step, corrected by earlier runs; infinity where it was not timed."""
        return float("inf") if self.timed is None else self.timed.step_s * self.learned.factor


@dataclass(slots=True)
class FastestPlanSearch:
    """A search for the fastest plan of a run.

    Attributes:
        trials: The run whose plans are tried.
        options: Options of the plan as configured.
        pinned: Names of options that stay as they are.
        num_ranks: Ranks of the job.
        memory_bytes: Bytes that the tensors of a rank may take.
        num_experts: Experts of a layer of the model; 0 without.
        links: Measured speed of the links between the ranks.
        budget_s: Seconds after which no further plan is tried.
        tried: Called with each candidate.
        learned: Returns the correction of a plan's prediction by earlier runs.
        candidates: All that were considered, each plan once.
    """

    trials: RunTrials
    options: PlanOptions
    pinned: frozenset[str]
    num_ranks: int
    memory_bytes: int
    num_experts: int
    links: Calibration
    budget_s: float
    tried: Callable[[Candidate], None]
    learned: Callable[[Plan], Learned] = lambda plan: Learned()
    candidates: list[Candidate] = field(default_factory=list[Candidate])
    _ends_s: float = 0.0

    def run(self) -> Candidate | None:
        """The fastest candidate; None if none fits.

        Raises:
            PlanError: The configured plan is not legal.
            ConfigError: It cannot be traced, or the links of a plan were not measured.
        """
        self._ends_s = time.monotonic() + self.budget_s
        for settings in self._ways_to_share():
            self._try_lighter(settings)
        best = self._best()
        while best is not None:
            faster = min(map(self._try, self._neighbours(best)), key=_STEP_S, default=best)
            if faster.step_s * _GAIN > best.step_s:
                break
            best = faster
        return self._best()

    def _best(self) -> Candidate | None:
        timed = [candidate for candidate in self.candidates if candidate.timed is not None]
        return min(timed, key=_STEP_S, default=None)

    def _ways_to_share(self) -> Iterator[dict[str, Any]]:
        """Settings of the axes: as configured, then all that differ in what is not pinned, the simplest first.

        Beside pinned axes the ranks that these leave are shared.
        """
        yield {}
        free = [name for name in _SHARED_FIELDS if name not in self.pinned]
        configured, _ = with_strategy_file(self.options)
        sizes = {axis: getattr(configured, axis) for axis in ("tp", "pp", "cp") if axis in self.pinned}
        fixed = {axis: size for axis, size in sizes.items() if size > 1}
        rest = [{"sequence_parallel": False}, {"sequence_parallel": True}] if "tp" in fixed else [{}]
        for given in (
            split | fixed | more
            for split in _splits(self.num_ranks // math.prod(fixed.values()), self.num_experts)
            if all(split[axis] == 1 for axis in fixed)
            for more in rest
        ):
            changed = self._differing(given)
            if changed and all(name in free for name in changed):
                if given["pp"] > 1 and "micro_batch" not in self.pinned:
                    changed |= self._differing({"micro_batch": self._micro_batch_of_stages(given)})
                yield changed

    def _micro_batch_of_stages(self, given: Mapping[str, Any]) -> int:
        """The largest micro-batch of which a step has twice as many as the pipeline has ranks."""
        replicas = self.num_ranks // (given["tp"] * given["pp"] * given["cp"])
        return max(1, self.options.global_batch // replicas // (2 * given["pp"]))

    def _neighbours(self, best: Candidate) -> Iterator[dict[str, Any]]:
        assert best.plan is not None
        micro, mode = best.plan.batch.micro_batch, best.plan.recompute.mode
        changes: list[dict[str, Any]] = [{"micro_batch": 2 * micro}]
        if micro > 1:
            changes.append({"micro_batch": micro // 2})
        place = RECOMPUTE.index(mode)
        changes += [{"recompute": other} for other in (*RECOMPUTE[:place][-1:], *RECOMPUTE[place + 1 :][:1])]
        for change in changes:
            settings = self._differing({**best.settings, **change})
            if self.pinned.isdisjoint(change):
                yield settings

    def _try_lighter(self, settings: Mapping[str, Any]) -> None:
        """Try ``settings``; where they do not fit, with a micro-batch of one, then with more recompute."""
        steps: list[dict[str, Any]] = [{}, {"micro_batch": 1}, {"recompute": "selective"}, {"recompute": "full"}]
        for change in steps:
            if not self.pinned.isdisjoint(change):
                continue
            settings = self._differing({**settings, **change})
            candidate = self._try(settings)
            if candidate.timed is not None or candidate.peak_bytes is None:
                return

    def _differing(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        configured, _ = with_strategy_file(self.options)
        return {name: value for name, value in settings.items() if value != getattr(configured, name)}

    def _try(self, settings: Mapping[str, Any]) -> Candidate:
        found = self._considered(settings)
        if found not in self.candidates:  # else the same plan by other settings
            self.candidates.append(found)
            self.tried(found)
        return found

    def _known(self, plan: Plan) -> Candidate | None:
        """The candidate with this plan."""
        known = (candidate for candidate in self.candidates if candidate.plan is not None)
        return next((candidate for candidate in known if candidate.plan == plan), None)

    def _considered(self, settings: Mapping[str, Any]) -> Candidate:
        if time.monotonic() > self._ends_s and any(candidate.timed for candidate in self.candidates):
            return Candidate(settings=settings, refused="not tried: the time for the search was over")
        options = replace(self.options, **settings)
        try:
            plan = resolve_plan(options, JobSpec(world_size=self.num_ranks))[1]
            if (same := self._known(plan)) is not None:
                return same
            _, ranks = self.trials.trace(options, self.num_ranks, ())
            largest = max(ranks, key=lambda rank: rank.peak.bytes)
            peak_bytes = largest.peak.bytes
            traced = Candidate(settings=settings, plan=plan, peak_bytes=peak_bytes, confidence=largest.confidence)
            if peak_bytes > self.memory_bytes:
                return replace(traced, refused=f"{(peak_bytes - self.memory_bytes) / 2**30:.4g} GiB too much")
            timings = self.trials.time(options, self.num_ranks)
        except (PlanError, ConfigError) as error:
            if not settings:
                raise
            return Candidate(settings=settings, refused=f"not possible: {error.problems[0].given}")
        except torch.OutOfMemoryError:
            return Candidate(
                settings=settings, refused="out of memory: kernels and the allocator need more than tensors"
            )
        # not within the try: links that were not measured are no reason to pass over a plan
        timed = predict_step(plan, timings, self.links)
        return replace(traced, timed=timed, learned=self.learned(plan))


def _splits(num_ranks: int, num_experts: int) -> Iterator[dict[str, Any]]:
    """All ways to share the work of a model between ``num_ranks`` with none, one axis or two, the simplest first.

    Experts are shared by ranks that share the other parameters too.
    """
    plain: dict[str, Any] = {"dp_shard": 1, "tp": 1, "cp": 1, "ep": 1, "pp": 1, "sequence_parallel": False}
    if num_ranks == 1:
        yield plain
        return
    sizes = [size for size in range(2, num_ranks + 1) if num_ranks % size == 0]
    of_model: list[tuple[int, dict[str, Any]]] = [(1, {})]
    for size in sizes:
        if size <= MAX_TENSOR_RANKS:
            of_model += [(size, {"tp": size}), (size, {"tp": size, "sequence_parallel": True})]
        of_model += [(size, {"pp": size, "schedule": schedule}) for schedule in ("1f1b", "interleaved", "zbv")]
        of_model.append((size, {"cp": size}))
    for size, axes in of_model:
        rest = num_ranks // size
        yield {**plain, **axes}
        if rest > 1:
            yield {**plain, **axes, "dp_shard": rest}
            yield {**plain, **axes, "dp_shard": rest, "zero": 1}
        for ranks in sizes if num_experts else ():
            if rest % ranks == 0 and num_experts % ranks == 0:
                yield {**plain, **axes, "dp_shard": rest, "ep": ranks}


def changes_in_words(settings: Mapping[str, Any]) -> str:
    """``settings`` as they are given on the command line, without ``plan.``."""
    return " ".join(f"{name}={str(value).lower()}" for name, value in settings.items()) or "as configured"


def pinned_options(resolved: Resolved[RunConfig]) -> frozenset[str]:
    """Names of the options that a search may change and that the user set: by settings or a strategy file."""
    chosen = {name for name, origin in resolved.origins.items() if origin not in ("default", "planned")}
    given = {name.removeprefix("plan.") for name in chosen if name.startswith("plan.")}
    given |= {option_of(field) for field in load_fields(file)} if (file := resolved.value.plan.file) else set()
    return frozenset(given) & frozenset(_SEARCHED)


def kept_fields(options: PlanOptions) -> list[str]:
    """Fields of the strategy file that no option sets, such as ``pipeline.layers_per_stage``: every plan of a search has them."""
    return [field for field in with_strategy_file(options)[1] if not option_of(field)]


def as_json(candidates: Sequence[Candidate]) -> list[dict[str, Any]]:
    """One object for each candidate."""
    return [
        {
            "settings": {f"plan.{name}": value for name, value in candidate.settings.items()},
            "peak_bytes": candidate.peak_bytes,
            "peak_confidence": None if candidate.peak_bytes is None else candidate.confidence,
            "refused": candidate.refused or None,
            "step_s": None if (timed := candidate.timed) is None else candidate.step_s,
            "learned_factor": None if timed is None else candidate.learned.factor,
            "learned_runs": None if timed is None else candidate.learned.runs,
            "work_s": None if timed is None else timed.work_s,
            "communication_s": None if timed is None else dict(timed.communication_s),
            "bubble_s": None if timed is None else timed.bubble_s,
            "straggler_s": None if timed is None else timed.straggler_s,
        }
        for candidate in candidates
    ]
