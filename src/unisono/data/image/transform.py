"""A sample's encoded image becomes pixels of one size: the transform a ``Loader`` takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from unisono.data.dataset import Batch
from unisono.data.image.augment import DRAWN, Augment, draw
from unisono.data.image.decoding import Pixels, decode
from unisono.data.image.jpeg import is_jpeg, read_header, view
from unisono.data.image.pixels import on_device
from unisono.data.image.tiles import Box, TileGrid, decode_region, tile_grid
from unisono.errors import DataError, ExtraError, Problem

DRAWS_NAME: Final = "image_draws"
_UNSPLIT: Final = 1 << 15  # elements up to which torch works in the calling thread (at::internal::GRAIN_SIZE)


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageTransform:
    """``transform(sample, rng)``: decode what the crop needs, resize, augment.

    The sample's ``image`` is an encoded image, uint8 [bytes], or pixels, uint8 [height, width, channels]; ``tiles``, where it
    has them, is what ``TileGrid.to_column`` gave for it (empty: none known). Both are replaced by ``image``: float32
    [C, H, W] where ``augment`` normalises, else uint8 [H, W, C]; other entries stay.

    ``pixels_on="device"``: only crop and resize happen here. ``image`` is uint8 [H, W, C], and ``image_draws``, float32 [12],
    is what ``on_device`` needs to do the rest for a whole batch.

    A JPEG much larger than the output is decoded at 1/2, 1/4 or 1/8 and its crop rounded out to that grid. Other formats
    and JPEGs without restart markers are decoded whole. Threads may share a transform. Without ``rng`` the same is drawn each
    time, so that ``mapped(data, transform)`` is a data set to evaluate on. Raises DataError as decoding does.
    """

    augment: Augment
    pixels_on: Literal["host", "device"] = "host"

    def __call__(self, sample: Batch, rng: np.random.Generator | None = None) -> Batch:
        rng = np.random.default_rng(0) if rng is None else rng
        if "image" not in sample:
            raise _no_image(f"a sample of {sorted(sample)}")
        rest = {name: value for name, value in sample.items() if name not in ("image", "tiles")}
        pixels, drawn = _cropped(sample["image"], sample.get("tiles"), self.augment, rng)
        image = resize(pixels, self.augment.size, self.augment.resize)
        if self.pixels_on == "device":
            return {**rest, "image": image, DRAWS_NAME: drawn}
        if self.augment.rotate or self.augment.jitter is not None:
            done = on_device(torch.from_numpy(image)[None], torch.from_numpy(drawn)[None], self.augment)
            return {**rest, "image": done[0].numpy()}
        return {**rest, "image": _finished(image, drawn, self.augment)}


def resize(pixels: Pixels, size: tuple[int, int], by: Literal["torch", "opencv"]) -> Pixels:
    """uint8 [height, width, channels] to ``size``, (height, width).

    "torch": bilinear, antialiased where it shrinks. "opencv": bilinear between four neighbours, which is faster and leaves
    aliasing; needs the package opencv-python-headless. Neither uses threads of its own for one image.
    """
    if pixels.shape[:2] == size:
        return pixels.copy()  # the caller's image is not ours to erase in
    if by == "opencv":
        return _opencv_resize()(pixels, size[::-1]).reshape(*size, pixels.shape[2])
    whole = np.ascontiguousarray(pixels)
    if not whole.flags.writeable:
        whole = whole.copy()  # torch has no read-only tensors
    # [1, C, H, W], stored as the image is. Views by numpy: torch lets go of the GIL for each, and must get it back.
    planes = torch.from_numpy(whole.reshape(1, *whole.shape).transpose(0, 3, 1, 2))
    small = F.interpolate(planes, size=size, mode="bilinear", antialias=True, align_corners=False)
    return np.ascontiguousarray(small.numpy()[0].transpose(1, 2, 0))


def opencv_found() -> bool:
    """Whether ``resize="opencv"`` works here."""
    try:
        import cv2 as cv2  # pyright: ignore[reportMissingImports, reportUnusedImport]
    except ImportError:
        return False
    return True


def _cropped(
    image: NDArray[Any], tiles: NDArray[Any] | None, augment: Augment, rng: np.random.Generator
) -> tuple[Pixels, NDArray[np.float32]]:
    """The pixels of the drawn crop, perhaps at a smaller scale, and the other draws."""
    if image.ndim == 3:
        _check_pixels(image, augment)
        box, drawn = draw(augment, image.shape[0], image.shape[1], rng)
        return _inside(image, box), drawn
    encoded = view(image)
    if not is_jpeg(encoded):
        pixels = decode(encoded, max_pixels=augment.max_pixels, color=augment.color)
        box, drawn = draw(augment, pixels.shape[0], pixels.shape[1], rng)
        return _inside(pixels, box), drawn
    grid = tile_grid(encoded) if tiles is None or not tiles.size else TileGrid.from_column(encoded, tiles)
    header = read_header(encoded) if grid is None else grid.header
    box, drawn = draw(augment, header.height, header.width, rng)
    pixels = decode_region(
        encoded, box, grid, min_size=augment.size, color=augment.color, max_pixels=augment.max_pixels
    )
    return pixels, drawn


def _finished(image: Pixels, drawn: NDArray[np.float32], augment: Augment) -> Pixels | NDArray[np.float32]:
    """What ``on_device`` does, for an image that is only flipped, normalised and erased.

    Torch would split these few microseconds over its threads, and each of several loader threads wait for all of them.
    """
    values = dict(zip(DRAWN, cast("list[float]", drawn.tolist()), strict=True))
    height, width, channels = image.shape
    if values["flip_vertical"]:
        image = np.ascontiguousarray(image[::-1])
    if augment.mean is not None and augment.std is not None:
        mean, std = (np.array(numbers, np.float32)[:, None, None] for numbers in (augment.mean, augment.std))
        done = np.empty((channels, height, width), np.float32)
        np.copyto(done, (image[:, ::-1] if values["flip"] else image).transpose(2, 0, 1))
        done *= 1 / (255 * std)
        done -= mean / std
        places = done.transpose(1, 2, 0)  # as [H, W, C]
    else:
        done = places = _mirrored(image) if values["flip"] else image
    if values["erase_height"]:
        top, left = round(values["erase_top"] * height), round(values["erase_left"] * width)
        bottom, right = top + round(values["erase_height"] * height), left + round(values["erase_width"] * width)
        places[top:bottom, left:right] = 0
    return done


def _mirrored(image: Pixels) -> Pixels:
    """Left for right by torch, which is ten times as fast as numpy, in parts so small that it does not split them."""
    if torch.get_num_threads() == 1:
        return torch.from_numpy(image).flip(1).numpy()
    mirrored = torch.empty(image.shape, dtype=torch.uint8)
    rows = max(1, _UNSPLIT // image[0].size)
    for source, target in zip(torch.from_numpy(image).split(rows), mirrored.split(rows), strict=True):
        target.copy_(source.flip(1))
    return mirrored.numpy()


def _inside(pixels: Pixels, box: Box) -> Pixels:
    top, left, height, width = box
    return pixels[top : top + height, left : left + width]


def _check_pixels(image: NDArray[Any], augment: Augment) -> None:
    channels = 3 if augment.color == "rgb" else 1
    if image.dtype != np.uint8 or image.shape[2] != channels or 0 in image.shape:
        raise _no_image(f"an image of {image.dtype}{list(image.shape)}, and color = {augment.color!r}")


def _no_image(given: str) -> DataError:
    return DataError(
        Problem(
            given=given,
            rule="image is uint8 [bytes] if encoded; if decoded, uint8 [height, width, 3], or 1 for color = 'gray'",
            consequence="it cannot be cropped and augmented",
            nearest="name it image; drop alpha, scale other dtypes to 0 to 255",
        )
    )


@cache
def _opencv_resize() -> Callable[..., Pixels]:
    try:
        from cv2 import resize as cv2_resize  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ExtraError(
            Problem(
                given='resize = "opencv", and the package cv2 is not installed',
                rule="resizing with OpenCV is an option that comes with no extra",
                consequence="nothing was resized",
                nearest='pip install opencv-python-headless, or resize = "torch"',
            )
        ) from error
    return cv2_resize
