"""MindSpore's ``.ckpt`` files, read and written without MindSpore.

    Checkpoint    1: Value, repeated          Value     1: tag (the name)  2: TensorProto  3: a map of tensors
    TensorProto   1: dims, repeated  2: dtype as text  3: the values, little-endian

A tensor above 512 MiB is several values with the same tag, one after the other, each with the dims of the whole. ``str`` values
hold text in UTF-32. A file may end with ``crc_num`` and its CRC-32 in 10 bytes. Source: MindSpore 2.10, message
``Checkpoint`` and ``train/serialization.py``. Functions raise ValueError.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO, Final

import torch
from torch import Tensor

from unisono.interop.stored_tensor import StoredTensor, dense, to_bytes
from unisono.sanitize import quoted
from unisono.storage.limits import MAX_DIMS, MAX_TENSORS
from unisono.storage.protobuf import BYTES, VARINT, encode_varint, fields, varint

ENCRYPTED_MAGIC: Final = (0x7F3A5ED8).to_bytes(4, "little")
_CRC: Final = b"crc_num"
_CRC_BYTES: Final = 10
_SLICE_BYTES: Final = 512 << 20
_TEXT: Final = "str"
_DTYPES: Final = {
    "Float32": torch.float32,
    "Float64": torch.float64,
    "Float16": torch.float16,
    "BFloat16": torch.bfloat16,
    "Int8": torch.int8,
    "Int16": torch.int16,
    "Int32": torch.int32,
    "Int64": torch.int64,
    "UInt8": torch.uint8,
    "UInt16": torch.uint16,
    "UInt32": torch.uint32,
    "UInt64": torch.uint64,
    "Bool": torch.bool,
}
NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(kw_only=True, slots=True)
class _Value:
    """A tensor as it is stored: its parts hold the values one after the other."""

    kind: str
    dims: tuple[int, ...]
    parts: list[memoryview] = field(default_factory=list[memoryview])


def read_checkpoint(data: memoryview) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """The tensors of a ``.ckpt`` file by name, and the text values beside them."""
    stored: dict[str, _Value] = {}
    last = ""
    for number, (tag, value) in enumerate(_values(_without_crc(data))):
        if tag in stored:
            first = stored[tag]
            if tag != last or (first.kind, first.dims) != (value.kind, value.dims):
                raise ValueError(f"value {number}: there is another tensor {quoted(tag)}")
            first.parts += value.parts
        else:
            stored[tag] = value
        last = tag
        if number >= MAX_TENSORS:
            raise ValueError(f"more than {MAX_TENSORS} values")
    tensors: dict[str, StoredTensor] = {}
    texts: dict[str, str] = {}
    for tag, value in stored.items():
        try:
            if value.kind == _TEXT:
                texts[tag] = b"".join(value.parts).decode("utf-32-le").rstrip("\0")
            else:
                tensors[tag] = _tensor(value)
        except ValueError as error:
            raise ValueError(f"{quoted(tag)}: {error}") from error
    return tensors, texts


def _tensor(value: _Value) -> StoredTensor:
    if value.kind not in _DTYPES:
        raise ValueError(f"dtype {quoted(value.kind)}, where {', '.join(_DTYPES)} are known")
    dtype = _DTYPES[value.kind]
    # a number alone has dims [0]
    shape = () if value.dims == (0,) and sum(map(len, value.parts)) == dtype.itemsize else value.dims
    return dense(dtype, shape, value.parts)


def _without_crc(data: memoryview) -> memoryview:
    """The messages of a file. Raises ValueError if its CRC-32 is that of others."""
    content, tail = data[: -len(_CRC) - _CRC_BYTES], data[-len(_CRC) - _CRC_BYTES :]
    if bytes(tail[: len(_CRC)]) != _CRC:
        return data
    found, expected = zlib.crc32(content), int.from_bytes(tail[len(_CRC) :], "big")
    if found != expected:
        raise ValueError(f"its CRC-32 is {found:#010x}, and the file says {expected:#x}")
    return content


def _values(data: memoryview) -> Iterator[tuple[str, _Value]]:
    for number, kind, content in fields(data):
        if (number, kind) != (1, BYTES):
            raise ValueError(f"field {number} of wire type {kind}, where a checkpoint has values alone")
        tag: str | None = None
        value: _Value | None = None
        for part, part_kind, inner in fields(content):
            if part == 1 and part_kind == BYTES and tag is None:
                tag = bytes(inner).decode()
            elif part == 2 and part_kind == BYTES and value is None:
                value = _value(inner)
            elif part == 3:
                raise ValueError(f"{quoted(tag or '')} is a map parameter, which no PyTorch tensor is")
            else:
                raise ValueError(f"a value with field {part} of wire type {part_kind}")
        if tag is None or value is None:
            raise ValueError("a value without a name or a tensor")
        yield tag, value


def _value(content: memoryview) -> _Value:
    dims: list[int] = []
    kind: str | None = None
    values: memoryview | None = None
    for number, wire_type, inner in fields(content):
        if number == 1 and wire_type == VARINT:
            dims.append(_signed(varint(inner, 0)[0]))
        elif number == 1 and wire_type == BYTES:  # packed, as writers of other versions may
            at = 0
            while at < len(inner) and len(dims) <= MAX_DIMS:
                dim, at = varint(inner, at)
                dims.append(_signed(dim))
        elif number == 2 and wire_type == BYTES and kind is None:
            kind = bytes(inner).decode()
        elif number == 3 and wire_type == BYTES and values is None:
            values = inner
        else:
            raise ValueError(f"a tensor with field {number} of wire type {wire_type}")
        if len(dims) > MAX_DIMS:
            raise ValueError(f"a shape of more than {MAX_DIMS} dims")
    if kind is None or values is None:
        raise ValueError("a tensor without a dtype or values")
    return _Value(kind=kind, dims=tuple(dims), parts=[values])


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def write_checkpoint(
    file: BinaryIO, layout: Sequence[tuple[str, torch.dtype, Sequence[int]]], read: Callable[[str], Tensor]
) -> None:
    """Write a ``.ckpt`` file, with one tensor in memory at a time.

    Args:
        file: An empty file.
        layout: Name, dtype and shape of each tensor, in order. The dtypes are among ``NAMES``.
        read: The values by name.
    """
    for name, dtype, shape in layout:
        content = to_bytes(read(name))
        dims = b"".join(_field(1, VARINT) + encode_varint(dim) for dim in shape or (0,))
        head = dims + _bytes_head(2, len(NAMES[dtype])) + NAMES[dtype].encode()
        tag = _bytes_head(1, len(name.encode())) + name.encode()
        for begin in range(0, max(1, len(content)), _SLICE_BYTES):
            piece = content[begin : begin + _SLICE_BYTES]
            tensor_head = head + _bytes_head(3, len(piece))
            value_head = tag + _bytes_head(2, len(tensor_head) + len(piece))
            file.write(_bytes_head(1, len(value_head) + len(tensor_head) + len(piece)) + value_head + tensor_head)
            file.write(piece)


def _field(number: int, wire_type: int) -> bytes:
    return encode_varint(number << 3 | wire_type)


def _bytes_head(number: int, length: int) -> bytes:
    return _field(number, BYTES) + encode_varint(length)
