"""Slopes and verdicts of the coordinate check, and models at other widths."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from unisono.errors import ConfigError
from unisono.tune.coordinates import CoordinateCheck, write_coordinates
from unisono.tune.width import default_widths, settings_of_width

WIDTHS = (32, 64, 128, 256)


def check(base_dim: int = 32, **exponents: float) -> CoordinateCheck:
    """Changes that are powers of the width."""
    changes = {name: [0.1 * width**exponent for width in WIDTHS] for name, exponent in exponents.items()}
    return CoordinateCheck(base_dim=base_dim, widths=WIDTHS, steps=8, changes=changes)


def test_slopes_are_the_exponents() -> None:
    found = check(a=0.0, b=-0.3, logits=0.1)
    assert found.slopes == pytest.approx({"a": 0.0, "b": -0.3, "logits": 0.1}, abs=1e-9)
    assert found.is_flat
    assert (
        found.verdict()
        == "Flat: with muP of base width 32 the changes of 3 activations go as width^-0.30 to width^0.10."
    )


@pytest.mark.parametrize(
    ("exponents", "words"),
    [
        ({"a": 1.0, "b": 0.0}, "1 of 2 activations grow with the width, a as width^1.00"),
        ({"a": -1.0, "b": 0.0}, "1 of 2 activations shrink as the model gets wider, a as width^-1.00"),
    ],
)
def test_a_slope_that_is_not_flat(exponents: dict[str, float], words: str) -> None:
    found = check(0, **exponents)
    assert not found.is_flat
    assert words in found.verdict()
    assert "no muP" in found.verdict()


@pytest.mark.parametrize(
    ("slope", "of_three", "of_four"), [(0.4, True, False), (0.6, False, False), (-1.0, True, False)]
)
def test_three_widths_have_wider_limits(slope: float, of_three: bool, of_four: bool) -> None:
    for widths, is_flat in ((WIDTHS[:3], of_three), (WIDTHS, of_four)):
        changes = {"logits": [width**slope for width in widths]}
        assert CoordinateCheck(base_dim=32, widths=widths, steps=8, changes=changes).is_flat == is_flat


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0])
def test_a_change_without_a_logarithm_is_no_flat_one(tmp_path: Path, value: float) -> None:
    found = CoordinateCheck(base_dim=32, widths=WIDTHS, steps=8, changes={"a": [0.1] * 4, "b": [0.1, 0.1, 0.1, value]})
    assert found.growing == ["b"]
    write_coordinates(tmp_path, found)
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["is_flat"], report["slopes"]["b"]) == (False, None)


SETTINGS = {"model.dim": 128, "model.num_heads": 4, "model.num_kv_heads": 2, "model.ffn_dim": 0}


def test_a_model_at_another_width() -> None:
    assert list(settings_of_width({**SETTINGS, "model.ffn_dim": 384}, 256).values()) == [256, 8, 4, 768]
    assert list(settings_of_width(SETTINGS, 64).values()) == [64, 2, 1, 0]
    assert default_widths(SETTINGS) == [64, 128, 256, 512]


def test_a_width_with_a_part_of_a_head_is_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        settings_of_width(SETTINGS, 96)
    assert "a multiple of 64, such as 128" in str(refused.value)
