"""The hand-written PyTorch loop everything is held against: what a careful user writes without a framework.

Same model class, same chunked loss, token-weighted, clipped, AdamW with the same decay groups. Nothing is logged, guarded
or saved, and batches are ready in memory. Needs torch and unisono's reference model, nothing else of unisono.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.workload import Workload
from torch import Tensor, nn

from unisono.models.gpt import GPT
from unisono.models.loss import cross_entropy_sum
from unisono.models.options import ModelOptions

Batch = Mapping[str, Tensor]


def build_gpt(workload: Workload) -> GPT:
    """The workload's GPT with its initial weights."""
    model = GPT(ModelOptions(**workload.model))
    model.load_state_dict({name: torch.from_numpy(value) for name, value in workload.weights.items()}, strict=False)
    return model.train()


def torch_batches(workload: Workload) -> list[dict[str, Tensor]]:
    """The workload's batches as tensors."""
    return [{name: torch.from_numpy(array) for name, array in batch.items()} for batch in workload.batches]


def build_adamw(model: nn.Module, optim: Mapping[str, Any], *, fused: bool | None) -> torch.optim.AdamW:
    """AdamW; matrices decay, norms and the embedding do not. ``fused`` None is torch's default."""
    decays = {name: p.dim() > 1 and "embedding" not in name for name, p in model.named_parameters()}
    groups = [
        {"params": [p for n, p in model.named_parameters() if decays[n]], "weight_decay": optim["weight_decay"]},
        {"params": [p for n, p in model.named_parameters() if not decays[n]], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=1e-3, betas=tuple(optim["betas"]), eps=optim["eps"], fused=fused)


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean loss of a batch over its weighted tokens."""
    loss_sum, weight = cross_entropy_sum(
        model(batch["tokens"], batch["positions"], batch["documents"]), batch["targets"], batch["weights"]
    )
    return loss_sum / weight


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """One learning rate for all groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def hand_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, lr: float, clip_norm: float) -> Tensor:
    """One update; returns the loss, still a tensor."""
    optimizer.zero_grad(set_to_none=True)
    loss = mean_loss(model, batch)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    set_lr(optimizer, lr)
    optimizer.step()
    return loss.detach()


def ranks_step(model: nn.Module, optimizer: torch.optim.Optimizer, part: Batch, lr: float, clip_norm: float) -> Tensor:
    """One update of DDP or FSDP2 with this rank's part of the batch; returns the mean loss over all of it.

    Both average gradients over ranks, so a rank's sum is scaled to undo that.
    """
    optimizer.zero_grad(set_to_none=True)
    loss_sum, weight = cross_entropy_sum(
        model(part["tokens"], part["positions"], part.get("documents")), part["targets"], part["weights"]
    )
    totals = torch.stack([loss_sum.detach(), weight])
    dist.all_reduce(totals)
    (loss_sum * (dist.get_world_size() / totals[1])).backward()
    nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    set_lr(optimizer, lr)
    optimizer.step()
    return totals[0] / totals[1]
