"""A multi-layer perceptron for tables: numbers and categories of a row to classes or a number.

A category is the hash of its column and text: it picks a row of one embedding table (Weinberger et al. 2009, arXiv:0902.2206), so
that a text which training never saw needs no row of its own. Blocks are residual, with norm first (Gorishniy et al. 2021,
arXiv:2106.11959).
Shape letters: B batch, F columns of numbers, C columns of categories, D dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EXPANSION = 2  # width of a block's hidden layer per width of the block


@dataclass(frozen=True, kw_only=True, slots=True)
class TableOptions:
    """Sizes of a ``TableNet``.

    Attributes:
        numbers: Columns of numbers.
        categories: Columns of categories.
        outputs: Classes, or 1 for a number.
        num_layers: Residual blocks.
        dim: Width of the hidden states.
        buckets: Rows of the embedding table of categories; two texts share a row if their hashes are equal.
        dropout: Dropout probability inside each block.
    """

    numbers: int
    categories: int
    outputs: int
    num_layers: int = 4
    dim: int = 128
    buckets: int = 4096
    dropout: float = 0.0


class TableBlock(nn.Module):
    """Residual block ``x + down(relu(up(norm(x))))``."""

    def __init__(self, options: TableOptions) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(options.dim)
        self.up = nn.Linear(options.dim, EXPANSION * options.dim)
        self.down = nn.Linear(EXPANSION * options.dim, options.dim)
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[B, D] → [B, D]."""
        return x + self.dropout(self.down(F.relu(self.up(self.norm(x)))))


class TableNet(nn.Module):
    """Residual network for rows of a table; ``forward`` returns logits.

    Source:
        Gorishniy et al. 2021, arXiv:2106.11959 (the ResNet there), with a layer norm in each block and hashed categories.
    """

    def __init__(self, options: TableOptions) -> None:
        super().__init__()
        self.options = options
        self.table = nn.Embedding(options.buckets, options.dim) if options.categories else None
        self.project = nn.Linear(options.numbers, options.dim) if options.numbers else None
        self.blocks = nn.ModuleList(TableBlock(options) for _ in range(options.num_layers))
        self.norm = nn.LayerNorm(options.dim)
        self.head = nn.Linear(options.dim, options.outputs)

    def forward(self, numbers: Tensor | None = None, categories: Tensor | None = None) -> Tensor:
        """numbers [B, F] float32, standardised, and categories [B, C] int64, hashes below ``buckets`` → logits [B, outputs]."""
        parts: list[Tensor] = []
        if self.project is not None and numbers is not None:
            parts.append(self.project(numbers))
        if self.table is not None and categories is not None:
            parts.append(self.table(categories).sum(1))
        x = torch.stack(parts).sum(0)  # [B, D]
        for block in self.blocks:
            x = block(x)
        return self.head(F.relu(self.norm(x)))
