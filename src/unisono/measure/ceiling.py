"""Peak matrix multiplication rate of a device: from the datasheet of a known device, else measured.

An unknown device is never mapped to a known one: its peak is measured once per (device, threads, dtype, torch version) and
stored in the calibration file (``measure.calibration``). Attention kernels, fp8 and several devices at once are not measured.
"""

from __future__ import annotations

import contextlib
import platform
import re
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from unisono.measure.calibration import MatmulRate, add_to_calibration, read_calibration

if TYPE_CHECKING:
    import torch

_T: Final = 1e12
QUIET_SPREAD_FRAC: Final = 0.25  # the quartiles of a quiet machine are this much of the median apart

# (pattern of the device name, dense peaks in TFLOP/s by arithmetic). Matrix units, no sparsity, fp32 accumulation; "tf32" is
# the rate of fp32 products with TF32 allowed, "fp32" without. The first match wins. Sources: the vendors' datasheets and
# architecture papers; their figures with sparsity are halved.
_DATASHEET: Final[tuple[tuple[str, dict[str, float]], ...]] = (
    # NVIDIA Blackwell: HGX B200 table (8 GPUs: 36 PFLOP/s fp16 and 18 TF32, both with sparsity)
    (r"\bB200\b", {"bf16": 2250, "fp16": 2250, "tf32": 1125}),
    # NVIDIA H200 datasheet, SXM and NVL columns; H100 datasheet, SXM, PCIe and NVL columns; GH200 datasheet
    (r"\bH200 NVL\b", {"bf16": 835.5, "fp16": 835.5, "tf32": 417.5, "fp32": 60}),
    (r"\bH200\b|\bGH200\b", {"bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp32": 67}),
    (r"\bH100\b.*\bNVL\b", {"bf16": 835.5, "fp16": 835.5, "tf32": 417.5, "fp32": 60}),
    (r"\bH100\b.*\bPCIe\b", {"bf16": 756, "fp16": 756, "tf32": 378, "fp32": 51}),
    (r"\bH100\b.*\bHBM3\b|\bH100 SXM", {"bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp32": 67}),
    # NVIDIA A100, A30, A40, A10, A10G datasheets
    (r"\bA100\b", {"bf16": 312, "fp16": 312, "tf32": 156, "fp32": 19.5}),
    (r"\bA40\b", {"bf16": 149.7, "fp16": 149.7, "tf32": 74.8, "fp32": 37.4}),
    (r"\bA30\b", {"bf16": 165, "fp16": 165, "tf32": 82, "fp32": 10.3}),
    (r"\bA10\b", {"bf16": 125, "fp16": 125, "tf32": 62.5, "fp32": 31.2}),
    (r"\bA10G\b", {"bf16": 70, "fp16": 70, "tf32": 35, "fp32": 35}),
    # NVIDIA L40S and L4 datasheets
    (r"\bL40S\b", {"bf16": 362.05, "fp16": 362.05, "tf32": 183, "fp32": 91.6}),
    (r"\bL4\b", {"bf16": 121, "fp16": 121, "tf32": 60, "fp32": 30.3}),
    # NVIDIA Ada and GA102 white papers, tables with fp32 accumulation
    (r"\bRTX 4090\b(?! D| Laptop)", {"bf16": 165.2, "fp16": 165.2, "tf32": 82.6, "fp32": 82.6}),
    (r"\bRTX 3090\b(?! Ti| Laptop)", {"bf16": 71, "fp16": 71, "tf32": 35.6, "fp32": 35.6}),
    # NVIDIA V100 and T4 datasheets: no bf16, no TF32
    (r"\bV100-SXM2\b", {"fp16": 125, "fp32": 15.7}),
    (r"\bV100-PCIE\b", {"fp16": 112, "fp32": 14}),
    (r"\bT4\b", {"fp16": 65, "fp32": 8.1}),
    # AMD CDNA 3 and CDNA 2 datasheets; an MI250X shows up as two devices, each half of it
    (r"\bMI300X\b|\bMI325X\b", {"bf16": 1307.4, "fp16": 1307.4, "tf32": 653.7, "fp32": 163.4}),
    (r"\bMI250X\b", {"bf16": 191.5, "fp16": 191.5, "fp32": 47.9}),
)

_ARITHMETIC: Final = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakFlops:
    """Peak rate of a device.

    Attributes:
        value: The rate in FLOP/s.
        kind: Its origin.
        name: Device and arithmetic.
        measured_value: Beside a data sheet, the rate in FLOP/s that a large product was measured to have; 0 where it was not.
    """

    value: float
    kind: Literal["datasheet", "measured"]
    name: str
    measured_value: float = 0.0

    def __str__(self) -> str:
        origin = "datasheet, dense" if self.kind == "datasheet" else "measured matrix product"
        return f"{self.value / _T:.4g} TFLOP/s ({self.name}; {origin})"


def peak_flops(device: torch.device, dtype: torch.dtype, *, cache: Path | None = None, tf32: bool = False) -> PeakFlops:
    """Peak rate of ``device`` for matrix products of ``dtype``: from the datasheet if known, else measured.

    A measurement takes about a second. Run it on one process while the others wait, with the run's thread count set.

    Args:
        cache: JSON file that stores measured rates; None stores none.
        tf32: fp32 products may run as TF32.
    """
    name = device_name(device)
    arithmetic = _ARITHMETIC.get(str(dtype).removeprefix("torch."), "")
    if arithmetic == "fp32" and tf32:
        arithmetic = "tf32"
    datasheet = datasheet_peak(name, arithmetic)
    if datasheet is not None:
        measured = read_calibration(cache).matmul.get(matmul_key(device, dtype)[1])
        return PeakFlops(
            value=datasheet,
            kind="datasheet",
            name=f"{name}, {arithmetic}",
            measured_value=measured.tflops * _T if measured is not None else 0.0,
        )
    return measured_ceiling(device, dtype, cache=cache)


def datasheet_peak(name: str, arithmetic: str) -> float | None:
    """Dense peak in FLOP/s from the table of datasheets, or None if it is unknown.

    The peak of a slice of a device (MIG) is unknown, because its name does not tell its share.

    Args:
        name: Device name as the backend reports it.
        arithmetic: ``bf16``, ``fp16``, ``tf32`` or ``fp32``.
    """
    if re.search(r"\bMIG\b", name):
        return None
    for pattern, peaks in _DATASHEET:
        if re.search(pattern, name, re.IGNORECASE):
            return peaks[arithmetic] * _T if arithmetic in peaks else None
    return None


def device_name(device: torch.device) -> str:
    """Name of the device from its backend; the model name of a CPU."""
    if device.type == "cpu":
        return cpu_name()
    from unisono.device.torch_adapters import adapter_of

    adapter, index = adapter_of(device)
    return adapter.device_name(index)


def cpu_name() -> str:
    """Model name of the processor."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine() or "cpu"


def measured_ceiling(device: torch.device, dtype: torch.dtype, *, cache: Path | None = None) -> PeakFlops:
    """Rate of a large square matrix product: the median of repeats, with this process's thread count.

    Args:
        cache: JSON file; an entry of the same device, thread count, dtype and torch version is reused. The rate of a busy
            machine (quartiles further apart than a quarter of the median) is returned but not stored. A damaged or
            unwritable file only costs a new measurement.
    """
    name, key = matmul_key(device, dtype)
    known = read_calibration(cache).matmul.get(key)
    if known is not None:
        return PeakFlops(value=known.tflops * _T, kind="measured", name=name)
    result = time_matmul(device, dtype)
    if cache is not None and result.spread_frac <= QUIET_SPREAD_FRAC:
        with contextlib.suppress(OSError):
            add_to_calibration(cache, matmul={key: result})
    return PeakFlops(value=result.tflops * _T, kind="measured", name=name)


def matmul_key(device: torch.device, dtype: torch.dtype, *, threads: int = 0) -> tuple[str, str]:
    """The name of a device with its arithmetic, and the key of its rate in a calibration file.

    ``threads`` are those of a process on a CPU; 0 for those of this one.
    """
    import torch

    threads = threads or torch.get_num_threads() if device.type == "cpu" else 0
    where = f"{device_name(device)}, {str(dtype).removeprefix('torch.')}"
    name = f"{where}, {threads} threads" if threads else where
    return name, f"matmul | {name} | torch {torch.__version__}"


def baseline_dtype(device: torch.device) -> torch.dtype:
    """The dtype of the products by which devices are compared (``unisono doctor --bench``)."""
    import torch

    return torch.float32 if device.type == "cpu" else torch.bfloat16


def node_baseline(device: torch.device, cache: Path) -> float:
    """What a device of this node was measured to do, in FLOP/s of products of ``baseline_dtype``; 0 where it was not."""
    known = read_calibration(cache).matmul.get(matmul_key(device, baseline_dtype(device))[1])
    return known.tflops * _T if known is not None else 0.0


def time_matmul(device: torch.device, dtype: torch.dtype, *, budget_s: float = 1.0) -> MatmulRate:
    """Time square matrix products, growing until one takes 20 ms, then repeat it at least five times.

    Args:
        budget_s: Time for the repeats.
    """
    import torch

    def seconds(a: torch.Tensor, b: torch.Tensor) -> float:
        _wait(device)
        begin = time.perf_counter()
        torch.mm(a, b)
        _wait(device)
        return time.perf_counter() - begin

    generator = torch.Generator().manual_seed(0)
    size, once_s = 256, 0.0
    while True:
        a, b = (
            torch.randn(size, size, generator=generator, device="cpu").to(device=device, dtype=dtype) for _ in range(2)
        )
        seconds(a, b)  # first call: packing, kernel selection
        once_s = seconds(a, b)
        if once_s >= 0.02 or size >= 16384:
            break
        size *= 2
    repeats = max(5, min(50, int(budget_s / once_s)))
    lower_s, median_s, upper_s = statistics.quantiles((seconds(a, b) for _ in range(repeats)), n=4)
    return MatmulRate(
        tflops=2 * size**3 / median_s / _T,
        size=size,
        repeats=repeats,
        spread_frac=(upper_s - lower_s) / median_s,
    )


def _wait(device: torch.device) -> None:
    from unisono.device.torch_adapters import adapter_of

    adapter, index = adapter_of(device)
    adapter.synchronize(index)
