from __future__ import annotations

import json
import stat
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from unisono.measure import ceiling
from unisono.measure.calibration import MatmulRate
from unisono.measure.ceiling import PeakFlops, datasheet_peak, device_name, measured_ceiling, peak_flops, time_matmul

CPU = torch.device("cpu")


def rate(tflops: float, spread_frac: float = 0.0) -> MatmulRate:
    return MatmulRate(tflops=tflops, size=512, repeats=9, spread_frac=spread_frac)


@pytest.mark.parametrize(
    ("name", "arithmetic", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100-PCIE-40GB", "tf32", 156),
        ("NVIDIA A100 80GB PCIe", "fp32", 19.5),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 NVL", "bf16", 835.5),
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA H200 NVL", "fp16", 835.5),
        ("NVIDIA GH200 480GB", "bf16", 989.4),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA L40S", "bf16", 362.05),
        ("NVIDIA A10", "bf16", 125),
        ("NVIDIA A10G", "bf16", 70),
        ("NVIDIA A30", "bf16", 165),
        ("NVIDIA A40", "bf16", 149.7),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA GeForce RTX 3090", "bf16", 71),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla T4", "fp16", 65),
        ("AMD Instinct MI300X", "bf16", 1307.4),
        ("AMD Instinct MI250X/MI250", "bf16", 191.5),
    ],
)
def test_known_devices(name: str, arithmetic: str, tflops: float) -> None:
    assert datasheet_peak(name, arithmetic) == tflops * 1e12


@pytest.mark.parametrize(
    ("name", "arithmetic"),
    [
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "bf16"),  # a slice has a fraction of the peak
        ("NVIDIA H100 80GB HBM3", "fp8"),
        ("Tesla V100-SXM2-16GB", "bf16"),  # has no such unit
        ("Tesla T4", "tf32"),
        ("NVIDIA GB200", "bf16"),
        ("NVIDIA L40", "bf16"),
        ("NVIDIA A100X", "bf16"),
        ("NVIDIA H100 64GB HBM2", "bf16"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16"),
        ("NVIDIA GeForce RTX 3090 Ti", "bf16"),
        ("Ascend910B2", "bf16"),
        ("Intel(R) Xeon(R) Platinum 8481C", "bf16"),
        ("some new accelerator", "bf16"),
        ("", "bf16"),
    ],
)
def test_unknown_devices_are_not_taken_for_known_ones(name: str, arithmetic: str) -> None:
    assert datasheet_peak(name, arithmetic) is None


def test_known_device_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceiling, "device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(ceiling, "time_matmul", lambda *args: pytest.fail("measured"))
    assert peak_flops(CPU, torch.bfloat16) == PeakFlops(
        value=312e12, kind="datasheet", name="NVIDIA A100-SXM4-80GB, bf16"
    )
    assert peak_flops(CPU, torch.float32).value == 19.5e12
    tf32 = peak_flops(CPU, torch.float32, tf32=True)
    assert str(tf32) == "156 TFLOP/s (NVIDIA A100-SXM4-80GB, tf32; datasheet, dense)"


def test_unknown_device_is_measured_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def measure(*args: Any) -> MatmulRate:
        calls.append(args)
        return rate(0.5, 0.1)

    monkeypatch.setattr(ceiling, "time_matmul", measure)
    cache = tmp_path / "deep" / "calibration.json"
    threads = torch.get_num_threads()
    first = peak_flops(CPU, torch.float32, cache=cache)
    assert first == PeakFlops(value=0.5e12, kind="measured", name=f"{device_name(CPU)}, float32, {threads} threads")
    assert peak_flops(CPU, torch.float32, cache=cache) == first
    assert len(calls) == 1
    assert stat.S_IMODE(cache.stat().st_mode) == 0o600
    peak_flops(CPU, torch.bfloat16, cache=cache)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    peak_flops(CPU, torch.float32, cache=cache)
    monkeypatch.setattr(torch, "__version__", "9.9")
    peak_flops(CPU, torch.float32, cache=cache)
    assert len(calls) == 4  # dtype, threads and torch version each make another entry
    assert len(json.loads(cache.read_text())["matmul"]) == 4
    assert sorted(path.name for path in cache.parent.iterdir()) == [".calibration.json.lock", "calibration.json"]


@pytest.mark.parametrize("content", ["not json", "[]", '{"x": 3}', "null"])
def test_damaged_cache_costs_a_measurement_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    monkeypatch.setattr(ceiling, "time_matmul", lambda *args: rate(0.25))
    cache = tmp_path / "calibration.json"
    cache.write_text(content)
    assert measured_ceiling(CPU, torch.float32, cache=cache).value == 0.25e12
    stored = json.loads(cache.read_text())
    assert asdict(rate(0.25)) in stored["matmul"].values()
    cache.write_text(json.dumps(stored | {"matmul": {key: {"tflops": "fast"} for key in stored["matmul"]}}))
    assert measured_ceiling(CPU, torch.float32, cache=cache).value == 0.25e12


def test_figure_of_a_busy_machine_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceiling, "time_matmul", lambda *args: rate(0.1, 0.3))
    assert measured_ceiling(CPU, torch.float32, cache=tmp_path / "c.json").value == 0.1e12
    assert list(tmp_path.iterdir()) == []


def test_unwritable_cache_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceiling, "time_matmul", lambda *args: rate(0.1))
    (tmp_path / "file").write_text("")
    assert measured_ceiling(CPU, torch.float32, cache=tmp_path / "file" / "c.json").value == 0.1e12


def test_time_matmul_counts_two_operations_per_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that gives every product a tenth of a second, the rate is arithmetic."""
    ticks = iter(range(10**6))
    monkeypatch.setattr(ceiling.time, "perf_counter", lambda: next(ticks) * 0.1)
    result = time_matmul(CPU, torch.float32, budget_s=0.7)
    assert asdict(result) == {
        "tflops": pytest.approx(2 * 256**3 / 0.1 / 1e12),
        "size": 256,
        "repeats": 6,
        "spread_frac": pytest.approx(0),
    }


def test_real_product() -> None:
    result = time_matmul(CPU, torch.float32, budget_s=0.05)
    assert result.tflops > 1e-4
    assert result.repeats >= 5


@pytest.mark.gpu
def test_accelerator_reaches_a_plausible_share_of_its_datasheet() -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    known = datasheet_peak(device_name(device), "bf16")
    measured = time_matmul(device, torch.bfloat16).tflops * 1e12
    assert known is None or 0.3 * known < measured < 1.05 * known


def test_a_file_of_an_earlier_release_is_read_and_becomes_one_of_this(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, key = ceiling.matmul_key(CPU, torch.float32)
    cache = tmp_path / "calibration.json"
    cache.write_text(json.dumps({key: {"tflops": 0.5, "size": 512, "repeats": 9, "spread_frac": 0.1}}))
    monkeypatch.setattr(ceiling, "time_matmul", lambda *args: rate(0.25))
    assert measured_ceiling(CPU, torch.float32, cache=cache).value == 0.5e12
    measured_ceiling(CPU, torch.bfloat16, cache=cache)
    stored = json.loads(cache.read_text())
    assert sorted(stored) == ["devices", "links", "matmul", "storage", "version"]
    assert sorted(entry["tflops"] for entry in stored["matmul"].values()) == [0.25, 0.5]
