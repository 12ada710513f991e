"""Steps of single ranks of a job, run with values on one device: how long each would take if the other ranks answered at once.

The run's own code is run, in a world of which this process is the only rank (``train.simulated_rank``). Collectives return at
once, with values that have no meaning; what they would have sent is counted, so that the links' measured speed tells the rest
(``planner.timed_plan``).
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from unisono.data.loading.loader import StepBatch, to_device
from unisono.device.torch_adapters import adapter_of
from unisono.parallel.timed_collectives import recording_exposed_time
from unisono.parallel.traffic import GroupTraffic
from unisono.plan.pipeline_schedule import Kind
from unisono.train.dry_run import plan_of_ranks, ranks_that_show, ranks_to_trace, trace_places
from unisono.train.gradient_sync import build_comm_stats
from unisono.train.loop_assembly import build_train_step
from unisono.train.simulated_rank import assembled_rank
from unisono.train.step import TrainStep
from unisono.train.whole_model import full_copy

if TYPE_CHECKING:
    from collections.abc import Generator

    from unisono.parallel.pipeline.executor import HiddenStates
    from unisono.plan.options import PlanOptions
    from unisono.plan.pipeline_schedule import Action
    from unisono.plan.plan import Plan
    from unisono.train.assembly import RunInputs, RunParts

# the first makes the optimizer's state, the second is the first with it; kernels are chosen in both
_WARM_UP_STEPS: Final = 2
_LEAST_STEPS: Final = 3
_MOST_STEPS: Final = 50


class PassDuration(NamedTuple):
    """Seconds that one micro-batch takes in a kind of pass of a pipeline stage, the median. Of kind F, B, I or W (``Action``)."""

    kind: Kind
    stage: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTiming:
    """Time of a step of one rank, without the time in which it would wait for others.

    Attributes:
        rank: The rank.
        stages: Numbers of its pipeline stages, from 0; none without a pipeline.
        step_s: Seconds of a step, the median.
        steps: Steps that were timed.
        spread_frac: Distance of the quartiles over the median.
        traffic: What the rank exchanges in a step.
        passes: Times of its passes; none without a pipeline.
    """

    rank: int
    stages: tuple[int, ...]
    step_s: float
    steps: int
    spread_frac: float
    traffic: tuple[GroupTraffic, ...]
    passes: tuple[PassDuration, ...] = ()


def time_ranks(
    given: RunInputs, options: Plan | PlanOptions, world_size: int, ranks: Sequence[int] = (), *, budget_s: float = 2.0
) -> list[RankTiming]:
    """Time steps of ``ranks`` of a job of ``world_size``, one rank after the other; by default ``ranks_to_trace``.

    All steps have the samples of the first one. The model is a copy: nothing of ``given`` is trained.

    Args:
        given: What the run is made of.
        options: The plan, or its options.
        world_size: Ranks of the job.
        ranks: The ranks to time.
        budget_s: Seconds of steps for each rank; at least three steps are timed.

    Raises:
        ConfigError: A rank is not in the job.
        PlanError: The plan does not fit the ranks, the model or the batch.
        torch.OutOfMemoryError: The rank does not fit into the device.
    """
    plan = plan_of_ranks(options, world_size, ranks)
    wanted = list(ranks) or ranks_to_trace(plan)
    known: HiddenStates = {}
    if plan.mesh.pp > 1:  # a stage is told the shapes that it receives
        traced = replace(plan, backend=replace(plan.backend, compile="off"))
        trace_places(given, traced, ranks_that_show(traced, wanted), known)
    return [_time_rank(given, plan, rank, known, budget_s) for rank in wanted]


def _time_rank(given: RunInputs, plan: Plan, rank: int, hidden: HiddenStates, budget_s: float) -> RankTiming:
    with _without_denormals(), assembled_rank(given, plan, rank, hidden, copied=full_copy) as parts:
        return _time_steps(parts, budget_s)


def _time_steps(parts: RunParts, budget_s: float) -> RankTiming:
    train_step, stages = build_train_step(parts), parts.sharded.parallel.stages
    adapter, index = adapter_of(parts.device)
    with closing(parts.loader.iterate(0, 1)) as steps:
        read = next(steps)
    batch = replace(read, micro_batches=[to_device(part, parts.device) for part in read.micro_batches])

    def step_s() -> float:
        begin = time.perf_counter()
        train_step.run(batch)
        adapter.synchronize(index)
        return time.perf_counter() - begin

    for _ in range(_WARM_UP_STEPS):
        step_s()
    seconds: list[float] = []
    while len(seconds) < _LEAST_STEPS or (sum(seconds) < budget_s and len(seconds) < _MOST_STEPS):
        seconds.append(step_s())
    lower, median, upper = statistics.quantiles(seconds, n=4)
    return RankTiming(
        rank=parts.world.job.rank,
        stages=() if stages is None else stages.stage_ids,
        step_s=median,
        steps=len(seconds),
        spread_frac=(upper - lower) / median,
        traffic=tuple(_traffic_of_a_step(parts, train_step, batch)),
        passes=tuple(_times_of_passes(parts, train_step, batch)),
    )


def _times_of_passes(parts: RunParts, train_step: TrainStep, batch: StepBatch) -> Iterator[PassDuration]:
    """In steps of their own, as an accelerator must be waited for before and after each pass."""
    pipeline = train_step.forward_backward.pipeline
    if pipeline is None:
        return
    adapter, index = adapter_of(parts.device)
    seconds: defaultdict[tuple[Kind, int], list[float]] = defaultdict(list)

    @contextmanager
    def timed(action: Action) -> Generator[None]:
        adapter.synchronize(index)
        begin = time.perf_counter()
        yield
        adapter.synchronize(index)
        seconds[action.kind, action.stage].append(time.perf_counter() - begin)

    pipeline.around_pass = timed
    for _ in range(_LEAST_STEPS):
        train_step.run(batch)
    for (kind, stage), taken in sorted(seconds.items()):
        yield PassDuration(kind, stage, statistics.median(taken))


def _traffic_of_a_step(parts: RunParts, train_step: TrainStep, batch: StepBatch) -> list[GroupTraffic]:
    stats = build_comm_stats(parts.events, parts.sync, parts.built.dims)
    if stats is None:
        return []
    with recording_exposed_time(parts.timers, stats.traffic), stats.sampling():
        train_step.run(batch)
    stats.add(parts.state.step, 1)
    real = adapter_of(parts.device)[0].collective_backend()  # that of a simulated group is called fake
    return [replace(group, transport=real) if group.transport == "fake" else group for group in stats.take_traffic()]


@contextmanager
def _without_denormals() -> Generator[None]:
    """Gradients that no rank has sent are whatever lay there: numbers so small that processors take long for them."""
    changed = torch.set_flush_denormal(True)
    try:
        yield
    finally:
        if changed:
            torch.set_flush_denormal(False)
