"""Markers are put in without loss, or not at all."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from unisono.data.image import add_restart_markers, decode, encode_jpeg, probe, tile_grid
from unisono.errors import DataError, ExtraError

Photo = Callable[..., NDArray[np.uint8]]
Saved = Callable[..., bytes]

needs_jpegtran = pytest.mark.skipif(
    shutil.which("jpegtran") is None, reason="jpegtran: apt install libjpeg-turbo-progs"
)


@needs_jpegtran
@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_markers_lose_nothing(photo: Photo, saved: Saved, mode: str, progressive: bool) -> None:
    exif = Image.Exif()
    exif[0x010E] = "kept"
    data = saved(photo(120, 175), "JPEG", mode, quality=85, progressive=progressive, exif=exif)
    marked = add_restart_markers(data)
    assert np.array_equal(decode(marked), decode(data))
    assert Image.open(io.BytesIO(marked)).getexif()[0x010E] == "kept"
    grid = tile_grid(marked)
    assert grid is not None
    assert grid.rows * grid.columns > 1
    assert add_restart_markers(marked) is not marked
    assert add_restart_markers(marked) == marked


@needs_jpegtran
@pytest.mark.parametrize(
    ("width", "tile_px", "expected"),
    [(512, 64, 4), (500, 64, 4), (496, 64, 1), (496, 400, 31), (17, 64, 2), (1, 64, 1)],
)
def test_the_interval_divides_the_row(photo: Photo, saved: Saved, width: int, tile_px: int, expected: int) -> None:
    data = saved(photo(32, width), "JPEG", subsampling="4:2:0")
    header = probe(add_restart_markers(data, tile_px=tile_px)).jpeg
    assert header is not None
    assert header.restart_interval == expected
    assert tile_grid(encode_jpeg(photo(32, width), tile_px=tile_px)).columns == -(-width // 16) // expected  # type: ignore[union-attr]


def test_tiles_already_there_need_no_program(photo: Photo, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    data = encode_jpeg(photo(60, 128))
    assert add_restart_markers(data) == data


def test_without_jpegtran(photo: Photo, saved: Saved, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shutil.which("jpegtran") is None
    with pytest.raises(ExtraError) as caught:
        add_restart_markers(saved(photo(60, 90), "JPEG"))
    assert str(caught.value) == (
        "restart markers for a JPEG, and no jpegtran on the PATH\n"
        "  rule: markers are put into an existing JPEG by jpegtran, which loses nothing\n"
        "  so:   the image was not changed\n"
        "  try:  apt install libjpeg-turbo-progs (brew install jpeg-turbo); or keep such images without tiles, "
        "or let pack re-encode them to a size limit, which sets markers by itself"
    )


@needs_jpegtran
def test_what_is_not_whole_is_not_marked(photo: Photo, saved: Saved) -> None:
    data = saved(photo(60, 90), "JPEG")
    with pytest.raises(DataError, match="that jpegtran does not take: Premature end of JPEG file"):
        add_restart_markers(data[: len(data) // 2])
    scans = saved(photo(60, 90), "JPEG", progressive=True)
    with pytest.raises(DataError, match="scans, where 200 are the limit"):
        add_restart_markers(scans[:-2] + scans[scans.rindex(b"\xff\xda") : -2] * 300)
    with pytest.raises(DataError, match="an image of 90x60 = 5400 pixels"):
        add_restart_markers(data, max_pixels=5000)
    with pytest.raises(DataError, match="where a marker of the header should be"):
        add_restart_markers(saved(photo(60, 90), "PNG"))


@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0"])
def test_encoding_sets_markers_and_changes_little(photo: Photo, subsampling: str) -> None:
    pixels = photo(90, 128, noise=2)
    for image in (pixels, pixels[:, :, :1]):
        data = encode_jpeg(image, quality=95, subsampling=subsampling)
        assert tile_grid(data) is not None
        got = decode(data, color="rgb" if image.shape[2] == 3 else "gray").astype(np.int16)
        assert np.abs(got - image).mean() < (3 if image.shape[2] == 3 else 1.5)


def test_encoding_noise_at_full_quality(photo: Photo) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (16, 4000, 3), dtype=np.uint8)
    data = encode_jpeg(noise, quality=100, subsampling="4:4:4")
    assert np.abs(decode(data).astype(np.int16) - noise).mean() < 1
