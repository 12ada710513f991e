"""What one rank holds of a model whose parameters may be spread over ranks.

The optimizer, the moving average and the checkpoint work on this rank's pieces: plain tensors, under the model's names, that
share memory with it. Nothing behind this page needs to know how a parameter is spread, and an update is the same arithmetic as
on one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from unisono.optim import global_norm
from unisono.parallel.expert import expert_dims
from unisono.parallel.grid import Grid
from unisono.parallel.parts import Part
from unisono.parallel.tensor import cut_dims
from unisono.parallel.whole import Whole


class Pieces:
    """``parameters``: by first name, the model's own where they are whole, else this rank's piece of them.

    Along ``tp`` a rule cuts a parameter or leaves it whole and equal; ``ep`` cuts the experts; FSDP2 then cuts all of them over
    the other ranks that share a copy of the state, mostly by rows.
    """

    def __init__(self, model: nn.Module, grid: Grid, whole: Whole) -> None:
        self._grid, self._whole = grid, whole
        # a stage may have only a later name of a parameter that is used twice
        self._live = {whole.first_names[name]: parameter for name, parameter in model.named_parameters()}
        self._dims = cut_dims(model) if grid.plan.tp > 1 else {}
        self._experts = expert_dims(model) if grid.plan.ep > 1 else {}
        self.parameters = {name: _piece(parameter) for name, parameter in self._live.items()}
        self._cut = {self.parameters[name] for name in self._dims}

    @property
    def spread(self) -> bool:
        """Whether any parameter is not whole."""
        return self._grid.plan.sharded or bool(self._cut)

    @property
    def count(self) -> int:
        """Number of parameters of the whole model."""
        return self._whole.count

    def part(self, name: str, tensor: Tensor) -> Part | None:
        """``tensor`` (the parameter ``name`` here, or anything of its shape) as a block of the whole; None where it is whole."""
        live, dim, sizes = self._live[name], self._dims.get(name), self._grid.sizes
        sharded = isinstance(live, DTensor)
        if not (sharded or dim is not None) or tensor.shape != self.parameters[name].shape:
            return None
        shape, offset = list(live.shape), [0] * live.ndim
        experts = self._experts.get(name)
        if sharded:
            line, (*_, placed) = "shard" if experts is None else "experts", live.placements
            along = placed.dim if isinstance(placed, Shard) else 0
            size = -(-shape[along] // sizes[line])
            offset[along] = min(self._grid.index(line) * size, shape[along])
        for axis, cut in (("ep", experts), ("tp", dim)):
            if cut is not None:
                offset[cut] += self._grid.index(axis) * shape[cut]
                shape[cut] *= sizes[axis]
        replica = 0
        for axis, cuts in (("dp_replicate", False), ("shard", sharded), ("tp", dim is not None)):
            replica = replica if cuts else replica * sizes[axis] + self._grid.index(axis)
        return Part(tensor=tensor, shape=tuple(shape), offset=tuple(offset), replica=replica)

    def norm(self, gradients: Iterable[Tensor]) -> Tensor:
        """The norm of all gradients together, whose pieces here are ``gradients``, in order of the trained parameters."""
        trained = [p for p in self.parameters.values() if p.requires_grad]
        if not self.spread:
            return global_norm(list(gradients))
        pairs = list(zip(trained, gradients, strict=True))
        cut = global_norm([g for p, g in pairs if p in self._cut]).square()
        rest = global_norm([g for p, g in pairs if p not in self._cut]).square()
        return self._grid.sum(self._grid.sum(cut, "tp") + rest, "shard").sqrt()

    def sums(self, pieces: Sequence[nn.Parameter], values: Tensor) -> Tensor:
        """``values`` [n], one of each piece, summed over the pieces of the same parameters."""
        if self._cut:
            mine = torch.tensor([piece in self._cut for piece in pieces], device=values.device)
            values = torch.where(mine, self._grid.sum(torch.where(mine, values, 0), "tp"), values)
        return self._grid.sum(values, "shard")

    def largest(self, values: Tensor) -> Tensor:
        """The largest of ``values`` [n] over all ranks that hold pieces; NaN where one has it."""
        return self._grid.max(self._grid.max(values, "tp"), "shard")

    def whole_norms(self, pieces: Sequence[nn.Parameter], norms: Tensor) -> Tensor:
        """Norms [n] of whole parameters, or of anything of their shapes, from those of the pieces."""
        return self.sums(pieces, norms.square()).sqrt()

    def of_all_stages(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """``values`` by parameter name, with those of the other stages of a pipeline, in the model's order."""
        if self._grid.plan.pp == 1:
            return dict(values)
        found = {name: value for each in self._grid.world.gather_json(values) for name, value in each.items()}
        return {name: found[name] for name in self._whole.entries if name in found}

    def take_gradients(self) -> None:
        """Give each piece its gradient: that of its parameter, zeros where no sample used it."""
        for name, piece in self.parameters.items():
            if not piece.requires_grad:
                continue
            gradient = self._live[name].grad
            if isinstance(gradient, DTensor):
                gradient = gradient.to_local()
            piece.grad = torch.zeros_like(piece) if gradient is None else gradient

    def drop_gradients(self) -> None:
        """Forget all gradients."""
        for parameter in (*self._live.values(), *self.parameters.values()):
            parameter.grad = None


def _piece(parameter: nn.Parameter) -> nn.Parameter:
    if not isinstance(parameter, DTensor):
        return parameter
    return nn.Parameter(parameter.to_local().detach(), requires_grad=parameter.requires_grad)
