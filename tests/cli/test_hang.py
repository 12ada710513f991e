"""``unisono train`` with a rank that hangs: the launcher and ``unisono diagnose`` say which one, and where it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import Desk

HANGING = """
import ctypes
import os
import time

import numpy as np
import torch

from unisono import Components, RunConfig

num_read = 0


class Rows:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return np.full(4, index, np.float32), np.full(1, index % 3, np.float32)


def read_slowly(sample, rng):
    global num_read
    num_read += 1
    if num_read == 9 and os.environ.get("UNISONO_RANK") == "1":
        HANG
    return sample


def config():
    return RunConfig(
        components=Components(
            model=lambda run: torch.nn.Linear(4, 1),
            data=lambda run: (Rows(), Rows()),
            transform=read_slowly,
            objective="mean_squared_error",
        )
    )
"""


@pytest.mark.full
@pytest.mark.parametrize("hang", ["time.sleep(600)", "ctypes.PyDLL(None).sleep(600)"])
def test_a_rank_that_hangs_in_user_code(desk: Desk, tmp_path: Path, hang: str) -> None:
    config, run_dir = desk.folder / "hanging.py", tmp_path / "run"
    config.write_text(HANGING.replace("HANG", hang))
    settings = {
        **{"run.dir": run_dir, "launch.num_processes": 2, "launch.timeout_s": 8, "launch.max_restarts": 0},
        **{"plan.device": "cpu", "plan.global_batch": 4, "train.steps": 30, "loader.num_workers": 0},
    }
    done = desk.process("train", str(config), *(f"--set={name}={value}" for name, value in settings.items()))
    assert done.code == 1, done.err
    (paragraph,) = [line for line in done.err.splitlines() if line.startswith("launch: attempt 0: ")]
    assert "A hang, caused by rank 1 " in paragraph
    assert "rank 1 is in hanging.py:" in paragraph
    assert "read_slowly()" in paragraph
    (attempt,) = json.loads((run_dir / "launch.json").read_text())["attempts"]
    assert (attempt["cause"]["kind"], attempt["cause"]["ranks"]) == ("hang", [1])
    found = desk.here("diagnose", str(run_dir), "--json").json["findings"]
    assert [(each["ranks"], "read_slowly()" in each["evidence"][0]) for each in found if each["id"] == "HANG01"] == [
        ([1], True)
    ]
