"""Sums over the workers of one host through memory they share: no sockets, no kernel between them.

The memory has a slot for each worker and one for the sum. A tensor goes through it in pieces of a slot: each worker copies its
piece in, adds its share of the elements over all slots in the order of ranks, and copies the sum out. One worker adds each
element, so all get the same bits, in every run. It is an anonymous file of rank 0, which the others open through /proc: it never
has a name, does not count against the size of /dev/shm, and nothing is left of it after a kill.

Workers wait for each other by counters in the memory, each written by one worker only: a short spin that yields the core, then
sleeps. A worker that is gone ends the others' wait with a CommError that names it, and so does the World's time-out.
"""

from __future__ import annotations

import mmap
import os
import platform
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.dist import World
from unisono.dist.roll_call import identity, missing_ranks
from unisono.errors import CommError, ConfigError

SLOT_BYTES = 4 * 2**20
_LINE = 64  # a cache line for what one worker tells: its turn, and the last two numbers it came with
_COUNTERS = _LINE // 8
_YIELDS = 200
_SLEEP_S = 50e-6
_LOOK_EVERY_S = 0.5


class SharedMemoryAllReduce:
    """All-reduce of host tensors, for a World whose workers share one host.

    The constructor is a collective. Raises ConfigError where memory cannot be shared, on all workers alike: on several
    hosts, for several users, on other systems than Linux and other processors than x86-64.
    """

    def __init__(self, world: World, slot_bytes: int = SLOT_BYTES) -> None:
        self._world = world
        head = _LINE * world.world_size
        size = head + slot_bytes * (world.world_size + 1)
        self._peers = world.gather_json(identity())
        self._memory = _open(world, self._peers, size)
        self._counters = memoryview(self._memory)[:head].cast("q")
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._parts = [whole[head + n * slot_bytes :][:slot_bytes] for n in range(world.world_size + 1)]
        self._typed = {torch.uint8: self._parts}
        self.slot_bytes = slot_bytes
        self._turn = 0

    def slot(self, dtype: torch.dtype) -> Tensor:
        """This worker's slot, [slot_bytes / element size]."""
        return self._as(dtype)[self._world.rank]

    def sums(self, dtype: torch.dtype) -> Tensor:
        """Where sums are, as large as a slot."""
        return self._as(dtype)[-1]

    def _as(self, dtype: torch.dtype) -> list[Tensor]:
        """All slots and the sum."""
        if dtype not in self._typed:
            self._typed[dtype] = [part.view(dtype) for part in self._parts]
        return self._typed[dtype]

    def all_reduce(self, tensor: Tensor) -> CompletedWork:
        """Sums a contiguous host tensor in place; what it returns is done, as ``torch.distributed``'s work after ``wait``.

        A collective. Raises CommError naming the worker that is gone or late.
        """
        slot, total = self.slot(tensor.dtype), self.sums(tensor.dtype)
        for piece in tensor.detach().view(-1).split(len(slot)):
            slot[: len(piece)].copy_(piece)
            self._meet(tensor.nbytes)
            self.reduce_slots([(tensor.dtype, 0, len(piece))])
            piece.copy_(total[: len(piece)])
        return CompletedWork()

    def all_equal(self, number: int) -> bool:
        """Whether all workers came with the same ``number``, of 63 bits. A collective; slots may be added afterwards."""
        # two places in turn: a fast worker may write its next number while a slow one still reads this one
        place = 1 + self._turn % 2
        self._counters[self._world.rank * _COUNTERS + place] = number
        self._meet(_LINE)
        return all(self._counters[rank * _COUNTERS + place] == number for rank in range(self._world.world_size))

    @torch.no_grad()
    def reduce_slots(self, runs: Sequence[tuple[torch.dtype, int, int]]) -> None:
        """Adds all workers' slots into ``total`` where ``runs`` say: dtype, first element of it and end. A collective.

        ``slot`` may be written at once afterwards; ``total`` holds until the next meeting of all workers.
        """
        rank, workers = self._world.rank, self._world.world_size
        for dtype, first, end in runs:
            count = end - first
            mine = slice(first + rank * count // workers, first + (rank + 1) * count // workers)
            one, other, *others, total = (each[mine] for each in self._as(dtype))
            torch.add(one, other, out=total)
            for part in others:
                total.add_(part)
        self._meet(sum((end - first) * dtype.itemsize for dtype, first, end in runs))

    def _meet(self, num_bytes: int) -> None:
        """Return once all workers have come as far as this one.

        A worker may write its slot for the next sum while others still read this one; the sum itself is written only after
        the next meeting.
        """
        self._turn += 1
        self._counters[self._world.rank * _COUNTERS] = self._turn
        started = looked = time.monotonic()
        for rank in range(self._world.world_size):
            tries = 0
            while self._counters[rank * _COUNTERS] < self._turn:
                tries += 1
                if tries <= _YIELDS:
                    os.sched_yield()
                    continue
                time.sleep(_SLEEP_S)
                if (now := time.monotonic()) - looked > _LOOK_EVERY_S:
                    looked = now
                    self._look(rank, num_bytes, now - started)

    def _look(self, rank: int, num_bytes: int, waited_s: float) -> None:
        """Raises CommError if a worker has ended, or the wait is over."""
        found = missing_ranks(self._peers, self._world.rank, settle=False)
        if any(each.endswith("has ended") for each in found) or waited_s > self._world.timeout_s:
            why = "; ".join(found) if found else f"rank {rank} has not come"
            raise CommError(
                given=f"a shared-memory sum of {num_bytes} bytes failed on rank {self._world.rank} of {self._world.world_size} "
                f"after {waited_s:.1f} s: {why}",
                rule=f"every rank takes part in every sum within {self._world.timeout_s:g} s",
                consequence="the ranks are no longer in step, and this process cannot go on",
                nearest="start again from the newest checkpoint; the log of the missing rank says why it left",
            )

    def close(self) -> None:
        """Free the segment, which goes with its last worker. Not a collective."""
        self._counters.release()
        self._parts.clear()  # the mapping itself goes with the last tensor that looks into it
        self._typed.clear()
        del self._memory


class CompletedWork:
    """What is done already, in the form of asynchronous work."""

    def wait(self) -> None:
        """At once."""

    def is_completed(self) -> bool:
        """Always."""
        return True


def _open(world: World, peers: list[dict[str, Any]], size: int) -> mmap.mmap:
    """The same memory on all workers, all zeros. Raises ConfigError on all of them if one cannot share."""
    if world.world_size < 2:
        raise _refused("1 worker", "no sum is needed")
    if len({each["host"] for each in peers}) > 1:
        raise _refused("workers on several hosts", "a sum over torch.distributed")
    if set(world.gather_json(_able())) != {True}:
        raise _refused("a worker that is not on Linux and x86-64", "a sum over torch.distributed")
    if world.rank == 0:
        handle = os.memfd_create("unisono-sum", os.MFD_CLOEXEC)
        os.posix_fallocate(handle, 0, size)  # the memory is there, or an error is
        world.broadcast_json(handle)
    else:
        try:
            handle = os.open(f"/proc/{peers[0]['pid']}/fd/{world.broadcast_json()}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            handle = -1
    opened = [rank for rank, each in enumerate(world.gather_json(handle >= 0)) if not each]
    try:
        if opened:
            raise _refused(f"rank {opened[0]}, which may not open rank 0's memory", "the same user for all workers")
        return mmap.mmap(handle, size)
    finally:
        if handle >= 0:
            os.close(handle)


def _able() -> bool:
    """Anonymous files are Linux's. Stores of x86-64 become visible in order; elsewhere a counter could overtake the data."""
    return sys.platform == "linux" and platform.machine() == "x86_64"


def _refused(given: str, nearest: str) -> ConfigError:
    return ConfigError(
        given=f"sums through shared memory with {given}",
        rule="at least 2 workers of one user share one host, with Linux on x86-64",
        consequence="nothing was shared",
        nearest=nearest,
    )
