"""Half the bytes: float16 or bfloat16, whose codes are added by the all-reduce itself.

float16 overflows at 65504, so a sum over n workers is of n-th parts (``over``); bfloat16 has float32's range and needs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unisono.kvstore.compression.codec import accumulation_dtype, as_bytes, check_length, from_bytes


@dataclass(frozen=True, slots=True)
class Cast:
    """Rounds to ``summable``, after division by ``divisor``."""

    name: str
    summable: torch.dtype
    divisor: float = 1.0
    relative: bool = True

    def over(self, workers: int) -> Cast:
        """The same codec for codes that this many workers add."""
        return replace(self, divisor=float(workers)) if self.summable == torch.float16 else self

    def encoded_bytes(self, numel: int) -> int:
        """2 for each element."""
        return 2 * numel

    @torch.no_grad()
    def encode(self, value: Tensor, seed: int = 0) -> Tensor:
        """See ``Codec``."""
        return as_bytes((value.to(accumulation_dtype(value.dtype)) / self.divisor).to(self.summable))

    def decode(self, code: Tensor, numel: int, dtype: torch.dtype, *, trusted: bool = False) -> Tensor:
        """See ``Codec``; any bytes of the right number are a code."""
        check_length(self, code, numel)
        return (from_bytes(code, self.summable).to(accumulation_dtype(dtype)) * self.divisor).to(dtype)
