"""Cache of samples in memory or on a fast disk, shared by all processes of a host.

Samples are added until the budget is used up and never evicted: under a shuffle each sample is equally likely to be read next, so
eviction gains nothing (CoorDL, Mohan et al. 2021). Cache before a random transform: the cache holds what the data set returned.

Each data set has one file, in a folder of this user in /dev/shm or in a given one: a header, a table with a row per sample, then
the samples. Space is reserved before it is written, so a full file system only ends the growth. The table row is written last
and has a checksum. The last process that uses a file in memory removes it; files of killed processes are removed when the next
cache is opened.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash

from unisono.data.dataset import Batch, Dataset, Ids, MapStyle, PerSampleDataset, as_dataset, location_of, read_samples
from unisono.data.packed_sample import pack_sample, unpack_sample
from unisono.errors import DataError
from unisono.storage.files import NO_ROOM
from unisono.storage.ownership import make_own_folder

_MEMORY: Final = Path(f"/dev/shm/unisono-{os.getuid()}")
_PREFIX: Final = "unisono-cache-"
_ROW: Final = np.dtype([("offset", "<u8"), ("length", "<u8"), ("digest", "<u8")])  # offset 0: not there
_HEAD_BYTES: Final = 64  # the end of what is used, u64
_ALIGN: Final = 64
_AMONG_THREADS: Final = threading.Lock()
_LOG: Final = logging.getLogger("unisono.data")


def cached(dataset: Dataset | MapStyle, *, budget_bytes: int, folder: Path | str | None = None) -> Dataset:
    """Cache up to ``budget_bytes`` of the samples of ``dataset`` as they were read, in memory or in a folder.

    Processes of a host that cache the same data set share one copy. Samples beyond the budget are read from ``dataset``
    each time.

    Args:
        dataset: The samples.
        budget_bytes: Bytes for the cached samples; a table of 24 bytes per sample of the data set is extra.
        folder: Folder of the cache file, which remains for the next run; delete its ``unisono-cache-*`` files to remove
            it. By default shared memory (``/dev/shm``), removed after use.

    Raises:
        DataError: The folder has no space for the table, or cannot be written.
    """
    return _CachedDataset(as_dataset(dataset), budget_bytes, _MEMORY if folder is None else Path(folder))


class _CachedDataset(PerSampleDataset):
    def __init__(self, base: Dataset, budget_bytes: int, folder: Path) -> None:
        self.fingerprint = base.fingerprint  # the samples are the same
        self._base, self._budget_bytes, self._folder = base, budget_bytes, folder
        self._store = _SampleStore(folder, f"{base.fingerprint}:{len(base)}", len(base), budget_bytes)
        weakref.finalize(self, self._store.close)

    def __len__(self) -> int:
        return len(self._base)

    def __reduce__(self) -> tuple[Any, ...]:
        return _CachedDataset, (self._base, self._budget_bytes, self._folder)

    @property
    def num_cached(self) -> int:
        """Number of samples in the cache."""
        return self._store.num_cached

    def samples(self, indices: Ids) -> list[Batch]:
        """Samples from the cache; missing ones are read from the data set and added."""
        samples = [self._store.get(number) for number in indices.tolist()]
        missing = [row for row, sample in enumerate(samples) if sample is None]
        if missing:
            for row, sample in zip(missing, read_samples(self._base, indices[missing]), strict=True):
                self._store.put(int(indices[row]), sample)
                samples[row] = sample
        return [sample for sample in samples if sample is not None]

    def location(self, index: int) -> str:
        return location_of(self._base, index)


class _SampleStore:
    """The cache's file. Reads take no lock; appends lock out other processes and threads."""

    def __init__(self, folder: Path, about: str, count: int, budget_bytes: int) -> None:
        self._path = folder / f"{_PREFIX}{os.getuid()}-{xxhash.xxh3_128_hexdigest(about.encode())}"
        self._process = os.getpid()
        self._temporary = folder == _MEMORY
        begin = -(-(_HEAD_BYTES + count * _ROW.itemsize) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._size = begin + budget_bytes
        try:
            if self._temporary:
                make_own_folder(folder)
                _remove_stale(folder)
            self._file = self._open(begin)
        except OSError as error:
            raise DataError(
                given=f"{self._path}: {error.strerror}",
                rule=f"a cache has room for its table, {begin:,} bytes for {count:,} samples",
                consequence="nothing can be kept there",
                nearest="another folder=, or no cache",
            ) from error
        self._map = mmap.mmap(self._file, self._size)
        self._used = np.frombuffer(self._map, "<u8", 1)
        self._table = np.frombuffer(self._map, _ROW, count, _HEAD_BYTES)
        self._full = False

    @property
    def num_cached(self) -> int:
        return int(np.count_nonzero(self._table["offset"]))

    def get(self, number: int) -> Batch | None:
        """The sample as read-only views of the shared memory; None if it is missing or damaged."""
        offset, length, digest = self._table[number].item()
        if offset == 0 or offset + length > self._size:
            return None
        raw = memoryview(self._map)[offset : offset + length].toreadonly()
        return unpack_sample(raw) if xxhash.xxh3_64_intdigest(raw) == digest else None

    def put(self, number: int, sample: Batch) -> None:
        """Add the sample if there is space and it is missing."""
        if self._full:
            return
        raw = pack_sample(sample)
        with _exclusive_lock(self._file):
            low = int(self._used[0])
            high = low + -(-len(raw) // _ALIGN) * _ALIGN
            if self._table["offset"][number]:
                return
            if high > self._size or not self._reserve(low, high - low):
                self._full = True
                _LOG.info("cache %s is full with %d of %d samples", self._path, self.num_cached, len(self._table))
                return
            self._used[0] = high
        os.pwrite(self._file, raw, low)
        row = self._table[number : number + 1]
        row["length"], row["digest"] = len(raw), xxhash.xxh3_64_intdigest(raw)
        row["offset"] = low  # last: this makes the sample visible

    def close(self) -> None:
        """Close the file; the last user of one in memory removes it."""
        if self._process == os.getpid() and self._temporary and _try_exclusive(self._file):
            self._path.unlink(missing_ok=True)
        os.close(self._file)

    def _open(self, begin: int) -> int:
        while True:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            if os.fstat(file).st_uid != os.geteuid():
                os.close(file)
                raise PermissionError(errno.EPERM, "it belongs to another user")
            fcntl.flock(file, fcntl.LOCK_SH)  # for as long as it is used
            try:
                if os.stat(self._path).st_ino != os.fstat(file).st_ino:
                    raise FileNotFoundError(self._path)
            except FileNotFoundError:  # its last user removed it in between
                os.close(file)
                continue
            try:
                with _exclusive_lock(file):
                    if os.fstat(file).st_size == 0:
                        os.posix_fallocate(file, 0, begin)
                        os.pwrite(file, begin.to_bytes(8, "little"), 0)
                    if os.fstat(file).st_size < self._size:
                        os.ftruncate(file, self._size)
            except OSError:
                self._path.unlink(missing_ok=True)
                os.close(file)
                raise
            return file

    def _reserve(self, offset: int, length: int) -> bool:
        try:
            os.posix_fallocate(self._file, offset, length)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            return False
        return True


@contextmanager
def _exclusive_lock(file: int) -> Generator[None]:
    """Lock the file against other threads and processes. POSIX drops the lock when this process closes the file elsewhere; two
    samples may then overwrite each other, which their checksums reveal."""
    with _AMONG_THREADS:
        fcntl.lockf(file, fcntl.LOCK_EX, _HEAD_BYTES)
        try:
            yield
        finally:
            fcntl.lockf(file, fcntl.LOCK_UN, _HEAD_BYTES)


def _remove_stale(folder: Path) -> None:
    """Remove the files of killed processes."""
    for path in folder.glob(f"{_PREFIX}{os.getuid()}-*"):
        try:
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            if _try_exclusive(file):
                path.unlink(missing_ok=True)
        finally:
            os.close(file)


def _try_exclusive(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
