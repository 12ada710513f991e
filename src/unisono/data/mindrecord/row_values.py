"""The values of a row: scalars as a MessagePack map, concatenated blobs, packed integer arrays.

    raw     map of the scalar fields, sorted by name; integers in the shortest form, floats in 4 bytes if that is exact
    blob    one blob field: its bytes. Several: for each, u64 **big-endian** length and bytes. None: four zero bytes
    array   little-endian, C order. In version 3.0, if any integer field has a shape, each integer array is packed:
            u32 big-endian count n | ceil(n / 4) bytes of 2-bit width codes, the first one in the top bits | the values, code
            0, 1, 2, 3 as 1, 2, 4, 8 bytes of two's complement

Functions raise ValueError; the caller adds file and row.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from unisono.data.mindrecord.header import FieldType
from unisono.sanitize import quoted, shorten
from unisono.storage.limits import check_count

Value = int | float | str | bytes | NDArray[Any]
NO_BLOBS: Final = bytes(4)
NO_SCALARS: Final = msgspec.msgpack.encode({"id": 0})
_BIG_LENGTH: Final = struct.Struct(">Q")
_BIG_COUNT: Final = struct.Struct(">I")
_DTYPES: Final = {"int32": "<i4", "int64": "<i8", "float32": "<f4", "float64": "<f8"}
_SHIFTS: Final = np.array([6, 4, 2, 0], np.uint8)
_MAPS: Final = msgspec.msgpack.Decoder(dict[str, int | float | str])
_LARGE_BYTES: Final = 1 << 20
_FLOAT32_MAX: Final = float(np.finfo(np.float32).max)
INT_LIMITS: Final = {"int32": 1 << 31, "int64": 1 << 63}


class FieldTypeError(ValueError):
    """A scalar outside the type of its field, which MindSpore's writer may accept."""


def decode_scalars(fields: Mapping[str, FieldType], data: memoryview, *, check: bool) -> dict[str, Any]:
    """Decode the scalars of a row. ``check``: accept only values of their field's type and range."""
    try:
        if len(data) > _LARGE_BYTES and data[0] == 0xDF:  # a map whose number of entries has four bytes
            check_count(int.from_bytes(data[1:5]), "scalars")
        scalars = _MAPS.decode(data)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"its scalars are not understood: {shorten(str(error), 500)}") from error
    values: dict[str, Any] = {}
    for name, field in fields.items():
        if name not in scalars:
            raise ValueError(f"it has no field {quoted(name)}")
        value = scalars[name]
        if check:
            value = _checked(name, field.type, value)
        values[name] = value
    return values


def _checked(name: str, kind: str, value: Any) -> Any:
    if kind in INT_LIMITS:
        fits = isinstance(value, int) and -INT_LIMITS[kind] <= value < INT_LIMITS[kind]
    elif kind == "string":
        fits = isinstance(value, str)
    else:
        fits = not isinstance(value, str) and (kind == "float64" or fits_float32(value))
    if not fits:
        raise FieldTypeError(f"field {quoted(name)} has {shown_value(value)}, which is no {kind}")
    return float(value) if kind.startswith("float") else value


def shown_value(value: Any) -> str:
    """A value for an error text, of bounded length."""
    return shorten(repr(value[:40] if isinstance(value, str) else value), 61)


def fits_float32(value: float) -> bool:
    """Whether a value is in the range of float32, which includes infinities and NaN."""
    return not math.isfinite(value) or abs(value) <= _FLOAT32_MAX


def encode_scalars(items: Sequence[tuple[bytes, int | float | str]]) -> bytes:
    """The map of scalars, from pairs of a name in MessagePack and a value, sorted by name; equals MindSpore's byte for byte."""
    if not items:
        return NO_SCALARS
    count = len(items)
    pieces = [bytes([0x80 | count]) if count < 16 else b"\xde" + count.to_bytes(2, "big")]
    for name, value in items:
        pieces += [name, _write_float(value) if isinstance(value, float) else msgspec.msgpack.encode(value)]
    return b"".join(pieces)


def _write_float(value: float) -> bytes:
    if abs(value) <= _FLOAT32_MAX:
        short = struct.pack(">f", value)
        if struct.unpack(">f", short)[0] == value:
            return b"\xca" + short
    return b"\xcb" + struct.pack(">d", value)


def blob_reader(fields: Mapping[str, FieldType], *, packed: bool) -> Callable[[memoryview], dict[str, Any]]:
    """A function that decodes the blobs of a row; ``fields`` in their order in the row."""
    readers = [(name, value_reader(name, field, packed=packed)) for name, field in fields.items()]

    def one(data: memoryview) -> dict[str, Any]:
        name, read = readers[0]
        return {name: read(data)}

    def several(data: memoryview) -> dict[str, Any]:
        values: dict[str, Any] = {}
        at = 0
        for name, read in readers:
            begin = at + _BIG_LENGTH.size
            length = _BIG_LENGTH.unpack_from(data, at)[0] if begin <= len(data) else -1
            if not 0 <= length <= len(data) - begin:
                raise ValueError(
                    f"field {quoted(name)} says {length} bytes, and {len(data) - begin} of its blobs are left"
                )
            at = begin + length
            values[name] = read(data[begin:at])
        if at != len(data):
            raise ValueError(f"its blobs have {len(data) - at} bytes behind the last field")
        return values

    def none(data: memoryview) -> dict[str, Any]:
        if bytes(data) != NO_BLOBS:
            raise ValueError(f"it has {len(data)} bytes of blobs, where rows without blobs have four zero bytes")
        return {}

    return (none, one)[len(readers)] if len(readers) < 2 else several


def value_reader(name: str, field: FieldType, *, packed: bool) -> Callable[[memoryview], Any]:
    """A function that decodes one blob field."""
    if not field.shape:  # bytes; a field with a scalar shape is read as the bytes that are there
        return bytes
    dtype, shape = np.dtype(_DTYPES[field.type]), field.shape
    fixed_size = math.prod(dim for dim in shape if dim != -1)

    def read(data: memoryview) -> NDArray[Any]:
        if packed and dtype.kind == "i":
            flat = unpack_integers(name, data, dtype)
        elif len(data) % dtype.itemsize:
            raise ValueError(f"field {quoted(name)} has {len(data)} bytes, which are no {dtype.name} values")
        else:
            flat = np.frombuffer(data, dtype).copy()  # the file is read-only and not aligned
        if flat.size % fixed_size if -1 in shape else flat.size != fixed_size:
            raise ValueError(f"field {quoted(name)} has {flat.size} values, which are no {list(shape)}")
        return flat.reshape(shape)

    return read


def unpack_integers(name: str, data: memoryview, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Decode a packed integer array, flat. Sizes are checked against ``data`` before anything is allocated."""
    count = _BIG_COUNT.unpack_from(data)[0] if len(data) >= _BIG_COUNT.size else -1
    begin = _BIG_COUNT.size + -(-count // 4)
    if count < 0 or begin + count > len(data):
        raise ValueError(f"field {quoted(name)} says {count} packed integers, in {len(data)} bytes")
    content = np.frombuffer(data, np.uint8)
    codes = (content[_BIG_COUNT.size : begin, None] >> _SHIFTS & 3).reshape(-1)[:count]  # [count] width codes
    ends = begin + np.cumsum(1 << codes.astype(np.int64))
    end = int(ends[-1]) if count else begin
    if end != len(data):
        raise ValueError(
            f"field {quoted(name)} has {count} packed integers of {end} bytes in all, in {len(data)} bytes"
        )
    values = np.empty(count, dtype)
    for code in range(4):
        places = np.flatnonzero(codes == code)
        width = 1 << code
        if places.size and width > dtype.itemsize:
            raise ValueError(f"field {quoted(name)} has integers of {width} bytes among its {dtype.name} values")
        # [places, width] bytes of each value
        cells = content[(ends[places] - width)[:, None] + np.arange(width)]
        values[places] = cells.view(f"<i{width}").reshape(-1)
    return values


def pack_integers(array: NDArray[Any]) -> bytes:
    """Encode an integer array as in version 3.0: each value in the fewest of 1, 2, 4 or 8 bytes."""
    flat = np.ascontiguousarray(array).reshape(-1).astype("<i8")
    codes = np.zeros(flat.size, np.uint8)
    for code, bits in ((1, 7), (2, 15), (3, 31)):
        codes[(flat < -(1 << bits)) | (flat >= 1 << bits)] = code
    padded = np.zeros(-(-flat.size // 4) * 4, np.uint8)
    padded[: flat.size] = codes
    table = np.bitwise_or.reduce(padded.reshape(-1, 4) << _SHIFTS, axis=1).astype(np.uint8)  # [ceil(n / 4)]
    widths = 1 << codes.astype(np.int64)
    cells = flat.view(np.uint8).reshape(-1, 8)  # [n, 8] bytes of each value, the low ones first
    return _BIG_COUNT.pack(flat.size) + table.tobytes() + cells[np.arange(8) < widths[:, None]].tobytes()


def join_blobs(blobs: Sequence[bytes]) -> bytes:
    """The blobs of a row as one payload."""
    if len(blobs) < 2:
        return blobs[0] if blobs else NO_BLOBS
    return b"".join(piece for blob in blobs for piece in (_BIG_LENGTH.pack(len(blob)), blob))


def array_bytes(array: NDArray[Any], field: FieldType, *, packed: bool) -> bytes:
    """The blob of an array."""
    if packed and field.type in INT_LIMITS:
        return pack_integers(array)
    return np.ascontiguousarray(array, _DTYPES[field.type]).tobytes()
