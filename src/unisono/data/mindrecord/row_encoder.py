"""Encode rows as bytes, accepting only fields and values that MindSpore reads back unchanged.

Values that MindSpore's own writer drops with a warning, changes, or finds invalid only at the end, are refused here, field by
field, before anything of the row is written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from unisono.data.mindrecord.header import ARRAY_TYPES, SCALAR_TYPES, FieldType, has_packed_integers
from unisono.data.mindrecord.row_values import (
    INT_LIMITS,
    array_bytes,
    encode_scalars,
    fits_float32,
    join_blobs,
    shown_value,
)
from unisono.errors import DataError, Problem
from unisono.sanitize import listed, quoted

Kind = str | FieldType | Mapping[str, Any]
_NAME: Final = re.compile(r"[0-9A-Za-z_]+")
_UNCHANGED: Final = "nothing was written"
_MAX_FIELDS: Final = (1 << 16) - 1


class RowEncoder:
    """Encodes rows of one schema. Raises DataError naming every field that cannot be written."""

    def __init__(self, schema: Mapping[str, Kind], index_fields: Sequence[str] | None) -> None:
        fields = {name: _field(kind) for name, kind in schema.items()}
        problems = [*_schema_problems(schema, fields)]
        if problems:
            raise DataError(*problems)
        # sorted, as in MindSpore's header, maps and blobs
        self.fields: dict[str, FieldType] = {name: kind for name, kind in sorted(fields.items()) if kind is not None}
        self.scalars = [name for name, kind in self.fields.items() if kind.shape is None and kind.type != "bytes"]
        self.blobs = [name for name in self.fields if name not in self.scalars]
        self.indexed = list(self.scalars if index_fields is None else index_fields)
        problems = [*_index_problems(self.indexed, self.scalars)]
        if problems:
            raise DataError(*problems)
        self._packed = has_packed_integers(self.fields)
        self._names = {name: msgspec.msgpack.encode(name) for name in self.scalars}
        self._take: dict[str, Callable[[Any], Any]] = {
            name: self._converter(name, kind) for name, kind in self.fields.items()
        }

    def encode(self, row: Mapping[str, Any], number: int) -> tuple[bytes, bytes]:
        """Scalars and blobs of a row as bytes. Raises DataError with all problems of the row."""
        problems: list[Problem] = []
        values: dict[str, Any] = {}
        for name, take in self._take.items():
            try:
                if name not in row:
                    raise _Refused("there is none", "a row has all fields of the schema", f"a value for {quoted(name)}")
                values[name] = take(row[name])
            except _Refused as refused:
                problems.append(refused.problem(number, name))
        for name in row.keys() - self.fields.keys():
            refused = _Refused("the schema has no such field", "a row has the fields of the schema", "leave it out")
            problems.append(refused.problem(number, name))
        if problems:
            raise DataError(*problems)
        raw = encode_scalars([(self._names[name], values[name]) for name in self.scalars])
        return raw, join_blobs([values[name] for name in self.blobs])

    def _converter(self, name: str, kind: FieldType) -> Callable[[Any], Any]:
        """A function that checks a value and returns an int, float or str, or the bytes of a blob."""
        if kind.shape is not None:
            return lambda value: _array(value, kind, packed=self._packed)
        if kind.type == "bytes":
            return lambda value: _blob(value, only=len(self.blobs) == 1)
        indexed = name in self.indexed
        if kind.type == "string":
            return lambda value: _string(value, indexed=indexed)
        if kind.type in INT_LIMITS:
            return lambda value: _integer(value, kind.type)
        return lambda value: _float(value, kind.type, indexed=indexed)


class _Refused(Exception):
    """A value that cannot be written: the value, the rule, and what to write instead."""

    def problem(self, number: int, name: str) -> Problem:
        value, rule, nearest = self.args
        return Problem(
            given=f"row {number}, field {quoted(name)}: {value}",
            rule=rule,
            consequence="the row was not written; the rows before it are kept",
            nearest=nearest,
        )


def _integer(value: Any, kind: str) -> int:
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise _Refused(
            f"{shown_value(value)}, a {_type(value)}",
            f"field type {kind} takes integers",
            "int(…), if that is the intended value",
        )
    limit = INT_LIMITS[kind]
    if not -limit <= value < limit:
        wider = " or field type int64" if kind == "int32" else ", or a field of type string"
        raise _Refused(f"{value}", f"{kind} holds {-limit} to {limit - 1}", f"a number in that range{wider}")
    return int(value)


def _float(value: Any, kind: str, *, indexed: bool) -> float:
    if not isinstance(value, float | np.floating):
        raise _Refused(
            f"{shown_value(value)}, a {_type(value)}",
            f"field type {kind} takes floats, and drops rows with others",
            "float(…)",
        )
    number = float(value)
    if indexed and not math.isfinite(number):
        raise _Refused(
            f"{number}",
            "an indexed float is finite: building MindSpore's index with any other ends the process",
            "a finite number, or index_fields without this field",
        )
    if kind == "float32" and not fits_float32(number):
        raise _Refused(f"{number}", "float32 holds up to 3.4028235e+38", "a smaller number, or field type float64")
    return number


def _string(value: Any, *, indexed: bool) -> str:
    if not isinstance(value, str):
        raise _Refused(
            f"{shown_value(value)}, a {_type(value)}",
            "field type string takes str",
            "str(…), if that is the intended value",
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise _Refused(
            f"{shown_value(value)}", f"strings are UTF-8, and {error.reason}", "bytes in a field of type bytes"
        ) from None
    if indexed and "\0" in value:
        raise _Refused(
            f"{shown_value(value)}",
            "MindSpore cuts an indexed string at its first NUL",
            "index_fields without this field",
        )
    return str(value)


def _blob(value: Any, *, only: bool) -> bytes:
    if not isinstance(value, bytes | bytearray | memoryview):
        raise _Refused(
            f"a {_type(value)}", "field type bytes takes bytes", "bytes, or a field with a shape for an array"
        )
    content = bytes(value)
    if only and not content:
        raise _Refused(
            "no bytes",
            "where it is the only blob, MindSpore reads back four zero bytes for none",
            "another blob field, or a byte that means no bytes",
        )
    return content


def _array(value: Any, kind: FieldType, *, packed: bool) -> bytes:
    shape = kind.shape or ()
    if not isinstance(value, np.ndarray):
        raise _Refused(
            f"a {_type(value)}", f"a field with a shape takes NumPy arrays of {kind.type}", "numpy.asarray(…)"
        )
    array: NDArray[Any] = value
    if array.dtype.name != kind.type:
        raise _Refused(
            f"an array of {array.dtype}", f"the field has arrays of {kind.type}", f"array.astype('{kind.type}')"
        )
    fits = array.ndim == len(shape) and all(dim in (-1, size) for dim, size in zip(shape, array.shape, strict=True))
    if not fits:
        raise _Refused(
            f"an array of shape {list(array.shape)}", f"the field has the shape {list(shape)}", "array.reshape(…)"
        )
    if not array.size:
        raise _Refused(
            f"an array of shape {list(array.shape)}",
            "MindSpore drops rows with an empty array",
            "at least one value",
        )
    return array_bytes(array, kind, packed=packed)


def _type(value: Any) -> str:
    return type(value).__name__


def _field(kind: Kind) -> FieldType | None:
    """A field from its type name, or from MindSpore's ``{"type": …, "shape": …}``; None if it is invalid."""
    if isinstance(kind, str):
        return FieldType(type=kind)
    if isinstance(kind, FieldType):
        return kind
    if not {"type"} <= kind.keys() <= {"type", "shape"}:
        return None
    shape = kind.get("shape")
    if shape is not None and not (isinstance(shape, list | tuple) and all(type(dim) is int for dim in shape)):
        return None
    return FieldType(type=kind["type"], shape=None if shape is None else tuple(shape))


def _schema_problems(schema: Mapping[str, Kind], fields: Mapping[str, FieldType | None]) -> Iterator[Problem]:
    if not 0 < len(fields) <= _MAX_FIELDS:
        yield _bad(f"a schema of {len(fields)} fields", f"a row has 1 to {_MAX_FIELDS} fields", "name the fields")
    by_lower_case: dict[str, str] = {}
    for name, field in fields.items():
        if not _NAME.fullmatch(name):
            yield _bad(f"field {quoted(name)}", "names have letters of a to z, digits and _ only", "another name")
        if name.lower() in by_lower_case:
            rule = (
                "names differ by more than case: they are columns of an SQL table, and MindSpore fails at the very end"
            )
            yield _bad(
                f"fields {quoted(by_lower_case[name.lower()])} and {quoted(name)}", rule, "another name for one of them"
            )
        by_lower_case[name.lower()] = name
        if field is None:
            rule = "a field is its type, or a mapping of type and shape"
            yield _bad(f"field {quoted(name)}: {schema[name]!r}", rule, '{"type": "int32", "shape": [-1]}')
        elif field.type not in (*SCALAR_TYPES, "bytes"):
            rule = f"types are {', '.join(SCALAR_TYPES)} and bytes"
            yield _bad(f"field {quoted(name)} of type {quoted(field.type)}", rule, "the next larger of these types")
        elif field.shape is not None:
            yield from _shape_problems(name, field, field.shape)


def _shape_problems(name: str, field: FieldType, shape: tuple[int, ...]) -> Iterator[Problem]:
    given = f"field {quoted(name)} of type {field.type} with shape {list(shape)}"
    if field.type not in ARRAY_TYPES:
        yield _bad(given, f"arrays are of {', '.join(ARRAY_TYPES)}", "leave the shape out")
    if not shape:
        yield _bad(given, "a shape has one dim at least: MindSpore loses the values of a scalar shape", "leave it out")
    if shape.count(-1) > 1 or any(dim < 1 and dim != -1 for dim in shape):
        yield _bad(given, "dims are 1 or more, and at most one is -1, found from the data", "write the other dims out")


def _index_problems(indexed: Sequence[str], scalars: Sequence[str]) -> Iterator[Problem]:
    for name in indexed:
        if name not in scalars:
            yield _bad(
                f"index field {quoted(name)}",
                "an index field is a scalar field of the schema",
                f"some of [{listed(map(quoted, scalars))}]",
            )
        elif name.lower() == "inc":
            rule = "its column in the index would be INC_0, which MindSpore uses itself"
            yield _bad(f"index field {quoted(name)}", rule, "another name, or index_fields without it")
        elif name[:1].isdigit():
            rule = "an index field begins with a letter or _, as the names of columns in SQL do"
            yield _bad(f"index field {quoted(name)}", rule, "another name, or index_fields without it")
    if len(set(indexed)) != len(indexed):
        yield _bad(f"index fields [{listed(map(quoted, indexed))}]", "a field is indexed once", "name each once")


def _bad(given: str, rule: str, nearest: str) -> Problem:
    return Problem(given=given, rule=rule, consequence=_UNCHANGED, nearest=nearest)
