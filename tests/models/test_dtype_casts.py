"""Which tensors bf16 autocast converts in one step of the reference GPT, all of them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from unisono.models.gpt import GPT
from unisono.models.loss import cross_entropy_sum
from unisono.models.options import ModelOptions


class Casts(TorchDispatchMode):
    """Every conversion of a floating dtype: what storage, at which version, from what to what."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, int, torch.dtype, torch.dtype, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].dtype != result.dtype and result.is_floating_point():
            self.seen.append((args[0].untyped_storage(), args[0]._version, args[0].dtype, result.dtype, args[0].shape))
        return result


def test_no_tensor_is_converted_twice() -> None:
    torch.manual_seed(0)
    model = GPT(ModelOptions(num_layers=2, dim=16, num_heads=4, num_kv_heads=2, vocab_size=48))
    tokens = torch.randint(0, 48, (2, 8))
    casts = Casts()
    with casts, torch.autocast("cpu", torch.bfloat16):
        loss, _ = cross_entropy_sum(model(tokens), tokens, torch.ones(2, 8))
        forward = len(casts.seen)
    with casts:
        loss.backward()
    times = Counter((storage._cdata, version, to) for storage, version, _, to, _ in casts.seen)
    twice = [shape for s, v, _, to, shape in casts.seen if times[s._cdata, v, to] > 1]
    assert not twice
    # a block: 7 weights and 2 norms to bf16; queries and keys to fp32 and back for the rotation.
    # once: positions; the last norm, the head's weight, logits to fp32 and their gradient back
    assert forward == 2 * (7 + 2 + 4) + 1 + 4
    # a block: gradients of 7 weights and 2 norms to fp32, and of 2 norms' inputs to bf16; of the rotation as before.
    # once: the loss's gradient, that of the last norm; the head's weight has its gradient in fp32 from the start
    assert len(casts.seen) - forward == 2 * (7 + 2 + 2 + 4) + 2
