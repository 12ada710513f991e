"""Each check sees what it is for, says the cure, and says nothing on a host where all is well."""

from __future__ import annotations

import os
import re
import resource
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from unisono.doctor import Check, examine
from unisono.doctor import host as host_checks
from unisono.doctor import storage as storage_checks
from unisono.doctor.environment import check_environment
from unisono.doctor.host import check_host
from unisono.doctor.network import check_network, infiniband_ports
from unisono.doctor.storage import check_storage
from unisono.doctor.versions import check_versions


def by_code(checks: Iterable[Check]) -> dict[str, Check]:
    return {check.code: check for check in checks}


@pytest.mark.parametrize(
    ("environ", "code", "evidence", "cure"),
    [
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "ENV01", "CUDA_LAUNCH_BLOCKING=1: every", "unset CUDA_LAUNCH_BLOCKING"),
        (
            {"NCCL_DEBUG": "info", "NCCL_P2P_DISABLE": "1"},
            "ENV01",
            "NCCL_P2P_DISABLE=1",
            "unset NCCL_DEBUG NCCL_P2P_DISABLE",
        ),
        ({"NCCL_MAX_NRINGS": "4"}, "ENV02", "NCCL_MAX_NRINGS=4", "NCCL_MAX_CTAS instead of NCCL_MAX_NRINGS"),
        ({"NCCL_RINGS": "0 1"}, "ENV02", "NCCL_RINGS=0 1", "unset NCCL_RINGS"),
        ({"NCCL_MAX_NCHANNELS": "8"}, "ENV02", "NCCL_MAX_NCHANNELS=8", "NCCL_MAX_CTAS instead of NCCL_MAX_NCHANNELS"),
        ({"NCCL_SOCKET_IFNAMES": "eth0"}, "ENV04", "NCCL_SOCKET_IFNAMES=eth0", "NCCL_SOCKET_IFNAME instead of"),
        ({"OMP_NUM_THREADS": "4096"}, "ENV03", "OMP_NUM_THREADS=4096", "more than the"),
        ({"OMP_NUM_THREADS": "many"}, "ENV03", "OMP_NUM_THREADS=many", "a number of threads"),
        ({"OMP_NUM_THREADS": "000"}, "ENV03", "OMP_NUM_THREADS=000", "a number of threads"),
        ({"OMP_NUM_THREADS": "9" * 5000}, "ENV03", "OMP_NUM_THREADS=999", "more than the"),
        (
            {"NCCL_SOCKET_IFNAMES": "http://u:pw@h"},
            "ENV04",
            "IFNAMES=http://[redacted]@h",
            "NCCL_SOCKET_IFNAME instead",
        ),
    ],
)
def test_variables(environ: Mapping[str, str], code: str, evidence: str, cure: str) -> None:
    found = by_code(check_environment(environ))
    assert found[code].status == "warning"
    assert evidence in found[code].evidence
    assert cure in found[code].cure
    assert {other.status for other in found.values() if other.code != code} == {"ok"}


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"CUDA_LAUNCH_BLOCKING": "0", "NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "1", "NCCL_P2P_LEVEL": "NVL"},
        {"NCCL_UCX_TLS": "all", "NCCL_IB_HCA": "mlx5", "NCCL_OF_A_PLUGIN": "1", "TORCH_NCCL_BLOCKING_WAIT": "1"},
    ],
)
def test_variables_that_are_well(environ: Mapping[str, str]) -> None:
    assert [check.status for check in check_environment(environ)] == ["ok"] * 4


def test_shared_memory_that_is_absent(tmp_path: Path) -> None:
    check = by_code(check_host(shared_memory=tmp_path / "absent"))["HOST01"]
    assert (check.status, "--ipc=host" in check.cure) == ("failure", True)


def test_shared_memory_that_is_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage: Any = type(psutil.disk_usage("/"))(64 << 20, 0, 64 << 20, 0)
    monkeypatch.setattr(host_checks.shutil, "disk_usage", lambda folder: usage)
    check = by_code(check_host(shared_memory=tmp_path))["HOST01"]
    assert (check.status, "0.0625 GiB, 0.0625 free" in check.evidence) == ("failure", True)


def test_a_low_limit_of_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        check = by_code(check_host())["HOST02"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (check.status, check.evidence.startswith("1,024, at most")) == ("warning", True)
    assert check.cure.startswith("ulimit -n ")


def test_a_limit_of_open_files_that_only_the_administrator_can_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_checks.resource, "getrlimit", lambda _: (1024, 1024))
    check = by_code(check_host())["HOST02"]
    assert (check.status, "limits.conf" in check.cure) == ("warning", True)


@pytest.mark.skipif(
    (psutil.cpu_count(logical=False) or 1) < 2, reason="one core: it cannot be pinned to a part of them"
)
def test_a_pinned_process() -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        check = by_code(check_host())["HOST03"]
    finally:
        os.sched_setaffinity(0, allowed)
    assert check.status == "warning"
    assert check.evidence.startswith("1 of ")
    assert "srun --cpus-per-task" in check.cure


@pytest.mark.parametrize(
    ("state", "status", "evidence"), [(5, "warning", "not synchronised"), (0, "ok", "synchronised")]
)
def test_the_clock(monkeypatch: pytest.MonkeyPatch, state: int, status: str, evidence: str) -> None:
    assert host_checks._clock_state() in (None, *range(6))
    monkeypatch.setattr(host_checks, "_clock_state", lambda: state)
    check = by_code(check_host())["HOST06"]
    assert (check.status, check.evidence) == (status, evidence)


def test_a_package_for_another_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert by_code(check_versions())["VER02"].status == "ok"
    info = tmp_path / "torchvision-0.15.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.15.0\nRequires-Dist: torch==2.0.0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    check = by_code(check_versions())["VER02"]
    assert (check.status, check.evidence) == ("failure", "torchvision 0.15.0 wants torch==2.0.0")
    assert check.cure.startswith("pip install --upgrade torchvision")


def test_storage_of_a_folder_that_does_not_exist_yet(tmp_path: Path) -> None:
    found = by_code(check_storage(tmp_path / "runs/mine"))
    assert [found[code].status for code in ("DISK01", "DISK03")] == ["ok", "ok"]
    assert str(tmp_path) in found["DISK02"].evidence
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(storage_checks.tempfile, "TemporaryDirectory", refuse)
    check = by_code(check_storage(tmp_path))["DISK02"]
    assert (check.status, "Permission denied" in check.evidence) == ("failure", True)


def test_locks_that_keep_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_checks, "_SECOND_PROCESS", "print(1)")
    check = by_code(check_storage(tmp_path))["DISK03"]
    assert (check.status, "lockd" in check.cure) == ("failure", True)


def test_a_name_that_leads_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    info = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("192.0.2.7", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: info)
    check = by_code(check_network())["NET01"]
    assert (check.status, "192.0.2.7" in check.evidence, "/etc/hosts" in check.cure) == ("failure", True, True)


def test_a_name_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    check = by_code(check_network())["NET01"]
    assert (check.status, "Name or service not known" in check.evidence) == ("warning", True)


@pytest.mark.parametrize(
    ("states", "status"),
    [
        ({"mlx5_0/ports/1": "4: ACTIVE", "mlx5_1/ports/1": "1: DOWN"}, "ok"),
        ({"mlx5_0/ports/1": "1: DOWN", "mlx5_1/ports/1": "2: INIT"}, "warning"),
        ({"mlx5_0/ports/1": ""}, "warning"),
    ],
)
def test_ports_of_infiniband(tmp_path: Path, states: Mapping[str, str], status: str) -> None:
    for place, state in states.items():
        (tmp_path / place).mkdir(parents=True)
        if state:
            (tmp_path / place / "state").write_text(f"{state}\n")
            (tmp_path / place / "rate").write_text("100 Gb/sec (4X EDR)\n")
    (check,) = infiniband_ports(tmp_path)
    assert (check.code, check.status, "subnet manager" in check.cure) == ("NET03", status, status != "ok")
    if status == "ok":
        assert check.evidence.startswith("mlx5_0 port 1: ACTIVE, 100 Gb/sec (4X EDR); mlx5_1 port 1: DOWN")


def test_a_host_without_infiniband_has_no_row_of_it(tmp_path: Path) -> None:
    assert list(infiniband_ports(tmp_path / "nothing")) == []


def test_an_examination_has_each_code_once_and_a_cure_for_each_trouble(tmp_path: Path) -> None:
    checks = examine(tmp_path, {"NCCL_RINGS": "1"})
    codes = [check.code for check in checks]
    assert len(codes) == len(set(codes)) >= 14
    assert all(check.evidence and (check.status == "ok") == (not check.cure) for check in checks)
    assert list(tmp_path.iterdir()) == []


def test_the_page_has_all_checks() -> None:
    root = Path(__file__).parents[2]
    source = "".join(path.read_text() for path in sorted((root / "src/unisono/doctor").glob("*.py")))
    page = (root / "docs/doctor.md").read_text()
    assert set(re.findall("`([A-Z]+[0-9]{2})`", page)) == set(re.findall('"([A-Z]+[0-9]{2})"', source))
