"""Arrays of an ``.npz`` file, as MXNet 2 writes parameters in NumPy mode and ``numpy.savez`` writes arrays.

Such a file is a ZIP archive of ``.npy`` files. Members that are stored as they are get read where they lie; nothing is unpacked.
Sources: PKWARE's APPNOTE 6.3 (4.3.7, 4.3.12, 4.3.14 to 4.3.16, 4.5.3), ``numpy.lib.format``. Functions raise ValueError.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from typing import Final

import numpy as np
import torch
from torch import Tensor

from unisono.interop.stored_tensor import StoredTensor
from unisono.sanitize import quoted
from unisono.storage.limits import MAX_TENSORS, num_elements

MAGIC: Final = b"PK\x03\x04"
_END, _END_64, _ENTRY = b"PK\x05\x06", b"PK\x06\x06", b"PK\x01\x02"
_END_BYTES, _LOCAL_BYTES, _ENTRY_BYTES = 22, 30, 46
_MOST_COMMENT_BYTES: Final = 1 << 16
_IN_EXTRA: Final = 0xFFFFFFFF  # a number of 64 bits, among the extra fields
_NPY: Final = ".npy"
# a literal of Python, of which a dtype of numbers, a flag and a shape are read, and nothing is evaluated
_HEADER: Final = re.compile(
    rb"\{'descr': '([<>|=](?:[iu][1248]|f[248]|b1))', 'fortran_order': (True|False), "
    rb"'shape': \(((?:\d{1,19}, ?)*(?:\d{1,19})?)\), ?\}\s*"
)


def read_npz(data: memoryview) -> dict[str, StoredTensor]:
    """The arrays by name."""
    tensors: dict[str, StoredTensor] = {}
    for member, content, crc in _members(data):
        name = member.removesuffix(_NPY)
        if name == member:
            raise ValueError(f"a ZIP file with {quoted(member)}, where one of MXNet has arrays of NumPy alone")
        if name in tensors:
            raise ValueError(f"two arrays are called {quoted(name)}")
        try:
            tensors[name] = _npy(content)
        except ValueError as error:
            raise ValueError(f"{quoted(name)}: {error}") from error
        if zlib.crc32(content) != crc:
            raise ValueError(f"{quoted(name)}: its CRC-32 is another than the archive says")
    return tensors


def _members(data: memoryview) -> Iterator[tuple[str, memoryview, int]]:
    """Name, content and CRC-32 of each member."""
    count, at = _directory(data)
    if count > MAX_TENSORS:
        raise ValueError(f"{count} members, where {MAX_TENSORS} are the most")
    for _ in range(count):
        head = _part(data, at, _ENTRY_BYTES, "an entry of the directory")
        flags, method, crc, stored, size, name_bytes, extra_bytes, comment_bytes, begin = struct.unpack(
            "<8xHH4xIIIHHH8xI", head
        )
        name = bytes(_part(data, at + _ENTRY_BYTES, name_bytes, "a name")).decode("utf-8", "replace")
        extra = _part(data, at + _ENTRY_BYTES + name_bytes, extra_bytes, "extra fields")
        at += _ENTRY_BYTES + name_bytes + extra_bytes + comment_bytes
        size, stored, begin = _of_64_bits(extra, size, stored, begin)
        if bytes(head[:4]) != _ENTRY or method or flags & 1 or size != stored:
            raise ValueError(f"{quoted(name)} is compressed or encrypted; numpy.savez and MXNet write neither")
        local = _part(data, begin, _LOCAL_BYTES, f"the header of {quoted(name)}")
        skipped = sum(struct.unpack("<26xHH", local))
        yield name, _part(data, begin + _LOCAL_BYTES + skipped, size, quoted(name)), crc


def _directory(data: memoryview) -> tuple[int, int]:
    """The number of members, and where the directory begins."""
    tail_at = max(0, len(data) - _END_BYTES - _MOST_COMMENT_BYTES)
    tail = bytes(data[tail_at:])
    found = tail.rfind(_END)
    if found < 0:
        raise ValueError("a ZIP file without its directory: it ends early")
    end = _part(data, tail_at + found, _END_BYTES, "the end of the directory")
    count, begin = struct.unpack("<10xH4xI2x", end)
    if count == 0xFFFF or begin == _IN_EXTRA:
        locator = _part(data, tail_at + found - 20, 20, "the locator of the directory")
        wide = _part(data, struct.unpack("<8xQ4x", locator)[0], 56, "the end of the directory")
        if bytes(wide[:4]) != _END_64:
            raise ValueError("a ZIP file without its directory")
        count, begin = struct.unpack("<32xQ8xQ", wide)
    return count, begin


def _of_64_bits(extra: memoryview, *numbers: int) -> list[int]:
    """``numbers``, those that do not fit 32 bits from the extra fields."""
    found, at = list(numbers), 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack("<HH", extra[at : at + 4])
        if kind == 1:
            wide = iter(struct.unpack(f"<{size // 8}Q", _part(extra, at + 4, size // 8 * 8, "an extra field")))
            return [next(wide, number) if number == _IN_EXTRA else number for number in found]
        at += 4 + size
    return found


def _part(data: memoryview, begin: int, count: int, what: str) -> memoryview:
    if not 0 <= begin <= begin + count <= len(data):
        raise ValueError(f"{what} at byte {begin} takes {count} bytes, in {len(data)}")
    return data[begin : begin + count]


def _npy(content: memoryview) -> StoredTensor:
    magic, major, length = _part(content, 0, 6, "a header"), content[6:7], content[8:12]
    if bytes(magic) != b"\x93NUMPY" or bytes(major) not in (b"\1", b"\2") or len(length) < 4:
        raise ValueError("no array of version 1 or 2 of NumPy's format")
    begin = 10 if bytes(major) == b"\1" else 12
    num_bytes = int.from_bytes(length[: begin - 8], "little")
    header = _HEADER.fullmatch(bytes(_part(content, begin, num_bytes, "a header")))
    if header is None:
        raise ValueError("no array of plain numbers")
    stored, shape = np.dtype(header[1].decode()), tuple(int(dim) for dim in header[3].split(b",") if dim.strip())
    is_fortran, native = header[2] == b"True", stored.newbyteorder("=")
    values = content[begin + num_bytes :]
    size = num_elements(shape, stored.itemsize) * stored.itemsize
    if len(values) != size:
        raise ValueError(f"{len(values)} bytes of values, where shape {list(shape)} needs {size}")

    def load() -> Tensor:
        array = np.frombuffer(bytearray(values), stored)
        array = array.reshape(shape[::-1]).T if is_fortran else array.reshape(shape)
        return torch.from_numpy(np.ascontiguousarray(array.astype(native)).reshape(shape))

    return StoredTensor(dtype=torch.from_numpy(np.empty(0, native)).dtype, shape=tuple(shape), load=load)
