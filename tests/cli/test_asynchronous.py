"""A whole asynchronous run from the command line; a worker and a server of it are killed, and every sample still counts once."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
from commands import Desk
from procs import wait_until

from unisono.checkpoint import open_checkpoint
from unisono.observe.events import events_path, read_events

STEPS = 400
SETTINGS = {
    "plan.sync": "dist_async",
    "launch.num_processes": 2,
    "launch.num_threads": 1,
    "launch.num_servers": 2,
    "launch.snapshot_every_s": 0.5,
    "train.steps": STEPS,
    "train.eval_every_steps": 0,
    "checkpoint.every_steps": 100,
}


def start(desk: Desk, run_dir: Path, **changes: Any) -> subprocess.Popen[str]:
    chosen = {**SETTINGS, "run.dir": run_dir, **changes}
    settings = [*desk.settings, *(f"--set={key}={value}" for key, value in chosen.items())]
    return subprocess.Popen(
        [sys.executable, "-m", "unisono", "train", *settings],
        env=os.environ | desk.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def member(launcher: subprocess.Popen[str], wanted: Callable[[psutil.Process], bool]) -> psutil.Process:
    """The one of the launch's processes that ``wanted`` says yes to."""
    (found,) = [each for each in psutil.Process(launcher.pid).children(recursive=True) if wanted(each)]
    return found


def is_rank(rank: int) -> Callable[[psutil.Process], bool]:
    def wanted(process: psutil.Process) -> bool:
        return "train" in process.cmdline() and process.environ().get("UNISONO_RANK") == str(rank)

    return wanted


def is_server(server: int) -> Callable[[psutil.Process], bool]:
    def wanted(process: psutil.Process) -> bool:
        return "unisono.kvstore.server" in process.cmdline() and process.environ().get("UNISONO_SERVER") == str(server)

    return wanted


def steps(run_dir: Path, rank: int) -> int:
    path = events_path(run_dir, rank)
    return sum(event["kind"] == "step" for event in read_events(path).events) if path.exists() else 0


@pytest.mark.full
@pytest.mark.parametrize(
    "victim", [is_rank(1), is_rank(0), is_server(0), is_server(1)], ids=["rank1", "rank0", "s0", "s1"]
)
def test_whoever_is_killed_every_sample_counts_once(
    desk: Desk, tmp_path: Path, alone: Callable[[int], float], victim: Callable[[psutil.Process], bool]
) -> None:
    run_dir = tmp_path / "run"
    launcher = start(desk, run_dir)
    wait_until(lambda: min(steps(run_dir, 0), steps(run_dir, 1)) > 40, "both workers have made steps", 90)
    member(launcher, victim).kill()
    _, said = launcher.communicate(timeout=120)
    assert launcher.returncode == 0, said
    assert "restarting" in said
    assert weight(run_dir, STEPS) == alone(STEPS)


@pytest.fixture(scope="module")
def alone(shared_desk: Desk, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], float]:
    """The weight of all samples of so many steps, as one process counts it."""

    @cache
    def counted(steps: int) -> float:
        run_dir = tmp_path_factory.mktemp("alone") / "run"
        done = shared_desk.train(run_dir, f"--set=train.steps={steps}", "--set=train.eval_every_steps=0")
        assert done.code == 0, done.err
        return weight(run_dir, steps)

    return counted


def weight(run_dir: Path, step: int) -> float:
    snapshot = open_checkpoint(run_dir / "checkpoints" / f"step-{step:08d}")
    assert snapshot.meta["state"]["step"] == step
    return float(snapshot.tensor("meter/weight_total"))


@pytest.mark.full
def test_a_stopped_run_is_at_a_step_and_goes_on(desk: Desk, tmp_path: Path, alone: Callable[[int], float]) -> None:
    run_dir = tmp_path / "run"
    launcher = start(desk, run_dir)
    wait_until(lambda: min(steps(run_dir, 0), steps(run_dir, 1)) > 20, "both workers have made steps", 90)
    launcher.send_signal(signal.SIGTERM)
    _, said = launcher.communicate(timeout=60)
    assert launcher.returncode == 75, said
    last = max(int(path.name.removeprefix("step-")) for path in (run_dir / "checkpoints").iterdir())
    assert 20 < last < STEPS
    assert 0 < weight(run_dir, last) < alone(STEPS)
    again = start(desk, run_dir)
    _, said = again.communicate(timeout=120)
    assert again.returncode == 0, said
    assert weight(run_dir, STEPS) == alone(STEPS)
    assert json.loads((run_dir / "launch.json").read_text())["attempt"] > 0


@pytest.mark.full
@pytest.mark.parametrize("how", ["torchrun", "dmlc", "dmlc with a secret"])
def test_workers_of_other_launchers_start_the_servers(
    desk: Desk, tmp_path: Path, alone: Callable[[int], float], how: str
) -> None:
    settings = {**SETTINGS, "train.steps": 6, "checkpoint.every_steps": 3, "run.dir": tmp_path / "run"}
    settings = {key: value for key, value in settings.items() if not key.startswith("launch.p")}
    arguments = ["train", *desk.settings, *(f"--set={key}={value}" for key, value in settings.items())]
    if how == "torchrun":
        python = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "unisono"]
        done = desk.process(*arguments, python=python)
        assert done.code == 0, done.err
    else:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = str(probe.getsockname()[1])
        tracker = {
            "DMLC_PS_ROOT_URI": "127.0.0.1",
            "DMLC_PS_ROOT_PORT": port,
            "DMLC_NUM_WORKER": "2",
            "DMLC_NUM_SERVER": "1",
        }
        if how == "dmlc with a secret":
            (tmp_path / "secret").write_bytes(bytes(range(32)))
            (tmp_path / "secret").chmod(0o600)
            tracker["UNISONO_SECRET_FILE"] = str(tmp_path / "secret")
        members = [{"DMLC_ROLE": role} for role in ("scheduler", "server")]
        members += [{"DMLC_ROLE": "worker", "DMLC_WORKER_ID": str(rank)} for rank in range(2)]
        with ThreadPoolExecutor(4) as pool:
            ended = list(pool.map(lambda own: desk.process(*arguments, **tracker, **own), members))
        assert [each.code for each in ended] == [0] * 4, [each.err for each in ended]
        assert ("this server exits" in ended[1].out) == (how == "dmlc")
        assert ("server 0 of 1, restart 0, listens at 127.0.0.1:" in ended[1].err) == (how != "dmlc")
    assert weight(tmp_path / "run", 6) == alone(6)
    wait_until(lambda: not [each for each in psutil.process_iter() if is_beside(each)], "no server is left behind")


def is_beside(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return "unisono.kvstore.server.child_servers" in process.cmdline()
    return False


@pytest.mark.full
@pytest.mark.parametrize("step", [4, 8])
def test_a_worker_killed_after_its_commit_leaves_nothing_to_save_again(
    desk: Desk, tmp_path: Path, alone: Callable[[int], float], step: int
) -> None:
    """The save is handed out again, in the middle of the run or at its end; the checkpoint that is there is that step's."""
    settings = {**SETTINGS, "train.steps": 8, "checkpoint.every_steps": 4, "run.dir": tmp_path / "run"}
    settings |= {"checkpoint.asynchronous": "false", "checkpoint.max_failures": 1}
    arguments = ["train", *desk.settings, *(f"--set={key}={value}" for key, value in settings.items())]
    done = desk.process(*arguments, UNISONO_FAULT=f"after_commit@{step}")  # whichever saves
    assert done.code == 0, done.err
    assert re.search(r"restarting rank [01] alone \(restart 1 of 3\)", done.err)
    assert "exists already" not in done.err
    for saved in (4, 8):
        assert weight(tmp_path / "run", saved) == alone(saved)


@pytest.mark.full
def test_saves_are_not_made_again_by_a_server_that_goes_back(
    desk: Desk, tmp_path: Path, alone: Callable[[int], float]
) -> None:
    """Its only snapshot is that of the beginning: without a replica the work since then is done again, with its saves."""
    run_dir = tmp_path / "run"
    launcher = start(desk, run_dir, **{"launch.snapshot_every_s": 60, "train.steps": 200, "checkpoint.every_steps": 10})
    wait_until(lambda: min(steps(run_dir, 0), steps(run_dir, 1)) > 60, "both workers have made steps", 90)
    member(launcher, is_server(0)).kill()
    _, said = launcher.communicate(timeout=120)
    assert launcher.returncode == 0, said
    assert "restarting server 0 alone" in said
    assert "exists already" not in said
    assert weight(run_dir, 200) == alone(200)
