"""Data parallelism by hand: DDP, and FSDP2 with what each ZeRO stage keeps."""

from __future__ import annotations

import torch
import torch.distributed as dist
from benchmarks.hand import build_adamw, build_gpt, ranks_step
from benchmarks.parallel.hand.common import Batch, Step, rows, update
from benchmarks.workload import Workload
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from unisono.models.loss import cross_entropy_sum


def replicated(workload: Workload) -> Step:
    """DDP."""
    model = build_gpt(workload)
    optimizer = build_adamw(model, workload.optim, fused=True)
    wrapped, clip = DistributedDataParallel(model), workload.optim["clip_norm"]
    return lambda batch, lr: ranks_step(wrapped, optimizer, rows(batch), lr, clip).item()


def sharded(workload: Workload) -> Step:
    """FSDP2 as it is."""
    model, optimizer = cut(workload, zero=3)
    clip = workload.optim["clip_norm"]
    return lambda batch, lr: ranks_step(model, optimizer, rows(batch), lr, clip).item()


def cut(workload: Workload, *, zero: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer with parameters spread over all ranks; below stage 3 they stay gathered."""
    model = build_gpt(workload)
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=zero == 3)
    # the backward pass begins with what is left
    fully_shard(model, reshard_after_forward=False)
    return model, build_adamw(model, workload.optim, fused=True)


def accumulating(
    model: nn.Module, optimizer: torch.optim.Optimizer, clip: float, *, zero: int, micro_batch: int
) -> Step:
    """A step of what ``cut`` made over several micro-batches; stage 1 reduces gradients in the last one only."""
    assert isinstance(model, FSDPModule)

    def step(batch: Batch, lr: float) -> float:
        weight, ranks = batch["weights"].sum(), dist.get_world_size()
        mine, total = rows(batch), torch.zeros(())
        micros = range(0, len(mine["tokens"]), micro_batch)
        for first in micros:
            last = first == micros[-1]
            model.set_requires_gradient_sync(last or zero > 1)
            model.set_reshard_after_backward(last or zero == 3)
            micro = {name: tensor[first : first + micro_batch] for name, tensor in mine.items()}
            loss_sum, _ = cross_entropy_sum(
                model(micro["tokens"], micro["positions"], micro["documents"]), micro["targets"], micro["weights"]
            )
            (loss_sum * (ranks / weight)).backward()
            total += loss_sum.detach()
        dist.all_reduce(total)
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        update(optimizer, lr)
        return float(total / weight)

    return step
