"""Parse a JPEG's header: sizes, sampling, restart interval, and the start of its entropy-coded data.

Source: ITU-T T.81 (JPEG), annex B for the markers and annex A for MCUs.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray

from unisono.errors import DataError

Encoded = bytes | bytearray | memoryview | NDArray[np.uint8]  # an encoded image, whole

_SOI, _EOI, _SOS, _DRI, _DHT, _DQT = 0xD8, 0xD9, 0xDA, 0xDD, 0xC4, 0xDB
_FRAMES: Final = frozenset(range(0xC0, 0xD0)) - {_DHT, 0xC8, 0xCC}
_NEEDED: Final = _FRAMES | {_SOS, _DRI, _DHT, _DQT, 0xCC, 0xE0, 0xEE}  # JFIF and Adobe define the colour space
_ALONE: Final = frozenset(range(0xD0, 0xD8)) | {0x01, 0xFF}  # without a segment
_NOT_HERE: Final = frozenset({0x00, _SOI, _EOI})
_SEGMENT: Final = struct.Struct(">BBH")
_FRAME: Final = struct.Struct(">BHHB")


@dataclass(frozen=True, kw_only=True, slots=True)
class JpegHeader:
    """The header of a JPEG. ``tables`` is the header up to the data of the first scan without metadata: a JPEG without data."""

    width: int
    height: int
    sampling: tuple[tuple[int, int], ...]  # (horizontal, vertical) per component
    mcu: tuple[int, int]  # (height, width) in pixels of a minimum coded unit; a block for one component (T.81 A.2.2)
    bits: int  # per value
    frame: int  # the frame marker's second byte: 0xC0 baseline, 0xC1 extended, 0xC2 progressive, …
    restart_interval: int  # MCUs between restart markers, 0 for none
    interleaved: bool  # the first scan holds all components
    tables: bytes
    size_at: int  # offset in ``tables`` of the frame's height and width, u16 each, big-endian
    scan_at: int  # offset in the file of the data of the first scan

    @property
    def sequential(self) -> bool:
        """Whether the JPEG is one scan of Huffman-coded 8-bit values, whose restart intervals can be decoded alone."""
        return self.frame in (0xC0, 0xC1) and self.bits == 8 and self.interleaved


def as_view(data: Encoded) -> memoryview:
    """The bytes without a copy. Raises DataError for arrays that are not one-dimensional contiguous uint8."""
    view = memoryview(cast("bytes", data))  # numpy's stubs do not say that arrays are buffers
    if view.ndim != 1 or view.itemsize != 1 or not view.contiguous:
        raise unreadable_jpeg_error(f"an encoded image as {view.ndim} dims of {view.itemsize}-byte values")
    return view if view.format == "B" else view.cast("B")


def is_jpeg(data: memoryview) -> bool:
    return bytes(data[:3]) == b"\xff\xd8\xff"


def read_header(data: memoryview) -> JpegHeader:
    """Parse the markers up to the first scan. Raises DataError with the offset of an invalid one."""
    size, at = len(data), 2
    segments: list[memoryview] = [data[:2]]
    tables_bytes, size_at, interval = 2, 0, 0
    frame: tuple[int, int, int, int] | None = None  # marker, bits, height, width
    sampling: list[tuple[int, int]] = []
    while at + 4 <= size:
        mark, marker, length = _SEGMENT.unpack_from(data, at)
        if mark != 0xFF or marker in _NOT_HERE:
            raise _broken(at, f"0x{mark:02x}{marker:02x} where a marker of the header should be")
        if marker in _ALONE:  # 0xFF pads
            at += 1 if marker == 0xFF else 2
            continue
        end = at + 2 + length
        if length < 2 or end > size:
            raise _broken(at, f"a segment of {length} bytes where {size - at - 2} are left")
        if marker in _FRAMES:
            if frame is not None:
                raise _broken(at, "a second frame")
            bits, height, width, parts = _FRAME.unpack_from(data, at + 4) if length >= 8 else (0, 0, 0, 0)
            if not 1 <= parts <= 4 or length != 8 + 3 * parts:
                raise _broken(at, f"a frame of {parts} components in {length} bytes")
            sampling = [(value >> 4, value & 15) for value in data[at + 11 : end : 3]]
            if min(map(min, sampling)) < 1 or max(map(max, sampling)) > 4:
                raise _broken(at, f"sampling factors {sampling} outside 1 to 4")
            if not (height and width):
                raise _broken(at, f"a frame of {width}x{height} pixels")
            frame = marker, bits, height, width
            size_at = tables_bytes + 5
        elif marker == _DRI:
            if length != 4:
                raise _broken(at, f"a restart interval of {length} bytes")
            interval = (data[at + 4] << 8) + data[at + 5]
        if marker in _NEEDED:
            segments.append(data[at:end])
            tables_bytes += 2 + length
        if marker == _SOS:
            if frame is None:
                raise _broken(at, "a scan before any frame")
            many = len(sampling) > 1
            return JpegHeader(
                width=frame[3],
                height=frame[2],
                sampling=tuple(sampling),
                mcu=(8 * max(v for _, v in sampling), 8 * max(h for h, _ in sampling)) if many else (8, 8),
                bits=frame[1],
                frame=frame[0],
                restart_interval=interval,
                interleaved=length > 2 and data[at + 4] == len(sampling),
                tables=b"".join(segments),
                size_at=size_at,
                scan_at=end,
            )
        at = end
    raise _broken(at, "the data ends before any scan")


def unreadable_jpeg_error(
    given: str, nearest: str = "a whole copy of the image, or leave the record out when packing"
) -> DataError:
    """The error for an image that cannot be decoded."""
    return DataError(
        given=given,
        rule="an image is whole, in a format that is read here (JPEG, PNG, WebP, GIF, BMP, PPM)",
        consequence="it was not decoded",
        nearest=nearest,
    )


def _broken(at: int, what: str) -> DataError:
    return unreadable_jpeg_error(f"a JPEG whose header is broken at byte {at}: {what}")
