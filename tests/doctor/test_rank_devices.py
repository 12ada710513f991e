"""More ranks on a host than accelerators: a run would not begin, and no figure of the CPU stands for one of a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from fake_device import FakeDevice, in_place_of_the_cpu, installed
from pool import Pool

from unisono.doctor import examine, rank_devices, ranks, smoke
from unisono.doctor.rank_devices import HostRanks, check_own_ranks, check_rank_devices, default_ranks, gather_host_ranks
from unisono.doctor.ranks import RankExamination

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "h"} | {
    "MASTER_PORT": "29500"
}
STEP = {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "6", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7"} | {
    "SLURM_STEP_TASKS_PER_NODE": "3(x2)",
    "SLURM_STEP_NODELIST": "n[1-2]",
}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "4(x2)"}


@pytest.mark.parametrize(
    ("environ", "status", "evidence"),
    [
        (TORCHRUN, "failure", "this host: 2 ranks, 1 device"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}, "ok", "this host: 1 rank, 1 device"),
        (STEP, "failure", "this host: 3 ranks, 1 device"),
        (BATCH, "warning", "srun starts 4 ranks on this host, which has 1 device"),
        (BATCH | {"SLURM_TASKS_PER_NODE": "1(x8)"}, "ok", "srun starts 1 rank on this host, which has 1 device"),
    ],
)
def test_ranks_of_a_job_and_devices_of_this_host(environ: Mapping[str, str], status: str, evidence: str) -> None:
    with in_place_of_the_cpu(FakeDevice()):
        (check,) = check_own_ranks(environ)
    assert (check.code, check.status, check.evidence) == ("DEV10", status, evidence)
    assert ("launch.num_processes" in check.cure) == (status != "ok")


@pytest.mark.parametrize("environ", [{}, {"RANK": "many"}, {"SLURM_TASKS_PER_NODE": "?"}])
def test_a_process_that_is_in_no_job(environ: Mapping[str, str]) -> None:
    with in_place_of_the_cpu(FakeDevice()):
        assert list(check_own_ranks(environ)) == []


@pytest.mark.parametrize("environ", [TORCHRUN, STEP, BATCH])
def test_a_host_without_accelerators_takes_any_number_of_ranks(environ: Mapping[str, str]) -> None:
    with installed():
        assert list(check_own_ranks(environ)) == []


def test_an_examination_has_it(tmp_path: Path) -> None:
    with in_place_of_the_cpu(FakeDevice()):
        found = {check.code: check.status for check in examine(tmp_path, TORCHRUN)}
    assert found["DEV10"] == "failure"


def test_hosts_of_a_job() -> None:
    hosts = [HostRanks(host=f"n{number}", ranks=8, devices=8) for number in range(8)]
    (check,) = check_rank_devices(hosts)
    assert (check.status, check.evidence.endswith("n3: 8 ranks, 8 devices; and 4 more hosts")) == ("ok", True)
    (check,) = check_rank_devices(
        [*hosts, HostRanks(host="b", ranks=8, devices=4), HostRanks(host="c", ranks=1, devices=0)]
    )
    assert (check.status, check.evidence) == ("failure", "b: 8 ranks, 4 devices; c: 1 rank, 0 devices")
    assert list(check_rank_devices([replace(each, devices=0) for each in hosts])) == []


def measured(job: Any, run_dir: str, kind: Literal["nodes", "bench"]) -> list[dict[str, Any]] | None:
    with in_place_of_the_cpu(FakeDevice()):
        report = ranks._examine_as_rank(job, RankExamination(kind=kind, run_dir=run_dir))
    return None if report is None else [check.to_json() for check in report.checks]


@pytest.mark.parametrize(("kind", "count"), [("bench", 1), ("nodes", 7)])
def test_ranks_that_share_a_device_are_said_and_not_measured(tmp_path: Path, pool: Pool, kind: str, count: int) -> None:
    checks, other = pool.run(measured, str(tmp_path), kind, joined=False)
    assert other is None
    assert len(checks) == count
    assert (checks[0]["code"], checks[0]["status"]) == ("DEV10", "failure")
    assert checks[0]["evidence"].endswith(": 2 ranks, 1 device")


def gathered(world: Any) -> list[dict[str, Any]]:
    return [asdict(each) for each in gather_host_ranks(world)]


def test_each_host_is_counted_once(pool: Pool) -> None:
    first, second = pool.run(gathered)
    assert first == second
    assert [(each["ranks"], each["devices"]) for each in first] == [(2, 0)]


@pytest.mark.parametrize(("devices", "count"), [(0, 2), (1, 1), (4, 4)])
def test_how_many_ranks_are_examined(monkeypatch: pytest.MonkeyPatch, devices: int, count: int) -> None:
    monkeypatch.setattr(rank_devices, "count_accelerators", lambda: devices)
    assert default_ranks() == count


def test_one_device_trains_on_no_several_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def train(run_dir: Path, arguments: object, **options: object) -> Any:
        started.append(run_dir.name)
        return SimpleNamespace(code=0, trouble="", losses=lambda: [3.0, 2.0, 1.0])

    monkeypatch.setattr(smoke, "train_child", train)
    monkeypatch.setattr(rank_devices, "count_accelerators", lambda: 1)
    found = {check.code: check for check in smoke.smoke(tmp_path)}
    assert started == ["alone"]
    assert (found["SMOKE02"].status, found["SMOKE02"].evidence) == ("ok", "left out: one rank")
