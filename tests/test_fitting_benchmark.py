"""Speeds of published runs: which FLOPs a row counts, and what is fitted where rows say little."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.planner.fitting import fit, read_runs, recomputed_over_model_flops

from unisono.planner.devices import DEVICES
from unisono.planner.layout import Layout
from unisono.planner.model_presets import PRESETS
from unisono.planner.step_time import efficiencies, step_time
from unisono.planner.step_work import count_work


def test_flops_that_count_recompute_are_more_than_those_of_the_model() -> None:
    """Narayanan et al. 2021, table 1: 145.6 billion parameters at 148 TFLOP/s, a quarter of it the repeated forward pass."""
    runs = read_runs()[0]
    (run,) = [
        run for run in runs if run.row["model"] == "gpt-145.6b" and "arXiv:2104.04473 Table 1" in run.row["source"]
    ]
    flops = run.layout.model.flops_per_token(run.layout.seq_len) * run.tokens_per_s
    assert flops == pytest.approx(148e12 / recomputed_over_model_flops(run.layout))
    assert 1.31 < recomputed_over_model_flops(run.layout) < 4 / 3
    # a row of the same formula that does not say what it recomputed
    (other,) = [run for run in runs if "deepspeed-azure" in run.row["source"] and run.row["model"] == "gpt-175b"]
    assert other.row["recompute"] == ""
    assert other.layout.recompute == "full"


def test_efficiencies_are_pooled_by_architecture() -> None:
    """A device with few rows keeps to its architecture, and one without rows has that of it."""
    base = Layout(
        model=PRESETS["llama-3-8b"],
        device=DEVICES["h100"],
        precision="bf16",
        num_devices=8,
        global_batch=64,
        seq_len=4096,
    )
    layouts = [replace(base, micro_batch=size) for size in (1, 2, 4, 8)] * 4
    layouts += [replace(base, device=DEVICES["a100-80"], micro_batch=size) for size in (1, 2, 4, 8)] * 4
    real = np.where([layout.device.name == "h100" for layout in layouts], 0.5, 0.8)
    work = count_work(layouts)
    known = fit(layouts, step_time(work, real, fit(layouts, np.ones(len(layouts)))).total)
    devices = ("h100", "h200", "a100-40", "gb200")
    h100, h200, a100, gb200 = efficiencies([replace(base, device=DEVICES[name]) for name in devices], known)
    assert h100 < gb200 < a100
    assert h200 == pytest.approx(h100, rel=0.1)
