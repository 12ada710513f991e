"""Synthetic photos for the image benchmarks, and what a random crop should look like on average.

2,000 JPEGs of 500 x 375, quality 90, 4:2:0, about 78 KB or 3.4 bits a pixel like ImageNet's: noise whose amplitude falls with
frequency as in photographs, and texture on top. ``ramp`` is one image whose colours are its coordinates: from the pixels of a
loader's output the crop and the flip it drew can be read off, whatever loader it was.
"""

from __future__ import annotations

import io
import math
from pathlib import Path

import numpy as np
from PIL import Image

HEIGHT, WIDTH, OUT = 375, 500, 224
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
_OCTAVES = (4, 8, 16, 32, 64, 128)  # cells across
_TEXTURE = 12.0  # amplitude in grey levels, chosen for the bits per pixel


def photos(cache: Path, count: int, seed: int = 0) -> Path:
    """A folder with ``photos.bin`` (the JPEGs one after the other) and ``offsets.npy`` [count + 1]; made if it is not there."""
    folder = cache / f"photos-{count}-{seed}"
    if not (folder / "offsets.npy").exists():
        folder.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(seed)
        offsets = [0]
        with (folder / "photos.bin").open("wb") as file:
            for _ in range(count):
                file.write(_photo(rng))
                offsets.append(file.tell())
        np.save(folder / "offsets.npy", np.array(offsets))
    return folder


def ramps(cache: Path, count: int) -> Path:
    """As ``photos``, ``count`` times the ramp."""
    folder = cache / f"ramps-{count}"
    if not (folder / "offsets.npy").exists():
        folder.mkdir(parents=True, exist_ok=True)
        jpeg = ramp()
        (folder / "photos.bin").write_bytes(jpeg * count)
        np.save(folder / "offsets.npy", np.arange(count + 1) * len(jpeg))
    return folder


def ramp() -> bytes:
    """Red is x / width, green is y / height."""
    pixels = np.full((HEIGHT, WIDTH, 3), 128.0)
    pixels[:, :, 0] = (np.arange(WIDTH) + 0.5) / WIDTH * 255
    pixels[:, :, 1] = ((np.arange(HEIGHT) + 0.5) / HEIGHT * 255)[:, None]
    return _encoded(pixels, quality=95, subsampling=0)


def expected(draws: int = 20_000) -> dict[str, float]:
    """Mean area share, mean log aspect ratio of RandomResizedCrop (torchvision's rule) on these sizes, by drawing."""
    rng = np.random.default_rng(0)
    areas, ratios = [], []
    for _ in range(draws):
        for _ in range(10):
            area, log_ratio = rng.uniform(*SCALE) * HEIGHT * WIDTH, rng.uniform(math.log(RATIO[0]), math.log(RATIO[1]))
            width, height = round(math.sqrt(area * math.exp(log_ratio))), round(math.sqrt(area / math.exp(log_ratio)))
            if 0 < width <= WIDTH and 0 < height <= HEIGHT:
                break
        else:
            width, height = min(WIDTH, round(HEIGHT * RATIO[1])), HEIGHT
        areas.append(width * height / (WIDTH * HEIGHT))
        ratios.append(math.log(width / height))
    return {"area": float(np.mean(areas)), "log_ratio": float(np.mean(ratios)), "flip": 0.5}


def _photo(rng: np.random.Generator) -> bytes:
    pixels = np.zeros((HEIGHT, WIDTH, 3), np.float32)
    for cells in _OCTAVES:
        noise = rng.normal(0, 1, (cells * 3 // 4, cells)).astype(np.float32)
        plane = np.asarray(Image.fromarray(noise).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC))
        pixels += (160 / cells * plane)[:, :, None] * rng.uniform(0.6, 1.4, 3).astype(np.float32)
    texture = rng.normal(0, _TEXTURE, (HEIGHT, WIDTH)).astype(np.float32)
    return _encoded(pixels + texture[:, :, None] + rng.uniform(90, 150, 3), quality=90, subsampling=2)


def _encoded(pixels: np.ndarray, *, quality: int, subsampling: int) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(out, "JPEG", quality=quality, subsampling=subsampling)
    return out.getvalue()
