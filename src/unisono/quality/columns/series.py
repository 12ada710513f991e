"""The numbers of a column over all files, one series of each group, in files that are mapped into memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from unisono.quality.columns.scan import FileFacts, ScannedArrays, require_few_groups
from unisono.storage.files import opener

_CHUNK: Final = 1 << 20
_OPEN_FILES: Final = 64
_IN_MEMORY: Final = 1 << 20  # bytes
Chunk = tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """The groups of rows; without a column of groups all rows are one, without a name.

    Attributes:
        names: By their numbers.
        numbers: Of each file the group of each row, int64 by the file's own code; None without a column of groups.
        begins: Number of the first row of each file among all rows, and of all rows, int64 [files + 1].
    """

    names: Sequence[str]
    numbers: Sequence[NDArray[np.int64]] | None
    begins: NDArray[np.int64]

    def place(self, row: int) -> tuple[int, int]:
        """Number of the file and row in it of a row among all."""
        file = int(np.searchsorted(self.begins, row, side="right")) - 1
        return file, row - int(self.begins[file])


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """Finite numbers in the order of the rows, those of a group behind each other.

    Attributes:
        values: float64 [numbers].
        rows: Number of the row of each among all rows, int64 [numbers].
        bounds: Where each group begins, and the end of the last, int64 [groups + 1].
    """

    values: NDArray[np.float64]
    rows: NDArray[np.int64]
    bounds: NDArray[np.int64]


class Column:
    """The numbers of a column, as ``scan`` has written them, file by file.

    Args:
        arrays: Of the scan.
        files: Per file the name of its numbers; None where it has none.
        groups: Of the rows.
        shifts: Per file what is added to its numbers.
    """

    def __init__(
        self, arrays: ScannedArrays, files: Sequence[str | None], groups: Groups, shifts: Sequence[float] | None = None
    ) -> None:
        self._arrays, self._files, self._groups = arrays, files, groups
        self._shifts = shifts or [0.0] * len(files)
        self._codes = lru_cache(maxsize=_OPEN_FILES)(self._map_codes)
        self._numbers = lru_cache(maxsize=_OPEN_FILES)(self._map_numbers)

    def chunks(self) -> Iterator[Chunk]:
        """(row among all rows, number, group) in the order of the rows; each an array."""
        for file, name in enumerate(self._files):
            if name is None:
                continue
            (rows, values), codes = self._numbers(file), self._codes(file)
            for begin in range(0, len(rows), _CHUNK):
                at = np.array(rows[begin : begin + _CHUNK])
                numbers = self._groups.numbers
                groups = np.zeros(len(at), np.int64) if numbers is None else numbers[file][codes[at]]
                yield at + self._groups.begins[file], values[begin : begin + _CHUNK] + self._shifts[file], groups

    def value(self, row: int) -> float:
        """The number of a row among all rows, which has one."""
        file, at = self._groups.place(row)
        rows, values = self._numbers(file)
        return float(values[np.searchsorted(rows, at)]) + self._shifts[file]

    def group(self, row: int) -> int:
        """The number of the group of a row among all rows."""
        if self._groups.numbers is None:
            return 0
        file, at = self._groups.place(row)
        return int(self._groups.numbers[file][self._codes(file)[at]])

    def _map_numbers(self, file: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        name = self._files[file]
        return self._arrays.read(file, f"{name}.rows", np.int64), self._arrays.read(file, f"{name}.values", np.float64)

    def _map_codes(self, file: int) -> NDArray[np.int32]:
        return self._arrays.read(file, "groups.codes", np.int32)

    def series(self, folder: Path) -> Series:
        """The finite numbers by groups, in new files of a folder."""
        sizes = np.zeros(len(self._groups.names), np.int64)
        for _, values, groups in self.chunks():
            sizes += np.bincount(groups[np.isfinite(values)], minlength=len(sizes))
        bounds = np.concatenate(([0], np.cumsum(sizes)))
        free = bounds[:-1].copy()  # where the next number of each group goes
        all_values = new_array(folder / "series.values", int(bounds[-1]), np.float64)
        all_rows = new_array(folder / "series.rows", int(bounds[-1]), np.int64)
        for rows, values, groups in self.chunks():
            keep = np.flatnonzero(np.isfinite(values))
            order = keep[np.argsort(groups[keep], kind="stable")]
            counts = np.bincount(groups[order], minlength=len(sizes))
            within = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
            places = np.repeat(free, counts) + within
            all_values[places], all_rows[places] = values[order], rows[order]
            free += counts
        return Series(values=all_values, rows=all_rows, bounds=bounds)


def groups_of(facts: Sequence[FileFacts], column: str | None) -> Groups:
    """The groups of all files. Raises DataError for too many."""
    begins = np.concatenate(([0], np.cumsum([found.rows for found in facts], dtype=np.int64)))
    if column is None:
        return Groups(names=[""], numbers=None, begins=begins)
    names: dict[str, int] = {}
    numbers = [np.array([names.setdefault(group, len(names)) for group in found.groups], np.int64) for found in facts]
    require_few_groups(len(names), column)
    return Groups(names=list(names), numbers=numbers, begins=begins)


def new_array(path: Path, count: int, dtype: Any) -> NDArray[Any]:
    """An array of zeros, a large one in a new file that is mapped into memory. Raises OSError where there is no room for it."""
    if count * np.dtype(dtype).itemsize <= _IN_MEMORY:
        return np.zeros(count, dtype)
    with open(path, "w+b", opener=opener) as file:
        file.truncate(count * np.dtype(dtype).itemsize)
        if hasattr(os, "posix_fallocate"):  # without room a write to the array would kill the process
            os.posix_fallocate(file.fileno(), 0, count * np.dtype(dtype).itemsize)
    return np.memmap(path, dtype, mode="r+")
