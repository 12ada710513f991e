"""Applies a plan to a module in place: layout, recompute, compile. Parameter names do not change."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from unisono.errors import PlanError, Problem
from unisono.parallel.grid import Grid
from unisono.parallel.sharded import shard
from unisono.parallel.tensor import cut
from unisono.plan.plan import Plan

_aten: Any = torch.ops.aten
# Selective recompute keeps what costs a matrix product or an attention to make again (Korthikanti et al. 2022, turned around).
_KEPT = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten.convolution.default,
}


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


def apply(plan: Plan, model: nn.Module, grid: Grid | None = None, blocks: list[nn.Module] | None = None) -> nn.Module:
    """Return ``model`` arranged as the plan says. Raises PlanError where a choice would act on nothing.

    Where parameters are spread over ranks, all of them call it, with equal models and the ``grid`` they are in. ``blocks`` are
    those that a pipeline stage has kept; without it the repeated blocks.
    """
    if plan.channels_last:
        model = model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    blocks = repeated_blocks(model) if blocks is None else blocks
    for choice, acts in (("recompute", plan.recompute != "none"), ("compile", plan.compile == "regional")):
        if acts and not blocks:
            raise PlanError(
                Problem(
                    given=f"plan.{choice}={getattr(plan, choice)!r} for {type(model).__name__}",
                    rule="it acts on repeated blocks: a ModuleList or Sequential with two or more members of one class",
                    consequence="it would change nothing",
                    nearest=f"plan.{choice}={('none' if choice == 'recompute' else 'model')!r}, "
                    "or keep the blocks in a ModuleList",
                )
            )
    if plan.tp > 1:
        assert grid is not None
        cut(model, grid)
    if plan.recompute != "none":
        for block in blocks:
            _recompute(block, selective=plan.recompute == "selective")
    if plan.compile == "regional":
        for block in blocks:
            block.compile(**_compile_arguments(plan))
    elif plan.compile == "model":
        model.compile(**_compile_arguments(plan))
    if plan.sharded:
        assert grid is not None
        shard(model, blocks, grid)
    return model


def _recompute(block: nn.Module, *, selective: bool) -> None:
    """Replace the block's forward by one that keeps only its inputs (and, selective, its matrix products)."""
    inner = block.forward
    arguments: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": True}
    if selective:
        arguments["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        # Nothing is saved in evaluation, so there is nothing to compute again.
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        return checkpoint(inner, *args, **arguments, **kwargs)

    block.forward = forward


def _policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def _compile_arguments(plan: Plan) -> dict[str, Any]:
    arguments: dict[str, Any] = {"dynamic": False}
    if plan.device != "cpu":
        arguments["mode"] = "max-autotune" if plan.autotune else "reduce-overhead"  # both use device graphs
    return arguments
