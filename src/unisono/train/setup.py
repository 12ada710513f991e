"""Parts of a run that are set up before its first step: device and plan, event log, loader, plan of this model."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from unisono.data.dataset import TYPE_AND_LENGTH, CollateFn, Dataset, as_dataset, collated, read_samples
from unisono.data.loading.batch_builder import BatchTransform, PairTransform, Transform
from unisono.data.loading.loader import Loader
from unisono.data.loading.stream_loader import StreamLoader, is_stream
from unisono.data.loading.torch_loader import read_torch_loader
from unisono.data.options import LoaderOptions, default_cache_dir
from unisono.dist import JobSpec, World, agree, job_from_environ, join_world, record_failure
from unisono.dist.dmlc import take_role
from unisono.errors import DataError, PlanError, Problem
from unisono.kvstore import KVStore, create_kvstore
from unisono.measure.ceiling import PeakFlops, peak_flops
from unisono.observe.events import EventLog, events_path, next_attempt
from unisono.parallel.context import ContextParallel
from unisono.parallel.device import COMPUTE_DTYPES, computes_bf16, find_device
from unisono.parallel.mesh import ParallelDims
from unisono.parallel.pipeline.partition import PipelinePartition, partition_model
from unisono.parallel.recompute import check_called, find_recomputed_modules
from unisono.parallel.transforms import check_transforms, repeated_blocks
from unisono.plan.options import PlanOptions
from unisono.plan.plan import Plan
from unisono.plan.resolve import derive_plan, with_strategy_file
from unisono.plan.rules import built_in_rules
from unisono.plan.tp_inference import infer_rules, require_rules
from unisono.plan.tp_trial import pairs_with_extra_parameters, runs_with_shards
from unisono.plan.validate import validate_plan
from unisono.train.gradient_sync import local_sgd_config
from unisono.train.objectives import Objective, masked_token, next_token
from unisono.train.step import input_selector


def resolve_plan(plan: Plan | PlanOptions, job: JobSpec) -> tuple[torch.device, Plan]:
    """This rank's device, and the plan of the job: as it is given, or derived from options. Raises PlanError."""
    if isinstance(plan, Plan):
        validate_plan(plan, job.world_size)
        return find_device(plan.mesh.device, job.local_rank), plan
    device = find_device(with_strategy_file(plan)[0].device, job.local_rank)
    native_bf16 = computes_bf16(device)
    return device, derive_plan(plan, world_size=job.world_size, device=device.type, native_bf16=native_bf16)


def launched_job() -> JobSpec:
    """The place of this process in its job. A server or scheduler of MXNet's tracker becomes that process instead."""
    job = job_from_environ(os.environ)
    take_role(job)
    return job


def init_distributed(plan: Plan, job: JobSpec, device_type: str, timeout_s: float) -> World:
    """Join all ranks of the job; an asynchronous worker is a world of one (docs/adr/0010)."""
    if plan.sync.kind == "dist_async":
        return World.alone(job)
    return join_world(job, device_type=device_type, timeout_s=timeout_s)


def open_store(plan: Plan, world: World) -> KVStore:
    """Create the store of the plan's kind; an asynchronous worker has a local one, for its model's start."""
    kind = "local" if plan.sync.kind == "dist_async" else plan.sync.kind
    return create_kvstore(kind, world, local_sgd=local_sgd_config(plan) if kind == "dist_local" else None)


def default_run_dir() -> Path:
    """``runs/NAME`` of the script ``NAME.py`` that runs, and ``runs/first`` in a notebook or without a script."""
    script = Path(sys.argv[0]) if sys.argv and sys.argv[0] else Path()
    is_script = script.suffix == ".py" and script.stem not in (
        "__main__",
        "ipykernel_launcher",
        "colab_kernel_launcher",
    )
    return Path("runs") / (script.stem if is_script else "first")


def open_events(run_dir: Path, world: World) -> EventLog:
    """Open this rank's event log in the run's folder, with the same attempt number on all ranks. Raises ConfigError."""
    rank = world.job.rank  # also of a world of one: asynchronous workers have a log each
    path = events_path(run_dir, rank)
    attempt = max(world.gather_json(next_attempt(path)))
    return EventLog(path, rank=rank, run_id=run_dir.absolute().name, attempt=attempt)


def report_failure(events: EventLog, run_dir: Path, job: JobSpec, error: BaseException, step: int | None) -> None:
    """Record the error that ends this rank, for the launcher and in the event log."""
    logs = Path(os.environ.get("UNISONO_LOGS", run_dir / "logs"))  # where the launcher looks
    record_failure(logs, job, error, step=step)
    events.emit("run_end", step=step or 0, reason="failed", error=type(error).__name__, message=str(error))


def backend_notices(plan: Plan, model: nn.Module, *, native_bf16: bool) -> Iterator[dict[str, str]]:
    """Settings that have no effect, or a cost, on this device or model, as fields of ``notice`` events."""
    device = plan.mesh.device
    has_4d = any(parameter.dim() == 4 for parameter in model.parameters())
    inert = {
        "tf32": (plan.backend.tf32 and device != "cuda", f"device {device} has no TF32 products"),
        "autotune": (plan.backend.autotune and device != "cuda", "only CUDA kernels are chosen by timing"),
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


def complete_plan_for_model(
    plan: Plan, model: nn.Module, dims: ParallelDims, batch: Callable[[], Mapping[str, Tensor]], events: EventLog
) -> tuple[Plan, PipelinePartition | None, ContextParallel | None]:
    """The final plan, with the rules and stages that the model and a micro-batch of the first step show.

    Also returns the partition of a pipeline and the sharding of sequences, if any, and sets ``dims.plan``.

    Raises PlanError with all problems of the plan for this model, CommError if ranks infer other rules.
    """
    for notice in backend_notices(plan, model, native_bf16=computes_bf16(torch.device(plan.mesh.device))):
        events.emit("notice", **notice)
    problems: list[Problem] = []
    layout = None
    inputs = input_selector(model)
    if plan.mesh.tp > 1 and not (plan.tensor_parallel.rules or plan.tensor_parallel.placements):
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
    problems += check_transforms(model, dims.plan)  # of asynchronous workers each is alone
    if problems:
        raise PlanError(*dict.fromkeys(problems))
    return plan, layout, context


@contextmanager
def _collect_problems(problems: list[Problem]) -> Generator[None]:
    try:
        yield
    except PlanError as error:
        problems += error.problems


def find_peak(device: torch.device, plan: Plan, world: World) -> PeakFlops:
    """Peak FLOP/s of the device, measured by rank 0 while the others wait: ranks of one host would share its cores."""
    cache = default_cache_dir(os.environ) / "calibration.json"
    peak = (
        peak_flops(device, COMPUTE_DTYPES[plan.precision.compute], cache=cache, tf32=plan.backend.tf32)
        if world.rank == 0
        else None
    )
    return PeakFlops(**world.broadcast_json(asdict(peak) if peak else None))


def throughput_unit(objective: Objective, data: Any, plan: Plan, flops_per_token: float) -> dict[str, Any]:
    """What the throughput of a run counts, as ``unit`` and ``samples_per_step`` of ``MetricsReader``.

    Tokens, where the objective's weight counts them or FLOPs are given per token; else samples, which are called images if they
    have an ``image``.
    """
    if flops_per_token or objective in (next_token, masked_token):
        return {"unit": "tokens", "samples_per_step": 0}
    first = read_samples(data, np.zeros(1, np.int64))[0] if isinstance(data, Dataset) and len(data) else {}
    return {"unit": "images" if "image" in first else "samples", "samples_per_step": plan.batch.global_batch}


@dataclass(frozen=True, kw_only=True, slots=True)
class InputPipeline:
    """A data set or stream, and how the trainer makes batches of it (see ``Loader``)."""

    data: Dataset | Iterable[Any]
    options: LoaderOptions
    transform: Transform | None
    pair_transform: PairTransform | None
    batch_transform: BatchTransform | None
    shuffle_block: int
    shuffle: bool = True
    collate_fn: CollateFn | None = None

    @property
    def functions(self) -> dict[str, Any]:
        """The functions that change samples and batches, by name; None where there is none."""
        names = ("transform", "pair_transform", "batch_transform", "collate_fn")
        return {name: getattr(self, name) for name in names}

    @property
    def data_without_fingerprint(self) -> Dataset | None:
        """The data, if only its type and length tell it from other data."""
        data = self.data
        return data if isinstance(data, Dataset) and data.fingerprint.startswith(TYPE_AND_LENGTH) else None

    def order(self, seed: int, plan: Plan) -> dict[str, Any]:
        """Everything that decides the samples of every step."""
        return {
            "data": str(getattr(self.data, "fingerprint", type(self.data).__qualname__)),
            "samples": len(self.data) if isinstance(self.data, Dataset) else 0,
            "seed": seed,
            "global_batch": plan.batch.global_batch,
            "shuffle_block": self.shuffle_block,
            "last_batch": self.options.last_batch,
            **({} if self.shuffle else {"shuffle": False}),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Training data in one of the forms that the trainer takes, and the settings that come with it."""

    data: Dataset | Iterable[Any]
    plan: Plan | PlanOptions
    loader: LoaderOptions
    collate_fn: CollateFn | None
    shuffle: bool


def read_source(
    data: Any, *, plan: Plan | PlanOptions | None, loader: LoaderOptions | None, collate_fn: CollateFn | None
) -> Source:
    """``data`` as data set or stream. Of a torch ``DataLoader`` it takes over what is not given here, and prints it.

    Raises DataError for a ``DataLoader`` whose order cannot be kept, and for data of another kind.
    """
    if isinstance(data, DataLoader):
        job = job_from_environ(os.environ)
        parts = read_torch_loader(cast("DataLoader[Any]", data))
        chosen = " ".join(
            f"The {name} given here replaces its own."
            for name, given in (("plan", plan), ("loader", loader), ("collate_fn", collate_fn))
            if given is not None
        )
        if job.rank == 0:
            print(f"{parts.notice}. {chosen}".rstrip(), flush=True)
        taken = LoaderOptions(num_workers=parts.num_workers, last_batch=parts.last_batch)
        return Source(
            data=parts.data,
            plan=plan or PlanOptions(global_batch=parts.batch_size * job.world_size, micro_batch=parts.batch_size),
            loader=loader
            or (taken if isinstance(parts.data, Dataset) else LoaderOptions(num_workers=min(0, parts.num_workers - 1))),
            collate_fn=collate_fn or parts.collate_fn,
            shuffle=parts.shuffle,
        )
    return Source(
        data=data if is_stream(data) else _sized(data, "data"),
        plan=plan or PlanOptions(),
        loader=loader or LoaderOptions(),
        collate_fn=collate_fn,
        shuffle=True,
    )


def read_eval_source(data: Any, collate_fn: CollateFn | None) -> Dataset | None:
    """``eval_data`` as a data set whose batches ``collate_fn`` makes; None stays None. Raises DataError without a length."""
    if data is None:
        return None
    if isinstance(data, DataLoader):
        loader = cast("DataLoader[Any]", data)
        if collate_fn is None and loader.collate_fn is not default_collate:
            collate_fn = loader.collate_fn
        data = loader.dataset
    dataset = _sized(data, "eval_data")
    return dataset if collate_fn is None else collated(dataset, collate_fn)


def _sized(data: Any, name: str) -> Dataset:
    if isinstance(data, str) or not (
        isinstance(data, Dataset) or (hasattr(data, "__len__") and hasattr(data, "__getitem__"))
    ):
        raise DataError(
            given=f"{name} of type {type(data).__name__}",
            rule="samples come from a Dataset, a torch.utils.data.Dataset, a list, or anything with __len__ and __getitem__",
            consequence="no sample can be read by its number",
            nearest="list(…) of it, where it fits into memory",
        )
    return as_dataset(data)


def build_loader(
    pipeline: InputPipeline, plan: Plan, *, data_rank: int, seed: int, device: torch.device, batch_statistics: bool
) -> Loader | StreamLoader:
    """The loader of part ``data_rank`` of each batch; ``batch_statistics``: the model computes some (batch norm).

    Raises DataError for an end of an epoch that ranks would not reach together, and for settings that a stream does not have.
    """
    data, options = pipeline.data, pipeline.options
    together = "dp_shard" if plan.uses_fsdp else "pp" if plan.mesh.pp > 1 else ""
    if not together and plan.mesh.dp_world_size > 1 and batch_statistics:
        together = "batch norm"
    if together and options.last_batch == "keep":
        raise DataError(
            given=f"{together} on {plan.mesh.world_size} ranks with loader.last_batch=keep",
            rule="ranks that share the state, stages or batch statistics run the same number of passes in every step",
            consequence="an epoch's last step could leave some ranks without samples, and the others waiting",
            nearest="loader.last_batch=pad, which fills it up with weight 0",
        )
    common: dict[str, Any] = {
        "seed": seed,
        "global_batch": plan.batch.global_batch,
        "micro_batch": plan.batch.micro_batch,
        "rank": data_rank,
        "world_size": plan.mesh.dp_world_size,
        "transform": pipeline.transform,
        "collate_fn": pipeline.collate_fn,
        "device": None if device.type == "cpu" else device,
    }
    if isinstance(data, Dataset):
        return Loader(
            data,
            options=options,
            shuffle=pipeline.shuffle,
            shuffle_block=pipeline.shuffle_block,
            pair_transform=pipeline.pair_transform,
            batch_transform=pipeline.batch_transform,
            **common,
        )
    defaults = LoaderOptions(num_workers=min(options.num_workers, 0))  # 0: no thread, which a stream can do
    transforms = pipeline.pair_transform, pipeline.batch_transform
    if (options, *transforms, pipeline.shuffle_block) != (defaults, None, None, 0):
        raise DataError(
            given=f"a stream ({type(data).__name__}) with loader settings, pair_transform, batch_transform or shuffle_block",
            rule="a stream is read from its beginning by one thread, in its own order",
            consequence="they would have no effect",
            nearest="leave them out, or a data set with a length",
        )
    return StreamLoader(data, prefetch_depth=0 if options.num_workers == 0 else 2, **common)
