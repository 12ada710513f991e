"""Per-layer gradient statistics on request: the first place to look when a loss goes wrong."""

from __future__ import annotations

import torch
from torch import Tensor

from unisono.observe.events import EventLog
from unisono.parallel.sharding import ShardedParameters


class GradientStats:
    """Every ``every`` steps, one event with norm, largest magnitude and count of non-finite values of each gradient.

    The figures are of the reduced gradient of the mean loss, before clipping. Reading them waits for the device.
    """

    def __init__(self, pieces: ShardedParameters, events: EventLog, every: int) -> None:
        self._pieces = pieces
        self._names = [name for name, parameter in pieces.parameters.items() if parameter.requires_grad]
        self._events = events
        self._every = every

    def __call__(self, step: int, gradients: list[Tensor], divisor: Tensor) -> None:
        """``step`` is 0-based; ``divisor`` turns the piled-up gradients into those of the mean loss."""
        if not self._every or (step + 1) % self._every:
            return
        trained = [p for p in self._pieces.parameters.values() if p.requires_grad]
        norms = self._pieces.global_norms(trained, torch.stack([g.norm() for g in gradients])) / divisor
        largest = self._pieces.max_over_shards(
            torch.stack([g.abs().amax() if g.numel() else g.new_zeros(()) for g in gradients])
        )
        bad = self._pieces.sum_over_shards(trained, torch.stack([(~g.isfinite()).sum() for g in gradients]))
        columns: list[list[float]] = [column.tolist() for column in (norms, largest / divisor, bad)]
        layers = {
            name: {"norm": norm, "max": largest, "nonfinite": int(bad)}
            for name, norm, largest, bad in zip(self._names, *columns, strict=True)
        }
        self._events.emit("gradient_stats", step=step + 1, layers=self._pieces.gather_stages(layers))
