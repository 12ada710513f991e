"""Bandwidth of a device's memory: a large tensor is copied. Of a CPU it is that of this process's threads."""

from __future__ import annotations

import statistics
import time
from typing import Final

import torch

from unisono.device.torch_adapters import adapter_of

_BYTES: Final = 128 << 20  # larger than caches
_ROUNDS: Final = (5, 50)


def time_copy(device: torch.device, *, budget_s: float = 1.0) -> tuple[float, float]:
    """Bytes per second that are read and written together, at the median time, and the distance of the quartiles over it.

    Args:
        device: Whose memory.
        budget_s: Time for the repeats; at least five are made.
    """
    adapter, index = adapter_of(device)
    source, target = (torch.zeros(_BYTES // 4, device=device) for _ in range(2))

    def seconds() -> float:
        adapter.synchronize(index)
        begin = time.perf_counter()
        target.copy_(source)
        adapter.synchronize(index)
        return time.perf_counter() - begin

    seconds()  # pages are mapped
    once_s = seconds()
    repeats = max(_ROUNDS[0], min(_ROUNDS[1], int(budget_s / once_s)))
    lower_s, median_s, upper_s = statistics.quantiles((seconds() for _ in range(repeats)), n=4)
    return 2 * _BYTES / median_s, (upper_s - lower_s) / median_s
