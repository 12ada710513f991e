"""A folder of photos and drawings in classes, some upright only by their EXIF."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

ROTATED = "dog/07.jpg"  # EXIF: turn by 90° clockwise
ORIENTATION = 0x0112


def picture(seed: int, height: int, width: int) -> NDArray[np.uint8]:
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))


@pytest.fixture(scope="session")
def album(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 images: cat, dog and dog/small, 10 each, every fifth a PNG; to be read only."""
    root = tmp_path_factory.mktemp("album")
    for label, name in enumerate(["cat", "dog", "dog/small"]):
        (root / name).mkdir()
        for number in range(10):
            path = root / name / f"{number:02d}.{'png' if number % 5 == 0 else 'jpg'}"
            image = Image.fromarray(picture(100 * label + number, 40 + 7 * number, 90 - 5 * label))
            exif = Image.Exif()
            if path.relative_to(root).as_posix() == ROTATED:
                exif[ORIENTATION] = 6
            image.save(path, exif=exif)
    return root
