"""Which positions of the sample order a step has, also where an epoch's length is not a multiple of the batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

import numpy as np
from numpy.typing import NDArray

from unisono.data.options import LastBatch
from unisono.errors import DataError

# MXNet's names for the same things
_SAME_AS: Final[dict[str, LastBatch]] = {"discard": "drop", "roll_over": "rollover"}


@dataclass(frozen=True, slots=True)
class StepSchedule:
    """Steps of ``global_batch`` samples over epochs of ``num_samples``. ``last_batch`` treats an epoch's incomplete last step:

    rollover  complete it with the next epoch's first samples (a step may span epochs)
    keep      make it smaller
    drop      skip it; each epoch leaves out other samples
    pad       repeat its last sample with weight 0
    wrap      complete it with the same epoch's first samples
    """

    num_samples: int
    global_batch: int
    last_batch: LastBatch = "rollover"

    def __post_init__(self) -> None:
        if self._kind == "drop" and self.num_samples < self.global_batch:
            raise DataError(
                given=f"last_batch drop with {self.num_samples} samples and global_batch {self.global_batch}",
                rule="an epoch has at least one full batch",
                consequence="every batch would be dropped",
                nearest=f"global_batch <= {self.num_samples}, or last_batch pad",
            )

    @property
    def _kind(self) -> LastBatch:
        return _SAME_AS.get(self.last_batch, self.last_batch)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one epoch; with rollover, the steps until every sample was seen."""
        full_steps, remainder = divmod(self.num_samples, self.global_batch)
        return full_steps + (remainder > 0 and self._kind != "drop")

    def steps_of(self, epochs: float) -> int:
        """Steps of a run of ``epochs`` epochs, rounded up. With rollover its last step may reach into the next epoch."""
        exact = Fraction(str(epochs))  # as written: 0.7 of 10 steps are 7
        if self._kind == "rollover":
            return math.ceil(exact * self.num_samples / self.global_batch)
        return math.ceil(exact * self.steps_per_epoch)

    def epoch(self, step: int) -> int:
        """Number, from 0, of the epoch that a step belongs to; that of its first sample, where it spans two."""
        if self._kind == "rollover":
            return step * self.global_batch // self.num_samples
        return step // self.steps_per_epoch

    def positions(self, step: int) -> tuple[NDArray[np.int64], int]:
        """(positions of a step, int64; how many of them, counted from the first, are not padding)."""
        if self._kind == "rollover":
            first = step * self.global_batch
            return np.arange(first, first + self.global_batch, dtype=np.int64), self.global_batch
        epoch, turn = divmod(step, self.steps_per_epoch)
        low = turn * self.global_batch
        present = min(self.global_batch, self.num_samples - low)
        places = np.arange(low, low + (present if self._kind == "keep" else self.global_batch), dtype=np.int64)
        if self._kind == "pad":
            places = np.minimum(places, self.num_samples - 1)
            return epoch * self.num_samples + places, present
        return epoch * self.num_samples + places % self.num_samples, len(places)
