"""Pushes staged in shared memory: a push is copied there once, and nowhere else.

Tensors are laid out one after the other in the worker's slot, large ones in parts. When the slot is full, or a caller
waits, its content is summed. The layout follows from the calls, so workers that make the same calls have the same
layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.kvstore.allreduce.shared_memory import SharedMemoryAllReduce

_ALIGN_BYTES = 64


@dataclass(frozen=True, slots=True)
class _Part:
    """Elements of a tensor from ``first`` on, at ``start`` to ``end`` of a slot of their dtype."""

    key: str
    shape: torch.Size
    dtype: torch.dtype
    first: int
    start: int
    end: int


class PushStaging:
    """The tensors staged in this worker's slot of ``memory``."""

    def __init__(self, memory: SharedMemoryAllReduce) -> None:
        self._memory = memory
        self._parts: list[_Part] = []
        self._used_bytes = 0
        # by key the sum of a tensor that came in parts, kept: fresh memory costs more than the copy into it, page by page
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
                self._parts.append(_Part(key, value.shape, value.dtype, first, start, end))
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
            whole = self._wholes.get(part.key)
            if whole is None or (whole.shape, whole.dtype) != (part.shape, part.dtype):
                whole = self._wholes[part.key] = torch.empty(part.shape, dtype=part.dtype)
            rest = whole.view(-1)[part.first :]
            rest[: len(total)].copy_(total)
            if len(rest) == len(total):
                yield part.key, whole

    def close(self) -> None:
        """Drop what was not summed and free the memory. Not a collective."""
        self._parts.clear()
        self._wholes.clear()
        self._memory.close()


def _runs(parts: list[_Part]) -> list[tuple[torch.dtype, int, int]]:
    """Neighbours of one dtype merged; the alignment gaps between them are summed too, and never read."""
    runs: list[tuple[torch.dtype, int, int]] = []
    for part in parts:
        if runs and runs[-1][0] == part.dtype:
            runs[-1] = (part.dtype, runs[-1][1], part.end)
        else:
            runs.append((part.dtype, part.start, part.end))
    return runs
