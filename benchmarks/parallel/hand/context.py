"""Context parallelism by hand: keys and values gathered from all ranks by torch's functional collectives, state cut by FSDP2.

A sequence is cut in twice as many runs as there are ranks; rank i has runs i and 2N-1-i, which makes causal attention equally
long on all. A run attends to the keys up to its own end.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from benchmarks.hand import ranks_step
from benchmarks.parallel.hand.common import Batch, Step
from benchmarks.parallel.hand.data import cut
from benchmarks.workload import Workload
from torch import Tensor

from unisono.models.gpt import rotate


def build(workload: Workload) -> Step:
    """All ranks share each sequence."""
    model, optimizer = cut(workload, zero=3)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    runs = (rank, 2 * ranks - 1 - rank)
    masks: list[Tensor] = []
    for block in model.blocks:  # pyright: ignore[reportGeneralTypeIssues]
        _gather_keys(block.attention, runs, masks)

    def step(batch: Batch, lr: float) -> float:
        pieces = {name: tensor.chunk(2 * ranks, dim=1) for name, tensor in batch.items()}
        mine = {name: torch.cat([parts[run] for run in runs], dim=1) for name, parts in pieces.items()}
        masks[:] = [_visible(batch["documents"], run, 2 * ranks) for run in runs]
        del mine["documents"]  # they are in the masks
        return ranks_step(model, optimizer, mine, lr, workload.optim["clip_norm"]).item()

    return step


def _visible(documents: Tensor, run: int, count: int) -> Tensor:
    """[B, 1, queries of the run, keys up to its end]: causal, inside a document."""
    length = documents.shape[1] // count
    keys = documents[:, : (run + 1) * length]
    same = keys[:, -length:, None] == keys[:, None, :]
    return same.tril(run * length)[:, None]


def _gather_keys(attention: Any, runs: tuple[int, int], masks: list[Tensor]) -> None:
    group, ranks = dist.group.WORLD, dist.get_world_size()
    # runs as the ranks hold them, and where each of them is among those
    held = [run for rank in range(ranks) for run in (rank, 2 * ranks - 1 - rank)]
    order = [held.index(run) for run in range(2 * ranks)]

    def forward(x: Tensor, cos: Tensor, sin: Tensor, _mask: None) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, attention.width)).transpose(1, 2)
            for layer in (attention.q, attention.k, attention.v)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mine = torch.stack([k, v]).unflatten(3, (2, -1)).movedim(3, 0)  # [2 runs, k and v, B, K, T/2N, E]
        gathered = funcol.all_gather_tensor_autograd(mine.contiguous(), 0, group)
        keys, values = torch.cat([gathered[place] for place in order], dim=3)  # [B, K, T, E] each
        keys, values = (each.repeat_interleave(attention.heads // attention.kv_heads, dim=1) for each in (keys, values))
        mixed = [
            F.scaled_dot_product_attention(
                queries, keys[:, :, : mask.shape[-1]], values[:, :, : mask.shape[-1]], attn_mask=mask
            )
            for queries, mask in zip(q.chunk(2, dim=2), masks, strict=True)
        ]
        return attention.out(torch.cat(mixed, dim=2).transpose(1, 2).flatten(2))

    attention.forward = forward
