"""``unisono launch`` as a user types it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

PLACE = """
import os
from unisono.dist import job_from_environ
job = job_from_environ(os.environ)
print(job.source, job.role, job.rank, job.world_size, job.local_rank, job.local_world, job.master_addr, os.environ["A"],
      os.environ["GLOO_SOCKET_IFNAME"], os.environ["OMP_NUM_THREADS"], flush=True)
"""
ALL_REDUCE = """
import os, torch
from unisono.dist import job_from_environ, join_world
world = join_world(job_from_environ(os.environ), device_type="cpu", timeout_s=60)
print("sum", world.all_reduce(torch.tensor([world.rank + 1.0])).item())
world.close()
"""


def _launch(
    arguments: Sequence[str], folder: Path, environ: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "unisono", "launch", *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | (environ or {}),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_two_ranks_here_and_what_a_dry_run_shows_of_them(tmp_path: Path) -> None:
    (tmp_path / "place.py").write_text(PLACE)
    arguments = ["-n", "2", "--env", "A=it's", "--interface", "lo", "--dir", "run"]
    arguments += ["--env", "OMP_NUM_THREADS=7"]
    ended = _launch([*arguments, sys.executable, "place.py"], tmp_path)
    assert ended.returncode == 0, ended.stderr
    log = (tmp_path / "run/logs/rank-1.attempt-0.log").read_text()
    record = json.loads((tmp_path / "run/launch.json").read_text())
    assert (record["interface"], record["interface_why"]) == ("lo", "asked for with --interface")
    assert ended.stdout.startswith("unisono worker 0 2 0 2 127.0.0.1 it's lo 7\n")

    shown = _launch([*arguments, "--dry-run", "--", sys.executable, "place.py"], tmp_path)
    assert shown.returncode == 0, shown.stderr
    lines = [line for line in shown.stdout.splitlines() if not line.startswith("#")]
    assert len(lines) == 2
    # run by hand, each line prints what the launched process did
    environ = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PATH": os.environ["PATH"]}
    for line, expected in zip(lines, (ended.stdout, log), strict=True):
        by_hand = subprocess.run(
            shlex.split(line), cwd=tmp_path, env=environ, capture_output=True, text=True, check=True
        )
        assert by_hand.stdout == expected
    assert not (tmp_path / "runs").exists()


@pytest.mark.full
def test_launches_started_together_have_folders_of_their_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as threads:
        ended = list(threads.map(lambda _: _launch(["-n", "1", "--", "true"], tmp_path), range(2)))
    assert [launch.returncode for launch in ended] == [0, 0], [launch.stderr for launch in ended]
    folders = list((tmp_path / "runs").iterdir())
    assert len(folders) == 2
    assert all((folder / "launch.json").is_file() for folder in folders)


@pytest.mark.full
def test_what_a_dry_run_shows_is_a_job_when_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ALL_REDUCE)
    shown = _launch(["-n", "2", "--dry-run", "--json", "--", sys.executable, "train.py"], tmp_path)
    processes = [
        subprocess.Popen(
            each["command"],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | each["environ"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            text=True,
        )
        for each in json.loads(shown.stdout)["processes"]
    ]
    assert [process.communicate(timeout=90)[0] for process in processes] == ["sum 3.0\n", "sum 3.0\n"]


def test_a_dry_run_over_ssh_contacts_nobody(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("n1 slots=1 port=2222\nn2 slots=2\n")
    bin_folder = _fake_ssh(tmp_path)
    arguments = [
        "--hostfile",
        "hosts",
        "--dir",
        "r",
        "--servers",
        "1",
        "--env",
        "A=1",
        "--dry-run",
        "--json",
        "--",
        "train",
        "--x",
    ]
    secret = {"AWS_SECRET_ACCESS_KEY": "canary", "PATH": f"{bin_folder}:{os.environ['PATH']}"}
    shown = _launch(arguments, tmp_path, secret)
    assert shown.returncode == 0, shown.stderr
    told = json.loads(shown.stdout)
    assert [(each["name"], each["host"]) for each in told["processes"]] == [
        *(("server 0", "n1"), ("rank 0", "n1"), ("rank 1", "n2"), ("rank 2", "n2"))
    ]
    server, first, *_ = told["processes"]
    assert server["command"][1:] == ["-P", "-m", "unisono.kvstore.server"]
    assert server["environ"]["UNISONO_ROLE"] == "server"
    assert (server["environ"]["UNISONO_SERVER"], server["environ"]["UNISONO_SERVERS"]) == ("0", "1")
    assert server["environ"]["UNISONO_SERVER_ADDRESSES"] == first["environ"]["UNISONO_SERVER_ADDRESSES"]
    # state outlives a server that is restarted
    assert server["environ"]["UNISONO_SNAPSHOTS"] == str(tmp_path / "r/servers")
    assert "UNISONO_SNAPSHOTS" not in first["environ"]
    assert first["command"] == ["train", "--x"]
    assert told["hosts"][0]["command"][-4:] == ["2222", "--", "n1", "exec /bin/sh -s"]
    assert "export A=1\n" in told["hosts"][1]["standard_input"]
    assert "canary" not in shown.stdout
    assert not (tmp_path / "called").exists()


@pytest.mark.parametrize("name", ["-oProxyCommand=touch\tx", "n1\n$(touch x)"])
def test_a_hosts_file_is_no_script(name: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(name)
    environ = {"PATH": f"{_fake_ssh(tmp_path)}:{os.environ['PATH']}"}
    ended = _launch(["--hostfile", "hosts", "--", "train"], tmp_path, environ)
    assert ended.returncode == 2
    assert "rule: a name has letters, digits and . _ : -, and begins with a letter or digit" in ended.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "hosts"]


def _fake_ssh(folder: Path) -> Path:
    """Whoever calls it leaves a trace."""
    (folder / "bin").mkdir()
    (folder / "bin/ssh").write_text(f"#!/bin/sh\ntouch {folder / 'called'}\nexit 255\n")
    (folder / "bin/ssh").chmod(0o700)
    return folder / "bin"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--mpirun-args=--map-by node"], "--mpirun-args without --mpirun\n  rule: they are arguments of mpirun"),
        (["--mpirun", "--mpirun-args=-x 'A"], '--mpirun-args "-x \'A": No closing quotation\n  rule: it is divided'),
        (["--mpirun", "--srun"], "--mpirun and --srun\n  rule: one of them starts the processes"),
        (["--srun", "--servers", "1"], "--srun with --servers\n  rule: --srun starts workers only"),
        (["--srun", "--hostfile", "h"], "--srun with --hostfile\n  rule: SLURM knows its hosts"),
        (["--ssh-port", "22"], "--ssh-port without ssh\n  rule: it belongs to --hostfile"),
        (["--port", "2"], "--port without --hostfile\n  rule: ranks of one host meet at a port the launcher holds"),
        (["--interface", "ib7"], "--interface 'ib7' on host"),
        (["--env", "HF_TOKEN=canary"], "--env 'HF_TOKEN'\n  rule: credentials are never forwarded"),
        (["-n", "1" + "0" * 20], "0 processes on this host\n  rule: a host has at most 4096 processes of a job"),
        (
            ["--servers", "5000"],
            "5000 servers\n  rule: a host has at most 4096 processes of a job, and a job as many servers",
        ),
        (["--elastic"], "--elastic without --servers\n  rule: workers of dist_async alone can leave and join"),
        (
            ["--join", "x", "--servers", "1"],
            "--join with --servers, --port, --hostfile, --mpirun or --srun\n  rule: workers join",
        ),
        (["--first-rank", "3"], "--first-rank without --join\n  rule: ranks begin at 0"),
        (["--hostfile", "absent"], "hosts file absent, cannot be read: No such file or directory"),
    ],
)
def test_what_is_refused(arguments: list[str], text: str, tmp_path: Path) -> None:
    ended = _launch([*arguments, "--", "train"], tmp_path)
    assert ended.returncode == 2
    assert text in ended.stderr
    assert "canary" not in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_server_of_a_synchronous_run_leaves(tmp_path: Path) -> None:
    # as MXNet's launch.py -s 1 starts it
    dmlc = {"DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "1", "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": "9"}
    dmlc |= {"DMLC_ROLE": "server", "DMLC_TASK_ID": "1"}
    ended = subprocess.run(
        [sys.executable, "-m", "unisono", "train", "--set", "run.dir=r"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | dmlc,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (
        ended.stdout == "dist_sync needs no servers: gradients are all-reduced among the workers; this process exits\n"
    )
    assert list(tmp_path.iterdir()) == []
