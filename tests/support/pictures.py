"""Pictures as of photographs: noise whose amplitude falls with the frequency, and edits of them."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

HEIGHT, WIDTH = 240, 320


def photograph(seed: int) -> Image.Image:
    """An RGB image with the spectrum of photographs, 1 / frequency (Field 1987)."""
    draw = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(HEIGHT)[:, None], np.fft.rfftfreq(WIDTH)[None])
    frequency[0, 0] = 1.0
    planes: list[NDArray[np.float64]] = []
    for _ in range(3):
        phases = np.exp(2j * np.pi * draw.random(frequency.shape))
        planes.append(np.fft.irfft2(phases / frequency, s=(HEIGHT, WIDTH)))
    grey = planes[0]
    values = np.stack([grey + 0.3 * plane for plane in planes], axis=2)
    values = 128 + 45 * (values - values.mean()) / values.std()
    return Image.fromarray(np.clip(values, 0, 255).astype(np.uint8))


def jpeg(image: Image.Image, quality: int = 90) -> bytes:
    """The image as JPEG."""
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def crop(image: Image.Image, seed: int, least: float = 0.65) -> Image.Image:
    """A part with sides of ``least`` to all of the image."""
    draw = np.random.default_rng(seed)
    width, height = (round(size * draw.uniform(least, 0.95)) for size in image.size)
    left, top = int(draw.integers(image.width - width + 1)), int(draw.integers(image.height - height + 1))
    return image.crop((left, top, left + width, top + height))


def edits(image: Image.Image) -> dict[str, bytes]:
    """The same picture in other files."""
    brighter = image.point(lambda value: min(255, round(value * 1.2) + 8))
    png = io.BytesIO()
    image.save(png, "PNG")
    return {
        "poor.jpg": jpeg(image, 30),
        "half.jpg": jpeg(image.resize((WIDTH // 2, HEIGHT // 2)), 80),
        "brighter.jpg": jpeg(brighter),
        "same.png": png.getvalue(),
    }


def blurred(image: Image.Image) -> Image.Image:
    """The image out of focus."""
    return image.filter(ImageFilter.GaussianBlur(8))


def write_photographs(folder: Path, seeds: range) -> None:
    """One JPEG for each seed."""
    folder.mkdir(parents=True)
    for seed in seeds:
        (folder / f"{seed:04d}.jpg").write_bytes(jpeg(photograph(seed)))
