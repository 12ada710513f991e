"""PowerSGD (Vogels et al. 2019, arXiv:1905.13727): one power iteration per step towards the best approximation of low rank.

P = sum of M Q, made orthonormal; Q = sum of M' P; the sum of all M is about P Q'. Both sums are plain all-reduces. Q starts the
next step's iteration. Orthonormal columns come from a Householder QR, which gives some for any P: with the paper's Gram-Schmidt a
gradient of zeros needs an epsilon, and leaves Q at zero for ever.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PowerSGD:
    """No codec: its second message depends on the sum of the first, so only groups that all-reduce can use it."""

    name: str
    rank: int

    def matrix(self, value: Tensor) -> Tensor | None:
        """``value`` as [rows, columns] if it has two dims or more and its factors are smaller than itself, else None."""
        if value.dim() < 2 or value.numel() == 0:
            return None
        matrix = value.reshape(value.shape[0], -1)
        rows, columns = matrix.shape
        return matrix if self.rank < min(rows, columns) and self.rank * (rows + columns) < rows * columns else None

    def first_factor(self, name: str, matrix: Tensor) -> Tensor:
        """Q of the first step, [columns, rank]: noise keyed by the parameter's name, so the same on all ranks."""
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")
        noise = torch.randn(
            matrix.shape[1], self.rank, generator=torch.Generator().manual_seed(seed), dtype=matrix.dtype
        )
        return noise.to(matrix.device)


def orthonormal(factor: Tensor) -> Tensor:
    """An orthonormal basis [rows, rank] that spans the columns of ``factor``."""
    return torch.linalg.qr(factor).Q
