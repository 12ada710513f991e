"""Sums over the workers of one host through shared memory, without sockets or the kernel between them.

The memory has a slot per worker and one for the sum. A tensor is processed in pieces of a slot: each worker copies its
piece in, adds its share of the elements over all slots in rank order, and copies the sum out. One worker adds each
element, so all get the same bits, in every run. The memory is an anonymous file of rank 0, which the others open
through /proc: it has no name, does not count against the size of /dev/shm, and disappears with its last process.

Workers wait for each other through counters in the memory, each written by one worker: a short spin that yields the
core, then sleeps. A lost worker, or the World's time-out, ends the others' wait with a CommError that names it.
"""

from __future__ import annotations

import mmap
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unisono.dist import World
from unisono.dist.rank_dump import Collective, GroupState, add_group, remove_group
from unisono.dist.roll_call import identity, missing_ranks
from unisono.errors import CommError, ConfigError
from unisono.kvstore.keys import Future
from unisono.profile.spans import collective_span

SLOT_BYTES = 4 * 2**20
_LINE = 64  # a cache line per worker: its turn, and its last two numbers
_COUNTERS = _LINE // 8
_YIELDS = 200
_SLEEP_S = 50e-6
_LOOK_EVERY_S = 0.5


class SharedMemoryAllReduce:
    """All-reduce of host tensors, for a World whose workers share one host.

    The constructor is a collective. Raises ConfigError on all workers alike where memory cannot be shared: on several
    hosts, for several users, on systems other than Linux and processors other than x86-64.
    """

    def __init__(self, world: World, slot_bytes: int = SLOT_BYTES) -> None:
        self._world = world
        head = _LINE * world.world_size
        size = head + slot_bytes * (world.world_size + 1)
        self._peers = world.all_gather_json(identity())
        self._memory = _open(world, self._peers, size)
        self._counters = memoryview(self._memory)[:head].cast("q")
        memory = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._parts = [memory[head + n * slot_bytes :][:slot_bytes] for n in range(world.world_size + 1)]
        self._typed = {torch.uint8: self._parts}
        self.slot_bytes = slot_bytes
        self._turn = 0
        self._bytes_met, self._is_waiting = 0, False
        add_group(self.group_state)

    def slot(self, dtype: torch.dtype) -> Tensor:
        """This worker's slot, [slot_bytes / element size]."""
        return self._as(dtype)[self._world.rank]

    def sums(self, dtype: torch.dtype) -> Tensor:
        """The sums, as large as a slot."""
        return self._as(dtype)[-1]

    def _as(self, dtype: torch.dtype) -> list[Tensor]:
        """All slots and the sum, as ``dtype``."""
        if dtype not in self._typed:
            self._typed[dtype] = [part.view(dtype) for part in self._parts]
        return self._typed[dtype]

    def all_reduce(self, tensor: Tensor) -> Future[None]:
        """Sum a contiguous host tensor in place; the future is done. A collective. Raises CommError naming the
        worker that is lost or late."""
        slot, total = self.slot(tensor.dtype), self.sums(tensor.dtype)
        with collective_span("all_reduce", "dp", self._world.world_size, tensor.nbytes):
            for piece in tensor.detach().view(-1).split(len(slot)):
                slot[: len(piece)].copy_(piece)
                self._meet(tensor.nbytes)
                self.reduce_slots([(tensor.dtype, 0, len(piece))])
                piece.copy_(total[: len(piece)])
        return Future(lambda: None)

    def all_equal(self, number: int) -> bool:
        """Whether all workers passed the same ``number`` of 63 bits. A collective; slots may be summed afterwards."""
        if self._world.is_simulated:
            return True
        # two places in turn: a fast worker may write its next number while a slow one still reads this one
        place = 1 + self._turn % 2
        self._counters[self._world.rank * _COUNTERS + place] = number
        self._meet(_LINE)
        return all(self._counters[rank * _COUNTERS + place] == number for rank in range(self._world.world_size))

    @torch.no_grad()
    def reduce_slots(self, runs: Sequence[tuple[torch.dtype, int, int]]) -> None:
        """Add all workers' slots into ``sums`` over ``runs`` of (dtype, first element, end). A collective.

        ``slot`` may be overwritten at once afterwards; ``sums`` is valid until all workers meet again.
        """
        rank, workers = self._world.rank, self._world.world_size
        for dtype, first, end in runs:
            count = end - first
            mine = slice(first + rank * count // workers, first + (rank + 1) * count // workers)
            one, other, *others, total = (slot[mine] for slot in self._as(dtype))
            torch.add(one, other, out=total)
            for part in others:
                total.add_(part)
        self._meet(sum((end - first) * dtype.itemsize for dtype, first, end in runs))

    def _meet(self, num_bytes: int) -> None:
        """Return once all workers have made as many calls as this one; at once if they are simulated.

        A worker may overwrite its slot for the next sum while others still read this sum; the sum is overwritten only
        after the next rendezvous.
        """
        self._turn += 1
        if self._world.is_simulated:
            return
        self._bytes_met, self._is_waiting = (
            num_bytes,
            True,
        )  # stays so after an error: a dump tells where this rank waits
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
        self._is_waiting = False

    def group_state(self) -> GroupState:
        """The rendezvous of the workers as a group of collectives, the last one alone."""
        ranks = tuple(range(self._world.world_size))
        last = Collective(
            number=self._turn,
            name="shared-memory sum",
            sizes=((self._bytes_met,),),
            dtypes=("bytes",),
            state="started" if self._is_waiting else "completed",
        )
        return GroupState(
            name="shared memory", description="", ranks=ranks, num_entered=self._turn, collectives=(last,)
        )

    def _look(self, rank: int, num_bytes: int, waited_s: float) -> None:
        """Raise CommError if a worker has ended or the wait has timed out."""
        missing = missing_ranks(self._peers, self._world.rank, settle=False)
        if any(rank_state.endswith("has ended") for rank_state in missing) or waited_s > self._world.timeout_s:
            why = "; ".join(missing) if missing else f"rank {rank} has not arrived"
            raise CommError(
                given=f"a shared-memory sum of {num_bytes} bytes failed on rank {self._world.rank} of {self._world.world_size} "
                f"after {waited_s:.1f} s: {why}",
                rule=f"every rank takes part in every sum within {self._world.timeout_s:g} s",
                consequence="the ranks are no longer in step, and this process cannot continue",
                nearest="start again from the newest checkpoint; the log of the missing rank says why it left",
            )

    def close(self) -> None:
        """Free the memory, which disappears with its last worker. Not a collective."""
        remove_group(self.group_state)
        self._counters.release()
        self._parts.clear()  # the mapping is freed with its last view
        self._typed.clear()
        del self._memory


def _open(world: World, peers: list[dict[str, Any]], size: int) -> mmap.mmap:
    """The same zeroed memory on all workers. Raises ConfigError on all of them if one cannot share."""
    if world.world_size < 2:
        raise _refused("1 worker", "no sum is needed")
    if len({peer["host"] for peer in peers}) > 1:
        raise _refused("workers on several hosts", "a sum over torch.distributed")
    if set(world.all_gather_json(_able())) != {True}:
        raise _refused("a worker that is not on Linux and x86-64", "a sum over torch.distributed")
    if world.is_simulated:
        return mmap.mmap(-1, size)
    if world.rank == 0:
        handle = os.memfd_create("unisono-sum", os.MFD_CLOEXEC)
        os.posix_fallocate(handle, 0, size)  # reserves the memory now, or fails now
        world.broadcast_json(handle)
    else:
        try:
            handle = os.open(f"/proc/{peers[0]['pid']}/fd/{world.broadcast_json()}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            handle = -1
    refused = [rank for rank, is_open in enumerate(world.all_gather_json(handle >= 0)) if not is_open]
    try:
        if refused:
            raise _refused(f"rank {refused[0]}, which may not open rank 0's memory", "the same user for all workers")
        return mmap.mmap(handle, size)
    finally:
        if handle >= 0:
            os.close(handle)


def _able() -> bool:
    """Whether this machine can share memory safely. Anonymous files need Linux. Stores of x86-64 become visible in
    order; elsewhere a counter could overtake the data."""
    return sys.platform == "linux" and platform.machine() == "x86_64"


def _refused(given: str, nearest: str) -> ConfigError:
    return ConfigError(
        given=f"sums through shared memory with {given}",
        rule="at least 2 workers of one user share one host, with Linux on x86-64",
        consequence="nothing was shared",
        nearest=nearest,
    )


_ALIGN_BYTES = 64


@dataclass(frozen=True, slots=True)
class _StagedPart:
    """Elements of a tensor from ``first`` on, at ``start`` to ``end`` of a slot of their dtype."""

    key: str
    shape: torch.Size
    dtype: torch.dtype
    first: int
    start: int
    end: int


class PushStaging:
    """Pushes staged in this worker's slot of ``memory``: a push is copied there once, and nowhere else.

    Tensors are laid out one after the other, large ones in parts. When the slot is full, or a caller waits, its content
    is summed. The layout follows from the calls, so workers that make the same calls have the same layout.
    """

    def __init__(self, memory: SharedMemoryAllReduce) -> None:
        self._memory = memory
        self._parts: list[_StagedPart] = []
        self._used_bytes = 0
        # by key the sum of a tensor staged in parts, reused: fresh memory costs more than the copy into it, page by page
        self._wholes: dict[str, Tensor] = {}

    def put(self, key: str, value: Tensor, flush: Callable[[], None]) -> None:
        """Copy a host tensor in. ``flush`` is called whenever the slot is full, and has to empty it with ``drain``."""
        flat, slot = value.detach().reshape(-1), self._memory.slot(value.dtype)
        first = 0
        while True:
            start = self._used_bytes // value.itemsize
            end = min(start + len(flat), len(slot))
            if end > start or not value.numel():
                slot[start:end].copy_(flat[: end - start])
                self._parts.append(_StagedPart(key, value.shape, value.dtype, first, start, end))
                self._used_bytes = -(-end * value.itemsize // _ALIGN_BYTES) * _ALIGN_BYTES
            first, flat = first + end - start, flat[end - start :]
            if not len(flat):
                return
            flush()

    def all_equal(self, number: int) -> bool:
        """Whether all workers passed the same ``number``. A collective."""
        return self._memory.all_equal(number)

    def drain(self) -> Iterator[tuple[str, Tensor]]:
        """Sum what all workers have staged, after ``all_equal``; yields each key with its sum, valid until the next
        one. A collective."""
        parts, self._parts, self._used_bytes = self._parts, [], 0
        if parts:
            self._memory.reduce_slots(_runs(parts))
        for part in parts:
            total = self._memory.sums(part.dtype)[part.start : part.end]
            if len(total) == part.shape.numel():
                yield part.key, total.view(part.shape)
                continue
            buffer = self._wholes.get(part.key)
            if buffer is None or (buffer.shape, buffer.dtype) != (part.shape, part.dtype):
                buffer = self._wholes[part.key] = torch.empty(part.shape, dtype=part.dtype, device="cpu")
            rest = buffer.view(-1)[part.first :]
            rest[: len(total)].copy_(total)
            if len(rest) == len(total):
                yield part.key, buffer

    def close(self) -> None:
        """Drop what was not summed and free the memory. Not a collective."""
        self._parts.clear()
        self._wholes.clear()
        self._memory.close()


def _runs(parts: list[_StagedPart]) -> list[tuple[torch.dtype, int, int]]:
    """Neighbours of one dtype merged; the alignment gaps between them are summed too, and never read."""
    runs: list[tuple[torch.dtype, int, int]] = []
    for part in parts:
        if runs and runs[-1][0] == part.dtype:
            runs[-1] = (part.dtype, runs[-1][1], part.end)
        else:
            runs.append((part.dtype, part.start, part.end))
    return runs
