"""Sums that go host-wise: over the workers of each host, across hosts between one worker of each, and back.

With k workers on a host, one k-th of the bytes of a flat sum cross the network.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from unisono.dist import World
from unisono.dist.roll_call import identity


def host_id() -> str:
    """The same for workers that share a host and its process table."""
    return str(identity()["host"])


def is_hierarchy_useful(hosts: Sequence[str]) -> bool:
    """Several hosts, one of them with several workers; ``hosts`` is each rank's."""
    each = Counter(hosts)
    return len(each) > 1 and max(each.values()) > 1


def hierarchical_all_reduce(world: World, hosts: Sequence[str]) -> Callable[[Tensor], HierarchicalWork]:
    """Starts the sum of a tensor over all workers, in place; ``hosts`` is each rank's. All workers call it alike."""
    nodes = [[rank for rank, host in enumerate(hosts) if host == each] for each in dict.fromkeys(hosts)]
    groups = world.groups({"store host": nodes, "store hosts": [[node[0] for node in nodes]]})
    first = next(node[0] for node in nodes if world.rank in node)
    return lambda tensor: HierarchicalWork(tensor, groups["store host"], first, groups.get("store hosts"))


class HierarchicalWork:
    """Sum inside each host, then over the hosts' first workers, then back. ``wait`` does the second and third."""

    def __init__(self, tensor: Tensor, node: ProcessGroup, first: int, across: ProcessGroup | None) -> None:
        self._tensor, self._node, self._first, self._across = tensor, node, first, across
        self._inside: Any = dist.reduce(tensor, first, group=node, async_op=True)
        self._waited = False

    def wait(self) -> None:
        """In step with the other workers: all wait for their work in the same order."""
        self._inside.wait()
        if self._across is not None:
            dist.all_reduce(self._tensor, group=self._across)
        dist.broadcast(self._tensor, self._first, group=self._node)
        self._waited = True

    def is_completed(self) -> bool:
        """The second and third part begin in ``wait``."""
        return self._waited
