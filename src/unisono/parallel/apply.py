"""Applies a plan to a module in place: layout, recompute, compile. Parameter names do not change."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from unisono.errors import PlanError, Problem, nearest_name
from unisono.parallel.expert import count_whole_sequences, cut_experts, expert_layers
from unisono.parallel.context import Context
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
    _aten._grouped_mm.default,
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


def apply(plan: Plan, model: nn.Module, grid: Grid | None = None, context: Context | None = None) -> nn.Module:
    """Return ``model`` arranged as the plan says. Raises PlanError where a choice would act on nothing.

    Where parameters are spread over ranks, all of them call it, with equal models and the ``grid`` they are in, and with a
    ``context`` of that model where they share sequences.
    """
    if plan.channels_last:
        model = model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    blocks = repeated_blocks(model)
    for choice, acts, near in (
        ("recompute", plan.recompute != "none", "'none'"),
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
    if plan.tp > 1:
        assert grid is not None
        cut(model, grid)
    if plan.ep > 1:
        assert grid is not None
        cut_experts(model, grid)
    if plan.cp > 1:
        assert grid is not None
        count_whole_sequences(model, grid)
    if context is not None:
        context.wrap(blocks)
    recompute(plan, blocks)
    if plan.compile == "regional":
        for block in blocks:
            block.compile(**_compile_arguments(plan))
    elif plan.compile == "model":
        model.compile(**_compile_arguments(plan))
    if plan.sharded:
        assert grid is not None
        shard(model, blocks, grid)
    return model


def recompute(plan: Plan, blocks: Sequence[nn.Module], piece: int = 0) -> None:
    """Have blocks of piece number ``piece`` of the model computed again in the backward pass, as the plan says.

    Raises PlanError: more blocks than there are, an operator that does not exist; and in the first forward pass where an
    operator to keep was not run.
    """
    if plan.recompute == "none":
        return
    count = plan.recompute_blocks[piece] if plan.recompute_blocks else len(blocks)
    if count > len(blocks):
        raise PlanError(
            Problem(
                given=f"recompute_blocks[{piece}] is {count}, and that piece of the model has {len(blocks)} blocks",
                rule="it counts blocks of the piece, from the first on",
                consequence="less memory would be free than was planned",
                nearest=f"{len(blocks)}",
            )
        )
    policy = _Policy(plan.recompute_keep) if plan.recompute == "selective" else None
    for block in blocks[:count]:
        _recompute(block, policy, last=block is blocks[count - 1])


class _Policy:
    """Which results stay: those of the operators named, or of the built-in list."""

    def __init__(self, names: Sequence[str]) -> None:
        known = {name.partition("::")[2].partition(".")[0] for name in _all_operators() if name.startswith("aten::")}
        problems = [
            Problem(
                given=f"recompute_keep {name!r}",
                rule="it names operators of aten, without overload, such as 'mm', that make a new tensor and draw nothing",
                consequence="nothing could be kept, or what is drawn again would be other numbers",
                nearest=nearest_name(name, known - {name}),
            )
            for name in names
            if name not in known or name.endswith("_") or _draws(name)
        ]
        if problems:
            raise PlanError(*problems)
        self._names = frozenset(names)
        self.unused = set(names)

    def __call__(self, _context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        if not self._names:
            return CheckpointPolicy.MUST_SAVE if operator in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
        name = str(operator.overloadpacket.__name__)
        self.unused.discard(name)
        return CheckpointPolicy.MUST_SAVE if name in self._names else CheckpointPolicy.PREFER_RECOMPUTE

    def check(self) -> None:
        """After the blocks have run. Raises PlanError for a name that nothing was kept by."""
        if self.unused:
            raise PlanError(
                Problem(
                    given=f"recompute_keep {', '.join(sorted(self.unused))}",
                    rule="it names operators that the recomputed blocks run",
                    consequence="it would keep nothing",
                    nearest="leave it out, or see which operators run with torch.profiler",
                )
            )


def _draws(name: str) -> bool:
    """Whether random numbers are skipped when the operator's result is kept. Attention draws only with a dropout of its own."""
    packet: Any = getattr(torch.ops.aten, name)
    overloads = [getattr(packet, each) for each in packet.overloads()]
    return "attention" not in name and any(torch.Tag.nondeterministic_seeded in each.tags for each in overloads)


def _all_operators() -> list[str]:
    # the registry; torch.ops.aten itself lists only those that were used before
    return torch._C._dispatch_get_all_op_names()  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType, reportUnknownMemberType, reportAttributeAccessIssue]


def _recompute(block: nn.Module, policy: _Policy | None, *, last: bool) -> None:
    """Replace the block's forward by one that keeps only its inputs (and what the policy names)."""
    inner = block.forward
    arguments: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": True}
    if policy is not None:
        arguments["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        # Nothing is saved in evaluation, so there is nothing to compute again.
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        result = checkpoint(inner, *args, **arguments, **kwargs)
        if last and policy is not None and policy.unused and not torch.compiler.is_compiling():
            policy.check()
        return result

    block.forward = forward


def _compile_arguments(plan: Plan) -> dict[str, Any]:
    arguments: dict[str, Any] = {"dynamic": False}
    if plan.device != "cpu":
        arguments["mode"] = "max-autotune" if plan.autotune else "reduce-overhead"  # both use device graphs
    return arguments
