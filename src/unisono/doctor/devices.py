"""The accelerators of this host: what they are, who uses them, and their state as driver and kernel tell it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from unisono.device.health import DeviceHealth, no_health
from unisono.device.kernel_log import KernelError, kernel_lines
from unisono.doctor.check import Check, judged
from unisono.sanitize import shorten
from unisono.units import GIB

if TYPE_CHECKING:
    from unisono.device.adapter import DeviceAdapter, DeviceMemory

_SHOWN: Final = 8


def check_devices() -> Iterator[Check]:
    """DEV01 to DEV09; on a host without accelerators the first alone."""
    from unisono.device.torch_adapters import present_adapter

    adapter = present_adapter()
    if adapter.streams is None:
        yield judged("DEV01", "devices", "torch sees the CPU alone", warning=_no_device_cure())
        return
    names = [adapter.device_name(index) for index in range(adapter.count())]
    yield devices(names)
    health, failures = read_health(adapter, len(names))
    yield held_memory([adapter.memory(index) for index in range(len(names))], health)
    if adapter.health is no_health:
        return
    yield from health_checks(health, failures)
    yield kernel_errors(adapter)


def read_health(adapter: DeviceAdapter, count: int) -> tuple[list[DeviceHealth], dict[int, str]]:
    """The state of each device, and why it could not be read, by the device's number."""
    found, failures = [DeviceHealth()] * count, dict[int, str]()
    for index in range(count):
        try:
            found[index] = adapter.health(index)
        except Exception as error:  # each driver has errors of its own
            failures[index] = shorten(f"{type(error).__name__}: {error}", 120)
    return found, failures


def devices(names: Sequence[str]) -> Check:
    """DEV01: unlike devices."""
    evidence = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    mixed = "ranks of unlike devices wait for the slowest: choose like ones with CUDA_VISIBLE_DEVICES"
    return judged("DEV01", "devices", evidence, warning=mixed if len(set(names)) > 1 else "")


def held_memory(memory: Sequence[DeviceMemory | None], health: Sequence[DeviceHealth]) -> Check:
    """DEV02: memory that other processes hold, and which processes they are."""
    held: dict[int, str] = {}
    for index, (told, state) in enumerate(zip(memory, health, strict=True)):
        others = sorted(pid for pid in state.processes if pid != os.getpid())
        used = 0 if told is None else told.limit_bytes - told.free_bytes
        if others or (told is not None and told.free_bytes < 0.9 * told.limit_bytes):
            by = f" (processes {', '.join(map(str, others[:_SHOWN]))})" if others else ""
            held[index] = f"{used / GIB:.3g} GiB{by}"
    cure = "end the processes that hold it, or choose other devices (CUDA_VISIBLE_DEVICES, ASCEND_RT_VISIBLE_DEVICES)"
    return judged("DEV02", "memory held by others", _listed(held) or "none", warning=cure if held else "")


def health_checks(health: Sequence[DeviceHealth], failures: Mapping[int, str]) -> Iterator[Check]:
    """DEV03 to DEV05, DEV07 to DEV09: of each kind of value that any device tells; ``failures`` are of those that tell none."""
    numbered = dict(enumerate(health))
    if failures or any(state.uncorrected_errors is not None for state in health):
        yield _memory_errors(numbered, failures)
    if any(state.remap_pending is not None for state in health):
        yield _remapped_rows(numbered)
    asked = {index: state.recovery for index, state in numbered.items() if state.recovery not in ("", "none")}
    asked |= {index: f"state {shorten(state.alarm, 40)}" for index, state in numbered.items() if state.alarm}
    yield judged(
        "DEV05",
        "what the driver asks for",
        _listed(asked) or "nothing",
        failure="do that before a run: the device fails, or will" if asked else "",
    )
    if any(state.slowdowns is not None for state in health):
        slow = {
            index: ", ".join(state.slowdowns) + _clock(state) for index, state in numbered.items() if state.slowdowns
        }
        yield judged(
            "DEV07",
            "clocks that are held down",
            _listed(slow) or "none",
            warning="look at cooling and power supply: ranks wait for the slowest device" if slow else "",
        )
    if any(state.is_persistent is not None for state in health):
        off = {index: "off" for index, state in numbered.items() if state.is_persistent is False}
        yield judged(
            "DEV08",
            "persistence mode",
            _listed(off) or "on",
            warning="start nvidia-persistenced, or nvidia-smi -pm 1: each first use of the device takes seconds"
            if off
            else "",
        )
    if any(state.is_partitioned is not None for state in health):
        parted = {index: "divided (MIG)" for index, state in numbered.items() if state.is_partitioned}
        cure = "a rank gets one instance, and instances have no peer access: nvidia-smi -mig 0 for whole devices"
        yield judged(
            "DEV09", "instances of devices", _listed(parted) or "whole devices", warning=cure if parted else ""
        )


def _memory_errors(health: Mapping[int, DeviceHealth], failures: Mapping[int, str]) -> Check:
    """DEV03: errors that ECC could not correct; and devices whose state cannot be read."""
    bad = {
        index: f"{state.uncorrected_errors} uncorrected" for index, state in health.items() if state.uncorrected_errors
    }
    corrected = sum(state.corrected_errors or 0 for state in health.values())
    silent = {index: f"not known: {why}" for index, why in failures.items()}
    cure = "reset the device or reboot (nvidia-smi --gpu-reset); have it replaced if they come back"
    ask = "pip install nvidia-ml-py; if nvidia-smi or npu-smi info does not show the device either, reboot"
    return judged(
        "DEV03",
        "errors of device memory",
        _listed(silent | bad) or f"none; {corrected} corrected",
        failure=cure if bad else "",
        warning=ask if silent else "",
    )


def _remapped_rows(health: Mapping[int, DeviceHealth]) -> Check:
    """DEV04: damaged rows of memory that wait for a reset, or that no spare row is left for."""
    failed = {index: "no spare row is left" for index, state in health.items() if state.remap_failed}
    pending = {index: "a row is replaced at the next reset" for index, state in health.items() if state.remap_pending}
    return judged(
        "DEV04",
        "damaged rows of device memory",
        _listed(pending | failed) or "none",
        failure="have the device replaced" if failed else "",
        warning="reset it before a run: nvidia-smi --gpu-reset, without processes on it" if pending else "",
    )


def kernel_errors(adapter: DeviceAdapter, lines: Sequence[str] | None = None) -> Check:
    """DEV06: errors of devices in the kernel's log, of this boot; ``lines`` are those of the log, None reads it."""
    title = "device errors in the kernel's log"
    log = kernel_lines() if lines is None else lines
    if log is None:
        return judged("DEV06", title, "not known: this user may not read it (sudo dmesg)")
    found = adapter.kernel_errors(log)
    hardware = [error for error in found if not error.of_program]
    cure = "look the number up in NVIDIA's list of Xid errors: reset the device or reboot; have it replaced if they come back"
    return judged("DEV06", title, _counted(found) or "none", warning=cure if hardware else "")


def _counted(found: Sequence[KernelError]) -> str:
    shown = [
        f"{error.code} of {error.place}{f' {error.count} times' if error.count > 1 else ''}"
        f"{', which programs cause too' if error.of_program else ''}"
        for error in sorted(found, key=lambda error: error.of_program)
    ]
    return "; ".join(shown[:_SHOWN]) + (f"; and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else "")


def _clock(state: DeviceHealth) -> str:
    if not state.clock_hz or not state.max_clock_hz:
        return ""
    return f" ({state.clock_hz / 1e6:.0f} of {state.max_clock_hz / 1e6:.0f} MHz)"


def _listed(found: Mapping[int, str]) -> str:
    """What was found of which device; the first few."""
    shown = [f"device {index}: {words}" for index, words in sorted(found.items())]
    return "; ".join(shown[:_SHOWN]) + (f"; and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else "")


def _no_device_cure() -> str:
    """What is missing where the host has a device that torch does not see; empty where it has none."""
    from unisono.launch.resources import accelerator_files

    found = accelerator_files()
    return f"the host has {', '.join(found)}: install the torch that was built for it, and its driver" if found else ""
