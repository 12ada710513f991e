"""Per-layer gradient statistics on request: the first place to look when a loss goes wrong."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from unisono.observe.events import EventLog


class GradientStats:
    """Every ``every`` steps, one event with norm, largest magnitude and count of non-finite values of each gradient.

    The figures are of the reduced gradient of the mean loss, before clipping. Reading them waits for the device.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], events: EventLog, every: int) -> None:
        self._names = [name for name, parameter in parameters.items() if parameter.requires_grad]
        self._events = events
        self._every = every

    def __call__(self, step: int, gradients: list[Tensor], divisor: Tensor) -> None:
        """``step`` is 0-based; ``divisor`` turns the piled-up gradients into those of the mean loss."""
        if not self._every or (step + 1) % self._every:
            return
        rows = [
            torch.stack([g.norm() / divisor, g.abs().max() / divisor, (~g.isfinite()).sum().to(divisor.dtype)])
            for g in gradients
        ]
        figures: list[list[float]] = torch.stack(rows).tolist()
        self._events.emit(
            "gradient_stats",
            step=step + 1,
            layers={
                name: {"norm": norm, "max": largest, "nonfinite": int(bad)}
                for name, (norm, largest, bad) in zip(self._names, figures, strict=True)
            },
        )
