"""Whole asynchronous runs whose values travel under TLS; a server that a worker started is killed and comes back."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from certificates import Authority
from commands import Desk
from procs import wait_until

from unisono.checkpoint import open_checkpoint
from unisono.observe.events import events_path, read_events

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificates with openssl")

ASYNCHRONOUS = {"plan.sync": "dist_async", "train.eval_every_steps": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Authority(tmp_path_factory.mktemp("tls") / "jobs").host("n1")


def train(desk: Desk, **settings: Any) -> list[str]:
    return ["train", *desk.settings, *(f"--set={key.replace('__', '.')}={value}" for key, value in settings.items())]


def weight(run_dir: Path, step: int) -> float:
    return float(open_checkpoint(run_dir / "checkpoints" / f"step-{step:08d}").tensor("meter/weight_total"))


def test_tls_that_would_act_on_nothing_is_refused(desk: Desk, folder: Path, tmp_path: Path) -> None:
    done = desk.here(*train(desk, run__dir=tmp_path / "run", launch__tls=folder), "--debug")
    assert done.code == 2
    assert f"launch.tls '{folder}' with plan.sync 'local'" in done.err
    assert "Gloo and NCCL encrypt nothing" in done.err
    done = desk.here("launch", "--tls", str(folder), "--", "true")
    assert done.code == 2
    assert "--tls without --servers" in done.err


def test_two_folders_of_certificates_for_one_process_are_refused(
    desk: Desk, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNISONO_TLS", str(tmp_path))
    settings = {**ASYNCHRONOUS, "run.dir": tmp_path / "run", "launch.tls": folder}
    done = desk.here(*train(desk, **settings), "--debug")
    assert done.code == 2
    assert f"launch.tls '{folder}' where UNISONO_TLS is '{tmp_path}'" in done.err
    assert f"try:  launch.tls={tmp_path}, or leave one out" in done.err
    launch = ("launch", "-n", "1", "--servers", "1", "--tls", str(folder), f"--dir={tmp_path / 'launch'}")
    for more in ((), ("--dry-run",)):
        done = desk.here(*launch, *more, "--", "true")
        assert done.code == 2
        assert f"launch.tls '{folder}' where UNISONO_TLS is '{tmp_path}'" in done.err
    assert not (tmp_path / "launch").exists()
    monkeypatch.delenv("UNISONO_TLS")
    done = desk.here(*launch, f"--env=UNISONO_TLS={tmp_path}", "--", "true")
    assert (done.code, done.err.count("a process has one folder of certificates")) == (2, 1)


def test_a_launch_tells_all_its_processes_the_folder(desk: Desk, folder: Path) -> None:
    shown = desk.here("launch", "-n", "2", "--servers", "1", "--tls", str(folder), "--dry-run", "--", "true")
    assert shown.code == 0, shown.err
    assert shown.out.count(f"UNISONO_TLS={folder}") == 3


@pytest.mark.full
def test_a_launch_under_tls_and_a_worker_of_another_authority(desk: Desk, folder: Path, tmp_path: Path) -> None:
    run = train(desk, **ASYNCHRONOUS, run__dir=tmp_path / "run")
    launch = ["launch", "-n", "1", "--servers", "1", "--tls", str(folder), f"--dir={tmp_path / 'launch'}", "--"]
    done = desk.process(*launch, sys.executable, "-m", "unisono", *run)
    assert done.code == 0, done.err
    assert "restart 0, listens at 127.0.0.1:" in done.out + done.err
    assert (done.out + done.err).count(" under TLS") == 1
    weight(tmp_path / "run", 4)
    other = Authority(tmp_path / "others").host("n1")
    done = desk.process(
        *launch, "env", f"UNISONO_TLS={other}", sys.executable, "-m", "unisono", *run, "--set=train.steps=8"
    )
    assert done.code == 2, done.err
    assert "the certificate of the server at 127.0.0.1:" in done.out + done.err
    assert "restarting" not in done.err


@pytest.mark.full
def test_a_server_beside_a_worker_comes_back(desk: Desk, folder: Path, tmp_path: Path) -> None:
    steps, run_dir = 200, tmp_path / "run"
    settings = {**ASYNCHRONOUS, "launch.num_servers": 2, "launch.tls": folder, "launch.snapshot_every_s": 0.5}
    run = train(desk, **settings, **{"train.steps": steps, "checkpoint.every_steps": 100, "run.dir": run_dir})
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "unisono", *run]
    with subprocess.Popen(
        [sys.executable, *command],
        env=os.environ | desk.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as torchrun:
        try:
            wait_until(lambda: made(run_dir) > 40, "a worker has made steps", 90)
            servers = [each for each in psutil.Process(torchrun.pid).children(recursive=True) if is_beside(each)]
            assert len(servers) == 2
            for server in servers:
                server.kill()
            said, _ = torchrun.communicate(timeout=120)
        finally:
            torchrun.kill()
    assert torchrun.returncode == 0, said
    for server in (0, 1):
        assert f"server {server} ended with -9 and is started again (1 of 3)" in said
        assert f"server {server} of 2, restart 1, listens at 127.0.0.1:" in said
    alone = desk.train(tmp_path / "alone", f"--set=train.steps={steps}", "--set=train.eval_every_steps=0")
    assert alone.code == 0, alone.err
    assert weight(run_dir, steps) == weight(tmp_path / "alone", steps)
    wait_until(lambda: not [each for each in psutil.process_iter() if is_beside(each)], "no server is left behind")


def made(run_dir: Path) -> int:
    path = events_path(run_dir, 0)
    return sum(event["kind"] == "step" for event in read_events(path).events) if path.exists() else 0


def is_beside(process: psutil.Process) -> bool:
    try:
        return "unisono.kvstore.server.child_servers" in process.cmdline()
    except psutil.Error:
        return False
