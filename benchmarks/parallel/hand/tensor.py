"""Tensor parallelism by hand: DTensor's own styles, with the vocabulary cut and the loss computed on cut logits.

Norms stay plain tensors: DTensor has no rule for their written-out backward pass, and mixing both in one list of tensors fails,
so that they have optimizer groups of their own. With ``sequence`` what lies between the cut layers is cut along the sequence; the
norms see parts then, and their gradients are summed over the ranks.
"""

from __future__ import annotations

import torch.distributed as dist
import torch.nn.functional as F
from benchmarks.hand import build_gpt
from benchmarks.parallel.hand.common import Batch, Step, adamw, clip_parts, gradients, update
from benchmarks.workload import Workload
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

_NOT_COUNTED = -100


def build(workload: Workload, *, sequence: bool) -> Step:
    """Both of all ranks' layers; needs a head of its own (``model.tied=false``)."""
    model = build_gpt(workload)
    _cut(model, sequence=sequence)
    optimizer = adamw(model, workload.optim)
    clip = workload.optim["clip_norm"]
    cut = [p for p in model.parameters() if isinstance(p, DTensor)]
    whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
    assert model.head is not None
    head = model.head

    def step(batch: Batch, lr: float) -> float:
        weight = batch["weights"].sum()
        # weights of this workload are 0 or 1
        targets = batch["targets"].masked_fill(batch["weights"] == 0, _NOT_COUNTED).flatten()
        hidden = model(batch["tokens"], batch["positions"], batch["documents"]).hidden
        with loss_parallel():
            loss_sum = F.cross_entropy(head(hidden).flatten(0, 1), targets, ignore_index=_NOT_COUNTED, reduction="sum")
            (loss_sum / weight).backward()
        if sequence:
            _sum(gradients(whole))
        clip_parts(gradients(cut), gradients(whole), clip)
        update(optimizer, lr)
        value = loss_sum.detach()
        return float((value.full_tensor() if isinstance(value, DTensor) else value) / weight)

    return step


def _cut(model: nn.Module, *, sequence: bool) -> None:
    between = Shard(1) if sequence else Replicate()
    plan: dict[str, object] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    # one DTensor for all first layers of a pair: else each would sum its gradient of the input by itself
    for pair, columns, row, others in (("attention", ("q", "k", "v"), "out", 3), ("ffn", ("gate", "up"), "down", 0)):
        plan[f"blocks.*.{pair}"] = PrepareModuleInput(
            input_layouts=(between, *[None] * others), desired_input_layouts=(Replicate(), *[None] * others)
        )
        plan |= {f"blocks.*.{pair}.{name}": ColwiseParallel() for name in columns}
        plan[f"blocks.*.{pair}.{row}"] = RowwiseParallel(output_layouts=between)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, plan)  # pyright: ignore[reportArgumentType]


def _sum(tensors: list[Tensor]) -> None:
    flat = _flatten_dense_tensors(tensors)
    dist.all_reduce(flat)
    for tensor, value in zip(tensors, _unflatten_dense_tensors(flat, tensors), strict=True):
        tensor.copy_(value)
