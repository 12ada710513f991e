"""MNIST's idx files: ``…images-idx3-ubyte`` and, beside it, ``…labels-idx1-ubyte``; each also as ``.gz``.

0, 0, 8 (unsigned bytes), number of dims | u32 big-endian, each dim | the bytes, C order
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from unisono.data.convert.formats.byte_source import ByteSource
from unisono.data.convert.formats.table import Row, Table, damaged_error, unreadable_error
from unisono.data.mindrecord import FieldType
from unisono.storage.limits import MAX_RECORD_BYTES

NAME: Final = re.compile(r"(.*)(images|labels)([-.]idx)([13])(-ubyte(?:\.gz)?)")
_STRETCH: Final = 1 << 10  # labels read at once


def read(path: Path) -> Table:
    """Rows of ``image``, uint8 [H, W], and ``label``. Raises DataError if the two files do not match."""
    with ByteSource(path) as images, ByteSource(_labels_path(path)) as labels:
        _, height, width = _dims(images, 3)
        _dims(labels, 1)
    image = FieldType(type="uint8", shape=(height, width))
    return Table(rows=_rows(path), schema={"image": image, "label": FieldType(type="int64")}, image="image")


def _rows(path: Path) -> Iterator[Row]:
    with ByteSource(path) as images, ByteSource(_labels_path(path)) as labels:
        count, height, width = _dims(images, 3)
        (labelled,) = _dims(labels, 1)
        if count != labelled:
            raise unreadable_error(
                f"{path} of {count} images, and {labels.path} of {labelled} labels",
                "image i has label i",
                "the two files that belong together",
            )
        for begin in range(0, count, _STRETCH):
            for place, label in enumerate(labels.read(min(_STRETCH, count - begin), "the labels")):
                content = images.read(height * width, "an image", record=begin + place)
                yield {"image": np.frombuffer(content, np.uint8).reshape(height, width), "label": label}
        images.end("the images")
        labels.end("the labels")


def _labels_path(path: Path) -> Path:
    match = NAME.fullmatch(path.name)
    if match is None or match[2] == "labels" or match[4] != "3":
        raise unreadable_error(
            f"{path}", "images are named …images-idx3-ubyte, their labels …labels-idx1-ubyte", "the file of images"
        )
    stem, _, idx, _, rest = match.groups()
    labels = path.with_name(f"{stem}labels{idx}1{rest}")
    if not os.path.exists(labels):
        raise unreadable_error(
            f"{path} without {labels.name}", "images and labels are two files side by side", f"{labels}"
        )
    return labels


def _dims(source: ByteSource, count: int) -> tuple[int, ...]:
    """The sizes in the header, checked against the file's size if it is known."""
    head = source.read(4 + 4 * count, "the head of an idx file")
    if head[:4] != bytes([0, 0, 8, count]):
        damage = f"it begins with {head[:4].hex()}, where unsigned bytes of {count} dims begin with 000008{count:02x}"
        raise damaged_error(source.path, 0, damage)
    dims = struct.unpack(f">{count}I", head[4:])
    item_bytes = 1
    for dim in dims[1:]:
        item_bytes *= dim
    if not 0 < item_bytes <= MAX_RECORD_BYTES:
        raise damaged_error(source.path, 4, f"dims {list(dims)}, where a picture has 1 to {MAX_RECORD_BYTES:,} bytes")
    if source.size is not None and source.size != source.offset + dims[0] * item_bytes:
        damage = f"dims {list(dims)} are {dims[0] * item_bytes:,} bytes, and {source.size - source.offset:,} follow"
        raise damaged_error(source.path, 4, damage)
    return dims
