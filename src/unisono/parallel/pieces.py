"""What one rank holds of a model whose parameters may be spread over ranks.

The optimizer, the moving average and the checkpoint work on this rank's pieces: plain tensors, under the model's names, that
share memory with it. Nothing behind this page needs to know how a parameter is spread, and an update is the same arithmetic as
on one process.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from unisono.optim import global_norm
from unisono.parallel.blocks import blocks
from unisono.parallel.grid import Grid
from unisono.parallel.parts import Part


class Pieces:
    """``parameters``: by first name, the model's own where they are whole, else this rank's piece of them.

    Along ``tp`` a rule cuts a parameter or leaves it whole and equal; along ``shard`` FSDP2 cuts what is there then, by rows.
    """

    def __init__(self, model: nn.Module, grid: Grid) -> None:
        self._grid = grid
        self._live = dict(model.named_parameters())
        self._blocks = {name: block for name, block in blocks(model).items() if name in self._live}
        self.parameters = {name: _piece(parameter) for name, parameter in self._live.items()}
        self._cut = {self.parameters[name]: block for name, block in self._blocks.items()}

    @property
    def spread(self) -> bool:
        """Whether any parameter is not whole."""
        return self._grid.plan.sharded or bool(self._cut)

    @property
    def count(self) -> int:
        """Number of parameters of the whole model."""
        return sum(math.prod(self._whole(name)) for name in self._live)

    def _whole(self, name: str) -> list[int]:
        shape, block = list(self._live[name].shape), self._blocks.get(name)
        if block is not None:
            shape[block.dim] = block.size
        return shape

    def part(self, name: str, tensor: Tensor) -> Part | None:
        """``tensor`` (the parameter ``name`` here, or anything of its shape) as a block of the whole; None where it is whole."""
        live, block, sizes = self._live[name], self._blocks.get(name), self._grid.sizes
        sharded = isinstance(live, DTensor)
        if not (sharded or block) or tensor.shape != self.parameters[name].shape:
            return None
        offset = [0] * live.ndim
        if sharded:
            rows = -(-live.shape[0] // sizes["shard"])
            offset[0] = min(self._grid.index("shard") * rows, live.shape[0])
        replica = 0
        for axis, cuts in (("dp_replicate", False), ("shard", sharded), ("tp", block is not None)):
            replica = replica if cuts else replica * sizes[axis] + self._grid.index(axis)
        if block is None:
            return Part(tensor=tensor, shape=tuple(live.shape), offset=tuple(offset), replica=replica)
        runs = _within(block.runs, offset[block.dim], tensor.shape[block.dim])
        offset[block.dim] = runs[0][0]
        return Part(
            tensor=tensor,
            shape=tuple(self._whole(name)),
            offset=tuple(offset),
            replica=replica + block.replica,
            dim=block.dim,
            runs=runs if len(runs) > 1 else (),
        )

    def norm(self, gradients: Iterable[Tensor]) -> Tensor:
        """The norm of all gradients together, whose pieces here are ``gradients``, in order of the trained parameters."""
        trained = [p for p in self.parameters.values() if p.requires_grad]
        if not self.spread:
            return global_norm(list(gradients))
        pairs = list(zip(trained, gradients, strict=True))
        cut = global_norm([g for p, g in pairs if p in self._cut and not self._cut[p].replica]).square()
        rest = global_norm([g for p, g in pairs if p not in self._cut]).square()
        return self._grid.sum(self._grid.sum(cut, "tp") + rest, "shard").sqrt()

    def sums(self, pieces: Sequence[nn.Parameter], values: Tensor) -> Tensor:
        """``values`` [n], one of each piece, summed over the pieces of the same parameters."""
        if self._cut:
            cut = torch.tensor([piece in self._cut for piece in pieces], device=values.device)
            counted = torch.tensor([piece in self._cut and not self._cut[piece].replica for piece in pieces])
            total = self._grid.sum(torch.where(counted.to(values.device), values, 0), "tp")
            values = torch.where(cut, total, values)
        return self._grid.sum(values, "shard")

    def largest(self, values: Tensor) -> Tensor:
        """The largest of ``values`` [n] over all ranks that hold pieces; NaN where one has it."""
        return self._grid.max(self._grid.max(values, "tp"), "shard")

    def whole_norms(self, pieces: Sequence[nn.Parameter], norms: Tensor) -> Tensor:
        """Norms [n] of whole parameters, or of anything of their shapes, from those of the pieces."""
        return self.sums(pieces, norms.square()).sqrt()

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


def _within(runs: tuple[tuple[int, int], ...], start: int, length: int) -> tuple[tuple[int, int], ...]:
    """What ``runs`` (offset, length), laid one behind the other, are from ``start`` on for ``length``."""
    found: list[tuple[int, int]] = []
    for offset, size in runs:
        begin, end = max(start, 0), min(start + length, size)
        if begin < end:
            found.append((offset + begin, end - begin))
        start -= size
    return tuple(found) or ((runs[-1][0] + runs[-1][1], 0),)
