"""The dynamic loss scale against MindSpore's published vector and MXNet's rule, improved where it lags."""

from __future__ import annotations

import torch

from unisono.train.loss_scaler import LossScaler


def drive(scale: LossScaler, clean: str) -> list[float]:
    seen = []
    for flag in clean:
        scale.update(torch.tensor(flag == "F"))
        seen.append(float(scale.value))
    return seen


def make(init_scale: float, growth_interval: int, **rule: float) -> LossScaler:
    return LossScaler(torch.device("cpu"), init_scale=init_scale, growth_interval=growth_interval, **rule)


def test_mindspore_vector() -> None:
    assert drive(make(4.0, 2), "TTTFFFFTT") == [4, 8, 8, 4, 2, 1, 1, 1, 2]


def test_an_overflow_takes_effect_at_once() -> None:
    scale = make(65536.0, 2000)
    used = [float(scale.value), *drive(scale, "FT")]
    assert used == [65536, 32768, 32768]  # MXNet 1.9.1 uses 65536 twice


def test_cap_and_floor() -> None:
    assert drive(make(2.0**24, 1), "TT") == [2.0**24, 2.0**24]
    assert drive(make(1.0, 5), "FF") == [1.0, 1.0]


def test_off_stays_at_one() -> None:
    scale = LossScaler(torch.device("cpu"), init_scale=1.0, dynamic=False)
    assert drive(scale, "FTF") == [1, 1, 1]


def test_the_state_continues() -> None:
    scale = make(8.0, 3)
    drive(scale, "TT")
    again = make(1.0, 3)
    again.load_state_dict({name: tensor.clone() for name, tensor in scale.state_dict().items()})
    assert drive(again, "TF") == drive(scale, "TF") == [16, 8]
    assert again.scale(torch.tensor(0.5)) == 4
