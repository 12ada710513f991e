"""Half precision: float16 or bfloat16 codes, which the all-reduce adds.

float16 overflows at 65504, so a sum over n workers adds n-th parts (``over``); bfloat16 has float32's range.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unisono.kvstore.compression.codec import accumulation_dtype, as_bytes, check_length, from_bytes


@dataclass(frozen=True, slots=True)
class Cast:
    """Rounds to ``summable`` after division by ``divisor``."""

    name: str
    summable: torch.dtype
    divisor: float = 1.0
    relative: bool = True

    def over(self, workers: int) -> Cast:
        """The codec for codes that ``workers`` workers add."""
        return replace(self, divisor=float(workers)) if self.summable == torch.float16 else self

    def encoded_bytes(self, numel: int) -> int:
        return 2 * numel

    @torch.no_grad()
    def encode(self, value: Tensor, seed: int = 0) -> Tensor:
        return as_bytes((value.to(accumulation_dtype(value.dtype)) / self.divisor).to(self.summable))

    def decode(self, code: Tensor, numel: int, dtype: torch.dtype, *, trusted: bool = False) -> Tensor:
        check_length(self, code, numel)
        return (from_bytes(code, self.summable).to(accumulation_dtype(dtype)) * self.divisor).to(dtype)
