"""Decode images: JPEG by simplejpeg (libjpeg-turbo); PNG, WebP, GIF, BMP and PPM by Pillow.

Images that are not 8-bit RGB or grey:

    palette         looked up
    alpha           dropped, as in MXNet, OpenCV and torchvision: colours of transparent pixels become visible
    CMYK, YCCK      converted to RGB without a colour profile
    16-bit          the upper 8 bits; 32-bit and float images are refused, because they have no agreed range
    animated        the first image
    EXIF            orientation is not applied (nor by MXNet or torchvision): boxes and tiles refer to the stored pixels
    colour profile  not applied

TIFF, AVIF, JPEG 2000 and others are refused: their decoders allocate memory before a size can be checked. Both decoders release
the GIL.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from unisono.data.image.jpeg_header import Encoded, JpegHeader, as_view, is_jpeg, read_header, unreadable_jpeg_error
from unisono.errors import DataError, missing_extra
from unisono.storage.limits import MAX_JPEG_SCANS, MAX_PIXELS

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile

Pixels = NDArray[np.uint8]  # [height, width, channels]
Color = Literal["rgb", "gray"]

_PNG: Final = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageInfo:
    """The content of an image header.

    Attributes:
        format: "JPEG", "PNG", "WebP", "GIF", "BMP" or "PPM".
        width: Width in pixels.
        height: Height in pixels.
        mode: Pillow's name of the pixel format: L, P, RGB, RGBA, CMYK, I;16, …
        jpeg: Of a JPEG: its sampling, restart interval, and whether it is progressive. None for other formats.
    """

    format: str
    width: int
    height: int
    mode: str
    jpeg: JpegHeader | None = None


def probe(data: Encoded) -> ImageInfo:
    """Read the header of an encoded image without decoding pixels.

    Args:
        data: The encoded image, whole: bytes, or uint8 [bytes].

    Raises:
        DataError: The format is unknown or the header invalid.
        ExtraError: The image is no JPEG, and Pillow is not installed.
    """
    view = as_view(data)
    if is_jpeg(view):
        header = read_header(view)
        mode = {1: "L", 3: "RGB", 4: "CMYK"}.get(len(header.sampling), f"{len(header.sampling)} components")
        return ImageInfo(format="JPEG", width=header.width, height=header.height, mode=mode, jpeg=header)
    name, width, height = _size(view)
    if name == "WebP":  # Pillow allocates the canvas when it opens the file
        return ImageInfo(
            format=name, width=width, height=height, mode="RGBA" if _webp_alpha(bytes(view[:30])) else "RGB"
        )
    with _opened(view, name) as image:
        return ImageInfo(format=name, width=image.width, height=image.height, mode=image.mode)


def image_format(data: Encoded) -> str | None:
    """Name of the format that the first bytes are those of, as ``ImageInfo.format``; None of other data."""
    view = as_view(data)
    try:
        return "JPEG" if is_jpeg(view) else _size(view)[0]
    except DataError:
        return None


def decode(
    data: Encoded, *, max_pixels: int = MAX_PIXELS, color: Color = "rgb", min_size: tuple[int, int] | None = None
) -> Pixels:
    """Decode an image to uint8 [height, width, channels].

    Grey is a JPEG's stored luma, without conversion, and ITU-R BT.601 luma of RGB in other formats.

    Args:
        data: The encoded image, whole: bytes, or uint8 [bytes].
        max_pixels: Pixels of the largest image that is decoded, checked before anything is allocated.
        color: "rgb" gives 3 channels, "gray" 1.
        min_size: (height, width): decode a JPEG at 1/2, 1/4 or 1/8 scale if the result, rounded up, is at least this
            large. The DCT is scaled, which is faster. Other formats are decoded in full size.

    Raises:
        DataError: The image is larger than ``max_pixels``, truncated, detectably corrupt, or of an unsupported format.
        ExtraError: simplejpeg, or Pillow for other formats, is not installed.
    """
    view = as_view(data)
    if is_jpeg(view):
        header = read_header(view)
        check_pixels(header.width, header.height, max_pixels)
        factor = 1 if min_size is None else dct_factor(header.height, header.width, min_size)
        check_scans(view, header)
        return decode_jpeg(view, header.height, header.width, color, factor)
    name, width, height = _size(view)
    check_pixels(width, height, max_pixels)
    if name == "PNG":
        _check_png(view)
    with _opened(view, name) as image:
        check_pixels(image.width, image.height, max_pixels)  # the first image of a GIF may be larger than its canvas
        return _pillow_pixels(image, name, color)


def undecoded_part(data: Encoded) -> str:
    """The part of an image that ``decode`` leaves out: transparency, further images or lower bits; empty if there is none.

    Args:
        data: An image that ``decode`` has decoded, so that its size is known to be bounded.
    """
    view = as_view(data)
    if is_jpeg(view):
        return ""
    name = _size(view)[0]
    with _opened(view, name) as image:
        if getattr(image, "n_frames", 1) > 1:
            return "further images"
        if image.mode.startswith("I;16"):
            return "the lower 8 bits"
        if "A" in image.getbands() or "transparency" in image.info:
            lowest, _ = image.convert("RGBA").getchannel("A").getextrema()
            return "transparency" if lowest != 255 else ""
    return ""


def check_pixels(width: int, height: int, max_pixels: int) -> None:
    """Raise DataError for more than ``max_pixels``."""
    if width * height > max_pixels:
        raise DataError(
            given=f"an image of {width}x{height} = {width * height} pixels",
            rule=f"at most max_pixels = {max_pixels} pixels are decoded, whatever a header asks for",
            consequence="nothing was allocated",
            nearest="max_pixels= higher, if the image is meant; else leave it out, it may be a decompression bomb",
        )


def dct_factor(height: int, width: int, min_size: tuple[int, int]) -> int:
    """The largest of 8, 4, 2 by which both sides can be divided and stay at least ``min_size``; else 1.

    1 for sides below 8 pixels: there two scales give the same size, and simplejpeg takes only a size.
    """
    for factor in (8, 4, 2) if min(height, width) >= 8 else ():
        if height >= factor * min_size[0] and width >= factor * min_size[1]:
            return factor
    return 1


def check_scans(data: memoryview, header: JpegHeader) -> None:
    """Raise DataError for a progressive JPEG with so many scans that it must be an attack."""
    if not header.sequential and (scans := bytes(data).count(b"\xff\xda")) > MAX_JPEG_SCANS:
        raise unreadable_jpeg_error(f"a JPEG of {scans} scans, where {MAX_JPEG_SCANS} are the limit")


def decode_jpeg(data: bytearray | memoryview, height: int, width: int, color: Color, factor: int) -> Pixels:
    """Decode a JPEG of ``height`` and ``width``, each divided by ``factor`` (1, 2, 4, 8) and rounded up."""
    space = "RGB" if color == "rgb" else "GRAY"
    expected = -(-height // factor), -(-width // factor)
    try:
        if factor == 1:
            pixels = _simplejpeg()(data, space)
        else:
            pixels = _simplejpeg()(data, space, min_height=expected[0], min_width=expected[1])
    except ValueError as error:
        raise unreadable_jpeg_error(f"a JPEG of {width}x{height} pixels in {len(data)} bytes: {error}") from error
    if pixels.shape[:2] != expected:
        raise unreadable_jpeg_error(
            f"a JPEG whose header says {width}x{height} pixels and which decodes to {pixels.shape[:2]}"
        )
    return pixels


@cache
def _simplejpeg() -> Callable[..., Pixels]:
    try:
        from simplejpeg import decode_jpeg
    except ImportError as error:
        raise missing_extra("images", "simplejpeg", "decoding JPEG images") from error
    return decode_jpeg


def _size(data: memoryview) -> tuple[str, int, int]:
    """(format, width, height) from the first bytes, before any library opens the image."""
    head = bytes(data[:30])
    if head[:8] == _PNG and head[12:16] == b"IHDR" and len(head) >= 24:
        return "PNG", int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")
    if head[:6] in (b"GIF87a", b"GIF89a") and len(head) >= 10:
        return "GIF", int.from_bytes(head[6:8], "little"), int.from_bytes(head[8:10], "little")
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP" and len(head) == 30:
        return "WebP", *_webp_size(head)
    if head[:2] == b"BM" and len(head) >= 26:
        if head[14] == 12:  # an OS/2 header has 16-bit sizes
            return "BMP", int.from_bytes(head[18:20], "little"), int.from_bytes(head[20:22], "little")
        width, height = (int.from_bytes(head[at : at + 4], "little", signed=True) for at in (18, 22))
        return "BMP", abs(width), abs(height)  # a negative height means top-down rows
    if head[:1] == b"P" and head[1:2] in b"123456" and head[2:3].isspace():
        return "PPM", 0, 0  # a text header: Pillow parses it and allocates nothing
    raise unreadable_jpeg_error(
        f"{len(data)} bytes that begin with {head[:8].hex(' ') or 'nothing'}", "convert it to PNG or JPEG"
    )


def _webp_size(head: bytes) -> tuple[int, int]:
    """RFC 9649, sections 2.5 to 2.7."""
    if head[12:16] == b"VP8X":
        return 1 + int.from_bytes(head[24:27], "little"), 1 + int.from_bytes(head[27:30], "little")
    if head[12:16] == b"VP8L":
        bits = int.from_bytes(head[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    return int.from_bytes(head[26:28], "little") & 0x3FFF, int.from_bytes(head[28:30], "little") & 0x3FFF


def _webp_alpha(head: bytes) -> bool:
    return bool((head[12:16] == b"VP8X" and head[20] & 0x10) or (head[12:16] == b"VP8L" and head[24] & 0x10))


def _check_png(data: memoryview) -> None:
    """Check the checksum of every chunk (PNG specification, 5.3): Pillow does not check those of the pixels."""
    at = len(_PNG)
    while at + 12 <= len(data):
        end = at + 12 + int.from_bytes(data[at : at + 4], "big")
        if end > len(data):
            break
        if zlib.crc32(data[at + 4 : end - 4]) != int.from_bytes(data[end - 4 : end], "big"):
            raise unreadable_jpeg_error(
                f"a PNG whose chunk {bytes(data[at + 4 : at + 8])!r} at byte {at} fails its checksum"
            )
        if bytes(data[at + 4 : at + 8]) == b"IEND":
            return
        at = end
    raise unreadable_jpeg_error(f"a PNG that ends at byte {len(data)}, inside or before its chunk at byte {at}")


def _opened(data: memoryview, name: str) -> ImageFile:
    """Open with the format's own reader: Pillow's ``open`` would try others, and apply its own size limit."""
    try:
        from PIL import BmpImagePlugin, GifImagePlugin, PngImagePlugin, PpmImagePlugin, WebPImagePlugin
    except ImportError as error:
        raise missing_extra("images", "pillow", f"reading {name} images") from error
    readers: dict[str, Any] = {
        "PNG": PngImagePlugin.PngImageFile,
        "GIF": GifImagePlugin.GifImageFile,
        "WebP": WebPImagePlugin.WebPImageFile,
        "BMP": BmpImagePlugin.BmpImageFile,
        "PPM": PpmImagePlugin.PpmImageFile,
    }
    try:
        return readers[name](io.BytesIO(data))
    except Exception as error:  # Pillow's errors for malformed headers have no common base
        raise unreadable_jpeg_error(f"a {name} of {len(data)} bytes: {error}") from error


def _pillow_pixels(image: ImageFile, name: str, color: Color) -> Pixels:
    mode = "L" if color == "gray" else "RGB"
    try:
        image.load()
        if image.mode.startswith("I;16"):
            high = (np.asarray(image) >> 8).astype(np.uint8)  # Pillow's own conversion would clip
            return np.repeat(high[:, :, None], len(mode), axis=2)
        if image.mode not in ("I", "F"):
            return np.array(image.convert(mode), np.uint8).reshape(image.height, image.width, len(mode))
    except Exception as error:  # nor have its errors for damaged pixels
        raise unreadable_jpeg_error(f"a {name} of {image.width}x{image.height} pixels: {error}") from error
    raise unreadable_jpeg_error(f"a {name} of mode {image.mode}", "convert it to 8 bits, with the range that is meant")
