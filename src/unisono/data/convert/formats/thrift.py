"""Read chosen fields of structs in Thrift's compact protocol, from bytes that nobody vouches for.

    struct  fields, then a zero byte
    field   number − number before << 4 | type (difference 0: the number follows), then the value
    value   integer: zigzag varint   binary: varint length, bytes   list: count << 4 | type (15: varint count follows), values

Format: Apache Thrift, ``thrift-compact-protocol.md``. Not here: maps, which Parquet has none of.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

from unisono.storage.limits import MAX_JSON_LISTS, MAX_THRIFT_DEPTH, LimitError

# the fields to keep by number: I32, I64 or BINARY, or the fields of a struct, or of the structs in a list
Wanted = Mapping[int, "int | Wanted | list[Wanted]"]
Struct = dict[int, Any]
_TRUE, _FALSE, _BYTE, _I16, I32, I64, _DOUBLE, BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)
_NOTHING: Final[Wanted] = {}


class ThriftReader:
    """Reads values one after the other from ``at`` on. Methods raise IndexError where data are missing, else ValueError."""

    def __init__(self, data: bytes, at: int = 0) -> None:
        self.at = at
        self._data = data
        self._structs = 0

    def struct(self, wanted: Wanted, depth: int = 0) -> Struct:
        """The wanted fields of a struct: integers, bytes, lists and structs, by number."""
        self._structs += 1
        _check_depth(depth)
        if self._structs > MAX_JSON_LISTS:
            raise LimitError(f"more than {MAX_JSON_LISTS:,} structs")
        data, fields, number = self._data, Struct(), 0
        while head := data[self.at]:
            self.at += 1
            number = number + (head >> 4) if head >> 4 else self._zigzag()
            kind, expected = head & 15, wanted.get(number)
            if kind == (expected if isinstance(expected, int) else _LIST if isinstance(expected, list) else _STRUCT):
                fields[number] = self._value(kind, expected, depth)
            elif kind > _FALSE:  # as Thrift does: a field of another type is skipped
                self._value(kind, None, depth)
        self.at += 1
        return fields

    def _value(self, kind: int, wanted: int | Wanted | list[Wanted] | None, depth: int) -> Any:
        if kind in (I32, I64, _I16):
            return self._zigzag(32 if kind == I32 else 64)
        if kind == BINARY:
            begin = self._skip(self._varint())
            return self._data[begin : self.at] if wanted else None
        if kind == _STRUCT:
            return self.struct(_NOTHING if wanted is None else cast(Wanted, wanted), depth + 1)
        if kind in (_LIST, _SET):
            return self._list(cast("list[Wanted] | None", wanted), depth)
        if kind in (_TRUE, _FALSE, _BYTE, _DOUBLE):
            self._skip(8 if kind == _DOUBLE else 1)
            return None
        raise ValueError(f"a field of type {kind}")

    def _list(self, wanted: list[Wanted] | None, depth: int) -> list[Struct]:
        _check_depth(depth)
        head = self._data[self.at]
        self.at += 1
        count = head >> 4
        if count == 15:
            count = self._varint()
        if count > len(self._data) - self.at:  # each value has a byte at least
            raise IndexError(count)
        values: list[Struct] = []
        for _ in range(count):
            if wanted is None:
                self._value(head & 15, None, depth + 1)
            elif head & 15 == _STRUCT:
                values.append(self.struct(wanted[0], depth + 1))
            else:
                raise ValueError(f"a list of values of type {head & 15}")
        return values

    def _skip(self, count: int) -> int:
        begin, self.at = self.at, self.at + count
        if self.at > len(self._data):
            raise IndexError(self.at)
        return begin

    def _varint(self) -> int:
        value = shift = 0
        while shift < 70:
            byte = self._data[self.at]
            self.at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
        raise ValueError("a number that does not end")

    def _zigzag(self, bits: int = 64) -> int:
        value = self._varint() & ((1 << bits) - 1)
        return value >> 1 ^ -(value & 1)


def _check_depth(depth: int) -> None:
    if depth > MAX_THRIFT_DEPTH:
        raise LimitError(f"a value {depth} levels deep, where {MAX_THRIFT_DEPTH} are the most")
