from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import GIB, FakeDevice, in_place_of_the_cpu

from unisono.device.health import DeviceHealth
from unisono.doctor import examine
from unisono.doctor.check import Check
from unisono.doctor.devices import check_devices, devices, health_checks, kernel_errors
from unisono.doctor.topology import check_topology
from unisono.doctor.versions import check_versions

HEALTHY = DeviceHealth(
    util_frac=0.0,
    slowdowns=(),
    corrected_errors=3,
    uncorrected_errors=0,
    remap_pending=False,
    remap_failed=False,
    recovery="none",
    is_persistent=True,
    is_partitioned=False,
    processes={os.getpid(): GIB},
)


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    with in_place_of_the_cpu(FakeDevice(health=HEALTHY)) as device:
        yield device


def checked(device: FakeDevice, **changes: Any) -> dict[str, Check]:
    device.health = replace(HEALTHY, **changes)
    return {check.code: check for check in check_devices()}


def test_a_healthy_device(device: FakeDevice) -> None:
    found = checked(device)
    assert {code: check.evidence for code, check in found.items() if code != "DEV06"} == {
        "DEV01": "1 x Fake 1000",
        "DEV02": "none",
        "DEV03": "none; 3 corrected",
        "DEV04": "none",
        "DEV05": "nothing",
        "DEV07": "none",
        "DEV08": "on",
        "DEV09": "whole devices",
    }
    assert {check.status for check in found.values()} == {"ok"}
    assert {check.cure for check in found.values()} == {""}


@pytest.mark.parametrize(
    ("changes", "code", "status", "evidence", "cure"),
    [
        ({"uncorrected_errors": 2}, "DEV03", "failure", "device 0: 2 uncorrected", "--gpu-reset"),
        ({"remap_pending": True}, "DEV04", "warning", "device 0: a row is replaced at the next reset", "reset it"),
        ({"remap_failed": True}, "DEV04", "failure", "device 0: no spare row is left", "replaced"),
        ({"recovery": "reboot of the node"}, "DEV05", "failure", "device 0: reboot of the node", "before a run"),
        ({"alarm": "Critical"}, "DEV05", "failure", "device 0: state Critical", "before a run"),
        (
            {"slowdowns": ("hardware thermal slowdown",), "clock_hz": 3e8, "max_clock_hz": 1.98e9},
            *("DEV07", "warning", "device 0: hardware thermal slowdown (300 of 1980 MHz)", "cooling"),
        ),
        ({"is_persistent": False}, "DEV08", "warning", "device 0: off", "nvidia-smi -pm 1"),
        ({"is_partitioned": True}, "DEV09", "warning", "device 0: divided (MIG)", "-mig 0"),
        ({"processes": {1: GIB}}, "DEV02", "warning", "device 0: 0 GiB (processes 1)", "end the processes"),
    ],
)
def test_a_device_with_a_trouble(
    device: FakeDevice, changes: dict[str, Any], code: str, status: str, evidence: str, cure: str
) -> None:
    found = checked(device, **changes)
    assert (found[code].status, found[code].evidence) == (status, evidence)
    assert cure in found[code].cure
    assert {check.status for other, check in found.items() if other != code} == {"ok"}


def test_memory_that_nobody_says_who_holds(device: FakeDevice) -> None:
    device.memory = replace(device.memory, free_bytes=5 * GIB)
    found = checked(device)
    assert (found["DEV02"].status, found["DEV02"].evidence) == ("warning", "device 0: 3 GiB")


def test_a_device_whose_state_cannot_be_read(device: FakeDevice) -> None:
    device.health = RuntimeError("GPU is lost")
    found = {check.code: check for check in check_devices()}
    assert (found["DEV03"].status, found["DEV03"].evidence) == (
        "warning",
        "device 0: not known: RuntimeError: GPU is lost",
    )
    assert "nvidia-ml-py" in found["DEV03"].cure
    assert set(found) == {"DEV01", "DEV02", "DEV03", "DEV05", "DEV06"}


def test_what_no_driver_tells_is_no_check(device: FakeDevice) -> None:
    device.health = DeviceHealth()
    assert [check.code for check in check_devices()] == ["DEV01", "DEV02", "DEV05", "DEV06"]


def test_many_devices_are_counted() -> None:
    states = [replace(HEALTHY, uncorrected_errors=index) for index in range(12)]
    (errors, *_) = health_checks(states, {})
    assert errors.evidence.startswith("device 1: 1 uncorrected; device 2: 2 uncorrected")
    assert errors.evidence.endswith("device 8: 8 uncorrected; and 3 more")


def test_unlike_devices() -> None:
    assert devices(["A", "A"]).status == "ok"
    mixed = devices(["A", "B", "A"])
    assert (mixed.status, mixed.evidence) == ("warning", "2 x A, 1 x B")


def test_errors_in_the_kernels_log(device: FakeDevice) -> None:
    fell = "4,1,1,-;NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."
    fault = "4,1,1,-;NVRM: Xid (PCI:0000:af:00): 31, pid=8, name=python, MMU Fault"
    found = kernel_errors(device.adapter(), [fault, fell, fell])
    assert (found.status, found.evidence) == (
        "warning",
        "Xid 79 of 0000:3b:00 2 times; Xid 31 of 0000:af:00, which programs cause too",
    )
    assert "Xid errors" in found.cure
    assert kernel_errors(device.adapter(), [fault]).status == "ok"
    assert kernel_errors(device.adapter(), ["usb 1-1: new device"]).evidence == "none"


def test_a_log_that_this_user_may_not_read(device: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unisono.doctor.devices.kernel_lines", lambda: None)
    assert checked(device)["DEV06"].evidence == "not known: this user may not read it (sudo dmesg)"


def test_doctor_shows_the_state_of_devices(device: FakeDevice, tmp_path: Path) -> None:
    device.health = replace(HEALTHY, recovery="reset of the device")
    found = {check.code: check.status for check in examine(tmp_path)}
    assert found["DEV05"] == "failure"
    assert found["DEV09"] == "ok"


@pytest.mark.gpu
def test_devices_and_their_driver() -> None:
    held = torch.empty(int(0.3 * torch.accelerator.get_memory_info()[1]), dtype=torch.uint8, device="cuda")
    found = {check.code: check for check in (*check_devices(), *check_versions())}
    assert found["DEV01"].status == "ok"
    assert torch.cuda.get_device_name(0) in found["DEV01"].evidence
    assert (found["DEV02"].status, "device 0: " in found["DEV02"].evidence) == ("warning", True)
    assert found["VER03"].status == "ok"
    assert len(held)


@pytest.mark.gpu
def test_where_devices_are() -> None:
    found = {check.code: check for check in check_topology()}
    assert sorted(found) == ["TOPO01", "TOPO02", "TOPO03"]
    assert "lanes" in found["TOPO02"].evidence
    assert "device" in found["TOPO03"].evidence
