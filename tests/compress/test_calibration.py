"""Scales of static activations: what share of a layer's inputs they span, counted exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from unisono.compress import quantize
from unisono.compress.quantize import Calibration


class Device:
    """All that is read of a run where its samples are given."""

    device = torch.device("cpu")


def test_more_zeros_than_float32_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 21 · 2^20 inputs one 21st is 1, with one of 100 among them, and the others are 0: 95.2 %."""
    few = torch.ones(2**20)
    few[0] = 100.0

    def watch(_run: Any, names: list[str], _samples: int, see: Any) -> None:
        for name in names:
            see(name, torch.zeros(20 * 2**20))
            see(name, few)

    monkeypatch.setattr(quantize, "_watch", watch)
    run: Any = Device()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several would each count a part
    try:
        scales = {
            percentile: quantize._input_scales(run, ["fc"], Calibration(samples=1, percentile=percentile))["fc"]  # pyright: ignore[reportPrivateUsage]
            for percentile in (94.7, 96.0, 100.0)
        }
    finally:
        torch.set_num_threads(threads)
    for percentile, spanned in ((94.7, 0.0), (96.0, 1.0), (100.0, 100.0)):
        assert float(scales[percentile]) * 127.5 == pytest.approx(spanned, abs=1.01 * 100 / 4096)
