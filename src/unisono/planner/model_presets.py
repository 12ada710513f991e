"""Shapes of well-known models, from the configuration files beside their weights or the papers named. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from unisono.planner.model_shape import ModelShape


def _llama(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, *, tied: bool = False, **more: int
) -> ModelShape:
    """With a gate; a head has ``hidden / heads`` dimensions unless ``head_dim`` is given."""
    sizes: dict[str, Any] = {"head_dim": hidden // heads, **more}
    return ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        gated=True,
        vocab=vocab,
        tied=tied,
        **sizes,
    )


def _gpt(layers: int, hidden: int, heads: int, vocab: int = 51200, *, tied: bool = True, **more: int) -> ModelShape:
    """Without a gate, four times as wide in between; trained on 2,048 tokens unless it is said."""
    sizes: dict[str, Any] = {
        "kv_heads": heads,
        "head_dim": hidden // heads,
        "ffn": 4 * hidden,
        "max_seq_len": 2048,
        **more,
    }
    return ModelShape(layers=layers, hidden=hidden, heads=heads, gated=False, vocab=vocab, tied=tied, **sizes)


def _maxtext(hidden: int, units: int, layers: int) -> ModelShape:
    """Powers of two by which the base of 1 B parameters is widened and deepened."""
    heads = 16 << units
    return _llama(16 << layers, 2048 << hidden, heads, heads, 7168 << units, 32000, head_dim=128, max_seq_len=2048)


PRESETS: Final[Mapping[str, ModelShape]] = {
    "llama-2-7b": _llama(32, 4096, 32, 32, 11008, 32000, max_seq_len=4096),
    "llama-2-13b": _llama(40, 5120, 40, 40, 13824, 32000, max_seq_len=4096),
    "llama-2-70b": _llama(80, 8192, 64, 8, 28672, 32000, max_seq_len=4096),
    "llama-3-8b": _llama(32, 4096, 32, 8, 14336, 128256, max_seq_len=8192),
    "llama-3-70b": _llama(80, 8192, 64, 8, 28672, 128256, max_seq_len=8192),
    "llama-3-405b": _llama(126, 16384, 128, 8, 53248, 128256, max_seq_len=8192),
    "llama-3.2-1b": _llama(16, 2048, 32, 8, 8192, 128256, head_dim=64, tied=True, max_seq_len=8192),
    "llama-3.2-3b": _llama(28, 3072, 24, 8, 8192, 128256, tied=True, max_seq_len=8192),
    # one expert of 16 or 128, in each or in each second block, beside a shared one
    "llama-4-scout": _llama(
        48, 5120, 40, 8, 8192, 202048, experts=16, experts_per_token=1, shared_ffn=8192, max_seq_len=8192
    ),
    "llama-4-maverick": _llama(
        48, 5120, 40, 8, 8192, 202048, experts=128, experts_per_token=1, shared_ffn=8192, expert_period=2,
        dense_ffn=16384, max_seq_len=8192,
    ),
    "tinyllama-1.1b": _llama(22, 2048, 32, 4, 5632, 32000, max_seq_len=2048),
    "mistral-7b": _llama(32, 4096, 32, 8, 14336, 32000, max_seq_len=8192),
    "mixtral-8x7b": _llama(32, 4096, 32, 8, 14336, 32000, experts=8, experts_per_token=2, max_seq_len=4096),
    "mixtral-8x22b": _llama(56, 6144, 48, 8, 16384, 32768, experts=8, experts_per_token=2, max_seq_len=4096),
    "qwen2-57b-a14b": _llama(
        28, 3584, 28, 4, 2560, 151936, experts=64, experts_per_token=8, shared_ffn=20480, max_seq_len=4096
    ),
    "qwen3-14b": _llama(40, 5120, 40, 8, 17408, 151936, max_seq_len=4096),
    "qwen3-30b-a3b": _llama(
        48, 2048, 32, 4, 768, 151936, head_dim=128, experts=128, experts_per_token=8, max_seq_len=4096
    ),
    "qwen3-235b-a22b": _llama(
        94, 4096, 64, 4, 1536, 151936, head_dim=128, experts=128, experts_per_token=8, max_seq_len=4096
    ),
    "gpt-oss-20b": _llama(
        24, 2880, 64, 8, 2880, 201088, head_dim=64, experts=32, experts_per_token=4, max_seq_len=4096
    ),
    "gpt-oss-120b": _llama(
        36, 2880, 64, 8, 2880, 201088, head_dim=64, experts=128, experts_per_token=4, max_seq_len=4096
    ),
    "grok-1": _llama(64, 6144, 48, 8, 32768, 131072, tied=True, experts=8, experts_per_token=2, max_seq_len=8192),
    "gemma-3-12b": _llama(48, 3840, 16, 8, 15360, 262208, head_dim=256, tied=True, max_seq_len=8192),
    "olmo-2-32b": _llama(64, 5120, 40, 8, 27648, 100352, max_seq_len=4096),
    "olmo-3-32b": _llama(64, 5120, 40, 8, 27648, 100352, max_seq_len=8192),
    # arXiv 2412.19437, section 4.2
    "deepseek-v3": _llama(
        61, 7168, 128, 128, 2048, 129280,
        head_dim=128, experts=256, experts_per_token=8, shared_ffn=2048, dense_layers=3, dense_ffn=18432,
        query_rank=1536, kv_rank=512, rope_dim=64, max_seq_len=4096,
    ),
    "kimi-k2": _llama(
        61, 7168, 64, 64, 2048, 163840,
        head_dim=128, experts=384, experts_per_token=8, shared_ffn=2048, dense_layers=1, dense_ffn=18432,
        query_rank=1536, kv_rank=512, rope_dim=64, max_seq_len=4096,
    ),
    # arXiv 2402.16819 and 2406.11704: squared ReLU without a gate
    "nemotron-4-15b": _gpt(32, 6144, 48, 256000, kv_heads=8, ffn=24576, tied=False, max_seq_len=4096),
    "nemotron-4-340b": _gpt(96, 18432, 96, 256000, kv_heads=8, ffn=73728, tied=False, max_seq_len=4096),
    "gpt3-175b": _gpt(96, 12288, 96),  # arXiv 2005.14165, table 2.1
    "gpt-174.6b": _gpt(96, 12288, 96),  # arXiv 2104.04473, tables 1 and 2
    "gpt-175b": _gpt(96, 12288, 96),
    "gpt-529.6b": _gpt(105, 20480, 128),
    "gpt-530b": _gpt(105, 20480, 128),  # arXiv 2201.11990, section 3
    "gpt-1t": _gpt(128, 25600, 160),
    "gpt2-124m": _gpt(12, 768, 12, 50257, max_seq_len=1024),
    "gpt2-1.5b": _gpt(48, 1600, 25, 50257, max_seq_len=1024),
    "bloom-176b": _gpt(70, 14336, 112, 250880),  # arXiv 2211.05100, table 3
    "mpt-7b": _gpt(32, 4096, 32, 50432),
    "mpt-30b": _gpt(48, 7168, 64, 50432, max_seq_len=8192),
    "stablelm-3b": _llama(32, 2560, 32, 32, 6912, 50304, max_seq_len=4096),
    "phi-1.5": _gpt(24, 2048, 32, 51200, tied=False),
    # MaxText's own sizes: its base configuration and rule of scaling, and its configurations for TPU v4
    "maxtext-16b": _maxtext(1, 2, 1),
    "maxtext-32b": _maxtext(2, 2, 1),
    "maxtext-64b": _maxtext(2, 2, 2),
    "maxtext-128b": _maxtext(2, 3, 2),
    "maxtext-256b": _maxtext(3, 3, 2),
    "maxtext-512b": _maxtext(3, 3, 3),
    "maxtext-1024b": _maxtext(3, 4, 3),
    "maxtext-22b": _gpt(48, 6144, 24, 32000, tied=False),
    "maxtext-52b": _gpt(32, 12288, 32, 32000, head_dim=256, tied=False),
}  # fmt: skip


def find_preset(name: str) -> ModelShape | None:
    """The shape of a well-known model, however its name is written: ``LLAMA3_70B``, ``llama3.1-70b SFT``; None if unknown."""
    wanted = re.sub(r"^[\w.-]+/", "", name)  # without an organisation
    # a preset and more words; ``llama-3-8bb`` is none
    begins = {_plain(wanted[: word.end()]) for word in re.finditer(r"[A-Za-z0-9]+", wanted)}
    matching = [preset for preset in PRESETS if _plain(preset) in begins]
    return PRESETS[max(matching, key=len)] if matching else None


def _plain(name: str) -> str:
    text = re.sub(r"[^a-z0-9.]+", "", name.lower())
    text = re.sub(r"^llama3\.[13](?=\d)", "llama3", text)
    return re.sub(r"^deepseek3", "deepseekv3", text)
