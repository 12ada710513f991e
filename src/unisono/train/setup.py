"""Parts of a run that are set up before its first step: device and plan, event log, plan of this model."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from unisono.checkpoint import list_checkpoints
from unisono.data.dataset import Dataset, read_samples
from unisono.data.options import default_cache_dir
from unisono.device.torch_adapters import adapter_for, adapter_of
from unisono.dist import JobSpec, World, agree, job_from_environ, join_world, record_failure, rendezvous
from unisono.dist.backends import AUTO
from unisono.dist.dmlc import take_role
from unisono.dist.job_store import JobStore
from unisono.dist.notebook import in_notebook, notebook_name
from unisono.dist.watchdog import Watchdog
from unisono.dist.world import MIN_MEET_S, on_first_rank
from unisono.errors import ConfigError, PlanError, Problem, inert_problem
from unisono.kvstore import KVStore, create_kvstore
from unisono.measure.calibration import CALIBRATION_FILE
from unisono.measure.ceiling import PeakFlops, node_baseline, peak_flops
from unisono.observe.events import EventLog, events_path, next_attempt
from unisono.observe.meters import EventMarks, StepTimers
from unisono.parallel.batch_norm import batch_norms
from unisono.parallel.context import ContextParallel
from unisono.parallel.device import COMPUTE_DTYPES, computes_bf16, find_device
from unisono.parallel.mesh import ParallelDims
from unisono.parallel.pipeline.partition import PipelinePartition, partition_model
from unisono.parallel.recompute import check_called, find_recomputed_modules
from unisono.parallel.tensor.dtensor_placements import check_placed_reads
from unisono.parallel.transforms import check_transforms, repeated_blocks
from unisono.parallel.weight_casts import parameters_to_cast
from unisono.plan.options import PlanOptions
from unisono.plan.plan import Plan
from unisono.plan.resolve import derive_plan, with_strategy_file
from unisono.plan.rules import built_in_rules
from unisono.plan.tp_inference import infer_rules, require_rules
from unisono.plan.tp_trial import pairs_with_extra_parameters, runs_with_shards
from unisono.plan.validate import validate_plan
from unisono.storage.directory import make_folder
from unisono.storage.files import os_reason
from unisono.storage.folder_lock import FolderLock
from unisono.storage.run_folder import CHECKPOINTS_FOLDER, LOCK_FILE, LOGS_FOLDER
from unisono.train.gradient_sync import local_sgd_config
from unisono.train.objectives import Batch, Objective, find_targets, masked_token, next_token
from unisono.train.run_record import TOKEN_ENTRIES
from unisono.train.step import input_selector

_LOG: Final = logging.getLogger("unisono.train")


def resolve_plan(plan: Plan | PlanOptions, job: JobSpec) -> tuple[torch.device, Plan]:
    """This rank's device, and the plan of the job: as it is given, or derived from options. Raises PlanError."""
    if isinstance(plan, Plan):
        validate_plan(plan, job.world_size)
        return find_device(plan.mesh.device, job.local_rank), plan
    device = find_device(with_strategy_file(plan)[0].device, job.local_rank)
    native_bf16 = computes_bf16(device)
    return device, derive_plan(plan, world_size=job.world_size, device=device.type, native_bf16=native_bf16)


def resolve_whole_model(options: PlanOptions, job: JobSpec) -> tuple[torch.device, Plan]:
    """This rank's device, and a plan in which each rank has the whole model, whatever the plan of the training was."""
    options, _ = with_strategy_file(options)
    unsharded = PlanOptions(
        device=options.device,
        precision=options.precision,
        global_batch=options.global_batch * job.world_size,
        micro_batch=options.micro_batch,
    )
    return resolve_plan(unsharded, job)


def watch_steps(world: World, run_dir: Path, step: Callable[[], int]) -> Watchdog | None:
    """Have the watchdog of the world count steps too, and write into the run's folder; returns a new one where it has none."""
    logs = run_dir / LOGS_FOLDER
    if world.watchdog is not None:
        world.watchdog.follow(step, logs)
        return None
    return Watchdog(world.job, logs, deadline_s=0.0 if world.group is None else world.timeout_s, step=step)


def step_timers(device: torch.device) -> StepTimers:
    """The timers of this rank's steps: of the device where it works behind the host, else of the host."""
    adapter, index = adapter_of(device)
    if adapter.streams is None:
        return StepTimers()
    return StepTimers(marks=EventMarks(adapter.streams.new_event, partial(adapter.streams.current, index)))


def launched_job() -> JobSpec:
    """The place of this process in its job. A server or scheduler of MXNet's tracker becomes that process instead."""
    job = job_from_environ(os.environ)
    take_role(job)
    return job


def init_distributed(plan: Plan, job: JobSpec, device_type: str, timeout_s: float, backend: str = AUTO) -> World:
    """Join all ranks of the job; an asynchronous worker is a world of one (docs/adr/0010).

    Args:
        plan: The plan of the run.
        job: This process's place in the job.
        device_type: Type of the tensors in collectives.
        timeout_s: Seconds after which a collective fails.
        backend: Name of the back end that carries them (``launch.collective_backend``).

    Raises ConfigError for a back end that would carry nothing, and as ``join_world``.
    """
    if backend != AUTO and (plan.sync.kind == "dist_async" or job.world_size == 1):
        raise ConfigError(
            inert_problem(
                f"launch.collective_backend {backend!r} with {job.world_size} "
                f"{'rank' if job.world_size == 1 else 'ranks'}, plan.sync {plan.sync.kind!r}",
                "it carries what two or more ranks exchange that meet; dist_async has its own connections",
                "launch.num_processes=2, or leave launch.collective_backend out",
            )
        )
    if plan.sync.kind == "dist_async":
        return World.alone(job)
    keeps = job.world_size > 1 and job.master_port and not rendezvous.has_scheduler(job)  # which keeps it
    store = _kept_store(job, timeout_s) if keeps else None
    return join_world(job, device_type=device_type, timeout_s=timeout_s, store=store, backend=backend)


@lru_cache(maxsize=1)
def _kept_store(job: JobSpec, timeout_s: float) -> JobStore:
    """The store that rank 0 serves, kept open after the run: another run of this process joins the job again.

    If rank 0 served another one then, it might close the first after other ranks had connected to it; and the socket that a
    launcher hands down can be used only once.
    """
    rendezvous.wait_until_resolved(job, timeout_s)
    return rendezvous.open_store(job, max(timeout_s, MIN_MEET_S))


def build_kvstore(plan: Plan, world: World) -> KVStore:
    """Create the store of the plan's kind; an asynchronous worker has a local one, for its model's start."""
    kind = "local" if plan.sync.kind == "dist_async" else plan.sync.kind
    return create_kvstore(kind, world, local_sgd=local_sgd_config(plan) if kind == "dist_local" else None)


def again() -> tuple[str, ...]:
    """The command line that starts the running script again; none in a notebook, or of a script that another program started."""
    if in_notebook() or not sys.argv or Path(sys.argv[0]).suffix != ".py" or launched_job().source != "single":
        return ()
    return (shlex.join(["python", *sys.argv]),)


def default_run_dir() -> Path:
    """``runs/NAME`` of the script ``NAME.py`` or the notebook ``NAME.ipynb`` that runs.

    ``runs/notebook`` in a notebook whose name is not known, and ``runs/first`` without a script.
    """
    if in_notebook():
        return Path("runs") / (notebook_name() or "notebook")
    script = Path(sys.argv[0]) if sys.argv and sys.argv[0] else Path()
    is_script = script.suffix == ".py" and script.stem != "__main__"
    return Path("runs") / (script.stem if is_script else "first")


def open_events(run_dir: Path, world: World) -> EventLog:
    """Open this rank's event log in the run's folder, with the same attempt number on all ranks.

    Raises ConfigError on all ranks if another run works in the folder.
    """
    rank = world.job.rank  # also of a world of one: asynchronous workers have a log each
    path = events_path(run_dir, rank)
    lock: FolderLock | None = None

    def take_folder() -> None:
        nonlocal lock
        try:
            make_folder(run_dir)
            lock = FolderLock(
                run_dir / LOCK_FILE, work="is training", nearest="wait until it has ended, or another run.dir"
            )
        except OSError as error:
            if os.access(run_dir, os.W_OK):  # else it is the log's error
                raise ConfigError(
                    given=f"{run_dir / LOCK_FILE}, which cannot be opened ({os_reason(error)})",
                    rule="one run at a time works in a folder, and holds this file meanwhile",
                    consequence="nothing was started",
                    nearest="remove it if no run works there, or another run.dir",
                ) from error

    on_first_rank(world, take_folder if rank == 0 else lambda: None)
    try:
        attempt = max(world.all_gather_json(next_attempt(path)))
        return EventLog(path, rank=rank, run_id=run_dir.absolute().name, attempt=attempt, lock=lock)
    except BaseException:
        if lock is not None:
            lock.close()
        raise


def report_failure(
    events: EventLog,
    run_dir: Path,
    job: JobSpec,
    error: BaseException,
    step: int | None,
    memory: Mapping[str, int],
) -> None:
    """Record the error that ends this rank, for the launcher and in the event log. A disk that takes neither hides no error.

    Args:
        events: Event log of this rank.
        run_dir: Folder of the run.
        job: The process's place in the job.
        error: The error.
        step: Steps made before it; None if training had not begun.
        memory: What was measured where it ran out of memory, in bytes; else empty.
    """
    logs = Path(os.environ.get("UNISONO_LOGS", run_dir / LOGS_FOLDER))  # where the launcher looks
    newest = ""
    with suppress(OSError):  # rank 0 may be deleting an old one
        committed = [entry for entry in list_checkpoints(run_dir / CHECKPOINTS_FOLDER) if entry.state == "committed"]
        newest = committed[-1].path.name if committed else ""
    try:
        record_failure(logs, job, error, step=step, checkpoint=newest, memory=memory)
    except OSError as refused:
        _LOG.warning("the failure of this rank could not be recorded in %s: %s", logs, os_reason(refused))
    events.emit("run_end", step=step or 0, reason="failed", error=type(error).__name__, message=str(error))


def backend_notices(plan: Plan, model: nn.Module, *, native_bf16: bool) -> Iterator[dict[str, str]]:
    """Settings that have no effect, or a cost, on this device or model, as fields of ``notice`` events."""
    device, adapter = plan.mesh.device, adapter_for(plan.mesh.device)
    has_4d = any(parameter.dim() == 4 for parameter in model.parameters())
    inert = {
        "tf32": (plan.backend.tf32 and not adapter.has_tf32, f"device {device} has no TF32 products"),
        "autotune": (plan.backend.autotune and not adapter.has_tf32, "no kernels of this device are chosen by timing"),
        "channels_last": (plan.backend.channels_last and not has_4d, "the model has no 4-D parameters"),
    }
    for name, (is_inert, why) in inert.items():
        if is_inert:
            yield {
                "code": "inert_setting",
                "what": f"plan.{name} has no effect",
                "why": why,
                "cost": "none",
                "fix": f"leave plan.{name} out",
            }
    batch = plan.batch
    if batch.accumulation > 1 and batch_norms(model):
        yield {
            "code": "batch_norm_parts",
            "what": f"batch norm sees {batch.micro_batch} samples of each rank at a time, not its share of the step",
            "why": f"the share is divided into {batch.accumulation} micro-batches, which are normalised one after the other",
            "cost": "losses differ from those of the whole batch at once, and with the number of ranks",
            "fix": f"plan.micro_batch={batch.micro_batch * batch.accumulation}, where it fits into memory",
        }
    if plan.precision.compute == "bf16" and not native_bf16:
        yield {
            "code": "slow_bf16",
            "what": f"plan.precision is bf16, which this {device} does not compute natively",
            "why": "each product is converted to fp32 and back",
            "cost": "a step is about 2 to 2.7 times slower than in fp32",
            "fix": "plan.precision=auto, which takes bf16 only where it is native",
        }


def infer_tp_rules(plan: Plan, model: nn.Module, first: Callable[[], Mapping[str, Tensor]], events: EventLog) -> Plan:
    """Return ``plan``, with rules inferred from a traced micro-batch where the built-in ones do not fit the model."""
    built_in = built_in_rules(dict(model.named_modules()))
    if built_in and not pairs_with_extra_parameters(built_in, model):
        return plan
    inputs = dict(first())
    if built_in and runs_with_shards(built_in, plan.mesh.tp, model, inputs):
        return plan
    inferred = infer_rules(model, inputs)
    rules = require_rules(inferred, type(model).__name__, plan.mesh.tp)
    plan = plan.updated(tensor_parallel={"rules": rules})
    events.emit("rules_inferred", rules=plan.decisions()["tensor_parallel.rules"], left=dict(inferred.replicated))
    return plan


def partition_stages(plan: Plan, model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Plan, PipelinePartition]:
    """Partition the model into pipeline stages by a traced micro-batch; the plan's splits are then those of the partition."""
    layout = partition_model(
        model,
        repeated_blocks(model),
        dict(inputs),
        plan.mesh.pp * plan.stages_per_rank,
        plan.pipeline.layers_per_stage,
        plan.pipeline.block_costs,
    )
    return plan.updated(pipeline={"layers_per_stage": layout.layers_per_stage, "block_costs": ()}), layout


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOfModel:
    """What a model and a micro-batch of the first step show of a plan.

    Attributes:
        plan: The final plan, with rules and stages.
        partition: The partition of a pipeline.
        context: The sharding of sequences.
        cast_before_gather: Parameters that are only read in the dtype that the plan computes in, by name.
    """

    plan: Plan
    partition: PipelinePartition | None
    context: ContextParallel | None
    cast_before_gather: frozenset[str]


def complete_plan_for_model(
    plan: Plan, model: nn.Module, dims: ParallelDims, batch: Callable[[], Mapping[str, Tensor]], events: EventLog
) -> PlanOfModel:
    """The plan as ``model`` and a micro-batch of the first step complete it; sets ``dims.plan``.

    Raises PlanError with all problems of the plan for this model, CommError if ranks infer other rules.
    """
    for notice in backend_notices(plan, model, native_bf16=computes_bf16(torch.device(plan.mesh.device))):
        events.emit("notice", **notice)
    problems: list[Problem] = []
    layout = None
    inputs = input_selector(model)
    if plan.mesh.tp > 1 and not (plan.tensor_parallel.rules or plan.tensor_parallel.dtensor_placements):
        plan = dims.plan = infer_tp_rules(plan, model, lambda: inputs(batch()), events)
        agree(dims.world, "inferred rules", plan.decisions())
    context = ContextParallel(dims, model) if plan.mesh.cp > 1 else None
    if plan.mesh.pp > 1:
        with _collect_problems(problems):
            plan, layout = partition_stages(plan, model, inputs(batch()))
            dims.plan = plan
    if context is not None:
        with _collect_problems(problems):
            context.shard_batch(batch())  # entries that cannot be sharded are reported here, not in the first step
    if plan.recompute.modules:
        with _collect_problems(problems):
            check_called(find_recomputed_modules(plan, model, repeated_blocks(model)), model, inputs(batch()))
    if plan.tensor_parallel.dtensor_placements:
        with _collect_problems(problems):
            check_placed_reads(model, plan, inputs(batch()))
    problems += check_transforms(model, dims.plan)  # of asynchronous workers each is alone
    if problems:
        raise PlanError(*dict.fromkeys(problems))
    cast = find_parameters_to_cast(plan, model, lambda: inputs(batch()), events)
    if plan.uses_fsdp:
        agree(dims.world, "parameters that are gathered in 16 bits", sorted(cast))
    return PlanOfModel(plan=plan, partition=layout, context=context, cast_before_gather=cast)


def find_parameters_to_cast(
    plan: Plan, model: nn.Module, first: Callable[[], Mapping[str, Tensor]], events: EventLog
) -> frozenset[str]:
    """``parameters_to_cast`` in a micro-batch of the first step; none, with a notice, if the model needs values."""
    try:
        return parameters_to_cast(model, plan, first)
    except Exception as error:  # whatever the user's code raises
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        events.emit(
            "notice",
            code="gathered_in_32_bits",
            what="parameters are gathered in 32 bits",
            why=f"which are only read in 16 bits is found by a pass of {type(model).__name__} without values: {reason}",
            cost="twice the bytes, and memory for a copy in 16 bits of each block in use",
            fix="a forward pass that does not read the values of tensors",
        )
        return frozenset()


@contextmanager
def _collect_problems(problems: list[Problem]) -> Generator[None]:
    try:
        yield
    except PlanError as error:
        problems += error.problems


def baseline_of(device: torch.device) -> float:
    """FLOP/s that ``unisono doctor --bench`` measured on this node; 0 if not measured."""
    return node_baseline(device, default_cache_dir(os.environ) / CALIBRATION_FILE)


def find_peak(device: torch.device, plan: Plan, world: World) -> PeakFlops:
    """Peak FLOP/s of the device, measured by rank 0 while the others wait: ranks of one host would share its cores."""
    cache = default_cache_dir(os.environ) / CALIBRATION_FILE
    peak = (
        peak_flops(device, COMPUTE_DTYPES[plan.precision.compute], cache=cache, tf32=plan.backend.tf32)
        if world.rank == 0
        else None
    )
    return PeakFlops(**world.broadcast_json(asdict(peak) if peak else None))


def count_tokens(objective: Objective) -> Callable[[Batch], Tensor] | None:
    """The number [] of tokens of a micro-batch, for ``masked_token``, whose weight counts the hidden ones only; else None.

    Padding does not count. Without an entry of tokens the result is the number of targets.
    """

    def count(batch: Batch) -> Tensor:
        if "attention_mask" in batch:
            return batch["attention_mask"].count_nonzero()
        tokens = next((batch[name] for name in TOKEN_ENTRIES if name in batch), find_targets(batch))
        return torch.tensor(tokens.numel(), device=tokens.device)

    return count if objective is masked_token else None


def throughput_unit(objective: Objective, data: Any, plan: Plan, flops_per_token: float) -> dict[str, Any]:
    """The unit of a run's throughput, as ``unit`` and ``samples_per_step`` of ``MetricsReader``.

    Tokens, where the objective's weight or ``count_tokens`` counts them, or FLOPs are given per token; else samples, which are
    called images if they have an ``image``.
    """
    if flops_per_token or objective in (next_token, masked_token):
        return {"unit": "tokens", "samples_per_step": 0}
    first = read_samples(data, np.zeros(1, np.int64))[0] if isinstance(data, Dataset) and len(data) else {}
    return {"unit": "images" if "image" in first else "samples", "samples_per_step": plan.batch.global_batch}
