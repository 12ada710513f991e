"""From what a user set to a whole plan."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

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


def load_plan(options: PlanOptions) -> Plan:
    """The plan of ``options.file``. Raises PlanError where it cannot be read, or where other options are set too."""
    defaults = PlanOptions(file=options.file)
    also_set = [f"plan.{f.name}" for f in fields(options) if getattr(options, f.name) != getattr(defaults, f.name)]
    if also_set:
        raise PlanError(
            given=f"plan.file {options.file!r} with {', '.join(also_set)}",
            rule="a strategy file holds the whole plan",
            consequence="it would be unclear which of the two counts",
            nearest="change the file, or leave it out and set options only",
        )
    return replace(Plan.load(Path(options.file).expanduser()), pins=(FROM_FILE,))


def derive_plan(options: PlanOptions, *, world_size: int, device: str, native_bf16: bool) -> Plan:
    """Fill in what the user left open. ``device`` is the device type in use; raises PlanError with all problems at once."""
    defaults = PlanOptions()
    ranks = max(1, world_size // (options.pp * options.cp * options.tp))
    dp_shard = options.dp_shard or ranks
    share = -(-options.global_batch // ranks)
    micro_batch = options.micro_batch or min(share, LARGEST_AUTOMATIC_MICRO_BATCH)
    plan = Plan(
        mesh=MeshPlan(
            device=device,
            pp=options.pp,
            dp_replicate=max(1, ranks // dp_shard),
            dp_shard=dp_shard,
            cp=options.cp,
            tp=options.tp,
            ep=options.ep,
        ),
        batch=BatchPlan(
            global_batch=options.global_batch,
            micro_batch=micro_batch,
            accumulation=-(-share // micro_batch),
        ),
        precision=PrecisionPlan(
            compute=options.precision if options.precision != "auto" else ("bf16" if native_bf16 else "fp32"),
            dtype_rules=(),
        ),
        recompute=RecomputePlan(
            mode=options.recompute, modules=(), blocks_per_stage=(), saved_ops=(), offload=options.offload
        ),
        fsdp=FSDPPlan(zero=options.zero, shard_threshold_numel=0, ignored_modules=(), prefetch_blocks=0),
        pipeline=PipelinePlan(schedule=options.schedule, layers_per_stage=(), block_costs=()),
        sync=SyncPlan(
            kind=options.sync if options.sync != "auto" else ("dist_sync" if world_size > 1 else "local"),
            compression=options.compression,
            bucket_bytes=BUCKET_BYTES,
            reduction="mean",
            staleness=options.staleness,
            staleness_lr_decay=options.staleness_lr_decay,
            local_steps=options.local_steps,
            outer_lr=options.outer_lr,
            outer_momentum=options.outer_momentum,
            num_fragments=options.num_fragments,
            outer_delay_steps=options.outer_delay_steps,
        ),
        tensor_parallel=TensorParallelPlan(sequence_parallel=options.sequence_parallel, rules=(), placements=()),
        backend=BackendPlan(
            compile=options.compile,
            tf32=options.tf32,
            autotune=options.autotune,
            channels_last=options.channels_last,
        ),
        pins=tuple(f.name for f in fields(options) if getattr(options, f.name) != getattr(defaults, f.name)),
        provenance=f"derived from settings for {world_size} ranks",
    )
    validate_plan(plan, world_size)
    return plan


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
