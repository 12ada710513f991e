"""Files behind a URL, read in ranges into a permanent sparse local copy.

The copy has the size of the file and is mapped like a local file. Blocks are fetched when one of their records is first read,
many per request if the store can; one byte per block marks those present. Processes may share a copy: they write the same
bytes. Its folder is named by the store's own key of the file, so a changed file gets a new copy.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from unisono.data.sidecar import map_array
from unisono.errors import DataError, UnisonoError
from unisono.sanitize import without_credentials
from unisono.storage.address import failure_text, open_address, public_cause
from unisono.storage.files import write_atomically
from unisono.storage.ownership import make_own_folder

BLOCK_BYTES: Final = 1 << 20
_BLOCKS_AT_ONCE: Final = 64  # per request: limits the memory of fetched blocks


def is_url(path: Path | str) -> bool:
    """Whether ``path`` names a file behind a URL rather than a local one."""
    return isinstance(path, str) and "://" in path


class RemoteFile:
    """One file of any fsspec filesystem (``s3://``, ``gs://``, ``https://``, …). ``path`` and ``bytes`` are the copy and its
    mapping, which is zero where ``ensure`` has not fetched it. Raises DataError if the store does not answer,
    ExtraError without its package."""

    def __init__(self, url: str, cache_dir: Path) -> None:
        self.url = url
        self._connect()
        try:
            info = self._fs.info(self._path)
            key = f"{without_credentials(url)}\0{self._fs.ukey(self._path)}\0{info['size']}"
        except Exception as error:  # every store has its own errors
            raise _unreachable(url, error) from public_cause(error, url)
        self.size = int(info["size"])
        self.folder = cache_dir / xxhash.xxh3_128(key.encode()).hexdigest()
        make_own_folder(cache_dir, option="cache_dir")
        make_own_folder(self.folder, option="cache_dir")
        self.path = self.folder / "data.rec"
        count = -(-self.size // BLOCK_BYTES)
        self._data = _sparse(self.path, self.size)
        self._blocks = _sparse(self.folder / "blocks", count)
        self.bytes = map_array(self.path, "|u1", count=self.size)
        self._present = map_array(self.folder / "blocks", "|u1", count=count)
        weakref.finalize(self, _close, self._data, self._blocks)

    def ensure(self, begins: Sequence[int] | NDArray[Any], ends: Sequence[int] | NDArray[Any]) -> None:
        """Fetch the missing blocks of the byte ranges ``[begins[i], ends[i])``."""
        first = np.asarray(begins, np.int64) // BLOCK_BYTES
        last = np.minimum(np.asarray(ends, np.int64) - 1, self.size - 1) // BLOCK_BYTES
        wanted = np.unique(np.concatenate([np.arange(a, b + 1) for a, b in zip(first, last, strict=True)] or [first]))
        missing = wanted[self._present[wanted] == 0].tolist() if wanted.size else []
        for group in range(0, len(missing), _BLOCKS_AT_ONCE):
            self._fetch(missing[group : group + _BLOCKS_AT_ONCE])

    def _fetch(self, missing: list[int]) -> None:
        starts = [block * BLOCK_BYTES for block in missing]
        stops = [min(start + BLOCK_BYTES, self.size) for start in starts]
        if self._pid != os.getpid():
            self._connect()  # a store's connections and their thread do not survive a fork
        try:
            contents = self._fs.cat_ranges([self._path] * len(missing), starts, stops, on_error="raise")
        except Exception as error:
            raise _unreachable(self.url, error) from public_cause(error, self.url)
        for block, start, stop, content in zip(missing, starts, stops, contents, strict=True):
            if len(content) != stop - start:
                raise _unreachable(self.url, EOFError(f"bytes {start} to {stop}: {len(content)} came"))
            _write(self._data, content, start)
            _write(self._blocks, b"\1", block)  # after the block itself

    def forget(self, begin: int, end: int) -> None:
        """Mark the blocks of a range as missing, so that they are fetched again."""
        for block in range(begin // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
            _write(self._blocks, b"\0", block)

    def fetch_small_file(self, url: str, name: str) -> Path | None:
        """Copy a small file of the same store to ``name`` in the copy's folder; None if it does not exist."""
        _, path = _filesystem(url)
        target = self.folder / name
        if not target.exists():
            try:
                content = self._fs.cat_file(path)
            except FileNotFoundError:
                return None
            except Exception as error:
                raise _unreachable(url, error) from public_cause(error, url)
            write_atomically(target, content, mode=0o600)
        return target

    def _connect(self) -> None:
        self._pid = os.getpid()
        try:
            self._fs, self._path = _filesystem(self.url)
        except UnisonoError:
            raise
        except Exception as error:  # every store has its own errors
            raise _unreachable(self.url, error) from public_cause(error, self.url)


def _filesystem(url: str) -> tuple[Any, str]:
    return open_address(url, f"the address {url!r}", skip_instance_cache=True)


def _sparse(path: Path, size: int) -> int:
    """Open a sparse file of ``size`` bytes."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    if os.fstat(handle).st_size != size:
        os.ftruncate(handle, size)
    return handle


def _close(*handles: int) -> None:
    for handle in handles:
        os.close(handle)


def _write(handle: int, content: bytes, offset: int) -> None:
    view = memoryview(content)
    while view:
        written = os.pwrite(handle, view, offset)
        view, offset = view[written:], offset + written


def _unreachable(url: str, error: Exception) -> DataError:
    return DataError(
        given=f"{url}: {failure_text(error, url)}",
        rule="a file behind a URL is read in ranges through fsspec",
        consequence="the records asked for are not there",
        nearest="check address, access rights and network",
    )
