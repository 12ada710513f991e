"""What is simulated: a model, the devices, and how the work is split between them. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from unisono.planner.devices import Arithmetic, Device
from unisono.planner.model_shape import ModelShape

Numbers = NDArray[np.float64]
Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A training step of ``model`` on ``num_devices`` of ``device``.

    Attributes:
        model: Its shape.
        device: The accelerator.
        arithmetic: Of the matrix products; the rest is computed in 16 bits.
        num_devices: Devices of the job.
        tp: Tensor-parallel ranks.
        pp: Pipeline stages.
        virtual_stages: Stages of each pipeline rank; 0 if unknown.
        cp: Ranks that share a sequence.
        ep: Ranks that share the experts.
        dp_shard: Data ranks that share the parameters (ZeRO 3); 1 if each holds all of its stage.
        micro_batch: Sequences of one forward pass of a model replica.
        global_batch: Sequences of a step.
        seq_len: Tokens of a sequence.
        recompute: What of the forward pass is computed again in the backward pass.
    """

    model: ModelShape
    device: Device
    arithmetic: Arithmetic
    num_devices: int
    tp: int = 1
    pp: int = 1
    virtual_stages: int = 0
    cp: int = 1
    ep: int = 1
    dp_shard: int = 1
    micro_batch: float = 1
    global_batch: float = 1
    seq_len: int = 1
    recompute: Recompute = "none"

    @property
    def dp(self) -> float:
        """Model replicas. Ranks that share experts are data ranks for the rest of the model."""
        return max(1.0, self.num_devices / (self.tp * self.pp * self.cp))

    @property
    def num_micro_batches(self) -> float:
        """Forward passes of a replica in a step."""
        return max(1.0, self.global_batch / (self.dp * self.micro_batch))


def columns(layouts: Sequence[Layout], *values: Callable[[Layout], float]) -> tuple[Numbers, ...]:
    """One array for each of ``values``, with an element for each layout."""
    return tuple(np.array([float(value(layout)) for layout in layouts]) for value in values)
