"""Apache MXNet's 24-byte header of an image record: the record's id, and its label or labels."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from unisono.errors import DataError

_HEADER: Final = struct.Struct("<IfQQ")


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageHeader:
    """``label`` is one number, or [n] float32 for several labels (or one stored as an array).

    MXNet's ``IRHeader``: flag 0 and the label in the header, or flag n, label 0 and n float32 after the header.
    """

    label: float | NDArray[np.float32]
    id: int = 0
    id2: int = 0


def pack_header(header: ImageHeader, payload: bytes) -> bytes:
    """The payload of an image record, as ``mx.recordio.pack`` makes it."""
    if isinstance(header.label, float | int):
        return _HEADER.pack(0, header.label, header.id, header.id2) + payload
    labels = np.ascontiguousarray(header.label, "<f4").reshape(-1)
    return _HEADER.pack(len(labels), 0.0, header.id, header.id2) + labels.tobytes() + payload


def unpack_header(record: bytes | memoryview) -> tuple[ImageHeader, memoryview]:
    """The header, and a view of the image after it. Raises DataError if the record is shorter than its header says."""
    view = memoryview(record)
    flag, label, first, second = _HEADER.unpack_from(view) if len(view) >= _HEADER.size else (-1, 0.0, 0, 0)
    begin = _HEADER.size + 4 * flag
    if flag < 0 or begin > len(view):
        raise DataError(
            given=f"a record of {len(view)} bytes"
            + (f" that says it has {flag} labels" if flag > 0 else ", read as an image record"),
            rule=f"an image record begins with {_HEADER.size} bytes of header and 4 bytes for each of several labels",
            consequence="label and image cannot be told apart",
            nearest="read the payload itself; records that im2rec or pack_header did not write have no such header",
        )
    labels = label if flag == 0 else np.frombuffer(view, "<f4", count=flag, offset=_HEADER.size)
    return ImageHeader(label=labels, id=first, id2=second), view[begin:]
