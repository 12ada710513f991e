from __future__ import annotations

import pytest
import torch

from unisono.doctor.devices import check_devices
from unisono.doctor.topology import check_topology
from unisono.doctor.versions import check_versions


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
