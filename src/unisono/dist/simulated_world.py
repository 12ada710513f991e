"""One rank of a job whose other ranks do not exist: to see on one device what it computes, and the memory that it takes."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Final, cast

import torch.distributed as dist
from torch.distributed import ProcessGroup

from unisono.dist.jobspec import JobSpec
from unisono.dist.world import World
from unisono.errors import ConfigError

HOST_RANKS: Final = 8  # of a host with accelerators, as they are mostly built


@contextmanager
def simulated_world(rank: int, world_size: int) -> Generator[World]:
    """This process as rank ``rank`` of ``world_size``, of which it is the only one that exists.

    Collectives return at once. What they return has the right shapes, and no meaning. Each rank is taken to say the same as this
    one where ranks tell each other facts. Torch calls such process groups fake. A host has at most ``HOST_RANKS``.

    Raises:
        ConfigError: The process is a rank of a job already.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend; it has no public name

    local_world = min(world_size, HOST_RANKS)
    job = JobSpec(rank=rank, world_size=world_size, local_rank=rank % local_world, local_world=local_world)
    if world_size == 1:
        yield World(job, is_simulated=True)
        return
    if dist.is_initialized():
        raise ConfigError(
            given=f"rank {rank} of {world_size} simulated in a process that is rank {dist.get_rank()} of {dist.get_world_size()}",
            rule="a process has one group of ranks at a time",
            consequence="nothing was simulated",
            nearest="the same before the trainer is entered, or in a process of its own: unisono train --dry-run",
        )
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield World(job, group=cast(ProcessGroup, dist.group.WORLD), is_simulated=True)
    finally:
        dist.destroy_process_group()
