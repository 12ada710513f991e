"""Stacks of blocks that no built-in rule names, written as people write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, TOKENS, DIM, HEADS = 29, 8, 24, 4


class Mixing(nn.Module):
    """MLP-Mixer (Tolstikhin et al. 2021): over tokens, then over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.tokens = nn.Sequential(nn.Linear(TOKENS, 16), nn.GELU(), nn.Linear(16, TOKENS))
        self.channels = nn.Sequential(nn.Linear(DIM, 40), nn.GELU(), nn.Dropout(0.0), nn.Linear(40, DIM))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.before(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.after(x))


class Parallel(nn.Module):
    """GPT-J (Wang and Komatsuzaki 2021): attention and feed-forward layer side by side, all in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head, self.n_embd = HEADS, DIM
        self.norm = nn.LayerNorm(DIM)
        self.q, self.k, self.v, self.proj = (nn.Linear(DIM, DIM) for _ in range(4))
        self.wide, self.narrow = nn.Linear(DIM, 32), nn.Linear(32, DIM)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        h = self.norm(x)
        q, k, v = (f(h).view(b, t, self.n_head, DIM // HEADS).permute(0, 2, 1, 3) for f in (self.q, self.k, self.v))
        scores = (q @ k.transpose(-2, -1)) / (DIM // HEADS) ** 0.5
        scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), float("-inf"))
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, self.n_embd)
        return x + self.proj(mixed) + self.narrow(F.gelu(self.wide(h)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.inside, self.outside = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, DIM // HEADS))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.inside(x).chunk(3, dim=-1))
        return self.outside(F.scaled_dot_product_attention(q * self.scale, k, v).transpose(1, 2).flatten(2))


class Encoder(nn.Module):
    """``nn.TransformerEncoderLayer`` with one fused projection, and a feed-forward layer kept in the block itself."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.norm1, self.norm2 = Attention(), nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.linear1, self.linear2 = nn.Linear(DIM, 36), nn.Linear(36, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.self_attn(x))
        return self.norm2(x + self.linear2(F.relu(self.linear1(x))))


class Fused(nn.Module):
    """Self-attention with three matrices in one product, taken apart by a dim of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, -1))


class Looking(nn.Module):
    """Attention to another stream: keys and values come from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.ask, self.seen, self.told, self.back = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (
            layer(given).view(b, t, self.heads, d // HEADS).transpose(1, 2)
            for layer, given in ((self.ask, x), (self.seen, memory), (self.told, memory))
        )
        return self.back(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, -1))


class Decoder(nn.Module):
    """Attention to its own stream, then to another."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.other = Fused(), Looking()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.own(x)
        return x + self.other(x, x.flip(1).tanh())


class Stack(nn.Module):
    """A table, blocks, logits."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = {"mixer": Mixing, "parallel": Parallel, "encoder": Encoder, "decoder": Decoder}
        self.words = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(blocks[kind]() for _ in range(2))
        self.last = nn.Linear(DIM, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.last(x)
