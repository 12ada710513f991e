"""Each operation against arithmetic by hand, and batches against single images."""

from __future__ import annotations

import colorsys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from unisono.data.image import Augment, CenterCrop, Erase, ImageTransform, Jitter, augment_on_device
from unisono.data.image.augmentation import JITTER_ORDERS, PARAM_NAMES
from unisono.data.image.transform import PARAMS_ENTRY
from unisono.errors import DataError

Photo = Callable[..., NDArray[np.uint8]]

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NEUTRAL = {"brightness": 1.0, "contrast": 1.0, "saturation": 1.0}
ANY_JITTER = Jitter(brightness=0.5, contrast=0.5, saturation=0.5, hue=0.5)


def draws(*rows: dict[str, float]) -> torch.Tensor:
    return torch.tensor([[{**NEUTRAL, **row}.get(name, 0.0) for name in PARAM_NAMES] for row in rows])


def applied(image: NDArray[np.uint8], augment: Augment, **values: float) -> NDArray[Any]:
    return augment_on_device(torch.from_numpy(image)[None], draws(values), augment)[0].numpy()


def near(got: NDArray[np.uint8], want: NDArray[Any], levels: float = 1) -> bool:
    return got.dtype == np.uint8 and float(np.abs(got - np.clip(want, 0, 255).astype(np.float64)).max()) <= levels


def test_flips(photo: Photo) -> None:
    image = photo(20, 30)
    augment = Augment(flip=0.5, flip_vertical=0.5)
    assert np.array_equal(applied(image, augment, flip=1), image[:, ::-1])
    assert np.array_equal(applied(image, augment, flip_vertical=1), image[::-1])
    batch = torch.from_numpy(np.stack([image] * 3))
    both = augment_on_device(batch, draws({"flip": 1}, {}, {"flip": 1, "flip_vertical": 1}), augment).numpy()
    assert np.array_equal(both, np.stack([image[:, ::-1], image, image[::-1, ::-1]]))


@pytest.mark.parametrize("size", [(20, 20), (21, 21)])
def test_quarter_turns_are_counter_clockwise(photo: Photo, size: tuple[int, int]) -> None:
    image = photo(*size)
    for turns in (1, 2, 3):
        assert near(applied(image, Augment(rotate=180), angle=90 * turns), np.rot90(image, turns))


def test_rotation_of_a_wide_image_keeps_its_shape(photo: Photo) -> None:
    """Half a turn is exact; a quarter turn moves what is as far above the middle to as far left of it."""
    image = photo(20, 40)
    assert near(applied(image, Augment(rotate=180), angle=180), np.rot90(image, 2))
    quarter = applied(image, Augment(rotate=180), angle=90)
    assert near(quarter[:, 10:30], np.rot90(image[:, 10:30]))
    assert not quarter[:, :10].any()  # nothing was there


def test_brightness_contrast_saturation(photo: Photo) -> None:
    image = photo(20, 30)
    x = image.astype(np.float64)
    gray = x @ np.array([0.2989, 0.587, 0.114])
    augment = Augment(jitter=ANY_JITTER)
    assert near(applied(image, augment, brightness=1.3), x * 1.3)
    assert near(applied(image, augment, contrast=0.6), x * 0.6 + gray.mean() * 0.4)
    assert near(applied(image, augment, saturation=1.4), x * 1.4 - gray[:, :, None] * 0.4)


@pytest.mark.parametrize("shift", [-0.5, -0.2, 0.0, 0.1, 0.4])
def test_hue_turns_as_colorsys_does(photo: Photo, shift: float) -> None:
    image = photo(8, 9, noise=60)
    image[0, :3] = [[255, 0, 0], [7, 7, 7], [0, 0, 0]]
    want = np.empty(image.shape)
    for place in np.ndindex(8, 9):
        hue, saturation, value = colorsys.rgb_to_hsv(*(image[place] / 255))
        want[place] = np.array(colorsys.hsv_to_rgb((hue + shift) % 1, saturation, value)) * 255
    assert near(applied(image, Augment(jitter=ANY_JITTER), hue=shift), want)


def test_the_order_matters_and_is_the_drawn_one(photo: Photo) -> None:
    image = photo(20, 30)
    x = image / 255
    gray = x @ np.array([0.2989, 0.587, 0.114])
    augment = Augment(jitter=Jitter(brightness=0.9, contrast=0.9))
    first = np.clip(x * 1.8, 0, 1)
    gray_first = first @ np.array([0.2989, 0.587, 0.114])
    brighter_first = first * 0.5 + gray_first.mean() * 0.5
    flatter_first = np.clip((x * 0.5 + gray.mean() * 0.5) * 1.8, 0, 1)
    drawn = {"brightness": 1.8, "contrast": 0.5}
    for order, want in (((0, 1, 2, 3), brighter_first), ((1, 0, 2, 3), flatter_first)):
        assert near(applied(image, augment, order=JITTER_ORDERS.index(order), **drawn), want * 255)
    assert np.abs(brighter_first - flatter_first).max() > 0.1


def test_normalising(photo: Photo) -> None:
    image = photo(20, 30)
    got = applied(image, Augment(mean=MEAN, std=STD))
    assert (got.shape, got.dtype) == ((3, 20, 30), np.float32)
    assert np.allclose(got.transpose(1, 2, 0), (image / 255 - MEAN) / STD, atol=1e-5)


@pytest.mark.parametrize("normalised", [False, True])
def test_erasing(photo: Photo, normalised: bool) -> None:
    image = np.maximum(photo(20, 40), 1)
    augment = Augment(erase=Erase(), **({"mean": MEAN, "std": STD} if normalised else {}))
    box = {"erase_top": 5 / 20, "erase_left": 10 / 40, "erase_height": 3 / 20, "erase_width": 7 / 40}
    got = augment_on_device(torch.from_numpy(np.stack([image, image])), draws(box, {}), augment).numpy()
    places = got.transpose(0, 2, 3, 1) if normalised else got
    assert not places[0, 5:8, 10:17].any()
    assert np.array_equal(places[0, 8:], places[1, 8:])
    assert (places[0] == 0).all(axis=2).sum() == 21
    assert not (places[1] == 0).all(axis=2).any()


SETTINGS = {
    "flips": Augment(size=(24, 32), flip=0.5, flip_vertical=0.5),
    "flips, normalise, erase": Augment(
        size=(24, 32), flip=0.5, flip_vertical=0.5, mean=MEAN, std=STD, erase=Erase(probability=0.7)
    ),
    "erase": Augment(size=(24, 32), erase=Erase(probability=0.7)),
    "jitter": Augment(size=(24, 32), flip=0.5, jitter=ANY_JITTER),
    "all": Augment(
        size=(24, 32),
        flip=0.5,
        flip_vertical=0.5,
        rotate=40.0,
        jitter=ANY_JITTER,
        mean=MEAN,
        std=STD,
        erase=Erase(probability=0.7),
    ),
    "gray": Augment(
        size=(24, 32),
        flip=0.5,
        rotate=10.0,
        jitter=Jitter(brightness=0.4, contrast=0.4),
        color="gray",
        crop=CenterCrop(),
    ),
    "gray, normalised": Augment(size=(24, 32), flip=0.5, color="gray", mean=(0.5,), std=(0.25,), erase=Erase()),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_host_and_device_do_the_same(photo: Photo, name: str) -> None:
    """One image at a time on the host, a batch on the device: 1e-5 apart, or one level where rounded to uint8."""
    augment = SETTINGS[name]
    images = [photo(50, 70, seed=seed) for seed in range(24)]
    if augment.color == "gray":
        images = [image[:, :, :1] for image in images]
    host = [
        ImageTransform(augment=augment)({"image": image}, np.random.default_rng(s)) for s, image in enumerate(images)
    ]
    half = ImageTransform(augment=augment, pixels_on="device")
    rows = [half({"image": image}, np.random.default_rng(s)) for s, image in enumerate(images)]
    batch, drawn = (torch.from_numpy(np.stack([row[key] for row in rows])) for key in ("image", PARAMS_ENTRY))
    got = augment_on_device(batch, drawn, augment, "cpu").numpy()
    want = np.stack([sample["image"] for sample in host])
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    assert float(np.abs(got.astype(np.float64) - want).max()) <= (1 if got.dtype == np.uint8 else 1e-5)
    assert batch.dtype == torch.uint8


def test_what_is_no_batch() -> None:
    images = torch.zeros(2, 4, 5, 3)
    for wrong, rows in ((images, 2), (images[0].to(torch.uint8), 2), (images.to(torch.uint8), 3)):
        with pytest.raises(DataError) as caught:
            augment_on_device(wrong, draws(*[{}] * rows), Augment())
        assert f"images of {wrong.dtype} {list(wrong.shape)} and draws of [{rows}, 12]" in str(caught.value)


@pytest.mark.gpu
def test_on_an_accelerator(photo: Photo) -> None:
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    half = ImageTransform(augment=SETTINGS["all"], pixels_on="device")
    rows = [half({"image": photo(50, 70, seed=seed)}, np.random.default_rng(seed)) for seed in range(24)]
    batch, drawn = (torch.from_numpy(np.stack([row[key] for row in rows])) for key in ("image", PARAMS_ENTRY))
    here = augment_on_device(batch, drawn, SETTINGS["all"])
    there = augment_on_device(batch, drawn, SETTINGS["all"], accelerator)
    assert there.device.type == accelerator.type
    assert torch.allclose(there.cpu(), here, atol=1e-4)
