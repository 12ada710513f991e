"""Jobs that mpirun and srun start, by the real ones, and the command lines we hand over to."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from slurm import cluster
from tools import missing

from unisono.errors import LaunchError
from unisono.launch import LaunchOptions
from unisono.launch.mpi_slurm import mpirun, srun

ALL_REDUCE = """
import os, torch
from unisono.dist import job_from_environ, join_world
job = job_from_environ(os.environ)
world = join_world(job, device_type="cpu", timeout_s=60)
total = world.all_reduce(torch.tensor([float(job.rank + 1)])).item()
print(f"rank {job.rank} by {job.source}: sum {total} {os.environ['CHOSEN']} {os.environ.get('MY_TOKEN')}\\n", end="", flush=True)
world.close()
"""
# Open MPI refuses to run as root until it is told twice
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def _launch(arguments: Sequence[str], environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "unisono", "launch", *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "MY_TOKEN": "canary"} | environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def _script(folder: Path) -> str:
    (folder / "train.py").write_text(ALL_REDUCE)
    return str(folder / "train.py")


@pytest.mark.full
@pytest.mark.skipif(bool(missing("mpirun")), reason="openmpi-bin is not installed")
def test_two_ranks_by_mpirun(tmp_path: Path) -> None:
    ended = _launch(["--mpirun", "-n", "2", "--env", "CHOSEN=it's", "--", sys.executable, _script(tmp_path)], AS_ROOT)
    assert ended.returncode == 0, ended.stderr
    said = {line for line in ended.stdout.splitlines() if line}
    # mpirun hands its whole environment to ranks of its own host; what is forwarded matters to the others
    assert said == {f"rank {rank} by openmpi: sum 3.0 it's canary" for rank in (0, 1)}


@pytest.mark.full
@pytest.mark.skipif(bool(missing("mpirun")), reason="openmpi-bin is not installed")
def test_a_rank_that_fails_under_mpirun_fails_the_job(tmp_path: Path) -> None:
    (tmp_path / "fail.py").write_text(
        "import os, sys; sys.exit(76 if os.environ['OMPI_COMM_WORLD_RANK'] == '1' else 0)"
    )
    ended = _launch(["--mpirun", "-n", "2", "--", sys.executable, str(tmp_path / "fail.py")], AS_ROOT)
    assert ended.returncode == 76, ended.stderr


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with cluster(tmp_path_factory.mktemp("slurm")) as environ:
        yield environ


@pytest.mark.full
def test_two_ranks_by_srun(slurm: dict[str, str], tmp_path: Path) -> None:
    ended = _launch(["--srun", "-n", "2", "--env", "CHOSEN=it's", "--", sys.executable, _script(tmp_path)], slurm)
    assert ended.returncode == 0, ended.stderr
    said = {line for line in ended.stdout.splitlines() if line}
    # only what is named travels
    assert said == {f"rank {rank} by slurm: sum 3.0 it's None" for rank in (0, 1)}


@pytest.mark.full
def test_a_rank_that_fails_under_srun_ends_the_others(slurm: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "fail.py").write_text(
        "import os, sys, time; sys.exit(76) if os.environ['SLURM_PROCID'] == '1' else time.sleep(100)"
    )
    ended = _launch(["--srun", "-n", "2", "--", sys.executable, str(tmp_path / "fail.py")], slurm)
    # srun gives the highest code of its tasks, and those it has ended count as 143
    assert ended.returncode in (76, 143), ended.stderr
    assert "Exited with exit code 76" in ended.stderr


# --- command lines -----------------------------------------------------------------------------------------------------


def test_mpirun_names_variables_and_shows_no_value(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("n1 slots=4 max_slots=8\nn2 slots=2\n")
    handover = mpirun(
        ["train"],
        processes=None,
        hostfile=tmp_path / "hosts",
        interface="lo",
        forwarded={"A": "value"},
        options=LaunchOptions(num_threads=3),
    )
    assert handover.argv[:5] == ["mpirun", "--hostfile", str(tmp_path / "hosts"), "--bind-to", "none"]
    assert handover.argv[-1] == "train"
    named = handover.argv[6:-1:2]
    assert handover.argv[5:-1:2] == ["-x"] * len(named)
    assert named == sorted(handover.environ)
    assert {"A", "MASTER_ADDR", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"} <= set(named)
    assert handover.environ["MASTER_ADDR"] == "n1"
    assert handover.environ["OMP_NUM_THREADS"] == "3"
    assert "value" not in handover.argv


OWN = "-mca btl_tcp_if_include lo -mca plm_rsh_args '-p 2222' --map-by slot --tag-output"


@pytest.mark.full
@pytest.mark.skipif(bool(missing("mpirun")), reason="openmpi-bin is not installed")
def test_mpiruns_own_arguments_reach_it(tmp_path: Path) -> None:
    text = 'f\'{os.environ["OMPI_MCA_btl_tcp_if_include"]} {os.environ["OMPI_MCA_plm_rsh_args"]}\\n\''
    (tmp_path / "show.py").write_text(f"import os; os.write(1, {text}.encode())")
    ended = _launch(
        ["--mpirun", "-n", "2", "--mpirun-args", OWN, "--", sys.executable, str(tmp_path / "show.py")], AS_ROOT
    )
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.split("\n")) == ["", "[1,0]<stdout>:lo -p 2222", "[1,1]<stdout>:lo -p 2222"]


@pytest.mark.full
@pytest.mark.skipif(bool(missing("mpirun")), reason="openmpi-bin is not installed")
def test_two_ranks_by_a_users_own_mpirun_with_arguments_of_its_own(tmp_path: Path) -> None:
    argv = ["mpirun", "--allow-run-as-root", "-np", "2", "--oversubscribe", *shlex.split(OWN)]
    ended = subprocess.run(
        [*argv, sys.executable, _script(tmp_path)],
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CHOSEN": "x", "MY_TOKEN": "y"}
        | AS_ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    said = {line for line in ended.stdout.splitlines() if line}
    assert said == {f"[1,{rank}]<stdout>:rank {rank} by openmpi: sum 3.0 x y" for rank in (0, 1)}


def test_arguments_of_mpirun_come_last_and_may_bind() -> None:
    given: Any = {"processes": 2, "hostfile": None, "interface": None, "forwarded": {}, "options": LaunchOptions()}
    argv = mpirun(["train"], **given, own_arguments=["--map-by", "core", "-mca", "btl", "self,tcp"]).argv
    assert argv[-6:] == ["--map-by", "core", "-mca", "btl", "self,tcp", "train"]
    assert "--bind-to" in argv
    assert mpirun(["train"], **given, own_arguments=["--bind-to", "socket"]).argv.count("--bind-to") == 1


def test_arguments_of_mpirun_that_are_options_of_this_command() -> None:
    with pytest.raises(LaunchError) as caught:
        mpirun(
            ["train"],
            processes=2,
            hostfile=None,
            interface=None,
            forwarded={},
            options=LaunchOptions(),
            own_arguments=["-np", "4", "--host=n1,n2"],
        )
    assert [problem.given for problem in caught.value.problems] == [
        "-np among the arguments for mpirun",
        "--host=n1,n2 among the arguments for mpirun",
    ]
    assert caught.value.problems[0].nearest == "unisono launch --mpirun -n …"


def test_srun_names_variables_and_takes_threads_from_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "4")
    handover = srun(["train", "--x"], processes=8, interface=None, forwarded={"PATH": "/bin"})
    assert handover.argv == [
        *("srun", "--ntasks", "8", "--kill-on-bad-exit=1", "--export", "MKL_NUM_THREADS,OMP_NUM_THREADS,PATH"),
        *("--", "train", "--x"),
    ]
    assert handover.environ["OMP_NUM_THREADS"] == "4"


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError) as caught:
        srun(["train"], processes=2, interface=None, forwarded={}).run()
    assert "srun is not on PATH\n  rule: --srun hands the job over to it" in str(caught.value)


@pytest.mark.full
@pytest.mark.skipif(bool(missing("mpirun")), reason="openmpi-bin is not installed")
def test_a_dry_run_of_mpirun_is_a_command_that_does_the_same(tmp_path: Path) -> None:
    arguments = ["--mpirun", "-n", "2", "--env", "CHOSEN=it's", "--dry-run"]
    # one write each: what print writes in parts arrives mixed
    shown_text = 'f\'{os.environ["OMPI_COMM_WORLD_RANK"]} {os.environ["CHOSEN"]}\\n\''
    (tmp_path / "show.py").write_text(f"import os; os.write(1, {shown_text}.encode())")
    shown = _launch([*arguments, "--", sys.executable, str(tmp_path / "show.py")], AS_ROOT)
    assert shown.returncode == 0, shown.stderr
    # what is printed is what a shell can run
    argv = shlex.split(shown.stdout)
    assert argv[0] == "env"
    assert "CHOSEN=it's" in argv
    ended = subprocess.run(argv, env=os.environ | AS_ROOT, capture_output=True, text=True, check=True)
    assert sorted(ended.stdout.split("\n")) == ["", "0 it's", "1 it's"]
    as_json = _launch([*arguments, "--json", "--", sys.executable, "x"], AS_ROOT)
    told = json.loads(as_json.stdout)
    assert told["command"][0] == "mpirun"
    assert told["environ"]["CHOSEN"] == "it's"
    assert "canary" not in as_json.stdout


def test_the_name_of_the_secrets_file_reaches_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UNISONO_SECRET_FILE", "secret")
    by_srun = srun(["true"], processes=2, interface=None, forwarded={})
    assert by_srun.environ["UNISONO_SECRET_FILE"] == str(tmp_path / "secret")
    assert "UNISONO_SECRET_FILE" in by_srun.argv[by_srun.argv.index("--export") + 1].split(",")
    by_mpirun = mpirun(["true"], processes=2, hostfile=None, interface=None, forwarded={}, options=LaunchOptions())
    assert by_mpirun.argv[by_mpirun.argv.index("UNISONO_SECRET_FILE") - 1] == "-x"
    monkeypatch.delenv("UNISONO_SECRET_FILE")
    assert "UNISONO_SECRET_FILE" not in srun(["true"], processes=2, interface=None, forwarded={}).environ
