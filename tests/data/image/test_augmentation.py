"""What is drawn: torchvision's rules, the same values whatever else is switched on, and settings that cannot be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.data.image import Augment, CenterCrop, Erase, Jitter, RandomResizedCrop
from unisono.data.image.augmentation import JITTER_ORDERS, PARAM_NAMES, draw_params
from unisono.errors import ConfigError


def drawn(augment: Augment, height: int, width: int, seed: int) -> tuple[tuple[int, int, int, int], dict[str, float]]:
    box, values = draw_params(augment, height, width, np.random.default_rng(seed))
    return box, dict(zip(PARAM_NAMES, values.tolist(), strict=True))


EVERYTHING = {
    "flip": 0.5,
    "flip_vertical": 0.5,
    "rotate": 30.0,
    "jitter": Jitter(brightness=0.4, contrast=0.3, saturation=2.0, hue=0.1),
    "erase": Erase(probability=1.0),
}


@settings(max_examples=200, deadline=None)
@given(height=st.integers(1, 3000), width=st.integers(1, 3000), seed=st.integers(0, 2**32), center=st.booleans())
def test_boxes_are_inside(height: int, width: int, seed: int, center: bool) -> None:
    crop = CenterCrop() if center else RandomResizedCrop()
    (top, left, tall, wide), values = drawn(Augment(crop=crop, **EVERYTHING), height, width, seed)  # type: ignore[arg-type]
    assert 0 <= top < top + tall <= height
    assert 0 <= left < left + wide <= width
    for low, size, whole in (("erase_top", "erase_height", 224), ("erase_left", "erase_width", 224)):
        assert 0 <= values[low] <= values[low] + values[size] <= 1 + 1e-6
        assert values[size] * whole == pytest.approx(round(values[size] * whole), abs=1e-4)


def test_random_resized_crop_has_torchvision_s_statistics() -> None:
    """Area uniform in [.08, 1] and log ratio uniform, as long as boxes fit; centre of the free play uniform."""
    augment = Augment(crop=RandomResizedCrop(scale=(0.08, 0.5)))
    boxes = np.array([drawn(augment, 1000, 1000, seed)[0] for seed in range(4000)], float)
    area = boxes[:, 2] * boxes[:, 3] / 1e6
    ratio = np.log(boxes[:, 3] / boxes[:, 2])
    span = np.log(4 / 3)
    # Means and deviations of uniform distributions; four standard errors of 4000 draws
    for values, low, high in ((area, 0.08, 0.5), (ratio, -span, span)):
        wide = high - low
        assert values.mean() == pytest.approx((low + high) / 2, abs=4 * wide / 12**0.5 / 4000**0.5)
        assert values.std() == pytest.approx(wide / 12**0.5, rel=0.05)
        assert low - 0.01 <= values.min()
        assert values.max() <= high + 0.01
    places = boxes[:, :2] / (1000 - boxes[:, 2:])
    for place in places.T:
        assert place.mean() == pytest.approx(0.5, abs=4 / 12**0.5 / 4000**0.5)
        assert place.std() == pytest.approx(1 / 12**0.5, rel=0.05)
    assert np.abs(np.corrcoef([area, ratio, *places.T]) - np.eye(4)).max() < 4 / 4000**0.5


def test_what_never_fits_is_cut_from_the_middle() -> None:
    augment = Augment(crop=RandomResizedCrop(scale=(0.9, 1.0)))
    assert drawn(augment, 100, 1000, 0)[0] == (0, (1000 - 133) // 2, 100, 133)
    assert drawn(augment, 1000, 100, 0)[0] == ((1000 - 133) // 2, 0, 133, 100)
    assert drawn(augment, 1, 1, 0)[0] == (0, 0, 1, 1)


@pytest.mark.parametrize(
    ("image", "size", "share", "box"),
    [
        ((256, 341), (224, 224), 0.875, (16, 58, 224, 224)),
        ((375, 500), (224, 224), 1.0, (0, 62, 375, 375)),
        ((400, 400), (100, 200), 1.0, (100, 0, 200, 400)),
        ((10, 10), (224, 224), 0.875, (0, 0, 9, 9)),
    ],
)
def test_center_crop(
    image: tuple[int, int], size: tuple[int, int], share: float, box: tuple[int, int, int, int]
) -> None:
    assert drawn(Augment(size=size, crop=CenterCrop(share=share)), *image, 0)[0] == box


def test_one_setting_does_not_change_what_another_draws() -> None:
    for seed in range(20):
        all_box, all_values = drawn(Augment(**EVERYTHING), 300, 400, seed)  # type: ignore[arg-type]
        for name, setting in EVERYTHING.items():
            one_box, one_values = drawn(Augment(**{name: setting}), 300, 400, seed)  # type: ignore[arg-type]
            assert one_box == all_box
            names = {"jitter": PARAM_NAMES[2:7], "erase": PARAM_NAMES[8:], "rotate": ("angle",)}.get(name, (name,))
            assert [one_values[n] for n in names] == [all_values[n] for n in names]


def test_the_generator_moves_on_by_the_same_for_all() -> None:
    after = set()
    for augment in (Augment(), Augment(crop=CenterCrop()), Augment(**EVERYTHING)):  # type: ignore[arg-type]
        rng = np.random.default_rng(3)
        draw_params(augment, 300, 400, rng)
        after.add(rng.random())
    assert len(after) == 1


def test_ranges_of_what_is_drawn() -> None:
    rows = [drawn(Augment(**EVERYTHING), 300, 400, seed)[1] for seed in range(1000)]  # type: ignore[arg-type]
    ranges = {
        "brightness": (0.6, 1.4),
        "contrast": (0.7, 1.3),
        "saturation": (0.0, 3.0),
        "hue": (-0.1, 0.1),
        "angle": (-30, 30),
    }
    for name, (low, high) in ranges.items():
        values = np.array([row[name] for row in rows])
        margin = 0.02 * (high - low)
        assert low - 1e-6 <= values.min() < low + margin
        assert high - margin < values.max() <= high + 1e-6
    assert {row["order"] for row in rows} == set(map(float, range(len(JITTER_ORDERS))))
    for name in ("flip", "flip_vertical"):
        assert 440 < sum(row[name] for row in rows) < 560


def test_erase_is_drawn_as_often_and_as_large_as_asked() -> None:
    augment = Augment(erase=Erase(probability=0.3, scale=(0.1, 0.2), ratio=(0.5, 2.0)))
    rows = [drawn(augment, 300, 400, seed)[1] for seed in range(2000)]
    areas = np.array([row["erase_height"] * row["erase_width"] for row in rows])
    assert (areas > 0).mean() == pytest.approx(0.3, abs=0.04)
    hit = areas[areas > 0]
    corners = np.array([(row["erase_top"], row["erase_left"]) for row in rows])[areas > 0]
    assert abs(np.corrcoef(corners.T)[0, 1]) < 4 / len(corners) ** 0.5
    assert 0.095 < hit.min() < hit.max() < 0.205
    assert hit.mean() == pytest.approx(0.15, abs=0.005)


@pytest.mark.parametrize(
    ("setting", "shown"),
    [
        ({"size": (0, 5)}, "size = (0, 5)\n  rule: (height, width), each at least 1 pixel"),
        ({"flip": 1.5}, "flip = 1.5\n  rule: 0 <= p <= 1"),
        ({"rotate": -1.0}, "rotate = -1.0\n  rule: 0 <= degrees <= 180"),
        ({"crop": RandomResizedCrop(scale=(0.0, 1.0))}, "crop.scale = (0.0, 1.0)\n  rule: 0 < low <= high <= 1"),
        ({"crop": RandomResizedCrop(ratio=(2.0, 1.0))}, "crop.ratio = (2.0, 1.0)\n  rule: 0 < low <= high <= inf"),
        ({"crop": CenterCrop(share=0.0)}, "crop.share = 0.0\n  rule: 0 < share <= 1"),
        ({"jitter": Jitter(hue=0.6)}, "jitter.hue = 0.6\n  rule: 0 <= x <= 0.5"),
        ({"jitter": Jitter(brightness=-0.1)}, "jitter.brightness = -0.1"),
        ({"erase": Erase(probability=2.0)}, "erase.probability = 2.0"),
        ({"erase": Erase(scale=(0.1, 1.1))}, "erase.scale = (0.1, 1.1)"),
        ({"mean": (0.5, 0.5, 0.5)}, "rule: both with 3 values, or neither"),
        ({"mean": (0.5,), "std": (0.5,)}, "rule: both with 3 values, or neither"),
        ({"mean": (0.5,) * 3, "std": (0.5, 0.0, 0.5)}, "std = (0.5, 0.0, 0.5)\n  rule: above 0"),
        ({"color": "gray", "jitter": Jitter(hue=0.1)}, "a grey image has no saturation and no hue to change"),
    ],
)
def test_settings_that_cannot_be(setting: dict[str, Any], shown: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Augment(**setting)
    assert shown in str(caught.value)


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Augment(flip=2.0, rotate=200.0)
    assert str(caught.value).startswith("2 problems\n1. flip = 2.0")
