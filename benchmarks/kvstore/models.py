"""A small GPT and a small ResNet of plain torch modules, with a batch of their own for each rank."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, DIM, LAYERS, LENGTH = 512, 256, 4, 64


class Gpt(nn.Module):
    """3.4 million parameters; tokens [batch, LENGTH] to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, DIM), nn.Embedding(LENGTH, DIM)
        block = nn.TransformerEncoderLayer(DIM, 4, 4 * DIM, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, LENGTH, VOCABULARY]."""
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        return self.head(self.blocks(self.words(tokens) + self.places.weight, mask=mask, is_causal=True))


class _Residual(nn.Module):
    def __init__(self, of: int, into: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(of, into, 3, stride, 1, bias=False),
            nn.GroupNorm(8, into),
            nn.ReLU(),
            nn.Conv2d(into, into, 3, 1, 1, bias=False),
            nn.GroupNorm(8, into),
        )
        self.short = nn.Conv2d(of, into, 1, stride, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        return functional.relu(self.body(images) + self.short(images))


def resnet() -> nn.Module:
    """2.5 million parameters in nine convolutional layers and a head; images [batch, 3, 32, 32] to logits."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, 1, 1, bias=False),
        _Residual(32, 64, 2),
        _Residual(64, 128, 2),
        _Residual(128, 256, 2),
        _Residual(256, 256, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(256, 100),
    )


def build(name: str, rank: int) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """The model, the same on all ranks and calls, and its loss on this rank's batch."""
    torch.manual_seed(0)
    model = Gpt() if name == "gpt" else resnet()
    draws = torch.Generator().manual_seed(1 + rank)
    if name == "gpt":
        given = torch.randint(VOCABULARY, (4, LENGTH), generator=draws)
        wanted = given.roll(-1, 1).flatten()
    else:
        given = torch.randn(8, 3, 32, 32, generator=draws)
        wanted = torch.randint(100, (8,), generator=draws)
    return model, lambda module: functional.cross_entropy(module(given).flatten(0, -2), wanted)
