"""Decode ``tf.Example`` from the protocol buffer wire format.

    Example   1: Features       Features  1: map entry, repeated       entry    1: name  2: Feature
    Feature   1: BytesList  2: FloatList  3: Int64List        each list  1: value, repeated, numbers also packed

Wire format: Protocol Buffers encoding guide. Functions raise ValueError; the caller adds the record. No message contains itself,
so the nesting depth is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from unisono.sanitize import quoted
from unisono.storage.limits import MAX_RECORD_BYTES, LimitError, check_count
from unisono.storage.protobuf import BYTES, FIXED32, VARINT, fields

_STRETCH: Final = 1 << 16  # bytes of varints decoded at once: what is computed on the way takes 60 times their size
FeatureValues = list[bytes] | NDArray[Any]


def read_example(data: bytes) -> dict[str, FeatureValues]:
    """The features by name, in order: a list of bytes, or float32 or int64 [values]."""
    example: dict[str, FeatureValues] = {}
    for features in _messages(memoryview(data), 1):
        for entry in _messages(features, 1):
            name, values = _entry(entry)
            if name in example:
                raise ValueError(f"it has feature {quoted(name)} twice")
            example[name] = values
            check_count(len(example), "features")
    return example


def _entry(entry: memoryview) -> tuple[str, FeatureValues]:
    name: str | None = None
    values: FeatureValues | None = None
    for number, kind, content in fields(entry):
        if kind != BYTES or number not in (1, 2) or (name if number == 1 else values) is not None:
            raise ValueError(f"a feature's entry has field {number} of wire type {kind}")
        if number == 1:
            name = bytes(content).decode()
        else:
            values = _feature(content)
    if name is None or values is None:
        raise ValueError("a feature without a name or a value")
    return name, values


def _feature(feature: memoryview) -> FeatureValues:
    lists = list(islice(fields(feature), 2))
    if len(lists) != 1 or lists[0][1] != BYTES or lists[0][0] not in _READERS:
        raise ValueError("a feature is one list of bytes, floats or ints")
    return _READERS[lists[0][0]](lists[0][2])


def _bytes_list(content: memoryview) -> list[bytes]:
    # a field is one of them: of several only the number matters, and each would take 20 times its own size
    values: list[bytes] = []
    for number, value in enumerate(_messages(content, 1)):
        check_count(number, "values of a list of bytes")
        values.append(bytes(value) if not number else b"")
    return values


def _float_list(content: memoryview) -> NDArray[Any]:
    if len(content) % 5 == 0:  # unpacked: a tag before each, decoded at once
        cells = np.frombuffer(content, np.uint8).reshape(-1, 5)
        if (cells[:, 0] == (1 << 3 | FIXED32)).all():
            return np.ascontiguousarray(cells[:, 1:]).view("<f4").reshape(-1).astype(np.float32)
    return np.frombuffer(_numbers(content, FIXED32, 4, "floats"), "<f4").astype(np.float32)


def _int_list(content: memoryview) -> NDArray[Any]:
    if len(content) and content[0] == (
        1 << 3 | VARINT
    ):  # unpacked: a tag, which is a varint too, before each; decoded at once
        numbers = _varints(np.frombuffer(content, np.uint8))
        if len(numbers) % 2 == 0 and (numbers[::2] == (1 << 3 | VARINT)).all():
            return np.ascontiguousarray(numbers[1::2])
    return _varints(np.frombuffer(_numbers(content, VARINT, 1, "ints"), np.uint8))


def _numbers(content: memoryview, alone: int, item_bytes: int, what: str) -> bytearray:
    """The bytes of a list of numbers, each packed with others or ``alone``, of that wire type."""
    numbers = bytearray()
    for count, (number, kind, piece) in enumerate(fields(content)):
        check_count(count, f"parts of a list of {what}")
        if number != 1 or kind not in (BYTES, alone) or len(piece) % item_bytes:
            raise ValueError(f"a malformed list of {what}")
        numbers += piece
    return numbers


_READERS: Final[dict[int, Callable[[memoryview], FeatureValues]]] = {1: _bytes_list, 2: _float_list, 3: _int_list}


def _varints(content: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Concatenated varints: 7 bits per byte, low bits first, the top bit set in all but the last byte."""
    count = int(np.count_nonzero(content < 0x80))
    if 8 * count > MAX_RECORD_BYTES:
        raise LimitError(f"{count:,} integers, where {MAX_RECORD_BYTES // 8:,} are the most")
    if content.size and content[-1] >= 0x80:
        raise ValueError("an integer that does not end")
    values = np.empty(count, np.int64)
    at = begin = 0
    while begin < content.size:
        end = min(begin + _STRETCH, content.size)
        while content[end - 1] >= 0x80 and end - begin < _STRETCH + 10:  # to the end of the last one
            end += 1
        stretch = _stretch_of_varints(content[begin:end])
        values[at : at + stretch.size] = stretch
        at, begin = at + stretch.size, end
    return values


def _stretch_of_varints(content: NDArray[np.uint8]) -> NDArray[np.int64]:
    ends = np.flatnonzero(content < 0x80) + 1
    if not ends.size or ends[-1] != content.size:
        raise ValueError("an integer of more than 64 bits")
    begins = np.concatenate([[0], ends[:-1]])
    sizes = ends - begins
    if sizes.max() > 10 or (content[ends[sizes == 10] - 1] > 1).any():
        raise ValueError("an integer of more than 64 bits")
    places = np.arange(content.size) - np.repeat(begins, sizes)
    parts = (content & np.uint8(0x7F)).astype(np.uint64) << (7 * places).astype(np.uint64)
    return np.bitwise_or.reduceat(parts, begins).view(np.int64)


def _messages(data: memoryview, wanted: int) -> Iterator[memoryview]:
    for number, kind, content in fields(data):
        if (number, kind) != (wanted, BYTES):
            raise ValueError(
                f"field {number} of wire type {kind}, where only field {wanted} of wire type {BYTES} can be"
            )
        yield content
