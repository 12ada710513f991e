"""Hierarchical sums: over the workers of each host, across hosts between one worker of each, and back.

With k workers per host, 1/k of the bytes of a flat sum cross the network.
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
    """An id that is equal for workers that share a host and its process table."""
    return str(identity()["host"])


def is_hierarchy_useful(hosts: Sequence[str]) -> bool:
    """Whether there are several hosts and one of them has several workers; ``hosts`` is each rank's."""
    each = Counter(hosts)
    return len(each) > 1 and max(each.values()) > 1


def hierarchical_all_reduce(world: World, hosts: Sequence[str]) -> Callable[[Tensor], HierarchicalWork]:
    """A function that starts the sum of a tensor over all workers, in place. ``hosts`` is each rank's. A collective."""
    nodes = [[rank for rank, host in enumerate(hosts) if host == each] for each in dict.fromkeys(hosts)]
    groups = world.groups({"store host": nodes, "store hosts": [[node[0] for node in nodes]]})
    first = next(node[0] for node in nodes if world.rank in node)
    return lambda tensor: HierarchicalWork(tensor, groups["store host"], first, groups.get("store hosts"))


class HierarchicalWork:
    """Sum within each host, then over the hosts' first workers, then broadcast within each host. ``wait`` does the
    second and third."""

    def __init__(self, tensor: Tensor, node: ProcessGroup, first: int, across: ProcessGroup | None) -> None:
        self._tensor, self._node, self._first, self._across = tensor, node, first, across
        self._inside: Any = dist.reduce(tensor, first, group=node, async_op=True)
        self._waited = False

    def wait(self) -> None:
        """Finish the sum. All workers wait for their sums in the same order."""
        self._inside.wait()
        if self._across is not None:
            dist.all_reduce(self._tensor, group=self._across)
        dist.broadcast(self._tensor, self._first, group=self._node)
        self._waited = True

    def is_completed(self) -> bool:
        """False until ``wait``, which begins the second stage."""
        return self._waited
