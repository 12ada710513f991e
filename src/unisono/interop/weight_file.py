"""Files of weights of other frameworks: one reader for all of them, which knows a file by its first bytes, and the writers."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

import torch
from torch import Tensor

from unisono.checkpoint.safetensors_format import build_header, dtype_code, header_length, parse_header
from unisono.errors import CheckpointError
from unisono.interop import mindspore_checkpoint, mxnet_params, npz
from unisono.interop.stored_tensor import StoredTensor, dense, to_bytes
from unisono.sanitize import quoted
from unisono.storage.files import new_file, open_regular, os_reason

_FORMATS: Final = "MXNet's .params, also of NumPy mode, MindSpore's .ckpt and .safetensors files"


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """What a file of weights holds.

    Attributes:
        format: "mxnet", "mxnet-npz", "mindspore" or "safetensors".
        tensors: The tensors by name, in the order of the file.
        texts: Values of MindSpore that are text, such as what was appended to a checkpoint.
    """

    format: str
    tensors: Mapping[str, StoredTensor]
    texts: Mapping[str, str] = field(default_factory=dict[str, str])


@contextlib.contextmanager
def open_weights(path: Path) -> Generator[Weights]:
    """The weights in a file of another framework; tensors are read, one by one, until the context ends.

    No code of the file is run: pickles are refused.

    Raises:
        CheckpointError: The file cannot be read, is damaged, of another format, or without tensors.
    """
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open_regular(path))
            weights = _read(stack.enter_context(_mapped(file)))
        except (OSError, ValueError) as error:
            raise _unreadable(path, error) from error
        if not weights.tensors:
            raise CheckpointError(
                given=f"{path} ({weights.format}), which holds no tensors",
                rule="a file of weights has at least one tensor",
                consequence="nothing was written",
                nearest="the file that the weights were saved to",
            )
        yield weights


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        given=f"{path}: {os_reason(error) if isinstance(error, OSError) else error}",
        rule=f"the file is whole and of a format that is read: {_FORMATS}",
        consequence="nothing was written",
        nearest="a copy of the file as its framework has written it",
    )


@contextlib.contextmanager
def _mapped(file: BinaryIO) -> Generator[memoryview]:
    if not os.fstat(file.fileno()).st_size:
        raise ValueError("an empty file")
    mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        yield memoryview(mapping)
    finally:
        with contextlib.suppress(BufferError):  # tensors that are not read hold views; it closes with the last of them
            mapping.close()


def _read(data: memoryview) -> Weights:
    first = bytes(data[:9])
    # before the others: the length of a header, which comes first, may be their first byte or magic number
    if first[8:] == b"{" and not (first[:1] == b"\n" and int.from_bytes(first[:8], "little") > len(data)):
        return _safetensors(data)
    if first.startswith(mxnet_params.MAGIC):
        return Weights(format="mxnet", tensors=mxnet_params.read_params(data))
    if first.startswith(npz.MAGIC):
        return Weights(format="mxnet-npz", tensors=mxnet_params.without_prefixes(npz.read_npz(data)))
    if first.startswith(b"\x80"):
        raise ValueError("a pickle, which can run any code, as torch.save and MXNet's trainer states are")
    if first.startswith(mindspore_checkpoint.ENCRYPTED_MAGIC):
        raise ValueError("an encrypted checkpoint of MindSpore: save it again there without enc_key")
    if not first.startswith(b"\n"):  # of the values, a checkpoint's only field
        raise ValueError("it begins as a file of none of the formats that are read")
    tensors, texts = mindspore_checkpoint.read_checkpoint(data)
    return Weights(format="mindspore", tensors=tensors, texts=texts)


def _safetensors(data: memoryview) -> Weights:
    length = header_length(bytes(data[:8]), len(data))
    header = bytes(data[8 : 8 + length])
    extents = parse_header(header, len(data))
    metadata = json.loads(header).get("__metadata__")
    marks = cast("dict[str, Any]", metadata) if isinstance(metadata, dict) else {}
    packed = [name for name in extents if marks.get(name) == "Int4"]  # as MindSpore marks them
    if packed:
        raise ValueError(f"{quoted(packed[0])} has two numbers of 4 bits in a byte")
    return Weights(
        format="safetensors",
        tensors={
            name: dense(extent.dtype, extent.shape, [data[extent.begin : extent.end]])
            for name, extent in extents.items()
        },
    )


Layout = Sequence[tuple[str, torch.dtype, Sequence[int]]]


def write_safetensors(file: BinaryIO, layout: Layout, read: Callable[[str], Tensor]) -> None:
    """Write a safetensors file, with one tensor in memory at a time.

    Args:
        file: An empty file.
        layout: Name, dtype and shape of each tensor, in order.
        read: The values by name.
    """
    header, _ = build_header(layout, {"format": "pt"})
    file.write(header)
    for name, _, _ in layout:
        file.write(to_bytes(read(name)))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Writer:
    write: Callable[[BinaryIO, Layout, Callable[[str], Tensor]], None]
    knows: Callable[[torch.dtype], bool]


WRITERS: Final[Mapping[str, _Writer]] = {
    "safetensors": _Writer(write=write_safetensors, knows=lambda dtype: dtype_code(dtype) is not None),
    "mxnet": _Writer(write=mxnet_params.write_params, knows=mxnet_params.CODES.__contains__),
    "mindspore": _Writer(write=mindspore_checkpoint.write_checkpoint, knows=mindspore_checkpoint.NAMES.__contains__),
}


def write_weights_file(path: Path, kind: str, layout: Layout, read: Callable[[str], Tensor]) -> None:
    """Write tensors to a new file of the format ``kind`` of ``WRITERS``, with one of them in memory at a time.

    Args:
        path: The file. It appears whole or not at all.
        kind: "safetensors", "mxnet" or "mindspore".
        layout: Name, dtype and shape of each tensor, in order.
        read: The values by name.

    Raises:
        CheckpointError: The format has no such dtype, or takes the name of a tensor for something else.
        OSError: The file cannot be written.
    """
    writer = WRITERS[kind]
    for name, dtype, _ in layout:
        if kind == "safetensors" and name == "__metadata__":
            raise CheckpointError(
                given=f"a tensor called {quoted(name)}",
                rule="safetensors has that name for the text beside the tensors",
                consequence="nothing was written",
                nearest="a file of another format (.params, .ckpt), or the tensor under another name",
            )
        if not writer.knows(dtype):
            raise CheckpointError(
                given=f"{name} is of {str(dtype).removeprefix('torch.')}",
                rule=f"files of {kind} hold none of that dtype",
                consequence="nothing was written",
                nearest="safetensors, or the model in another precision",
            )
    with new_file(path) as file:
        writer.write(cast(BinaryIO, file), layout, read)
