"""A mixture-of-experts feed-forward layer: a router sends each token to a few experts (Shazeer et al. 2017).

Scores are a softmax over all experts in float32. The k largest choose the experts, and weigh their outputs after they are
normalised to a sum of 1 (Mixtral, Jiang et al. 2024). With k = 1 the weight is the score itself, else the router would have no
gradient (Switch, Fedus et al. 2022). No token is dropped by default, so a token's output depends on the token alone. With a
capacity an expert takes only the first tokens of a micro-batch in training; the others skip it on the residual stream, and the
result depends on how the batch is split.

The load of the experts is balanced in one of two ways:

    bias   A bias per expert is added to the scores for the choice only. Once per step it rises for experts with few tokens and
           falls for the others (Wang et al. 2024, DeepSeek-V3). It changes no gradient.
    loss   Per sequence, tokens · Σ_e share of tokens_e · mean score_e (DeepSeek-V3). The backward pass adds its gradient; the
           reported loss is without it.

Both act in the router's backward pass, once per pass, also with recomputed activations.

Shape letters: B samples, T tokens of each, N = B·T, D dim, E experts, F hidden units of one, k experts per token, M rows =
tokens x choices. Rows are sorted by expert and moved only by gathers, forward and backward, because adding at an index has no
fixed order on an accelerator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from fractions import Fraction
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unisono.models.layers import matmul_dtype
from unisono.models.options import ModelOptions
from unisono.models.quantized import Form, rounded_weight
from unisono.models.traced_experts import host_counts, split_at_limit

BIAS_UPDATE_RATE = 1e-3  # DeepSeek-V3, section 4.2
BALANCE_LOSS_WEIGHT = 1e-2  # Fedus et al. 2022, section 2.2
EXPERT_MATRICES = ("gate", "up", "down")


class Router(nn.Module):
    """Chooses the experts of each token and their weights.

    ``sum_over_sequence`` sums over the ranks that share sequences; None if no ranks do.
    """

    bias: Tensor  # [E]; added to the scores for the choice
    load: Tensor  # [E] int64; tokens that chose each expert in the backward passes since the last step
    upstream: Tensor  # []; the gradient of the balance loss, which is that of the loss sum

    def __init__(self, options: ModelOptions) -> None:
        super().__init__()
        self.experts_per_token, self.balance = options.num_experts_per_token, options.balance
        self.sum_over_sequence: Callable[[Tensor], Tensor] | None = None
        self.weight = nn.Parameter(torch.empty(options.num_experts, options.dim))
        if self.balance == "bias":
            self.register_buffer("bias", torch.zeros(options.num_experts))
            self.register_buffer("load", torch.zeros(options.num_experts, dtype=torch.int64), persistent=False)
        elif self.balance == "loss":
            self.register_buffer("upstream", torch.ones(()), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T, D] → weights [B, T, k] in float32 or wider, and chosen experts [B, T, k], largest score first."""
        with torch.autocast(x.device.type, enabled=False):
            dtype = torch.promote_types(x.dtype, torch.float32)
            scores = F.linear(x.to(dtype), self.weight.to(dtype)).softmax(-1)  # [B, T, E]
            preferred = scores.detach()
            choice = (
                (preferred + self.bias if self.balance == "bias" else preferred).topk(self.experts_per_token).indices
            )
            weights = scores.gather(-1, choice)  # [B, T, k]
            if self.experts_per_token > 1:
                weights = weights / weights.sum(-1, keepdim=True)
            if self.balance == "bias":
                weights = _AddLoad.apply(weights, self.load, _count(choice.flatten(), scores.shape[-1]))
            elif self.balance == "loss":
                weights = _AddLoss.apply(weights, self._loss(scores, choice), self.upstream)
        return weights, choice  # pyright: ignore[reportReturnType]

    def _loss(self, scores: Tensor, choice: Tensor) -> Tensor:
        """Balance loss [], summed over samples and tokens like the loss sum."""
        counts = _count(choice.flatten(1), scores.shape[-1])  # [B, E]
        if self.sum_over_sequence is not None:
            counts = self.sum_over_sequence(counts)
        share = counts * scores.shape[-1] / counts.sum(-1, keepdim=True)  # [B, E]; 1 for an equal load
        return BALANCE_LOSS_WEIGHT * (share * scores.sum(1)).sum()


class Experts(nn.Module):
    """E stacked SwiGLU layers: gate and up [E, F, D], down [E, D, F].

    A rank may hold some of the experts, or some of the hidden units of each; its output is then one term of a sum. ``rounded``
    has the form of each matrix that is trained with rounded numbers; a stored one is a module in its place
    (``models.quantized_model``).
    """

    def __init__(self, options: ModelOptions) -> None:
        super().__init__()
        self.rounded: dict[str, Form] = {}
        self.num_experts, self.capacity_factor = options.num_experts, options.capacity_factor
        self.gate = nn.Parameter(torch.empty(self.num_experts, options.hidden_ffn, options.dim))
        self.up = nn.Parameter(torch.empty(self.num_experts, options.hidden_ffn, options.dim))
        self.down = nn.Parameter(torch.empty(self.num_experts, options.dim, options.hidden_ffn))

    def forward(self, x: Tensor, weights: Tensor, choice: Tensor) -> Tensor:
        """x [B, T, D], weights and choice [B, T, k] → Σ weight · expert(x) over the chosen experts, [B, T, D]."""
        k = choice.shape[-1]
        order, counts, num_rows = self._sort_by_expert(choice.flatten())  # [N·k], [E], at most N·k
        places = torch.empty_like(order)  # row of each choice [N·k]
        places[order] = torch.arange(order.numel(), device=order.device)
        rows = gather_rows(x.flatten(0, -2), order // k, places.view(-1, k))  # [N·k, D]
        if self._has_capacity_limit:
            outputs = F.pad(self.compute(rows[:num_rows], counts), (0, 0, 0, rows.shape[0] - num_rows))
        else:
            outputs = self.compute(rows, counts)  # [N·k, D]
        outputs = gather_rows(outputs, places, order).view(*choice.shape, x.shape[-1])  # [B, T, k, D]
        return (outputs * weights[..., None]).sum(-2).to(outputs.dtype)

    @property
    def _has_capacity_limit(self) -> bool:
        return self.training and self.capacity_factor > 0

    def _sort_by_expert(self, choice: Tensor) -> tuple[Tensor, Tensor, int]:
        """Order of the choices [N·k] by expert, then position, dropped ones last; rows per expert [E]; and rows that are kept."""
        counts = _count(choice, self.num_experts)
        order = choice.argsort(stable=True)
        if not self._has_capacity_limit:
            return order, counts, order.numel()
        limit = math.ceil(Fraction(str(self.capacity_factor)) * choice.numel() / self.num_experts)
        start = counts.cumsum(0) - counts  # [E]
        place = torch.arange(order.numel(), device=order.device) - start[choice[order]]
        kept, dropped = split_at_limit(order, place, limit, self.num_experts)
        return torch.cat([kept, dropped]), counts.clamp(max=limit), len(kept)

    def compute(self, rows: Tensor, counts: Tensor, /) -> Tensor:
        """rows [M, D] sorted by expert and ``counts`` [E] of rows per expert → outputs of the experts [M, D]."""
        hidden = self.hidden(rows, counts)
        return _grouped_matmul(hidden, self._matrix("down").to(hidden.dtype), counts)

    def hidden(self, rows: Tensor, counts: Tensor, /) -> Tensor:
        """rows [M, D] and ``counts`` [E] as for ``compute`` → hidden units [M, F]."""
        dtype = matmul_dtype(rows)
        rows, gate, up = (tensor.to(dtype) for tensor in (rows, self._matrix("gate"), self._matrix("up")))
        return F.silu(_grouped_matmul(rows, gate, counts)) * _grouped_matmul(rows, up, counts)

    def _matrix(self, name: str) -> Tensor:
        matrix: Tensor | Callable[[], Tensor] = getattr(self, name)
        if not isinstance(matrix, Tensor):
            return matrix()
        return rounded_weight(matrix, self.rounded[name]) if name in self.rounded else matrix


class MoE(nn.Module):
    """Mixture-of-experts layer: a router and its experts, in place of a feed-forward layer.

    Source:
        Shazeer et al. 2017; Jiang et al. 2024 (Mixtral).
    """

    def __init__(self, options: ModelOptions) -> None:
        super().__init__()
        self.router = Router(options)
        self.experts = Experts(options)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] → [B, T, D]."""
        return self.experts(x, *self.router(x))


@torch.no_grad()
def update_router_biases(model: nn.Module, sum_over_ranks: Callable[[Tensor], Tensor], good: Tensor) -> None:
    """Update the routers' biases from the load of a step, once after the step.

    Args:
        sum_over_ranks: Sums counts [layers, E] over the ranks that computed different tokens with these layers.
        good: [] bool; a skipped step (false) changes no bias.

    Source:
        Wang et al. 2024.
    """
    routers = list(_routers(model, "bias"))
    if not routers:
        return
    loads = sum_over_ranks(torch.stack([router.load for router in routers]))  # [layers, E]
    moves = BIAS_UPDATE_RATE * (loads.sum(-1, keepdim=True) - loads.shape[-1] * loads).sign()
    for router, move in zip(routers, torch.where(good, moves, 0), strict=True):
        router.bias += move
        router.load.zero_()


@torch.no_grad()
def set_balance_loss_scale(model: nn.Module, factor: Tensor | float) -> None:
    """Set the factor (default 1) of the balance losses to that of the loss sum in the backward pass."""
    for router in _routers(model, "loss"):
        router.upstream.fill_(factor)


@contextmanager
def balanced_routing(model: nn.Module) -> Generator[None]:
    """Inside, each expert computes an equal share of the rows, for fake tensors, which have no counts."""
    layers = [module for module in model.modules() if isinstance(module, Experts)]
    for layer in layers:
        layer.forward = partial(_balanced_forward, layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _balanced_forward(layer: Experts, x: Tensor, weights: Tensor, choice: Tensor) -> Tensor:
    """``Experts.forward`` with an equal split: the same shapes and parameters, other values."""
    parts = x.flatten(0, -2).repeat_interleave(choice.shape[-1], 0).tensor_split(layer.num_experts)
    stacks = zip(parts, layer.gate.unbind(), layer.up.unbind(), layer.down.unbind(), strict=True)
    outputs = [F.linear(F.silu(F.linear(rows, gate)) * F.linear(rows, up), down) for rows, gate, up, down in stacks]
    expert_outputs = torch.cat(outputs).view(*choice.shape, x.shape[-1])  # [B, T, k, D]
    return (expert_outputs * weights[..., None]).sum(-2).to(expert_outputs.dtype)


def inactive_parameters(model: nn.Module) -> int:
    """Number of parameters that a token does not use: those of the experts it is not routed to."""
    layers = (module for module in model.modules() if isinstance(module, MoE))
    return sum(
        sum(p.numel() for p in layer.experts.parameters())
        * (layer.experts.num_experts - layer.router.experts_per_token)
        // layer.experts.num_experts
        for layer in layers
    )


def _routers(model: nn.Module, balance: str) -> Iterator[Router]:
    return (module for module in model.modules() if isinstance(module, Router) and module.balance == balance)


def _count(choice: Tensor, experts: int) -> Tensor:
    """choice [..., n] → number of times each expert is chosen, int64 [..., E]."""
    counts = torch.zeros(*choice.shape[:-1], experts, dtype=torch.int64, device=choice.device)
    return counts.scatter_add_(-1, choice, torch.ones_like(choice))


def _grouped_matmul(rows: Tensor, stack: Tensor, counts: Tensor) -> Tensor:
    """rows [M, I] sorted by expert, stack [E, O, I] → rows times the matrix of their expert, [M, O].

    ``grouped_mm`` needs at least one row, a supported dtype and rows of a multiple of 16 bytes. It is up to three times faster
    than one product per expert, and the host need not know the counts.
    """
    is_aligned = all(width * rows.element_size() % 16 == 0 for width in stack.shape[1:])
    if rows.shape[0] and is_aligned and rows.dtype in (torch.float32, torch.bfloat16, torch.float16):
        return F.grouped_mm(rows, stack.mT, offs=counts.cumsum(0, dtype=torch.int32))
    parts = rows.split(host_counts(counts, rows.shape[0]))
    return torch.cat([F.linear(part, matrix) for part, matrix in zip(parts, stack.unbind(), strict=True)])


def gather_rows(x: Tensor, rows: Tensor, back: Tensor) -> Tensor:
    """``x[rows]``, with a gather in the backward pass.

    Args:
        back: Places of each row of x in the result: [n], or [n, k] if each row is in k places.
    """
    return _GatherRows.apply(x, rows, back)  # pyright: ignore[reportReturnType]


class _GatherRows(torch.autograd.Function):
    """Gather in forward; gather and sum in a fixed order in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x[rows]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        grad = gradients[0][back]
        return (grad.sum(1) if back.dim() == 2 else grad), None, None


class _AddLoad(torch.autograd.Function):
    """The identity; backward adds ``counts`` to ``load``, once per pass also if the pass is recomputed."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, load: Tensor, counts: Tensor) -> Tensor:
        ctx.load, ctx.counts = load, counts
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.load.add_(ctx.counts)
        return gradients[0], None, None


class _AddLoss(torch.autograd.Function):
    """The identity; backward gives ``loss`` the gradient ``upstream``, so pipeline stages need not pass on the loss."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, loss: Tensor, upstream: Tensor) -> Tensor:
        ctx.upstream, ctx.dtype = upstream, loss.dtype
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradients[0], ctx.upstream.to(ctx.dtype, copy=True), None
