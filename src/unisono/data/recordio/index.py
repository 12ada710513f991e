"""The index of a ``.rec`` file: offsets, checksums, keys and side columns of its records.

``name.uidx`` beside ``name.rec`` is a sidecar (``data.sidecar``) with the columns

    offset  u8  [records]  of the record's first magic word
    length  u4  [records]  bytes of its payload
    digest  u8  [records]  xxh3-64 of its payload
    split   u8             numbers of the records with more than one part
    key     i8  [records]  keys of ``name.idx``; absent if they are 0, 1, 2, …
    side.*      [records]  side columns: any number, or short array, per record, such as labels and image sizes

A side column of arrays has the concatenated arrays in ``side.NAME``, and their ends in ``ends.NAME`` u8 [records].

``name.idx`` is MXNet's text index; if it exists, it defines the records and their order. A missing sidecar is made by reading the
file once. Its checksums are marked as computed later: they reveal damage since then, not before.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from unisono.data.recordio.framing import FramingDamage, RecordExtents, assemble_records, find_parts, join_parts
from unisono.data.sidecar import COLUMN_DTYPES, PayloadInfo, Sidecar, map_array, open_sidecar, view_of, write_sidecar
from unisono.errors import DataError
from unisono.sanitize import quoted
from unisono.storage.files import require_regular

KIND: Final = "recordio"
WRITTEN, COMPUTED = "written", "computed later"
ENDS_BYTES: Final = 4096
_LOG: Final = logging.getLogger("unisono.data")
SIDE_PREFIX: Final = "side."
ENDS_PREFIX: Final = "ends."


class RaggedColumn:
    """One array per record; ``column[i]`` is a read-only view. Indexing raises DataError for ends outside the column."""

    def __init__(self, name: str, values: NDArray[Any], ends: NDArray[np.uint64]) -> None:
        self._name, self._values, self._ends = name, values, ends

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, number: int) -> NDArray[Any]:
        low, high = int(self._ends[number - 1]) if number else 0, int(self._ends[number])
        if not 0 <= low <= high <= len(self._values):
            raise DataError(
                given=f"side column {quoted(self._name)}: record {number} has values {low} to {high} of {len(self._values)}",
                rule="the values of the records follow each other inside the column",
                consequence="the sidecar is damaged, and this record's values are unknown",
                nearest="unisono data verify FILE; a sidecar made anew by reindex has no side columns",
            )
        return self._values[low:high]

    def tolist(self) -> list[NDArray[Any]]:
        """The arrays of all records."""
        return [self[number] for number in range(len(self))]


SideColumn = NDArray[Any] | RaggedColumn


def encode_side_columns(side: Mapping[str, Sequence[Any]]) -> dict[str, NDArray[Any]]:
    """Sidecar columns of side values per record: int64 if all are integers, else float64, or arrays as they are."""
    columns: dict[str, NDArray[Any]] = {}
    for name, values in side.items():
        if any(isinstance(value, np.ndarray) and value.ndim for value in values):
            columns |= _stored_arrays(name, values)
            continue
        column = np.array(values, np.int64 if all(isinstance(value, int) for value in values) else np.float64)
        if column.ndim != 1:
            raise _refused(f"side values {quoted(name)} of shape {list(column.shape[1:])}")
        columns[SIDE_PREFIX + name] = column
    return columns


def decode_side_columns(columns: Mapping[str, NDArray[Any]]) -> dict[str, SideColumn]:
    """The inverse of ``encode_side_columns``."""
    names = [name.removeprefix(SIDE_PREFIX) for name in columns if name.startswith(SIDE_PREFIX)]
    return {
        name: RaggedColumn(name, columns[SIDE_PREFIX + name], columns[ENDS_PREFIX + name])
        if ENDS_PREFIX + name in columns
        else columns[SIDE_PREFIX + name]
        for name in names
    }


def _stored_arrays(name: str, values: Sequence[Any]) -> dict[str, NDArray[Any]]:
    arrays = [np.asarray(value) for value in values]
    kinds = {(array.dtype.newbyteorder("<").str, array.ndim) for array in arrays}
    if len(kinds) != 1 or next(iter(kinds))[1] != 1 or next(iter(kinds))[0] not in COLUMN_DTYPES:
        raise _refused(f"side values {quoted(name)} of {sorted(kinds)} (dtype, dimensions)")
    ends = np.cumsum([len(array) for array in arrays], dtype=np.uint64)
    return {SIDE_PREFIX + name: np.concatenate(arrays), ENDS_PREFIX + name: ends}


def _refused(given: str) -> DataError:
    return DataError(
        given=given,
        rule=f"a side value is a number, or for every record a 1-d array of one of {', '.join(COLUMN_DTYPES)}",
        consequence="the file was not written",
        nearest="flatten it, or make it part of the payload",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordIndex:
    """Columns of one file, each [records], as views of the mapped sidecar if there is one. ``keys`` None means 0, 1, 2, …"""

    offsets: NDArray[np.uint64]
    lengths: NDArray[np.uint32]
    digests: NDArray[np.uint64]
    split: NDArray[np.uint64]
    keys: NDArray[np.int64] | None
    side: dict[str, SideColumn]
    checksums: str
    fingerprint: str


def sidecar_path(path: Path) -> Path:
    """The path of a file's sidecar, ``name.uidx`` beside ``name.rec``."""
    return path.with_suffix(".uidx")


def text_index_path(path: Path) -> Path:
    """The path of a file's text index, ``name.idx`` beside ``name.rec``."""
    return path.with_suffix(".idx")


def open_index(path: Path, data: NDArray[np.uint8]) -> RecordIndex:
    """Open the index of ``path``, whose bytes are ``data``: O(1) with a sidecar; else the file is read and the sidecar written.

    Raises DataError for a sidecar of another file, or a damaged file; an existing sidecar is never replaced.
    """
    if os.path.exists(sidecar_path(path)):
        return _from_sidecar(open_sidecar(sidecar_path(path), kind=KIND), path, data)
    _LOG.info("%s has no sidecar: reading all of it once to make one", path)
    columns, payload = read_columns(path, data)
    try:
        write_index(path, payload, columns, data, checksums=COMPUTED)
    except OSError as error:
        _LOG.warning("%s cannot be written (%s): it is made again each time", sidecar_path(path), error.strerror)
        return _index(columns, COMPUTED, payload.xxh3_128)
    return _from_sidecar(open_sidecar(sidecar_path(path), kind=KIND), path, data)


def read_columns(path: Path, data: NDArray[np.uint8]) -> tuple[dict[str, NDArray[Any]], PayloadInfo]:
    """Compute the columns by reading the file. Raises DataError with the offset of the first damage."""
    records, damage = assemble_records(data, find_parts(data))
    if damage:
        raise damaged_error(path, damage[0], len(damage))
    keys, order = _text_index(path, records)
    digests = np.fromiter(_digests(data, records), np.uint64, len(records.offsets))
    numbers = {int(number) for number in records.split}
    place = np.arange(len(records.offsets)) if order is None else order
    columns: dict[str, NDArray[Any]] = {
        "offset": records.offsets[place].astype(np.uint64),
        "length": records.lengths[place].astype(np.uint32),
        "digest": digests[place],
        "split": np.array([i for i, number in enumerate(place.tolist()) if number in numbers], np.uint64)
        if numbers
        else np.empty(0, np.uint64),
    }
    if keys is not None:
        columns["key"] = keys
    return columns, payload_of(data)


def payload_of(data: NDArray[np.uint8]) -> PayloadInfo:
    """Size and digest of the whole file."""
    return PayloadInfo(bytes=len(data), dtype="|u1", xxh3_128=xxhash.xxh3_128(view_of(data)).hexdigest())


def write_index(
    path: Path, payload: PayloadInfo, columns: Mapping[str, NDArray[Any]], data: NDArray[np.uint8], *, checksums: str
) -> None:
    """Write the sidecar of ``path``, whose bytes are ``data``; a digest of both ends identifies the file."""
    facts = {"checksums": checksums, "ends": _ends_digest(data)}
    write_sidecar(sidecar_path(path), kind=KIND, payload=payload, columns=columns, facts=facts)


def damaged_error(path: Path, damage: FramingDamage, count: int) -> DataError:
    """The error for a damaged file; ``damage`` is the first of ``count`` places."""
    more = f" (the first of {count} places)" if count > 1 else ""
    return DataError(
        given=f"{path}: {damage.what}{more}",
        rule="every byte of a RecordIO file belongs to a record",
        consequence=f"bytes {damage.offset} to {damage.end} cannot be read, and nothing of the file is used",
        nearest=f"unisono data verify {path} lists all damage, unisono data repair {path} NEW saves what is whole",
    )


def _from_sidecar(sidecar: Sidecar, path: Path, data: NDArray[np.uint8]) -> RecordIndex:
    head = sidecar.head
    if head.payload.bytes != len(data):
        raise _stale(path, f"has {len(data)} bytes where its sidecar says {head.payload.bytes}")
    if head.facts.get("ends") != _ends_digest(data):
        raise _stale(path, "does not begin or end with the bytes that its sidecar says")
    columns = sidecar.columns
    expected = {"offset": "<u8", "length": "<u4", "digest": "<u8", "split": "<u8"}
    optional = {"key": "<i8"}
    count = len(columns.get("offset", ()))
    for name, column in columns.items():
        side_dtype = {SIDE_PREFIX: column.dtype.str, ENDS_PREFIX: "<u8"}.get(name[: len(SIDE_PREFIX)], "")
        # these have another length than the records
        any_length = name == "split" or ENDS_PREFIX + name.removeprefix(SIDE_PREFIX) in columns
        if column.dtype.str != (expected | optional).get(name, side_dtype) or not (any_length or len(column) == count):
            raise _stale(
                path, f"has a sidecar with column {quoted(name)} of {len(column)} {column.dtype} for {count} records"
            )
    if len(data) and not count and expected.keys() <= columns.keys():  # made from an empty .idx by an earlier version
        raise _stale(path, f"has {len(data)} bytes, and its sidecar no record")
    if not expected.keys() <= columns.keys():
        raise _stale(path, f"has a sidecar without {', '.join(sorted(expected.keys() - columns.keys()))}")
    return _index(columns, str(head.facts.get("checksums")), sidecar.digest)


def _index(columns: Mapping[str, NDArray[Any]], checksums: str, fingerprint: str) -> RecordIndex:
    return RecordIndex(
        offsets=columns["offset"],
        lengths=columns["length"],
        digests=columns["digest"],
        split=columns["split"],
        keys=columns.get("key"),
        side=decode_side_columns(columns),
        checksums=checksums,
        fingerprint=fingerprint,
    )


def _ends_digest(data: NDArray[np.uint8]) -> str:
    ends = data[:ENDS_BYTES].tobytes() + data[max(0, len(data) - ENDS_BYTES) :].tobytes()
    return xxhash.xxh3_64(ends).hexdigest()


def _digests(data: NDArray[np.uint8], records: RecordExtents) -> Iterator[int]:
    view = view_of(data)
    split = set(records.split.tolist())
    digest = xxhash.xxh3_64_intdigest
    rows = zip(records.offsets.tolist(), records.lengths.tolist(), strict=True)
    for number, (offset, length) in enumerate(rows):
        yield digest(join_parts(view, offset) if number in split else view[offset + 8 : offset + 8 + length])


def _text_index(path: Path, records: RecordExtents) -> tuple[NDArray[np.int64] | None, NDArray[np.int64] | None]:
    """Keys and record numbers in the order of ``name.idx``; (None, None) if it is missing, or lists all records as 0, 1, 2, …"""
    source = text_index_path(path)
    if not os.path.exists(source):
        return None, None
    try:
        require_regular(source)
    except OSError as error:
        raise _bad_text_index(source, str(error.strerror)) from error
    if source.stat().st_size == 0:
        if len(records.offsets):
            raise _empty_text_index(source, len(records.offsets))
        rows = np.empty((0, 2), np.int64)
    else:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                rows = np.loadtxt(source, np.int64, delimiter="\t", ndmin=2, comments=None)
        except (ValueError, UserWarning) as error:
            raise _bad_text_index(source, str(error)) from error
    if rows.shape[1] != 2:
        raise _bad_text_index(source, f"{rows.shape[1]} columns")
    place = np.searchsorted(records.offsets, rows[:, 1])
    known = place < len(records.offsets)
    known[known] = records.offsets[place[known]] == rows[known, 1]
    if not known.all():
        line = int(np.argmin(known))
        raise _bad_text_index(source, f"line {line + 1} says offset {rows[line, 1]}, where no record begins")
    plain = len(rows) == len(records.offsets) and bool((place == np.arange(len(rows))).all())
    keys = rows[:, 0]
    if plain and bool((keys == np.arange(len(rows))).all()):
        return None, None
    return keys, place


def _bad_text_index(path: Path, what: str) -> DataError:
    return DataError(
        given=f"{path}: {what}",
        rule="each line of an .idx file is an integer key, a tab and the offset of a record",
        consequence="keys would lead to other records, so nothing is used",
        nearest=f"unisono data reindex {path.with_suffix('.rec')} writes it anew from the records",
    )


def _empty_text_index(path: Path, records: int) -> DataError:
    return DataError(
        given=f"{path} is empty, beside a file of {records} record(s)",
        rule="an .idx file, if there is one, names the records to read",
        consequence="all records would be left out, so nothing is used",
        nearest=f"remove it: the records are then read in order; or unisono data reindex {path.with_suffix('.rec')}",
    )


def _stale(path: Path, what: str) -> DataError:
    return DataError(
        given=f"{path} {what}",
        rule="a sidecar is of exactly the file beside it",
        consequence="one of the two was changed or damaged, and nothing of the file is used",
        nearest=f"unisono data verify {path} lists the damaged records; "
        f"unisono data reindex {path} trusts the file as it is",
    )


def map_file(path: Path) -> NDArray[np.uint8]:
    """All bytes of a file, mapped read-only. Raises DataError."""
    try:
        require_regular(path)  # a pipe would pass for an empty file
        return map_array(path, "|u1", count=path.stat().st_size)
    except OSError as error:
        raise DataError(
            given=f"{path}: {error.strerror}",
            rule="a RecordIO file is a file that can be read",
            consequence="nothing was opened",
            nearest="the path of a .rec file",
        ) from error
