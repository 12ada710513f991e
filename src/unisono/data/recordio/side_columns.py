"""Side columns: a number or a short array per record, besides its payload, such as labels or tile sizes.

In the sidecar a column of numbers is ``side.NAME`` [records]. Arrays are concatenated in ``side.NAME``, and ``ends.NAME`` u8
[records] holds their ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from unisono.errors import DataError

SIDE_PREFIX: Final = "side."
ENDS_PREFIX: Final = "ends."
_DTYPES: Final = ("|u1", "<u2", "<u4", "<u8", "<i8", "<f4", "<f8")


class RaggedColumn:
    """One array per record; ``column[i]`` is a read-only view. Indexing raises DataError for ends outside the column."""

    def __init__(self, name: str, values: NDArray[Any], ends: NDArray[np.uint64]) -> None:
        self._name, self._values, self._ends = name, values, ends

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, number: int) -> NDArray[Any]:
        low, high = int(self._ends[number - 1]) if number else 0, int(self._ends[number])
        if not 0 <= low <= high <= len(self._values):
            raise DataError(
                given=f"side column {self._name!r}: record {number} has values {low} to {high} of {len(self._values)}",
                rule="the values of the records follow each other inside the column",
                consequence="the sidecar is damaged, and this record's values cannot be told",
                nearest="unisono data verify FILE; a sidecar made anew by reindex has no side columns",
            )
        return self._values[low:high]

    def tolist(self) -> list[NDArray[Any]]:
        """The arrays of all records."""
        return [self[number] for number in range(len(self))]


SideColumn = NDArray[Any] | RaggedColumn


def encode_side_columns(side: Mapping[str, Sequence[Any]]) -> dict[str, NDArray[Any]]:
    """Sidecar columns of side values per record: int64 if all are integers, else float64, or arrays as they are."""
    columns: dict[str, NDArray[Any]] = {}
    for name, values in side.items():
        if any(isinstance(value, np.ndarray) and value.ndim for value in values):
            columns |= _stored_arrays(name, values)
            continue
        column = np.array(values, np.int64 if all(isinstance(value, int) for value in values) else np.float64)
        if column.ndim != 1:
            raise _refused(f"side values {name!r} of shape {list(column.shape[1:])}")
        columns[SIDE_PREFIX + name] = column
    return columns


def decode_side_columns(columns: Mapping[str, NDArray[Any]]) -> dict[str, SideColumn]:
    """The inverse of ``stored``."""
    names = [name.removeprefix(SIDE_PREFIX) for name in columns if name.startswith(SIDE_PREFIX)]
    return {
        name: RaggedColumn(name, columns[SIDE_PREFIX + name], columns[ENDS_PREFIX + name])
        if ENDS_PREFIX + name in columns
        else columns[SIDE_PREFIX + name]
        for name in names
    }


def _stored_arrays(name: str, values: Sequence[Any]) -> dict[str, NDArray[Any]]:
    arrays = [np.asarray(value) for value in values]
    kinds = {(array.dtype.newbyteorder("<").str, array.ndim) for array in arrays}
    if len(kinds) != 1 or next(iter(kinds))[1] != 1 or next(iter(kinds))[0] not in _DTYPES:
        raise _refused(f"side values {name!r} of {sorted(kinds)} (dtype, dimensions)")
    ends = np.cumsum([len(array) for array in arrays], dtype=np.uint64)
    return {SIDE_PREFIX + name: np.concatenate(arrays), ENDS_PREFIX + name: ends}


def _refused(given: str) -> DataError:
    return DataError(
        given=given,
        rule=f"a side value is a number, or for every record a 1-d array of one of {', '.join(_DTYPES)}",
        consequence="the file was not written",
        nearest="flatten it, or make it part of the payload",
    )
