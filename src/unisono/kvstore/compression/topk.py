"""The k elements of largest absolute value, k a fixed fraction of the tensor.

Six bytes per element sent. Code: per block of 65536 elements the number sent (u32), then the positions within the
blocks (u16, ascending), then the values (f32).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.kvstore.compression.codec import accumulation_dtype, as_bytes, check_content, check_length, from_bytes

_BLOCK = 65536
_SAMPLE = 16384


@dataclass(frozen=True, slots=True)
class TopK:
    """Sends ``fraction`` of the elements, at least one. Source: Aji and Heafield 2017, arXiv:1704.05021."""

    name: str
    fraction: float
    summable: None = None
    relative: bool = True

    def encoded_bytes(self, numel: int) -> int:
        return 6 * self.num_kept(numel) + 4 * -(-numel // _BLOCK)

    def num_kept(self, numel: int) -> int:
        """The number of elements sent."""
        return min(numel, max(1, math.ceil(self.fraction * numel)))

    @torch.no_grad()
    def encode(self, value: Tensor, seed: int = 0) -> Tensor:
        numel = value.numel()
        where = _largest(value.to(accumulation_dtype(value.dtype)).abs(), self.num_kept(numel)).sort().values
        edges = torch.arange(0, numel + _BLOCK, _BLOCK, device=value.device)[: -(-numel // _BLOCK) + 1]
        counts = torch.searchsorted(where, edges).diff()
        values = value[where].float()
        return torch.cat([as_bytes(counts.int()), as_bytes((where % _BLOCK).to(torch.int16)), as_bytes(values)])

    def decode(self, code: Tensor, numel: int, dtype: torch.dtype, *, trusted: bool = False) -> Tensor:
        check_length(self, code, numel)
        num_kept, blocks = self.num_kept(numel), -(-numel // _BLOCK)
        counts = from_bytes(code[: 4 * blocks], torch.int32).long()
        if not trusted:
            wrong = (counts < 0).any() | (counts > _BLOCK).any() | (counts.sum() != num_kept)
            check_content(self, numel, wrong, "its blocks' counts do not add up", f"{num_kept} elements are kept")
        block = torch.arange(blocks, device=code.device).repeat_interleave(counts, output_size=num_kept)
        local = from_bytes(code[4 * blocks : 4 * blocks + 2 * num_kept], torch.int16).long() & 0xFFFF
        where = block * _BLOCK + local
        if not trusted:
            check_content(self, numel, where >= numel, "a position past the end", f"positions are below {numel}")
            check_content(
                self, numel, where.diff() <= 0, "positions that do not rise", "each position is above the one before"
            )
        values = from_bytes(code[4 * blocks + 2 * num_kept :], torch.float32)
        return torch.zeros(numel, dtype=dtype, device=code.device).index_copy_(0, where, values.to(dtype))


def _largest(size: Tensor, count: int) -> Tensor:
    """Positions of the ``count`` largest elements; NaN counts as largest.

    On the host a threshold from a sample first discards most elements: exact selection over all of them takes several
    times longer. The result is the same, because the threshold is used only where at least ``count`` elements reach it.
    """
    stride = size.numel() // _SAMPLE
    if size.device.type == "cpu" and stride >= 4:
        sample = size[::stride]
        rank = min(sample.numel(), math.ceil(1.3 * count / stride) + 32)
        threshold = sample.topk(rank).values[-1]
        likely = (~(size < threshold)).nonzero().view(-1)
        if likely.numel() >= count:
            return likely[size[likely].topk(count, sorted=False).indices]
    return size.topk(count, sorted=False).indices
