"""Copy the next batch to an accelerator while it computes the current one."""

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
    """``batches`` with their tensors on ``device``, copied on a side stream while the previous batch is in use.

    Reads one batch ahead. The copy is asynchronous if the loader pinned the batch. On a CPU the batches are unchanged.
    """
    if device.type == "cpu":
        try:
            yield from batches
        finally:
            batches.close()
        return
    side = torch.Stream(device=device)
    next_batch: tuple[StepBatch, torch.Event] | None = None
    try:
        for batch in batches:
            with side:
                parts = [to_device(part, device) for part in batch.micro_batches]
            copied = replace(batch, micro_batches=parts), side.record_event()
            if next_batch is not None:
                yield _after_copy(*next_batch, device)
            next_batch = copied
        if next_batch is not None:
            yield _after_copy(*next_batch, device)
    finally:
        batches.close()


def _after_copy(batch: StepBatch, copied: torch.Event, device: torch.device) -> StepBatch:
    """The batch, once the current stream waits for its copy."""
    current = torch.accelerator.current_stream(device)
    current.wait_event(copied)
    for part in batch.micro_batches:
        for tensor in part.values():
            tensor.record_stream(
                current
            )  # its memory is the side stream's: not to be used again before this stream is done
    return batch
