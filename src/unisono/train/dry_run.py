"""Steps of single ranks of a job, traced without values on one device: what each rank would hold in memory, and when most.

The run's own code is run, with fake tensors, in a world of which this process is the only rank. No number is derived a second
time, so that a trace cannot drift from what a run does. What a trace does not see: memory that kernels and communicators take
for themselves, what the allocator keeps, and all else that the process holds.

Code whose course depends on the value of a tensor has no trace. Such a rank makes its steps with values, in the same world and
under the same counter, where its parameters, gradients and optimizer state fit into the memory that is free.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (  # no public names; torch 2.13 tested
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]  # neither

from unisono.data.loading.loader import to_device
from unisono.dist import JobSpec
from unisono.errors import ConfigError, UnisonoError
from unisono.measure.live_storages import LiveStorages, Peak, Site
from unisono.measure.operator_flops import OperatorFlops
from unisono.models.traced_experts import GroupedProducts
from unisono.observe.meters import StepTimers
from unisono.parallel.deferred_init import deferred_init
from unisono.parallel.fsdp import traced_shards
from unisono.parallel.memory_ledger import MemoryLedger, coordinates_of
from unisono.parallel.pipeline.executor import HiddenStates, UnknownHiddenState
from unisono.plan.options import PlanOptions
from unisono.plan.plan import Plan
from unisono.train.assembly import RunInputs, RunParts
from unisono.train.block_traces import TRACED_BLOCKS, EqualBlocks, extrapolated, find_equal_blocks
from unisono.train.loop_assembly import build_train_step
from unisono.train.objectives import Batch
from unisono.train.setup import resolve_plan
from unisono.train.simulated_rank import assembled_rank
from unisono.train.state import TrainState
from unisono.train.step_memory import check_real_step_fits
from unisono.train.whole_model import empty_copy, full_copy

# the first creates the optimizer's state, the second is like all others
STEPS = 2

_NEED_VALUES: Final = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
_NUMPY_REFUSED: Final = ".numpy() is not supported"  # how torch begins its RuntimeError for a tensor without values


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """Memory of one rank, of a step after the first.

    Attributes:
        rank: The rank.
        stages: Numbers of its pipeline stages, from 0; none without a pipeline.
        ledger: What the plan says of parameters, gradients and the optimizer's state.
        peak: Where in the step most is held. Kinds of storages: ``parameters``, with the model's buffers; ``teacher``, the
            parameters of a teacher; ``optimizer``; ``batch``; ``buffers`` that were made before the steps; and the phase of the
            step in which others were made, such as ``forward``.
        flops: Of matrix products, convolutions and attention in the step, with those that are computed again
            (``measure.operator_flops``).
        equal_blocks: Equal blocks of the model.
        traced_blocks: How many of them were traced; the memory of all follows from traces of fewer (``train.block_traces``).
        needs_values: What in the step needs the values of tensors, such as ``aten.nonzero.default``, so that the step was made
            with values instead; empty where it was traced.
    """

    rank: int
    stages: tuple[int, ...]
    ledger: MemoryLedger
    peak: Peak
    flops: int
    equal_blocks: int = 0
    traced_blocks: int = 0
    needs_values: str = ""

    @property
    def confidence(self) -> Literal["exact", "measured"]:
        """``measured`` where the step was made with values: those of other ranks, and of later samples, may lead elsewhere."""
        return "measured" if self.needs_values else "exact"


def ranks_to_trace(plan: Plan) -> list[int]:
    """One rank of each place in the pipeline; others differ at most by the rows that parameters do not divide into evenly."""
    places = (coordinates_of(plan, rank) for rank in range(plan.mesh.world_size))
    return [rank for rank, place in enumerate(places) if not any(place[axis] for axis in place if axis != "pp")]


def trace_ranks(
    given: RunInputs,
    options: Plan | PlanOptions,
    world_size: int,
    ranks: Sequence[int] = (),
) -> list[RankMemory]:
    """Trace steps of ``ranks`` of a job of ``world_size``; by default ``ranks_to_trace``.

    The samples of the first step are read, by this process alone. Blocks are not compiled: compiled, they mostly take less.
    A few of many equal blocks are traced, where the memory of all follows from theirs.

    Args:
        given: What the run is made of.
        options: The plan, or its options.
        world_size: Ranks of the job.
        ranks: The ranks to trace.

    Raises:
        ConfigError: A rank is not in the job; or the model, the objective or the optimizer need values, and a step with values
            is too large or fails.
        PlanError: The plan does not fit the ranks, the model or the batch.
    """
    plan = plan_of_ranks(options, world_size, ranks)
    plan = replace(plan, backend=replace(plan.backend, compile="off"))
    wanted = list(ranks) or ranks_to_trace(plan)
    traced = dict[int, RankMemory]()
    try:
        # features name single blocks
        names_blocks = given.distill is not None and bool(given.distill.options.features)
        if not names_blocks and (equal := find_equal_blocks(model := _model_without_values(given), plan)):
            found = {rank: _extrapolate(given, plan, rank, model, equal) for rank in wanted}
            traced = {rank: memory for rank, memory in found.items() if memory is not None}
    except RuntimeError as error:
        if not _what_needs_values(error):
            raise
    left = [rank for rank in wanted if rank not in traced]
    traced |= trace_places(given, plan, ranks_that_show(plan, left), {})
    return [traced[rank] for rank in wanted]


def _model_without_values(given: RunInputs) -> nn.Module:
    """The model, whose values are not needed."""
    return given.model if isinstance(given.model, nn.Module) else deferred_init(given.model).model


def _extrapolate(given: RunInputs, plan: Plan, rank: int, model: nn.Module, equal: EqualBlocks) -> RankMemory | None:
    """The memory of a rank from traces with a few of the ``equal`` blocks of ``model``; None where it does not follow."""
    traces = list[dict[Site, Peak]]()
    flops = 0
    for count in TRACED_BLOCKS:
        memory, peaks = _trace_rank(replace(given, model=equal.shortened(model, count)), plan, rank, {})
        traces.append(peaks)
        of_block, flops = memory.flops - flops, memory.flops
        if len(traces) >= 3 and (peak := extrapolated(traces[-3:], equal.count - count)) is not None:
            whole = replace(memory, ledger=equal.whole_ledger(memory.ledger, count), peak=peak)
            flops += of_block * (equal.count - count)
            return replace(whole, flops=flops, equal_blocks=equal.count, traced_blocks=count)
    return None


def plan_of_ranks(options: Plan | PlanOptions, world_size: int, ranks: Sequence[int]) -> Plan:
    """The plan of a job of ``world_size``, of which ``ranks`` can be simulated. Raises as ``trace_ranks``."""
    plan = resolve_plan(options, JobSpec(world_size=world_size))[1]
    if outside := [rank for rank in ranks if not 0 <= rank < world_size]:
        raise ConfigError(
            given=f"rank {outside[0]} of a job of {world_size}",
            rule=f"ranks are 0 to {world_size - 1}",
            consequence="nothing was traced",
            nearest=f"rank {world_size - 1}",
        )
    if plan.sync.kind == "dist_async":
        raise ConfigError(
            given="a dry run with plan.sync 'dist_async'",
            rule="a worker of parameter servers steps at its own pace with what the servers hold",
            consequence="nothing was traced",
            nearest="plan.sync=dist_sync, whose ranks also hold the optimizer's state",
        )
    return plan


def trace_places(given: RunInputs, plan: Plan, ranks: Sequence[int], hidden: HiddenStates) -> dict[int, RankMemory]:
    """Trace ``ranks``; ``hidden`` gets the hidden states that their stages pass on. ``plan`` compiles nothing.

    Where one of them needs values, all make their steps with values. Raises as ``trace_ranks``.
    """
    try:
        return _each_place(partial(_trace_rank, given, plan), ranks, hidden)
    except RuntimeError as error:
        refused, needs_values = error, _what_needs_values(error)
        if not needs_values:
            raise
    check_real_step_fits(_model_without_values(given), given, plan, ranks, needs_values)
    try:
        measured = _each_place(partial(_measure_rank, given, plan), ranks, hidden)
    except UnisonoError:
        raise
    except Exception as error:  # whatever the user's code raises
        raise ConfigError(
            given=f"a model, objective or optimizer that calls {needs_values}, whose step with values fails: "
            f"{type(error).__name__}: {error}",
            rule="a dry run has shapes and no values; what depends on the value of a tensor is measured in a step with values",
            consequence="nothing was traced",
            nearest="a run of a few steps: unisono train --set train.steps=3",
        ) from refused
    return {rank: replace(memory, needs_values=needs_values) for rank, memory in measured.items()}


def _what_needs_values(error: Exception) -> str:
    """What was called that fake tensors cannot do; empty for another error."""
    if isinstance(error, _NEED_VALUES):
        return str(error.func)
    return ".numpy()" if str(error).startswith(_NUMPY_REFUSED) else ""


def _each_place(
    memory_of: Callable[[int, HiddenStates], tuple[RankMemory, Any]], ranks: Sequence[int], hidden: HiddenStates
) -> dict[int, RankMemory]:
    """``memory_of`` each rank: that of a stage is known once the stage before it has shown what it passes on."""
    waiting, traced = list(ranks), dict[int, RankMemory]()
    while waiting:
        known, late = len(hidden), list[int]()
        for rank in waiting:
            try:
                traced[rank], _ = memory_of(rank, hidden)
            except UnknownHiddenState:
                late.append(rank)
        assert len(late) < len(waiting) or len(hidden) > known, "no stage shows what it passes on"
        waiting = late
    return traced


def ranks_that_show(plan: Plan, wanted: Sequence[int]) -> list[int]:
    """``wanted``, behind ranks of the other places in the pipeline: the stages of ``wanted`` need what those pass on."""
    if plan.mesh.pp == 1:
        return list(wanted)
    places = {coordinates_of(plan, rank)["pp"]: rank for rank in [*ranks_to_trace(plan), *wanted]}
    return list(dict.fromkeys([*(places[place] for place in sorted(places)), *wanted]))


def _trace_rank(given: RunInputs, plan: Plan, rank: int, hidden: HiddenStates) -> tuple[RankMemory, dict[Site, Peak]]:
    """Trace one rank: its memory, and the peak of each kind of operation.

    ``hidden`` are the hidden states that stages are known to receive; those that it passes on are added. Raises
    UnknownHiddenState if it receives another one.
    """
    if not plan.is_model_sharded:  # else it is built without values, and sharded
        given = replace(given, model=_model_without_values(given))
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    live = LiveStorages(fake)
    live.kind = "buffers"
    work = OperatorFlops()
    modes = (fake, GroupedProducts(), live, work)
    with (
        traced_shards(),
        assembled_rank(given, plan, rank, hidden, modes, copied=empty_copy) as parts,
    ):
        as_fake = partial(_without_values, fake, parts.device)
        return _count_steps(parts, live, work, as_fake, leaves_out=parts.sharded.pipeline is None), live.peaks


def _measure_rank(given: RunInputs, plan: Plan, rank: int, hidden: HiddenStates) -> tuple[RankMemory, dict[Site, Peak]]:
    """As ``_trace_rank``, of steps with values: collectives return those of this rank, as if the others had the same."""
    live, work = LiveStorages(), OperatorFlops()
    live.kind = "buffers"
    with assembled_rank(given, plan, rank, hidden, (live, work), copied=full_copy) as parts:
        return _count_steps(parts, live, work, partial(to_device, device=parts.device), leaves_out=False), live.peaks


def _without_values(fake: FakeTensorMode, device: torch.device, micro_batch: Batch) -> dict[str, Tensor]:
    return {name: fake.from_tensor(value).to(device) for name, value in micro_batch.items()}


def _count_steps(
    parts: RunParts,
    live: LiveStorages,
    work: OperatorFlops,
    prepared: Callable[[Batch], dict[str, Tensor]],
    *,
    leaves_out: bool,
) -> RankMemory:
    """Make the steps of a rank and count in the last one.

    Args:
        parts: The parts of the run.
        live: Counts bytes.
        work: Counts FLOPs.
        prepared: Returns the tensors of a micro-batch as the step gets them.
        leaves_out: Whether micro-batches that are like others are left out.
    """
    train_step, stages = build_train_step(parts), parts.sharded.parallel.stages
    with _disable_current_modes(), closing(parts.loader.iterate(0, 1)) as steps:
        batch = next(steps)

    share = 1.0  # of the samples, that is traced
    with phases_as_kinds(live, parts.timers):
        for _ in range(STEPS):
            live.kind = "between phases"
            micro_batches = [prepared(micro) for micro in batch.micro_batches]
            if parts.distilled is not None:
                live.mark([*parts.distilled.teacher.model.parameters()], "teacher")
            begin_step(live, parts.built.model, parts.state, micro_batches)
            made = _unlike(micro_batches) if leaves_out else micro_batches
            share, work.flops = _numel(made) / _numel(micro_batches), 0
            train_step.run(replace(batch, micro_batches=made))
            del micro_batches, made
    return RankMemory(
        rank=parts.world.job.rank,
        stages=() if stages is None else stages.stage_ids,
        ledger=parts.ledger,
        peak=live.peak,
        flops=round(work.flops / share),
    )


def _numel(micro_batches: Sequence[Batch]) -> int:
    return sum(tensor.numel() for micro_batch in micro_batches for tensor in micro_batch.values())


def _unlike(micro_batches: Sequence[Batch]) -> list[Batch]:
    """The first two micro-batches of each shape, and the last one.

    The first pass makes gradients, others add to them, and the last one reduces them: those between need what the second does.
    """
    seen: Counter[tuple[torch.Size, ...]] = Counter()
    chosen: list[Batch] = []
    for number, micro_batch in enumerate(micro_batches, start=1):
        shapes = tuple(tensor.shape for tensor in micro_batch.values())
        seen[shapes] += 1
        if seen[shapes] <= 2 or number == len(micro_batches):
            chosen.append(micro_batch)
    return chosen


def phases_as_kinds(live: LiveStorages, timers: StepTimers) -> AbstractContextManager[None]:
    """Inside, storages that are made in a phase of a step have its name as their kind; ``update`` for the phase ``optimizer``."""
    return timers.wrapped(lambda name, phase: _Phase(live, "update" if name == "optimizer" else name, phase))


def begin_step(live: LiveStorages, model: nn.Module, state: TrainState, micro_batches: Sequence[Batch]) -> None:
    """Begin the peak of a step, with what is alive before it: parameters, the optimizer's state, the batch."""
    live.mark([*model.parameters(), *model.buffers()], "parameters")
    live.mark(state.optimizer.state_tensors(state.sharded.parameters).values(), "optimizer")
    live.mark([tensor for batch in micro_batches for tensor in batch.values()], "batch")
    gc.collect()  # cycles of Python objects would keep tensors of the step before
    live.reset_peak()


@dataclass(slots=True)
class _Phase:
    """A phase of ``StepTimers``, entered many times, whose name is the kind of the storages that are made in it."""

    live: LiveStorages
    name: str
    phase: AbstractContextManager[None]
    outer: list[str] = field(default_factory=list[str])

    def __enter__(self) -> None:
        self.outer.append(self.live.kind)
        self.live.kind = self.name
        self.phase.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.phase.__exit__(*error)
        self.live.kind = self.outer.pop()
