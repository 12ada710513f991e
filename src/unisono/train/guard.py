"""The numerical guard: decides on the device, without a host synchronisation, whether a step counts.

A step with a non-finite loss or gradient norm is skipped. With the spike rule on, so is one whose loss or norm lies more than
``sigmas`` standard deviations above the mean of the last accepted steps. Only accepted, hence finite, values enter that
window: a NaN in it would make every later comparison false, and a spike would hide the next one. Inputs are globally
reduced, so all ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class StepGuard:
    """The rule and its statistics; all state is on the device.

    Args:
        device: Device of losses and norms.
        sigmas: Standard deviations above the mean of the last accepted steps that make a spike; 0: no spike rule.
        window: Number of accepted steps whose mean and deviation are taken.

    Attributes:
        skipped: [] int64, number of steps that were not accepted.
    """

    def __init__(self, device: torch.device, *, sigmas: float = 0.0, window: int = 128) -> None:
        self._sigmas = sigmas
        self._least = min(window, 20)  # fewer values give no usable deviation
        self._values = torch.zeros(2, window, dtype=torch.float32, device=device)
        self._accepted = torch.zeros((), dtype=torch.int64, device=device)
        self._slots = torch.arange(window, device=device)
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)

    def __repr__(self) -> str:
        return f"StepGuard(sigmas={self._sigmas:g}, window={self._slots.numel()}, skipped={int(self.skipped)})"

    def accept(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Whether the step counts, 0-dim bool. Takes the step's values into the statistics if it does.

        Args:
            loss: 0-dim, over the global batch.
            norm: 0-dim, of gradients that are summed over ranks. Both are equal on all ranks.
        """
        values = torch.stack([loss, norm]).float()  # [2]
        good = values.isfinite().all()
        if self._sigmas > 0:
            good = good & ~self._spike(values)
            slot = self._slots == self._accepted % self._slots.numel()  # [window]
            self._values.copy_(torch.where(slot & good, values[:, None], self._values))
            self._accepted += good
        self.skipped += ~good
        return good

    def _spike(self, values: Tensor) -> Tensor:
        filled = self._slots < self._accepted  # [window]
        count = filled.sum().clamp(min=1)
        mean = (self._values * filled).sum(1) / count  # [2]
        variance = ((self._values - mean[:, None]).square() * filled).sum(1) / count
        above = values > mean + self._sigmas * variance.sqrt()
        return above.any() & (self._accepted >= self._least)

    def state_dict(self) -> dict[str, Tensor]:
        """The live tensors of the state."""
        return {"values": self._values, "accepted": self._accepted, "skipped": self.skipped}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy the values of a ``state_dict``."""
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])
