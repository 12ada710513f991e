"""Read rows by number from mapped files. There is no cursor: threads, forks and several open files are safe."""

from __future__ import annotations

import itertools
import logging
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from unisono.data.mindrecord.encryption import open_bytes
from unisono.data.mindrecord.header import (
    LENGTH,
    LENGTH_BYTES,
    FieldType,
    MindRecordHeader,
    damaged_error,
    read_header,
    read_row_groups,
)
from unisono.data.mindrecord.index import index_path, locate_rows
from unisono.data.mindrecord.row_values import FieldTypeError, blob_reader, decode_scalars
from unisono.data.sidecar import view_of
from unisono.errors import DataError
from unisono.sanitize import quoted

_LOG: Final = logging.getLogger("unisono.data")


class MindRecordFile:
    """The rows of MindRecord files by number, file after file, in the order they were written.

    Args:
        path: One file, which opens all files of its set; or a list, which opens exactly these files.
        key: The key of MindSpore's ``set_enc_key``, for encrypted files.
        check: Whether to refuse values outside the type of their field, and scalars declared with a shape, which
            MindSpore loses; else they are read as stored. Lengths are always checked.

    Raises:
        DataError: Files, header and index do not match; while reading, a row is damaged.
    """

    def __init__(self, path: Path | str | Sequence[Path | str], *, key: str | None = None, check: bool = True) -> None:
        self._path, self._key, self._check = path, key, check
        names_set = isinstance(path, Path | str)
        paths = [Path(path)] if isinstance(path, Path | str) else [Path(file) for file in path]
        if not paths:
            raise _unfit("no files", "name the files, or one of a set")
        first = _ShardReader(paths[0], key)
        if names_set:
            paths = _set_of(first.path, first.head)
        shards = [first if file == first.path else _ShardReader(file, key) for file in paths]
        for number, shard in enumerate(shards):
            _same_set(shards[0], shard)
            if names_set and len(shards) > 1 and shard.head.shard_id != number:
                given = f"{shard.path}, which says it is file {shard.head.shard_id} of its set, as file {number}"
                raise _unfit(given, "the names that the files were written with")
        self._shards = shards
        # The first row of each file among all rows, [files + 1].
        self._starts = list(itertools.accumulate((shard.rows for shard in shards), initial=0))
        fields = first.head.fields
        for name, field in fields.items():
            if check and field.shape == ():
                raise _lost(first.path, name)
        blobs = first.head.blob_fields
        self._fields = fields
        self._scalars = {name: field for name, field in fields.items() if name not in blobs}
        self._read_blobs = blob_reader({name: fields[name] for name in blobs}, packed=first.head.packed)

    def __len__(self) -> int:
        return self._starts[-1]

    def __reduce__(self) -> tuple[Any, ...]:
        return _open, (self._path, self._key, self._check)

    @property
    def schema(self) -> dict[str, FieldType]:
        """Type and shape of each field by name."""
        return dict(self._fields)

    @property
    def paths(self) -> list[Path]:
        """The files, in the order of their rows."""
        return [shard.path for shard in self._shards]

    def read(self, number: int) -> dict[str, Any]:
        """One row: int, float, str, bytes and arrays by name; negative numbers count from the end."""
        if not -len(self) <= number < len(self):
            raise IndexError(f"row {number} of {len(self)}")
        number %= len(self)
        which = bisect_right(self._starts, number) - 1
        shard, row = self._shards[which], number - self._starts[which]
        raw, begin = shard.raw(row)
        try:
            values = decode_scalars(self._scalars, raw, check=self._check)
            blob, begin = shard.blob(row)
            values |= self._read_blobs(blob)
        except FieldTypeError as error:
            nearest = "check=False reads it as it is stored"
            raise damaged_error(shard.path, begin, str(error), row=row, nearest=nearest) from error
        except ValueError as error:
            raise damaged_error(shard.path, begin, str(error), row=row) from error
        return {name: values[name] for name in self._fields}

    __getitem__ = read

    def read_many(self, numbers: Sequence[int] | NDArray[np.integer[Any]]) -> list[dict[str, Any]]:
        """Many rows, in the given order."""
        places = np.asarray(numbers, np.int64)
        if places.ndim != 1:
            raise ValueError(f"row numbers have one dim, not shape {list(places.shape)}")
        return [self.read(number) for number in places.tolist()]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(self.read, range(len(self)))


class _ShardReader:
    """One file: its bytes, its header and the locations of its rows."""

    def __init__(self, path: Path, key: str | None) -> None:
        self.path = path
        self._data = open_bytes(path, key)
        self.head = read_header(path, self._data)
        groups = read_row_groups(path, self.head, len(self._data))
        self.rows = groups.total_rows
        index_file = index_path(path)
        decrypted = open_bytes(index_file, key) if key is not None and os.path.exists(index_file) else None
        places = locate_rows(path, self.head, groups, self._data, decrypted)
        self._raw_begins, self._raw_ends = view_of(places.raw_begins), view_of(places.raw_ends)
        self._blob_begins, self._blob_ends = view_of(places.blob_begins), view_of(places.blob_ends)

    def raw(self, row: int) -> tuple[memoryview, int]:
        """The scalars of a row, and their offset in the file."""
        return self._part(row, self._raw_begins[row], self._raw_ends[row])

    def blob(self, row: int) -> tuple[memoryview, int]:
        """The blobs of a row, and their offset in the file."""
        return self._part(row, self._blob_begins[row], self._blob_ends[row])

    def _part(self, row: int, begin: int, end: int) -> tuple[memoryview, int]:
        # MindSpore relies on the index and never reads the length in the page
        (length,) = LENGTH.unpack_from(self._data, begin)
        if length != end - begin - LENGTH_BYTES:
            difference = f"it says {length} bytes, and the index {end - begin - LENGTH_BYTES}"
            raise damaged_error(self.path, begin, difference, row=row)
        return self._data[begin + LENGTH_BYTES : end], begin


def _set_of(path: Path, head: MindRecordHeader) -> list[Path]:
    """All files of the set that a file belongs to."""
    names = head.shard_addresses
    if path.name in names:
        if any(name in ("", "..") or Path(name).name != name for name in names) or len(set(names)) != len(names):
            raise damaged_error(path, LENGTH_BYTES, f"the header names the files {names}, which are no names beside it")
        return [path.with_name(name) for name in names]
    if len(names) > 1:
        raise _unfit(
            f"{path}, which is one of the {len(names)} files {names[0]} to {names[-1]} under another name",
            "give the files as a list, or the names that they were written with",
        )
    _LOG.warning("%s was written as %s", path, names[0])
    return [path]


def _same_set(first: _ShardReader, other: _ShardReader) -> None:
    one, two = (
        (shard.head.version, shard.head.header_size, shard.head.page_size, shard.head.fields, shard.head.blob_fields)
        for shard in (first, other)
    )
    if one != two:
        raise _unfit(
            f"{other.path}, whose version, sizes or fields are not those of {first.path}", "read the two by themselves"
        )


def _lost(path: Path, name: str) -> DataError:
    return DataError(
        given=f"{path}: field {quoted(name)} has the shape []",
        rule="MindSpore does not store the numbers of such a field",
        consequence="its values are lost, and nothing of the file is used",
        nearest="check=False reads what bytes there are, and all other fields as they are",
    )


def _unfit(given: str, nearest: str) -> DataError:
    return DataError(
        given=given,
        rule="files are read together when they were written together, or are listed and have the same fields",
        consequence="nothing was read",
        nearest=nearest,
    )


def _open(path: Any, key: str | None, check: bool) -> MindRecordFile:
    return MindRecordFile(path, key=key, check=check)
