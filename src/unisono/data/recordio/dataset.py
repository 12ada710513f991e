"""Record files as a data set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from unisono.data.dataset import Batch, check_sample, collate
from unisono.data.recordio.reader import RecordFile
from unisono.errors import DataError, UnisonoError


class RecordDataset:
    """All records of ``files`` in order, each decoded to a sample.

    ``decode(payload)`` gets a read-only view of one payload and returns a sample as in ``from_map_style``: a dict of arrays or
    numbers, a pair (inputs, targets), or one value. The side columns ``side`` are added to it. Random augmentation belongs into
    the loader's ``transform``, whose generator is keyed by sample. Reading raises DataError naming file and record if
    ``decode`` fails.
    """

    def __init__(
        self,
        files: Sequence[RecordFile | Path | str],
        decode: Callable[[memoryview], Any],
        *,
        side: Sequence[str] = (),
        fingerprint: str = "",
    ) -> None:
        self._files = [file if isinstance(file, RecordFile) else RecordFile(file) for file in files]
        self._decode = decode
        self._side = tuple(side)
        self._starts = np.cumsum([0, *(len(file) for file in self._files)])
        name = fingerprint or f"{decode.__module__}.{decode.__qualname__}"
        parts = "\n".join([*(file.fingerprint for file in self._files), name])
        self.fingerprint = f"records:{xxhash.xxh3_128(parts.encode()).hexdigest()}"

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, indices: NDArray[np.int64]) -> Batch:
        """Samples by number, stacked."""
        return collate(self.samples(indices), indices.tolist())

    def samples(self, indices: NDArray[np.int64]) -> list[Batch]:
        """Samples by number, one by one; their shapes may differ."""
        samples: list[Batch | None] = [None] * len(indices)
        homes = np.searchsorted(self._starts, indices, side="right") - 1
        for home in np.unique(homes).tolist():
            rows = np.flatnonzero(homes == home)
            file = self._files[home]
            numbers = (indices[rows] - self._starts[home]).tolist()
            for row, number, view in zip(rows.tolist(), numbers, file.views(numbers), strict=True):
                samples[row] = self._sample(file, number, view)
        return [sample for sample in samples if sample is not None]

    def _sample(self, file: RecordFile, number: int, view: memoryview) -> Batch:
        try:
            return check_sample(self._decode(view)) | {name: np.asarray(file.side[name][number]) for name in self._side}
        except Exception as error:
            reason = "; ".join(p.given for p in error.problems) if isinstance(error, UnisonoError) else str(error)
            raise DataError(
                given=f"{file.path}: record {number} of {len(view)} bytes: "
                f"decode raised {type(error).__name__}: {reason}",
                rule="every record of a data set becomes a sample",
                consequence="its batch cannot be made",
                nearest=f"unisono data cat {file.path} --index {number} writes the payload to look at",
            ) from error
