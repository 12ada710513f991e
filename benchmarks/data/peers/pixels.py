"""What a rival's worker does to one JPEG, and what its batches say about the crops it drew. numpy, and decoders where used.

All rivals that take a Python function get the same one: the fastest found, DCT scaling by simplejpeg and OpenCV's resize; or
Pillow's, with its own two tricks (``draft`` and ``reducing_gap``).
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

OUT, BATCH = 224, 64
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
MEAN = np.array([0.485, 0.456, 0.406], np.float32)
STD = np.array([0.229, 0.224, 0.225], np.float32)
_SCALE, _SHIFT = (1 / (255 * STD))[:, None, None], (MEAN / STD)[:, None, None]


class Photos:
    """JPEGs by number, from ``photos.bin`` and ``offsets.npy``."""

    def __init__(self, folder: str) -> None:
        self.offsets = np.load(Path(folder) / "offsets.npy")
        self.data = np.memmap(Path(folder) / "photos.bin", np.uint8, mode="r")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, number: int) -> bytes:
        if not 0 <= number < len(self):
            raise IndexError(number)
        return self.data[self.offsets[number] : self.offsets[number + 1]].tobytes()

    def __iter__(self) -> Iterator[bytes]:
        return (self[number] for number in range(len(self)))


def draw(height: int, width: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """(top, left, height, width) by torchvision's rule."""
    for _ in range(10):
        area = rng.uniform(*SCALE) * height * width
        aspect = math.exp(rng.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        wide, tall = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < wide <= width and 0 < tall <= height:
            return int(rng.integers(0, height - tall + 1)), int(rng.integers(0, width - wide + 1)), tall, wide
    wide = min(width, round(height * RATIO[1]))
    return 0, (width - wide) // 2, height, wide


def finished(pixels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """uint8 [H, W, C], perhaps flipped, to normalised float32 [C, H, W]."""
    if rng.random() < 0.5:
        pixels = pixels[:, ::-1]
    out = np.empty((3, *pixels.shape[:2]), np.float32)
    np.multiply(pixels.transpose(2, 0, 1), _SCALE, out=out)
    out -= _SHIFT
    return out


def by_simplejpeg(jpeg: bytes, rng: np.random.Generator) -> np.ndarray:
    """simplejpeg at 1/8, 1/4, 1/2 or 1, whichever still has the output's pixels in the crop, then OpenCV's resize."""
    import cv2
    import simplejpeg

    height, width, *_ = simplejpeg.decode_jpeg_header(jpeg)
    top, left, tall, wide = draw(height, width, rng)
    factor = next((f for f in (8, 4, 2) if min(tall, wide) >= f * OUT), 1)
    if factor == 1:
        pixels = simplejpeg.decode_jpeg(jpeg, "RGB")
    else:
        pixels = simplejpeg.decode_jpeg(jpeg, "RGB", min_height=-(-height // factor), min_width=-(-width // factor))
        top, left, tall, wide = top // factor, left // factor, tall // factor, wide // factor
    return finished(cv2.resize(pixels[top : top + tall, left : left + wide], (OUT, OUT)), rng)


def by_pillow(jpeg: bytes, rng: np.random.Generator) -> np.ndarray:
    """Pillow alone."""
    from PIL import Image

    image = Image.open(io.BytesIO(jpeg))
    top, left, tall, wide = draw(image.height, image.width, rng)
    before = image.width, image.height
    factor = min(tall, wide) // OUT
    if factor > 1:
        image.draft("RGB", (image.width // factor, image.height // factor))
    x, y = image.width / before[0], image.height / before[1]
    box = (left * x, top * y, min((left + wide) * x, image.width), min((top + tall) * y, image.height))
    small = image.convert("RGB").resize((OUT, OUT), Image.Resampling.BILINEAR, box=box, reducing_gap=2.0)
    return finished(np.asarray(small), rng)


DECODERS = {"simplejpeg": by_simplejpeg, "pillow": by_pillow}


def single_threaded() -> None:
    """Workers are the parallelism: no library underneath has threads of its own."""
    try:
        import cv2

        cv2.setNumThreads(0)
    except ImportError:
        pass
    try:
        import torch

        torch.set_num_threads(1)
    except ImportError:
        pass


def crops_of(batches: Iterator[Any], count: int) -> dict[str, float]:
    """Mean area share, log aspect ratio and share of flips of ``count`` crops of the ramp, read off the pixels."""
    areas, ratios, flips = [], [], []
    for _ in range(-(-count // BATCH)):
        batch = np.asarray(next(batches))
        levels = batch * STD[:, None, None] + MEAN[:, None, None]  # [B, C, H, W]
        red, green = levels[:, 0].mean(axis=1), levels[:, 1].mean(axis=2)  # [B, W] along x, [B, H] along y
        # the outermost pixels are those that interpolation bends
        inner = slice(OUT // 8, OUT - OUT // 8)
        wide = np.polyfit(np.arange(OUT)[inner], red[:, inner].T, 1)[0] * OUT * 500
        tall = np.polyfit(np.arange(OUT)[inner], green[:, inner].T, 1)[0] * OUT * 375
        areas.extend(np.abs(wide) * np.abs(tall) / (500 * 375))
        ratios.extend(np.log(np.abs(wide) / np.abs(tall)))
        flips.extend(wide < 0)
    return {"area": float(np.mean(areas)), "log_ratio": float(np.mean(ratios)), "flip": float(np.mean(flips))}


def pixels_of(batches: Iterator[Any], count: int) -> dict[str, float]:
    """Mean and standard deviation of ``count`` outputs."""
    seen = [np.array(next(batches)) for _ in range(-(-count // BATCH))]
    return {
        "mean": float(np.mean([each.mean() for each in seen])),
        "std": float(np.mean([each.std() for each in seen])),
    }
