"""Recomputes activations in the backward pass (Chen et al. 2016), or offloads them to host memory (Rhu et al. 2016)."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from unisono.errors import PlanError, Problem, nearest_name
from unisono.parallel.context_transformers import models_of_transformers
from unisono.parallel.hooks import wrap_forward
from unisono.plan.plan import Plan
from unisono.plan.rules import match_modules
from unisono.plan.trace import trace

_aten: Any = torch.ops.aten
# Selective recompute saves the results of matrix products and attention (the reverse of Korthikanti et al. 2022). Attention with
# dropout is recomputed: if its result were saved, it would draw nothing, and dropout after it would draw its random numbers.
_SAVED = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._grouped_mm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten.convolution.default,
}


def recompute_blocks(plan: Plan, blocks: Sequence[nn.Module], stage: int = 0) -> None:
    """Recompute blocks of stage number ``stage`` in the backward pass, as the plan says.

    Raises PlanError if the plan counts more blocks than there are, or names an operator that does not exist; in the first forward
    pass, if no block runs a named operator.
    """
    if plan.recompute.mode == "none":
        return
    count = plan.recompute.blocks_per_stage[stage] if plan.recompute.blocks_per_stage else len(blocks)
    if count > len(blocks):
        raise PlanError(
            given=f"recompute.blocks_per_stage[{stage}] is {count}, and that stage has {len(blocks)} blocks",
            rule="it counts blocks of the stage, from the first on",
            consequence="less memory would be free than was planned",
            nearest=f"{len(blocks)}",
        )
    policy = _policy_of(plan)
    for block in blocks[:count]:
        _recompute(block, policy)
    if policy is not None and count:
        _check_policy_after(blocks[count - 1], policy)


def recompute_modules(plan: Plan, named: Mapping[str, nn.Module], stages: Sequence[Sequence[nn.Module]]) -> None:
    """Recompute the modules in ``named`` (from ``find_recomputed_modules``) in the backward pass.

    ``stages`` are this rank's stages, each a sequence of blocks, or the model alone.
    """
    policy = _policy_of(plan)
    for module in named.values():
        _recompute(module, policy)
    if policy is None:
        return
    for stage in stages:
        inside = {module for block in stage for module in block.modules()}
        # an operator that does not run in a stage with all kinds of modules runs in no stage
        if {_pattern(name) for name, module in named.items() if module in inside} == set(map(_pattern, named)):
            _check_policy_after(stage[-1], policy)


def find_recomputed_modules(plan: Plan, model: nn.Module, blocks: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """The modules that ``recompute.modules`` matches. Raises PlanError with the problems of all patterns."""
    modules = {name: module for name, module in model.named_modules() if name}
    pattern_of: dict[str, str] = {}
    problems: dict[str, Problem] = {}  # one for each pattern
    for pattern in plan.recompute.modules:
        given = f"recompute.modules {pattern!r}"
        if not (names := match_modules(pattern, modules)):
            problems[pattern] = Problem(
                given=given,
                rule="it names modules of the model",
                consequence="it would change nothing",
                nearest=nearest_name(pattern, set(map(_pattern, modules))),
            )
        for name in names:
            held = next((inner for inner in modules if inner.startswith(f"{name}.") and modules[inner] in blocks), None)
            if held:
                wrong = Problem(
                    given=f"{given}, which holds {held}",
                    rule="a module that is recomputed is a repeated block, lies in one, or holds none",
                    consequence="all blocks in it would keep their activations in the backward pass, as if none were recomputed",
                    nearest=repr(_pattern(held)),
                )
            elif type(modules[name]).forward is nn.Module.forward:  # a ModuleList
                wrong = _never_called(given, name)
            elif name in pattern_of:
                wrong = _twice(f"{name}, which {pattern_of[name]!r} and {pattern!r} name")
            else:
                pattern_of[name] = pattern
                continue
            problems.setdefault(pattern, wrong)
    for name, pattern in pattern_of.items():
        parts = name.split(".")
        for around in (".".join(parts[:count]) for count in range(1, len(parts))):
            if around in pattern_of:
                problems.setdefault(pattern, _twice(f"{name}, which {pattern!r} names, inside {around}"))
    if problems:
        raise PlanError(*problems.values())
    return {name: modules[name] for name in pattern_of}


def check_called(named: Mapping[str, nn.Module], model: nn.Module, inputs: Mapping[str, Tensor]) -> None:
    """Raises PlanError if the model never calls a module that is to be recomputed; ``inputs`` are those of any micro-batch."""
    called = {call.module for call in trace(model, inputs).calls}
    missing = {_pattern(name): name for name in named if name not in called}
    if missing:
        raise PlanError(*(_never_called(f"recompute.modules for {kind!r}", name) for kind, name in missing.items()))


def _never_called(given: str, name: str) -> Problem:
    return Problem(
        given=f"{given}: the model never calls {name}",
        rule="a module is recomputed where it is called; some are lists, or only lend their parameters",
        consequence="it would change nothing",
        nearest="the module that is called: one inside, or around it",
    )


def _twice(given: str) -> Problem:
    return Problem(
        given=given,
        rule="one pattern of recompute.modules names a module, and none one inside it",
        consequence="it would be computed again for each of them, or be unclear which counts",
        nearest="the outer or the inner modules, by patterns that do not overlap",
    )


def _pattern(name: str) -> str:
    """The pattern of the corresponding modules of all blocks."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def check_kv_caches(model: nn.Module, plan: Plan) -> None:
    """Raises PlanError for a model of transformers with a key/value cache: recomputed blocks would append to it once more, and it
    would hold activations that recompute frees."""
    for decoder in models_of_transformers(model):
        # encoders, such as BERT, have the setting but no cache
        decodes = any(getattr(m, "is_causal", False) or getattr(m, "is_decoder", False) for m in decoder.modules())
        if decodes and getattr(decoder.config, "use_cache", False):
            raise PlanError(
                given=f"plan.recompute={plan.recompute.mode!r} for {type(decoder).__name__} with config.use_cache=True",
                rule="a block that is computed again leaves nothing behind; a cache takes its keys and values each time",
                consequence="the second pass would see another cache than the first, and nothing be saved of keys and values",
                nearest="model.config.use_cache=False (a cache is of use in generation only)",
            )


class _Policy:
    """Selects the operators whose results are saved: those named, or the built-in list."""

    def __init__(self, names: Sequence[str]) -> None:
        operators = {
            name.partition("::")[2].partition(".")[0] for name in _all_operators() if name.startswith("aten::")
        }
        problems = [
            Problem(
                given=f"recompute.saved_ops {name!r}",
                rule="it names operators of aten, without overload, such as 'mm', that make a new tensor and draw nothing",
                consequence="nothing could be kept, or what is drawn again would be other numbers",
                nearest=nearest_name(name, operators - {name}),
            )
            for name in names
            if name not in operators or name.endswith("_") or _draws(name)
        ]
        if problems:
            raise PlanError(*problems)
        self._names = frozenset(names)
        self.unused: set[str] = set()

    def begin(self) -> _Policy:
        """Start with a new model: no named operator has run yet."""
        self.unused = set(self._names)
        return self

    def __call__(self, _context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if not self._names:
            saves = operator in _SAVED and not _dropout_of(operator, args, kwargs)
            return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE
        name = str(operator.overloadpacket.__name__)
        if name in self._names and (dropout := _dropout_of(operator, args, kwargs)):
            raise PlanError(
                given=f"recompute.saved_ops {name!r} of attention with dropout {dropout}",
                rule="what is kept is not run again, and then draws nothing",
                consequence="dropout behind it in the block would draw other numbers than in the forward pass",
                nearest=f"recompute.saved_ops without {name!r}, or attention without dropout",
            )
        self.unused.discard(name)
        return CheckpointPolicy.MUST_SAVE if name in self._names else CheckpointPolicy.PREFER_RECOMPUTE

    def check(self) -> None:
        """Called after the blocks have run. Raises PlanError for named operators that did not run."""
        if self.unused:
            raise PlanError(
                given=f"recompute.saved_ops {', '.join(sorted(self.unused))}",
                rule="it names operators that the recomputed blocks run",
                consequence="it would keep nothing",
                nearest="leave it out, or see which operators run with torch.profiler",
            )


def _policy_of(plan: Plan) -> _Policy | None:
    return _one_policy(plan.recompute.saved_ops).begin() if plan.recompute.mode == "selective" else None


@functools.cache
def _one_policy(names: tuple[str, ...]) -> _Policy:
    # One object for all models of a process, because compiled code depends on it: a new object would mean a new compilation.
    return _Policy(names)


def _dropout_of(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """``dropout_p`` of a call of attention; 0 of other operators."""
    if "attention" not in operator.overloadpacket.__name__:
        return 0.0
    names = [argument.name for argument in operator._schema.arguments]
    return float((dict(zip(names, args, strict=False)) | kwargs).get("dropout_p", 0.0))


def _draws(name: str) -> bool:
    """Whether the operator draws random numbers, which would be skipped if its result were saved. Attention draws only with
    dropout, which is known when it runs."""
    packet: Any = getattr(torch.ops.aten, name)
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    return "attention" not in name and any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)


def _all_operators() -> list[str]:
    # torch.ops.aten itself lists only operators that were used before
    return torch._C._dispatch_get_all_op_names()  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType, reportUnknownMemberType, reportAttributeAccessIssue]


def _recompute(block: nn.Module, policy: _Policy | None) -> None:
    """Let the block save only its inputs and the results that the policy selects."""
    arguments: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": True}
    if policy is not None:
        arguments["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)
    if any(True for _ in block.buffers()):
        arguments["context_fn"] = functools.partial(_contexts, block, arguments.get("context_fn"))

    def recomputing(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # evaluation saves nothing, so there is nothing to recompute
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, **arguments, **kwargs)

    wrap_forward(block, recomputing)


def _check_policy_after(last: nn.Module, policy: _Policy) -> None:
    """Call ``policy.check`` after the forward pass of the ``last`` block, or of the model."""
    if not policy.unused:
        return

    # a wrapper of its own, so that the forward passes of like blocks stay equal and are compiled once
    def checked(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            policy.check()
        return result

    wrap_forward(last, checked)


def _contexts(block: nn.Module, inner: Any) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    forward, again = inner() if inner is not None else (nullcontext(), nullcontext())
    return forward, _buffers_aside(block, again)


@contextmanager
def _buffers_aside(block: nn.Module, inner: AbstractContextManager[Any]) -> Generator[None]:
    """Inside, the block has copies of its buffers: a batch norm has already counted this batch."""
    buffers = [
        (module, name, tensor) for module in block.modules() for name, tensor in module.named_buffers(recurse=False)
    ]
    for module, name, buffer in buffers:
        setattr(module, name, buffer.clone())
    try:
        with inner:
            yield
    finally:
        for module, name, buffer in buffers:
            setattr(module, name, buffer)


# --- offload ----------------------------------------------------------------------------------------------------------


def offload_activations(blocks: Sequence[nn.Module], *, pinned: bool) -> None:
    """Let ``blocks`` copy the activations that they save to the host, and back in the backward pass, in place.

    Copies to and from ``pinned`` memory are asynchronous. Saved parameters are not copied.
    """
    for block in blocks:
        _offload(block, pinned=pinned)


def _offload(block: nn.Module, *, pinned: bool) -> None:
    def offloading(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # by address, because a transposed weight is another tensor; the weights of a sharded block are gathered by now
        addresses = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
        host: Any = save_on_cpu(pin_memory=pinned)

        def pack(tensor: Tensor) -> Any:
            return tensor if tensor.untyped_storage().data_ptr() in addresses else host.pack_hook(tensor)

        def unpack(packed: Any) -> Tensor:
            return packed if isinstance(packed, Tensor) else host.unpack_hook(packed)

        with saved_tensors_hooks(pack, unpack):
            return forward(*args, **kwargs)

    wrap_forward(block, offloading)
