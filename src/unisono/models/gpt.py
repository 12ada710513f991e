"""A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

The architecture is Llama's (Touvron et al. 2023), so an export loads as ``LlamaForCausalLM``; with experts (``models.moe``)
it is Mixtral's. There is no key/value cache, no bias and no learned position.
Shape letters: B batch, T tokens, D dim, H query heads, K key/value heads, E width of a head, F feed-forward width,
V vocabulary.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unisono.models.layers import RMSNorm
from unisono.models.loss import LazyLogits
from unisono.models.moe import MoE
from unisono.models.mup import WidthKind, init_scale, width_kind, width_ratio
from unisono.models.options import ModelOptions

LOSS_CHUNK = 1024  # rows of logits in memory at a time
RESIDUAL_OUTPUTS = ("out.weight", "down.weight", "experts.down")


def rotary_angles(positions: Tensor, width: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines [..., T, E/2] of position · theta^(−2i/E).

    Args:
        positions: [..., T].
        width: Width of a head (E).

    Source:
        Su et al. 2021, in the half-split form.
    """
    exponent = torch.arange(0, width, 2, device=positions.device, dtype=torch.float32) / width
    angles = positions[..., None].float() * theta**-exponent  # [..., T, E/2]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + E/2]) of x [B, heads, T, E] by its angle, computed in float32."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention in which H query heads share K key/value heads."""

    def __init__(self, options: ModelOptions) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = (
            options.num_heads,
            options.num_kv_heads,
            options.head_width,
        )
        self.q = nn.Linear(options.dim, self.heads * self.width, bias=False)
        self.k = nn.Linear(options.dim, self.kv_heads * self.width, bias=False)
        self.v = nn.Linear(options.dim, self.kv_heads * self.width, bias=False)
        self.out = nn.Linear(self.heads * self.width, options.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """x [B, T, D] → [B, T, D]; mask [B, 1, T, T] is true at visible keys, None is causal."""
        q = self.q(x).unflatten(-1, (-1, self.width)).transpose(1, 2)  # [B, H, T, E]
        k = self.k(x).unflatten(-1, (-1, self.width)).transpose(1, 2)  # [B, K, T, E]
        v = self.v(x).unflatten(-1, (-1, self.width)).transpose(1, 2)  # [B, K, T, E]
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if self.kv_heads != self.heads:  # a rank may have fewer of both, in the same ratio
            k = k.repeat_interleave(self.heads // self.kv_heads, dim=1)  # [B, H, T, E]
            v = v.repeat_interleave(self.heads // self.kv_heads, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)  # [B, H, T, E]
        return self.out(mixed.transpose(1, 2).flatten(2))  # [B, T, D]


class FeedForward(nn.Module):
    """SwiGLU feed-forward layer (Shazeer 2020): ``down(silu(gate(x)) · up(x))``."""

    def __init__(self, options: ModelOptions) -> None:
        super().__init__()
        self.gate = nn.Linear(options.dim, options.hidden_ffn, bias=False)
        self.up = nn.Linear(options.dim, options.hidden_ffn, bias=False)
        self.down = nn.Linear(options.hidden_ffn, options.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] → [B, T, D]."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Pre-norm residual block: attention, then feed-forward."""

    def __init__(self, options: ModelOptions) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(options.dim, options.norm_eps)
        self.attention = Attention(options)
        self.ffn_norm = RMSNorm(options.dim, options.norm_eps)
        self.ffn = MoE(options) if options.num_experts else FeedForward(options)
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """[B, T, D] → [B, T, D]."""
        x = x + self.dropout(self.attention(self.attention_norm(x), cos, sin, mask))
        return x + self.dropout(self.ffn(self.ffn_norm(x)))


class GPT(nn.Module):
    """Decoder-only language model.

    ``forward`` returns ``LazyLogits``: call ``.logits()``, or pass them to ``cross_entropy_sum``. Matrices are initialised from
    N(0, 0.02²), the two that write into the residual stream from N(0, 0.02² / (2·layers)), so that the variance of the stream
    does not grow with depth; norms are 1. With ``mup_base_dim`` these are the values at that width (``models.mup``).

    Args:
        options: Sizes; ``vocab_size`` must be set.

    Raises:
        ValueError: ``vocab_size`` is 0.

    Source:
        Touvron et al. 2023 (architecture), Radford et al. 2019 (initialisation).
    """

    def __init__(self, options: ModelOptions) -> None:
        super().__init__()
        if options.vocab_size < 1:
            raise ValueError("vocab_size is 0: a model needs it resolved from the tokenizer first")
        self.options = options
        self.embedding = nn.Embedding(options.vocab_size, options.dim)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.num_layers))
        self.norm = RMSNorm(options.dim, options.norm_eps)
        self.head = None if options.tied else nn.Linear(options.dim, options.vocab_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights from torch's current generator, in the order of ``named_parameters``."""
        residual_std = 0.02 / math.sqrt(2 * self.options.num_layers)
        kinds, ratio = self.width_kinds(), width_ratio(self.options)
        for name, parameter in self.named_parameters():
            scale = init_scale(kinds[name], ratio)
            if parameter.dim() < 2:
                nn.init.constant_(parameter, scale)
            else:
                nn.init.normal_(parameter, std=scale * (residual_std if name.endswith(RESIDUAL_OUTPUTS) else 0.02))

    def width_kinds(self) -> dict[str, WidthKind]:
        """Kind of each parameter in the maximal update parametrization, by name."""
        tied = self.head is None
        return {name: width_kind(name, parameter.dim(), tied=tied) for name, parameter in self.named_parameters()}

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> LazyLogits:
        """Compute the logits [B, T, V] of the next tokens.

        Args:
            tokens: [B, T] int64.
            positions: [T] or [B, T] int64, such as places inside each document; default 0 to T - 1.
            documents: [B, T] document numbers; attention stays inside a document. None is one document.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)  # [T]
        cos, sin = rotary_angles(positions, self.options.head_width, self.options.rope_theta)
        if cos.dim() == 3:
            cos, sin = cos[:, None], sin[:, None]  # [B, 1, T, E/2]
        mask = None
        if documents is not None:
            same = documents[:, :, None] == documents[:, None, :]  # [B, T, T]
            mask = same.tril()[:, None]  # [B, 1, T, T]
        x = self.embedding(tokens)  # [B, T, D]
        for block in self.blocks:
            x = block(x, cos, sin, mask)
        head = self.embedding if self.head is None else self.head
        return LazyLogits(self.norm(x), head.weight, LOSS_CHUNK)

    @torch.no_grad()
    def generate(self, tokens: Tensor, count: int, *, temperature: float, context: int, seed: int) -> Tensor:
        """Append ``count`` sampled tokens to ``tokens`` and return all of them, [1, T + count].

        Recomputes the whole context for each token. Uses a generator of its own, so the global random state is unchanged.

        Args:
            tokens: Prompt [1, T] int64.
            temperature: Divisor of the logits; 0 takes the most likely token.
            context: Number of last tokens that the model sees.
            seed: Seed of the sampling.
        """
        generator = torch.Generator(device=tokens.device).manual_seed(seed)
        for _ in range(count):
            head = self(tokens[:, -context:])
            logits = head._replace(hidden=head.hidden[:, -1]).logits().float()  # [1, V]
            if temperature > 0:
                choice = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)  # [1, 1]
            else:
                choice = logits.argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, choice], dim=1)
        return tokens
