"""What only an accelerator can show; rows of docs/unverified.md. Skipped where there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch

from unisono.observe.meters import PHASES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_follows_the_curve_of_the_cpu(tmp_path: Path, precision: str) -> None:
    here = tiny.complete(tmp_path / "here", steps=8, device="auto", precision=precision)
    there = tiny.complete(tmp_path / "cpu", steps=8, precision="fp32")
    assert here["losses"] == pytest.approx(there["losses"], rel=1e-3 if precision == "fp32" else 3e-2)


@pytest.mark.parametrize("compile_", ["off", "regional", "model"])
def test_resumes_bitwise(tmp_path: Path, compile_: str) -> None:
    changes = {"device": "auto", "precision": "bf16", "compile": compile_, "dropout": 0.1}
    whole = tiny.complete(tmp_path / "whole", steps=6, **changes)
    first = tiny.complete(tmp_path / "parts", steps=6, stop_after=3, **changes)
    second = tiny.complete(tmp_path / "parts", steps=6, **changes)
    assert first["losses"] + second["losses"] == whole["losses"]
    assert second["digest"] == whole["digest"]


def test_no_host_synchronisation_between_readings(tmp_path: Path) -> None:
    """torch's sync debug mode raises on any implicit wait for the device."""
    with tiny.trainer(tmp_path / "run", steps=12, device="auto", num_workers=0) as run:
        steps = iter(run)
        next(steps)
        backend = getattr(torch, run.device.type)
        backend.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                next(steps)
        finally:
            backend.set_sync_debug_mode("default")


def test_the_split_is_that_of_the_device_and_not_of_launches(tmp_path: Path) -> None:
    """A forward pass of long kernels, which the host launches in no time."""
    model, count = tiny.model(), 40

    def work(module: object, inputs: object) -> None:
        matrix = torch.ones(4096, 4096, device=next(model.parameters()).device)
        for _ in range(count):
            matrix = torch.mm(matrix, matrix)

    model.register_forward_pre_hook(work)
    tiny.complete(tmp_path / "run", steps=20, device="auto", network=model, num_workers=0)
    begin, end = (torch.Event(device=torch.accelerator.current_accelerator(), enable_timing=True) for _ in range(2))
    stream = torch.accelerator.current_stream()
    begin.record(stream)
    for _ in range(10):
        work(None, None)
    end.record(stream)
    torch.accelerator.synchronize()
    expected_s = begin.elapsed_time(end) / 1e3
    (read,) = (event for event in tiny.events(tmp_path / "run") if event["kind"] == "step" and event["step"] == 20)
    assert read["time/forward_frac"] * read["time/window_s"] > 0.8 * expected_s
    shares = [value for name, value in read.items() if name in SPLIT]
    assert sum(shares) == pytest.approx(1)


SPLIT = {f"time/{phase}_frac" for phase in (*PHASES, "other")}


@pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="one device here")
@pytest.mark.parametrize(
    "axes",
    [
        {},
        {"dp_shard": 2},
        {"tp": 2},
        {"tp": 2, "sequence_parallel": True},
        {"cp": 2},
        *({"pp": 2, "micro_batch": 2, "schedule": schedule} for schedule in ("1f1b", "interleaved", "zbv")),
        {"dp_shard": 2, "ep": 2, "sizes": {"num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "num_experts": 4}},
    ],
    ids=str,
)
def test_two_devices_equal_one(tmp_path: Path, axes: dict) -> None:
    sizes = {"sizes": {"num_layers": 4, "num_heads": 4, "num_kv_heads": 2, **axes.pop("sizes", {})}}
    script = str(Path(tiny.__file__).with_name("launch_tiny.py"))
    source = str(Path(__file__).parents[2] / "src")
    run = subprocess.run(
        [
            sys.executable,
            script,
            str(tmp_path / "two"),
            "2",
            json.dumps({"steps": 8, "device": "auto", **axes, **sizes}),
        ],
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    losses = [e["train/loss"] for e in tiny.events(tmp_path / "two") if e["kind"] == "step"]
    assert losses == pytest.approx(tiny.complete(tmp_path / "one", steps=8, **sizes)["losses"], rel=1e-3)
