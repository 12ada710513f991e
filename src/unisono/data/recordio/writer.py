"""Write a ``.rec`` file with its two indexes, completely or not at all."""

from __future__ import annotations

import os
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from unisono.data.recordio.framing import frame_payload
from unisono.data.recordio.index import WRITTEN, encode_side_columns, map_file, text_index_path, write_index
from unisono.data.sidecar import PayloadInfo
from unisono.errors import DataError
from unisono.sanitize import listed, quoted
from unisono.storage.files import open_new, sync_folder, temporary_name, write_atomically

SideValues = float | NDArray[Any]


class RecordWriter:
    """Writes ``name.rec``, ``name.idx`` and ``name.uidx``; leaving the ``with`` block normally puts them in place.

    Records and MXNet's text index equal those of ``MXIndexedRecordIO``, byte for byte. The data is written under a
    temporary name and synced, then the indexes are written, then the data is renamed: a ``.rec`` file is always
    complete and indexed. After an exception the previous files remain.

    Args:
        path: The file, ``name.rec``.
        overwrite: Whether to replace an existing file.

    Raises:
        DataError: The file exists, or its suffix is that of an index.
    """

    def __init__(self, path: Path | str, *, overwrite: bool = False) -> None:
        self.path = Path(path)
        if self.path.suffix in (".idx", ".uidx"):
            raise _refused(f"{self.path} as the name of a RecordIO file", "its indexes would overwrite it")
        if os.path.exists(self.path) and not overwrite:
            raise _refused(f"{self.path}, which exists", "it was left as it is")
        self._temporary = temporary_name(self.path)
        self._file = open_new(self._temporary, buffering=1 << 20)
        self._hash = xxhash.xxh3_128()
        self._bytes = 0
        self._offsets, self._lengths, self._digests = array("Q"), array("I"), array("Q")
        self._split, self._keys = array("Q"), array("q")
        self._side: dict[str, list[Any]] = {}

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._commit()
        finally:
            self._file.close()
            self._temporary.unlink(missing_ok=True)  # exists only if it was not renamed

    def __len__(self) -> int:
        return len(self._offsets)

    def write(self, payload: bytes, *, key: int | None = None, side: Mapping[str, SideValues] | None = None) -> int:
        """Append a record and return its number.

        Args:
            payload: The bytes of the record, fewer than 2^29.
            key: The record's key in the text index. By default its number.
            side: Numbers or 1-d arrays stored with the record, with the same names for every record.

        Raises:
            DataError: The payload is too long, or the side columns have other names than before.
        """
        side = side or {}
        if self._offsets and side.keys() != self._side.keys():
            raise _refused(
                f"side values [{_names(side)}] for record {len(self)}, after [{_names(self._side)}]",
                "a column would have holes, so the record was not written",
            )
        pieces = frame_payload(payload)
        number = len(self._offsets)
        block = b"".join(pieces)
        self._file.write(block)
        self._hash.update(block)
        if len(pieces) > 3:
            self._split.append(number)
        self._offsets.append(self._bytes)
        self._lengths.append(len(payload))
        self._digests.append(xxhash.xxh3_64_intdigest(payload))
        self._keys.append(number if key is None else key)
        for name, value in side.items():
            self._side.setdefault(name, []).append(value)
        self._bytes += len(block)
        return number

    def _commit(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        keys = np.array(self._keys, np.int64)
        side = encode_side_columns(self._side)
        columns: dict[str, NDArray[Any]] = {
            "offset": np.array(self._offsets, np.uint64),
            "length": np.array(self._lengths, np.uint32),
            "digest": np.array(self._digests, np.uint64),
            "split": np.array(self._split, np.uint64),
            **({} if (keys == np.arange(len(keys))).all() else {"key": keys}),
            **side,
        }
        payload = PayloadInfo(bytes=self._bytes, dtype="|u1", xxh3_128=self._hash.hexdigest())
        write_index(self.path, payload, columns, map_file(self._temporary), checksums=WRITTEN)
        write_text_index(self.path, keys, columns["offset"])
        self._temporary.replace(self.path)
        sync_folder(self.path.parent)


def write_text_index(path: Path, keys: NDArray[np.int64], offsets: NDArray[np.uint64]) -> None:
    """MXNet's ``.idx``: a line of key, tab, offset per record."""
    rows = zip(keys.tolist(), offsets.tolist(), strict=True)
    write_atomically(text_index_path(path), "".join(f"{key}\t{offset}\n" for key, offset in rows).encode())


def _refused(given: str, consequence: str) -> DataError:
    return DataError(
        given=given,
        rule="a file is written once, under a new name ending in .rec, each record with the same side columns",
        consequence=consequence,
        nearest="another name, or overwrite=True to replace the existing file",
    )


def _names(side: Mapping[str, Any]) -> str:
    return listed(map(quoted, sorted(side)))
