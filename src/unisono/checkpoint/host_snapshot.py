"""The bytes of one shard file: a copy of the state, taken while the training waits, written while it goes on.

A shard is a header and then tensors. All of it is copied into one host buffer that is reused from save to save, pinned
where there is an accelerator, so that the device copies by itself. Afterwards the caller's tensors are free to change.
Reading them in the background instead, and copying only what is not yet written when they change, was not faster
(docs/log.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unisono.checkpoint.shard_assignment import ShardContents

Bytes = NDArray[np.uint8]

# Direct input/output wants memory and file positions aligned to the page.
PAGE_BYTES = 4096
# One write; large enough that the disk is busy and each wake-up worth its time, small enough to wait for.
BLOCK_BYTES = 16 * 2**20


class StreamingDigest(Protocol):
    """A running hash."""

    def update(self, data: memoryview, /) -> object: ...


class HostBuffer:
    """Page-aligned host memory that grows to the largest image and is kept."""

    def __init__(self) -> None:
        self._tensor = torch.empty(0, dtype=torch.uint8)

    def reserve(self, size: int, *, pinned: bool) -> Tensor:
        """``size`` bytes [size] uint8, with unknown contents; valid until the next call."""
        if self._tensor.numel() < size or self._tensor.is_pinned() != pinned:
            self._tensor = torch.empty(0, dtype=torch.uint8)  # frees before it takes
            if pinned:
                raw = torch.empty(size + PAGE_BYTES, dtype=torch.uint8, pin_memory=True)
            else:
                # numpy asks for huge pages, torch does not: first touch is several times faster
                raw = torch.as_tensor(np.empty(size + PAGE_BYTES, dtype=np.uint8))
            skip = -raw.data_ptr() % PAGE_BYTES
            self._tensor = raw[skip : skip + size]
        return self._tensor[:size]


class HostSnapshot:
    """The file that ``shard`` describes, with the values that ``tensors`` have now."""

    def __init__(self, shard: ShardContents, tensors: Mapping[str, Tensor], buffer: HostBuffer) -> None:
        self.size = shard.size
        devices = {tensor.device for tensor in tensors.values() if tensor.device.type != "cpu"}
        self._staged = buffer.reserve(self.size, pinned=bool(devices))
        _array(self._staged)[: len(shard.header)] = np.frombuffer(shard.header, dtype=np.uint8)
        for piece in shard.pieces:
            tensor = tensors[piece.name][piece.index]
            if piece.begin < piece.end:
                # from a device this only queues the copy, on the stream that made the tensor
                target = self._staged[piece.begin : piece.end].view(tensor.dtype).view(tensor.shape)
                target.copy_(tensor.detach(), non_blocking=True)
        self._copied = [_event(device) for device in devices]

    def blocks(self, digest: StreamingDigest) -> Iterator[memoryview]:
        """The file's bytes in order, BLOCK_BYTES at a time in page-aligned memory; ``digest`` has seen each block."""
        for event in self._copied:
            event.synchronize()
        staged = _array(self._staged)
        for begin in range(0, self.size, BLOCK_BYTES):
            block = staged[begin : min(begin + BLOCK_BYTES, self.size)].data
            digest.update(block)
            yield block


def _array(tensor: Tensor) -> Bytes:
    return cast(Bytes, tensor.numpy())


def _event(device: torch.device) -> torch.Event:
    """A mark behind everything queued on the device's current stream."""
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event
