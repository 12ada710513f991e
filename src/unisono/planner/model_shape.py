"""Shapes of transformer models: what fixes their parameters, FLOPs and activations. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A stack of equal transformer blocks between an embedding and an output matrix.

    Attributes:
        layers: Number of blocks.
        hidden: Width of the residual stream.
        heads: Query heads.
        kv_heads: Key/value heads.
        head_dim: Width of a head.
        ffn: Hidden units of a dense feed-forward layer; of each expert where there are experts.
        gated: Whether feed-forward layers have a gate (SwiGLU): three matrices in place of two.
        vocab: Rows of the embedding.
        tied: Whether the output matrix is the embedding.
        experts: Experts of a layer; 0 for dense layers.
        experts_per_token: Experts that a token goes to.
        shared_ffn: Hidden units of experts that all tokens go to.
        dense_layers: Of a model with experts, the blocks that have none.
        dense_ffn: Hidden units of these.
        query_rank: Rank of the low-rank query projection (multi-head latent attention); 0 without.
        kv_rank: Rank of the low-rank key/value projection; 0 without.
        rope_dim: Of latent attention, the rotary part of a head, beside ``head_dim``.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    gated: bool
    vocab: int
    tied: bool = False
    experts: int = 0
    experts_per_token: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0
    dense_ffn: int = 0
    query_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 0

    @property
    def attention_params(self) -> int:
        """Parameters of the matrices of one attention layer."""
        if self.kv_rank:  # DeepSeek-V2, section 2.1
            wide = self.head_dim + self.rope_dim
            query = self.query_rank * (self.hidden + self.heads * wide) if self.query_rank else self.hidden * self.heads * wide
            key_value = self.hidden * (self.kv_rank + self.rope_dim) + self.kv_rank * self.heads * 2 * self.head_dim
            return query + key_value + self.heads * self.head_dim * self.hidden
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    def feed_forward_params(self, units: int) -> int:
        """Parameters of a feed-forward layer with ``units`` hidden units."""
        return (3 if self.gated else 2) * self.hidden * units

    @property
    def expert_layers(self) -> int:
        """Blocks with experts."""
        return self.layers - self.dense_layers if self.experts else 0

    def _block_params(self, experts: int) -> int:
        """Of all blocks, with ``experts`` of the experts of each layer."""
        sparse = self.expert_layers
        dense = self.layers - sparse
        router = self.hidden * self.experts
        of_experts = experts * self.feed_forward_params(self.ffn) + self.feed_forward_params(self.shared_ffn) + router
        dense_units = self.dense_ffn if self.experts else self.ffn
        return self.layers * self.attention_params + sparse * of_experts + dense * self.feed_forward_params(dense_units)

    @property
    def params(self) -> int:
        """Parameters of all matrices; norms and biases are left out."""
        return self._block_params(self.experts) + self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def active_params(self) -> int:
        """Those that multiply the activations of one token: without the embedding and the experts that it is not sent to."""
        return self._block_params(self.experts_per_token) + self.vocab * self.hidden

    def flops_per_token(self, seq_len: int) -> float:
        """FLOPs of forward and backward per token, with attention over the whole square as the published figures count it.

        Source:
            Narayanan et al. 2021 (arXiv 2104.04473), appendix; Chowdhery et al. 2022 (PaLM), appendix B.
        """
        score_dims = self.heads * (self.head_dim + (self.rope_dim / 2 if self.kv_rank else 0))
        return 6.0 * self.active_params + 12.0 * self.layers * score_dims * seq_len


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, **more: int | bool) -> ModelShape:
    return ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocab=vocab,
        gated=True,
        **{"head_dim": hidden // heads, **more},
    )


def _gpt(layers: int, hidden: int, heads: int, vocab: int = 51200, **more: int | bool) -> ModelShape:
    return ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocab=vocab,
        **{
            "kv_heads": heads,
            "head_dim": hidden // heads,
            "ffn": 4 * hidden,
            "gated": False,
            "tied": True,
            **more,
        },
    )


# from the configuration files of the models, as published beside their weights, or the papers named
PRESETS: Final[Mapping[str, ModelShape]] = {
    "llama-2-7b": _llama(32, 4096, 32, 32, 11008, 32000),
    "llama-2-13b": _llama(40, 5120, 40, 40, 13824, 32000),
    "llama-2-70b": _llama(80, 8192, 64, 8, 28672, 32000),
    "llama-3-8b": _llama(32, 4096, 32, 8, 14336, 128256),
    "llama-3-70b": _llama(80, 8192, 64, 8, 28672, 128256),
    "llama-3-405b": _llama(126, 16384, 128, 8, 53248, 128256),
    "llama-3.2-1b": _llama(16, 2048, 32, 8, 8192, 128256, tied=True),
    "llama-3.2-3b": _llama(28, 3072, 24, 8, 8192, 128256, tied=True),
    "tinyllama-1.1b": _llama(22, 2048, 32, 4, 5632, 32000),
    "mistral-7b": _llama(32, 4096, 32, 8, 14336, 32000),
    "mixtral-8x7b": _llama(32, 4096, 32, 8, 14336, 32000, experts=8, experts_per_token=2),
    "mixtral-8x22b": _llama(56, 6144, 48, 8, 16384, 32768, experts=8, experts_per_token=2),
    "qwen3-30b-a3b": _llama(48, 2048, 32, 4, 768, 151936, head_dim=128, experts=128, experts_per_token=8),
    "qwen3-235b-a22b": _llama(94, 4096, 64, 4, 1536, 151936, head_dim=128, experts=128, experts_per_token=8),
    "gpt-oss-120b": _llama(36, 2880, 64, 8, 2880, 201088, head_dim=64, experts=128, experts_per_token=4),
    "grok-1": _llama(64, 6144, 48, 8, 32768, 131072, tied=True, experts=8, experts_per_token=2),
    "gemma-3-12b": _llama(48, 3840, 16, 8, 15360, 262208, head_dim=256, tied=True),
    # arXiv 2412.19437, section 4.2
    "deepseek-v3": _llama(
        61, 7168, 128, 128, 2048, 129280,
        head_dim=128, experts=256, experts_per_token=8, shared_ffn=2048, dense_layers=3, dense_ffn=18432,
        query_rank=1536, kv_rank=512, rope_dim=64,
    ),
    "kimi-k2": _llama(
        61, 7168, 64, 64, 2048, 163840,
        head_dim=128, experts=384, experts_per_token=8, shared_ffn=2048, dense_layers=1, dense_ffn=18432,
        query_rank=1536, kv_rank=512, rope_dim=64,
    ),
    # arXiv 2402.16819 and 2406.11704: squared ReLU without a gate
    "nemotron-4-15b": _gpt(32, 6144, 48, 256000, kv_heads=8, ffn=24576, tied=False),
    "nemotron-4-340b": _gpt(96, 18432, 96, 256000, kv_heads=8, ffn=73728, tied=False),
    "gpt3-175b": _gpt(96, 12288, 96),  # arXiv 2005.14165, table 2.1
    "gpt2-124m": _gpt(12, 768, 12, 50257),
    "gpt2-1.5b": _gpt(48, 1600, 25, 50257),
    "mpt-7b": _gpt(32, 4096, 32, 50432),
    "mpt-30b": _gpt(48, 7168, 64, 50432),
    "stablelm-3b": _llama(32, 2560, 32, 32, 6912, 50304),
    "phi-1.5": _gpt(24, 2048, 32, 51200, tied=False),
}  # fmt: skip

_SAME: Final[Mapping[str, str]] = {"llama-3.1": "llama-3", "llama-3.3": "llama-3", "gpt-oss": "gpt-oss"}


def find_preset(name: str) -> ModelShape | None:
    """The shape of a well-known model, however its name is written: ``LLAMA3_70B``, ``llama3.1-70b SFT``; None if unknown."""
    wanted = _plain(name)
    for preset, shape in PRESETS.items():
        plain = _plain(preset)
        if wanted == plain or wanted.startswith(plain):
            return shape
    return None


def _plain(name: str) -> str:
    text = re.sub(r"[^a-z0-9.]+", "", name.lower())
    return re.sub(r"^llama3\.[13](?=\d)", "llama3", text)
