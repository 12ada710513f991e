"""EXIF orientation of JPEGs: how a viewer turns the stored pixels (EXIF 2.32, 4.6.4)."""

from __future__ import annotations

import io
from typing import Final

from unisono.data.image.decoding import Pixels
from unisono.data.image.jpeg_header import Encoded, as_view, is_jpeg

_ORIENTATION: Final = 0x0112  # EXIF tag


def orientation_of(data: Encoded) -> int:
    """The orientation, 1 to 8; 1, which turns nothing, of a JPEG without any and of other formats."""
    view = as_view(data)
    if not is_jpeg(view):
        return 1
    from PIL import JpegImagePlugin

    try:
        value = JpegImagePlugin.JpegImageFile(io.BytesIO(view)).getexif().get(_ORIENTATION, 1)
    except Exception:  # Pillow's errors for malformed headers have no common base
        return 1
    return value if value in range(1, 9) else 1


def oriented(pixels: Pixels, orientation: int) -> Pixels:
    """Pixels [height, width, channels] as a viewer shows them; a view of the same memory."""
    if orientation in (5, 6, 7, 8):
        pixels = pixels.transpose(1, 0, 2)
    rows = -1 if orientation in (3, 4, 7, 8) else 1
    columns = -1 if orientation in (2, 3, 6, 7) else 1
    return pixels[::rows, ::columns]
