"""The loss scale of fp16, whose gradients underflow: chosen on the device, without a host synchronisation.

Source: Micikevicius et al. 2018, Mixed precision training; the rule is that of MindSpore's ``DynamicLossScaleManager``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class LossScaler:
    """A factor of the loss that follows overflows of the gradients.

    After an overflow it is divided by ``growth_factor``, never below ``min_scale``. After ``growth_interval`` steps in a row
    without one it is multiplied by it, never above ``max_scale``. The flag comes from gradients that are summed over ranks, so an
    overflow on one rank acts on all alike. The ``Trainer`` and ``GuardedOptimizer`` use one; a loop without either calls
    ``scale``, divides gradients by ``value``, skips steps with non-finite gradients (``optim.make_skippable``), and calls
    ``update`` in each step.

    Args:
        device: Device of the gradients.
        init_scale: First scale.
        dynamic: False: the scale stays as it is.
        growth_factor: Factor of each change, above 1.
        growth_interval: Steps without overflow before the scale grows.
        min_scale: Lower bound of the scale.
        max_scale: Upper bound of the scale.

    Attributes:
        value: [] float32, the scale. It is updated in place.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        init_scale: float = 65536.0,
        dynamic: bool = True,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        min_scale: float = 1.0,
        max_scale: float = 2.0**24,
    ) -> None:
        self.value = torch.tensor(init_scale, dtype=torch.float32, device=device)
        self._clean_steps = torch.zeros((), dtype=torch.int64, device=device)
        self._dynamic, self._growth_factor, self._growth_interval = dynamic, growth_factor, growth_interval
        self._min_scale, self._max_scale = min_scale, max_scale

    def __repr__(self) -> str:
        return f"LossScaler(value={float(self.value):g}, dynamic={self._dynamic})"

    def scale(self, loss: Tensor) -> Tensor:
        """``loss`` times the scale, for its backward pass."""
        return loss * self.value

    def update(self, overflow: Tensor) -> None:
        """Update after one step; ``overflow`` is a 0-dim bool on the device, equal on all ranks."""
        if not self._dynamic:
            return
        clean = torch.where(overflow, 0, self._clean_steps + 1)
        grow = clean >= self._growth_interval
        grown = (self.value * self._growth_factor).clamp(max=self._max_scale)
        shrunk = (self.value / self._growth_factor).clamp(min=self._min_scale)
        self.value.copy_(torch.where(overflow, shrunk, torch.where(grow, grown, self.value)))
        self._clean_steps.copy_(torch.where(grow, 0, clean))

    def state_dict(self) -> dict[str, Tensor]:
        """The live tensors of the state."""
        return {"scale": self.value, "clean_steps": self._clean_steps}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy the values of a ``state_dict``."""
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])
