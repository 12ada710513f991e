"""Applies a plan to a model in place, as an ordered list of transforms. Parameter names do not change.

A transform gets the model that the transforms before it in ``TRANSFORMS`` left; comments there explain the order. To add one
(quantisation-aware training, LoRA, an observer of activations), write its two functions and add an entry.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from unisono.errors import PlanError, Problem
from unisono.parallel.batch_norm import apply_sync_batch_norm, batch_norms, check_batch_norm
from unisono.parallel.context import ContextParallel
from unisono.parallel.expert import apply_expert_parallel, check_experts, expert_layers, sum_balance_counts
from unisono.parallel.fsdp import apply_fsdp, check_unsharded
from unisono.parallel.mesh import ParallelDims
from unisono.parallel.pipeline.partition import PipelinePartition
from unisono.parallel.pipeline.stages import PipelineStages
from unisono.parallel.precision import apply_fp8, check_dtype_rules, check_fp8, convert_parameters, set_compute_dtypes
from unisono.parallel.recompute import (
    check_kv_caches,
    find_recomputed_modules,
    offload_activations,
    recompute_blocks,
    recompute_modules,
)
from unisono.parallel.sharding import ShardTable
from unisono.parallel.tensor.dtensor_placements import Dims, apply_placements, check_placements
from unisono.parallel.tensor.pinned_dims import check_pinned_dims, pin_dims, resolve_pinned_dims
from unisono.parallel.tensor.tensor_parallel import apply_tensor_parallel
from unisono.parallel.tensor.tp_validation import resolve_rules
from unisono.plan.pipeline_schedule import stage_index
from unisono.plan.plan import Plan
from unisono.storage.files import os_reason
from unisono.storage.ownership import make_and_check_folder


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The children of the longest ModuleList or Sequential whose members are mostly of one class; [] if there is none."""
    best: list[nn.Module] = []
    for module in model.modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        children = list(module)
        if len(children) < 2:
            continue
        kind, count = Counter(type(child) for child in children).most_common(1)[0]
        if count >= 2 and count > len(best):
            best = [child for child in children if type(child) is kind]
    return best


@dataclass(kw_only=True, slots=True)
class ParallelModel:
    """A model while a plan is applied to it, and afterwards.

    Attributes:
        model: The model, which transforms change in place.
        plan: The plan that is applied.
        blocks: The repeated blocks of the model; in a pipeline those of this rank's stages.
        table: The shards of the parameters that this rank holds.
        context: The context parallelism of a plan with ``cp``.
        partition: The blocks and parameters of each stage, for a plan with ``pp``.
        stages: This rank's stages, once a plan with ``pp`` is applied.
        recomputed: Modules that the backward pass computes again, by their names in the global model.
        compute_dtypes: Dtypes in which modules compute, by their names in the global model; only those that a dtype rule sets.
        placed: Placement of each parameter of the global model, by name, once placements of the plan are applied; of the placed
            ones alone where none is over ``tp``.
        cast_before_gather: Parameters of the global model that the forward pass only converts (``weight_casts``), by name.
    """

    model: nn.Module
    plan: Plan
    blocks: list[nn.Module]
    table: ShardTable
    context: ContextParallel | None = None
    partition: PipelinePartition | None = None
    stages: PipelineStages | None = None
    recomputed: dict[str, nn.Module] = field(default_factory=dict[str, nn.Module])
    compute_dtypes: dict[str, torch.dtype] = field(default_factory=dict[str, torch.dtype])
    placed: dict[str, Dims] = field(default_factory=dict[str, Dims])
    cast_before_gather: Collection[str] = ()


class Transform(NamedTuple):
    """One change of a model that a plan may ask for.

    Args:
        name: Name of the change, of which ``TRANSFORMS`` has each once.
        is_active: Whether a plan asks for it.
        validate: Called with the global model and the plan; raises PlanError with all problems.
        apply: Called with a ``ParallelModel`` and the ``ParallelDims`` (None for a single process); changes the model in place.
    """

    name: str
    is_active: Callable[[Plan], bool]
    validate: Callable[[nn.Module, Plan], object]
    apply: Callable[[ParallelModel, Any], None]

    def check(self, model: nn.Module, plan: Plan) -> tuple[Problem, ...]:
        """Problems of applying this transform to ``model``, which is not transformed yet."""
        try:
            self.validate(model, plan)
        except PlanError as error:
            return error.problems
        return ()


def check_transforms(model: nn.Module, plan: Plan, transforms: Sequence[Transform] | None = None) -> list[Problem]:
    """All problems of applying to ``model`` those of ``transforms`` (default ``TRANSFORMS``) that are active in ``plan``."""
    active = [transform for transform in transforms or TRANSFORMS if transform.is_active(plan)]
    return [problem for transform in active for problem in transform.check(model, plan)]


def parallelize(
    plan: Plan,
    model: nn.Module,
    dims: ParallelDims | None = None,
    context: ContextParallel | None = None,
    partition: PipelinePartition | None = None,
    transforms: Sequence[Transform] | None = None,
    cast_before_gather: Collection[str] = (),
) -> ParallelModel:
    """Apply those transforms that are active in ``plan`` to ``model``, in place. All ranks call it, with equal models.

    Args:
        plan: The plan to apply.
        model: The global model, in memory or on the meta device.
        dims: The mesh of the ranks; None for a single process.
        context: The model's context parallelism, if the plan has ``cp``.
        partition: The model's partition into stages, if the plan has ``pp``.
        transforms: Transforms in the order in which they are applied; default ``TRANSFORMS``.
        cast_before_gather: Parameters that the forward pass only converts, by name (``parameters_to_cast``).

    Raises:
        PlanError: With all problems of the transforms; nothing was changed.
    """
    problems = check_transforms(model, plan, transforms)
    if problems:
        raise PlanError(*problems)
    parallel = ParallelModel(
        model=model,
        plan=plan,
        blocks=repeated_blocks(model),
        table=ShardTable(model),
        context=context,
        partition=partition,
        cast_before_gather=cast_before_gather,
    )
    for transform in transforms or TRANSFORMS:
        if transform.is_active(plan):
            transform.apply(parallel, dims)
    if dims is not None:
        parallel.table.number_replicas(dims)
    return parallel


def _lay_out_channels_last(parallel: ParallelModel, _dims: ParallelDims | None) -> None:
    parallel.model = parallel.model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


def _convert_parameters(parallel: ParallelModel, _dims: ParallelDims | None) -> None:
    parallel.compute_dtypes, reduce_dtypes = convert_parameters(parallel.model, parallel.plan)
    parallel.table = ShardTable(parallel.model, reduce_dtypes)  # of the global model in its own dtypes


def _sync_batch_norm(parallel: ParallelModel, dims: ParallelDims) -> None:
    if batch_norms(parallel.model):
        apply_sync_batch_norm(parallel.model, dims.group("data"))


def _select_recomputed(parallel: ParallelModel, _dims: ParallelDims | None) -> None:
    parallel.recomputed = find_recomputed_modules(parallel.plan, parallel.model, parallel.blocks)


def _apply_placements(parallel: ParallelModel, dims: ParallelDims) -> None:
    pinned = resolve_pinned_dims(parallel.model, parallel.plan)
    if parallel.plan.tensor_parallel.dtensor_placements:
        parallel.placed = apply_placements(parallel.model, dims, parallel.table)
    parallel.placed |= pinned
    pin_dims(parallel.table, pinned)


def _check_placements(model: nn.Module, plan: Plan) -> None:
    check_placements(model, plan, repeated_blocks(model))
    resolve_pinned_dims(model, plan)


def _apply_fsdp(parallel: ParallelModel, dims: ParallelDims) -> None:
    check_pinned_dims(parallel.table)
    apply_fsdp(parallel.model, parallel.blocks, dims, parallel.table, parallel.cast_before_gather)


def _apply_context_parallel(parallel: ParallelModel, _dims: ParallelDims | None) -> None:
    assert parallel.context is not None
    inside = {inner for block in parallel.blocks for inner in block.modules()} - set(parallel.blocks)
    parallel.context.wrap_blocks(
        parallel.blocks, [module for module in parallel.recomputed.values() if module in inside]
    )


def _split_stages(parallel: ParallelModel, dims: ParallelDims) -> None:
    plan = parallel.plan
    assert parallel.partition is not None
    stage_ids = [
        stage_index(plan.pipeline.schedule, plan.mesh.pp, dims.rank_along("pp"), n) for n in range(plan.stages_per_rank)
    ]
    parallel.stages = PipelineStages(parallel.model, parallel.partition, stage_ids)
    parallel.blocks = parallel.stages.blocks


def _recompute(parallel: ParallelModel, _dims: ParallelDims | None) -> None:
    stages = parallel.stages
    if parallel.plan.recompute.modules:
        blocks_by_stage = (
            [stages.blocks_of(stage) for stage in stages.stage_ids] if stages is not None else [[parallel.model]]
        )
        recompute_modules(parallel.plan, parallel.recomputed, blocks_by_stage)
    elif stages is not None:
        for stage in stages.stage_ids:
            recompute_blocks(parallel.plan, stages.blocks_of(stage), stage)
    else:
        recompute_blocks(parallel.plan, parallel.blocks)


def _check_recompute(model: nn.Module, plan: Plan) -> None:
    if not plan.recompute.modules:
        _check_blocks(f"recompute={plan.recompute.mode!r}", "recompute='none'", model)
    check_kv_caches(model, plan)
    find_recomputed_modules(plan, model, repeated_blocks(model))


def _compile(parallel: ParallelModel, _dims: ParallelDims | None) -> None:
    plan, arguments = parallel.plan, dict[str, Any](dynamic=False)
    if plan.mesh.device != "cpu":
        arguments["mode"] = "max-autotune" if plan.backend.autotune else "reduce-overhead"  # both use device graphs
    _check_compile_folder()
    for module in parallel.blocks if plan.backend.compile == "regional" else [parallel.model]:
        module.compile(**arguments)


def _check_compile_folder() -> None:
    """Refuse torch's folder of compiled code if another user can have written into it: by default its name in /tmp is known."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # slow to import

    folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir())
    try:
        reason = make_and_check_folder(folder, mode=0o700)
    except OSError as error:
        reason = f"{folder} cannot be made ({os_reason(error)})"
    if reason:
        raise PlanError(
            given=f"torch's folder of compiled code, which is not this user's alone: {reason}",
            rule="compiled code is loaded only from a folder that this user or root alone can have written",
            consequence="nothing was compiled, and nothing was loaded from it",
            nearest="TORCHINDUCTOR_CACHE_DIR with a folder of your own, or plan.compile=off",
        )


def _check_compile(model: nn.Module, plan: Plan) -> None:
    if plan.backend.compile == "regional":
        _check_blocks("compile='regional'", "compile='model'", model)
    if any(expert_layers(model)):
        raise PlanError(
            given=f"plan.compile={plan.backend.compile!r} for {type(model).__name__} with experts",
            rule="how many tokens an expert gets is known only when they are there; compiled graphs have fixed shapes",
            consequence="the graph would break in every block",
            nearest="compile='off', or model.num_experts=0",
        )


def _check_blocks(choice: str, near: str, model: nn.Module) -> None:
    if not repeated_blocks(model):
        raise PlanError(
            given=f"plan.{choice} for {type(model).__name__}",
            rule="it acts on repeated blocks: a ModuleList or Sequential with two or more members of one class",
            consequence="it would change nothing",
            nearest=f"plan.{near}, or keep the blocks in a ModuleList",
        )


def _fits_any_model(_model: nn.Module, _plan: Plan) -> None:
    """The check of a transform that any model can have."""


TRANSFORMS: tuple[Transform, ...] = (
    Transform("channels_last", lambda plan: plan.backend.channels_last, _fits_any_model, _lay_out_channels_last),
    # names of modules are resolved while the model is whole
    Transform("select_recomputed", lambda plan: bool(plan.recompute.modules), _fits_any_model, _select_recomputed),
    # these replace layers and parameters, so that what is sharded is what is trained
    Transform(
        "fp8",
        lambda plan: plan.precision.compute == "fp8",
        lambda model, plan: check_fp8(plan, repeated_blocks(model)),
        lambda parallel, _dims: apply_fp8(parallel.blocks),
    ),
    Transform(
        "parameter_dtypes", lambda plan: bool(plan.precision.dtype_rules), check_dtype_rules, _convert_parameters
    ),
    Transform(
        "sync_batch_norm",
        lambda plan: plan.mesh.dp_world_size > 1,
        check_batch_norm,
        _sync_batch_norm,
    ),
    # rules name layers of the whole model; of experts, tensor parallelism takes hidden units and expert parallelism what is left
    Transform(
        "placements",
        lambda plan: bool(plan.tensor_parallel.placements),
        _check_placements,
        _apply_placements,
    ),
    Transform(
        "tensor_parallel",
        lambda plan: plan.mesh.tp > 1 and not plan.tensor_parallel.dtensor_placements,
        resolve_rules,
        lambda parallel, dims: apply_tensor_parallel(parallel.model, dims, parallel.table),
    ),
    Transform(
        "expert_parallel",
        lambda plan: plan.mesh.ep > 1,
        check_experts,
        lambda parallel, dims: apply_expert_parallel(parallel.model, dims, parallel.table),
    ),
    Transform(
        "balance_counts",
        lambda plan: plan.mesh.cp > 1 or plan.tensor_parallel.sequence_parallel,
        _fits_any_model,
        lambda parallel, dims: sum_balance_counts(parallel.model, dims),
    ),
    # around what the layers compute now, collectives included
    Transform(
        "compute_dtypes",
        lambda plan: bool(plan.precision.dtype_rules),
        _fits_any_model,
        lambda parallel, _dims: set_compute_dtypes(parallel.model, parallel.compute_dtypes, parallel.plan.mesh.device),
    ),
    # inside recompute, which runs attention again
    Transform(
        "context_parallel",
        lambda plan: plan.mesh.cp > 1,
        lambda model, plan: _check_blocks(f"cp={plan.mesh.cp}", "cp=1", model),
        _apply_context_parallel,
    ),
    Transform("pipeline", lambda plan: plan.mesh.pp > 1, _fits_any_model, _split_stages),
    Transform("recompute", lambda plan: plan.recompute.mode != "none", _check_recompute, _recompute),
    # outside recompute: only what a recomputed block keeps waits on the host
    Transform(
        "offload",
        lambda plan: plan.recompute.offload,
        lambda model, _plan: _check_blocks("offload=True", "offload=False", model),
        lambda parallel, _dims: offload_activations(parallel.blocks, pinned=True),
    ),
    Transform("compile", lambda plan: plan.backend.compile != "off", _check_compile, _compile),
    # last: FSDP2 splits what is left, and gathers it around everything above
    Transform(
        "fsdp",
        lambda plan: plan.uses_fsdp,
        check_unsharded,
        _apply_fsdp,
    ),
)
