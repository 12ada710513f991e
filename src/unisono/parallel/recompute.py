"""Recompute: activations that are dropped in the forward pass and computed again in the backward pass (Chen et al. 2016)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from unisono.errors import PlanError, Problem, nearest_name
from unisono.parallel.context_transformers import models_of_transformers
from unisono.plan.plan import Plan

_aten: Any = torch.ops.aten
# Selective recompute keeps what costs a matrix product or an attention to make again (Korthikanti et al. 2022, turned around).
# Attention that drops is run again all the same: kept, it would draw nothing, and dropout behind it would draw its numbers.
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
    policy = _one_policy(plan.recompute_keep).begin() if plan.recompute == "selective" else None
    for block in blocks[:count]:
        _recompute(block, policy, last=block is blocks[count - 1])


def check_caches(plan: Plan, model: nn.Module) -> None:
    """Raises PlanError for a model of transformers that keeps keys for later tokens: blocks would add them once more in the
    backward pass, and what recompute drops would be held by the cache."""
    for each in models_of_transformers(model) if plan.recompute != "none" else []:
        # encoders, such as BERT, have the setting and keep nothing
        decodes = any(getattr(m, "is_causal", False) or getattr(m, "is_decoder", False) for m in each.modules())
        if decodes and getattr(each.config, "use_cache", False):
            raise PlanError(
                Problem(
                    given=f"plan.recompute={plan.recompute!r} for {type(each).__name__} with config.use_cache=True",
                    rule="a block that is computed again leaves nothing behind; a cache takes its keys and values each time",
                    consequence="the second pass would see another cache than the first, and nothing be saved of keys and values",
                    nearest="model.config.use_cache=False (a cache is of use in generation only)",
                )
            )


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
        self.unused: set[str] = set()

    def begin(self) -> _Policy:
        """Before the blocks of a model run."""
        self.unused = set(self._names)
        return self

    def __call__(self, _context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if not self._names:
            keeps = operator in _KEPT and not _dropout_of(operator, args, kwargs)
            return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE
        name = str(operator.overloadpacket.__name__)
        if name in self._names and (dropout := _dropout_of(operator, args, kwargs)):
            raise PlanError(
                Problem(
                    given=f"recompute_keep {name!r} of attention with dropout {dropout}",
                    rule="what is kept is not run again, and then draws nothing",
                    consequence="dropout behind it in the block would draw other numbers than in the forward pass",
                    nearest=f"recompute_keep without {name!r}, or attention without dropout",
                )
            )
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


@functools.cache
def _one_policy(names: tuple[str, ...]) -> _Policy:
    # One object for all models of a process: compiled code is bound to it, and would be compiled again for each model.
    return _Policy(names)


def _dropout_of(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """``dropout_p`` of a call of attention; 0 of anything else."""
    if "attention" not in operator.overloadpacket.__name__:
        return 0.0
    names = [each.name for each in operator._schema.arguments]
    return float((dict(zip(names, args, strict=False)) | kwargs).get("dropout_p", 0.0))


def _draws(name: str) -> bool:
    """Whether random numbers are skipped when the operator's result is kept. Attention draws only with a dropout of its own,
    which is known when it runs."""
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
    if any(True for _ in block.buffers()):
        arguments["context_fn"] = functools.partial(_contexts, block, arguments.get("context_fn"))

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        # Nothing is saved in evaluation, so there is nothing to compute again.
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        return checkpoint(inner, *args, **arguments, **kwargs)

    block.forward = forward
    # beside the others' forward, not in it: blocks that are alike are compiled once
    if last and policy is not None and policy.unused:
        block.forward = _checked(forward, policy)


def _checked(forward: Callable[..., Any], policy: _Policy) -> Callable[..., Any]:
    """The last block's: names that no block has run are known behind it."""

    @functools.wraps(forward)
    def checked(*args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            policy.check()
        return result

    return checked


def _contexts(block: nn.Module, inner: Any) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    forward, again = inner() if inner is not None else (nullcontext(), nullcontext())
    return forward, _buffers_aside(block, again)


@contextmanager
def _buffers_aside(block: nn.Module, inner: AbstractContextManager[Any]) -> Generator[None]:
    """Run again on copies of the buffers: a batch norm has counted this batch already."""
    kept = [(module, name, each) for module in block.modules() for name, each in module.named_buffers(recurse=False)]
    for module, name, buffer in kept:
        setattr(module, name, buffer.clone())
    try:
        with inner:
            yield
    finally:
        for module, name, buffer in kept:
            setattr(module, name, buffer)
