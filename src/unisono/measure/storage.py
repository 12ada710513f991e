"""Speed of a folder: a large file written through and read back, and many small files opened. No torch."""

from __future__ import annotations

import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from unisono.measure.calibration import StorageRate
from unisono.storage.files import open_new, open_regular

_FILE_BYTES: Final = 32 << 20
_WRITES: Final = 3
_SMALL_FILES: Final = 200
_SMALL_BYTES: Final = 4096
_BLOCK_BYTES: Final = 1 << 20


def probe_storage(folder: Path, *, file_bytes: int = _FILE_BYTES, budget_s: float = 5.0) -> StorageRate:
    """Measure ``folder``, which has to exist, with files in a temporary folder there that is removed again.

    Args:
        file_bytes: Size of the large file.
        budget_s: It is written up to three times, and once more only while these seconds have not passed.

    Raises:
        OSError: It cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix=".unisono-measure-", dir=folder) as name:
        probe = Path(name)
        began = time.perf_counter()
        write_s: list[float] = []
        while len(write_s) < _WRITES and (not write_s or time.perf_counter() - began < budget_s):
            write_s.append(timed_write(probe / f"large-{len(write_s)}", file_bytes))
        last = probe / f"large-{len(write_s) - 1}"
        read_s = _timed(lambda: _read(last))
        small = [probe / f"small-{number}" for number in range(_SMALL_FILES)]
        for each in small:
            with open_new(each) as file:
                file.write(bytes(_SMALL_BYTES))
        open_s = _timed(lambda: [_read(each) for each in small])
        median_s = statistics.median(write_s)
        return StorageRate(
            host=socket.gethostname(),
            folder=str(folder.resolve()),
            write_bytes_per_s=file_bytes / median_s,
            read_bytes_per_s=file_bytes / read_s,
            opens_per_s=_SMALL_FILES / open_s,
            spread_frac=(max(write_s) - min(write_s)) / median_s,
            at_s=time.time(),
        )


def timed_write(path: Path, nbytes: int) -> float:
    """Seconds that a new file of ``nbytes`` takes to be written through to the disk."""
    data = os.urandom(nbytes)  # what compresses would be faster on some file systems

    def write() -> None:
        with open_new(path) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    return _timed(write)


def _read(path: Path) -> None:
    with open_regular(path, buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while file.read(_BLOCK_BYTES):
            pass


def _timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return max(time.perf_counter() - begin, 1e-9)
