"""``unisono doctor``: tables, JSON, exit codes, trainings that it starts, and hosts that it reaches over a real ssh server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import Desk, Outcome
from procs import marked, wait_until
from sshd import serve

from unisono.doctor import storage


def test_the_table_and_json(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_RINGS", "0 1")
    done = desk.here("doctor", "--run-dir", str(tmp_path))
    assert (
        "ENV02   warning  variables that were renamed or removed: NCCL_RINGS=0 1\n        try: unset NCCL_RINGS"
        in done.out
    )
    checks = desk.here("doctor", "--run-dir", str(tmp_path), "--json").json["checks"]
    assert {check["code"]: check["status"] for check in checks}["ENV02"] == "warning"


def test_a_failure_is_an_exit_code(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_SECOND_PROCESS", "print(1)")
    done = desk.here("doctor", "--run-dir", str(tmp_path))
    assert done.code == 2
    assert "DISK03  FAILURE  locks" in done.out


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        (("--nodes", "--bench"), "--nodes with --bench"),
        (("--smoke", "--ladder", "run.toml"), "--smoke with --ladder"),
        (("-n", "2"), "--processes without another option"),
        (("-n", "2", "--ladder", "run.toml"), "--processes with --ladder"),
        (("--smoke", "--hostfile", "hosts"), "--hostfile with --smoke"),
        (("--bench", "--ssh-port", "22"), "--ssh-port without --hostfile"),
        (("--ladder", "run.toml", "--run-dir", "runs"), "--run-dir with --ladder"),
    ],
)
def test_options_that_would_have_no_effect(desk: Desk, arguments: tuple[str, ...], given: str) -> None:
    done = desk.here("doctor", *arguments)
    assert done.code == 2
    assert f"unisono: {given}\n" in done.err
    assert "so:   nothing was examined" in done.err


def test_trainings_are_not_started_by_each_rank_of_a_job(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    for arguments in (("--smoke",), ("--ladder", "run.toml")):
        done = desk.here("doctor", *arguments)
        assert done.code == 2
        assert "this process is rank 1 of 2 of a job that torchrun started" in done.err


# --- trainings -------------------------------------------------------------------------------------------------------


def doctor(desk: Desk, *arguments: str, **environ: str) -> Outcome:
    return desk.process("doctor", *arguments, **environ)


def write_config(desk: Desk, folder: Path, **changes: str) -> Path:
    """A run of the small corpus in two processes, with other sizes than the smallest model."""
    folder.mkdir()
    settings = {
        "run.dir": str(folder / "runs/mine"),
        "data.corpus": str(desk.folder / "corpus"),
        "data.cache_dir": str(desk.cache / "data"),
        **changes,
    }
    numbers = {
        "data.seq_len": 16,
        "model.num_layers": 3,
        "plan.global_batch": 4,
        "plan.precision": '"fp32"',
        "launch.num_processes": 2,
    }
    lines = [*(f'{name} = "{value}"' for name, value in settings.items()), *(f"{k} = {v}" for k, v in numbers.items())]
    path = folder / "run.toml"
    path.write_text("\n".join(lines))
    return path


@pytest.mark.full
def test_own_data_that_are_missing_are_the_second_rung(desk: Desk, tmp_path: Path) -> None:
    config = write_config(desk, tmp_path / "own", **{"data.corpus": str(tmp_path / "absent")})
    done = doctor(desk, "--ladder", str(config))
    assert done.code == 2, done.out + done.err
    lines = done.out.splitlines()
    assert lines[0].startswith("RUNG01  ok       a small model on made-up text, in one process: ")
    assert lines[1].startswith("RUNG02  FAILURE  own data: ")
    assert str(tmp_path / "absent") in lines[1]
    assert any(line.startswith("          rule: ") for line in lines)
    assert lines[-1] == "the first rung that fails: RUNG02, own data"
    assert not any("RUNG03" in line for line in lines)
    assert [path.name for path in (tmp_path / "own").iterdir()] == ["run.toml"]


@pytest.mark.full
def test_ranks_that_fail_are_the_fourth_rung(desk: Desk, tmp_path: Path) -> None:
    config = write_config(desk, tmp_path / "own")
    done = doctor(desk, "--ladder", str(config), "--json", UNISONO_FAULT="all_reduce:1")
    assert done.code == 2, done.out + done.err
    found = done.json
    assert found["first"] == "RUNG04"
    assert [check["code"] for check in found["checks"]] == ["RUNG01", "RUNG02", "RUNG03", "RUNG04"]
    assert "rank 1" in found["checks"][-1]["evidence"]
    assert "signal 9" in found["checks"][-1]["evidence"]
    assert [path.name for path in (tmp_path / "own").iterdir()] == ["run.toml"]


@pytest.mark.full
def test_a_configuration_that_works(desk: Desk, tmp_path: Path) -> None:
    config = write_config(desk, tmp_path / "own")
    done = doctor(desk, "--ladder", str(config), "--json")
    assert done.code == 0, done.out + done.err
    checks = done.json["checks"]
    assert [check["code"] for check in checks] == [*(f"RUNG0{number}" for number in range(1, 6)), "SAVE01"]
    assert checks[-2]["evidence"] == "left out: the same training as RUNG04"
    assert "takes" in checks[-1]["evidence"]
    assert "failure" not in {check["status"] for check in checks}
    assert [path.name for path in (tmp_path / "own").iterdir()] == ["run.toml"]


SLOW_DATA = """
import time

import numpy as np
from torch import nn

from unisono import Components, RunConfig

ROWS = np.random.default_rng(0).random((256, 4), dtype=np.float32)


class Points:
    fingerprint = "points-1"

    def __len__(self):
        return len(ROWS)

    def read(self, indices):
        time.sleep(0.02 * len(indices))
        return {"inputs": ROWS[indices], "targets": ROWS[indices].sum(1, keepdims=True)}


def config():
    parts = Components(
        model=lambda run: nn.Linear(4, 1), objective=nn.MSELoss(), data=lambda run: (Points(), Points())
    )
    return RunConfig(components=parts)
"""


@pytest.mark.full
def test_own_data_that_are_slow_are_found_on_the_rung_of_the_whole_model(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW_DATA)
    done = doctor(desk, "--ladder", str(tmp_path / "slow.py"), "--json")
    assert (done.code, done.json["first"]) == (0, "RUNG02"), done.out + done.err
    checks = {check["code"]: check for check in done.json["checks"]}
    assert [code for code, check in checks.items() if check["status"] == "warning"] == ["RUNG02"]
    assert "DATA01: training waits for data, costs " in checks["RUNG02"]["evidence"]
    same = "left out: the same training as RUNG02"
    assert [checks[f"RUNG0{number}"]["evidence"] for number in (3, 4, 5)] == [same] * 3
    assert list(checks)[-1] == "SAVE01"


def test_a_configuration_that_is_wrong_is_not_tried(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("model.num_layrs = 3\n")
    done = desk.here("doctor", "--ladder", str(tmp_path / "run.toml"))
    assert (done.code, done.out) == (2, "")
    assert "num_layers" in done.err


@pytest.mark.full
def test_the_smoke_run(desk: Desk, tmp_path: Path) -> None:
    done = doctor(desk, "--smoke", "--run-dir", str(tmp_path / "runs"))
    assert done.code == 0, done.out + done.err
    first, second, third = done.out.splitlines()
    assert first.startswith("SMOKE01 ok       training in one process: losses ")
    assert second.startswith("SMOKE02 ok       training on 2 ranks: losses ")
    assert second.endswith(" as in one process")
    assert third.startswith("SMOKE03 ok       saving and resuming: losses ")
    assert third.endswith(" as in one process")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_a_rank_that_dies_in_the_smoke_run(desk: Desk, tmp_path: Path) -> None:
    done = doctor(desk, "--smoke", "--run-dir", str(tmp_path), UNISONO_FAULT="all_reduce:1")
    assert done.code == 2
    assert "SMOKE02 FAILURE  training on 2 ranks: " in done.out
    assert "rank 1" in done.out
    assert "SMOKE03 ok" in done.out


# --- several ranks and hosts -----------------------------------------------------------------------------------------


@pytest.mark.full
def test_the_bench_stores_what_it_measures(desk: Desk, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    done = doctor(desk, "--bench", "--run-dir", str(tmp_path / "runs"), XDG_CACHE_HOME=cache)
    assert "BENCH01" in done.out, done.err
    assert done.out.splitlines()[-1] == f"stored in {cache}/unisono/calibration.json"
    again = doctor(desk, "--bench", "--run-dir", str(tmp_path / "runs"), "--json", XDG_CACHE_HOME=cache).json
    first = again["checks"][0]
    assert "of what was measured before" in first["evidence"]
    assert {rate["transport"] for rate in again["figures"]["links"]} == {"gloo", "shared memory"}
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


@pytest.mark.full
def test_hosts_over_ssh(desk: Desk, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with serve(tmp_path_factory.mktemp("sshd")) as sshd:
        hosts = tmp_path / "hosts"
        hosts.write_text(f"127.0.0.1 port={sshd.port}\n127.0.0.2 port={sshd.port}\n")
        arguments = ["--nodes", "--hostfile", str(hosts), "--run-dir", str(tmp_path / "runs")]
        path = f"{sshd.environ['PATH']}"
        done = doctor(desk, *arguments, PATH=path)
        assert done.code == 0, done.out + done.err
        assert "alike: names of the hosts, ssh and the interpreter" in done.out
        found = doctor(desk, *arguments, "--json", PATH=path).json["checks"]
        by_code = {check["code"]: check for check in found}
        assert by_code["JOB03"]["evidence"].startswith("2 hosts have ")
        assert by_code["NODE01"]["evidence"] == "alike on 2 ranks of 2 hosts"
        assert by_code["NODE06"]["evidence"] == f"all hosts see {tmp_path}"
        hosts.write_text(f"127.0.0.1 port={sshd.port}\nlocalhost port={sshd.port}\nno-such-host.invalid\n")
        done = doctor(desk, *arguments, PATH=path)
        assert done.code == 2
        assert "JOB02   FAILURE  names of the hosts: no-such-host.invalid: " in done.out
        # localhost is not among the known hosts, and nobody is asked whether it should be
        assert "localhost: " in done.out
        assert "Host key verification failed" in done.out
        assert "NODE01" not in done.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hosts"]
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".unisono")]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_examination_that_is_ended_leaves_no_process(desk: Desk, tmp_path: Path, number: signal.Signals) -> None:
    """After SIGTERM no folder either; SIGKILL cannot be answered by a process itself."""
    mark = f"MARK_OF_TEST={tmp_path}"
    command = [sys.executable, "-m", "unisono", "doctor", "--smoke", f"--run-dir={tmp_path}"]
    process = subprocess.Popen(
        command,
        cwd=desk.folder,
        env=desk.child_environ(MARK_OF_TEST=str(tmp_path)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: any(tmp_path.glob(".unisono-doctor-*/alone")), "the first training", 60)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    wait_until(lambda: marked(mark) == [], "the end of the training")
    if number == signal.SIGTERM:
        assert (process.returncode, said.splitlines()[-1]) == (75, "unisono: interrupted")
        assert list(tmp_path.iterdir()) == []
