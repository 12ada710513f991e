"""MXNet's ``.params`` files, read and written without MXNet.

    file      u64 0x112, u64 0, u64 count, arrays, u64 count of names, each u64 length and UTF-8
    array     u32 magic, i32 storage (0 dense, 1 row-sparse, 2 CSR), [shape of the stored values], shape,
              i32 device, i32 device number, i32 dtype, [for each index array: i32 dtype, shape], values, [index arrays]
    shape     i32 number of dims, i64 dims

All numbers are little-endian. The storage came with version 2 (magic ...C9) and shapes of NumPy with version 3 (...CA): before,
a shape without dims means that there is no array. Version 1 (...C8) has no storage; still older arrays begin with their number
of dims, and dims are u32. Source: MXNet 1.9.1, ``NDArray::Save`` and ``NDArray::Load``. Functions raise ValueError.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unisono.interop.stored_tensor import StoredTensor, dense, to_bytes
from unisono.sanitize import quoted
from unisono.storage.limits import MAX_DIMS, MAX_TENSORS, check_expansion, num_elements

MAGIC: Final = struct.pack("<Q", 0x112)
_V1, _V2, _V3 = 0xF993FAC8, 0xF993FAC9, 0xF993FACA
_DENSE, _ROW_SPARSE, _CSR = 0, 1, 2
_DTYPES: Final = {
    0: torch.float32,
    1: torch.float64,
    2: torch.float16,
    3: torch.uint8,
    4: torch.int32,
    5: torch.int8,
    6: torch.int64,
    7: torch.bool,
    8: torch.int16,
    9: torch.uint16,
    10: torch.uint32,
    11: torch.uint64,
    12: torch.bfloat16,
}
CODES: Final = {dtype: code for code, dtype in _DTYPES.items()}
_INDEX_DTYPES: Final = {4: np.dtype("<i4"), 6: np.dtype("<i8")}


class _Cursor:
    """A place in the bytes of a file."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = len(MAGIC)

    def take(self, count: int, what: str) -> memoryview:
        if not 0 <= count <= len(self._data) - self._at:
            raise ValueError(
                f"{what} takes {count} bytes from byte {self._at} on, where {len(self._data) - self._at} are left"
            )
        self._at += count
        return self._data[self._at - count : self._at]

    def number(self, kind: str, what: str) -> int:
        (value,) = struct.unpack("<" + kind, self.take(struct.calcsize("<" + kind), what))
        return value

    def shape(self, *, num_dims: int | None = None, kind: str = "q") -> tuple[int, ...] | None:
        """A shape; None if its number of dims is negative, which means that it is unknown."""
        count = self.number("i", "the number of dims") if num_dims is None else num_dims
        if count > MAX_DIMS:
            raise ValueError(f"a shape of {count} dims, where {MAX_DIMS} are the most")
        if count < 0:
            return None
        dims = struct.unpack(f"<{count}{kind}", self.take(count * struct.calcsize(kind), "a shape"))
        num_elements(dims)
        return dims

    def left(self) -> int:
        return len(self._data) - self._at


def read_params(data: memoryview) -> dict[str, StoredTensor]:
    """The arrays of a ``.params`` file by name, without the ``arg:`` and ``aux:`` before names of exported models.

    Arrays without names are called "0", "1" and so on. Empty slots, which have no shape, are left out.
    """
    file = _Cursor(data)
    if file.number("Q", "the reserved number"):
        raise ValueError("the number after the magic number is not 0")
    count = file.number("Q", "the number of arrays")
    if count > MAX_TENSORS:
        raise ValueError(f"{count} arrays, where {MAX_TENSORS} are the most")
    arrays = list(_arrays(file, count))
    num_names = file.number("Q", "the number of names")
    if num_names not in (0, count):
        raise ValueError(f"{num_names} names of {count} arrays")
    names = [_name(file) for _ in range(num_names)] if num_names else [str(number) for number in range(count)]
    if file.left():
        raise ValueError(f"{file.left()} bytes after the last name")
    for name, times in Counter(names).items():
        if times > 1:
            raise ValueError(f"two arrays are called {quoted(name)}")
    return without_prefixes({name: array for name, array in zip(names, arrays, strict=True) if array is not None})


def without_prefixes(arrays: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The arrays under names without ``arg:`` and ``aux:``. Raises ValueError if two are called the same then."""
    tensors: dict[str, StoredTensor] = {}
    for name, array in arrays.items():
        name = name.removeprefix("arg:").removeprefix("aux:")
        if name in tensors:
            raise ValueError(f"two arrays are called {quoted(name)}")
        tensors[name] = array
    return tensors


def _name(file: _Cursor) -> str:
    return bytes(file.take(file.number("Q", "the length of a name"), "a name")).decode()


def _arrays(file: _Cursor, count: int) -> Iterator[StoredTensor | None]:
    for number in range(count):
        try:
            yield _array(file)
        except ValueError as error:
            raise ValueError(f"array {number} of {count}: {error}") from error


def _array(file: _Cursor) -> StoredTensor | None:
    magic = file.number("I", "the magic number")
    if magic in (_V2, _V3):
        storage = file.number("i", "the storage type")
        if storage not in (_DENSE, _ROW_SPARSE, _CSR):
            raise ValueError(f"storage type {storage}, where 0 is dense, 1 row-sparse and 2 CSR")
        stored = file.shape() if storage != _DENSE else None
        shape = file.shape()
        if shape is None or (magic == _V2 and not shape):
            return None
        dtype, index_dtypes = _dtype(file), [_index_dtype(file) for _ in range(storage)]
        if storage == _DENSE:
            return _dense(file, dtype, shape)
        if stored is None:
            raise ValueError("values of an unknown shape")
        values = file.take(num_elements(stored, dtype.itemsize) * dtype.itemsize, "the values")
        indices = [
            np.frombuffer(file.take(num_elements(dims, kind.itemsize) * kind.itemsize, "an index array"), kind)
            for kind, dims in index_dtypes
        ]
        return _sparse(dtype, shape, stored, values, indices)
    shape = file.shape() if magic == _V1 else file.shape(num_dims=magic, kind="I")
    if not shape:
        return None
    return _dense(file, _dtype(file), shape)


def _dtype(file: _Cursor) -> torch.dtype:
    """The dtype, after the device, which says nothing here."""
    file.number("q", "the device")
    code = file.number("i", "the dtype")
    if code not in _DTYPES:
        raise ValueError(f"dtype {code}, where 0 to {max(_DTYPES)} are known")
    return _DTYPES[code]


def _index_dtype(file: _Cursor) -> tuple[np.dtype[Any], tuple[int, ...]]:
    code, shape = file.number("i", "the dtype of an index array"), file.shape()
    if code not in _INDEX_DTYPES or shape is None or len(shape) != 1:
        raise ValueError(f"an index array of dtype {code} and shape {shape}, where it is one row of integers")
    return _INDEX_DTYPES[code], shape


def _dense(file: _Cursor, dtype: torch.dtype, shape: tuple[int, ...]) -> StoredTensor:
    size = num_elements(shape, dtype.itemsize) * dtype.itemsize
    return dense(dtype, shape, [file.take(size, f"an array of shape {list(shape)}")])


def _sparse(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stored: tuple[int, ...],
    values: memoryview,
    indices: Sequence[NDArray[Any]],
) -> StoredTensor:
    """The dense tensor of a sparse array, whose values not stored are 0.

    Args:
        dtype: Of the values.
        shape: Of the whole array.
        stored: Shape of the stored values.
        values: The stored values.
        indices: Of row-sparse arrays the rows; of CSR the begin of each row in the values, and the columns.
    """
    size = num_elements(shape, dtype.itemsize) * dtype.itemsize
    check_expansion(size, len(values))
    if len(indices) == 1:
        (rows,) = indices
        if not shape or stored != (len(rows), *shape[1:]):
            raise ValueError(f"{len(rows)} rows with values of shape {list(stored)} in an array of shape {list(shape)}")
        _check_sorted(rows, shape[0], "rows")
        places, num_cells = rows, shape[0]
    else:
        begins, columns = indices
        ends_well = len(begins) == shape[0] + 1 and begins[0] == 0 and begins[-1] == len(columns) if shape else False
        if len(shape) != 2 or not ends_well or (np.diff(begins) < 0).any() or stored != (len(columns),):
            raise ValueError(
                f"begins of {len(begins) - 1} rows and {len(columns)} columns of an array of {list(shape)}"
            )
        if len(columns) and not (columns.min() >= 0 and columns.max() < shape[1]):
            raise ValueError(f"columns outside of an array of {list(shape)}")
        rows = np.repeat(np.arange(shape[0], dtype=np.int64), np.diff(begins))
        places, num_cells = rows * shape[1] + columns, math.prod(shape)
        _check_sorted(places, num_cells, "columns")

    def load() -> Tensor:
        cells = np.zeros((num_cells, size // max(1, num_cells)), np.uint8)
        if len(places):
            cells[places] = np.frombuffer(values, np.uint8).reshape(len(places), -1)
        whole = torch.from_numpy(cells).reshape(-1)
        return (whole != 0 if dtype is torch.bool else whole.view(dtype)).reshape(shape)

    return StoredTensor(dtype=dtype, shape=shape, load=load)


def _check_sorted(places: NDArray[Any], count: int, what: str) -> None:
    if len(places) and not (places[0] >= 0 and places[-1] < count and (np.diff(places) > 0).all()):
        raise ValueError(f"{what} that do not rise from 0 to less than {count}")


def write_params(
    file: BinaryIO, layout: Sequence[tuple[str, torch.dtype, Sequence[int]]], read: Callable[[str], Tensor]
) -> None:
    """Write a ``.params`` file, with one tensor in memory at a time.

    Arrays are of version 2. If one has no dims or an empty one, all are of version 3, which MXNet reads under ``npx.set_np()``.

    Args:
        file: An empty file.
        layout: Name, dtype and shape of each tensor, in order. The dtypes are among ``CODES``.
        read: The values by name.
    """
    version = _V3 if any(0 in shape or not shape for _, _, shape in layout) else _V2
    file.write(MAGIC + struct.pack("<QQ", 0, len(layout)))
    for name, dtype, shape in layout:
        file.write(struct.pack(f"<Iii{len(shape)}q", version, _DENSE, len(shape), *shape))
        file.write(struct.pack("<iii", 1, 0, CODES[dtype]))  # of the CPU, number 0
        file.write(to_bytes(read(name)))
    file.write(struct.pack("<Q", len(layout)))
    for name, _, _ in layout:
        encoded = name.encode()
        file.write(struct.pack("<Q", len(encoded)) + encoded)
