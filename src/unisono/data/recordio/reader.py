"""Reading records by number: from the page cache, without a cursor, so that threads, forks and several open files are safe."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from unisono.data.recordio.framing import HEAD_BYTES, MAGIC, join
from unisono.data.recordio.index import map_file, open_index
from unisono.data.sidecar import view_of
from unisono.errors import DataError, Problem

Check = Literal["first", "always", "never"]
_HEAD: Final = struct.Struct("<II")
# states of a record: what a read may take for granted
_UNSEEN, _PLAIN = 0, 1
_STRETCH: Final = 4096  # records whose places are looked up at once when reading in order


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Payloads one after the other: record i is ``data[offsets[i]:offsets[i + 1]]``. ``offsets`` [records + 1] int64."""

    data: NDArray[np.uint8]
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, number: int) -> NDArray[np.uint8]:
        if not -len(self) <= number < len(self):
            raise IndexError(number)
        number %= len(self)
        return self.data[self.offsets[number] : self.offsets[number + 1]]


class RecordFile:
    """One ``.rec`` file, its records by number in the order of its ``.idx`` (of the file, where there is none).

    ``check``: compare a record with its checksum the ``first`` time it is read in this process, ``always``, or ``never``;
    that its head is where it belongs is looked at the first time in any case. Raises DataError where file and sidecar do not
    fit, and, when a record is read that is not as it was written, naming file, record and offset.
    """

    def __init__(self, path: Path | str, *, check: Check = "first") -> None:
        self.path = Path(path)
        self._bytes = map_file(self.path)
        self._view = view_of(self._bytes)
        self._index = open_index(self.path, self._bytes)
        self._offsets = view_of(self._index.offsets)
        self._lengths = view_of(self._index.lengths)
        self._split = frozenset(self._index.split.tolist())
        self._check: Check = check
        # Written to by any thread without a lock: the worst that happens is that two check the same record.
        self._state = bytearray(len(self._index.offsets))
        self.fingerprint = f"recordio:{self._index.fingerprint}"

    def __len__(self) -> int:
        return len(self._state)

    def __reduce__(self) -> tuple[Any, ...]:
        return _open, (self.path, self._check)

    @property
    def keys(self) -> Sequence[int] | NDArray[np.int64]:
        """The records' keys, as in ``.idx``."""
        return range(len(self)) if self._index.keys is None else self._index.keys

    @property
    def lengths(self) -> NDArray[np.uint32]:
        """[records] bytes of each payload."""
        return self._index.lengths

    @property
    def side(self) -> dict[str, NDArray[Any]]:
        """Side columns, each [records]."""
        return self._index.side

    @property
    def checksums(self) -> str:
        """``written`` with the records, or ``computed later``: then they tell of damage since, not before."""
        return self._index.checksums

    def read(self, number: int) -> bytes:
        """A copy of one payload; ``number`` from 0, negative ones from the end."""
        if self._state[number] == _PLAIN:
            begin = self._offsets[number] + HEAD_BYTES
            return self._view[begin : begin + self._lengths[number]].tobytes()
        return bytes(self.view(number))

    __getitem__ = read

    def view(self, number: int) -> memoryview:
        """One payload without a copy, read-only (a copy where RecordIO had to split the record)."""
        if self._state[number] != _PLAIN:
            return self._admit(number)
        begin = self._offsets[number] + HEAD_BYTES
        return self._view[begin : begin + self._lengths[number]]

    def views(self, numbers: Sequence[int] | NDArray[np.integer[Any]]) -> list[memoryview]:
        """Many payloads without a copy, in the order asked for."""
        places = self._places(numbers)
        view = self._view
        begins = (self._index.offsets[places] + np.uint64(HEAD_BYTES)).astype(np.int64)
        ends = begins + self._index.lengths[places]
        found = [view[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
        for position in np.flatnonzero(self._states[places] != _PLAIN).tolist():
            found[position] = self._admit(int(places[position]))
        return found

    def read_many(self, numbers: Sequence[int] | NDArray[np.integer[Any]]) -> Batch:
        """Many payloads copied into one buffer, in the order asked for."""
        found = self.views(numbers)
        offsets = np.zeros(len(found) + 1, np.int64)
        np.cumsum([len(view) for view in found], out=offsets[1:])
        return Batch(data=np.frombuffer(b"".join(found), np.uint8), offsets=offsets)

    def read_key(self, key: int) -> bytes:
        """The payload of the record with this key. Raises DataError where there is none, or several."""
        places = [key] if self._index.keys is None else np.flatnonzero(self._index.keys == key).tolist()
        if len(places) != 1 or not 0 <= places[0] < len(self):
            raise DataError(
                Problem(
                    given=f"{self.path}: key {key}, which {len(places) if self._index.keys is not None else 0} records have",
                    rule="a key names one record",
                    consequence="it is not clear what to read",
                    nearest="read(number) takes the record's place instead of its key",
                )
            )
        return self.read(places[0])

    def __iter__(self) -> Iterator[bytes]:
        return self.iterate()

    def iterate(self, start: int = 0, stop: int | None = None, step: int = 1) -> Iterator[bytes]:
        """Copies of payloads ``start``, ``start + step``, … below ``stop``: a rank's strided share, or all in order."""
        numbers = range(len(self))[start:stop:step]
        for first in range(0, len(numbers), _STRETCH):
            for view in self.views(numbers[first : first + _STRETCH]):
                yield view.tobytes()

    @property
    def _states(self) -> NDArray[np.uint8]:
        return np.frombuffer(self._state, np.uint8)

    def _places(self, numbers: Sequence[int] | NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        places = np.asarray(numbers, np.int64)
        if places.ndim != 1:
            raise ValueError(f"record numbers have one dim, not shape {list(places.shape)}")
        if places.size and not (-len(self) <= places.min() and places.max() < len(self)):
            raise IndexError(f"record numbers {places.min()} to {places.max()} of {len(self)} records")
        return places % len(self) if places.size else places

    def _admit(self, number: int) -> memoryview:
        """A record that cannot be taken for granted: look at its head, check it, and join it where it is split."""
        if not -len(self) <= number < len(self):
            raise IndexError(f"record {number} of {len(self)}")
        number %= len(self)
        offset, length = self._offsets[number], self._lengths[number]
        end = offset + HEAD_BYTES + length
        split = number in self._split
        if split:
            try:
                payload = memoryview(join(self._view, offset))
            except ValueError as error:
                raise self._damaged(number, str(error)) from None
        elif end > len(self._view) or _HEAD.unpack_from(self._view, offset) != (MAGIC, length):
            raise self._damaged(number, "its head is not where and what the index says")
        else:
            payload = self._view[offset + HEAD_BYTES : end]
        if len(payload) != length:
            raise self._damaged(number, f"it has {len(payload)} bytes where the index says {length}")
        if self._check != "never" and xxhash.xxh3_64_intdigest(payload) != int(self._index.digests[number]):
            raise self._damaged(number, f"its {length} bytes do not have their checksum")
        if not split and self._check != "always":
            self._state[number] = _PLAIN
        return payload

    def _damaged(self, number: int, what: str) -> DataError:
        return DataError(
            Problem(
                given=f"{self.path}: record {number} at offset {self._offsets[number]}: {what}",
                rule="a record is read as it was written, every byte",
                consequence="it is not used",
                nearest=f"unisono data verify {self.path} lists all damage, "
                f"unisono data repair {self.path} NEW saves what is whole",
            )
        )


def _open(path: Path, check: Check) -> RecordFile:
    return RecordFile(path, check=check)
