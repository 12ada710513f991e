"""From an encoded sample to pixels of one size: the same by whatever way, in whatever thread, after whatever resume."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image

from unisono.data.dataset import Batch
from unisono.data.image import (
    Augment,
    CenterCrop,
    Erase,
    ImageTransform,
    add_restart_markers,
    decode,
    decode_region,
    encode_jpeg,
    tile_grid,
)
from unisono.data.image.augmentation import draw_params
from unisono.data.image.transform import _opencv_resize, resize
from unisono.errors import DataError, ExtraError

Photo = Callable[..., NDArray[np.uint8]]
Saved = Callable[..., bytes]


def sample(data: bytes, **others: NDArray[np.generic]) -> Batch:
    return {"image": np.frombuffer(data, np.uint8), "targets": np.array(3), **others}


def test_all_ways_to_the_same_pixels(photo: Photo) -> None:
    """Tiles from a column, found by a scan, no tiles, and pixels decoded before."""
    data = encode_jpeg(photo(120, 170))
    grid = tile_grid(data)
    assert grid is not None
    plain = decode(data)
    transform = ImageTransform(augment=Augment(size=(64, 64), flip=0.5))
    ways = [
        sample(data, tiles=grid.to_column()),
        sample(data),
        sample(data, tiles=np.empty(0, np.uint16)),
        {"image": plain, "targets": np.array(3)},
        {"image": memoryview(data), "targets": np.array(3)},
    ]
    for seed in range(30):
        box, drawn = draw_params(transform.augment, 120, 170, np.random.default_rng(seed))
        # The crop that is asked for, by a way of its own
        cropped = torch.from_numpy(plain[box[0] : box[0] + box[2], box[1] : box[1] + box[3]].copy())
        small = F.interpolate(cropped.permute(2, 0, 1)[None], size=(64, 64), mode="bilinear", antialias=True)[0]
        want = (small.flip(2) if drawn[0] else small).permute(1, 2, 0).numpy()
        big = box[2] >= 128 and box[3] >= 128
        for way in ways:
            got = transform(way, np.random.default_rng(seed))
            assert set(got) == {"image", "targets"}
            if not big:  # else JPEGs come out at half size, below
                assert np.array_equal(got["image"], want)


@pytest.mark.parametrize("tiled", [True, False])
def test_large_jpegs_are_decoded_smaller(photo: Photo, saved: Saved, tiled: bool) -> None:
    pixels = photo(500, 700)
    data = encode_jpeg(pixels) if tiled else saved(pixels, "JPEG")
    augment = Augment(size=(100, 100), crop=CenterCrop(share=0.9))
    got = ImageTransform(augment=augment)(sample(data), np.random.default_rng(0))["image"]
    box, _ = draw_params(augment, 500, 700, np.random.default_rng(0))
    quarter = decode_region(data, box, min_size=(100, 100))
    assert quarter.shape == (113, 113, 3)  # 450 pixels from 25 and from 125 on, at 1/4 and rounded outwards
    assert np.array_equal(got, resize(quarter, (100, 100), "torch"))
    exact = resize(decode(data)[box[0] : box[0] + box[2], box[1] : box[1] + box[3]], (100, 100), "torch")
    assert np.abs(got.astype(np.int16) - exact).mean() < 6


def test_resize_is_pillow_s_bilinear(photo: Photo) -> None:
    """An antialiased bilinear filter, as Pillow and torchvision have it."""
    pixels = photo(90, 130)
    for size in ((40, 50), (120, 200), (90, 30)):
        peer = np.asarray(Image.fromarray(pixels).resize(size[::-1], Image.Resampling.BILINEAR), np.int16)
        assert np.abs(resize(pixels, size, "torch") - peer).max() <= 1
        gray = resize(pixels[:, :, :1], size, "torch")
        peer = np.asarray(Image.fromarray(pixels[:, :, 0]).resize(size[::-1], Image.Resampling.BILINEAR), np.int16)
        assert np.abs(gray[:, :, 0] - peer).max() <= 1


@pytest.mark.skipif(find_spec("cv2") is None, reason="opencv-python-headless is not installed")
def test_resize_by_opencv(photo: Photo) -> None:
    pixels = photo(90, 130, noise=1)
    assert resize(pixels[:, :, :1], (45, 65), "opencv").shape == (45, 65, 1)
    up = resize(pixels, (180, 260), "opencv").astype(np.int16)
    assert np.abs(up - resize(pixels, (180, 260), "torch")).max() <= 2  # no antialiasing to differ by


def test_without_opencv(photo: Photo, monkeypatch: pytest.MonkeyPatch) -> None:
    _opencv_resize.cache_clear()
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(ExtraError, match='pip install opencv-python-headless, or resize = "torch"'):
        resize(photo(20, 20), (10, 10), "opencv")


def test_the_caller_s_image_is_left_alone(photo: Photo) -> None:
    image = photo(32, 32)
    before = image.copy()
    augment = Augment(size=(32, 32), crop=CenterCrop(share=1.0), erase=Erase(probability=1.0))
    got = ImageTransform(augment=augment)({"image": image}, np.random.default_rng(0))["image"]
    assert np.array_equal(image, before)
    assert not np.array_equal(got, image)
    image.flags.writeable = False
    ImageTransform(augment=augment)({"image": image}, np.random.default_rng(0))
    ImageTransform(augment=Augment(size=(16, 16), crop=CenterCrop(share=1.0)))(
        {"image": image}, np.random.default_rng(0)
    )


@pytest.mark.parametrize("name", ["PNG", "WebP", "GIF"])
def test_other_formats(photo: Photo, saved: Saved, name: str) -> None:
    data = saved(photo(60, 90), name)
    transform = ImageTransform(augment=Augment(size=(32, 32), color="gray"))
    by_data = transform(sample(data), np.random.default_rng(1))["image"]
    by_pixels = transform({"image": decode(data, color="gray")}, np.random.default_rng(1))["image"]
    assert by_data.shape == (32, 32, 1)
    assert np.array_equal(by_data, by_pixels)


def test_threads_may_share_a_transform(photo: Photo) -> None:
    images = [encode_jpeg(photo(200, 300, seed=seed)) for seed in range(8)]
    transform = ImageTransform(augment=Augment(size=(64, 64), flip=0.5, mean=(0.5,) * 3, std=(0.25,) * 3))

    def one(turn: int) -> NDArray[np.generic]:
        return transform(sample(images[turn % 8]), np.random.default_rng(turn))["image"]

    alone = [one(turn) for turn in range(96)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(one, range(96)))
    assert all(np.array_equal(a, b) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize(
    ("image", "shown"),
    [
        (np.zeros((4, 4, 4), np.uint8), "an image of uint8[4, 4, 4], and color = 'rgb'"),
        (np.zeros((4, 4, 3), np.float32), "an image of float32[4, 4, 3]"),
        (np.zeros((0, 4, 3), np.uint8), "an image of uint8[0, 4, 3]"),
        (np.zeros((4, 4), np.uint8), "an encoded image as 2 dims of 1-byte values"),
        (np.zeros(9, np.uint8), "9 bytes that begin with 00 00"),
    ],
)
def test_what_is_no_image(image: NDArray[np.generic], shown: str) -> None:
    with pytest.raises(DataError) as caught:
        ImageTransform(augment=Augment())({"image": image}, np.random.default_rng(0))
    assert shown in str(caught.value)


def test_a_sample_without_an_image() -> None:
    with pytest.raises(DataError, match=r"a sample of \['picture', 'targets'\]\n  rule: image is uint8"):
        ImageTransform(augment=Augment())({"picture": np.zeros(3), "targets": np.array(1)}, np.random.default_rng(0))


def test_a_column_of_another_image_is_an_error(photo: Photo) -> None:
    grid = tile_grid(encode_jpeg(photo(120, 170)))
    assert grid is not None
    wrong = sample(encode_jpeg(photo(120, 170, seed=1)), tiles=grid.to_column())
    with pytest.raises(DataError, match="a column of tile sizes is the result of to_column"):
        ImageTransform(augment=Augment())(wrong, np.random.default_rng(0))


@pytest.mark.parametrize("threads", [1, 2])
def test_mirroring_with_and_without_torch_s_threads(
    photo: Photo, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for shape in ((224, 224), (1, 20000), (5, 7)):
        image = photo(*shape)
        augment = Augment(size=shape, crop=CenterCrop(share=1.0), flip=1.0)
        got = ImageTransform(augment=augment)({"image": image}, np.random.default_rng(0))["image"]
        assert np.array_equal(got, image[:, ::-1])


def test_settings_and_tiles_need_neither_torch_nor_codecs() -> None:
    program = """
        import sys
        from unisono.data.image import Augment, CutMix, TileGrid, add_restart_markers, contact_sheet, decode, probe
        loaded = {"torch", "PIL", "simplejpeg", "cv2"} & set(sys.modules)
        sys.exit(", ".join(sorted(loaded)) or 0)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr.decode()


def test_the_package_exports_lazily() -> None:
    import unisono.data.image as package

    assert package.add_restart_markers is add_restart_markers
    assert "decode" in dir(package)
    with pytest.raises(AttributeError, match="attribute decod"):
        _ = package.decod
