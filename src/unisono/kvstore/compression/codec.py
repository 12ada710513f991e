"""What a codec is: a pure pair of functions between a flat tensor and bytes whose number depends on its length alone.

Codes of one length for every worker are what an all-gather needs. What a lossy code leaves out is kept by ``feedback``.
A value that is not finite is never hidden: its code decodes to something not finite, so that every worker skips the step.

A codec may have one more member, ``relative: bool``: whether its code follows the size of what it is given, so that of any
difference, however small, the larger part gets through in a few codes. Then differences of values travel coded too.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from unisono.errors import CommError

# element counts travel as u32
MAX_ELEMENTS = 2**32 - 1


class Codec(Protocol):
    """Lossy representation of a flat tensor."""

    @property
    def name(self) -> str:
        """As ``find_codec`` takes it."""
        ...

    @property
    def summable(self) -> torch.dtype | None:
        """The dtype in which codes of several workers may be added, element by element; None: they may not."""
        ...

    def encoded_bytes(self, numel: int) -> int:
        """Length of the code of ``numel`` elements."""
        ...

    def encode(self, value: Tensor, seed: int = 0) -> Tensor:
        """``value`` [numel], any floating dtype, as a uint8 code [encoded_bytes(numel)] on its device.

        ``seed`` keys the noise of codecs that round stochastically: same value and seed, same code.
        """
        ...

    def decode(self, code: Tensor, numel: int, dtype: torch.dtype, *, trusted: bool = False) -> Tensor:
        """What ``code`` [encoded_bytes(numel)] stands for, [numel]. Raises CommError if no encoder can have made it.

        ``trusted``: leave out the checks of its content, which wait for the device: for codes of this very program.
        """
        ...


def can_compress_values(codec: Codec) -> bool:
    """Whether differences of values may travel in its codes: it says that it is ``relative``. One that says nothing may have a
    threshold in the units of gradients, which a difference of values might never reach."""
    return bool(getattr(codec, "relative", False))


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """In what residuals and sums are kept: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def as_bytes(value: Tensor) -> Tensor:
    """The bytes of a tensor, [nbytes]."""
    return value.contiguous().view(torch.uint8).reshape(-1)


def from_bytes(code: Tensor, dtype: torch.dtype) -> Tensor:
    """A slice of a code as ``dtype``; copied, because it may start at any byte of what arrived."""
    return code.clone(memory_format=torch.contiguous_format).view(dtype)


def check_length(codec: Codec, code: Tensor, numel: int) -> None:
    """Raises CommError unless ``code`` is one-dimensional bytes of the right number."""
    expected = codec.encoded_bytes(numel)
    if code.dtype != torch.uint8 or code.shape != (expected,):
        raise invalid_code(
            codec, numel, f"{code.dtype} of shape {list(code.shape)}", f"it is uint8 of shape [{expected}]"
        )


def check_content(codec: Codec, numel: int, bad: Tensor, given: str, rule: str) -> None:
    """Raises CommError if any element of ``bad`` is true."""
    if bool(bad.any()):
        raise invalid_code(codec, numel, given, rule)


def invalid_code(codec: Codec, numel: int, given: str, rule: str) -> CommError:
    """The error about a code that cannot be decoded."""
    return CommError(
        given=f"a {codec.name} code of {numel} elements: {given}",
        rule=rule,
        consequence="nothing of it was used",
        nearest="run the same version with the same compression on all workers and servers; if they do, "
        "memory or network is damaged",
    )
