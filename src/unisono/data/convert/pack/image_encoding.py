"""The image of a record: the input's bytes, or the image cropped, resized and encoded again as im2rec does.

The order is im2rec's: apply the EXIF orientation, cut the largest centred square, resize the short side. Resizing is Pillow's
bilinear with antialiasing, where im2rec has OpenCV's without; the sizes are the same.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from unisono.data.convert.pack.pack_job import RecordAnswer
from unisono.data.image.decoding import Color, ImageInfo, Pixels, check_pixels, decode, probe
from unisono.data.image.orientation import orientation_of, oriented
from unisono.data.image.restart_markers import add_restart_markers, encode_jpeg
from unisono.data.image.tiles import tile_grid
from unisono.errors import DataError, missing_extra
from unisono.storage.limits import MAX_PIXELS

DEFAULT_QUALITY = 95  # im2rec's


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageOptions:
    """Processing of each packed image; by default its bytes stay unchanged (``passes_through``).

    The order is im2rec's: apply the EXIF orientation, cut the centre, resize, encode.

    Attributes:
        resize: New short side in pixels; the long side keeps the aspect ratio. None keeps the size.
        center_crop: Whether to cut the largest centred square.
        quality: JPEG quality, 1 to 100. By default 95 if another option encodes the image again.
        encoding: "jpeg" or "png", the format of an image that is encoded again. None is JPEG, and requires no encoding.
        color: "rgb" or "gray", the channels of an image that is encoded again. None is RGB, and requires no encoding.
        tiles: Whether JPEGs get restart markers, so that a crop decodes only its tiles; without loss if the bytes stay
            otherwise unchanged.
        exif: Whether to apply a JPEG's orientation when it is encoded again, which would drop it.
        max_pixels: Pixels of the largest image that is packed; larger ones are bad inputs.
    """

    resize: int | None = None
    center_crop: bool = False
    quality: int | None = None
    encoding: Literal["jpeg", "png"] | None = None
    color: Color | None = None
    tiles: bool = False
    exif: bool = True
    max_pixels: int = MAX_PIXELS

    @property
    def passes_through(self) -> bool:
        """Whether no image is decoded."""
        return not (self.resize or self.center_crop or self.quality or self.encoding or self.color)


def encode_image(raw: bytes, options: ImageOptions) -> RecordAnswer:
    """Process an image. Raises DataError for an invalid image: checks all of it if it is encoded again, else its header and, of
    JPEG and PNG, its end."""
    info = probe(raw)
    check_pixels(info.width, info.height, options.max_pixels)
    if options.passes_through:
        _check_end(raw, info)
        data = add_restart_markers(raw, max_pixels=options.max_pixels) if options.tiles and info.jpeg else raw
        height, width = info.height, info.width
    else:
        pixels = _pixels(raw, info, options)
        data = _encoded(pixels, options)
        height, width = pixels.shape[:2]
    return RecordAnswer(records=[data], width=width, height=height, tiles=_tiles(data) if options.tiles else None)


def _check_end(raw: bytes, info: ImageInfo) -> None:
    """Detect a truncated file without decoding: its end marker is missing, which entropy-coded data cannot contain."""
    if info.jpeg is not None and raw.rfind(b"\xff\xd9") < info.jpeg.scan_at:
        raise _cut(f"a JPEG of {len(raw)} bytes without an end marker")
    if info.format == "PNG" and b"IEND" not in raw[-64:]:
        raise _cut(f"a PNG of {len(raw)} bytes without its last chunk")


def _pixels(raw: bytes, info: ImageInfo, options: ImageOptions) -> Pixels:
    turned = orientation_of(raw) if options.exif else 1
    height, width = info.height, info.width
    if options.center_crop:
        height = width = min(height, width)
    target = _resized(height, width, options.resize) if options.resize else (height, width)
    # Decode at twice the size at least: the scaled DCT is then not visible, and antialiasing has an effect.
    least = (2 * target[0], 2 * target[1]) if options.resize else None
    pixels = decode(raw, max_pixels=options.max_pixels, color=options.color or "rgb", min_size=least)
    if options.center_crop:
        side = min(pixels.shape[:2])
        top, left = (pixels.shape[0] - side) // 2, (pixels.shape[1] - side) // 2
        pixels = pixels[top : top + side, left : left + side]
    check_pixels(target[1], target[0], options.max_pixels)
    pixels = oriented(_scaled(pixels, *target), turned)
    return np.ascontiguousarray(pixels)


def _resized(height: int, width: int, short: int) -> tuple[int, int]:
    """im2rec's sizes: the long side by integer division."""
    return (height * short // width, short) if height > width else (short, width * short // height)


def _scaled(pixels: Pixels, height: int, width: int) -> Pixels:
    if pixels.shape[:2] == (height, width):
        return pixels
    image = _pillow().fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else np.ascontiguousarray(pixels))
    scaled = image.resize((width, height), _pillow().Resampling.BILINEAR)
    return np.asarray(scaled).reshape(height, width, pixels.shape[2])


def _encoded(pixels: Pixels, options: ImageOptions) -> bytes:
    gray = pixels.shape[2] == 1
    if options.encoding == "png":
        out = io.BytesIO()
        _pillow().fromarray(pixels[:, :, 0] if gray else pixels).save(out, "PNG")
        return out.getvalue()
    quality = options.quality or DEFAULT_QUALITY
    if options.tiles:
        return encode_jpeg(pixels, quality=quality)
    try:
        import simplejpeg
    except ImportError as error:
        raise missing_extra("images", "simplejpeg", "encoding JPEG images") from error
    kind = ("GRAY", "Gray") if gray else ("RGB", "420")
    return simplejpeg.encode_jpeg(pixels, quality, *kind)


def _tiles(data: bytes) -> bytes:
    """Bytes per tile as uint32, because a side column has one dtype and ``to_column`` may return uint16."""
    grid = tile_grid(data)
    return b"" if grid is None else grid.to_column().astype("<u4").tobytes()


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise missing_extra("images", "pillow", "resizing and writing images") from error
    return Image


def _cut(given: str) -> DataError:
    return DataError(
        given=given,
        rule="an image is whole",
        consequence="it was not packed",
        nearest="a whole copy of it, or --on-error skip",
    )
