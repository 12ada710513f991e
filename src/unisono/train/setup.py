"""What is settled before a run's first step: device and plan, the log, what the model adds to the plan, the peak."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn

from unisono.data.options import default_cache_dir
from unisono.dist import JobSpec, World
from unisono.errors import CheckpointError, PlanError, Problem
from unisono.measure.ceiling import PeakFlops, peak_flops
from unisono.observe.events import EventLog, events_path, next_attempt
from unisono.parallel.context import ContextParallel
from unisono.parallel.device import COMPUTE_DTYPES, computes_bf16, find_device
from unisono.parallel.expert import check_experts
from unisono.parallel.mesh import ParallelDims
from unisono.parallel.pipeline.partition import PipelinePartition, partition_model
from unisono.parallel.recompute import check_called, find_recomputed_modules
from unisono.parallel.tensor.tp_validation import resolve_rules
from unisono.parallel.transforms import repeated_blocks
from unisono.plan.options import PlanOptions
from unisono.plan.plan import Plan
from unisono.plan.resolve import derive_plan, load_plan
from unisono.plan.rules import built_in_rules
from unisono.plan.tp_inference import infer_rules, require_rules
from unisono.plan.tp_trial import pairs_with_extra_parameters, runs_with_shards
from unisono.plan.validate import validate_plan
from unisono.train.step import input_selector


def resolve_plan(options: PlanOptions, job: JobSpec) -> tuple[torch.device, Plan]:
    """The device of this rank and the plan of the job. Raises PlanError."""
    given = load_plan(options) if options.file else None
    device = find_device(given.mesh.device if given else options.device, job.local_rank)
    if given is None:
        return device, derive_plan(
            options, world_size=job.world_size, device=device.type, native_bf16=computes_bf16(device)
        )
    validate_plan(given, job.world_size)
    return device, given


def open_events(run_dir: Path, world: World) -> EventLog:
    """This rank's event log in the run's folder; all ranks agree on the number of the attempt. Raises ConfigError."""
    rank = world.job.rank  # also of a world of one: asynchronous workers have a log each
    path = events_path(run_dir, rank)
    attempt = max(world.gather_json(next_attempt(path)))
    return EventLog(path, rank=rank, run_id=run_dir.absolute().name, attempt=attempt)


def infer_tp_rules(plan: Plan, model: nn.Module, first: Callable[[], Mapping[str, Tensor]], events: EventLog) -> Plan:
    """The plan as it is where built-in rules fit the model, else with rules that are read from a micro-batch of the ``first``
    step."""
    known = built_in_rules(dict(model.named_modules()))
    if known and not pairs_with_extra_parameters(known, model):
        return plan
    inputs = dict(first())
    if known and runs_with_shards(known, plan.mesh.tp, model, inputs):
        return plan
    found = infer_rules(model, inputs)
    rules = require_rules(found, type(model).__name__, plan.mesh.tp)
    plan = plan.updated(tensor_parallel={"rules": rules})
    events.emit("rules_inferred", rules=plan.decisions()["tensor_parallel.rules"], left=dict(found.left))
    return plan


def split_stages(plan: Plan, model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Plan, PipelinePartition]:
    """Where the stages of a pipeline begin, seen on a micro-batch of the first step; the plan then has that as its splits."""
    layout = partition_model(
        model,
        repeated_blocks(model),
        dict(inputs),
        plan.mesh.pp * plan.stages_per_rank,
        plan.pipeline.layers_per_stage,
        plan.pipeline.block_costs,
    )
    return plan.updated(pipeline={"layers_per_stage": layout.layers_per_stage, "block_costs": ()}), layout


def resolve_for_model(
    plan: Plan, model: nn.Module, grid: ParallelDims, batch: Callable[[], Mapping[str, Tensor]]
) -> tuple[Plan, PipelinePartition | None, ContextParallel | None]:
    """The plan with the stages of a pipeline, and where ranks share sequences what cuts them, seen on a first micro-batch.

    Raises PlanError with all that keeps stages, sequences, layers and experts of this model from being cut, and modules that are
    named from being recomputed.
    """
    problems: list[Problem] = []
    layout = None
    context = ContextParallel(grid, model) if plan.mesh.cp > 1 else None
    if plan.mesh.pp > 1:
        with _collect_problems(problems):
            plan, layout = split_stages(plan, model, input_selector(model)(batch()))
    if context is not None:
        with _collect_problems(problems):
            context.shard_batch(batch())  # what cannot be shared is said here, not in the first step
    if plan.recompute.modules:
        with _collect_problems(problems):
            check_called(
                find_recomputed_modules(plan, model, repeated_blocks(model)), model, input_selector(model)(batch())
            )
    if plan.mesh.tp > 1 and not plan.tensor_parallel.placements:
        with _collect_problems(problems):
            resolve_rules(model, plan)
    if plan.mesh.ep > 1:
        with _collect_problems(problems):
            check_experts(model, plan.mesh.ep)
    if problems:
        raise PlanError(*problems)
    return plan, layout, context


@contextmanager
def _collect_problems(problems: list[Problem]) -> Generator[None]:
    try:
        yield
    except PlanError as error:
        problems += error.problems


def find_peak(device: torch.device, plan: Plan, world: World) -> PeakFlops:
    """The device's peak. Measured by rank 0 alone while the others wait: several at once would share the cores."""
    cache = default_cache_dir(os.environ) / "calibration.json"
    found = (
        peak_flops(device, COMPUTE_DTYPES[plan.precision.compute], cache=cache, tf32=plan.backend.tf32)
        if world.rank == 0
        else None
    )
    return PeakFlops(**world.broadcast_json(asdict(found) if found else None))


def not_saved_error(step: int, committed: int | None, run_dir: Path) -> CheckpointError:
    """The error about a run whose last state is not on disk."""
    return CheckpointError(
        given=f"the checkpoint of the last step, {step}, could not be written to {run_dir}",
        rule="a run ends with its state committed",
        consequence="the newest committed state is "
        + (f"that of step {committed}" if committed is not None else "what was there before"),
        nearest="free space in that folder and start again: the steps since then are repeated",
    )
