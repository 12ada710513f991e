"""The codec interface: a pure pair of functions between a flat tensor and bytes whose number depends on its length
only.

An all-gather needs codes of equal length on all workers. ``error_feedback`` keeps what a lossy code omits. Codecs
preserve non-finite values: their code decodes to a non-finite value, so that every worker skips the step.

A codec may have an attribute ``relative: bool``: whether its code follows the scale of its input, so that a few codes
transmit most of any difference, however small. Pulled values are compressed with such codecs only.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from unisono.errors import CommError

# codes store element counts as u32
MAX_ELEMENTS = 2**32 - 1


class Codec(Protocol):
    """A lossy representation of flat tensors."""

    @property
    def name(self) -> str:
        """The text that ``find_codec`` accepts."""
        ...

    @property
    def summable(self) -> torch.dtype | None:
        """The dtype in which codes of several workers may be added elementwise; None if they may not."""
        ...

    def encoded_bytes(self, numel: int) -> int:
        """Length of the code of ``numel`` elements."""
        ...

    def encode(self, value: Tensor, seed: int = 0) -> Tensor:
        """Encode ``value`` [numel], of any floating dtype, as uint8 [encoded_bytes(numel)] on its device.

        ``seed`` keys the noise of codecs that round stochastically: the same value and seed give the same code.
        """
        ...

    def decode(self, code: Tensor, numel: int, dtype: torch.dtype, *, trusted: bool = False) -> Tensor:
        """Decode ``code`` [encoded_bytes(numel)] to [numel] of ``dtype``. Raises CommError for a code that no encoder
        makes.

        ``trusted``: skip the checks of its content, which synchronise with the device; for codes of this program.
        """
        ...


def can_compress_values(codec: Codec) -> bool:
    """Whether pulled values may be sent as codes of their difference: the codec is ``relative``. Without the attribute,
    a codec may have a threshold in units of gradients, which a difference of values might never reach."""
    return bool(getattr(codec, "relative", False))


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of residuals and sums: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def as_bytes(value: Tensor) -> Tensor:
    """The bytes of a tensor, [nbytes]."""
    return value.contiguous().view(torch.uint8).reshape(-1)


def from_bytes(code: Tensor, dtype: torch.dtype) -> Tensor:
    """A slice of a code as ``dtype``; copied, because it may be unaligned."""
    return code.clone(memory_format=torch.contiguous_format).view(dtype)


def check_length(codec: Codec, code: Tensor, numel: int) -> None:
    """Raise CommError unless ``code`` is one-dimensional uint8 of the right length."""
    expected = codec.encoded_bytes(numel)
    if code.dtype != torch.uint8 or code.shape != (expected,):
        raise invalid_code(
            codec, numel, f"{code.dtype} of shape {list(code.shape)}", f"it is uint8 of shape [{expected}]"
        )


def check_content(codec: Codec, numel: int, bad: Tensor, given: str, rule: str) -> None:
    """Raise CommError if any element of ``bad`` is true."""
    if bool(bad.any()):
        raise invalid_code(codec, numel, given, rule)


def invalid_code(codec: Codec, numel: int, given: str, rule: str) -> CommError:
    return CommError(
        given=f"a {codec.name} code of {numel} elements: {given}",
        rule=rule,
        consequence="nothing of it was used",
        nearest="run the same version with the same compression on all workers and servers; if they do, "
        "memory or network is damaged",
    )
