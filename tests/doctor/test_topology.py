"""Where devices are, from files as the kernel has them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from unisono.doctor import versions
from unisono.doctor.topology import PciLink, _peers, check_topology, lanes, numa, pci_link
from unisono.doctor.versions import _driver, driver_version, install_command


def device(folder: Path, address: str, **files: object) -> PciLink:
    (folder / address).mkdir()
    for name, content in files.items():
        (folder / address / name).write_text(f"{content}\n")
    return pci_link(address, folder)


def test_what_the_kernel_says_of_devices(tmp_path: Path) -> None:
    full = device(tmp_path, "0000:3b:00.0", numa_node=1, current_link_width=16, max_link_width=16)
    assert full == PciLink(address="0000:3b:00.0", node=1, width=16, max_width=16)
    narrow = device(tmp_path, "0000:5e:00.0", numa_node=0, current_link_width=8, max_link_width=16)
    silent = device(tmp_path, "0000:86:00.0", numa_node="many", current_link_width="")
    assert (silent.node, silent.width, silent.max_width) == (-1, 0, 0)
    check = lanes([full, narrow, silent])
    assert (check.status, check.evidence) == ("warning", "device 1 uses 8 of 16 lanes")
    assert (lanes([full]).status, lanes([full]).evidence) == ("ok", "1 device with 16 lanes")
    assert lanes([full, full]).evidence == "2 devices with 16 lanes"
    assert lanes([silent]).evidence == "not known"
    check = numa(Counter({0: 4}), [full, narrow])
    assert (check.status, "cores of the nodes of device 0" in check.cure) == ("warning", True)
    check = numa(Counter({0: 1, 1: 4}), [full, silent])
    assert (check.status, check.evidence) == ("ok", "node 0: 1 core, node 1: 4 cores, device 0 on node 1")


def test_pairs_of_devices_that_do_not_reach_each_other() -> None:
    assert _peers([[]]).evidence == "one device"
    assert _peers([[True], [True]]).evidence == "all pairs of 2 devices"
    check = _peers([[True, False], [True, True], [False, True]])
    assert (check.status, check.evidence) == ("warning", "not 0-2")


def test_this_host_has_nodes() -> None:
    found = {check.code: check for check in check_topology()}
    assert found["TOPO01"].evidence.startswith("node ")


DRIVER_FILE = """NVRM version: NVIDIA UNIX {kind}x86_64 Kernel Module  {version}  Mon Aug 25 00:00:00 UTC 2025
GCC version:  gcc version 12.3.0
"""


@pytest.mark.parametrize(
    ("kind", "version"), [("", "570.86.15"), ("Open ", "580.65.06"), ("", "535.104"), ("", "525.60.13")]
)
def test_the_driver_and_the_torch_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, version: str
) -> None:
    text = DRIVER_FILE.format(kind=kind, version=version)
    if kind:
        text = text.replace("Kernel Module  ", "Kernel Module for x86_64  ")
    (tmp_path / "version").write_text(text)
    monkeypatch.setattr(versions, "_DRIVER_FILE", tmp_path / "version")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert driver_version() == version
    found = {check.code: check for check in versions.check_versions()}
    wheel = "cu130" if version.startswith("58") else "cu126"
    assert found["VER03"].evidence == f"{version}, and a torch without CUDA"
    assert f"--index-url https://download.pytorch.org/whl/{wheel}," in found["VER03"].cure


def test_a_driver_that_is_too_old_and_one_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert install_command("470.82") == ""
    check = _driver("13.0", "570.86")
    assert (check.status, check.evidence) == ("failure", "570.86 for CUDA 13.0, which wants 580.65 or later")
    assert check.cure.startswith("pip install --upgrade torch --index-url https://download.pytorch.org/whl/cu126")
    assert _driver("12.6", "570.86").status == "ok"
    assert "no torch is built" in _driver("12.6", "470.82").cure
    (tmp_path / "version").write_text("nothing\0of the kind")
    for file in ("version", "absent"):
        monkeypatch.setattr(versions, "_DRIVER_FILE", tmp_path / file)
        assert driver_version() == ""
