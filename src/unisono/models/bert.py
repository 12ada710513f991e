"""An encoder that fills in masked tokens (Devlin et al. 2019, BERT): post-norm blocks, GELU, learned positions, biases.

The layout is that of the paper, so weights go to and from ``BertForMaskedLM`` (``interop.bert``). ``data.masking`` makes its
batches. Shape letters: B batch, T tokens, P predicted tokens, D dim, H heads, E width of a head, V vocabulary.
Left out on purpose: the pooler, next-sentence prediction (Liu et al. 2019 train better without), dropout inside of attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unisono.errors import ConfigError, DataError
from unisono.models.loss import LazyLogits
from unisono.models.precision import matmul_dtype

LOSS_CHUNK = 1024  # rows of logits that exist at once
# columns that carry the output bias: one, and zeros up to the multiple of 8 that matrix units want
_BIAS_COLUMNS = 8
# added to the scores of filling: its share is exactly 0 beside any token; float16 has it too
PADDING_SCORE = -3e4


@dataclass(frozen=True, kw_only=True, slots=True)
class BertOptions:
    """Sizes; those of BERT base where nothing is said. ``max_length`` in tokens, ``dropout`` after embeddings and layers.

    Raises ConfigError where num_heads does not divide dim.
    """

    vocab_size: int
    num_layers: int = 12
    dim: int = 768
    num_heads: int = 12
    ffn_dim: int = 3072
    max_length: int = 512
    segments: int = 2
    dropout: float = 0.1
    norm_eps: float = 1e-12

    def __post_init__(self) -> None:
        if self.dim % self.num_heads:
            near = [h for h in range(1, self.dim + 1) if self.dim % h == 0]
            raise ConfigError(
                given=f"num_heads {self.num_heads} with dim {self.dim}",
                rule="dim is divisible by num_heads",
                consequence="the attention cannot be built",
                nearest=f"num_heads={min(near, key=lambda h: abs(h - self.num_heads))}",
            )


class BertAttention(nn.Module):
    """Self-attention of all tokens with all."""

    def __init__(self, options: BertOptions) -> None:
        super().__init__()
        self.heads, self.width = options.num_heads, options.dim // options.num_heads
        self.q = nn.Linear(options.dim, options.dim)
        self.k = nn.Linear(options.dim, options.dim)
        self.v = nn.Linear(options.dim, options.dim)
        self.out = nn.Linear(options.dim, options.dim)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """x [B, T, D]; mask [B, 1, 1, T] true where all may look (or added to the scores), or None for everywhere."""
        q, k, v = (layer(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # [B, H, T, E]
        return self.out(mixed.transpose(1, 2).flatten(2))  # [B, T, D]


class BertFeedForward(nn.Module):
    """down(gelu(up(x)))."""

    def __init__(self, options: BertOptions) -> None:
        super().__init__()
        self.up = nn.Linear(options.dim, options.ffn_dim)
        self.down = nn.Linear(options.ffn_dim, options.dim)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] → [B, T, D]."""
        return self.down(F.gelu(self.up(x)))


class BertBlock(nn.Module):
    """Post-norm residual block: attention, then feed-forward, each normalised together with what it was added to."""

    def __init__(self, options: BertOptions) -> None:
        super().__init__()
        self.attention = BertAttention(options)
        self.attention_norm = nn.LayerNorm(options.dim, options.norm_eps)
        self.ffn = BertFeedForward(options)
        self.ffn_norm = nn.LayerNorm(options.dim, options.norm_eps)
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """[B, T, D] → [B, T, D]."""
        once = x.to(matmul_dtype(x))  # not once for each of the three that read it
        x = self.attention_norm(x + self.dropout(self.attention(once, mask)))
        return self.ffn_norm(x + self.dropout(self.ffn(x)))


class MaskedHead(nn.Module):
    """norm(gelu(dense(x))), to be multiplied with the token table; ``bias`` [V] is added to that."""

    def __init__(self, options: BertOptions) -> None:
        super().__init__()
        self.dense = nn.Linear(options.dim, options.dim)
        self.norm = nn.LayerNorm(options.dim, options.norm_eps)
        self.bias = nn.Parameter(torch.zeros(options.vocab_size))

    def forward(self, x: Tensor, table: Tensor) -> LazyLogits:
        """x [..., D] and table [V, D] → a Head whose logits are x' tableᵀ + bias.

        The bias travels as a column of the matrix beside a constant 1, so that the chunked loss needs to know of none.
        """
        x = self.norm(F.gelu(self.dense(x)))  # [..., D]
        x = F.pad(F.pad(x, (0, 1), value=1.0), (0, _BIAS_COLUMNS - 1))  # [..., D + 8]
        columns = F.pad(self.bias[:, None], (0, _BIAS_COLUMNS - 1))  # [V, 8]
        return LazyLogits(x, torch.cat([table, columns], dim=1), LOSS_CHUNK)


class BERT(nn.Module):
    """The whole encoder. ``forward`` returns a :class:`Head`: multiply it out with ``.logits()`` or feed it to the chunked loss.

    Initialisation (Devlin et al. 2019): every matrix from N(0, 0.02²); biases are 0, norms 1.
    """

    def __init__(self, options: BertOptions) -> None:
        super().__init__()
        self.options = options
        self.embedding = nn.Embedding(options.vocab_size, options.dim)
        self.positions = nn.Embedding(options.max_length, options.dim)
        self.segments = nn.Embedding(options.segments, options.dim)
        self.norm = nn.LayerNorm(options.dim, options.norm_eps)
        self.dropout = nn.Dropout(options.dropout)
        self.blocks = nn.ModuleList(BertBlock(options) for _ in range(options.num_layers))
        self.head = MaskedHead(options)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights from torch's current generator, in the order of ``named_parameters``."""
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
            else:
                nn.init.constant_(parameter, float(name.endswith("norm.weight")))

    def check_length(self, tokens: int) -> None:
        """Raises DataError for texts of more than ``max_length`` tokens. Under ``plan.cp`` a rank's forward sees a part of each
        text, so ``parallel.context`` asks here for the whole ones."""
        if tokens > self.options.max_length:
            raise DataError(
                given=f"texts of {tokens} tokens for a model of max_length {self.options.max_length}",
                rule="every place in a text has a learned position",
                consequence="the last tokens would have none",
                nearest=f"texts of {self.options.max_length} tokens, or max_length={tokens}",
            )

    def forward(
        self,
        tokens: Tensor,
        padding: Tensor | None = None,
        segments: Tensor | None = None,
        predicted: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> LazyLogits:
        """Logits of every token, or of those at the places ``predicted`` [B, P] int64 only, which costs P/T as much.

        ``tokens`` [B, T] int64. ``padding`` [B, T] bool says where there is text: True is a real token, False is filling,
        which nobody looks at; None is text everywhere. ``segments`` [B, T] int64, 0 where nothing is said. ``positions``
        [B or 1, T] int64 are the places of the tokens where these are a part of a text; 0 to T - 1 if nothing is said.
        Raises DataError for more tokens than there are positions, and for ``predicted`` together with ``positions``.
        """
        if predicted is not None and positions is not None:
            raise DataError(
                given="predicted together with positions",
                rule="predicted counts places from a text's first token; with positions (plan.cp) tokens are a part of it",
                consequence="other tokens than those would be predicted",
                nearest="weights that are 0 where nothing is predicted, or plan.cp=1",
            )
        length = tokens.shape[1]
        self.check_length(length)
        places = torch.arange(length, device=tokens.device)[None] if positions is None else positions  # [B or 1, T]
        kinds = torch.zeros_like(tokens) if segments is None else segments
        x = self.embedding(tokens) + self.positions(places) + self.segments(kinds)  # [B, T, D]
        x = self.dropout(self.norm(x))
        mask = None
        if padding is not None:
            # in a text without any token all are seen: attention to nothing is NaN in some kernels and 0 in others
            if positions is None:
                mask = padding | ~padding.any(1, keepdim=True)  # [B, T]
            else:  # other ranks may have the text's tokens: a number hides filling beside them, and alone nothing
                mask = x.new_zeros(padding.shape).masked_fill(~padding, PADDING_SCORE)
            mask = mask[:, None, None]  # [B, 1, 1, T]
        for block in self.blocks:
            x = block(x, mask)
        if predicted is not None:
            x = x.gather(1, predicted[..., None].expand(-1, -1, x.shape[-1]))  # [B, P, D]
        return self.head(x, self.embedding.weight)
