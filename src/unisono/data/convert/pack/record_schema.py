"""Typed records as bytes: the scalars, arrays, strings and bytes of a schema, concatenated.

A record, little-endian, without padding:

    u8      xxh3-64 of the schema's text, which prevents reading with another schema
    then for each field, in the schema's order
      bool, intN, uintN, floatN    the number
      string, bytes                u4 length, then UTF-8 or the bytes
      array                        u4 for each ``?`` dim, then the values in C order

A schema's text is ``name=type`` or ``name=type[dims]`` separated by commas; ``?`` is a dim of any size:
``time=float64,accel=float32[3],samples=int16[?,6],note=string``.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from unisono.data.convert.formats.table import describe_value
from unisono.data.mindrecord import FieldType
from unisono.errors import DataError
from unisono.storage.limits import MAX_RECORD_BYTES, MAX_TEXT_BYTES, LimitError, read_limited

_NUMBERS: Final = frozenset(
    {"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"}
)
_ACCEPTED: Final = {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}  # kinds of values accepted for a kind of number
_MARK: Final = struct.Struct("<Q")
_COUNT: Final = struct.Struct("<I")
_FIELD: Final = re.compile(r"([A-Za-z_]\w*)=(\w+)(?:\[([0-9?,\s]+)\])?(?:,\s*|$)")
_MAX_DIMS: Final = 8


@dataclass(frozen=True, slots=True)
class RecordSchema:
    """How the fields of a record become bytes and come back.

    ``RecordDataset(files, RecordSchema.load(path).decode)`` reads packed records.

    Attributes:
        fields: Type and shape of each field by name, in the order of the bytes; −1 is a dim of any size.
    """

    fields: dict[str, FieldType]

    @staticmethod
    def parse(text: str) -> RecordSchema:
        """Parse a schema's text. Raises DataError naming the invalid part."""
        fields: dict[str, FieldType] = {}
        at = 0
        while at < len(text):
            match = _FIELD.match(text, at)
            if match is None:
                raise _no_schema(f"schema {text!r}, from character {at} on: {text[at : at + 30]!r}")
            name, kind, dims = match.groups()
            if name in fields:
                raise _no_schema(f"schema {text!r}, field {name!r}: named twice")
            if kind not in _NUMBERS and (kind not in ("string", "bytes") or dims):
                raise _no_schema(f"schema {text!r}, field {name!r} of type {kind}{'' if dims is None else f'[{dims}]'}")
            fields[name] = FieldType(type=kind, shape=None if dims is None else _shape(text, name, dims))
            at = match.end()
        if not fields:
            raise _no_schema("an empty schema")
        return RecordSchema(fields)

    @staticmethod
    def load(path: Path | str) -> RecordSchema:
        """Load the ``.schema`` file that packing writes beside the records. Raises DataError."""
        try:
            return RecordSchema.parse(read_limited(Path(path), MAX_TEXT_BYTES).decode().strip())
        except (OSError, UnicodeDecodeError, LimitError) as error:
            raise _no_schema(f"schema file {path}: {error}") from error

    @property
    def text(self) -> str:
        """The schema's text, the inverse of ``parse``."""
        parts: list[str] = []
        for name, field in self.fields.items():
            dims = "" if field.shape is None else f"[{','.join('?' if dim < 0 else str(dim) for dim in field.shape)}]"
            parts.append(f"{name}={field.type}{dims}")
        return ",".join(parts)

    @property
    def mark(self) -> int:
        """The first bytes of each record, as an integer."""
        return xxhash.xxh3_64_intdigest(self.text.encode())

    def encode(self, row: Mapping[str, Any]) -> bytes:
        """Encode a row of numbers, strings, bytes, arrays or nested lists. Raises DataError if it does not fit the schema.

        Integers must fit exactly; floats are rounded to the schema's type.
        """
        if row.keys() != self.fields.keys():
            off = [f"no {name!r}" for name in self.fields if name not in row]
            off += [repr(name) for name in row if name not in self.fields]
            raise _unfit(f"a row with {', '.join(off)}", self.text)
        parts = [_MARK.pack(self.mark)]
        for name, field in self.fields.items():
            try:
                parts += _encoded(row[name], field)
            except (ValueError, TypeError, OverflowError) as error:
                raise _unfit(f"field {name!r}, {describe_value(row[name])}: {error}", self.text) from error
        return b"".join(parts)

    def decode(self, record: bytes | memoryview) -> dict[str, Any]:
        """Decode a record to a row, arrays as read-only views. Raises DataError for a record of another schema."""
        view = memoryview(record)
        if len(view) < _MARK.size or _MARK.unpack_from(view)[0] != self.mark:
            raise _no_record(f"a record of {len(view)} bytes that does not begin with the mark of {self.text!r}")
        at = _MARK.size
        row: dict[str, Any] = {}
        try:
            for name, field in self.fields.items():
                row[name], at = _decoded(view, at, field)
        except (ValueError, struct.error) as error:
            raise _no_record(f"a record of {len(view)} bytes, at byte {at}: {error}") from error
        if at != len(view):
            raise _no_record(f"a record of {len(view)} bytes, of which its fields take {at}")
        return row


def _encoded(value: Any, field: FieldType) -> list[bytes]:
    if field.type in ("string", "bytes"):
        wanted = str if field.type == "string" else bytes
        if not isinstance(value, wanted):
            raise TypeError(f"not {wanted.__name__}")
        raw = value.encode() if isinstance(value, str) else value
        return [_COUNT.pack(len(raw)), raw]
    array = _as_type(value, field.type)
    shape = field.shape or ()
    if array.ndim != len(shape) or any(dim not in (-1, size) for dim, size in zip(shape, array.shape, strict=True)):
        raise ValueError(f"shape {list(array.shape)}")
    counts = [_COUNT.pack(size) for dim, size in zip(shape, array.shape, strict=True) if dim < 0]
    return [*counts, array.tobytes()]


def _as_type(value: Any, kind: str) -> NDArray[Any]:
    """The values in a type, little-endian: integers exactly, floats rounded. Raises for values outside its range."""
    array = np.asarray(value)
    dtype = np.dtype(kind).newbyteorder("<")
    if not array.size:  # an empty list has no type
        return array.astype(dtype)
    if array.dtype.kind not in _ACCEPTED[dtype.kind]:
        raise TypeError(f"not {kind}")
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        if int(array.min()) < limits.min or int(array.max()) > limits.max:
            raise OverflowError(f"outside of {kind}")
    with np.errstate(over="ignore"):
        converted = array.astype(dtype)
    if dtype.kind == "f" and (np.isinf(converted) & ~np.isinf(array)).any():
        raise OverflowError(f"outside of {kind}")
    return converted


def _decoded(view: memoryview, at: int, field: FieldType) -> tuple[Any, int]:
    if field.type in ("string", "bytes"):
        (length,) = _COUNT.unpack_from(view, at)
        begin, end = at + 4, at + 4 + length
        if end > len(view):
            raise ValueError(f"{length} bytes, where {len(view) - begin} are left")
        raw = bytes(view[begin:end])
        return (raw.decode() if field.type == "string" else raw), end
    shape: list[int] = []
    for dim in field.shape or ():
        if dim < 0:
            (dim,) = _COUNT.unpack_from(view, at)
            at += 4
        shape.append(dim)
    count = math.prod(shape)
    dtype = np.dtype(field.type).newbyteorder("<")
    if count * dtype.itemsize > len(view) - at:
        raise ValueError(f"an array of shape {shape}, where {len(view) - at} bytes are left")
    values = np.frombuffer(view, dtype, count, at).astype(field.type, copy=False)
    at += count * dtype.itemsize
    return (values[0].item() if field.shape is None else values.reshape(shape)), at


def _shape(text: str, name: str, dims: str) -> tuple[int, ...]:
    parts = [dim.strip() for dim in dims.split(",")]
    if not all(parts) or len(parts) > _MAX_DIMS or any(part != "?" and not part.isdecimal() for part in parts):
        raise _no_schema(f"schema {text!r}, field {name!r} of dims [{dims}]")
    shape = tuple(-1 if part == "?" else int(part) for part in parts)
    if math.prod(max(1, dim) for dim in shape) > MAX_RECORD_BYTES:
        raise _no_schema(f"schema {text!r}, field {name!r} of dims [{dims}], more than {MAX_RECORD_BYTES:,} values")
    return shape


def _no_schema(given: str) -> DataError:
    return DataError(
        given=given,
        rule="a schema is name=type or name=type[dims], separated by commas; a type is string, bytes or one of "
        + ", ".join(sorted(_NUMBERS)),
        consequence="no record can be written or read",
        nearest="time=float64,accel=float32[3],samples=int16[?,6],note=string",
    )


def _unfit(given: str, schema: str) -> DataError:
    return DataError(
        given=given,
        rule=f"each row has exactly the fields of the schema: {schema}",
        consequence="it was not written",
        nearest="another type or dim (? is any size) in the schema, or rows that fit",
    )


def _no_record(given: str) -> DataError:
    return DataError(
        given=given,
        rule="a record is read by the schema that it was written with",
        consequence="it was not decoded",
        nearest="RecordSchema.load of the .schema file beside the records",
    )


def rows_of(value: Any) -> list[Mapping[str, Any]]:
    """The rows that a function returned for one item: a mapping, or an iterable of mappings. Raises TypeError."""
    rows: list[Any] = [value] if isinstance(value, Mapping) else list(value)
    for row in rows:
        if not isinstance(row, Mapping):
            raise TypeError(f"a row is a mapping of field names to values, this is a {type(row).__name__}")
    return cast("list[Mapping[str, Any]]", rows)
