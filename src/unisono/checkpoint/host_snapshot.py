"""The bytes of one shard file: a copy of the state, taken while training waits and written while it continues.

A shard is a header followed by tensors. All of it is copied into one host buffer that is reused by every save, pinned
if there is an accelerator, so that the device copies asynchronously. Afterwards the caller's tensors may change.
Reading them in the background, and copying only the unwritten rest when they change, was not faster
(docs/log.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unisono.checkpoint.shard_assignment import ShardFileLayout
from unisono.device.adapter import DeviceEvent
from unisono.device.torch_adapters import adapter_of

Bytes = NDArray[np.uint8]

# Direct I/O needs memory and file positions aligned to the page.
PAGE_BYTES = 4096
# Size of one write: large enough to keep the disk busy, small enough to wait for.
BLOCK_BYTES = 16 * 2**20


class StreamingDigest(Protocol):
    """Interface of xxhash's streaming digests."""

    def update(self, data: memoryview, /) -> object: ...


class HostBuffer:
    """Page-aligned host memory, reused, that grows to the largest snapshot."""

    def __init__(self) -> None:
        self._tensor = torch.empty(0, dtype=torch.uint8, device="cpu")

    def reserve(self, size: int, *, pinned: bool) -> Tensor:
        """A uint8 tensor [size] with undefined contents, valid until the next call."""
        if self._tensor.numel() < size or self._tensor.is_pinned() != pinned:
            self._tensor = torch.empty(0, dtype=torch.uint8, device="cpu")  # free the old buffer before allocating
            if pinned:
                raw = torch.empty(size + PAGE_BYTES, dtype=torch.uint8, pin_memory=True, device="cpu")
            else:
                # numpy requests huge pages, torch does not: first touch is several times faster
                raw = torch.as_tensor(np.empty(size + PAGE_BYTES, dtype=np.uint8), device="cpu")
            skip = -raw.data_ptr() % PAGE_BYTES
            self._tensor = raw[skip : skip + size]
        return self._tensor[:size]


class HostSnapshot:
    """The content of the file that ``layout`` describes, with the current values of ``tensors``."""

    def __init__(self, layout: ShardFileLayout, tensors: Mapping[str, Tensor], buffer: HostBuffer) -> None:
        self.size = layout.size
        devices = {tensor.device for tensor in tensors.values() if tensor.device.type != "cpu"}
        self._staged = buffer.reserve(self.size, pinned=bool(devices))
        _array(self._staged)[: len(layout.header)] = np.frombuffer(layout.header, dtype=np.uint8)
        for piece in layout.pieces:
            tensor = tensors[piece.name][piece.index]
            if piece.begin < piece.end:
                # from a device this only queues the copy, on the current stream
                target = self._staged[piece.begin : piece.end].view(tensor.dtype).view(tensor.shape)
                target.copy_(tensor.detach(), non_blocking=True)
        self._copied = [_event(device) for device in devices]

    def blocks(self, digest: StreamingDigest) -> Iterator[memoryview]:
        """The file's bytes in order, in page-aligned blocks of BLOCK_BYTES; ``digest`` is updated before each is yielded."""
        for event in self._copied:
            event.synchronize()
        staged = _array(self._staged)
        for begin in range(0, self.size, BLOCK_BYTES):
            block = staged[begin : min(begin + BLOCK_BYTES, self.size)].data
            digest.update(block)
            yield block


def _array(tensor: Tensor) -> Bytes:
    return cast(Bytes, tensor.numpy())


def _event(device: torch.device) -> DeviceEvent:
    """An event recorded on the device's current stream."""
    adapter, index = adapter_of(device)
    assert adapter.streams is not None
    event: DeviceEvent = adapter.streams.current(index).record_event()
    return event
