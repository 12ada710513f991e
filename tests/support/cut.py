"""One forward and backward pass of a model cut by the rules of its plan, beside the same model whole, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from plan_edit import changed
from torch import Tensor, nn

from unisono.dist import World
from unisono.parallel.mesh import ParallelDims
from unisono.parallel.sharding import ShardedParameters
from unisono.parallel.transforms import parallelize
from unisono.plan.options import PlanOptions
from unisono.plan.resolve import derive_plan
from unisono.plan.rules import Rule

Loss = Callable[[nn.Module], Tensor]
Boxes = list[tuple[tuple[int, ...], np.ndarray]]


def difference(
    world: World, model: nn.Module, loss: Loss, rules: tuple[Rule, ...] = (), **options: Any
) -> dict[str, Any]:
    """``loss``: relative difference of the losses; ``gradients``: by name, this rank's (offset, tensor) that are not replicas;
    ``whole``: by name, the gradients of the whole model (rank 0 only); ``held``: elements here of all."""
    expected = loss(model)
    expected.backward()
    whole = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    ranks = world.world_size
    plan = derive_plan(
        PlanOptions(device="cpu", global_batch=ranks, **{"tp": ranks, **options}),
        world_size=ranks,
        device="cpu",
        native_bf16=False,
    )
    plan = changed(plan, rules=rules)
    dims = ParallelDims(plan, world)
    parallel = parallelize(plan, model, dims)
    model, table = parallel.model, parallel.table
    pieces = ShardedParameters(model, dims, table)
    found = loss(model)
    found.backward()
    pieces.collect_grads()
    pieces.sum_partial_grads(table.partial_grad_groups)
    for piece in pieces.parameters.values():
        piece.grad /= plan.mesh.dp_world_size  # they all computed the same samples
    gradients: dict[str, Boxes] = {}
    for name, piece in pieces.parameters.items():
        part = pieces.shard_of(name, piece.grad)
        if part is None:
            gradients[name] = [((0,) * piece.dim(), piece.grad.numpy())]
        elif not part.replica_id:
            gradients[name] = [(offset, piece.grad[index].numpy()) for index, offset in part.blocks()]
    trained = [p.grad for p in pieces.parameters.values()]
    return {
        "loss": abs(found.item() / expected.item() - 1),
        "norm": pieces.global_norm(trained).item() / torch.stack([g.norm() for g in whole.values()]).norm().item() - 1,
        "gradients": gradients,
        "whole": {name: each.numpy() for name, each in whole.items()} if world.rank == 0 else {},
        "held": sum(p.numel() for p in pieces.parameters.values()) / pieces.num_parameters,
    }


def compare(outcomes: list[dict[str, Any]], relative: float = 1e-5) -> None:
    """Losses, norms and every gradient, put together from the ranks' blocks, are those of the whole model."""
    for name, expected in outcomes[0]["whole"].items():
        found = np.full_like(expected, np.nan)
        for outcome in outcomes:
            for offset, tensor in outcome["gradients"].get(name, []):
                found[tuple(slice(at, at + n) for at, n in zip(offset, tensor.shape, strict=True))] = tensor
        error = np.linalg.norm(found - expected) / (np.linalg.norm(expected) + 1e-30)
        assert error < relative or np.linalg.norm(expected) < 1e-12, f"{name}: {error:.1e}"
    for outcome in outcomes:
        assert outcome["loss"] < relative
        assert abs(outcome["norm"]) < relative
        for name in outcomes[0]["gradients"].keys() & outcome["gradients"].keys():
            mine, theirs = outcome["gradients"][name], outcomes[0]["gradients"][name]
            if len(mine) == 1 and mine[0][0] == theirs[0][0]:  # whole on both, so bitwise alike
                assert np.array_equal(mine[0][1], theirs[0][1]), name
