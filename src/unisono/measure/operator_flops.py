"""FLOPs of the operations of a step, counted as they are dispatched: with values, or traced without."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode  # has no public name; torch 2.13 tested
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

_aten: Final[Any] = torch.ops.aten
_ATTENTION_OF_CPU: Final = _aten._scaled_dot_product_flash_attention_for_cpu
_ITS_BACKWARD: Final = _aten._scaled_dot_product_flash_attention_for_cpu_backward


class OperatorFlops(TorchDispatchMode):
    """Counts matrix products, convolutions and attention inside, as torch does: two FLOPs for a multiplication and its sum.

    Attention counts over the whole square, also under a causal mask. What is recomputed counts again.

    Attributes:
        flops: FLOPs so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.flops += _flops(func._overloadpacket, args, kwargs or {}, out)
        return out


def _flops(packet: Any, args: Any, kwargs: dict[str, Any], out: Any) -> int:
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=out))
    if packet is _ATTENTION_OF_CPU:  # torch counts that of accelerators alone
        return int(sdpa_flop_count(*(each.shape for each in args[:3])))
    if packet is _ITS_BACKWARD:
        return int(sdpa_backward_flop_count(*(each.shape for each in args[:4])))
    if packet is _aten._grouped_mm:  # each row meets one matrix; or for the gradient of a stack, one row
        left, right = args[:2]
        return 2 * math.prod(left.shape) * right.shape[-1]
    return 0
