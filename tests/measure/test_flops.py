from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from unisono.measure.ceiling import PeakFlops
from unisono.measure.flops import CONVENTION, matmul_params, transformer_flops_per_token, utilization


class Block(nn.Module):
    """Attention with as many key heads as query heads and an MLP, no norm: nothing but matrix products."""

    def __init__(self, width: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.qkv = nn.Linear(width, 3 * heads * head_dim, bias=False)
        self.out = nn.Linear(heads * head_dim, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, _ = x.shape
        q, k, v = self.qkv(x).view(batch, seq, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)  # 3 x [b, h, s, d]
        scores = (q @ k.transpose(-1, -2) / self.head_dim**0.5).softmax(-1)  # [b, h, s, s]
        x = x + self.out((scores @ v).transpose(1, 2).reshape(batch, seq, -1))
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self, *, vocab: int, width: int, heads: int, head_dim: int, layers: int, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, heads, head_dim) for _ in range(layers))
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("width", "heads", "head_dim", "layers"), [(32, 4, 8, 2), (24, 2, 20, 3)])
def test_convention_equals_what_torch_counts(width: int, heads: int, head_dim: int, layers: int, tied: bool) -> None:
    batch, seq, vocab = 2, 16, 50
    model = Model(vocab=vocab, width=width, heads=heads, head_dim=head_dim, layers=layers, tied=tied)
    tokens = torch.randint(vocab, (batch, seq))
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    per_token = transformer_flops_per_token(
        matmul_params=matmul_params(model), layers=layers, attention_dim=heads * head_dim, seq_len=seq
    )
    assert counter.get_total_flops() == per_token * batch * seq


def test_matmul_params_leaves_out_tables_but_not_a_tied_head() -> None:
    sizes = {"vocab": 50, "width": 8, "heads": 2, "head_dim": 4, "layers": 1}
    blocks = 3 * 8 * 8 + 8 * 8 + 2 * 8 * 32
    assert matmul_params(Model(**sizes, tied=False)) == blocks + 50 * 8
    assert matmul_params(Model(**sizes, tied=True)) == blocks + 50 * 8
    assert matmul_params(nn.Sequential(nn.Embedding(10, 4), nn.LayerNorm(4))) == 8
    with torch.device("meta"):
        assert matmul_params(Model(**sizes, tied=True)) == blocks + 50 * 8


def test_published_figure() -> None:
    """PaLM 540B, table 3 and appendix B: 46.2 % of 6144 TPU v4 (275 TFLOP/s) at 238.3k tokens/s, attention included."""
    per_token = transformer_flops_per_token(
        matmul_params=540_350_000_000, layers=118, attention_dim=48 * 256, seq_len=2048
    )
    share = 238.3e3 * per_token / (6144 * 275e12)
    assert share == pytest.approx(0.462, abs=0.002)


def test_share_of_the_peak_is_named_after_the_peak() -> None:
    datasheet = PeakFlops(value=100e12, kind="datasheet", name="x")
    measured = PeakFlops(value=100e12, kind="measured", name="x")
    assert utilization(tokens_per_s_device=1000.0, flops_per_token=25e9, peak=datasheet) == {
        "perf/tflops_device": 25.0,
        "perf/mfu": 0.25,
    }
    assert utilization(tokens_per_s_device=1000.0, flops_per_token=25e9, peak=measured) == {
        "perf/tflops_device": 25.0,
        "perf/matmul_ceiling_frac": 0.25,
    }
    assert "6N + 12Lhs" in CONVENTION
