"""A masked language model (Devlin et al. 2019, BERT): post-norm blocks, GELU, learned positions, biases.

The architecture is that of the paper, so weights load from and export to ``BertForMaskedLM`` (``interop.bert``).
``data.MaskTokens`` makes its batches. There is no pooler, no next-sentence prediction (Liu et al. 2019 train better without)
and no dropout inside attention.
Shape letters: B batch, T tokens, P predicted tokens, D dim, H heads, E width of a head, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unisono.errors import ConfigError, DataError
from unisono.models.layers import matmul_dtype
from unisono.models.loss import LazyLogits

LOSS_CHUNK = 1024  # rows of logits in memory at a time
# one column for the output bias, and zeros up to the multiple of 8 that matrix units need
_BIAS_COLUMNS = 8
# added to the scores of padding: its weight is exactly 0 next to any token; representable in float16
PADDING_SCORE = -3e4


@dataclass(frozen=True, kw_only=True, slots=True)
class BertOptions:
    """Sizes of a BERT; the defaults are those of BERT base.

    Attributes:
        vocab_size: Number of rows of the token table, which is also the matrix of the output head.
        num_layers: Number of blocks.
        dim: Width of the hidden states.
        num_heads: Attention heads of a block; each has the width ``dim / num_heads``.
        ffn_dim: Width of the feed-forward layers.
        max_length: Largest length of a text in tokens; each position has a learned vector.
        segments: Number of kinds of segments, such as question and passage; each has a learned vector.
        dropout: Dropout probability after the embeddings and after each attention and feed-forward layer.
        norm_eps: Epsilon inside the LayerNorms.

    Raises:
        ConfigError: ``dim`` is not divisible by ``num_heads``.

    Source:
        Devlin et al. 2019.
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
    """Multi-head self-attention over all tokens of a text."""

    def __init__(self, options: BertOptions) -> None:
        super().__init__()
        self.heads, self.width = options.num_heads, options.dim // options.num_heads
        self.q = nn.Linear(options.dim, options.dim)
        self.k = nn.Linear(options.dim, options.dim)
        self.v = nn.Linear(options.dim, options.dim)
        self.out = nn.Linear(options.dim, options.dim)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """x [B, T, D] → [B, T, D]; mask [B, 1, 1, T] is true at visible tokens, or is added to the scores."""
        q, k, v = (layer(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # [B, H, T, E]
        return self.out(mixed.transpose(1, 2).flatten(2))  # [B, T, D]


class BertFeedForward(nn.Module):
    """Feed-forward layer of two matrices: ``down(gelu(up(x)))``."""

    def __init__(self, options: BertOptions) -> None:
        super().__init__()
        self.up = nn.Linear(options.dim, options.ffn_dim)
        self.down = nn.Linear(options.ffn_dim, options.dim)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] → [B, T, D]."""
        return self.down(F.gelu(self.up(x)))


class BertBlock(nn.Module):
    """Post-norm residual block: attention, then feed-forward, with a LayerNorm after each sum."""

    def __init__(self, options: BertOptions) -> None:
        super().__init__()
        self.attention = BertAttention(options)
        self.attention_norm = nn.LayerNorm(options.dim, options.norm_eps)
        self.ffn = BertFeedForward(options)
        self.ffn_norm = nn.LayerNorm(options.dim, options.norm_eps)
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """[B, T, D] → [B, T, D]."""
        rounded = x.to(matmul_dtype(x))  # one cast for the three projections that read it
        x = self.attention_norm(x + self.dropout(self.attention(rounded, mask)))
        return self.ffn_norm(x + self.dropout(self.ffn(x)))


class MaskedHead(nn.Module):
    """Output head ``norm(gelu(dense(x)))``, multiplied by the token table, plus ``bias`` [V]."""

    def __init__(self, options: BertOptions) -> None:
        super().__init__()
        self.dense = nn.Linear(options.dim, options.dim)
        self.norm = nn.LayerNorm(options.dim, options.norm_eps)
        self.bias = nn.Parameter(torch.zeros(options.vocab_size))

    def forward(self, x: Tensor, table: Tensor) -> LazyLogits:
        """x [..., D] and table [V, D] → logits [..., V], not yet multiplied out.

        The bias is a column of the matrix and meets a constant 1 in x, so that the chunked loss needs no bias.
        """
        x = self.norm(F.gelu(self.dense(x)))  # [..., D]
        x = F.pad(F.pad(x, (0, 1), value=1.0), (0, _BIAS_COLUMNS - 1))  # [..., D + 8]
        columns = F.pad(self.bias[:, None], (0, _BIAS_COLUMNS - 1))  # [V, 8]
        return LazyLogits(x, torch.cat([table, columns], dim=1), LOSS_CHUNK)


class ClassHead(nn.Module):
    """Head of a text: ``classifier(dropout(tanh(pooler(x of the first token))))``.

    Source:
        Devlin et al. 2019; ``BertForSequenceClassification`` of transformers.
    """

    def __init__(self, options: BertOptions, outputs: int) -> None:
        super().__init__()
        self.pooler = nn.Linear(options.dim, options.dim)
        self.dropout = nn.Dropout(options.dropout)
        self.classifier = nn.Linear(options.dim, outputs)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """x [B, T, D] → logits [B, outputs]; ``table`` is the token table, which a masked head multiplies with."""
        return self.classifier(self.dropout(torch.tanh(self.pooler(x[:, 0]))))


class TokenClassHead(nn.Module):
    """Head of each token: ``classifier(dropout(x))``, as in ``BertForTokenClassification`` of transformers."""

    def __init__(self, options: BertOptions, outputs: int) -> None:
        super().__init__()
        self.dropout = nn.Dropout(options.dropout)
        self.classifier = nn.Linear(options.dim, outputs)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """x [B, T, D] → logits [B, T, outputs]; ``table`` as for ``ClassHead``."""
        return self.classifier(self.dropout(x))


class BERT(nn.Module):
    """BERT encoder with a head: of a masked language model, or of classes.

    With a masked head ``forward`` returns ``LazyLogits``: call ``.logits()``, or pass them to ``cross_entropy_sum``. Every matrix
    is initialised from N(0, 0.02²); biases are 0, norms 1.

    Args:
        options: Sizes.
        head: ``(x [B, T, D], token table [V, D]) -> logits``. By default a ``MaskedHead``.

    Source:
        Devlin et al. 2019.
    """

    def __init__(self, options: BertOptions, head: MaskedHead | ClassHead | TokenClassHead | None = None) -> None:
        super().__init__()
        self.options = options
        self.embedding = nn.Embedding(options.vocab_size, options.dim)
        self.positions = nn.Embedding(options.max_length, options.dim)
        self.segments = nn.Embedding(options.segments, options.dim)
        self.norm = nn.LayerNorm(options.dim, options.norm_eps)
        self.dropout = nn.Dropout(options.dropout)
        self.blocks = nn.ModuleList(BertBlock(options) for _ in range(options.num_layers))
        self.head = MaskedHead(options) if head is None else head
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights from torch's current generator, in the order of ``named_parameters``."""
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
            else:
                nn.init.constant_(parameter, float(name.endswith("norm.weight")))

    def check_length(self, tokens: int) -> None:
        """Raise ``DataError`` if ``tokens``, the length of a text, exceeds ``max_length``.

        With ``plan.cp`` a rank's forward sees a part of each text, so ``parallel.context`` calls this with the whole length.
        """
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
        attention_mask: Tensor | None = None,
        segments: Tensor | None = None,
        predicted: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> LazyLogits | Tensor:
        """Compute the logits of all tokens, or of those at ``predicted`` only, at P/T of the cost.

        Args:
            tokens: [B, T] int64.
            attention_mask: [B, T] int64 or bool, 1 at real tokens and 0 at padding; None if there is no padding.
            segments: [B, T] int64; default 0.
            predicted: [B, P] int64, places in the text whose logits are returned.
            positions: [B or 1, T] int64, places of the tokens in their text; default 0 to T - 1.

        Returns:
            Logits [B, T, V], or [B, P, V] with ``predicted``; with another head its logits.

        Raises:
            DataError: There are more tokens than positions, or both ``predicted`` and ``positions`` are given.
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
        if attention_mask is not None:
            real = attention_mask.bool()
            # in a text without any token all are visible: attention to nothing is NaN in some kernels and 0 in others
            if positions is None:
                mask = real | ~real.any(1, keepdim=True)  # [B, T]
            else:  # other ranks may have the text's tokens: the score hides padding next to them, and nothing alone
                mask = x.new_zeros(real.shape).masked_fill(~real, PADDING_SCORE)
            mask = mask[:, None, None]  # [B, 1, 1, T]
        for block in self.blocks:
            x = block(x, mask)
        if predicted is not None:
            x = x.gather(1, predicted[..., None].expand(-1, -1, x.shape[-1]))  # [B, P, D]
        return self.head(x, self.embedding.weight)
