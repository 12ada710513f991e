"""From what a user set to a whole plan."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from unisono.errors import PlanError
from unisono.plan.options import PlanOptions
from unisono.plan.plan import BUCKET_BYTES, Plan
from unisono.plan.validate import validate_plan

LARGEST_AUTOMATIC_MICRO_BATCH = 32


def load_plan(options: PlanOptions) -> Plan:
    """The plan of ``options.file``. Raises PlanError where it cannot be read, or where other options are set beside it."""
    unset = PlanOptions(file=options.file)
    set_too = [f"plan.{f.name}" for f in fields(options) if getattr(options, f.name) != getattr(unset, f.name)]
    if set_too:
        raise PlanError(
            given=f"plan.file {options.file!r} with {', '.join(set_too)}",
            rule="a strategy file holds the whole plan",
            consequence="it would be unclear which of the two counts",
            nearest="change the file, or leave it out and set options only",
        )
    return Plan.load(Path(options.file).expanduser())


def derive_plan(options: PlanOptions, *, world: int, device: str, native_bf16: bool) -> Plan:
    """Fill in what the user left open. ``device`` is the device type in use; raises PlanError with all problems at once."""
    ranks = max(1, world // (options.pp * options.cp * options.tp))
    dp_shard = options.dp_shard or ranks
    share = -(-options.global_batch // ranks)
    micro_batch = options.micro_batch or min(share, LARGEST_AUTOMATIC_MICRO_BATCH)
    plan = Plan(
        device=device,
        pp=options.pp,
        dp_replicate=max(1, ranks // dp_shard),
        dp_shard=dp_shard,
        cp=options.cp,
        tp=options.tp,
        ep=options.ep,
        zero=options.zero,
        shard_threshold_numel=0,
        unsharded=(),
        prefetch_blocks=0,
        bucket_bytes=BUCKET_BYTES,
        sequence_parallel=options.sequence_parallel,
        schedule=options.schedule,
        splits=(),
        weights=(),
        rules=(),
        placements=(),
        global_batch=options.global_batch,
        micro_batch=micro_batch,
        accumulation=-(-share // micro_batch),
        precision=options.precision if options.precision != "auto" else ("bf16" if native_bf16 else "fp32"),
        dtypes=(),
        recompute=options.recompute,
        recompute_modules=(),
        recompute_blocks=(),
        recompute_keep=(),
        offload=options.offload,
        compile=options.compile,
        sync=options.sync if options.sync != "auto" else ("dist_sync" if world > 1 else "local"),
        compression=options.compression,
        staleness=options.staleness,
        damping=options.damping,
        local_steps=options.local_steps,
        outer_lr=options.outer_lr,
        outer_momentum=options.outer_momentum,
        fragments=options.fragments,
        overlap_steps=options.overlap_steps,
        gradients="mean",
        tf32=options.tf32,
        autotune=options.autotune,
        channels_last=options.channels_last,
        pins=tuple(f.name for f in fields(options) if getattr(options, f.name) != getattr(PlanOptions(), f.name)),
        provenance=f"derived from settings for {world} ranks",
    )
    validate_plan(plan, world)
    return plan
