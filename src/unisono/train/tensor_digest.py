"""A digest of a tensor's bits: 64 bits, computed where the tensor is, without a wait for the device.

The digest is the sum of all elements, taken as integers, times odd weights that depend on the position, modulo 2^64 (multilinear
hashing, Carter and Wegman, "Universal classes of hash functions", 1979). A single flipped bit always changes it: an odd weight
times a power of two below 2^64 is not 0.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_RUN: Final = 1 << 16  # elements that are weighted at once: their 512 KiB stay in a processor's cache
_DEVICE_RUN: Final = 1 << 22  # on an accelerator, where the launch of a kernel takes as long as reading a MiB
_FACTOR: Final = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 / golden ratio, as a signed integer


def tensor_digest(tensor: Tensor) -> Tensor:
    """The digest of ``tensor``'s bits, of its local shard if it is distributed: int64 [] on its device.

    Tensors of equal bytes in the order of their elements have equal digests; dtype and shape do not count.
    """
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
    if local.is_complex():
        local = torch.view_as_real(local.resolve_conj())
    flat = local.contiguous().view(-1)
    integers = flat.view(_INTEGERS[flat.element_size()])
    weights = _weights(flat.device)
    length = len(weights)
    digest = _dot(integers[:length].to(torch.int64), weights[: len(integers)])
    for run in range(1, -(-len(integers) // length)):
        part = integers[run * length : (run + 1) * length]
        digest = digest + _dot(part.to(torch.int64), weights[: len(part)]) * _odd(run + length)
    return digest


@lru_cache(maxsize=8)
def _weights(device: torch.device) -> Tensor:
    return (torch.arange(_RUN if device.type == "cpu" else _DEVICE_RUN, device=device) * _FACTOR) | 1


def _dot(values: Tensor, weights: Tensor) -> Tensor:
    # several times as fast; accelerators have it for floating point alone
    return torch.dot(values, weights) if values.device.type == "cpu" else (values * weights).sum()


def _odd(number: int) -> int:
    """A signed integer of 64 bits, odd, other for each ``number``."""
    product = (number * _FACTOR | 1) % (1 << 64)
    return product - (1 << 64) if product >> 63 else product
