"""Resolves the options of a user into a complete plan."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from unisono.errors import PlanError
from unisono.plan.options import PlanOptions
from unisono.plan.plan import (
    BUCKET_BYTES,
    FROM_FILE,
    BackendPlan,
    BatchPlan,
    FSDPPlan,
    MeshPlan,
    PipelinePlan,
    Plan,
    PrecisionPlan,
    RecomputePlan,
    SyncPlan,
    TensorParallelPlan,
)
from unisono.plan.validate import validate_plan

LARGEST_AUTOMATIC_MICRO_BATCH = 32

G = TypeVar("G")


def load_plan(options: PlanOptions) -> Plan:
    """The plan of ``options.file``. Raises PlanError where it cannot be read, or where other options are set too."""
    also_set = [f"plan.{name}" for name in _changed(options, PlanOptions(file=options.file))]
    if also_set:
        raise PlanError(
            given=f"plan.file {options.file!r} with {', '.join(also_set)}",
            rule="a strategy file holds the whole plan",
            consequence="it would be unclear which of the two counts",
            nearest="change the file, or leave it out and set options only",
        )
    return replace(Plan.load(Path(options.file).expanduser()), pins=(FROM_FILE,))


def derive_plan(options: PlanOptions, *, world_size: int, device: str, native_bf16: bool) -> Plan:
    """Derive the fields that the user left open.

    Args:
        options: Options of the user.
        world_size: Number of ranks of the job.
        device: Device type in use, such as ``cuda`` or ``cpu``.
        native_bf16: Whether the device computes in bf16 natively, so that precision ``auto`` means bf16.

    Raises:
        PlanError: The plan breaks a rule on this number of ranks; it holds all problems at once.
    """
    ranks = max(1, world_size // (options.pp * options.cp * options.tp))
    dp_shard = options.dp_shard or ranks
    share = -(-options.global_batch // ranks)
    micro_batch = options.micro_batch or min(share, LARGEST_AUTOMATIC_MICRO_BATCH)
    plan = Plan(
        mesh=_group(MeshPlan, options, device=device, dp_replicate=max(1, ranks // dp_shard), dp_shard=dp_shard),
        batch=_group(BatchPlan, options, micro_batch=micro_batch, accumulation=-(-share // micro_batch)),
        precision=PrecisionPlan(
            compute=options.precision if options.precision != "auto" else ("bf16" if native_bf16 else "fp32"),
            dtype_rules=(),
        ),
        recompute=_group(RecomputePlan, options, mode=options.recompute, modules=(), blocks_per_stage=(), saved_ops=()),
        fsdp=_group(FSDPPlan, options, shard_threshold_numel=0, ignored_modules=(), prefetch_blocks=0),
        pipeline=_group(PipelinePlan, options, layers_per_stage=(), block_costs=()),
        sync=_group(
            SyncPlan,
            options,
            kind=options.sync if options.sync != "auto" else ("dist_sync" if world_size > 1 else "local"),
            bucket_bytes=BUCKET_BYTES,
            reduction="mean",
        ),
        tensor_parallel=_group(TensorParallelPlan, options, rules=(), placements=()),
        backend=_group(BackendPlan, options),
        pins=_changed(options, PlanOptions()),
        provenance=f"derived from settings for {world_size} ranks",
    )
    validate_plan(plan, world_size)
    return plan


def _group(kind: type[G], options: PlanOptions, /, **derived: Any) -> G:
    """A group of a plan: its fields of the same name in ``options``, and those that are ``derived``."""
    values = {name: getattr(options, name) for name in get_type_hints(kind) if hasattr(options, name)}
    return kind(**values | derived)


def _changed(options: PlanOptions, defaults: PlanOptions) -> tuple[str, ...]:
    """Names of the options that differ from ``defaults``."""
    return tuple(f.name for f in fields(options) if getattr(options, f.name) != getattr(defaults, f.name))


def worker_plan(plan: Plan) -> Plan:
    """The plan of one asynchronous worker, which computes one batch shard; other plans are returned as they are."""
    if plan.sync.kind != "dist_async":
        return plan
    share = plan.batch.global_batch // plan.mesh.dp_replicate
    return plan.updated(
        mesh={"dp_replicate": 1},
        batch={"global_batch": share},
        sync={"kind": "local", "compression": "none", "staleness": None, "staleness_lr_decay": False},
    )
