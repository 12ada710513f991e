"""Replaces whole parameters by blocks of them, wherever in the model they are held."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import nn

from unisono.parallel.mesh import ParallelDims
from unisono.parallel.shard_notes import TensorParallelBlock, note_block


def even_sizes(size: int, count: int) -> list[int]:
    """``size`` in ``count`` parts that differ by one at most."""
    return [size // count + (n < size % count) for n in range(count)]


class ParameterSharder:
    """``index`` and ``count``: this rank's place among those that share the layers, in their ``group``."""

    def __init__(self, model: nn.Module, grid: ParallelDims) -> None:
        self.rank, self.num_ranks, self.group = grid.rank_along("tp"), grid.plan.mesh.tp, grid.group("tp")
        self._holders: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                self._holders.setdefault(parameter, []).append((module, name))

    def shard(self, layer: nn.Module, name: str, dim: int, *, parts: int = 0, fused: int = 1) -> None:
        """Keep this rank's block of ``layer``'s parameter ``name``, if it has that, cut along ``dim``.

        ``parts``: as many equal parts as that exist in all, fewer than ranks; ranks next to each other hold the same one.
        ``fused``: that many equal matrices lie side by side, and each is cut.
        """
        whole: nn.Parameter | None = getattr(layer, name, None)
        if whole is None or whole not in self._holders:  # none, or cut under another name
            return
        size = whole.shape[dim]
        copies = self.num_ranks // parts if parts and parts < self.num_ranks else 1
        sizes = even_sizes(size // fused, self.num_ranks // copies)
        place = self.rank // copies
        begin = list(accumulate(sizes, initial=0))[place]
        runs = tuple((n * (size // fused) + begin, sizes[place]) for n in range(fused))
        block = TensorParallelBlock(dim=dim, size=size, runs=runs, replica=self.rank % copies)
        part = torch.cat([whole.detach().narrow(dim, *run) for run in runs], dim)
        kept = nn.Parameter(part.clone(memory_format=torch.contiguous_format), requires_grad=whole.requires_grad)
        for holder, held in self._holders.pop(whole):
            setattr(holder, held, kept)
            note_block(holder, held, block)
