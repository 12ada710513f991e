"""Sequential reads of exact sizes from a file, decompressing gzip, with bounded memory."""

from __future__ import annotations

import gzip
import os
import zlib
from pathlib import Path
from typing import Final

from unisono.data.convert.formats.table import damaged_error, open_source, unreadable_error
from unisono.storage.limits import MAX_EXPANSION, MAX_RECORD_BYTES, SMALL_FILE_BYTES

_PIECE_BYTES: Final = 1 << 20


class ByteSource:
    """One open file; ``offset`` counts the bytes read, after decompression if the name ends in ``.gz``.

    Raises DataError with the offset if the file ends early, its gzip is damaged, or it expands more than ``MAX_EXPANSION`` times.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.offset = path, 0
        self._raw = open_source(path)
        self._unpacked = gzip.GzipFile(fileobj=self._raw) if path.name.lower().endswith(".gz") else None
        # bytes of the whole file; unknown for gzip
        self.size = None if self._unpacked else os.fstat(self._raw.fileno()).st_size

    def __enter__(self) -> ByteSource:
        return self

    def __exit__(self, *_: object) -> None:
        self._raw.close()

    def read(self, count: int, what: str, *, record: int | None = None) -> bytes:
        """The next ``count`` bytes; ``what`` they are, and ``record``, are for errors."""
        if count > MAX_RECORD_BYTES:
            detail = f"{what} of {count:,} bytes, where {MAX_RECORD_BYTES:,} are the most"
            raise damaged_error(self.path, self.offset, detail, record=record)
        content = self.read_up_to(count)
        if len(content) < count:
            detail = f"the file ends {count - len(content)} bytes before the end of {what}"
            raise damaged_error(self.path, self.offset, detail, record=record)
        return content

    def read_up_to(self, count: int) -> bytes:
        """The next ``count`` bytes, or fewer at the end of the file."""
        pieces: list[bytes] = []
        while count and (piece := self._piece(min(count, _PIECE_BYTES))):
            pieces.append(piece)
            self.offset += len(piece)
            count -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def end(self, what: str) -> None:
        """Raise DataError if bytes are left; reading to the end also makes gzip check its checksum."""
        if self.read_up_to(1):
            raise damaged_error(self.path, self.offset - 1, f"there are bytes after the end of {what}")

    def _piece(self, count: int) -> bytes:
        if self._unpacked is None:
            return self._raw.read(count)
        try:
            piece = self._unpacked.read(count)
        except (OSError, EOFError, zlib.error) as error:
            raise damaged_error(self.path, self.offset, f"its gzip is damaged or cut: {error}") from error
        if self.offset + len(piece) > SMALL_FILE_BYTES + MAX_EXPANSION * self._raw.tell():
            raise unreadable_error(
                f"{self.path}: {self._raw.tell():,} bytes of gzip, which are more than {self.offset:,} bytes unpacked",
                f"a file expands {MAX_EXPANSION} times at most, or to {SMALL_FILE_BYTES >> 20} MiB",
                "gunzip it by hand, if this is its real content",
            )
        return piece
