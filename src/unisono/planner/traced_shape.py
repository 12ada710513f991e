"""The shape of a model of one's own, from a trace of its forward pass without values.

Traced is a language model: token ids [1, tokens] to logits [1, tokens, vocabulary]. Of many equal blocks a few are run. FLOPs
that grow with the square of the tokens are those of attention, found from passes of two lengths: no operation is known by name.
What blocks keep for the backward pass is counted as autograd saves it, in 16 bits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode  # has no public name; torch 2.13 tested
from torch.autograd.graph import saved_tensors_hooks

from unisono.errors import ConfigError
from unisono.measure.operator_flops import OperatorFlops
from unisono.models.loss import LazyLogits
from unisono.models.traced_experts import GroupedProducts
from unisono.parallel.deferred_init import deferred_init
from unisono.parallel.hooks import wrap_forward
from unisono.parallel.transforms import repeated_blocks
from unisono.plan.options import PlanOptions
from unisono.plan.resolve import derive_plan
from unisono.planner.model_shape import ModelShape, TracedBlocks
from unisono.planner.shape_cache import cached_shape
from unisono.train.block_traces import find_equal_blocks
from unisono.train.code_record import ModelRecord
from unisono.train.whole_model import empty_copy, meta_copy

_RUN_BLOCKS: Final = 2  # of many equal ones


@dataclass(slots=True)
class _Counts:
    """What the forward pass of a block does: FLOPs, bytes of the storages that it keeps, and of all tensors that it saves."""

    flops: int = 0
    kept_bytes: int = 0
    saved_bytes: int = 0
    width: int = 0

    def add(self, other: _Counts, times: float) -> None:
        """Add ``times`` what ``other`` does."""
        self.flops += round(other.flops * times)
        self.kept_bytes += round(other.kept_bytes * times)
        self.saved_bytes += round(other.saved_bytes * times)
        self.width = max(self.width, other.width)


def traced_shape(model: nn.Module | Callable[[], nn.Module], *, tokens: int, given: str) -> ModelShape:
    """The shape of ``model``, from the user's cache if it was traced before.

    Args:
        model: The model, or what builds it, which is then built without values.
        tokens: Tokens of a sequence.
        given: What the model is of, for errors.

    Raises:
        ConfigError: It has no list of blocks, or cannot be traced.
    """
    try:
        built = model if isinstance(model, nn.Module) else deferred_init(model).model
    except ConfigError:
        raise
    except Exception as error:  # whatever the user's code raises
        raise _refused(f"{given}, which cannot be built: {_said(error)}", "a model is built without values") from error
    if len(repeated_blocks(built)) < 2:
        raise _refused(
            f"{given}, a model without a list of blocks",
            "layouts divide a model into the members of its longest ModuleList or Sequential",
        )
    return cached_shape(_digest(built, tokens), lambda: _shape(built, tokens, given))


def _digest(model: nn.Module, tokens: int) -> str:
    """Of all that a trace depends on: modules, their attributes and code, parameters, and the version of torch."""
    parts = {
        "torch": torch.__version__,
        "tokens": tokens,
        "modules": [(name, type(module).__qualname__) for name, module in model.named_modules()],
        "parameters": [(name, list(each.shape)) for name, each in model.named_parameters(remove_duplicate=False)],
        "code": ModelRecord(model).parts(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _shape(model: nn.Module, tokens: int, given: str) -> ModelShape:
    blocks = repeated_blocks(model)
    try:
        whole, vocab = _traced(model, tokens)
        half, _ = _traced(model, tokens // 2) if tokens > 1 else (whole, 0)
    except Exception as error:  # whatever the user's code raises
        raise _refused(
            f"{given}, whose forward pass of token ids [1, {tokens}] fails without values: {_said(error)}",
            "a model of one's own takes token ids and returns logits, and no step of it depends on the value of a tensor",
        ) from error
    # FLOPs are a s + b s^2 of s tokens
    square = max(0.0, 2 * (whole.flops - 2 * half.flops) / tokens**2) if tokens % 2 == 0 else 0.0
    layers, width = len(blocks), whole.width
    in_blocks = _num_params(*blocks)
    outside = _num_params(model) - in_blocks
    is_tied = outside < 2 * vocab * width
    return ModelShape(
        layers=layers,
        hidden=width,
        heads=1,
        kv_heads=1,
        head_dim=width,
        ffn=width,
        gated=False,
        vocab=vocab,
        tied=is_tied,
        other_params=max(0, outside - vocab * width * (1 if is_tied else 2)),
        max_seq_len=tokens,
        traced=TracedBlocks(
            params=in_blocks,
            products=round((whole.flops / tokens - square * tokens) / 2),
            score_dims=square / 4 / layers,
            kept_bytes=whole.kept_bytes / tokens / layers,
            saved_bytes=whole.saved_bytes / tokens / layers,
        ),
    )


def _traced(model: nn.Module, tokens: int) -> tuple[_Counts, int]:
    """What all blocks do in a forward pass of ``tokens``, and the size of the vocabulary."""
    plan = derive_plan(PlanOptions(global_batch=1), world_size=1, device="cpu", native_bf16=True)
    equal, times = find_equal_blocks(model, plan), dict[int, float]()
    if equal is None:
        short = meta_copy(model)
    else:
        short = equal.shortened(model, _RUN_BLOCKS)
        members: Any = short.get_submodule(equal.path)
        run = list(members)[equal.begin : equal.begin + _RUN_BLOCKS]
        times = {id(block): equal.count / _RUN_BLOCKS for block in run}
    short = short.to(torch.bfloat16)
    every, blocks = list(short.modules()), repeated_blocks(short)
    places = [(every.index(block), times.get(id(block), 1.0)) for block in blocks]
    work, total = OperatorFlops(), _Counts()
    with FakeTensorMode(allow_non_fake_inputs=True), GroupedProducts(), work:
        # torch's device for which attention has a kernel that keeps no scores, as accelerators have
        copied = empty_copy(short, torch.device("cpu"))
        modules, own = list(copied.modules()), {each.untyped_storage()._cdata for each in copied.parameters()}  # pyright: ignore[reportPrivateUsage]
        counts = [(_watch(modules[place], work, own), number) for place, number in places]
        output: Any = copied(torch.zeros(1, tokens, dtype=torch.int64))
        vocab = _vocabulary(output)
    for count, number in counts:
        total.add(count, number)
    if not total.width:
        raise TypeError("it runs none of its blocks")
    return total, vocab


def _watch(block: nn.Module, work: OperatorFlops, own: set[int]) -> _Counts:
    """Count what ``block`` does from now on; storages that are in ``own`` belong to parameters."""
    counts, kept = _Counts(), set[int]()

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key = storage._cdata  # pyright: ignore[reportPrivateUsage]  # of a fake tensor, which has no address
        if key not in own:
            counts.saved_bytes += tensor.nbytes
            counts.kept_bytes += storage.nbytes() if key not in kept else 0
            kept.add(key)
        return tensor

    def watched(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        inputs = (each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
        counts.width = next(int(each.shape[-1]) for each in inputs)
        before = work.flops
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            output = forward(*args, **kwargs)
        counts.flops += work.flops - before
        return output

    wrap_forward(block, watched)
    return counts


def _vocabulary(output: Any) -> int:
    if isinstance(output, LazyLogits):
        return int(output.weight.shape[0])
    logits: Any = getattr(output, "logits", output)
    if isinstance(logits, (tuple, list)):
        logits = cast("list[Any]", logits)[0]
    if not isinstance(logits, Tensor) or logits.dim() != 3:
        raise TypeError(f"it returns {type(logits).__name__}, and no logits [1, tokens, vocabulary]")
    return int(logits.shape[-1])


def _num_params(*modules: nn.Module) -> int:
    return sum({id(each): each.numel() for module in modules for each in module.parameters()}.values())


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _refused(given: str, rule: str) -> ConfigError:
    return ConfigError(
        given=given,
        rule=rule,
        consequence="nothing was predicted",
        nearest="unisono plan auto CONFIG or unisono plan fit CONFIG, which trace other models on this machine",
    )
