"""Verify, repair, reindex and reshard ``.rec`` files. Files are never changed in place, and every loss is reported."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from unisono.data.cleaning_record import write_cleaning_file
from unisono.data.recordio.framing import (
    HEAD_BYTES,
    MAGIC,
    PART_HEAD,
    FramingDamage,
    RecordExtents,
    assemble_records,
    find_parts,
    join_parts,
    padded_length,
)
from unisono.data.recordio.index import (
    COMPUTED,
    ENDS_PREFIX,
    KIND,
    SIDE_PREFIX,
    decode_side_columns,
    map_file,
    payload_of,
    read_columns,
    sidecar_path,
    text_index_path,
    write_index,
)
from unisono.data.recordio.reader import RecordFile
from unisono.data.recordio.writer import RecordWriter, SideValues, write_text_index
from unisono.data.sidecar import Sidecar, damaged_columns, open_sidecar, view_of
from unisono.errors import DataError
from unisono.sanitize import quoted
from unisono.storage.limits import MAX_LIST_BYTES, LimitError, read_limited

_TEXT_INDEX_ROW: Final = re.compile(rb"(-?[0-9]{1,19})\t([0-9]{1,19})")


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Damaged bytes ``offset`` to ``end`` of ``path``; each number is -1 if unknown."""

    path: Path
    what: str
    offset: int = -1
    end: int = -1
    record: int = -1

    def __str__(self) -> str:
        record = "" if self.record < 0 else f" record {self.record}"
        if self.offset < 0:
            return f"{self.path}: {self.what}"
        return f"{self.path}:{record} offset {self.offset} to {self.end}: {self.what}"


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyReport:
    """``checksums``: ``written``, ``computed later``, or empty if there are none and only the framing was checked."""

    records: int
    bytes: int
    checksums: str
    findings: list[Finding]


@dataclass(frozen=True, kw_only=True, slots=True)
class RepairReport:
    """``lost``: stretches of the old file, and records if known, that were not saved."""

    saved: int
    mended: int
    lost: list[Finding]


def verify(path: Path) -> VerifyReport:
    """Read every byte of a file and its indexes and report all damage. Raises DataError only if there is no file.

    An index that leaves all records out is reported too: no line or checksum of it is wrong.
    """
    data = map_file(path)
    records, damage = assemble_records(data, find_parts(data))
    findings = [Finding(path=path, offset=d.offset, end=d.end, what=d.what) for d in damage]
    sidecar, broken = _sidecar(path)
    findings += broken
    checksums = ""
    if sidecar is not None:
        checksums = str(sidecar.head.facts.get("checksums", ""))
        if payload_of(data) != sidecar.head.payload:
            bad = list(_bad_records(path, data, sidecar))
            bad_ranges = [(f.offset, f.end) for f in bad]
            # damage that the checksums assign to a record is not reported again as damaged framing
            findings = bad + [
                f for f in findings if f.path != path or not any(a < f.end and f.offset < b for a, b in bad_ranges)
            ]
            if not findings:
                findings.append(Finding(path=path, offset=0, end=len(data), what="bytes between records have changed"))
    # a line that points into damaged bytes may be right; with a sidecar the starts of records are known
    known_offsets = records.offsets if sidecar is None else sidecar.columns["offset"]
    stretches = [(d.offset, d.end) for d in damage] if sidecar is None else []
    findings += _text_index_findings(path, set(known_offsets.tolist()), stretches)
    count = len(known_offsets)
    index = text_index_path(path)
    if len(data) and not count and not findings:
        findings.append(Finding(path=sidecar_path(path), what="it has no record, which leaves out all of the file"))
    if len(data) and os.path.isfile(index) and not index.stat().st_size:
        findings.append(Finding(path=index, what="it is empty, which leaves out all records"))
    return VerifyReport(records=count, bytes=len(data), checksums=checksums, findings=findings)


def repair(path: Path, target: Path) -> RepairReport:
    """Write the records of ``path`` that can be saved to ``target``, in order, with keys and side columns if known.

    With a sidecar, a record is saved if its checksum is found, anywhere in the file and with any head. Without one, it is saved
    if its framing is intact, or only its magic word is damaged. Raises DataError, and writes nothing, if none can be saved.
    """
    if os.path.abspath(path) == os.path.abspath(target):
        raise DataError(
            given=f"repair of {path} into itself",
            rule="what is damaged is evidence: it stays as it is",
            consequence="nothing was written",
            nearest=f"{path.with_name(path.stem + '-repaired.rec')}",
        )
    data = map_file(path)
    records, damage = assemble_records(data, find_parts(data))
    sidecar, _ = _sidecar(path)
    with RecordWriter(target) as writer:
        if sidecar is None:
            report = _repair_by_framing(path, data, records, damage, writer)
        else:
            report = _repair_by_checksum(path, data, records, sidecar, writer)
        if not report.saved:
            raise DataError(  # inside the block, so that no file is written
                given=f"{path}, {len(data):,} bytes in which no record was found",
                rule="repair copies the records whose checksum or framing is intact",
                consequence="nothing was written",
                nearest="a whole copy of the file, or the source that it was written from",
            )
    write_cleaning_file(target, [path])
    return report


def reindex(path: Path) -> list[str]:
    """Rewrite both indexes of ``path``, trusting the file as it is. Returns what was lost of the old ones."""
    data = map_file(path)
    dropped: list[str] = []
    old, broken = _sidecar(path)
    if broken:
        dropped.append(f"the old sidecar: {broken[0].what}")
    try:
        columns, payload = read_columns(path, data)
    except DataError as error:
        if not os.path.exists(text_index_path(path)) or not str(error).startswith(str(text_index_path(path))):
            raise
        dropped.append(f"keys: {error.problems[0].given}")
        backup = text_index_path(path).with_suffix(".idx.old")
        text_index_path(path).rename(backup)
        columns, payload = read_columns(path, data)
    if old is not None and np.array_equal(old.columns["offset"], columns["offset"]):
        columns |= {
            name: np.array(column)
            for name, column in old.columns.items()
            if name.startswith((SIDE_PREFIX, ENDS_PREFIX))
        }
    elif old is not None and any(name.startswith(SIDE_PREFIX) for name in old.columns):
        dropped.append("side columns: they belong to other records")
    count = len(columns["offset"])
    write_index(path, payload, columns, data, checksums=COMPUTED)
    write_text_index(path, columns.get("key", np.arange(count)), columns["offset"])
    return dropped


def rearrange(sources: Sequence[Path], prefix: Path, shards: int) -> list[Path]:
    """Write all records of ``sources``, in order, to ``shards`` files ``prefix-00000-of-00004.rec`` of equal size (± 1 record).

    Keys are preserved if they are unique, else renumbered; side columns are preserved if all files have the same.
    """
    files = [RecordFile(source) for source in sources]
    total = sum(len(file) for file in files)
    if not 1 <= shards <= total:
        raise DataError(
            given=f"{shards} shards of {total} records",
            rule="a shard holds at least one record",
            consequence="nothing was written",
            nearest=f"{min(max(1, shards), total)} shards" if total else "files that hold records",
        )
    keys = np.concatenate([np.asarray(file.keys, np.int64) for file in files])
    if len(np.unique(keys)) < total:
        keys = np.arange(total)
    names = set(files[0].side) if all(set(file.side) == set(files[0].side) for file in files) else set[str]()
    rows = chain.from_iterable(_rows(file, names) for file in files)
    paths = [prefix.with_name(f"{prefix.name}-{number:05d}-of-{shards:05d}.rec") for number in range(shards)]
    with ExitStack() as stack:
        begin = 0
        writers = [stack.enter_context(RecordWriter(path)) for path in paths]
        for number, writer in enumerate(writers):
            stop = (number + 1) * total // shards
            for place in range(begin, stop):
                payload, side = next(rows)
                writer.write(payload, key=int(keys[place]), side=side)
            begin = stop
    for path in paths:
        write_cleaning_file(path, sources)
    return paths


def _rows(file: RecordFile, names: set[str]) -> Iterator[tuple[bytes, Mapping[str, SideValues]]]:
    columns = {name: file.side[name].tolist() for name in sorted(names)}
    for number, payload in enumerate(file):
        yield payload, {name: values[number] for name, values in columns.items()}


def _sidecar(path: Path) -> tuple[Sidecar | None, list[Finding]]:
    """The sidecar if it exists and is undamaged, and its damage otherwise."""
    sidecar_file = sidecar_path(path)
    if not os.path.exists(sidecar_file):
        return None, []
    try:
        sidecar = open_sidecar(sidecar_file, kind=KIND)
    except DataError as error:
        return None, [
            Finding(path=sidecar_file, offset=0, end=sidecar_file.stat().st_size, what=error.problems[0].given)
        ]
    bad: list[Finding] = []
    for name in damaged_columns(sidecar):
        begin = sidecar.head.columns[name].offset
        what = f"column {quoted(name)} does not match its digest, so the checksums cannot be used"
        bad.append(Finding(path=sidecar_file, offset=begin, end=begin + sidecar.columns[name].nbytes, what=what))
    return (None if bad else sidecar), bad


def _payload(data: memoryview, offset: int, length: int, split: bool) -> bytes | memoryview | None:
    """The bytes at a record's position, without checking its head unless it is split; None beyond the end of the file."""
    if split:
        try:
            return join_parts(data, offset)
        except ValueError:
            return None
    end = offset + HEAD_BYTES + length
    return data[offset + HEAD_BYTES : end] if end <= len(data) else None


def _by_checksum(
    data: NDArray[np.uint8], sidecar: Sidecar
) -> Iterator[tuple[int, int, int, bytes | memoryview | None]]:
    """(number, offset, end, payload) of every record of the sidecar; payload is None if its checksum does not match."""
    view = view_of(data)
    columns = sidecar.columns
    split = set(columns["split"].tolist())
    rows = zip(*(columns[name].tolist() for name in ("offset", "length", "digest")), strict=True)
    for number, (offset, length, digest) in enumerate(rows):
        payload = _payload(view, offset, length, number in split)
        whole = payload is not None and xxhash.xxh3_64_intdigest(payload) == digest
        end = offset + HEAD_BYTES + padded_length(length)
        yield number, offset, end, payload if whole else None


def _bad_records(path: Path, data: NDArray[np.uint8], sidecar: Sidecar) -> Iterator[Finding]:
    split = set(sidecar.columns["split"].tolist())
    for number, offset, end, payload in _by_checksum(data, sidecar):
        if payload is None:
            what = "the bytes do not have their checksum" if end <= len(data) else f"the file ends at {len(data)}"
            yield Finding(path=path, record=number, offset=offset, end=min(end, len(data)), what=what)
        elif number not in split and data[offset : offset + 8].tobytes() != PART_HEAD.pack(MAGIC, len(payload)):
            yield Finding(path=path, record=number, offset=offset, end=offset + 8, what="its head has changed")
        elif number not in split and data[offset + 8 + len(payload) : end].any():
            begin = offset + 8 + len(payload)
            yield Finding(path=path, record=number, offset=begin, end=end, what="its padding has changed")


def _repair_by_checksum(
    path: Path, data: NDArray[np.uint8], records: RecordExtents, sidecar: Sidecar, writer: RecordWriter
) -> RepairReport:
    view = view_of(data)
    # records that moved are found by checksum among those with intact framing
    moved: dict[int, int] = {}
    split = set(records.split.tolist())
    for place, (offset, length) in enumerate(zip(records.offsets.tolist(), records.lengths.tolist(), strict=True)):
        payload = _payload(view, offset, length, place in split)
        if payload is not None:
            moved.setdefault(xxhash.xxh3_64_intdigest(payload), place)
    keys: Any = sidecar.columns.get("key", range(len(sidecar.columns["offset"])))
    side = {name: column.tolist() for name, column in decode_side_columns(sidecar.columns).items()}
    digests = sidecar.columns["digest"].tolist()
    parted = set(sidecar.columns["split"].tolist())
    lost: list[Finding] = []
    mended = 0
    for number, offset, end, in_place in _by_checksum(data, sidecar):
        payload = in_place
        if payload is None and digests[number] in moved:
            place = moved[digests[number]]
            payload = _payload(view, int(records.offsets[place]), int(records.lengths[place]), place in split)
        if payload is None:
            what = "no bytes of the file have its checksum"
            lost.append(Finding(path=path, record=number, offset=offset, end=end, what=what))
            continue
        mended += in_place is None or (
            number not in parted and data[offset : offset + 8].tobytes() != PART_HEAD.pack(MAGIC, len(in_place))
        )
        values = {name: column[number] for name, column in side.items()}
        writer.write(bytes(payload), key=int(keys[number]), side=values)
    return RepairReport(saved=len(writer), mended=mended, lost=lost)


def _repair_by_framing(
    path: Path, data: NDArray[np.uint8], records: RecordExtents, damage: Sequence[FramingDamage], writer: RecordWriter
) -> RepairReport:
    view = view_of(data)
    split = set(records.split.tolist())
    keys = dict(_text_index_rows(path))
    fresh = max(keys.values(), default=-1) + 1

    def save(offset: int, payload: bytes) -> None:
        nonlocal fresh
        if keys and offset not in keys:
            keys[offset], fresh = fresh, fresh + 1
        writer.write(payload, key=keys.get(offset))

    places = iter(zip(records.offsets.tolist(), records.lengths.tolist(), strict=True))
    gaps = {d.offset: d for d in damage}
    mended, lost, at, number = 0, list[Finding](), 0, 0
    while at < len(data):
        if at in gaps:
            gap = gaps[at]
            restored = _chain(view, gap.offset, gap.end)
            for offset, payload in restored:
                save(offset, payload)
            mended += len(restored)
            if not restored:
                lost.append(Finding(path=path, offset=gap.offset, end=gap.end, what=gap.what))
            at = gap.end
            continue
        offset, length = next(places)
        payload = _payload(view, offset, length, number in split)
        assert payload is not None, "the framing of this record was checked"
        save(offset, bytes(payload))
        at, number = int(records.ends[number]), number + 1
    return RepairReport(saved=len(writer), mended=mended, lost=lost)


def _chain(view: memoryview, begin: int, end: int) -> list[tuple[int, bytes]]:
    """(offset, payload) of records that fill a gap exactly by their lengths, with any magic words; else none."""
    chain: list[tuple[int, bytes]] = []
    at = begin
    while at + HEAD_BYTES <= end:
        length = int.from_bytes(view[at + 4 : at + 8], "little")  # a flag other than 0 makes it too long
        stop = at + HEAD_BYTES + padded_length(length)
        if stop > end or any(view[at + HEAD_BYTES + length : stop]):
            return []
        chain.append((at, bytes(view[at + HEAD_BYTES : at + HEAD_BYTES + length])))
        at = stop
    return chain if at == end else []


def _text_index_rows(path: Path) -> Iterator[tuple[int, int]]:
    """(offset, key) of the valid lines of ``.idx``."""
    source = text_index_path(path)
    if not os.path.exists(source):
        return
    try:
        content = read_limited(source, MAX_LIST_BYTES)
    except (OSError, LimitError) as error:
        raise DataError(
            given=f"{source}: {getattr(error, 'strerror', None) or error}",
            rule="the text index of a file is a regular file of a line for each record",
            consequence="nothing was written, as the keys would be lost",
            nearest=f"move {source.name} away to repair the records without their keys",
        ) from error
    for line in content.splitlines():
        if (row := _text_index_row(line)) is not None:
            yield row


def _text_index_row(line: bytes) -> tuple[int, int] | None:
    """(offset, key) of a line of ``.idx``; None unless both are int64, as the reader takes them."""
    found = _TEXT_INDEX_ROW.fullmatch(line.strip())
    if found is None:
        return None
    key, offset = int(found[1]), int(found[2])
    return (offset, key) if max(offset, abs(key)) < 1 << 63 else None


def _text_index_findings(path: Path, known: set[int], unknown: Sequence[tuple[int, int]]) -> list[Finding]:
    """Lines of ``.idx`` that point to no record; lines into the ``unknown`` stretches are not judged."""
    source = text_index_path(path)
    if not os.path.exists(source):
        return []
    findings: list[Finding] = []
    at = 0
    try:
        content = read_limited(source, MAX_LIST_BYTES)
    except (OSError, LimitError) as error:
        what = f"it cannot be read: {getattr(error, 'strerror', None) or error}"
        return [Finding(path=source, offset=0, end=source.stat().st_size, what=what)]
    for number, line in enumerate(content.splitlines(keepends=True), start=1):
        row = _text_index_row(line)
        if row is None:
            what = f"line {number} is not a key, a tab and an offset"
            findings.append(Finding(path=source, offset=at, end=at + len(line), what=what))
        elif row[0] not in known and not any(begin <= row[0] < end for begin, end in unknown):
            what = f"line {number} says offset {row[0]}, where no record begins"
            findings.append(Finding(path=source, offset=at, end=at + len(line), what=what))
        at += len(line)
    return findings
