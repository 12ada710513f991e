"""The store's contract and its two kinds so far: ``local`` (one process) and ``dist_sync`` (all-reduce).

Keys are the model's parameter names. The table of names, shapes and dtypes is compared over all ranks when a store starts, so two
ranks with different models never add one tensor to another. Gradients are summed, never averaged: the trainer divides by the
global number of tokens, which is reduced beside them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from unisono.dist import World, agree
from unisono.kvstore.dist_sync import BucketedAllReduce
from unisono.kvstore.local import LocalGradients
from unisono.plan.plan import BUCKET_BYTES


class GradientSync(Protocol):
    """Sums the gradients of a step's micro-batches over all workers."""

    def arm(self, part: Sequence[nn.Module] | None = None) -> None:
        """The next backward pass is the step's last, or the last of a ``part`` of the model: each gradient may leave as soon as
        it is complete."""
        ...

    def finish(self, totals: Tensor) -> None:
        """Return when all gradients, and ``totals`` [k], hold the sum over workers. Raises CommError when a peer is gone."""
        ...

    def gradients(self) -> list[Tensor]:
        """The reduced gradients in parameter order; a parameter no sample used has zeros."""
        ...

    def reset(self) -> None:
        """Forget the gradients before the next step."""
        ...

    def close(self) -> None:
        """Take the hooks off the parameters."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class KVStore:
    """A store bound to the workers of ``world``."""

    kind: Literal["local", "dist_sync"]
    world: World

    @property
    def rank(self) -> int:
        """This worker's number."""
        return self.world.rank

    @property
    def num_workers(self) -> int:
        """How many workers share the store."""
        return self.world.world

    def init(self, values: Mapping[str, Tensor]) -> None:
        """Agree on names, shapes and dtypes, then give every worker rank 0's values, in place.

        Raises CommError naming the rank whose table differs, and where.
        """
        if len(set(self.world.gather_json(table_hash(values)))) > 1:  # the tables themselves may be long
            agree(self.world, "parameter table", _table(values))
        for name in sorted(values):
            self.world.broadcast(values[name].detach())

    def gradients(
        self,
        parameters: Mapping[str, nn.Parameter],
        group: ProcessGroup | None = None,
        travels: Mapping[str, torch.dtype] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> GradientSync:
        """The gradient synchronisation for these parameters (those that require gradients), over ``group`` or all workers.

        ``travels``: in what dtype gradients are sent and added where it is not their own, by name. ``bucket_bytes`` of
        gradients are sent together.
        """
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        if self.kind == "local":
            return LocalGradients(trained)
        return BucketedAllReduce(trained, self.world, bucket_bytes, group=group, travels=travels)


def table_hash(values: Mapping[str, Tensor]) -> str:
    """Sixteen hex digits over every name, shape and dtype."""
    return hashlib.sha256(json.dumps(_table(values), sort_keys=True).encode()).hexdigest()[:16]


def _table(values: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: f"{list(value.shape)} {value.dtype}" for name, value in values.items()}


def create(kind: Literal["local", "dist_sync"], world: World) -> KVStore:
    """A store of this kind over these workers."""
    return KVStore(kind=kind, world=world)
