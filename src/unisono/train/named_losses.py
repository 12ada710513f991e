"""Several losses by name: their sum is trained, and each is added up over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from unisono.dist import World
from unisono.errors import DataError


def check_losses(losses: Tensor | Mapping[str, Tensor]) -> None:
    """Raises DataError for named losses that are no 0-dim tensors."""
    if not isinstance(losses, Mapping):
        return
    wrong = "" if losses else "returned no loss"
    for name, loss in cast("Mapping[str, Any]", losses).items():
        if not isinstance(loss, Tensor):
            wrong = f"whose loss {name!r} is a {type(loss).__name__}"
        elif loss.dim():
            wrong = f"whose loss {name!r} is a tensor {list(loss.shape)}"
    if wrong:
        raise DataError(
            given=f"an objective {'that ' if not losses else ''}{wrong}",
            rule="named losses are a mapping of names to 0-dim tensors, and their sum is trained",
            consequence="there is nothing to train on",
            nearest='return {"loss": losses.sum()}, weights.sum()',
        )


def sum_losses(losses: Tensor | Mapping[str, Tensor]) -> Tensor:
    """The loss that is trained: itself, or the sum of named losses. Raises DataError for losses that are no 0-dim tensors."""
    check_losses(losses)
    return torch.stack(list(losses.values())).sum() if isinstance(losses, Mapping) else losses


class NamedLosses:
    """The sums of the named losses of a step, over micro-batches and the ranks of ``world``.

    Attributes:
        names: Names of the losses, the same on all ranks; None before the first step of this process is complete.
    """

    def __init__(self, world: World, *, sums_ranks: bool) -> None:
        self.names: tuple[str, ...] | None = None
        self._world, self._sums_ranks = world, sums_ranks
        self._sums: dict[str, Tensor] = {}

    def add(self, losses: Tensor | Mapping[str, Tensor]) -> Tensor:
        """Add the losses of a micro-batch; returns the loss that is trained. Raises DataError."""
        if isinstance(losses, Mapping):
            check_losses(losses)
            for name, loss in losses.items():
                if self.names is not None and name not in self.names:
                    raise DataError(
                        given=f"a loss {name!r}, which was absent in the first step (it had {', '.join(self.names) or 'none'})",
                        rule="the first step of a process has all losses; one may be absent later, and then counts as 0",
                        consequence="it would not be reported",
                        nearest="a zero under that name where there is none",
                    )
                self._sums[name] = self._sums.get(name, 0) + loss.detach()
        return sum_losses(losses)

    def take(self, like: Tensor) -> Tensor:
        """The sums [names] of the step that ends, in the dtype of ``like``. A collective where there are names."""
        if self.names is None:  # a rank of another pipeline stage computes no loss
            own = list(self._sums)
            found = self._world.all_gather_json(own) if self._sums_ranks else [own]
            self.names = tuple(dict.fromkeys(name for names in found for name in names))
        sums, self._sums = self._sums, {}
        total = torch.zeros(len(self.names), dtype=like.dtype, device=like.device)
        for place, name in enumerate(self.names):
            if name in sums:
                total[place] = sums[name]
        return self._world.all_reduce(total) if self.names and self._sums_ranks else total
