"""Expert parallelism (Lepikhin et al. 2021, GShard): the experts of each layer are distributed over the ranks of ``ep``.

Each rank routes its own tokens. Rows are sent to the rank that holds their expert and return, both by all-to-all; their weights
are not sent. In the backward pass gradients are exchanged in reverse. The gradient of an expert is the sum over the tokens of
all ``ep`` ranks; FSDP2 sums it over the other ranks.

    counts    number of rows from each rank to each expert                  all-to-all of [ep, E/ep] numbers
    send      rows, sorted by expert and so by rank                         all-to-all of uneven parts
    compute   rows of all ranks, sorted by expert again
    return    rows to the ranks they came from                              all-to-all of uneven parts

Along ``tp`` each rank has some of the hidden units of every expert, and all ranks choose the same experts: gradients of the
inputs (tokens and their weights) are summed over the ranks, and so are the outputs. With ``sequence_parallel`` the router sees a
part of the tokens; the experts gather all tokens, and each rank gets its part of the sum.

The host must know the sizes, so it waits for the router once per layer and pass. All ranks of ``ep`` take part in every pass,
even if they send or receive no rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from unisono.errors import PlanError
from unisono.models.moe import Experts, Router, gather_rows
from unisono.models.traced_experts import host_counts
from unisono.parallel.hooks import map_output
from unisono.parallel.mesh import ParallelDims
from unisono.parallel.sharding import ParameterSharder, ShardTable
from unisono.parallel.tensor import collectives
from unisono.parallel.timed_collectives import all_to_all_single
from unisono.plan.plan import Plan


def expert_layers(model: nn.Module) -> Iterator[tuple[str, Experts]]:
    """Names and modules of the stacks of experts in ``model``."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, Experts))


def expert_parameters(model: nn.Module) -> set[str]:
    """Names of the parameters that are stacks of experts, along dim 0."""
    return {f"{path}.{name}" for path, layer in expert_layers(model) for name, _ in layer.named_parameters()}


def apply_expert_parallel(model: nn.Module, dims: ParallelDims, table: ShardTable) -> None:
    """Keep only this rank's experts of every layer, in place, and record them in ``table``."""
    group, rank = dims.group("ep"), dims.rank_along("ep")
    for path, layer in expert_layers(model):
        for name, stack in list(layer.named_parameters()):
            local = stack.detach().chunk(dims.plan.mesh.ep)[rank].clone(memory_format=torch.contiguous_format)
            setattr(layer, name, nn.Parameter(local, requires_grad=stack.requires_grad))
            table.narrow(f"{path}.{name}", "ep", 0, rank * len(local), len(local))
        layer.compute = _exchanged(layer.compute, group)


def shard_expert_hidden(layer: Any, sharder: ParameterSharder, *, sequence_parallel: bool) -> None:
    """Keep only this rank's hidden units of each of the experts in ``layer``, in place."""
    for name, dim in (("gate", 1), ("up", 1), ("down", 2)):
        sharder.shard(layer, name, dim)
    if sequence_parallel:
        arguments: dict[str, Any] = {"dim": -2, "group": sharder.group}  # of tokens in [B, T, D] and [B, T, k]
        into = partial(collectives.gather_from_sp_region, **arguments)
        out = partial(collectives.reduce_scatter_to_sp_region, **arguments)
    else:
        into = partial(collectives.copy_to_tp_region, group=sharder.group)
        out = partial(collectives.reduce_from_tp_region, group=sharder.group)
    layer.register_forward_pre_hook(lambda _layer, args: tuple(into(arg) for arg in args))  # tokens, weights, choice
    map_output(layer, out)


def sum_balance_counts(model: nn.Module, dims: ParallelDims) -> None:
    """If ranks share sequences, let balance losses use the loads of complete sequences."""

    def summed(counts: Tensor) -> Tensor:
        counts = dims.sum(counts, "cp")
        return dims.sum(counts, "tp") if dims.plan.tensor_parallel.sequence_parallel else counts

    for module in model.modules():
        if isinstance(module, Router):
            module.sum_over_sequence = summed


def check_experts(model: nn.Module, plan: Plan) -> None:
    """Raises PlanError if the experts of ``model`` cannot be distributed over the ranks of ``ep``."""
    ep = plan.mesh.ep
    layers = list(expert_layers(model))
    if not layers:
        raise PlanError(
            given=f"plan.ep={ep} for {type(model).__name__}, which has no experts",
            rule="ep spreads the experts of models.moe.Experts over ranks",
            consequence="it would change nothing",
            nearest="plan.ep=1, or model.num_experts",
        )
    for path, layer in layers:
        if layer.num_experts % ep:
            near = max(n for n in range(1, ep + 1) if layer.num_experts % n == 0)
            raise PlanError(
                given=f"plan.ep={ep} for {path} with {layer.num_experts} experts",
                rule="each rank has equally many experts",
                consequence="the layer cannot be sharded",
                nearest=f"plan.ep={near}, or model.num_experts={-(-layer.num_experts // ep) * ep}",
            )


Compute = Callable[[Tensor, Tensor], Tensor]


def _exchanged(compute: Compute, group: ProcessGroup) -> Compute:
    """``Experts.compute`` for rows [M, D] and counts [E] of all experts, which are distributed equally over ``group``."""

    def exchanged(rows: Tensor, counts: Tensor) -> Tensor:
        sent = counts.view(group.size(), -1)  # [ep, E/ep]; rows from this rank to each expert
        received = torch.empty_like(sent)  # [ep, E/ep]; rows from each rank to each expert of this rank
        all_to_all_single(received, sent, group)
        both = host_counts(torch.stack([sent.sum(1), received.sum(1)]).flatten(), 2 * rows.shape[0])
        send, receive = both[: group.size()], both[group.size() :]
        arrived = _AllToAll.apply(rows, send, receive, group)  # [R, D], by rank, then by expert
        experts = torch.arange(received.shape[1], device=rows.device).repeat(group.size())
        order = experts.repeat_interleave(received.flatten(), output_size=sum(receive)).argsort(stable=True)  # [R]
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel(), device=order.device)
        outputs = compute(gather_rows(arrived, order, back), received.sum(0))  # [R, D], by expert, then by rank
        return _AllToAll.apply(gather_rows(outputs, back, order), receive, send, group)  # pyright: ignore[reportReturnType]

    return exchanged


class _AllToAll(torch.autograd.Function):
    """Rows [Σ send, D], in order of receiving ranks → [Σ receive, D], in order of sending ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: ProcessGroup) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return _all_to_all(rows, send, receive, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(gradients[0], ctx.receive, ctx.send, ctx.group), None, None, None


def _all_to_all(rows: Tensor, send: list[int], receive: list[int], group: ProcessGroup) -> Tensor:
    arrived = rows.new_empty(sum(receive), rows.shape[1])
    all_to_all_single(arrived, rows.contiguous(), group, receive, send)
    return arrived
