"""The state of a device as its driver tells it, and the reader for NVIDIA devices (NVML). Needs no torch."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

# bits of nvmlDeviceGetCurrentClocksEventReasons (nvml.h): those that make a device slower than it could be
_SLOW_BITS: Final = {
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
# values of the field NVML_FI_DEV_GET_GPU_RECOVERY_ACTION (nvml.h, drivers from 570 on)
_RECOVERY_FIELD: Final = 230
_RECOVERIES: Final = (
    *("none", "reset of the device", "reboot of the node", "drain of its peers", "drain and reset"),
    *("recovery of the IMEX domain", "reset of the bus", "reboot of the system"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceHealth:
    """The state of one device. None, or empty, is what its driver does not tell.

    Attributes:
        util_frac: Part of the last moments in which some kernel ran.
        power_w: Power it takes.
        power_limit_w: Power it may take.
        temperature_c: Temperature of the chip.
        clock_hz: Clock of its processors.
        max_clock_hz: The highest clock they may have.
        memory_bytes: Memory that processes hold.
        slowdowns: Why its clock is lower than it could be, apart from load and the limit of power.
        corrected_errors: Errors of memory that ECC corrected since the driver was loaded.
        uncorrected_errors: Errors of memory that it could not correct.
        remap_pending: Whether a damaged row of memory is replaced at the next reset.
        remap_failed: Whether a damaged row could not be replaced.
        recovery: What the driver asks for, in words; ``none`` where all is well.
        alarm: The driver's own verdict where it is not a good one, in its words.
        is_persistent: Whether the driver keeps the device initialised while no process uses it.
        is_partitioned: Whether it is divided into instances (MIG).
        processes: Memory in bytes by process id, of processes that use it.
    """

    util_frac: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
    clock_hz: float | None = None
    max_clock_hz: float | None = None
    memory_bytes: int | None = None
    slowdowns: tuple[str, ...] | None = None
    corrected_errors: int | None = None
    uncorrected_errors: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    recovery: str = ""
    alarm: str = ""
    is_persistent: bool | None = None
    is_partitioned: bool | None = None
    processes: Mapping[int, int] = field(default_factory=dict[int, int])

    def figures(self) -> dict[str, float | str]:
        """What changes in a run, by name, for a ``system`` event: numbers, and as text ``slowdowns`` where there are any.

        ``throttled`` is 1 where the device is slowed down.
        """
        found: dict[str, float | None] = {
            "util_frac": self.util_frac,
            "power_w": self.power_w,
            "power_limit_w": self.power_limit_w,
            "temperature_c": self.temperature_c,
            "clock_hz": self.clock_hz,
            "max_clock_hz": self.max_clock_hz,
            "memory_bytes": self.memory_bytes,
            "throttled": None if self.slowdowns is None else bool(self.slowdowns),
            "corrected_errors": self.corrected_errors,
            "uncorrected_errors": self.uncorrected_errors,
        }
        figures: dict[str, float | str] = {name: float(value) for name, value in found.items() if value is not None}
        return figures | ({"slowdowns": ", ".join(self.slowdowns)} if self.slowdowns else {})


def no_health(index: int) -> DeviceHealth:
    """Of a device whose driver nobody asks: nothing."""
    return DeviceHealth()


@cache
def nvml() -> Any:
    """The bindings of NVML, initialised. Raises ImportError or an error of theirs where there is none."""
    bindings: Any = importlib.import_module("pynvml")
    bindings.nvmlInit()
    return bindings


def nvml_health(pci_address: str, index: int) -> DeviceHealth:
    """State of the NVIDIA device at a PCI address; with an empty one, of that index among all devices of the host.

    Raises ImportError without its bindings (nvidia-ml-py), and their own errors where there is no such device.
    """
    bindings = nvml()
    if pci_address:
        handle = bindings.nvmlDeviceGetHandleByPciBusId(pci_address.encode())
    else:
        handle = bindings.nvmlDeviceGetHandleByIndex(index)

    def told(name: str, *arguments: Any) -> Any:
        """What a function of NVML returns; None where the device or the driver does not have it."""
        try:
            return getattr(bindings, name)(handle, *arguments)
        except (AttributeError, bindings.NVMLError):
            return None

    def scaled(value: Any, factor: float) -> float | None:
        return None if value is None else value * factor

    utilization, memory = told("nvmlDeviceGetUtilizationRates"), told("nvmlDeviceGetMemoryInfo")
    reasons = told("nvmlDeviceGetCurrentClocksEventReasons")
    if reasons is None:  # drivers before 535
        reasons = told("nvmlDeviceGetCurrentClocksThrottleReasons")
    rows, mig = told("nvmlDeviceGetRemappedRows"), told("nvmlDeviceGetMigMode")
    persistence = told("nvmlDeviceGetPersistenceMode")
    return DeviceHealth(
        util_frac=None if utilization is None else utilization.gpu / 100,
        power_w=scaled(told("nvmlDeviceGetPowerUsage"), 1e-3),
        power_limit_w=scaled(told("nvmlDeviceGetEnforcedPowerLimit"), 1e-3),
        temperature_c=scaled(told("nvmlDeviceGetTemperature", 0), 1.0),  # NVML_TEMPERATURE_GPU
        clock_hz=scaled(told("nvmlDeviceGetClockInfo", 1), 1e6),  # NVML_CLOCK_SM
        max_clock_hz=scaled(told("nvmlDeviceGetMaxClockInfo", 1), 1e6),
        memory_bytes=None if memory is None else int(memory.used),
        slowdowns=None if reasons is None else tuple(words for bit, words in _SLOW_BITS.items() if reasons & bit),
        # NVML_MEMORY_ERROR_TYPE_CORRECTED and _UNCORRECTED, NVML_VOLATILE_ECC
        corrected_errors=told("nvmlDeviceGetTotalEccErrors", 0, 0),
        uncorrected_errors=told("nvmlDeviceGetTotalEccErrors", 1, 0),
        remap_pending=None if rows is None else bool(rows[2]),
        remap_failed=None if rows is None else bool(rows[3]),
        recovery=_recovery(told("nvmlDeviceGetFieldValues", [_RECOVERY_FIELD])),
        is_persistent=None if persistence is None else bool(persistence),
        is_partitioned=None if mig is None else bool(mig[0]),
        processes={
            int(process.pid): int(process.usedGpuMemory or 0)
            for process in told("nvmlDeviceGetComputeRunningProcesses") or ()
        },
    )


def _recovery(fields: Any) -> str:
    """The recovery action in words; empty where the driver does not have that field."""
    if not fields or fields[0].nvmlReturn != 0:
        return ""
    number = int(fields[0].value.uiVal)
    return _RECOVERIES[number] if number < len(_RECOVERIES) else f"action {number}"


def nvidia_driver_version() -> str:
    """Version of the NVIDIA driver as NVML tells it, such as ``570.86.10``; empty where it tells none."""
    with suppress(Exception):  # each binding and driver has errors of its own
        told = nvml().nvmlSystemGetDriverVersion()
        text = told.decode(errors="replace") if isinstance(told, bytes) else str(told)
        return text if re.fullmatch(r"[0-9]+(\.[0-9]+)+", text) else ""
    return ""
