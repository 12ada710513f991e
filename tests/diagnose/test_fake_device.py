"""Faults of accelerators in real runs, whose device is a fake one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
from fake_device import GIB, FakeDevice, in_place_of_the_cpu
from torch import nn

from unisono.diagnose import Finding, diagnose, read_run

STEPS = 100


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    with in_place_of_the_cpu(FakeDevice(launch_ms=0)) as device:
        yield device


def found(device: FakeDevice, folder: Path) -> dict[str, Finding]:
    """Of a run whose forward passes take 10 ms of the device."""
    network = tiny.model()

    def before(module: nn.Module, inputs: object) -> None:
        device.launch(10)

    network.register_forward_pre_hook(before)
    with tiny.trainer(folder, steps=STEPS, network=network) as run:
        run.fit()
    return {finding.id: finding for finding in diagnose(read_run(folder))}


@pytest.mark.parametrize(("copy_ms", "cost"), [(8, None), (30, 20 / 30)])
def test_copies_that_take_longer_than_steps(
    tmp_path: Path, device: FakeDevice, copy_ms: int, cost: float | None
) -> None:
    device.copy_ms = copy_ms
    findings = found(device, tmp_path)
    assert ("H2D01" in findings) == (cost is not None)
    if cost is not None:
        assert findings["H2D01"].severity == "critical"
        assert findings["H2D01"].cost_frac == pytest.approx(cost, abs=0.02)


@pytest.mark.parametrize(("reserved_gib", "severity"), [(3, None), (5, "critical")])
def test_memory_between_tensors(tmp_path: Path, device: FakeDevice, reserved_gib: int, severity: str | None) -> None:
    device.memory = replace(device.memory, peak_reserved_bytes=reserved_gib * GIB)
    findings = found(device, tmp_path)
    assert [findings[code].severity for code in findings if code == "MEM02"] == ([severity] if severity else [])
    if severity:
        assert "holds 5 GiB of the device and had at most 2 GiB in tensors" in findings["MEM02"].evidence[0]
