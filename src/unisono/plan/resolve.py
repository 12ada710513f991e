"""Resolves the options of a user into a complete plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
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
    load_fields,
    option_of,
)
from unisono.plan.validate import validate_plan
from unisono.storage.files import look_up

LARGEST_AUTOMATIC_MICRO_BATCH = 32

G = TypeVar("G")


def with_strategy_file(options: PlanOptions) -> tuple[PlanOptions, dict[str, Any]]:
    """The options with what their strategy file sets of them, and all fields of the file by dotted name.

    Raises PlanError where the file cannot be read, or where an option is set to another value than the file has.
    """
    if not options.file:
        return options, {}
    given = load_fields(look_up(options.file)[0])
    values = {option: value for name, value in given.items() if (option := option_of(name))}
    both = [name for name in _changed(options, PlanOptions(file=options.file)) if name in values]
    if clashes := [name for name in both if getattr(options, name) != values[name]]:
        raise PlanError(
            given=f"plan.file {options.file!r} with {', '.join(f'plan.{name}' for name in clashes)}",
            rule="a field that the strategy file gives is not set to another value",
            consequence="it would be unclear which of the two counts",
            nearest=f"change {', '.join(clashes)} in the file, or leave {'them' if len(clashes) > 1 else 'it'} out of one",
        )
    return replace(options, **values), given


def derive_plan(options: PlanOptions, *, world_size: int, device: str, native_bf16: bool) -> Plan:
    """Derive the fields that neither the options nor their strategy file set.

    Args:
        options: Options of the user.
        world_size: Number of ranks of the job.
        device: Device type in use, such as ``cuda`` or ``cpu``.
        native_bf16: Whether the device computes in bf16 natively, so that precision ``auto`` means bf16.

    Raises:
        PlanError: The strategy file cannot be read or contradicts the options, or the plan breaks a rule on this number of
            ranks; it holds all problems at once.
    """
    set_options = _changed(options, PlanOptions(file=options.file))
    options, given = with_strategy_file(options)
    ranks = max(1, world_size // max(1, options.pp * options.cp * options.tp))
    replicas = given.get("mesh.dp_replicate")
    if replicas and "mesh.dp_shard" not in given and "dp_shard" not in set_options:
        options = replace(options, dp_shard=max(1, ranks // replicas))
    dp_shard = options.dp_shard or ranks
    share = -(-options.global_batch // ranks)
    passes = max(1, given.get("batch.accumulation", 1))
    micro_batch = options.micro_batch or max(1, min(-(-share // passes), LARGEST_AUTOMATIC_MICRO_BATCH))
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
        pins=set_options,
        provenance=f"derived from settings for {world_size} ranks",
    )
    if given:
        plan = _with_given(plan, given, options.file)
    validate_plan(plan, world_size)
    return plan


def _with_given(plan: Plan, given: Mapping[str, Any], file: str) -> Plan:
    """``plan`` with the fields of its strategy file, and what was derived for the others said."""
    groups: dict[str, dict[str, Any]] = {}
    for name, value in given.items():
        group, _, short = name.partition(".")
        groups.setdefault(group, {})[short] = value
    plan = plan.updated(**groups)
    if given.keys() >= {name for name in plan.decisions() if "." in name}:
        return replace(plan, pins=(FROM_FILE,), provenance=f"strategy file {file}")
    own = [name for name in plan.pins if name not in {option_of(field) for field in given}]
    return replace(
        plan,
        pins=(*own, *(f"{FROM_FILE}:{name}" for name in given)),
        provenance=f"strategy file {file}, the rest {plan.provenance}",
    )


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
