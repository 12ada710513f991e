"""Batch normalisation over all ranks that compute samples (Ioffe and Szegedy 2015).

In training its mean and variance are those of one micro-batch of every data rank together, as on one process whose
micro-batch is so many times as large. Rows that only fill a batch up count as well. Running statistics are equal on all ranks.
torch's own SyncBatchNorm does the same, but not on the CPU, and is another class that a model would have to be rebuilt with.

With x̂ = (x − μ)/σ over N values of a channel, y = w·x̂ + b and sums over all ranks:

    ∂x = w/σ · (∂y − Σ∂y/N − x̂ · Σ(∂y·x̂)/N)        ∂w, ∂b: this rank's share, as every other gradient
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from unisono.errors import PlanError, Problem
from unisono.parallel.hooks import wrap_forward
from unisono.parallel.timed_collectives import all_reduce
from unisono.plan.plan import Plan

_Norm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


def batch_norms(model: nn.Module) -> list[_Norm]:
    """The modules of ``model`` whose statistics depend on the samples of a micro-batch."""
    return [module for module in model.modules() if isinstance(module, _Norm)]


def check_batch_norm(model: nn.Module, plan: Plan) -> None:
    """Raises PlanError where the ranks of ``plan`` could not meet in the model's batch norms."""
    norms, problems, ranks = batch_norms(model), list[Problem](), plan.mesh.dp_world_size
    if not norms or ranks == 1:
        return
    given = f"{len(norms)} batch norms in {type(model).__name__} on {ranks} data ranks with"
    if plan.batch.global_batch % ranks:
        problems.append(
            Problem(
                given=f"{given} global_batch {plan.batch.global_batch}",
                rule="their statistics are of all ranks, which run the same passes: global_batch is a multiple of the ranks",
                consequence="a rank that is done would keep the others waiting",
                nearest=f"plan.global_batch={max(1, plan.batch.global_batch // ranks) * ranks}, or group norms",
            )
        )
    if plan.backend.compile != "off":
        problems.append(
            Problem(
                given=f"{given} compile {plan.backend.compile!r}",
                rule="sums of statistics between ranks are not traced by the compiler",
                consequence="the graph would break at each of them",
                nearest="compile='off', or group norms",
            )
        )
    if problems:
        raise PlanError(*problems)


def apply_sync_batch_norm(model: nn.Module, group: ProcessGroup) -> None:
    """Let the batch norms of ``model`` normalise over all ranks of ``group`` in training, in place; evaluation stays as it is.

    Modules, names, buffers stay. All ranks run the same number of passes; each may have another number of samples, or none.
    """
    for norm in batch_norms(model):
        _synchronise(norm, group)


def _synchronise(norm: _Norm, group: ProcessGroup) -> None:
    def normalise(forward: Callable[[Tensor], Tensor], input: Tensor) -> Tensor:
        if not norm.training:
            return forward(input)
        result: Any = _Normalise.apply(input, norm.weight, norm.bias, norm.eps, group)
        y, mean, variance, count = result
        if norm.track_running_stats:
            _track(norm, mean, variance * count / (count - 1))
        return y

    wrap_forward(norm, normalise)


@torch.no_grad()
def _track(norm: _Norm, mean: Tensor, variance: Tensor) -> None:
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked += 1
    # without momentum: the mean over all batches so far
    batches = norm.num_batches_tracked.double()
    share = 1 / batches if norm.momentum is None else torch.full_like(batches, norm.momentum)
    for running, new in ((norm.running_mean, mean), (norm.running_var, variance)):
        running.lerp_(new.to(running.dtype), share.to(running))


class _Normalise(torch.autograd.Function):
    """Returns y and, without gradients, the mean [C], the biased variance [C] and the count [] over all ranks."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: ProcessGroup
    ) -> tuple[Tensor, ...]:
        rows = x.to(torch.promote_types(x.dtype, torch.float32)).movedim(1, -1).flatten(0, -2)  # [n, C]
        # Sums of squares lose digits where the mean is large against the deviation: each rank's own are taken around its own
        # mean, and those few numbers are joined in float64.
        count = torch.tensor([rows.shape[0]], dtype=torch.float64, device=x.device)
        local_mean = rows.sum(0) / max(1, rows.shape[0])  # [C]
        local_squares = (rows - local_mean).square().sum(0).double()  # [C]
        local_mean = local_mean.double()
        sums = torch.cat([count, count * local_mean, local_squares + count * local_mean.square()])  # [1 + 2C]
        all_reduce(sums, group)
        count, total, squares = sums.split([1, len(local_mean), len(local_mean)])
        mean = total / count
        variance = (squares / count - mean.square()).clamp(min=0)
        inverse = (variance + eps).rsqrt()
        mean_here, inverse_here = mean.to(rows.dtype), inverse.to(rows.dtype)
        normal = (rows - mean_here) * inverse_here  # [n, C]
        y = normal if weight is None else normal * weight
        y = y if bias is None else y + bias
        ctx.save_for_backward(x, weight, mean_here, inverse_here, count)
        ctx.group = group
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(mean, variance, count)
        return _like(y, x), mean, variance, count

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse, count = ctx.saved_tensors
        gradient = gradients[0]
        assert gradient is not None
        gradient = gradient.to(mean.dtype).movedim(1, -1).flatten(0, -2)  # [n, C]
        normal = (x.to(mean.dtype).movedim(1, -1).flatten(0, -2) - mean) * inverse  # [n, C]
        shift, scale = gradient.sum(0), (gradient * normal).sum(0)  # [C], [C]
        sums = torch.stack([shift, scale]).double()  # [2, C]
        all_reduce(sums, ctx.group)
        means = (sums / count).to(mean.dtype)
        inner = (gradient - means[0] - normal * means[1]) * (inverse if weight is None else inverse * weight)
        wants = ctx.needs_input_grad
        return _like(inner, x), scale if wants[1] else None, shift if wants[2] else None, None, None


def _like(rows: Tensor, x: Tensor) -> Tensor:
    """``rows`` [n, C] in the shape, layout and precision of ``x`` [B, C, …]."""
    moved = rows.view(x.shape[0], *x.shape[2:], x.shape[1]).movedim(-1, 1)
    return torch.empty_like(x).copy_(moved)
