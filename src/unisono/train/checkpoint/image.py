"""The bytes of one shard file, before they are written: a snapshot that costs no more copying than it must.

A shard is a header and then tensors. Its bytes come from two places:

- *staged*: copied when the image is made, into a host buffer that is reused from save to save (pinned where there is an
  accelerator, so that the device copies by itself). Safe whatever the caller does next.
- *live*: read from the tensor's own memory while the file is written, a cache-sized block at a time that is digested
  while it is hot. Only for tensors the caller promised to hold still until ``release``; what is not yet written then is
  staged, so a fast disk needs no second copy of the state, and a slow one never blocks the training.

One thread reads (``blocks``), another may call ``release``.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unisono.errors import CheckpointError, Problem
from unisono.train.checkpoint.layout import Shard

Bytes = NDArray[np.uint8]

# Direct input/output wants memory and file positions aligned to the page.
PAGE_BYTES = 4096
# One write; large enough that the disk is busy, small enough to wait for.
BLOCK_BYTES = 4 * 2**20
# Copied and digested together: source and copy of this size share a core's second-level cache.
_CACHED_BYTES = 256 * 2**10
# Looked at on both ends of a held tensor to notice that it changed.
_MARKED_BYTES = 64


class Digest(Protocol):
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


@dataclass(slots=True)
class _Source:
    """Bytes ``[begin, end)`` of the file: in the staging buffer, or in the memory of a ``held`` tensor.

    ``mark`` is what the tensor looked like when the promise to hold still was given.
    """

    begin: int
    end: int
    held: Tensor | None = None
    mark: tuple[int, bytes] = (0, b"")
    view: Bytes | None = None

    @property
    def memory(self) -> Bytes:
        """The held tensor as bytes; made when first read, off the training's thread."""
        if self.view is None:
            self.view = _array(_bytes(cast(Tensor, self.held)))
        return self.view

    @property
    def is_torn(self) -> bool:
        return self.held is not None and _mark(self.held) != self.mark


class Image:
    """The file that ``shard`` describes, with the values of ``tensors``.

    Staging happens here; ``release`` ends the reading of the tensors named in ``held``.
    """

    def __init__(self, shard: Shard, tensors: Mapping[str, Tensor], held: Collection[str], buffer: HostBuffer) -> None:
        self.size = shard.size
        self._lock = threading.Lock()
        self._passed = 0
        self._torn = False
        self._bounce: Bytes | None = None
        devices = {tensor.device for tensor in tensors.values() if tensor.device.type != "cpu"}
        self._staged = buffer.reserve(self.size, pinned=bool(devices))
        _array(self._staged)[: len(shard.header)] = np.frombuffer(shard.header, dtype=np.uint8)
        self._sources = [_Source(0, len(shard.header))]
        for piece in shard.pieces:
            tensor = tensors[piece.name]
            if piece.rows is not None:
                tensor = tensor[piece.rows]
            if piece.name in held and is_plain(tensor) and not tensor.is_inference():
                self._sources.append(_Source(piece.begin, piece.end, tensor, _mark(tensor)))
                continue
            if piece.begin < piece.end:
                # from a device this only queues the copy, on the stream that made the tensor
                target = self._staged[piece.begin : piece.end].view(tensor.dtype).view(tensor.shape)
                target.copy_(tensor.detach(), non_blocking=True)
            self._sources.append(_Source(piece.begin, piece.end))
        self._is_held = any(source.held is not None for source in self._sources)
        self._copied = [_event(device) for device in devices]

    def release(self) -> None:
        """Stage what is held and not yet passed; after this the caller's tensors are free to change."""
        if not self._is_held:
            return
        with self._lock:
            for source in self._sources:
                if source.held is not None and source.end > self._passed:
                    begin = max(source.begin, self._passed)
                    self._staged[begin : source.end].copy_(_bytes(source.held)[begin - source.begin :])
                    self._torn |= source.is_torn
                source.held = source.view = None
            self._is_held = False  # last: the writer now takes whole blocks from the buffer without the lock

    def blocks(self, digest: Digest) -> Iterator[memoryview]:
        """The file's bytes in order, BLOCK_BYTES at a time in page-aligned memory; ``digest`` has seen each block.

        A block is valid until the next one is asked for. Raises CheckpointError at the end if a held tensor changed.
        """
        for event in self._copied:
            event.synchronize()
        staged = _array(self._staged)
        first = 0
        for begin in range(0, self.size, BLOCK_BYTES):
            end = min(begin + BLOCK_BYTES, self.size)
            if self._is_held:
                while self._sources[first].end <= begin:
                    first += 1
                block = self._gather(first, begin, end, staged, digest)
            else:
                block = staged[begin:end]
                digest.update(block.data)
            yield block.data
        with self._lock:
            torn = self._torn or any(source.is_torn for source in self._sources)
        if torn:
            raise CheckpointError(
                Problem(
                    given="a held tensor changed while the checkpoint was written",
                    rule="held tensors stay as they are until release() is called",
                    consequence="the checkpoint would mix two steps, so it was not committed",
                    nearest="call release() before each optimizer update, or pass the tensor as replicated",
                )
            )

    def _gather(self, first: int, begin: int, end: int, staged: Bytes, digest: Digest) -> Bytes:
        """Bytes ``[begin, end)`` copied together and digested; ``first`` is the source that ``begin`` lies in."""
        if self._bounce is None:
            self._bounce = _array(HostBuffer().reserve(BLOCK_BYTES, pinned=False))
        source = self._sources[first]
        while begin < end:
            while source.end <= begin:
                first += 1
                source = self._sources[first]
            at = begin % BLOCK_BYTES
            until = min(begin + _CACHED_BYTES, source.end, end)
            part = self._bounce[at : at + until - begin]
            # held for microseconds: release() waits for it on the training's thread
            with self._lock:
                if source.held is None:
                    np.copyto(part, staged[begin:until])
                else:
                    np.copyto(part, source.memory[begin - source.begin : until - source.begin])
                self._passed = until
            digest.update(part.data)
            begin = until
        return self._bounce[: (end - 1) % BLOCK_BYTES + 1]


def is_plain(tensor: Tensor) -> bool:
    """Whether the memory of ``tensor`` is on the host and its bytes are the values, in order."""
    on_host = tensor.device.type == "cpu" and tensor.is_contiguous()
    return on_host and not (tensor.is_conj() or tensor.is_neg())


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, [bytes] uint8."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def _array(tensor: Tensor) -> Bytes:
    return cast(Bytes, tensor.numpy())


def _mark(tensor: Tensor) -> tuple[int, bytes]:
    """torch's count of changes in place, and the bytes at both ends: torch 2.13's fused optimizers change uncounted."""
    start, size = tensor.data_ptr(), min(tensor.nbytes, _MARKED_BYTES)
    # straight from memory: making views of hundreds of tensors would keep the training waiting
    ends = ctypes.string_at(start, size) + ctypes.string_at(start + tensor.nbytes - size, size) if size else b""
    return cast(int, cast(Any, tensor)._version), ends


def _event(device: torch.device) -> torch.Event:
    """A mark behind everything queued on the device's current stream."""
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event
