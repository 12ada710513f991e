"""The range test on curves with a known shape."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from unisono.tune.lr_range import analyze_range, range_settings, range_verdict, write_range_page


def rates(count: int = 100, low: float = 1e-6, high: float = 1.0) -> list[float]:
    return [low * (high / low) ** (index / (count - 1)) for index in range(count)]


def curve(rate: float, *, fall: float = 1e-3, rise: float = 0.3) -> float:
    """Falls by 2 around the rate ``fall``, and rises without bound from ``rise`` on."""
    return 3.0 - 1.0 * (1 + math.tanh(math.log(rate / fall))) + max(0.0, 10 * (rate / rise - 1))


def test_the_steepest_fall_is_found_where_it_is() -> None:
    found = analyze_range(rates(), list(map(curve, rates())))
    assert found.suggested_lr == pytest.approx(1e-3, rel=3)  # the running mean lags by some ten steps, of 1.15 each
    assert found.suggested_lr is not None
    assert found.suggested_lr >= 1e-3
    assert found.min_loss_lr < 0.4
    assert found.diverged_lr == 1.0
    assert "Try a learning rate of" in range_verdict(found)


def test_a_loss_that_does_not_rise() -> None:
    found = analyze_range(rates(), [curve(rate, rise=1e9) for rate in rates()])
    assert found.diverged_lr is None
    assert found.worse_lr is None
    assert range_verdict(found).endswith("up to 1 the running mean of the loss did not rise by twice its fall.")


def test_single_losses_that_rose_before_the_running_mean() -> None:
    """It lags: what is said of it is not said of the losses."""
    losses = [2.9 - 0.01 * index for index in range(97)] + [3.4, 2.0, 3.8]
    found = analyze_range(rates(), losses)
    assert (found.diverged_lr, found.worse_lr) == (None, rates()[99])
    assert range_verdict(found).endswith(
        "did not rise by twice its fall; from 1 on each single loss was above the first one."
    )


def test_a_loss_that_only_rises() -> None:
    found = analyze_range(rates(40), [1.0 + 0.1 * index for index in range(40)])
    assert found.suggested_lr is None
    assert "never fell" in range_verdict(found)


def test_a_loss_that_is_no_number(tmp_path: Path) -> None:
    losses = [*map(curve, rates()[:80]), math.nan]
    found = analyze_range(rates()[:81], losses)
    assert found.suggested_lr is not None
    assert found.diverged_lr == rates()[80]
    write_range_page(tmp_path / "report.html", found)


def test_the_rate_goes_from_end_to_end() -> None:
    settings = range_settings(1e-6, 1.0, 50, {"schedule.power": 2.0})
    assert settings["optim.lr"] * settings["schedule.step_factor"] ** 49 == pytest.approx(1.0)
    assert settings["schedule.power"] == 2.0
