"""The dynamic loss scale against MindSpore's published vector and MXNet's rule, improved where it lags."""

from __future__ import annotations

import torch

from unisono.parallel.precision import LossScale


def drive(scale: LossScale, clean: str) -> list[float]:
    seen = []
    for flag in clean:
        scale.update(torch.tensor(flag == "F"))
        seen.append(float(scale.scale))
    return seen


def make(initial: float, window: int, **rule: float) -> LossScale:
    zero = torch.zeros((), dtype=torch.int64)
    return LossScale(scale=torch.tensor(initial), clean_steps=zero, dynamic=True, window=window, **rule)


def test_mindspore_vector() -> None:
    assert drive(make(4.0, 2), "TTTFFFFTT") == [4, 8, 8, 4, 2, 1, 1, 1, 2]


def test_an_overflow_takes_effect_at_once() -> None:
    scale = make(65536.0, 2000)
    used = [float(scale.scale), *drive(scale, "FT")]
    assert used == [65536, 32768, 32768]  # MXNet 1.9.1 uses 65536 twice


def test_cap_and_floor() -> None:
    assert drive(make(2.0**24, 1), "TT") == [2.0**24, 2.0**24]
    assert drive(make(1.0, 5), "FF") == [1.0, 1.0]


def test_off_stays_at_one() -> None:
    scale = LossScale.create(torch.device("cpu"), dynamic=False)
    assert drive(scale, "FTF") == [1, 1, 1]
