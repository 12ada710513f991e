"""PowerSGD (Vogels et al. 2019, arXiv:1905.13727): per step one power iteration towards the best low-rank
approximation.

P = sum of M Q, orthonormalised; Q = sum of M' P; the sum of all M is about P Q'. Both sums are plain all-reduces. Q
starts the next step's iteration. The orthonormal columns come from a Householder QR, which exists for any P: the
paper's Gram-Schmidt needs an epsilon for a zero gradient and leaves Q at zero for ever.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PowerSGD:
    """Not a ``Codec``: its second message depends on the sum of the first, so only groups that all-reduce can use it."""

    name: str
    rank: int

    def matrix(self, value: Tensor) -> Tensor | None:
        """``value`` as [rows, columns] if it has at least two dims and smaller factors, else None."""
        if value.dim() < 2 or value.numel() == 0:
            return None
        matrix = value.reshape(value.shape[0], -1)
        rows, columns = matrix.shape
        return matrix if self.rank < min(rows, columns) and self.rank * (rows + columns) < rows * columns else None

    def first_factor(self, name: str, matrix: Tensor) -> Tensor:
        """Q of the first step, [columns, rank]: noise keyed by the parameter's name, so equal on all ranks."""
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")
        noise = torch.randn(
            matrix.shape[1], self.rank, generator=torch.Generator().manual_seed(seed), dtype=matrix.dtype
        )
        return noise.to(matrix.device)


def orthonormal(factor: Tensor) -> Tensor:
    """An orthonormal basis [rows, rank] of the columns of ``factor``."""
    return torch.linalg.qr(factor).Q
