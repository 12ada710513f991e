"""Pictures as PNG, which loses nothing (W3C PNG, 8 bits a sample, no row filters)."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.data.convert.formats.table import Row, Table
from unisono.data.mindrecord import FieldType


def encode_png(image: NDArray[np.uint8]) -> bytes:
    """A grey [H, W] or colour [H, W, 3] uint8 picture as the bytes of a PNG file."""
    height, width = image.shape[:2]
    # before each row of samples a byte that names its filter: 0, none
    rows = np.zeros((height, 1 + image[0].size), np.uint8)
    rows[:, 1:] = image.reshape(height, -1)
    colour = 2 if image.ndim == 3 else 0
    head = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(rows.tobytes())), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks
    )


def encode_image_column(table: Table) -> Table:
    """The table with its picture, if it has one, as the bytes of a PNG file."""
    image = table.image
    if image is None:
        return table

    def rows() -> Iterator[Row]:
        for row in table.rows:
            picture: NDArray[Any] = row[image]
            yield {**row, image: encode_png(picture)}

    schema = None if table.schema is None else {**table.schema, image: FieldType(type="bytes")}
    return replace(table, rows=rows(), schema=schema, image=None)
