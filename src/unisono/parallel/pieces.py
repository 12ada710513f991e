"""What one rank holds of a model whose parameters may be spread over ranks.

The optimizer, the moving average and the checkpoint work on this rank's pieces: plain tensors, under the model's names, that
share memory with it. Nothing behind this page needs to know DTensor, and an update is the same arithmetic as on one process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from unisono.dist import World
from unisono.parallel.parts import Part


class Pieces:
    """``parameters``: by first name, the model's own where they are whole, else this rank's piece of them."""

    def __init__(self, model: nn.Module, world: World) -> None:
        self._world = world
        self._whole = dict(model.named_parameters())
        self.parameters = {name: _piece(parameter) for name, parameter in self._whole.items()}
        spread = [p for p in self._whole.values() if isinstance(p, DTensor)]
        # one mesh for all so far; its last axis is the one that parameters are cut along
        self._mesh = spread[0].device_mesh if spread else None

    @property
    def spread(self) -> bool:
        """Whether any parameter is not whole."""
        return self._mesh is not None

    def part(self, name: str, tensor: Tensor) -> Part | None:
        """``tensor`` (the parameter ``name`` here, or anything of its shape) as a block of the whole; None where it is whole."""
        whole = self._whole[name]
        if not isinstance(whole, DTensor) or tensor.shape != self.parameters[name].shape:
            return None
        mesh = whole.device_mesh
        offset = [0] * whole.ndim
        replica = 0
        for axis, placement in enumerate(whole.placements):
            index, count = mesh.get_local_rank(axis), mesh.size(axis)
            if isinstance(placement, Shard):
                extent = whole.shape[placement.dim]
                offset[placement.dim] = min(index * -(-extent // count), extent)
            else:
                replica = replica * count + index
        return Part(tensor=tensor, shape=tuple(whole.shape), offset=tuple(offset), replica=replica)

    def sum(self, values: Tensor) -> Tensor:
        """``values`` summed, in place, over the ranks that together hold one copy of the model."""
        if self._mesh is not None:
            with self._world.guard("sum over pieces", values.nbytes):
                dist.all_reduce(values, group=self._mesh.get_group(self._mesh.ndim - 1))
        return values

    def max(self, values: Tensor) -> Tensor:
        """The largest, as ``sum``; NaN where a rank has one."""
        if self._mesh is not None:
            with self._world.guard("maximum over pieces", values.nbytes):
                # gloo's maximum may lose a NaN
                missing = self.sum(values.isnan().to(values.dtype))
                dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._mesh.get_group(self._mesh.ndim - 1))
            values = torch.where(missing > 0, torch.nan, values)
        return values

    def norm(self, local: Tensor) -> Tensor:
        """The norm of tensors whose pieces here have the norms ``local``, of any shape."""
        return local if self._mesh is None else self.sum(local.square()).sqrt()

    def take_gradients(self) -> None:
        """Give each piece its gradient: that of its parameter, zeros where no sample used it."""
        for name, piece in self.parameters.items():
            if not piece.requires_grad:
                continue
            gradient = self._whole[name].grad
            if isinstance(gradient, DTensor):
                gradient = gradient.to_local()
            piece.grad = torch.zeros_like(piece) if gradient is None else gradient

    def drop_gradients(self) -> None:
        """Forget all gradients."""
        for parameters in (self._whole, self.parameters):
            for parameter in cast("Mapping[str, nn.Parameter]", parameters).values():
                parameter.grad = None


def _piece(parameter: nn.Parameter) -> nn.Parameter:
    if not isinstance(parameter, DTensor):
        return parameter
    return nn.Parameter(parameter.to_local().detach(), requires_grad=parameter.requires_grad)
