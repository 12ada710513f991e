"""The ranks of a configured run under one plan after the other: traced for their memory, and timed."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from unisono.config import Resolved
from unisono.dist import JobSpec, World
from unisono.observe.events import EventLog
from unisono.plan.options import PlanOptions
from unisono.plan.plan import Plan
from unisono.storage.scratch import scratch_folder
from unisono.train.build import RunData, build_data, build_trainer, resolve_run
from unisono.train.config import RunConfig
from unisono.train.dry_run import RankMemory
from unisono.train.setup import resolve_plan

if TYPE_CHECKING:
    from unisono.train.rank_timing import RankTiming
    from unisono.train.trainer import Trainer


@dataclass(frozen=True, kw_only=True, slots=True)
class RunTrials:
    """A configured run, whose plan can be tried. Its data are open.

    Attributes:
        config: The configuration.
        data: Its data.
        events: Where trials write events.
    """

    config: RunConfig
    data: RunData
    events: EventLog

    def trace(self, options: PlanOptions, num_ranks: int, ranks: Sequence[int] = ()) -> tuple[Plan, list[RankMemory]]:
        """The uncompiled plan of ``num_ranks`` ranks, and the memory of ``ranks``. Raises as ``train.dry_run.trace_ranks``."""
        options = replace(options, compile="off")
        plan, trainer = self._trainer(options, num_ranks)
        return plan, trainer.dry_run(num_ranks, ranks)

    def time(self, options: PlanOptions, num_ranks: int) -> list[RankTiming]:
        """Time the ranks of a job of ``num_ranks`` on this device. Raises as ``train.rank_timing.time_ranks``."""
        return self._trainer(options, num_ranks)[1].time_ranks(num_ranks)

    def _trainer(self, options: PlanOptions, num_ranks: int) -> tuple[Plan, Trainer]:
        plan = resolve_plan(options, JobSpec(world_size=num_ranks))[1]
        given = replace(self.config, plan=options)
        alone = World.alone(JobSpec())
        return plan, build_trainer(
            given, self.data, plan, world=alone, events=self.events, provenance={}, builds_early=False
        )


@contextmanager
def open_trials(resolved: Resolved[RunConfig]) -> Generator[RunTrials]:
    """Open the data of the configured run, to try plans of it. Raises what opening a run's data raises."""
    config = resolve_run(resolved, World.alone(JobSpec())).value
    config = replace(config, run=replace(config.run, resume="never"))
    data = build_data(config)
    with (
        scratch_folder("unisono-dry-run-") as folder,
        EventLog(folder / "events.jsonl", rank=0, run_id="dry-run", attempt=1) as events,
    ):
        yield RunTrials(config=config, data=data, events=events)
