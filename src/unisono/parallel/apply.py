"""Applies a plan to a module in place: layout, recompute, compile. Parameter names do not change."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import nn

from unisono.errors import PlanError, Problem
from unisono.parallel.batch_norm import batch_norms, check_batch_norm, synchronise_batch_norm
from unisono.parallel.context import Context
from unisono.parallel.dtypes import compute_in, convert
from unisono.parallel.expert import count_whole_sequences, cut_experts, expert_layers
from unisono.parallel.fp8 import use_fp8
from unisono.parallel.grid import Grid
from unisono.parallel.layout import Layout
from unisono.parallel.offload import offload
from unisono.parallel.recompute import check_caches, named_modules, recompute, recompute_named
from unisono.parallel.shard import place
from unisono.parallel.sharded import shard
from unisono.parallel.stages import Stages
from unisono.parallel.tensor import cut
from unisono.parallel.whole import Whole
from unisono.plan.plan import Plan
from unisono.plan.schedule import stage_of


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


class Applied(NamedTuple):
    """The model as the plan wants it, what it was before, and in a pipeline the stages of it that are here."""

    model: nn.Module
    global_spec: Whole
    stages: Stages | None


def apply(
    plan: Plan,
    model: nn.Module,
    grid: Grid | None = None,
    context: Context | None = None,
    layout: Layout | None = None,
) -> Applied:
    """Arrange ``model`` as the plan says, in place. Raises PlanError where a choice would act on nothing.

    Of several ranks all call it, with equal models and the ``grid`` they are in, with a ``context`` of that model where they
    share sequences, and with its ``layout`` where they are stages of a pipeline.
    """
    if plan.channels_last:
        model = model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    blocks = repeated_blocks(model)
    for choice, acts, near in (
        ("recompute", plan.recompute != "none" and not plan.recompute_modules, "'none'"),
        ("offload", plan.offload, "False"),
        ("compile", plan.compile == "regional", "'model'"),
        ("cp", context is not None, "1"),
    ):
        if acts and not blocks:
            raise PlanError(
                Problem(
                    given=f"plan.{choice}={getattr(plan, choice)!r} for {type(model).__name__}",
                    rule="it acts on repeated blocks: a ModuleList or Sequential with two or more members of one class",
                    consequence="it would change nothing",
                    nearest=f"plan.{choice}={near}, or keep the blocks in a ModuleList",
                )
            )
    if plan.compile != "off" and any(expert_layers(model)):
        raise PlanError(
            Problem(
                given=f"plan.compile={plan.compile!r} for {type(model).__name__} with experts",
                rule="how many tokens an expert gets is known only when they are there; compiled graphs have fixed shapes",
                consequence="the graph would break in every block",
                nearest="compile='off', or model.experts=0",
            )
        )
    check_caches(plan, model)
    named = named_modules(plan, model, blocks)
    use_fp8(plan, blocks)
    check_batch_norm(model, plan)
    computes = convert(plan, model)
    whole = Whole.from_model(model)
    stages = None
    if grid is not None:
        if plan.dp_world_size > 1 and batch_norms(model):
            synchronise_batch_norm(model, grid.group("data"))
        if plan.placements:
            place(model, grid)
        elif plan.tp > 1:
            cut(model, grid)
        if plan.ep > 1:
            cut_experts(model, grid)
        if plan.cp > 1 or plan.sequence_parallel:
            count_whole_sequences(model, grid)
    compute_in(model, computes, plan.device)
    if context is not None:
        inside = {inner for block in blocks for inner in block.modules()} - set(blocks)
        context.wrap_blocks(blocks, [module for module in named.values() if module in inside])
    if layout is not None:
        assert grid is not None
        stages = Stages(
            model, layout, [stage_of(plan.schedule, plan.pp, grid.rank_along("pp"), n) for n in range(plan.stages_per_rank)]
        )
        blocks = stages.blocks
    pieces = {each: stages.blocks_of(each) for each in stages.stage_ids} if stages else {0: blocks}
    if plan.recompute_modules:
        recompute_named(plan, named, list(pieces.values()) if stages else [[model]])
    else:
        for piece, members in pieces.items():
            recompute(plan, members, piece)
    if plan.offload:
        offload(blocks, pinned=True)
    if plan.compile == "regional":
        for block in blocks:
            block.compile(**_compile_arguments(plan))
    elif plan.compile == "model":
        model.compile(**_compile_arguments(plan))
    if plan.uses_fsdp:
        assert grid is not None
        shard(model, whole, blocks, grid)
    return Applied(model, whole, stages)


def _compile_arguments(plan: Plan) -> dict[str, Any]:
    arguments: dict[str, Any] = {"dynamic": False}
    if plan.device != "cpu":
        arguments["mode"] = "max-autotune" if plan.autotune else "reduce-overhead"  # both use device graphs
    return arguments
