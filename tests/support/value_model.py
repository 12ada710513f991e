"""A model of a user's own that has no trace: its course depends on the values of tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import tiny
import torch
from torch import Tensor, nn

DIM = 16


class OddTokens:
    """Random sequences of which half of the tokens are odd, so that each micro-batch chooses as many rows as any other."""

    fingerprint = "odd-1"

    def __init__(self) -> None:
        rng = np.random.default_rng(6)
        odd = rng.permuted(np.tile([0, 1], (tiny.SAMPLES, tiny.SEQ_LEN // 2)), axis=1)
        self._tokens = 2 * rng.integers(0, tiny.VOCAB // 2, odd.shape) + odd

    def __len__(self) -> int:
        return tiny.SAMPLES

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        tokens = self._tokens[indices]
        return {
            "tokens": tokens,
            "targets": np.roll(tokens, -1, axis=1),
            "weights": np.ones(tokens.shape, np.float32),
            "target_bytes": np.ones(tokens.shape, np.float32),
        }


class ChoosingBlock(nn.Module):
    """Chosen rows pass through a wide layer where any of their values is above zero, else through none."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 32 * DIM), nn.Linear(32 * DIM, DIM)

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        """x [B, T, D] and chosen [B, T] → [B, T, D]."""
        rows = x[chosen]
        if rows.max().item() > 0:
            rows = rows + self.down(self.up(rows).relu())
        return x.masked_scatter(chosen[..., None], rows)


class Choosing(nn.Module):
    """tokens [B, T] → logits [B, T, V]."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tiny.VOCAB, DIM)
        self.blocks = nn.ModuleList(ChoosingBlock() for _ in range(layers))
        self.head = nn.Linear(DIM, tiny.VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x, chosen = self.embedding(tokens), tokens % 2 == 1
        for block in self.blocks:
            x = block(x, chosen)
        return self.head(x)


def build(layers: int) -> tuple[nn.Module, Any, Any]:
    """As the entries of ``matrix.MODELS``."""
    from unisono.train.objectives import next_token

    torch.manual_seed(0)
    return Choosing(layers), OddTokens(), next_token
