"""Read records by number from a mapped file. There is no cursor: threads, forks and several open files are safe."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from unisono.data.dataset import Batch, check_sample, collate
from unisono.data.options import default_cache_dir
from unisono.data.recordio.framing import HEAD_BYTES, MAGIC, PART_HEAD, join_parts
from unisono.data.recordio.index import ENDS_BYTES, SideColumn, map_file, open_index, sidecar_path, text_index_path
from unisono.data.recordio.remote_file import RemoteFile, is_url
from unisono.data.sidecar import view_of
from unisono.errors import DataError, UnisonoError
from unisono.sanitize import without_credentials

ChecksumPolicy = Literal["first", "always", "never"]
_LOG: Final = logging.getLogger("unisono.data")
# states of a record: not checked yet; checked, and in one part
_UNSEEN, _CHECKED_WHOLE = 0, 1
_RECORDS_AT_ONCE: Final = 4096  # records looked up at once when reading in order


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordBatch:
    """Concatenated payloads: record i is ``data[offsets[i]:offsets[i + 1]]``. ``offsets`` [records + 1] int64."""

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
    """One ``.rec`` file; records are numbered in the order of its ``.idx`` (of the file, if there is none).

    Args:
        path: A local file, or a URL (``s3://…``, any fsspec filesystem). A URL is read in ranges into a permanent copy;
            without a sidecar beside it the whole file is fetched once.
        check: When a record's checksum is verified: the "first" time it is read in this process, "always", or "never".
            Its head is always checked the first time.
        cache_dir: Folder of the copies of URLs. By default unisono/ in the user's cache folder.

    Raises:
        DataError: File and sidecar do not match; while reading, a record is damaged: the error names file, record and
            offset.
    """

    def __init__(self, path: Path | str, *, check: ChecksumPolicy = "first", cache_dir: Path | None = None) -> None:
        self._cache_dir = cache_dir
        self._remote: RemoteFile | None = None
        if isinstance(path, str) and is_url(path):
            self.path: Path | str = path
            self._remote = RemoteFile(path, (cache_dir or default_cache_dir(os.environ)) / "remote")
            local, self._bytes = self._remote.path, self._remote.bytes
            _fetch_index(self._remote)
        else:
            self.path = local = Path(path)
            self._bytes = map_file(local)
        self._view = view_of(self._bytes)
        # slicing the map gives bytes in one step, a view needs two; an empty file has no map
        self._map: Any = getattr(self._bytes.base, "obj", b"")
        self._index = open_index(local, self._bytes)
        self._offsets = view_of(self._index.offsets)
        self._lengths = view_of(self._index.lengths)
        self._digests = view_of(self._index.digests)
        self._checks_here = self._remote is None and check != "never"
        self._split = frozenset(self._index.split.tolist())
        self._check: ChecksumPolicy = check
        # Written by any thread without a lock: at worst, two check the same record.
        self._state = bytearray(len(self._index.offsets))
        self.fingerprint = f"recordio:{self._index.fingerprint}"

    def __len__(self) -> int:
        return len(self._state)

    def __reduce__(self) -> tuple[Any, ...]:
        return _open, (self.path, self._check, self._cache_dir)

    @property
    def keys(self) -> Sequence[int] | NDArray[np.int64]:
        """The records' keys, as in ``.idx``."""
        return range(len(self)) if self._index.keys is None else self._index.keys

    @property
    def lengths(self) -> NDArray[np.uint32]:
        """[records] bytes of each payload."""
        return self._index.lengths

    @property
    def side(self) -> dict[str, SideColumn]:
        """Side columns, each [records]: numbers, or ``RaggedColumn`` arrays."""
        return self._index.side

    @property
    def checksums(self) -> str:
        """``written`` with the records, or ``computed later``: those reveal only damage since then."""
        return self._index.checksums

    def read(self, number: int) -> bytes:
        """A copy of one payload; negative numbers count from the end."""
        begin = self._offsets[number] + HEAD_BYTES
        length = self._lengths[number]
        if self._state[number] == _CHECKED_WHOLE:
            return self._map[begin : begin + length]
        payload = self._map[begin : begin + length]
        # a fast path of ``_checked`` for records of one part
        if (
            self._checks_here
            and xxhash.xxh3_64_intdigest(payload) == self._digests[number]
            and self._map[begin - HEAD_BYTES : begin] == PART_HEAD.pack(MAGIC, length)
        ):
            if self._check == "first":
                self._state[number] = _CHECKED_WHOLE
            return payload
        return bytes(self.view(number))

    __getitem__ = read

    def view(self, number: int) -> memoryview:
        """One payload as a read-only view (a copy if RecordIO split the record)."""
        if self._state[number] != _CHECKED_WHOLE:
            return self._first_view(number)
        begin = self._offsets[number] + HEAD_BYTES
        return self._view[begin : begin + self._lengths[number]]

    def views(self, numbers: Sequence[int] | NDArray[np.integer[Any]]) -> list[memoryview]:
        """Many payloads as views, in the given order."""
        places = self._normalized(numbers)
        begins, ends = self._extents(places)
        view = self._view
        payloads = [view[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
        unseen = np.flatnonzero(self._states[places] != _CHECKED_WHOLE)
        if self._remote is not None and unseen.size:  # in one request; split records fetch their extra bytes later
            self._remote.ensure(begins[unseen] - HEAD_BYTES, ends[unseen])
        for position in unseen.tolist():
            payloads[position] = self._first_view(int(places[position]))
        return payloads

    def read_many(self, numbers: Sequence[int] | NDArray[np.integer[Any]]) -> RecordBatch:
        """Many payloads copied into one buffer, in the given order."""
        payloads = self.views(numbers)
        offsets = np.zeros(len(payloads) + 1, np.int64)
        np.cumsum([len(view) for view in payloads], out=offsets[1:])
        return RecordBatch(data=np.frombuffer(b"".join(payloads), np.uint8), offsets=offsets)

    def read_key(self, key: int) -> bytes:
        """The payload of the record with this key. Raises DataError for no or several such records."""
        places = [key] if self._index.keys is None else np.flatnonzero(self._index.keys == key).tolist()
        if len(places) != 1 or not 0 <= places[0] < len(self):
            raise DataError(
                given=f"{self.path}: key {key}, which {len(places) if self._index.keys is not None else 0} records have",
                rule="a key names one record",
                consequence="it is not clear what to read",
                nearest="read(number) takes the record's place instead of its key",
            )
        return self.read(places[0])

    def __iter__(self) -> Iterator[bytes]:
        return self.iterate()

    def iterate(self, start: int = 0, stop: int | None = None, step: int = 1) -> Iterator[bytes]:
        """Copies of payloads ``start``, ``start + step``, … below ``stop``."""
        numbers = range(len(self))[start:stop:step]
        for first in range(0, len(numbers), _RECORDS_AT_ONCE):
            places = self._normalized(numbers[first : first + _RECORDS_AT_ONCE])
            if (self._states[places] != _CHECKED_WHOLE).any():
                if self._remote is not None:  # in one request
                    yield from map(bytes, self.views(places))
                else:
                    yield from map(self.read, places.tolist())
                continue
            mapped = self._map
            for begin, end in zip(*(column.tolist() for column in self._extents(places)), strict=True):
                yield mapped[begin:end]

    def _extents(self, places: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Begins and ends of payloads of one part."""
        begins = (self._index.offsets[places] + np.uint64(HEAD_BYTES)).astype(np.int64)
        return begins, begins + self._index.lengths[places]

    @property
    def _states(self) -> NDArray[np.uint8]:
        return np.frombuffer(self._state, np.uint8)

    def _normalized(self, numbers: Sequence[int] | NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """Record numbers from 0: negative ones count from the end."""
        places = np.asarray(numbers, np.int64)
        if places.ndim != 1:
            raise ValueError(f"record numbers have one dim, not shape {list(places.shape)}")
        if places.size and not (-len(self) <= places.min() and places.max() < len(self)):
            raise IndexError(f"record numbers {places.min()} to {places.max()} of {len(self)} records")
        return places % len(self) if places.size else places

    def _first_view(self, number: int) -> memoryview:
        """The payload of a record not checked yet: check head and checksum, and join its parts."""
        if not -len(self) <= number < len(self):
            raise IndexError(f"record {number} of {len(self)}")
        number %= len(self)
        if self._remote is None:
            return self._checked(number)
        begin, end = self._extent(number)
        self._remote.ensure([begin], [end])
        try:
            return self._checked(number)
        except DataError:
            self._remote.forget(begin, end)  # the copy may be damaged: fetch it once more
            self._remote.ensure([begin], [end])
            return self._checked(number)

    def _extent(self, number: int) -> tuple[int, int]:
        """Bytes of the file that hold a record; a split one has another head per cut, at most one in two words."""
        offset, length = self._offsets[number], self._lengths[number]
        end = offset + HEAD_BYTES + (3 * length + HEAD_BYTES if number in self._split else length)
        return min(offset, len(self._view)), min(end, len(self._view))

    def _checked(self, number: int) -> memoryview:
        offset, length = self._offsets[number], self._lengths[number]
        end = offset + HEAD_BYTES + length
        split = number in self._split
        if split:
            try:
                payload = memoryview(join_parts(self._view, offset))
            except ValueError as error:
                raise self._damaged(number, str(error)) from None
        elif end > len(self._view) or PART_HEAD.unpack_from(self._view, offset) != (MAGIC, length):
            raise self._damaged(number, "its head is not where and what the index says")
        else:
            payload = self._view[offset + HEAD_BYTES : end]
        if len(payload) != length:
            raise self._damaged(number, f"it has {len(payload)} bytes where the index says {length}")
        if self._check != "never" and xxhash.xxh3_64_intdigest(payload) != int(self._index.digests[number]):
            raise self._damaged(number, f"its {length} bytes do not have their checksum")
        if not split and self._check != "always":
            self._state[number] = _CHECKED_WHOLE
        return payload

    def _damaged(self, number: int, what: str) -> DataError:
        return DataError(
            given=f"{self.path}: record {number} at offset {self._offsets[number]}: {what}",
            rule="a record is read as it was written, every byte",
            consequence="it is not used",
            nearest=f"unisono data verify {self.path} lists all damage, "
            f"unisono data repair {self.path} NEW saves what is whole",
        )


def _fetch_index(remote: RemoteFile) -> None:
    """Fetch the indexes; without a sidecar fetch the whole file, from which it is then made."""
    stem = remote.url.removesuffix(".rec")
    if remote.fetch_small_file(f"{stem}.uidx", sidecar_path(remote.path).name) is None:
        remote.fetch_small_file(f"{stem}.idx", text_index_path(remote.path).name)
        url, size = without_credentials(remote.url), f"{remote.size:,}"
        _LOG.info("%s has no sidecar: fetching all %s bytes of it once to make one", url, size)
        remote.ensure([0], [remote.size])
    remote.ensure([0, max(0, remote.size - ENDS_BYTES)], [min(ENDS_BYTES, remote.size), remote.size])


def _open(path: Path | str, check: ChecksumPolicy, cache_dir: Path | None) -> RecordFile:
    return RecordFile(path, check=check, cache_dir=cache_dir)


class RecordDataset:
    """A ``Dataset`` of all records of ``files`` in order, each decoded to a sample.

    Random augmentation belongs into the loader's ``transform``, whose generator is keyed by sample.

    Args:
        files: The ``.rec`` files, open or by path, in the order of the samples.
        decode: ``decode(payload)`` gets a read-only view of one payload and returns a sample as in ``from_map_style``:
            a dict of arrays or numbers, a pair (inputs, targets), or one value.
        side: Names of side columns that are added to each sample.
        fingerprint: Identifies ``decode``; with the files' fingerprints it makes that of the data set. By default the
            module and qualified name of ``decode``.

    Raises:
        DataError: While reading, ``decode`` fails; the error names file and record.
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
        file_of_row = np.searchsorted(self._starts, indices, side="right") - 1
        for file_number in np.unique(file_of_row).tolist():
            rows = np.flatnonzero(file_of_row == file_number)
            file = self._files[file_number]
            numbers = (indices[rows] - self._starts[file_number]).tolist()
            for row, number, view in zip(rows.tolist(), numbers, file.views(numbers), strict=True):
                samples[row] = self._sample(file, number, view)
        return [sample for sample in samples if sample is not None]

    def _sample(self, file: RecordFile, number: int, view: memoryview) -> Batch:
        try:
            return check_sample(self._decode(view)) | {name: np.asarray(file.side[name][number]) for name in self._side}
        except Exception as error:
            problems = error.problems if isinstance(error, UnisonoError) else ()
            reason = "; ".join(p.given for p in problems) or str(error)
            look = f"unisono data cat {file.path} --index {number} writes the payload to look at"
            raise DataError(
                given=f"{file.path}: record {number} of {len(view)} bytes: "
                f"decode raised {type(error).__name__}: {reason}",
                rule="; ".join(p.rule for p in problems) or "every record of a data set becomes a sample",
                consequence="its batch cannot be made",
                nearest="; ".join([*(p.nearest for p in problems), look]),
            ) from error
