"""Mixup and CutMix: pixels and labels are mixed by the same share, and nothing of the pair is lost."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from unisono.data.dataset import Batch
from unisono.data.image import CutMix, Mixup
from unisono.errors import ConfigError, DataError

CLASSES = 5


def pair(dtype: type, low: int = 0, high: int = 200) -> tuple[Batch, Batch]:
    shape = (16, 20, 3) if dtype is np.uint8 else (3, 16, 20)
    return (
        {"image": np.full(shape, low, dtype), "targets": np.array(1), "id": np.array(7)},
        {"image": np.full(shape, high, dtype), "targets": np.array(4), "id": np.array(8)},
    )


def share_of(label: NDArray[np.float32], mine: int) -> float:
    assert label.shape == (CLASSES,)
    assert label.dtype == np.float32
    assert label.sum() == pytest.approx(1, abs=1e-6)
    return float(label[mine])


@pytest.mark.parametrize("mix", [Mixup(classes=CLASSES, alpha=1.0), CutMix(classes=CLASSES)])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_pixels_and_labels_by_one_share(mix: Mixup | CutMix, dtype: type) -> None:
    shares: list[float] = []
    for seed in range(200):
        one, two = pair(dtype)
        first, second = mix(one, two, np.random.default_rng(seed))
        share = share_of(first["targets"], 1)
        assert share_of(second["targets"], 4) == pytest.approx(share, abs=1e-6)
        assert first["image"].dtype == dtype
        assert first["image"].mean() == pytest.approx(200 * (1 - share), abs=0.51)
        assert second["image"].mean() == pytest.approx(200 * share, abs=0.51)
        assert (first["id"], second["id"]) == (7, 8)
        assert (one["image"] == 0).all()
        assert (two["image"] == 200).all()
        if isinstance(mix, CutMix):
            assert set(np.unique(first["image"]).tolist()) <= {0, 200}
        shares.append(share)
    assert min(shares) < 0.15
    assert max(shares) > 0.9
    if isinstance(mix, Mixup):  # Beta(1, 1) is uniform; four standard errors of 200 draws
        assert np.mean(shares) == pytest.approx(0.5, abs=4 / 12**0.5 / 200**0.5)


def test_cutmix_moves_one_box() -> None:
    first, second = CutMix(classes=CLASSES)(*pair(np.uint8), np.random.default_rng(1))
    moved = first["image"][:, :, 0] == 200
    rows, columns = np.flatnonzero(moved.any(axis=1)), np.flatnonzero(moved.any(axis=0))
    assert moved[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].all()
    assert moved.sum() == rows.size * columns.size > 0
    assert np.array_equal(second["image"][:, :, 0] == 0, moved)


def test_labels_mixed_before_are_mixed_again() -> None:
    one, two = pair(np.float32)
    one["targets"] = np.array([0.5, 0.5, 0, 0, 0], np.float32)
    first, _ = Mixup(classes=CLASSES, alpha=1.0)(one, two, np.random.default_rng(0))
    assert first["targets"][0] == first["targets"][1] > 0
    assert first["targets"].sum() == pytest.approx(1, abs=1e-6)


def test_what_cannot_be_mixed() -> None:
    mix = Mixup(classes=CLASSES)
    rng = np.random.default_rng(0)
    one, two = pair(np.uint8)
    with pytest.raises(DataError) as caught:
        mix(one, {**two, "image": two["image"][:5]}, rng)
    assert "a pair of images of uint8[16, 20, 3] and uint8[5, 20, 3]" in str(caught.value)
    for label, shown in (
        (np.array(5), "a label of 5 among 5"),
        (np.zeros(4, np.float32), "a label of float32[4] among 5"),
    ):
        with pytest.raises(DataError) as caught:
            mix(one, {**two, "targets": label}, rng)
        assert shown in str(caught.value)
    for wrong in ({"classes": 0}, {"classes": 5, "alpha": 0.0}):
        for kind in (Mixup, CutMix):
            with pytest.raises(ConfigError, match="at least 1 class, and alpha above 0"):
                kind(**wrong)  # type: ignore[arg-type]
