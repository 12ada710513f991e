"""``.tfrecord``, ``.tfrecords``: TensorFlow's records, with both checksums verified, and the features of ``tf.Example`` as
fields.

u64 length | u32 masked CRC-32C of the length | the record | u32 masked CRC-32C of the record       all little-endian
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Collection, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Final

from unisono.data.convert.formats.byte_source import ByteSource
from unisono.data.convert.formats.crc32c import crc32c, masked_crc32c
from unisono.data.convert.formats.table import Row, Table, damaged_error, unreadable_error
from unisono.data.convert.formats.tf_example import FeatureValues, read_example
from unisono.data.mindrecord import FieldType
from unisono.sanitize import listed, quoted
from unisono.storage.limits import LimitError

_LOG: Final = logging.getLogger("unisono.data")
_HEAD: Final = struct.Struct("<QI")
_CRC: Final = struct.Struct("<I")


def read(path: Path, arrays: Collection[str] = ()) -> Table:
    """The records as rows of their features if the first is a ``tf.Example``; else, with a warning, as rows of ``data``.

    A feature with one value is that value (bytes, int, or a float that was float32), else an int64 or float32 array [values];
    features in ``arrays`` are arrays in every row. Raises DataError for several bytes values.
    """
    records = _records(path)
    first = next(records, None)
    if first is None:
        return Table(rows=[], schema=None)
    try:
        example = read_example(first[1])
    except LimitError as error:
        raise damaged_error(path, first[0], str(error), record=0) from error
    except ValueError:
        example = {}
    if not example:
        if arrays:
            raise unreadable_error(
                f"{path}: {sorted(arrays)} as arrays", "the records are no tf.Example", "leave it out"
            )
        _LOG.warning("%s: the first record is no tf.Example: rows have the records as they are, as 'data'", path)
        return Table(
            rows=({"data": payload} for _, payload in chain([first], records)), schema={"data": FieldType(type="bytes")}
        )
    if unknown := sorted(set(arrays) - example.keys()):
        raise unreadable_error(f"{path}: {unknown[0]!r} as array", f"features are {listed(example)}", "one of these")
    row = _row(path, 0, 0, first[1], arrays)
    schema = {name: _kind(value, example[name]) for name, value in row.items()}
    return Table(rows=_rows(path, chain([first], records), arrays), schema=schema)


def _rows(path: Path, records: Iterator[tuple[int, bytes]], arrays: Collection[str]) -> Iterator[Row]:
    for number, (offset, payload) in enumerate(records):
        yield _row(path, number, offset, payload, arrays)


def _row(path: Path, number: int, offset: int, payload: bytes, arrays: Collection[str]) -> dict[str, Any]:
    try:
        return {name: _value(name, values, name in arrays) for name, values in read_example(payload).items()}
    except ValueError as error:
        raise damaged_error(path, offset, str(error), record=number) from error


def _value(name: str, values: FeatureValues, as_array: bool) -> Any:
    if isinstance(values, list):
        if len(values) != 1 or as_array:
            raise ValueError(
                f"feature {quoted(name)} is a list of {len(values)} bytes, and a field of bytes is one of them"
            )
        return values[0]
    return values[0].item() if len(values) == 1 and not as_array else values


def _kind(value: Any, values: FeatureValues) -> FieldType:
    if isinstance(values, list):
        return FieldType(type="bytes")
    return FieldType(type=values.dtype.name, shape=None if isinstance(value, int | float) else (-1,))


def _records(path: Path) -> Iterator[tuple[int, bytes]]:
    """Offset and bytes of each record."""
    number = 0
    with ByteSource(path) as source:
        while True:
            offset = source.offset
            head = source.read_up_to(_HEAD.size)
            if not head:
                return
            if len(head) < _HEAD.size:
                raise damaged_error(path, offset, "the file ends inside the length of a record", record=number)
            length, crc = _HEAD.unpack(head)
            if masked_crc32c(crc32c(head[:8])) != crc:
                raise damaged_error(path, offset, f"its length, {length}, does not have its checksum", record=number)
            if source.size is not None and length > source.size - source.offset - _CRC.size:
                detail = f"it says {length:,} bytes, and {source.size - source.offset:,} are left with its checksum"
                raise damaged_error(path, offset, detail, record=number)
            payload = source.read(length, "a record", record=number)
            (crc,) = _CRC.unpack(source.read(_CRC.size, "a record's checksum", record=number))
            if masked_crc32c(crc32c(payload)) != crc:
                raise damaged_error(path, offset, f"its {length} bytes do not have their checksum", record=number)
            yield offset, payload
            number += 1
