"""The demo, as it is: held-out bits per byte beat a byte-bigram model counted on the same split."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from unisono.data import DataOptions, TokenWindows, bigram_bits_per_byte, prepare_corpus


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_demo_beats_a_bigram_model(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    run = subprocess.run(
        [sys.executable, "-m", "unisono", "train", "--json", "--set", f"run.dir={tmp_path / 'demo'}"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    outcome = json.loads(run.stdout.splitlines()[-1])
    evaluated = subprocess.run(
        [sys.executable, "-m", "unisono", "eval", str(tmp_path / "demo"), "--json"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    prepared = prepare_corpus(DataOptions())
    cut = {"seq_len": DataOptions().seq_len, "boundaries": DataOptions().boundaries}
    bigram = bigram_bits_per_byte(
        TokenWindows(prepared.train, **cut), TokenWindows(prepared.eval, **cut, target_bytes=True)
    )
    assert outcome["step"] == outcome["steps_total"]
    assert json.loads(evaluated.stdout)["evaluation"]["bits_per_byte"] < bigram
    assert bigram < 4, "the baseline itself must be sensible"
