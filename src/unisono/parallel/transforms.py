"""Applies a plan to a module in place: layout, recompute, compile. Parameter names do not change."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import nn

from unisono.errors import PlanError
from unisono.parallel.batch_norm import apply_sync_batch_norm, batch_norms, check_batch_norm
from unisono.parallel.context import ContextParallel
from unisono.parallel.expert import apply_expert_parallel, expert_layers, sum_balance_counts
from unisono.parallel.fp8 import use_fp8
from unisono.parallel.fsdp import apply_fsdp
from unisono.parallel.global_spec import GlobalParameterSpec
from unisono.parallel.mesh import ParallelDims
from unisono.parallel.offload import offload_activations
from unisono.parallel.pipeline.partition import PipelinePartition
from unisono.parallel.pipeline.stages import PipelineStages
from unisono.parallel.precision import convert_parameters, set_compute_dtypes
from unisono.parallel.recompute import check_kv_caches, find_recomputed_modules, recompute_blocks, recompute_modules
from unisono.parallel.tensor.dtensor_placements import apply_placements
from unisono.parallel.tensor.tensor_parallel import apply_tensor_parallel
from unisono.plan.pipeline_schedule import stage_index
from unisono.plan.plan import Plan


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


class ParallelModel(NamedTuple):
    """The model as the plan wants it, what it was before, and in a pipeline the stages of it that are here."""

    model: nn.Module
    global_spec: GlobalParameterSpec
    stages: PipelineStages | None


def parallelize(
    plan: Plan,
    model: nn.Module,
    grid: ParallelDims | None = None,
    context: ContextParallel | None = None,
    layout: PipelinePartition | None = None,
) -> ParallelModel:
    """Arrange ``model`` as the plan says, in place. Raises PlanError where a choice would act on nothing.

    Of several ranks all call it, with equal models and the ``grid`` they are in, with a ``context`` of that model where they
    share sequences, and with its ``layout`` where they are stages of a pipeline.
    """
    if plan.backend.channels_last:
        model = model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    blocks = repeated_blocks(model)
    mode, compiles = plan.recompute.mode, plan.backend.compile
    for choice, acts, near in (
        (f"recompute={mode!r}", mode != "none" and not plan.recompute.modules, "recompute='none'"),
        ("offload=True", plan.recompute.offload, "offload=False"),
        (f"compile={compiles!r}", compiles == "regional", "compile='model'"),
        (f"cp={plan.mesh.cp}", context is not None, "cp=1"),
    ):
        if acts and not blocks:
            raise PlanError(
                given=f"plan.{choice} for {type(model).__name__}",
                rule="it acts on repeated blocks: a ModuleList or Sequential with two or more members of one class",
                consequence="it would change nothing",
                nearest=f"plan.{near}, or keep the blocks in a ModuleList",
            )
    if plan.backend.compile != "off" and any(expert_layers(model)):
        raise PlanError(
            given=f"plan.compile={plan.backend.compile!r} for {type(model).__name__} with experts",
            rule="how many tokens an expert gets is known only when they are there; compiled graphs have fixed shapes",
            consequence="the graph would break in every block",
            nearest="compile='off', or model.num_experts=0",
        )
    check_kv_caches(plan, model)
    named = find_recomputed_modules(plan, model, blocks)
    use_fp8(plan, blocks)
    check_batch_norm(model, plan)
    computes = convert_parameters(plan, model)
    whole = GlobalParameterSpec.from_model(model)
    stages = None
    if grid is not None:
        if plan.mesh.dp_world_size > 1 and batch_norms(model):
            apply_sync_batch_norm(model, grid.group("data"))
        if plan.tensor_parallel.placements:
            apply_placements(model, grid)
        elif plan.mesh.tp > 1:
            apply_tensor_parallel(model, grid)
        if plan.mesh.ep > 1:
            apply_expert_parallel(model, grid)
        if plan.mesh.cp > 1 or plan.tensor_parallel.sequence_parallel:
            sum_balance_counts(model, grid)
    set_compute_dtypes(model, computes, plan.mesh.device)
    if context is not None:
        inside = {inner for block in blocks for inner in block.modules()} - set(blocks)
        context.wrap_blocks(blocks, [module for module in named.values() if module in inside])
    if layout is not None:
        assert grid is not None
        stages = PipelineStages(
            model,
            layout,
            [
                stage_index(plan.pipeline.schedule, plan.mesh.pp, grid.rank_along("pp"), n)
                for n in range(plan.stages_per_rank)
            ],
        )
        blocks = stages.blocks
    pieces = {each: stages.blocks_of(each) for each in stages.stage_ids} if stages else {0: blocks}
    if plan.recompute.modules:
        recompute_modules(plan, named, list(pieces.values()) if stages else [[model]])
    else:
        for piece, members in pieces.items():
            recompute_blocks(plan, members, piece)
    if plan.recompute.offload:
        offload_activations(blocks, pinned=True)
    if plan.backend.compile == "regional":
        for block in blocks:
            block.compile(**_compile_arguments(plan))
    elif plan.backend.compile == "model":
        model.compile(**_compile_arguments(plan))
    if plan.uses_fsdp:
        assert grid is not None
        apply_fsdp(model, whole, blocks, grid)
    return ParallelModel(model, whole, stages)


def _compile_arguments(plan: Plan) -> dict[str, Any]:
    arguments: dict[str, Any] = {"dynamic": False}
    if plan.mesh.device != "cpu":
        arguments["mode"] = "max-autotune" if plan.backend.autotune else "reduce-overhead"  # both use device graphs
    return arguments
