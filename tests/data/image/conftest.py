"""Pictures with smooth parts, edges and noise, so that every step of a codec has something to do."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

Photo = Callable[..., NDArray[np.uint8]]


def _photo(height: int, width: int, *, seed: int = 0, noise: float = 12.0) -> NDArray[np.uint8]:
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (max(2, height // 24), max(2, width // 24), 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), np.float32)
    return np.clip(smooth + rng.normal(0, noise, smooth.shape), 0, 255).astype(np.uint8)


@pytest.fixture(scope="session")
def photo() -> Photo:
    """``photo(height, width, seed=…)``: uint8 [height, width, 3]."""
    return _photo


def _saved(pixels: NDArray[np.uint8], name: str, mode: str = "RGB", **options: object) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(out, name, **options)
    return out.getvalue()


@pytest.fixture(scope="session")
def saved() -> Callable[..., bytes]:
    """``saved(pixels, format, mode, **options)``: encoded by Pillow."""
    return _saved
