"""One byte per element: blocks of 1024 with one scale each, stochastically rounded, so that the rounding error has mean
0.

Code: a float32 scale per block (largest absolute value / 127), then an int8 per element. A NaN scale marks a non-finite
block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from unisono.kvstore.compression.codec import accumulation_dtype, as_bytes, check_content, check_length, from_bytes

_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Int8:
    """Stochastic rounding as in QSGD (Alistarh et al. 2017, arXiv:1610.02132), with the block's maximum instead of its
    norm."""

    name: str = "int8"
    summable: None = None
    relative: bool = True

    def encoded_bytes(self, numel: int) -> int:
        return numel + 4 * -(-numel // _BLOCK)

    @torch.no_grad()
    def encode(self, value: Tensor, seed: int = 0) -> Tensor:
        numel, blocks = value.numel(), -(-value.numel() // _BLOCK)
        rows = pad(value.to(accumulation_dtype(value.dtype)), (0, blocks * _BLOCK - numel)).view(blocks, _BLOCK)
        scale = (rows.abs().amax(1) / 127).float() if blocks else rows.new_zeros(0).float()
        scale = torch.where(scale.isfinite(), scale, torch.nan)
        noise = torch.rand(
            rows.shape, generator=torch.Generator(value.device).manual_seed(seed), device=value.device
        )  # [blocks, block]
        steps = rows / torch.where(scale == 0, 1.0, scale)[:, None]
        rounded = steps.add_(noise).floor_().clamp_(-127, 127).nan_to_num_(0.0).to(torch.int8)
        return torch.cat([as_bytes(scale), as_bytes(rounded.view(-1)[:numel])])

    def decode(self, code: Tensor, numel: int, dtype: torch.dtype, *, trusted: bool = False) -> Tensor:
        check_length(self, code, numel)
        blocks = -(-numel // _BLOCK)
        scale, rounded = from_bytes(code[: 4 * blocks], torch.float32), code[4 * blocks :].view(torch.int8)
        if not trusted:
            check_content(
                self, numel, (scale < 0) | scale.isinf(), "a scale below 0 or infinite", "scales are 0 or more, or NaN"
            )
            check_content(self, numel, rounded == -128, "a -128", "elements are -127 to 127")
        rows = pad(rounded.to(accumulation_dtype(dtype)), (0, blocks * _BLOCK - numel)).view(blocks, _BLOCK)
        return (rows * scale[:, None]).view(-1)[:numel].to(dtype)
