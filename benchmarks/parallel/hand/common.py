"""What the hand-written sides of the axes share: a part of a batch, optimizer groups, a norm of parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.hand import set_lr
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Batch = Mapping[str, Tensor]
# one update from a global batch (the same on all ranks) and a learning rate; the loss of the whole batch
Step = Callable[[Batch, float], float]


def rows(batch: Batch) -> dict[str, Tensor]:
    """This rank's samples."""
    return {name: tensor.chunk(dist.get_world_size())[dist.get_rank()] for name, tensor in batch.items()}


def adamw(model: nn.Module, optim: Mapping[str, Any]) -> torch.optim.AdamW:
    """As ``benchmarks.hand.build_adamw``, with DTensors and plain tensors in groups of their own: one call takes one kind."""
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        decays = parameter.dim() > 1 and "embedding" not in name
        groups.setdefault((decays, isinstance(parameter, DTensor)), []).append(parameter)
    return torch.optim.AdamW(
        [{"params": group, "weight_decay": optim["weight_decay"] * decays} for (decays, _), group in groups.items()],
        betas=tuple(optim["betas"]),
        eps=optim["eps"],
        fused=True,
    )


def gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """This rank's parts of those there are."""
    found: list[Tensor] = []
    for parameter in parameters:
        if isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor):
            # an embedding's is whole on every rank
            parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
            found.append(parameter.grad.to_local())
        elif parameter.grad is not None:
            found.append(parameter.grad)
    return found


def clip_parts(parts: list[Tensor], whole: list[Tensor], clip: float) -> None:
    """Clip, in place, gradients of which every rank has other ``parts``, and those that are ``whole`` on each."""
    square = nn.utils.get_total_norm(parts).square()
    dist.all_reduce(square)
    norm = (square + nn.utils.get_total_norm(whole).square()).sqrt() if whole else square.sqrt()
    torch._foreach_mul_([*parts, *whole], (clip / (norm + 1e-6)).clamp(max=1.0))


def update(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """One step; gradients go."""
    set_lr(optimizer, lr)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
