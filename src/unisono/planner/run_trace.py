"""The ranks of a configured run, traced under one plan after the other."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from unisono.config import Resolved
from unisono.dist import JobSpec, World
from unisono.observe.events import EventLog
from unisono.plan.options import PlanOptions
from unisono.plan.plan import Plan
from unisono.train.build import build_data, build_trainer, resolve_run
from unisono.train.config import RunConfig
from unisono.train.dry_run import RankMemory
from unisono.train.setup import resolve_plan

# (options, number of ranks, ranks to trace) -> the plan, and the memory of the ranks
Trace = Callable[[PlanOptions, int, Sequence[int]], tuple[Plan, list[RankMemory]]]


@contextmanager
def open_trace(resolved: Resolved[RunConfig]) -> Generator[Trace]:
    """A function that traces ranks of the configured run under given options of its plan. Its data are opened once.

    The function raises PlanError for options that are no legal plan, and what ``train.dry_run.trace_ranks`` raises.
    """
    world = World.alone(JobSpec())
    config = resolve_run(resolved, world).value
    config = replace(config, run=replace(config.run, resume="never"))
    data = build_data(config)
    with (
        TemporaryDirectory(prefix="unisono-dry-run-") as folder,
        EventLog(Path(folder) / "events.jsonl", rank=0, run_id="dry-run", attempt=1) as events,
    ):

        def trace(options: PlanOptions, num_ranks: int, ranks: Sequence[int]) -> tuple[Plan, list[RankMemory]]:
            options = replace(options, compile="off")
            plan = resolve_plan(options, JobSpec(world_size=num_ranks))[1]
            given = replace(config, plan=options)
            trainer = build_trainer(given, data, plan, world=world, events=events, provenance={}, builds_early=False)
            return plan, trainer.dry_run(num_ranks, ranks)

        yield trace
