"""Settings of the reference models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from unisono.config import option
from unisono.config.fields import options_repr
from unisono.errors import Problem, inert_problem

Balance = Literal["bias", "loss", "none"]


# far above every model: the sizes of tensors fit 63 bits
MAX_LAYERS = MAX_EXPERTS = 1 << 16
MAX_WIDTH = 1 << 22
MAX_VOCABULARY = 1 << 31


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions:
    """Section ``model`` of a configuration: sizes of the built-in models, or a pretrained one."""

    __repr__ = options_repr

    pretrained: str = option(
        "",
        "A Hugging Face folder (config.json and safetensors), or its address, to fine-tune or go on from; empty = a new model.",
    )
    weights: str = option(
        "",
        "Weights that a built-in model or one of your own starts with: the folder of a run or checkpoint, a Hugging Face folder, "
        "or a safetensors file; empty = drawn. A head for other classes starts new.",
    )
    num_layers: int = option(
        4, "Number of blocks.", applies_with="a built-in model other than resnet", ge=1, le=MAX_LAYERS
    )
    dim: int = option(
        128, "Width of the hidden states.", applies_with="a built-in model other than resnet", ge=2, le=MAX_WIDTH
    )
    num_heads: int = option(4, "Number of query heads.", applies_with="components.model gpt, moe or bert", ge=1)
    num_kv_heads: int = option(
        2,
        "Number of key/value heads (grouped-query attention); divides num_heads.",
        applies_with="components.model gpt or moe",
        ge=1,
    )
    head_dim: int = option(
        0,
        "Width of an attention head, an even number; 0 = dim / num_heads.",
        applies_with="components.model gpt or moe",
        ge=0,
        le=MAX_WIDTH,
    )
    ffn_dim: int = option(
        0,
        "Width of the feed-forward layer; 0 = 8/3 of dim, rounded up to a multiple of 32 (gpt), or 4 times dim (bert). In a "
        "resnet the channels inside the blocks of the first stage, others in proportion; 0 = 64.",
        applies_with="components.model gpt, moe, bert or resnet",
        ge=0,
        le=MAX_WIDTH,
    )
    vocab_size: int = option(
        0,
        "Token ids; 0 = the tokenizer's, rounded up to a multiple of 64. In an mlp the rows of its table of texts; 0 = 4096.",
        applies_with="a built-in model other than resnet",
        ge=0,
        le=MAX_VOCABULARY,
    )
    num_experts: int = option(
        0,
        "Experts in each feed-forward layer, of which a token goes to a few; ffn_dim is the width of one. 0 = none.",
        applies_with="components.model gpt or moe",
        ge=0,
        le=MAX_EXPERTS,
    )
    num_experts_per_token: int = option(
        2, "Experts that each token goes to.", applies_with="model.num_experts above 0", ge=1
    )
    capacity_factor: float = option(
        0.0,
        "In training an expert takes at most this times its equal share of a micro-batch; 0 = no token is dropped.",
        applies_with="model.num_experts above 0",
        ge=0.0,
    )
    balance: Balance = option(
        "bias",
        "How tokens are distributed over experts: a bias on the choice, an extra loss, or not at all.",
        applies_with="model.num_experts above 0",
    )
    dropout: float = option(
        0.0,
        "Dropout probability after attention and feed-forward.",
        applies_with="a built-in model other than resnet",
        ge=0.0,
        lt=1.0,
    )
    tied: bool = option(
        True, "Share the token embedding with the output head.", applies_with="components.model gpt or moe"
    )
    norm_eps: float = option(1e-5, "Epsilon inside RMSNorm.", applies_with="components.model gpt, moe or bert", gt=0.0)
    rope_theta: float = option(
        10000.0, "Base of the rotary position frequencies.", applies_with="components.model gpt or moe", gt=0.0
    )
    mup_base_dim: int = option(
        0,
        "The dim at which the learning rate was chosen: initial values and rates of this dim follow from it by the maximal "
        "update parametrization (muP); 0 = the same at each dim.",
        applies_with="components.model gpt",
        ge=0,
        le=MAX_WIDTH,
    )

    @property
    def head_width(self) -> int:
        """Width of an attention head, with 0 resolved."""
        return self.head_dim or self.dim // self.num_heads

    @property
    def hidden_ffn(self) -> int:
        """Feed-forward width, with 0 resolved: SwiGLU has three matrices, so 8/3 of dim keeps the usual 8·dim² weights."""
        return self.ffn_dim or -(-8 * self.dim // 3 // 32) * 32

    def problems(self) -> Iterator[tuple[str, Problem]]:
        """Problems between two fields, by field name."""
        if self.head_dim % 2:
            yield (
                "head_dim",
                Problem(
                    given=f"head_dim {self.head_dim}",
                    rule="each head's width is even (rotary pairs)",
                    consequence="the attention cannot be built",
                    nearest=f"head_dim={self.head_dim + 1}",
                ),
            )
        elif not self.head_dim and (self.dim % self.num_heads or self.dim // self.num_heads % 2):
            legal = [h for h in range(1, self.dim + 1) if self.dim % h == 0 and self.dim // h % 2 == 0]
            near = sorted(legal, key=lambda h: abs(h - self.num_heads))[:3]
            yield (
                "num_heads",
                Problem(
                    given=f"num_heads {self.num_heads} with dim {self.dim}",
                    rule="dim is divisible by num_heads, and each head's width is even (rotary pairs)",
                    consequence="the attention cannot be built",
                    nearest=f"num_heads in {{{', '.join(map(str, sorted(near)))}}}",
                ),
            )
        if self.num_heads % self.num_kv_heads:
            legal = [k for k in range(1, self.num_heads + 1) if self.num_heads % k == 0]
            yield (
                "num_kv_heads",
                Problem(
                    given=f"num_kv_heads {self.num_kv_heads} with num_heads {self.num_heads}",
                    rule="num_heads is divisible by num_kv_heads: each key/value head serves the same number of query heads",
                    consequence="the attention cannot be built",
                    nearest=f"num_kv_heads in {{{', '.join(map(str, legal))}}}",
                ),
            )
        yield from self._expert_problems()
        yield from self._width_problems()

    def _width_problems(self) -> Iterator[tuple[str, Problem]]:
        """A base width at which there is no such model, or a model that the parametrization does not cover."""
        if not self.mup_base_dim:
            return
        if self.num_experts:
            yield (
                "mup_base_dim",
                Problem(
                    given=f"mup_base_dim {self.mup_base_dim} with num_experts {self.num_experts}",
                    rule="the parametrization has no rule for the router, which chooses experts by the order of its scores",
                    consequence="the learning rate would not transfer from one width to another",
                    nearest="num_experts=0, or leave mup_base_dim out",
                ),
            )
        unit = self.dim // self.num_kv_heads  # the width with one key/value head
        if self.mup_base_dim * self.num_kv_heads % self.dim:
            base = max(1, round(self.mup_base_dim / unit)) * unit
            yield (
                "mup_base_dim",
                Problem(
                    given=f"mup_base_dim {self.mup_base_dim} with dim {self.dim} and num_kv_heads {self.num_kv_heads}",
                    rule="the width of a head and the number of query heads of each key/value head are the same at every dim, so "
                    "heads are in proportion to dim",
                    consequence="the model of that dim would have a part of a head",
                    nearest=f"mup_base_dim={base}, or another num_kv_heads",
                ),
            )

    def _expert_problems(self) -> Iterator[tuple[str, Problem]]:
        if self.num_experts and self.num_experts_per_token > self.num_experts:
            yield (
                "num_experts_per_token",
                Problem(
                    given=f"num_experts_per_token {self.num_experts_per_token} with num_experts {self.num_experts}",
                    rule="a token goes to different experts",
                    consequence="there are not enough to choose from",
                    nearest=f"num_experts_per_token={self.num_experts}, or num_experts={self.num_experts_per_token}",
                ),
            )
        unset = ModelOptions()
        for name in ("num_experts_per_token", "capacity_factor", "balance"):
            if not self.num_experts and getattr(self, name) != getattr(unset, name):
                yield (
                    name,
                    inert_problem(
                        f"{name} {getattr(self, name)!r} with num_experts 0",
                        "it says how tokens find their experts",
                        f"num_experts=8, or leave {name} out",
                    ),
                )
