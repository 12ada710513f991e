"""Codecs with fewer bits per element: half precision, 8 bits, 2 bits, 1 bit.

1 and 2 bits are packed as in MXNet: first element in a byte's highest bits, whole 32-bit words. Their code: level f32,
number of elements u32, then the words. A NaN level marks a non-finite tensor.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from unisono.errors import ConfigError
from unisono.kvstore.compression.codec import (
    MAX_ELEMENTS,
    accumulation_dtype,
    as_bytes,
    check_content,
    check_length,
    from_bytes,
    invalid_code,
)

_HEADER = 8
# byte i of eight, each 0 or 1, moves to bit 63 - i
_GATHER_BITS = 0x8040201008040201 - 2**64


@dataclass(frozen=True, slots=True)
class TwoBit:
    """MXNet's ``2bit``: ``11`` is +t, ``10`` is -t, ``00`` is zero. The threshold t is ``factor``, or ``factor`` times
    the tensor's rms.

    At most one t per step and element is sent, the rest stays in the residual, which grows without bound where
    gradients stay above t: watch ``ErrorFeedback.stats``, or choose t relative to the rms.
    """

    name: str
    factor: float
    relative: bool = False
    summable: None = None

    def encoded_bytes(self, numel: int) -> int:
        return _coded_bytes(numel, per_word=16)

    @torch.no_grad()
    def encode(self, value: Tensor, seed: int = 0) -> Tensor:
        value = value.to(accumulation_dtype(value.dtype)).contiguous()
        level = _or_nan(self.factor * _rms(value)) if self.relative else _fixed(self.factor, value)
        quanta = torch.zeros(_padded(value.numel(), 16), dtype=torch.uint8, device=value.device)
        quanta[: value.numel()] = (value >= level).to(torch.uint8) * 3 | (value <= -level).to(torch.uint8) * 2
        # four bytes of 0 to 3, read as a little-endian word, to one byte
        words = quanta.view(torch.int32)
        packed = (words << 6 | words >> 4 | words >> 14 | words >> 24).to(torch.uint8)
        return torch.cat([_header(level, value.numel()), packed])

    def decode(self, code: Tensor, numel: int, dtype: torch.dtype, *, trusted: bool = False) -> Tensor:
        check_length(self, code, numel)
        body = code[_HEADER:]
        if not trusted:
            _check_header(self, code, numel)
            pairs = _unpacked(body, 2)
            check_content(self, numel, pairs == 1, "a 01", "a pair of bits is 00, 10 or 11")
            check_content(self, numel, pairs[numel:] != 0, "bits after the last element", "padding is 0")
        return _looked_up(body, 2, (0.0, 0.0, -1.0, 1.0), _level(code), numel, dtype)


@dataclass(frozen=True, slots=True)
class OneBit:
    """One sign per element. ``threshold`` None: scaled by the mean absolute value (EF-signSGD, Karimireddy et al. 2019,
    arXiv:1901.09847); else MXNet's ``1bit``: +1 above the threshold, else -1."""

    name: str
    threshold: float | None = None
    summable: None = None

    @property
    def relative(self) -> bool:
        return self.threshold is None

    def encoded_bytes(self, numel: int) -> int:
        return _coded_bytes(numel, per_word=32)

    @torch.no_grad()
    def encode(self, value: Tensor, seed: int = 0) -> Tensor:
        value = value.to(accumulation_dtype(value.dtype)).contiguous()
        if self.threshold is None:
            level, up = _or_nan(value.abs().sum() / max(value.numel(), 1)), value >= 0
        else:
            level, up = _fixed(1.0, value), value > self.threshold
        signs = torch.zeros(_padded(value.numel(), 32), dtype=torch.uint8, device=value.device)
        signs[: value.numel()] = up
        packed = (signs.view(torch.int64) * _GATHER_BITS >> 56).to(torch.uint8)
        return torch.cat([_header(level, value.numel()), packed])

    def decode(self, code: Tensor, numel: int, dtype: torch.dtype, *, trusted: bool = False) -> Tensor:
        check_length(self, code, numel)
        body = code[_HEADER:]
        if not trusted:
            _check_header(self, code, numel)
            check_content(self, numel, _unpacked(body, 1)[numel:] != 0, "bits after the last element", "padding is 0")
        return _looked_up(body, 1, (-1.0, 1.0), _level(code), numel, dtype)


def _rms(value: Tensor) -> Tensor:
    return torch.linalg.vector_norm(value) / max(value.numel(), 1) ** 0.5


def _or_nan(level: Tensor) -> Tensor:
    return torch.where(level.isfinite(), level.float(), torch.nan)


def _fixed(level: float, value: Tensor) -> Tensor:
    # the sum is finite if all are: a quarter of the time of checking each element
    return torch.where(value.sum().isfinite(), level, torch.nan).float()


def _padded(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple


def _coded_bytes(numel: int, per_word: int) -> int:
    if numel > MAX_ELEMENTS:
        raise ConfigError(
            given=f"a tensor of {numel} elements",
            rule=f"1-bit and 2-bit codes count at most {MAX_ELEMENTS} elements",
            consequence="it cannot be compressed",
            nearest="int8, fp16 or bf16, which count none",
        )
    return _HEADER + 4 * -(-numel // per_word)


def _header(level: Tensor, numel: int) -> Tensor:
    count = torch.full((1,), numel, dtype=torch.int64, device=level.device)
    return torch.cat([as_bytes(level.reshape(1)), as_bytes(count)[:4]])


def _level(code: Tensor) -> Tensor:
    return from_bytes(code[:4], torch.float32)


def _check_header(codec: TwoBit | OneBit, code: Tensor, numel: int) -> None:
    counted = int(from_bytes(code[4:_HEADER], torch.int32).item()) % 2**32
    if counted != numel:
        raise invalid_code(codec, numel, f"its header counts {counted}", "both sides have the same table of parameters")
    level = _level(code)
    check_content(
        codec,
        numel,
        (level < 0) | level.isinf(),
        f"level {level.item()}",
        "a level is 0 or more, or NaN for a bad step",
    )


def _unpacked(body: Tensor, bits: Literal[1, 2]) -> Tensor:
    """The groups of ``bits`` bits, [8 / bits * bytes], as uint8."""
    shifts = torch.arange(8 - bits, -1, -bits, dtype=torch.uint8, device=body.device)
    return (body[:, None] >> shifts & (2**bits - 1)).reshape(-1)


@functools.cache
def _table(bits: Literal[1, 2], meanings: tuple[float, ...], device: torch.device) -> Tensor:
    """The values of each byte's groups of bits, [256, 8 / bits]."""
    every = torch.arange(256, dtype=torch.uint8, device=device)
    return torch.tensor(meanings, device=device)[_unpacked(every, bits).int()].view(256, 8 // bits)


def _looked_up(
    body: Tensor, bits: Literal[1, 2], meanings: tuple[float, ...], level: Tensor, numel: int, dtype: torch.dtype
) -> Tensor:
    table = (_table(bits, meanings, body.device) * level).to(dtype)
    return table[body.int()].view(-1)[:numel]


@dataclass(frozen=True, slots=True)
class Cast:
    """Rounds to ``summable``, float16 or bfloat16, after division by ``divisor``; the all-reduce adds the codes.

    float16 overflows at 65504, so a sum over n workers adds n-th parts (``over``); bfloat16 has float32's range.
    """

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


_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Int8:
    """One byte per element: blocks of 1024 with one scale each, stochastically rounded, so that the rounding error has
    mean 0.

    As in QSGD (Alistarh et al. 2017, arXiv:1610.02132), with the block's maximum instead of its norm. Code: a float32
    scale per block (largest absolute value / 127), then an int8 per element. A NaN scale marks a non-finite block.
    """

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
