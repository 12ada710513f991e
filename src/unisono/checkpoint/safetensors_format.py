"""The header of a safetensors file: 8 bytes little-endian length and JSON; the tensors' raw bytes follow.

Format: https://huggingface.co/docs/safetensors, "Format". Our own code, because saving must stream (the package needs
all bytes at once) and reading must not trust the file: every number is checked against the size of the file before
anything is allocated.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from unisono.storage.limits import MAX_SAFETENSORS_HEADER_BYTES, decode_json, num_elements

_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}

# The header is padded with blanks so that tensor bytes start on a cache line.
_DATA_ALIGNMENT = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorExtent:
    """The place of a tensor in a file: bytes ``[begin, end)`` from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def dtype_code(dtype: torch.dtype) -> str | None:
    """The safetensors name of ``dtype``, or None."""
    return _CODES.get(dtype)


def dtype_from_code(code: str) -> torch.dtype:
    """The dtype of a safetensors name. Raises ValueError for an unknown one."""
    if code not in _DTYPES:
        raise ValueError(f"unknown dtype {code!r}")
    return _DTYPES[code]


def num_bytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """The size of a dense tensor in bytes."""
    return dtype.itemsize * math.prod(shape)


def build_header(
    tensors: Sequence[tuple[str, torch.dtype, Sequence[int]]], metadata: Mapping[str, str]
) -> tuple[bytes, list[int]]:
    """The header bytes of a file of tensors ``(key, dtype, shape)`` in this order, and the position of each tensor."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    position, begins = 0, list[int]()
    for key, dtype, shape in tensors:
        if key in header:
            raise ValueError(f"two tensors are called {key!r}")
        end = position + num_bytes(dtype, shape)
        header[key] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [position, end]}
        begins.append(position)
        position = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % _DATA_ALIGNMENT)
    return struct.pack("<Q", len(text)) + text, [8 + len(text) + begin for begin in begins]


def header_length(first: bytes, file_bytes: int) -> int:
    """The length of the JSON header, from the first 8 bytes of a file. Raises ValueError if it is impossible."""
    if len(first) < 8:
        raise ValueError(f"{len(first)} bytes are too few for a header")
    (length,) = struct.unpack("<Q", first)
    if length > min(MAX_SAFETENSORS_HEADER_BYTES, file_bytes - 8):
        raise ValueError(f"a header of {length} bytes does not fit a file of {file_bytes}")
    return length


def parse_header(text: bytes, file_bytes: int) -> dict[str, TensorExtent]:
    """The tensors of a file of ``file_bytes`` bytes with the JSON header ``text``.

    Raises ValueError unless they fill the file exactly, without gap or overlap, and each has the size of its shape.
    """
    header = decode_json(text, max_bytes=MAX_SAFETENSORS_HEADER_BYTES)
    if not isinstance(header, dict):
        raise ValueError("the header is no JSON object")
    start = 8 + len(text)
    extents: dict[str, TensorExtent] = {}
    for key, value in cast(dict[str, Any], header).items():
        if key != "__metadata__":
            extents[key] = _extent(key, value, start)
    position = start
    for extent in sorted(extents.values(), key=lambda extent: (extent.begin, extent.end)):
        if extent.begin != position:
            raise ValueError(f"tensor bytes begin at {extent.begin} where {position} was due")
        position = extent.end
    if position != file_bytes:
        raise ValueError(f"tensors end at byte {position} of {file_bytes}")
    return extents


def _extent(key: str, value: Any, start: int) -> TensorExtent:
    try:
        dtype = dtype_from_code(value["dtype"])
        shape = tuple(value["shape"])
        begin, end = value["data_offsets"]
        numbers = (*shape, begin, end)
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError("sizes are whole numbers from 0")
        num_elements(shape, dtype.itemsize)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"entry {key!r} is malformed: {error}") from error
    if end - begin != num_bytes(dtype, shape):
        raise ValueError(f"entry {key!r} has {end - begin} bytes, its shape needs {num_bytes(dtype, shape)}")
    return TensorExtent(dtype=dtype, shape=shape, begin=start + begin, end=start + end)
