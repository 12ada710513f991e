"""Histograms of gradients and parameters by power of two, which add up over the shards of a tensor.

A tensor that is split over ranks has no place where its values are together. Bins with the same edges for all tensors and ranks
are counted on each rank and summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from unisono.parallel.sharding import ShardedParameters

_LOWEST: Final = -40  # |x| in [2^-40, 2^-39) is the lowest bin; what is below counts as zero
_NUM_POWERS: Final = 64  # the highest bin has all that is above, too
_CHUNK: Final = 1 << 24  # elements whose copies are in memory at a time


def histograms(
    sharded: ShardedParameters,
    parameters: Sequence[nn.Parameter],
    values: Sequence[Tensor],
    divisor: Tensor | None = None,
) -> list[dict[str, Any]]:
    """Histograms of ``values``, one of the shape of each of this rank's ``parameters``, each divided by ``divisor`` [].

    A collective, which waits for the device. A histogram has ``exponent``, ``negative`` and ``positive``: ``positive[i]`` values
    are in [2^(exponent+i), 2^(exponent+i+1)), ``negative[i]`` in the same bin with a minus; and the counts ``zeros`` and
    ``nonfinite``, and ``sum`` and ``sum_squares`` of the finite values.
    """
    rows = [_count(tensor, divisor) for tensor in values]
    counts = sharded.sum_over_shards(parameters, torch.stack([counts for counts, _ in rows]))
    sums = sharded.sum_over_shards(parameters, torch.stack([sums for _, sums in rows]))
    return [_fields(row, *of) for row, of in zip(counts.tolist(), sums.tolist(), strict=True)]


def _count(tensor: Tensor, divisor: Tensor | None) -> tuple[Tensor, Tensor]:
    """Counts [2 · _NUM_POWERS + 2] of zeros, negative and positive powers and non-finite values; sum and sum of squares [2]."""
    counts = torch.zeros(2 * _NUM_POWERS + 2, dtype=torch.int64, device=tensor.device)
    sums = torch.zeros(2, dtype=torch.float32, device=tensor.device)
    for part in tensor.detach().flatten().split(_CHUNK):
        x = part.float() if divisor is None else part.float() / divisor
        finite = x.isfinite()
        x = torch.where(finite, x, 0.0)
        power = torch.frexp(x).exponent - 1 - _LOWEST  # frexp: 0.5 <= mantissa < 1
        inside = (x != 0) & (power >= 0)
        bin_of = torch.where(x < 0, 1, 1 + _NUM_POWERS) + power.clamp(max=_NUM_POWERS - 1)
        bin_of = torch.where(finite, torch.where(inside, bin_of, 0), 2 * _NUM_POWERS + 1)
        counts += torch.bincount(bin_of, minlength=len(counts))
        sums += torch.stack([x.sum(), x.square().sum()])
    return counts, sums


def _fields(counts: list[int], total: float, total_squares: float) -> dict[str, Any]:
    negative, positive = counts[1 : 1 + _NUM_POWERS], counts[1 + _NUM_POWERS : -1]
    used = [i for i, both in enumerate(zip(negative, positive, strict=True)) if any(both)]
    first, end = (used[0], used[-1] + 1) if used else (0, 0)
    return {
        "zeros": counts[0],
        "nonfinite": counts[-1],
        "exponent": _LOWEST + first,
        "negative": negative[first:end],
        "positive": positive[first:end],
        "sum": total,
        "sum_squares": total_squares,
    }
