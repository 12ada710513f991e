"""``ImageTransform``: decodes a sample's image, crops and resizes it, and augments it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import DTypeLike, NDArray

from unisono.data.dataset import Batch
from unisono.data.image.augmentation import PARAM_NAMES, Augment, draw_params
from unisono.data.image.batch_augment import augment_on_device
from unisono.data.image.decoding import Pixels, decode
from unisono.data.image.jpeg_header import as_view, is_jpeg, read_header
from unisono.data.image.tiles import Box, TileGrid, decode_region, tile_grid
from unisono.errors import DataError, ExtraError

PARAMS_ENTRY: Final = "image_draws"
_MAX_ARRAYS: Final = 8  # reusable ones per thread
_FREE_REFERENCES: Final = 3  # of an array that is not in use: the list's, the loop variable, getrefcount's argument
_LOCAL: Final = threading.local()


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageTransform:
    """A loader's transform for images: decodes the pixels under the crop, resizes, augments.

    The sample's ``image`` is encoded, uint8 [bytes], or pixels, uint8 [height, width, channels]. Its optional ``tiles``
    are the result of ``TileGrid.to_column`` (empty if unknown). Both are replaced by ``image``: float32 [C, H, W] if
    ``augment`` normalises, else uint8 [H, W, C]. Other entries are unchanged.

    A JPEG much larger than the output is decoded at 1/2, 1/4 or 1/8 scale, its crop rounded outwards to that grid.
    Other formats and JPEGs without restart markers are decoded whole. Threads may share a transform. Without ``rng``
    the parameters are constant, so ``mapped(data, transform)`` is a data set for evaluation.

    Attributes:
        augment: The crop, output size and pixel operations.
        pixels_on: "device": only crop and resize here. ``image`` is uint8 [H, W, C]; ``image_draws``, float32 [12], are
            the parameters with which ``augment_on_device`` finishes a batch. "host": do everything here.

    Raises:
        DataError: A sample has no image, or decoding raises it.
    """

    augment: Augment
    pixels_on: Literal["host", "device"] = "host"

    def __call__(self, sample: Batch, rng: np.random.Generator | None = None) -> Batch:
        resized = self.transform_sample(sample, np.random.default_rng(0) if rng is None else rng)
        if self.pixels_on == "device":
            return resized
        done = self.transform_batch({"image": resized["image"][None], PARAMS_ENTRY: resized.pop(PARAMS_ENTRY)[None]})
        return {**resized, "image": done["image"][0]}

    def transform_sample(self, sample: Batch, rng: np.random.Generator) -> Batch:
        """Crop and resize: returns ``image``, uint8 [H, W, C], and ``image_draws``, float32 [12]."""
        if "image" not in sample:
            raise _no_image(f"a sample of {sorted(sample)}")
        rest = {name: value for name, value in sample.items() if name not in ("image", "tiles")}
        pixels, drawn = _cropped(sample["image"], sample.get("tiles"), self.augment, rng)
        return {**rest, "image": resize(pixels, self.augment.size, self.augment.resize), PARAMS_ENTRY: drawn}

    def transform_batch(self, batch: Batch) -> Batch:
        """Apply ``image_draws`` to a batch of results of ``transform_sample``, into one array."""
        if self.pixels_on == "device":
            return batch
        images, draws = batch["image"], batch[PARAMS_ENTRY]
        rest = {name: value for name, value in batch.items() if name not in ("image", PARAMS_ENTRY)}
        if self.augment.rotate or self.augment.jitter is not None:
            return {
                **rest,
                "image": augment_on_device(torch.from_numpy(images), torch.from_numpy(draws), self.augment).numpy(),
            }
        return {**rest, "image": _flip_normalize_erase(images, draws, self.augment)}


def resize(pixels: Pixels, size: tuple[int, int], by: Literal["torch", "opencv"]) -> Pixels:
    """Resize uint8 [height, width, channels] to ``size``, (height, width), in the calling thread.

    "torch": bilinear with antialiasing. "opencv": bilinear between four neighbours, which is faster but not antialiased; needs
    the package opencv-python-headless.
    """
    if pixels.shape[:2] == size:
        return pixels.copy()  # the result is erased in place
    if by == "opencv":
        return _opencv_resize()(pixels, size[::-1]).reshape(*size, pixels.shape[2])
    contiguous = np.ascontiguousarray(pixels)
    if not contiguous.flags.writeable:
        contiguous = contiguous.copy()  # torch has no read-only tensors
    # [1, C, H, W], with the image's memory layout. Views by numpy: torch releases and reacquires the GIL for each.
    planes = torch.from_numpy(contiguous.reshape(1, *contiguous.shape).transpose(0, 3, 1, 2))
    small = F.interpolate(planes, size=size, mode="bilinear", antialias=True, align_corners=False)
    return np.ascontiguousarray(small.numpy()[0].transpose(1, 2, 0))


def _cropped(
    image: NDArray[Any], tiles: NDArray[Any] | None, augment: Augment, rng: np.random.Generator
) -> tuple[Pixels, NDArray[np.float32]]:
    """The pixels of the drawn crop, possibly at a smaller scale, and the other parameters."""
    if image.ndim == 3:
        _check_pixels(image, augment)
        box, drawn = draw_params(augment, image.shape[0], image.shape[1], rng)
        return _inside(image, box), drawn
    encoded = as_view(image)
    if not is_jpeg(encoded):
        pixels = decode(encoded, max_pixels=augment.max_pixels, color=augment.color)
        box, drawn = draw_params(augment, pixels.shape[0], pixels.shape[1], rng)
        return _inside(pixels, box), drawn
    grid = tile_grid(encoded) if tiles is None or not tiles.size else TileGrid.from_column(encoded, tiles)
    header = read_header(encoded) if grid is None else grid.header
    box, drawn = draw_params(augment, header.height, header.width, rng)
    pixels = decode_region(
        encoded, box, grid, min_size=augment.size, color=augment.color, max_pixels=augment.max_pixels
    )
    return pixels, drawn


def _flip_normalize_erase(images: Pixels, draws: NDArray[np.float32], augment: Augment) -> NDArray[Any]:
    """``augment_on_device`` for images [N, H, W, C] that are only flipped, normalised and erased: one image at a time, so that
    each stays in the processor's cache."""
    count, height, width, channels = images.shape
    normalised = augment.mean is not None and augment.std is not None
    shape = (count, channels, height, width) if normalised else images.shape
    done = reusable_empty(shape, np.float32 if normalised else np.uint8)
    mean, std = (np.array(numbers or (), np.float32)[:, None, None] for numbers in (augment.mean, augment.std))
    for image, drawn, out in zip(images, draws.tolist(), done, strict=True):
        values = dict(zip(PARAM_NAMES, cast("list[float]", drawn), strict=True))
        if normalised:
            turned = image[:: -1 if values["flip_vertical"] else 1, :: -1 if values["flip"] else 1]
            np.copyto(out, turned.transpose(2, 0, 1))
            out *= 1 / (255 * std)
            out -= mean / std
        else:  # torch flips bytes ten times as fast as numpy
            sides = [side for side, name in enumerate(("flip_vertical", "flip")) if values[name]]
            torch.from_numpy(out).copy_(torch.from_numpy(image).flip(sides))
        if values["erase_height"]:
            top, left = round(values["erase_top"] * height), round(values["erase_left"] * width)
            bottom, right = top + round(values["erase_height"] * height), left + round(values["erase_width"] * width)
            (out.transpose(1, 2, 0) if normalised else out)[top:bottom, left:right] = 0
    return done


def reusable_empty(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Like ``numpy.empty``, but may return memory that this thread has allocated here before, once nothing else refers to it.

    A batch of images takes tens of megabytes. The system clears and maps the pages of a new array one by one, which takes longer
    than filling them (4.6 against 1.2 ms for 38 MB, measured). A tensor that shares an array's memory also refers to the array.
    """
    arrays: list[NDArray[Any]] = _LOCAL.__dict__.setdefault("arrays", [])
    for array in arrays:
        if array.shape == shape and array.dtype == dtype and sys.getrefcount(array) == _FREE_REFERENCES:
            return array
    if len(arrays) == _MAX_ARRAYS:
        del arrays[0]
    new_array = np.empty(shape, dtype)
    arrays.append(new_array)
    return new_array


def _inside(pixels: Pixels, box: Box) -> Pixels:
    top, left, height, width = box
    return pixels[top : top + height, left : left + width]


def _check_pixels(image: NDArray[Any], augment: Augment) -> None:
    channels = 3 if augment.color == "rgb" else 1
    if image.dtype != np.uint8 or image.shape[2] != channels or 0 in image.shape:
        raise _no_image(f"an image of {image.dtype}{list(image.shape)}, and color = {augment.color!r}")


def _no_image(given: str) -> DataError:
    return DataError(
        given=given,
        rule="image is uint8 [bytes] if encoded; if decoded, uint8 [height, width, 3], or 1 for color = 'gray'",
        consequence="it cannot be cropped and augmented",
        nearest="name it image; drop alpha, scale other dtypes to 0 to 255",
    )


@cache
def _opencv_resize() -> Callable[..., Pixels]:
    try:
        from cv2 import resize as cv2_resize  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ExtraError(
            given='resize = "opencv", and the package cv2 is not installed',
            rule="resizing with OpenCV is an option that comes with no extra",
            consequence="nothing was resized",
            nearest='pip install opencv-python-headless, or resize = "torch"',
        ) from error
    return cv2_resize
