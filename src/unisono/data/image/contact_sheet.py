"""Many images on one page, to inspect a data set or a transform."""

from __future__ import annotations

import io
from collections.abc import Sequence

from unisono.data.image.decoding import Pixels
from unisono.errors import DataError, missing_extra

_GAP_PX = 4
_LABEL_PX = 14
_MAX_CELLS = 1024


def contact_sheet(
    images: Sequence[Pixels], labels: Sequence[str] | None = None, *, columns: int = 8, cell_px: int = 128
) -> bytes:
    """Draw many images on one page, to inspect a data set or a transform.

    Each image is shrunk into a square; small ones are not enlarged.

    Args:
        images: 1 to 1024 uint8 arrays, [height, width, 3] or [height, width, 1].
        labels: One text per image, written below it; long ones are cut off. By default none.
        columns: Images per row, at least 1.
        cell_px: Side of an image's square in pixels.

    Returns:
        The page as PNG.

    Raises:
        DataError: The number of images, labels or columns is out of range.
        ExtraError: Pillow is not installed.
        TypeError: Pillow has no images of this dtype or number of channels.
    """
    try:
        from PIL import Image, ImageDraw
    except ImportError as error:
        raise missing_extra("images", "pillow", "a contact sheet") from error
    if not 1 <= len(images) <= _MAX_CELLS or (labels is not None and len(labels) != len(images)) or columns < 1:
        raise DataError(
            given=f"a contact sheet of {len(images)} images, {'no' if labels is None else len(labels)} labels, "
            f"{columns} columns",
            rule=f"1 to {_MAX_CELLS} images, as many labels or none, at least 1 column",
            consequence="no sheet was drawn",
            nearest="a sample of the images",
        )
    columns = min(columns, len(images))
    rows = -(-len(images) // columns)
    tall = cell_px + (_LABEL_PX if labels is not None else 0) + _GAP_PX
    wide = cell_px + _GAP_PX
    sheet = Image.new("RGB", (columns * wide + _GAP_PX, rows * tall + _GAP_PX), "white")
    for number, pixels in enumerate(images):
        row, column = divmod(number, columns)
        cell = Image.new("RGB", (cell_px, tall - _GAP_PX), "white")
        picture = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
        picture.thumbnail((cell_px, cell_px))
        cell.paste(picture, ((cell_px - picture.width) // 2, (cell_px - picture.height) // 2))
        if labels is not None:
            ImageDraw.Draw(cell).text((0, cell_px + 1), labels[number], fill="black")
        sheet.paste(cell, (_GAP_PX + column * wide, _GAP_PX + row * tall))
    out = io.BytesIO()
    sheet.save(out, "PNG")
    return out.getvalue()
