"""What changes in one file of tables, and the log of all changes: values that are masked or cast, rows that are left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from unisono.data.convert.formats.table import describe_value
from unisono.errors import DataError
from unisono.quality.columns.lossless import recast
from unisono.quality.columns.table_cells import BATCH_ROWS
from unisono.quality.columns.targets import Target
from unisono.quality.input_files import InputFile
from unisono.quality.progress import Advance, ignore
from unisono.sanitize import quoted
from unisono.storage.json_lines import json_line


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeLog:
    """All changes of a data set.

    Attributes:
        masked_file: Gets a line of JSON for each masked value: file, row, row in the new file, column, and its text as it was.
        dropped_file: Gets one for each row that is left out: file, row, column, value, and why it cannot be cast.
        skips: Whether a row with a value that cannot be cast is left out, or is an error.
        masked: Masked values by column.
        casts: Cells that became others, by file, column, and what was done, such as ``int to float``.
        dropped: Rows left out, by file.
    """

    masked_file: IO[bytes]
    dropped_file: IO[bytes]
    skips: bool
    masked: Counter[str] = field(default_factory=Counter[str])
    casts: Counter[tuple[str, str, str]] = field(default_factory=Counter[tuple[str, str, str]])
    dropped: Counter[str] = field(default_factory=Counter[str])


@dataclass(frozen=True, kw_only=True, slots=True)
class FileChange:
    """What changes in one file. Rows are handled in order.

    Attributes:
        file: The file.
        begin: Number of its first row among all rows.
        rows: Number of its rows.
        columns: Columns of the new file, in order.
        masked: Rows among all rows whose value is masked, by column, int64 [values] in order.
        targets: The schema; empty if nothing is cast.
        has_bom: Whether the new file begins with the byte-order mark of UTF-8, in a format of text.
        deviating: Columns of the file in which cells may have to be cast or added.
        log: Of all files.
        advance: Receives the rows that are handled.
    """

    file: InputFile
    begin: int
    rows: int
    columns: tuple[str, ...]
    masked: Mapping[str, NDArray[np.int64]]
    targets: Mapping[str, Target]
    has_bom: bool
    deviating: tuple[str, ...]
    log: ChangeLog
    advance: Advance = ignore

    def masked_in(self, begin: int, count: int) -> dict[str, NDArray[np.int64]]:
        """The masked ones of ``count`` rows from ``begin`` on, relative to it, by column."""
        first = self.begin + begin
        found: dict[str, NDArray[np.int64]] = {}
        for name, rows in self.masked.items():
            low, high = np.searchsorted(rows, (first, first + count)).tolist()
            if low < high:
                found[name] = np.array(rows[low:high]) - first
        return found

    def masked_columns(self) -> Iterator[tuple[str, ...]]:
        """The columns whose value is masked, row by row."""
        for begin in range(0, self.rows, BATCH_ROWS):
            count = min(BATCH_ROWS, self.rows - begin)
            names: list[tuple[str, ...]] = [()] * count
            for name, rows in self.masked_in(begin, count).items():
                for row in rows.tolist():
                    names[row] += (name,)
            yield from names
            self.advance(count)

    def recast_row(
        self, row: int, values: Mapping[str, Any], masked: Collection[str], texts: Mapping[str, str]
    ) -> dict[str, Any] | None:
        """The values of a row that become others; None if the row is left out.

        Args:
            row: Its number in the file.
            values: Of its columns.
            masked: Columns whose value is masked, so that nothing is cast.
            texts: Numbers as the file writes them.

        Raises:
            DataError: A value cannot be cast without loss.
        """
        new: dict[str, Any] = {}
        changes: list[tuple[str, str]] = []
        for name in self.deviating:
            if name in masked or name not in values:
                continue
            try:
                found = recast(
                    values[name],
                    self.targets[name],
                    text=texts.get(name, ""),
                    may_have_header=self.file.kind == ".rec",
                )
            except ValueError as error:
                self.drop(row, name, describe_value(values[name]), str(error))
                return None
            if found is not None:
                new[name] = found[0]
                changes.append((name, found[1]))
        for name, change in changes:
            self.count(name, change)
        return new

    def count(self, column: str, change: str, cells: int = 1) -> None:
        """Count cells that became others."""
        self.log.casts[self.file.name, column, change] += cells

    def mask(self, row: int, column: str, text: str) -> None:
        """Record a masked value by its text as it was, in a row that is not left out."""
        self.log.masked[column] += 1
        new_row = row - self.log.dropped[self.file.name]
        record = {"file": self.file.name, "row": row, "new_row": new_row, "column": column, "value": text}
        self.log.masked_file.write(json_line(record))

    def drop(self, row: int, column: str, value: str, reason: str) -> None:
        """Leave out a row with a value that cannot be cast. Raises DataError if that is not wanted."""
        if not self.log.skips:
            target = self.targets[column]
            raise DataError(
                given=f"{self.file.path}: row {row}, column {quoted(column)}: {value}: {reason}",
                rule=f"in the schema the column is {_words(target)}, and a value is cast where nothing is lost",
                consequence="nothing was written",
                nearest="--on-error skip leaves such rows out; --null-text NA takes the text NA for no value; or mend the row",
            )
        self.log.dropped[self.file.name] += 1
        record = {"file": self.file.name, "row": row, "column": column, "value": value, "reason": reason}
        self.log.dropped_file.write(json_line(record))


def _words(target: Target) -> str:
    if target.mode:
        return f"images of mode {target.mode}"
    if target.encoding:
        return target.encoding
    return target.kind if target.kind != "other" else target.stored
