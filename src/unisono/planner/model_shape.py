"""Shapes of transformer models: what fixes their parameters, FLOPs and activations. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedBlocks:
    """Counts of the blocks of a traced model, in place of those that follow from a shape (``traced_shape``).

    Attributes:
        params: Parameters of all blocks.
        products: Multiplications of one token with matrices, in all blocks.
        score_dims: ``ModelShape.score_dims``, the mean over the blocks.
        kept_bytes: ``ModelShape.block_activation_bytes``.
        saved_bytes: ``ModelShape.block_offload_bytes``.
    """

    params: int
    products: int
    score_dims: float
    kept_bytes: float
    saved_bytes: float


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
        expert_period: Of a model with experts, one block of this many has them, after the ``dense_layers``.
        other_params: Parameters of no matrix above, in all blocks and beside them: norms, biases, learned positions. They are
            held and sent, and take no time to compute with. 0 if they are not counted, as in the presets.
        max_seq_len: Tokens of a sequence that it is trained on; 0 if unknown.
        traced: Counts of its blocks, of a model whose heads and hidden units are not known; those are then 1 and ``hidden``.
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
    expert_period: int = 1
    other_params: int = 0
    max_seq_len: int = 0
    traced: TracedBlocks | None = None

    @property
    def attention_params(self) -> int:
        """Parameters of the matrices of one attention layer."""
        if self.kv_rank:  # DeepSeek-V2, section 2.1
            wide = self.head_dim + self.rope_dim
            query = (
                self.query_rank * (self.hidden + self.heads * wide)
                if self.query_rank
                else self.hidden * self.heads * wide
            )
            key_value = self.hidden * (self.kv_rank + self.rope_dim) + self.kv_rank * self.heads * 2 * self.head_dim
            return query + key_value + self.heads * self.head_dim * self.hidden
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    def feed_forward_params(self, units: int) -> int:
        """Parameters of a feed-forward layer with ``units`` hidden units."""
        return (3 if self.gated else 2) * self.hidden * units

    @property
    def expert_layers(self) -> int:
        """Blocks with experts."""
        return (self.layers - self.dense_layers) // self.expert_period if self.experts else 0

    @property
    def expert_params(self) -> int:
        """Parameters of one expert."""
        return self.feed_forward_params(self.ffn)

    @property
    def dense_params(self) -> int:
        """Parameters of the blocks that every token passes: all but the experts."""
        if self.traced:
            return self.traced.params
        dense_units = (self.dense_ffn or self.ffn) if self.experts else self.ffn
        shared = self.feed_forward_params(self.shared_ffn) + self.hidden * self.experts  # with the router
        return (
            self.layers * self.attention_params
            + self.expert_layers * shared
            + (self.layers - self.expert_layers) * self.feed_forward_params(dense_units)
        )

    @property
    def dense_products(self) -> int:
        """Multiplications of one token with these matrices; a traced model may use some several times, or for no token."""
        return self.traced.products if self.traced else self.dense_params

    @property
    def params(self) -> int:
        """All parameters that are counted."""
        matrices = (
            self.dense_params + self._expert_params(self.experts) + self.vocab * self.hidden * (1 if self.tied else 2)
        )
        return matrices + self.other_params

    @property
    def active_params(self) -> int:
        """Those that multiply the activations of one token: without the embedding and the experts that it is not sent to."""
        return self.dense_products + self._expert_params(self.experts_per_token) + self.vocab * self.hidden

    def _expert_params(self, experts: int) -> int:
        return self.expert_layers * experts * self.expert_params

    @property
    def score_dims(self) -> float:
        """Multiplications of one query with one key, and of its weight with the value, over all heads: half of their sum."""
        if self.traced:
            return self.traced.score_dims
        return self.heads * (self.head_dim + (self.rope_dim / 2 if self.kv_rank else 0))

    @property
    def block_activation_bytes(self) -> float:
        """Bytes of one token that a block keeps for its backward pass in 16 bits: the mean over the blocks.

        Attention keeps no scores, only the logarithm of their sum in 32 bits.

        Source:
            Korthikanti et al. 2022 (arXiv 2205.05198), section 4.1; Dao et al. 2022 (arXiv 2205.14135).
        """
        if self.traced:
            return self.traced.kept_bytes
        # inputs of both norms, outputs of both, queries, keys, values and weighted values
        attention = 2 * (4 * self.hidden + 2 * self.head_dim * (self.heads + self.kv_heads)) + 4 * self.heads
        # of each matrix: gate, up, their activation and their product; or up and its activation
        per_unit = 2 * (4 if self.gated else 2)
        # the copies of a token that go to experts and come back
        copies = 2 * 2 * self.hidden * self.experts_per_token * self.expert_layers / self.layers
        return attention + per_unit * self.units_per_token + copies

    @property
    def units_per_token(self) -> float:
        """Hidden units that one token passes in a block: the mean over the blocks."""
        if not self.experts:
            return self.ffn
        of_experts = self.experts_per_token * self.ffn + self.shared_ffn
        dense_layers = self.layers - self.expert_layers
        return (dense_layers * (self.dense_ffn or self.ffn) + self.expert_layers * of_experts) / self.layers

    @property
    def block_offload_bytes(self) -> float:
        """Bytes of one token that a block sends to the host, once for each operation that saves them: the mean over the blocks.

        Beyond those that it keeps in 16 bits: inputs of both norms in 32 bits; those of queries, keys and values three times;
        those of a gate and its units twice; the output of attention twice.
        """
        if self.traced:
            return self.traced.saved_bytes
        again = 2 * (self.heads * self.head_dim + (5 if self.gated else 4) * self.hidden)
        return self.block_activation_bytes + again

    def flops_per_token(self, seq_len: int) -> float:
        """FLOPs of forward and backward per token, with attention over the whole square as published figures count it.

        Source:
            Narayanan et al. 2021 (arXiv 2104.04473), appendix; Chowdhery et al. 2022 (PaLM), appendix B.
        """
        return 6.0 * self.active_params + 12.0 * self.layers * self.score_dims * seq_len
