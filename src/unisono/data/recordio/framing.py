"""The RecordIO container of dmlc-core: how payloads are framed as parts of a file, and how parts are found.

    part    magic (u32) | flag << 29 | bytes (u32) | bytes … | zeros up to a multiple of 4
    record  one part with flag 0, or parts with flags 1 (first), 2 (middle, any number), 3 (last)

All integers are little-endian, and every part starts at a multiple of 4. A payload that contains the magic word at a multiple
of 4 is cut there and the word left out; the reader reinserts it between parts. A magic word at a multiple of 4 therefore always
starts a part, and parts can be found from any position.

The payload of an image record is MXNet's header of 24 bytes (``ImageHeader``) and the image.

Format: dmlc-core ``recordio.h`` (Apache MXNet's ``.rec`` files). Not here: files, indexes, checksums.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from unisono.errors import DataError

MAGIC: Final = 0xCED7230A
MAGIC_BYTES: Final = struct.pack("<I", MAGIC)
HEAD_BYTES: Final = 8
MAX_PAYLOAD_BYTES: Final = (1 << 29) - 1
WHOLE, FIRST, MIDDLE, LAST = range(4)
PART_HEAD: Final = struct.Struct("<II")  # magic, flag << 29 | bytes
_IMAGE_HEADER: Final = struct.Struct("<IfQQ")
_SCAN_WORDS: Final = 1 << 22  # words per comparison: 16 MiB of the file


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameParts:
    """Part heads in file order: ``offsets`` [parts] int64 of the magic words, ``lengths`` [parts] int64, ``flags`` [parts]."""

    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    flags: NDArray[np.int64]

    @property
    def ends(self) -> NDArray[np.int64]:
        """End of each part, with padding."""
        return self.offsets + HEAD_BYTES + padded_length(self.lengths)


def padded_length(length: Any) -> Any:
    """``length`` rounded up to a multiple of 4."""
    return (length + 3) & ~3


def frame_payload(payload: bytes) -> list[bytes]:
    """The record of a payload as a list of byte strings to write. Raises DataError for 2^29 bytes or more."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise DataError(
            given=f"a record of {len(payload)} bytes",
            rule=f"RecordIO keeps a length in 29 bits: a record has at most {MAX_PAYLOAD_BYTES} bytes",
            consequence="it was not written",
            nearest="cut it into several records, or store it in a file of its own and its path here",
        )
    if MAGIC_BYTES not in payload:
        return [PART_HEAD.pack(MAGIC, len(payload)), payload, bytes(-len(payload) % 4)]
    cuts = [match.start() for match in re.finditer(re.escape(MAGIC_BYTES), payload) if match.start() % 4 == 0]
    pieces: list[bytes] = []
    begin = 0
    for number, cut in enumerate([*cuts, len(payload)]):
        last = number == len(cuts)
        flag = (LAST if last else MIDDLE) if number else (WHOLE if last else FIRST)
        pieces += [PART_HEAD.pack(MAGIC, flag << 29 | cut - begin), payload[begin:cut]]
        begin = cut + 4
    pieces.append(bytes(-len(pieces[-1]) % 4))
    return pieces


def join_parts(data: memoryview, offset: int) -> bytes:
    """The payload of the record at ``offset``, with the cut words reinserted. Raises ValueError if its parts are not a record,
    that is, if the file has changed."""
    pieces: list[bytes | memoryview] = []
    while True:
        if offset < 0 or offset + HEAD_BYTES > len(data):
            raise ValueError(f"a part should begin at offset {offset} of {len(data)} bytes")
        magic, head = PART_HEAD.unpack_from(data, offset)
        flag, length = head >> 29, head & MAX_PAYLOAD_BYTES
        end = offset + HEAD_BYTES + length
        if magic != MAGIC or end > len(data) or flag not in ((MIDDLE, LAST) if pieces else (WHOLE, FIRST)):
            raise ValueError(f"offset {offset} is not the head of the part that should be there")
        if pieces:
            pieces.append(MAGIC_BYTES)
        pieces.append(data[offset + HEAD_BYTES : end])
        if flag in (WHOLE, LAST):
            return b"".join(pieces)
        offset += HEAD_BYTES + padded_length(length)


def find_parts(data: NDArray[np.uint8]) -> FrameParts:
    """All part heads of ``data`` [bytes], in order, in one pass. A magic word at the very end, whose second word is missing,
    counts as a head with an impossible length."""
    words = data[: len(data) // 4 * 4].view("<u4")
    chunks = [
        np.flatnonzero(words[begin : begin + _SCAN_WORDS] == MAGIC) + begin
        for begin in range(0, len(words), _SCAN_WORDS)
    ]
    heads = np.concatenate(chunks) if chunks else np.empty(0, np.int64)
    lrec = np.full(len(heads), 0xFFFFFFFF, np.int64)
    has_both = heads + 1 < len(words)
    lrec[has_both] = words[heads[has_both] + 1]
    return FrameParts(offsets=heads * 4, lengths=lrec & MAX_PAYLOAD_BYTES, flags=lrec >> 29)


@dataclass(frozen=True, kw_only=True, slots=True)
class FramingDamage:
    """Damaged bytes ``offset`` to ``end`` of a file, with a description."""

    offset: int
    end: int
    what: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordExtents:
    """Records in file order, each array [records] int64: ``offsets`` of their first magic word, ``ends`` with padding,
    ``lengths`` of their payloads."""

    offsets: NDArray[np.int64]
    ends: NDArray[np.int64]
    lengths: NDArray[np.int64]

    @property
    def split(self) -> NDArray[np.int64]:
        """Numbers of the records with more than one part."""
        return np.flatnonzero(self.ends - self.offsets != HEAD_BYTES + padded_length(self.lengths))


def assemble_records(data: NDArray[np.uint8], parts: FrameParts) -> tuple[RecordExtents, list[FramingDamage]]:
    """The intact records among ``parts``, and the rest of ``data`` as damage, in order.

    A part is intact if it ends at the next part (or at the end of the data), its padding is zero and its flag exists. A record is
    intact if all its parts are and their flags are 0, or 1, 2…, 3.
    """
    count = len(parts.offsets)
    following = np.append(parts.offsets[1:], _end_of_parts(data, parts))
    intact = (parts.ends == following) & (parts.flags <= LAST) & _zero_padding(data, parts)
    # all parts of a record but the last have a multiple of 4 bytes
    intact &= (parts.lengths % 4 == 0) | (parts.flags == WHOLE) | (parts.flags == LAST)
    begins = np.flatnonzero((parts.flags == WHOLE) | (parts.flags == FIRST))
    whole = parts.flags[begins] == WHOLE
    lasts = np.append(np.flatnonzero(parts.flags == LAST), count - 1)  # the sentinel fails the check below
    last = np.where(whole, begins, lasts[np.searchsorted(lasts[:-1], begins)])
    # between the first and the last part only middle ones: counted by prefix sums
    middle_sums = np.append(0, np.cumsum(intact & (parts.flags == MIDDLE)))
    middles = middle_sums[last] - middle_sums[np.minimum(begins + 1, last)]
    several = (parts.flags[last] == LAST) & (last > begins) & (middles == last - begins - 1)
    good = intact[begins] & intact[last] & (whole | several)
    length_sums = np.append(0, np.cumsum(parts.lengths + 4))  # each cut removed a word
    records = RecordExtents(
        offsets=parts.offsets[begins[good]],
        ends=following[last[good]],
        lengths=(length_sums[last + 1] - length_sums[begins] - 4)[good],
    )
    return records, list(_damage_between(data, parts, records, intact))


def _end_of_parts(data: NDArray[np.uint8], parts: FrameParts) -> int:
    """Where the part after the last one would start: the end of the data, or a head that is cut off there."""
    end = int(parts.ends[-1]) if len(parts.offsets) else 0
    cut = data[end:].tobytes() if len(data) - HEAD_BYTES < end < len(data) else b""
    return end if cut and MAGIC_BYTES.startswith(cut[:4]) else len(data)


def _zero_padding(data: NDArray[np.uint8], parts: FrameParts) -> NDArray[np.bool_]:
    zero = np.ones(len(parts.offsets), np.bool_)
    ends = parts.offsets + HEAD_BYTES + parts.lengths
    for more in range(3):
        # only where such a byte of padding exists in the file
        has = np.flatnonzero((-parts.lengths % 4 > more) & (ends + more < len(data)))
        zero[has] &= data[ends[has] + more] == 0
    return zero


def _damage_between(
    data: NDArray[np.uint8], parts: FrameParts, records: RecordExtents, intact: NDArray[np.bool_]
) -> Iterator[FramingDamage]:
    """The gaps between intact records."""
    total = len(data)
    begins = np.append(0, records.ends)
    stops = np.append(records.offsets, total)
    for begin, stop in zip(begins[begins < stops].tolist(), stops[begins < stops].tolist(), strict=True):
        first, behind = np.searchsorted(parts.offsets, [begin, stop]).tolist()
        if first == behind or parts.offsets[first] != begin:
            yield FramingDamage(offset=begin, end=stop, what=_no_head(data, begin, stop))
            continue
        bad = first + int(np.argmin(np.append(intact[first:behind], False)))
        yield FramingDamage(offset=begin, end=stop, what=_bad_part(data, parts, min(bad, behind - 1), total, begin))


def _no_head(data: NDArray[np.uint8], begin: int, stop: int) -> str:
    if stop - begin < HEAD_BYTES:
        return f"{stop - begin} bytes at offset {begin} are less than a head of {HEAD_BYTES}"
    return (
        f"offset {begin} has {data[begin : begin + 4].tobytes().hex()} where a record begins with {MAGIC_BYTES.hex()}"
    )


def _bad_part(data: NDArray[np.uint8], parts: FrameParts, number: int, total: int, begin: int) -> str:
    offset, length, flag = (int(column[number]) for column in (parts.offsets, parts.lengths, parts.flags))
    end = int(parts.ends[number])
    following = int(parts.offsets[number + 1]) if number + 1 < len(parts.offsets) else total
    if offset + HEAD_BYTES > total:
        return f"the head at offset {offset} is cut off after {total - offset} bytes"
    if flag > LAST:
        return f"the part at offset {offset} has flag {flag}, and there are flags 0 to {LAST}"
    if end > total:
        return f"the part at offset {offset} says {length} bytes, and the file ends {end - total} bytes too early"
    if end > following:
        return f"the part at offset {offset} says {length} bytes, and another part begins inside it, at {following}"
    if data[offset + HEAD_BYTES + length : end].any():
        return f"the padding at offset {offset + HEAD_BYTES + length} is not zeros"
    if end < following:
        return f"the part at offset {offset} ends at {end}, where no part begins; the next one is at {following}"
    if flag in (FIRST, MIDDLE) and length % 4:
        return f"the part at offset {offset} has {length} bytes, and a part that is continued has a multiple of 4"
    if flag in (MIDDLE, LAST) and offset == begin:
        return f"the part at offset {offset} continues a record (flag {flag}) whose beginning is missing"
    return f"the record at offset {begin} has no last part: the next record, or the end, comes first"


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageHeader:
    """The header of an image record, MXNet's ``IRHeader``.

    One label is stored in the header with flag 0; an array of n labels is stored as flag n, label 0 and n float32 after
    the header.

    Attributes:
        label: One number, or [n] float32 for several labels (or one stored as an array).
        id: Unsigned 64-bit number of the image; packing writes the record's key.
        id2: Unsigned 64-bit number that MXNet reserves; 0 as a rule.
    """

    label: float | NDArray[np.float32]
    id: int = 0
    id2: int = 0


def pack_header(header: ImageHeader, payload: bytes) -> bytes:
    """The payload of an image record, as ``mx.recordio.pack`` makes it.

    Args:
        header: Label or labels, and ids.
        payload: The encoded image.
    """
    if isinstance(header.label, float | int):
        return _IMAGE_HEADER.pack(0, header.label, header.id, header.id2) + payload
    labels = np.ascontiguousarray(header.label, "<f4").reshape(-1)
    return _IMAGE_HEADER.pack(len(labels), 0.0, header.id, header.id2) + labels.tobytes() + payload


def unpack_header(record: bytes | memoryview) -> tuple[ImageHeader, memoryview]:
    """Split the payload of an image record into its header and a view of the image, without a copy.

    Args:
        record: The payload, as ``RecordFile`` reads it.

    Raises:
        DataError: The record is shorter than its header says.
    """
    view = memoryview(record)
    flag, label, first, second = _IMAGE_HEADER.unpack_from(view) if len(view) >= _IMAGE_HEADER.size else (-1, 0.0, 0, 0)
    begin = _IMAGE_HEADER.size + 4 * flag
    if flag < 0 or begin > len(view):
        raise DataError(
            given=f"a record of {len(view)} bytes"
            + (f" that says it has {flag} labels" if flag > 0 else ", read as an image record"),
            rule=f"an image record begins with {_IMAGE_HEADER.size} bytes of header and 4 bytes for each of several labels",
            consequence="it is not known where the image begins",
            nearest="read the payload itself; records that im2rec or pack_header did not write have no such header",
        )
    labels = label if flag == 0 else np.frombuffer(view, "<f4", count=flag, offset=_IMAGE_HEADER.size)
    return ImageHeader(label=labels, id=first, id2=second), view[begin:]
