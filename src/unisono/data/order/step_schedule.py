"""Which positions of the order a step has: the arithmetic of epochs whose length is no multiple of the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from unisono.data.options import LastBatch
from unisono.errors import DataError

# MXNet's names for the same things
_SAME_AS: Final[dict[str, LastBatch]] = {"discard": "drop", "roll_over": "rollover"}


@dataclass(frozen=True, slots=True)
class StepSchedule:
    """Steps of ``global_batch`` samples over epochs of ``size``; what the last step of an epoch does with what is left:

    rollover  the next epoch's first samples complete it (steps know no epochs)
    keep      it is smaller
    drop      it does not take place; other samples are left out in other epochs
    pad       its last sample is repeated with weight 0
    wrap      the epoch's own first samples complete it
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
        """Steps of one epoch; with rollover, those it takes to have seen every sample."""
        whole, left = divmod(self.num_samples, self.global_batch)
        return whole + (left > 0 and self._kind != "drop")

    def positions(self, step: int) -> tuple[NDArray[np.int64], int]:
        """(positions of a step, int64; how many of them, from the first, are samples and not filler)."""
        if self._kind == "rollover":
            first = step * self.global_batch
            return np.arange(first, first + self.global_batch, dtype=np.int64), self.global_batch
        epoch, turn = divmod(step, self.steps_per_epoch)
        low = turn * self.global_batch
        there = min(self.global_batch, self.num_samples - low)
        places = np.arange(low, low + (there if self._kind == "keep" else self.global_batch), dtype=np.int64)
        if self._kind == "pad":
            places = np.minimum(places, self.num_samples - 1)
            return epoch * self.num_samples + places, there
        return epoch * self.num_samples + places % self.num_samples, len(places)
