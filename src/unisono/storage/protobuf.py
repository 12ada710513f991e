"""The wire format of protocol buffers: the fields of a message, as views of its bytes.

Source: Protocol Buffers encoding guide. Functions raise ValueError for bytes that are no message.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

VARINT: Final = 0
BYTES: Final = 2
FIXED32: Final = 5


def fields(data: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    """Number, wire type and content of each field; the content of an integer is its varint."""
    at = 0
    while at < len(data):
        tag, at = varint(data, at)
        kind = tag & 7
        if kind == VARINT:
            end = varint(data, at)[1]
        elif kind == FIXED32:
            end = at + 4
        elif kind == BYTES:
            length, at = varint(data, at)
            end = at + length
        else:
            raise ValueError(f"wire type {kind}")
        if end > len(data):
            raise ValueError(f"a field of {end - at} bytes, where {len(data) - at} are left")
        yield tag >> 3, kind, data[at:end]
        at = end


def varint(data: memoryview, at: int) -> tuple[int, int]:
    """The number that begins at ``at``, and where it ends."""
    value = 0
    for place, byte in enumerate(data[at : at + 10]):
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, at + place + 1
    raise ValueError("an integer that does not end")


def encode_varint(value: int) -> bytes:
    """The varint of a number that is not negative."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
