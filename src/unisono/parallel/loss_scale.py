"""Dynamic loss scale for fp16, on the device (Micikevicius et al. 2018).

After an overflow the scale halves at once, never below the floor; after ``window`` clean steps in a row it doubles, never above
the cap. The overflow flag is computed from globally reduced gradients, so all ranks move alike. fp32 and bf16 use a fixed 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScale:
    """The scale and its counter, both 0-dim tensors updated in place, and the constants of the rule."""

    scale: Tensor
    clean_steps: Tensor
    dynamic: bool
    factor: float = 2.0
    window: int = 2000
    floor: float = 1.0
    cap: float = 2.0**24

    @staticmethod
    def create(device: torch.device, *, initial: float) -> LossScale:
        """A dynamic scale starting at ``initial``."""
        return LossScale(
            scale=torch.tensor(initial, device=device),
            clean_steps=torch.zeros((), dtype=torch.int64, device=device),
            dynamic=True,
        )

    @staticmethod
    def off(device: torch.device) -> LossScale:
        """The fixed scale 1."""
        return LossScale(
            scale=torch.ones((), device=device),
            clean_steps=torch.zeros((), dtype=torch.int64, device=device),
            dynamic=False,
        )

    def update(self, overflow: Tensor) -> None:
        """One step's rule; ``overflow`` is a 0-dim bool on the device. No host synchronisation."""
        if not self.dynamic:
            return
        clean = torch.where(overflow, 0, self.clean_steps + 1)
        grow = clean >= self.window
        grown = (self.scale * self.factor).clamp(max=self.cap)
        shrunk = (self.scale / self.factor).clamp(min=self.floor)
        self.scale.copy_(torch.where(overflow, shrunk, torch.where(grow, grown, self.scale)))
        self.clean_steps.copy_(torch.where(grow, 0, clean))

    def state(self) -> dict[str, Tensor]:
        """Named tensors of the mutable state."""
        return {"scaler/scale": self.scale, "scaler/clean_steps": self.clean_steps}
