"""Bytes of files, told while the files are read: their sizes are known before the number of their rows is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, TypeVar

from unisono.data.convert.formats.table import Row, Table, row_bytes
from unisono.quality.progress import Advance, ignore

T = TypeVar("T")


class FileMeter:
    """Tells the bytes of one file as they are read: exactly at its end, and before it as well as its reader knows them.

    Args:
        size: Of the file, in bytes; never more are told.
        advance: Receives the bytes.
    """

    def __init__(self, size: int, advance: Advance) -> None:
        self._left = size
        self._advance = advance

    def add(self, count: int) -> None:
        """Report ``count`` more bytes."""
        count = min(count, self._left)
        if count > 0:
            self._left -= count
            self._advance(count)

    def end(self) -> None:
        """Report the remaining bytes."""
        self.add(self._left)

    def rows(self, table: Table) -> Iterator[Row]:
        """The rows of the file. Where its format knows their number, each counts as much as any other, else as its values."""
        if table.count is not None or not self._left:
            yield from self.shares(table.rows, table.count or 1)
            return
        for row in table.rows:
            self.add(row_bytes(row))
            yield row

    def shares(self, items: Iterable[T], count: int) -> Iterator[T]:
        """The items, of which the file has ``count``; each counts as much as any other."""
        size = self._left
        for number, item in enumerate(items):
            self.add(size * (number + 1) // count - size * number // count)
            yield item


class ByteCount:
    """How many bytes were told so far: ``add`` is an ``Advance``."""

    def __init__(self) -> None:
        self.total = 0

    def add(self, count: int) -> None:
        """Add ``count``."""
        self.total += count


UNMETERED: Final = FileMeter(0, ignore)  # tells nothing, whatever is read
