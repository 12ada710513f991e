"""Readers of a device's state, against bindings and outputs as they are documented."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from unisono.device import npu_smi
from unisono.device.health import DeviceHealth, nvidia_driver_version, nvml, nvml_health
from unisono.device.kernel_log import KernelError, kernel_lines, xid_errors
from unisono.device.npu_smi import npu_health, parse_npu_smi


class NVMLError(Exception):
    pass


class FakeNvml(ModuleType):
    """The functions of nvidia-ml-py that are called, for one device; an answer that is an exception is raised."""

    NVMLError = NVMLError

    def __init__(self, **answers: Any) -> None:
        super().__init__("pynvml")
        self.asked: list[tuple[str, tuple[Any, ...]]] = []
        self.answers = {
            "nvmlInit": None,
            "nvmlSystemGetDriverVersion": "570.86.10",
            "nvmlDeviceGetHandleByPciBusId": "handle",
            "nvmlDeviceGetHandleByIndex": "handle",
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=37, memory=3),
            "nvmlDeviceGetPowerUsage": 345_600,
            "nvmlDeviceGetEnforcedPowerLimit": 700_000,
            "nvmlDeviceGetTemperature": 61,
            "nvmlDeviceGetClockInfo": 1350,
            "nvmlDeviceGetMaxClockInfo": 1980,
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=80 << 30, free=75 << 30, used=5 << 30),
            "nvmlDeviceGetCurrentClocksEventReasons": 0x4 | 0x40 | 0x80,
            "nvmlDeviceGetTotalEccErrors": 2,
            "nvmlDeviceGetRemappedRows": (1, 1, 1, 0),
            "nvmlDeviceGetFieldValues": [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=1))],
            "nvmlDeviceGetPersistenceMode": 0,
            "nvmlDeviceGetMigMode": [1, 1],
            "nvmlDeviceGetComputeRunningProcesses": [
                SimpleNamespace(pid=71, usedGpuMemory=4 << 30),
                SimpleNamespace(pid=72, usedGpuMemory=None),
            ],
            **answers,
        }

    def __getattr__(self, name: str) -> Any:
        if name not in self.answers:
            raise AttributeError(name)

        def function(*arguments: Any) -> Any:
            self.asked.append((name, arguments))
            answer = self.answers[name]
            if isinstance(answer, Exception):
                raise answer
            return answer

        return function


@pytest.fixture(autouse=True)
def no_bindings() -> Iterator[None]:
    nvml.cache_clear()
    yield
    nvml.cache_clear()


def read(monkeypatch: pytest.MonkeyPatch, **answers: Any) -> tuple[DeviceHealth, FakeNvml]:
    nvml.cache_clear()
    bindings = FakeNvml(**answers)
    monkeypatch.setitem(sys.modules, "pynvml", bindings)
    return nvml_health("0000:3b:00.0", 5), bindings


def test_state_of_an_nvidia_device(monkeypatch: pytest.MonkeyPatch) -> None:
    health, bindings = read(monkeypatch)
    assert health == DeviceHealth(
        util_frac=0.37,
        power_w=345.6,
        power_limit_w=700,
        temperature_c=61,
        clock_hz=1.35e9,
        max_clock_hz=1.98e9,
        memory_bytes=5 << 30,
        slowdowns=(
            "hardware thermal slowdown",
            "power brake",
        ),  # the limit of power (0x4) is where a busy device should be
        corrected_errors=2,
        uncorrected_errors=2,
        remap_pending=True,
        remap_failed=False,
        recovery="reset of the device",
        is_persistent=False,
        is_partitioned=True,
        processes={71: 4 << 30, 72: 0},
    )
    # by its address: the numbers of NVML do not follow CUDA_VISIBLE_DEVICES
    assert ("nvmlDeviceGetHandleByPciBusId", (b"0000:3b:00.0",)) in bindings.asked
    assert ("nvmlDeviceGetTotalEccErrors", ("handle", 1, 0)) in bindings.asked
    assert ("nvmlDeviceGetFieldValues", ("handle", [230])) in bindings.asked
    assert health.figures()["throttled"] == 1
    assert nvidia_driver_version() == "570.86.10"


def test_what_a_device_or_an_old_driver_does_not_have_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = NVMLError("Not Supported")
    names = [name for name in FakeNvml().answers if name.startswith("nvmlDeviceGet") and "Handle" not in name]
    health, _ = read(monkeypatch, **dict.fromkeys(names, missing))
    assert health == DeviceHealth()
    assert health.figures() == {}
    health, _ = read(
        monkeypatch,
        nvmlDeviceGetFieldValues=[SimpleNamespace(nvmlReturn=3, value=SimpleNamespace(uiVal=0))],
        nvmlDeviceGetCurrentClocksEventReasons=missing,
        nvmlDeviceGetCurrentClocksThrottleReasons=0x8,
    )
    assert (health.recovery, health.slowdowns) == ("", ("hardware slowdown",))


def test_a_driver_asks_for_what_has_no_name_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=17))]
    assert read(monkeypatch, nvmlDeviceGetFieldValues=fields)[0].recovery == "action 17"


def test_without_bindings_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ImportError):
        nvml_health("", 0)
    assert nvidia_driver_version() == ""


@pytest.mark.gpu
def test_state_of_a_real_nvidia_device() -> None:
    health = nvml_health("", 0)
    assert 0 <= health.figures()["util_frac"] <= 1
    assert health.figures()["power_w"] > 1
    assert health.figures()["memory_bytes"] > 0
    assert health.recovery in ("none", "")


# as the manual of npu-smi 23.0 shows it for training devices, and of 25.5 for others
TRAINING = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 23.0.rc2                 Version: 23.0.rc2                                             |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | 88.4        45                0    / 0             |
| 0                         | 0000:C1:00.0  | 60          0    / 0          4142 / 65536         |
+===========================+===============+====================================================+
| 1     910B3               | Alarm         | NA          NA                0    / 0             |
| 0                         | 0000:01:00.0  | 0           0    / 0          3360 / 65536         |
+===========================+===============+====================================================+
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| 0       0                 | 12345         | python                   | 780                     |
| No running processes found in NPU 1                                                            |
+===========================+===============+====================================================+
"""
EMBEDDED = """\
+--------------------------------------------------------------------------------------------------------+
| npu-smi 25.5.0                                   Version: 25.5.0                                       |
+-------------------------------+-----------------+------------------------------------------------------+
| NPU     Name                  | Health          | Power(W)     Temp(C)           Hugepages-Usage(page) |
| Chip    Device                | Bus-Id          | AICore(%)    Memory-Usage(MB)                        |
+===============================+=================+======================================================+
| 0       310B1                 | OK              | 10.4          66               0    / 0              |
| 0       0                     | NA              | 0            957   / 10810                           |
+===============================+=================+======================================================+
"""


def test_state_of_ascend_devices() -> None:
    assert parse_npu_smi(TRAINING) == [
        DeviceHealth(
            util_frac=0.6, power_w=88.4, temperature_c=45, memory_bytes=4142 << 20, processes={12345: 780 << 20}
        ),
        DeviceHealth(util_frac=0, memory_bytes=3360 << 20, alarm="Alarm"),
    ]
    assert parse_npu_smi(EMBEDDED) == [
        DeviceHealth(util_frac=0, power_w=10.4, temperature_c=66, memory_bytes=957 << 20)
    ]


@pytest.mark.parametrize(
    "text", ["", "|", "| 0 a | OK |", "dcmi module initialize failed. ret is -8005", "| 0 | | |\n" * 3]
)
def test_what_is_no_table_has_no_devices(text: str) -> None:
    assert parse_npu_smi(text) == []


def test_a_table_that_is_cut_anywhere_breaks_nothing() -> None:
    for end in range(len(TRAINING)):
        assert len(parse_npu_smi(TRAINING[:end])) <= 2


def test_the_command_of_ascend_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError):
        npu_health(0)
    command = tmp_path / "npu-smi"
    command.write_text(f"#!/bin/sh\n[ $1 = info ] && /bin/cat <<'END'\n{TRAINING}END\n")
    command.chmod(0o755)
    assert npu_health(1).alarm == "Alarm"
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "1,0")
    assert npu_health(1).power_w == 88.4
    with pytest.raises(IndexError):
        npu_health(2)
    assert npu_smi._physical(0, {"ASCEND_RT_VISIBLE_DEVICES": "a"}) == 0


# --- the kernel's log --------------------------------------------------------------------------------------------------

LOG = """\
6,900,1000,-;NVRM: loading NVIDIA UNIX x86_64 Kernel Module  570.86.10
4,901,2000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
4,902,3000,-;NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.
4,903,4000,-;NVRM: Xid (0000:af:00): 31, pid=812, name=python, Ch 00000008, MMU Fault
4,904,5000,-;NVRM: Xid (PCI:0000:3b:00): not a number
"""


def test_errors_of_nvidia_devices_in_the_kernels_log(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_text(LOG)
    lines = kernel_lines(path)
    assert lines == LOG.splitlines()
    assert xid_errors(lines) == [
        KernelError(place="0000:3b:00", code="Xid 79", of_program=False, count=2),
        KernelError(place="0000:af:00", code="Xid 31", of_program=True, count=1),
    ]


def test_a_log_that_cannot_be_read(tmp_path: Path) -> None:
    assert kernel_lines(tmp_path / "none") is None
    assert kernel_lines(tmp_path) is None
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert kernel_lines(pipe) == []  # without waiting for what may come
