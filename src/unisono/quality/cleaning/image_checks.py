"""Checks of single images: can they be read, are they what their name says, do they show anything.

Blank images have little contrast. Blurred ones change little when they are blurred once more, at about the same size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from unisono.data.image.decoding import decode, image_format, probe
from unisono.data.image.orientation import orientation_of, oriented
from unisono.errors import DataError
from unisono.quality.options import ImageOptions

UNREADABLE: Final = "unreadable"
CHECKS_FORMAT: Final = "checks_format"
LIMITS: Final = (CHECKS_FORMAT, "min_side_px", "min_contrast", "max_blur")
THUMBNAIL_PX: Final = 64
_JUDGED_PX: Final = 256  # of the shorter side of an image whose blur is measured, where it is that large
_BLUR_PX: Final = 11
_SUFFIXES: Final = {
    "JPEG": (".jpg", ".jpeg"),
    "PNG": (".png",),
    "WebP": (".webp",),
    "GIF": (".gif",),
    "BMP": (".bmp",),
    "PPM": (".ppm", ".pgm"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedImage:
    """An image after the checks.

    Attributes:
        failed: The limit that it fails, or ``unreadable``; empty if it passes all.
        value: What the limit was compared with; 0 of ``checks_format``.
        fault: Why it cannot be read.
        thumbnail: Its grey values, whatever its aspect ratio, uint8 [64, 64]; zeros of one that cannot be read.
        measured: Its ``pixels``, and what the limit and those before it were compared with, such as ``blur`` of ``max_blur``.
    """

    failed: str = ""
    value: float = 0.0
    fault: str = ""
    thumbnail: NDArray[np.uint8]
    measured: dict[str, float]


def check_image(data: bytes, suffix: str, options: ImageOptions) -> CheckedImage:
    """Read an image, turned as its EXIF orientation says, and check it.

    Args:
        data: The encoded image.
        suffix: Of its file's name, in small letters; empty without a file of its own.
        options: The limits.

    Raises:
        ExtraError: A package that reads its format is not installed.
    """
    side = _JUDGED_PX if options.enabled and options.max_blur else THUMBNAIL_PX
    try:
        info = probe(data)
        stored = decode(data, color="gray", min_size=(side, side))
        grey = np.ascontiguousarray(oriented(stored, orientation_of(data))[:, :, 0])
    except DataError as error:
        fault = "; ".join(problem.given for problem in error.problems)
        nothing = np.zeros((THUMBNAIL_PX, THUMBNAIL_PX), np.uint8)
        return CheckedImage(failed=UNREADABLE, fault=fault, thumbnail=nothing, measured={})
    failed, value = "", 0.0
    measured: dict[str, float] = {"pixels": info.width * info.height}
    if options.enabled:
        failed, value, tried = _failed(grey, min(info.width, info.height), suffix, image_format(data), options)
        measured |= tried
    return CheckedImage(failed=failed, value=value, thumbnail=thumbnail_of(grey), measured=measured)


def thumbnail_of(grey: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Means over the fields of a grid, uint8 [64, 64], of grey values, uint8 [height, width]."""
    from PIL import Image

    image = Image.fromarray(grey).resize((THUMBNAIL_PX, THUMBNAIL_PX), Image.Resampling.BOX)
    return np.asarray(image, np.uint8)


def _failed(
    grey: NDArray[np.uint8], side: int, suffix: str, name: str | None, options: ImageOptions
) -> tuple[str, float, dict[str, float]]:
    """The first limit that an image fails, or empty; its value there; and the values of the limits that were tried."""
    measured: dict[str, float] = {}
    if options.checks_format and suffix and suffix not in _SUFFIXES.get(name or "", ()):
        return CHECKS_FORMAT, 0.0, measured
    measured["side_px"] = side
    if side < options.min_side_px:
        return "min_side_px", side, measured
    if options.min_contrast:
        measured["contrast"] = contrast = float(grey.std())
        if contrast < options.min_contrast:
            return "min_contrast", contrast, measured
    if options.max_blur:
        measured["blur"] = blur = blur_of(grey)
        if blur > options.max_blur:
            return "max_blur", blur, measured
    return "", 0.0, measured


def blur_of(grey: NDArray[np.uint8]) -> float:
    """How blurred an image is, whose shorter side is first made 256 pixels or a little more: 0 sharp, 1 blurred.

    The share of the differences of neighbouring pixels that is left when the image is blurred once more; of both axes the one
    with more (Crete, Dolmiere, Ladret and Nicolas 2007, "The Blur Effect").
    """
    factor = max(1, min(grey.shape) // _JUDGED_PX)
    height, width = (size // factor * factor for size in grey.shape)
    values = grey[:height, :width].reshape(height // factor, factor, width // factor, factor).mean((1, 3))
    return max(_blur_along_axis0(values), _blur_along_axis0(values.T))


def _blur_along_axis0(values: NDArray[np.float64]) -> float:
    """The share of the differences that blurring along axis 0 leaves: 0 sharp, 1 blurred."""
    differences = np.abs(np.diff(values, axis=0))
    total = float(differences.sum())
    if not total:
        return 1.0
    half = _BLUR_PX // 2
    sums = np.pad(values, ((half + 1, half), (0, 0)), mode="edge").cumsum(axis=0)
    blurred = (sums[_BLUR_PX:] - sums[:-_BLUR_PX]) / _BLUR_PX
    lost = np.maximum(differences - np.abs(np.diff(blurred, axis=0)), 0.0)
    return 1.0 - float(lost.sum()) / total
