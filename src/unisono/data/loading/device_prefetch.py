"""Batches on their way to an accelerator while it still works on the one before."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from unisono.data.loading.loader import StepBatch


def to_device(micro_batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Copy a micro-batch to ``device``; from pinned memory the copy is asynchronous."""
    return {name: tensor.to(device, non_blocking=True) for name, tensor in micro_batch.items()}


def prefetch_to_device(
    batches: Generator[StepBatch, None, None], device: torch.device
) -> Generator[StepBatch, None, None]:
    """``batches`` with their tensors on ``device``, each copied on a stream of its own while the one before is in use.

    Takes one batch more than is asked for, from pinned memory if the loader made it. On a CPU the batches are as they were.
    """
    if device.type == "cpu":
        try:
            yield from batches
        finally:
            batches.close()
        return
    side = torch.Stream(device=device)
    ahead: tuple[StepBatch, torch.Event] | None = None
    try:
        for batch in batches:
            with side:
                parts = [to_device(part, device) for part in batch.micro_batches]
            coming = replace(batch, micro_batches=parts), side.record_event()
            if ahead is not None:
                yield _arrived(ahead, device)
            ahead = coming
        if ahead is not None:
            yield _arrived(ahead, device)
    finally:
        batches.close()


def _arrived(ahead: tuple[StepBatch, torch.Event], device: torch.device) -> StepBatch:
    batch, copied = ahead
    current = torch.accelerator.current_stream(device)
    current.wait_event(copied)
    for part in batch.micro_batches:
        for tensor in part.values():
            tensor.record_stream(
                current
            )  # its memory is the side stream's: not to be used again before this stream is done
    return batch
