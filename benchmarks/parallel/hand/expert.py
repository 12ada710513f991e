"""Expert parallelism by hand: tokens travel by ``all_to_all_single_autograd`` to the rank that has their expert, and back.

Mixture layers stand in place of the feed-forward layers: scores in float32, the best few experts of a token, weights that sum to
1 over them (Mixtral, Jiang et al. 2024). No token is dropped and nothing balances. All else is cut by FSDP2.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from benchmarks.hand import build_gpt
from benchmarks.parallel.hand.common import Batch, Step, adamw, clip_parts, gradients, rows, update
from benchmarks.workload import Workload
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from unisono.models.gpt import GPT
from unisono.models.loss import cross_entropy_sum


class Mixture(nn.Module):
    """The experts ``rank`` has of all ``experts``, and a router that knows all; weights by name from the workload."""

    def __init__(self, weights: dict[str, Tensor], chosen: int, rank: int, ranks: int) -> None:
        super().__init__()
        self.router = nn.Parameter(weights["router"].clone())  # [experts, D]
        self.gate, self.up, self.down = (
            nn.Parameter(weights[name].chunk(ranks)[rank].clone()) for name in ("gate", "up", "down")
        )  # [experts here, F, D], the same, [experts here, D, F]
        self.chosen, self.ranks = chosen, ranks

    @property
    def experts(self) -> list[nn.Parameter]:
        return [self.gate, self.up, self.down]

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)  # [N, D]
        scores, experts = F.linear(tokens.float(), self.router).softmax(-1).topk(self.chosen)  # [N, chosen]
        scores = scores / scores.sum(-1, keepdim=True)
        order = experts.flatten().argsort(stable=True)
        source = order // self.chosen
        counts = experts.flatten().bincount(minlength=len(self.router))  # [experts]
        sent = tokens[source]
        if self.ranks > 1:
            theirs = torch.empty_like(counts)
            dist.all_to_all_single(theirs, counts)
            theirs = theirs.view(self.ranks, -1)  # [from rank, experts here]
            out, into = counts.view(self.ranks, -1).sum(1).tolist(), theirs.sum(1).tolist()
            group: Any = dist.group.WORLD
            arrived = funcol.all_to_all_single_autograd(sent, into, out, group)
            # by expert, within it by rank
            kinds = torch.arange(theirs.shape[1]).repeat(self.ranks).repeat_interleave(theirs.flatten())
            by_expert = kinds.argsort(stable=True)
            done = self._compute(arrived[by_expert], theirs.sum(0).tolist())
            back = torch.empty_like(done).index_copy(0, by_expert, done)
            sent = funcol.all_to_all_single_autograd(back, out, into, group)
        else:
            sent = self._compute(sent, counts.tolist())
        weighted = sent * scores.flatten()[order, None].to(sent.dtype)
        return torch.zeros_like(tokens).index_add(0, source, weighted).view_as(x)

    def _compute(self, tokens: Tensor, counts: list[int]) -> Tensor:
        parts = zip(tokens.split(counts), self.gate, self.up, self.down, strict=True)
        return torch.cat([F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down) for x, gate, up, down in parts])


def mixture_weights(workload: Workload, layer: int) -> dict[str, Tensor]:
    """Router, gate, up and down of a layer."""
    prefix = f"blocks.{layer}.ffn."
    names = {"router": "router.weight", "gate": "experts.gate", "up": "experts.up", "down": "experts.down"}
    return {mine: torch.from_numpy(workload.weights[prefix + theirs]) for mine, theirs in names.items()}


def mixture_gpt(workload: Workload, rank: int, ranks: int) -> GPT:
    """The GPT with mixture layers, of whose experts ``rank`` has its part."""
    model = build_gpt(workload)
    for layer, block in enumerate(model.blocks):
        weights, chosen = mixture_weights(workload, layer), workload.model["num_experts_per_token"]
        block.ffn = Mixture(weights, chosen, rank, ranks)  # pyright: ignore[reportAttributeAccessIssue]
    return model


def build(workload: Workload) -> Step:
    """Each rank has a part of every layer's experts."""
    model = mixture_gpt(workload, dist.get_rank(), dist.get_world_size())
    mixtures = [module for module in model.modules() if isinstance(module, Mixture)]
    experts = {parameter for mixture in mixtures for parameter in mixture.experts}
    for block in model.blocks:
        fully_shard(block, ignored_params=experts)
    fully_shard(model, reshard_after_forward=False, ignored_params=experts)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # sums over ranks, as experts' gradients are
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    optimizer = adamw(model, workload.optim)

    def step(batch: Batch, lr: float) -> float:
        micro = rows(batch)
        loss_sum, weight = cross_entropy_sum(
            model(micro["tokens"], micro["positions"], micro["documents"]), micro["targets"], micro["weights"]
        )
        totals = torch.stack([loss_sum.detach(), weight])
        dist.all_reduce(totals)
        (loss_sum / totals[1]).backward()
        clip_parts(gradients(model.parameters()), [], workload.optim["clip_norm"])
        update(optimizer, lr)
        return float(totals[0] / totals[1])

    return step
