"""Pipeline parallelism by hand: ``torch.distributed.pipelining`` with stages cut out of the model."""

from __future__ import annotations

import torch
import torch.distributed as dist
from benchmarks.hand import build_adamw, build_gpt
from benchmarks.parallel.hand.common import Batch, Step, clip_parts, gradients, update
from benchmarks.workload import Workload
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from unisono.models.gpt import GPT, LOSS_CHUNK, rotary_angles
from unisono.models.loss import LazyLogits, cross_entropy_sum

MICRO_BATCH = 2


class Part(nn.Module):
    """Blocks ``first`` to ``last`` of the model; the first part embeds, the last one norms."""

    def __init__(self, model: GPT, first: int, last: int) -> None:
        super().__init__()
        self.embedding = model.embedding if first == 0 else None
        self.blocks = model.blocks[first:last]
        self.norm, self.head = (model.norm, model.head) if last == len(model.blocks) else (None, None)
        self.options = model.options

    def forward(self, x: Tensor, positions: Tensor, documents: Tensor) -> Tensor:
        cos, sin = rotary_angles(positions, self.options.dim // self.options.num_heads, self.options.rope_theta)
        mask = (documents[:, :, None] == documents[:, None, :]).tril()[:, None]
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = block(x, cos[:, None], sin[:, None], mask)
        return x if self.norm is None else self.norm(x)


def build(workload: Workload, *, parts_per_rank: int) -> Step:
    """1F1B, or its interleaved form where a rank has several parts; needs a head of its own (``model.tied=false``)."""
    model, ranks, rank = build_gpt(workload), dist.get_world_size(), dist.get_rank()
    count = ranks * parts_per_rank
    size, rest = divmod(len(model.blocks), count)
    assert rest == 0, "parts of unequal length"
    parts = {index: Part(model, index * size, (index + 1) * size) for index in range(rank, count, ranks)}
    mine = nn.ModuleDict({str(index): part for index, part in parts.items()})
    optimizer = build_adamw(mine, workload.optim, fused=True)
    micros = len(workload.batches[0]["tokens"]) // MICRO_BATCH
    stages = [PipelineStage(part, index, count, torch.device("cpu")) for index, part in parts.items()]
    weight = torch.ones(())

    def loss(hidden: Tensor, target: Tensor) -> Tensor:
        targets, weights = target.unbind(-1)
        head = parts[count - 1].head
        assert head is not None
        loss_sum, _ = cross_entropy_sum(LazyLogits(hidden, head.weight, LOSS_CHUNK), targets.long(), weights)
        return loss_sum / weight

    schedule = (
        Schedule1F1B(stages[0], micros, loss_fn=loss, scale_grads=False)
        if parts_per_rank == 1
        else ScheduleInterleaved1F1B(list(stages), micros, loss_fn=loss, scale_grads=False)
    )

    def step(batch: Batch, lr: float) -> float:
        weight.copy_(batch["weights"].sum())
        # one tensor is all that a schedule takes as target; both fit into a double
        target = torch.stack([batch["targets"].double(), batch["weights"].double()], dim=-1)
        given = {"positions": batch["positions"], "documents": batch["documents"]}
        losses: list[Tensor] = []
        schedule.step(
            *([batch["tokens"]] if rank == 0 else []),
            target=target if rank == ranks - 1 else None,
            losses=losses,
            **given,
        )
        total = torch.stack(losses).sum().detach() if rank == ranks - 1 else torch.zeros(())
        dist.all_reduce(total)
        clip_parts(gradients(mine.parameters()), [], workload.optim["clip_norm"])
        update(optimizer, lr)
        return float(total)

    return step
