"""Lines of other launchers become lines of this one: run for real where the launcher is installed, else case by case."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import Desk, make_desk
from tools import missing
from torch.distributed.run import get_args_parser

from unisono.errors import ConfigError
from unisono.launch.launcher_lines import translate_line
from unisono.launch.launcher_options import LAUNCHERS

FACTS = Path(__file__).parents[1] / "data/launcher_options.json"  # options of the packages' own parsers
SHOW = """
import json, os, sys
place = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GIVEN")}
if place["RANK"] is None:
    place["RANK"], place["WORLD_SIZE"] = os.environ["OMPI_COMM_WORLD_RANK"], os.environ["OMPI_COMM_WORLD_SIZE"]
open(f"{os.environ['PLACES']}/rank-{place['RANK']}", "w").write(json.dumps([place, sys.argv[1:]]))
"""
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def line(text: str, accelerators: int = 0) -> tuple[str, list[str]]:
    """The line and the arguments that have no counterpart."""
    found = translate_line(shlex.split(text), lambda: accelerators)
    assert all(reason for _, reason in found.notes)
    return shlex.join(found.argv), [argument for argument, _ in found.notes]


# --- both lines are run ------------------------------------------------------------------------------------------------


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    made = make_desk(tmp_path / "desk", tmp_path / "cache")
    (made.folder / "show.py").write_text(SHOW)
    (made.folder / "pkg").mkdir()
    (made.folder / "pkg/__init__.py").touch()
    (made.folder / "pkg/show.py").write_text(SHOW)
    return made


def places(desk: Desk, folder: Path, argv: list[str]) -> dict[str, Any]:
    """What the ranks of a line saw, by rank."""
    folder.mkdir()
    environ = desk.child_environ(PLACES=str(folder), GIVEN="it's", **AS_ROOT)
    environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), environ["PATH"]))
    done = subprocess.run(argv, cwd=desk.folder, env=environ, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return {each.name: json.loads(each.read_text()) for each in folder.iterdir()}


TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
RUN = {
    "script": [*TORCHRUN, "--nproc-per-node=2", "show.py", "--lr", "0.1", "a b", "--nproc-per-node=3"],
    "standalone module": [*TORCHRUN, "--standalone", "--nproc_per_node", "2", "-m", "pkg.show", "-m", "x"],
    "program": [
        *TORCHRUN,
        "--nnodes=1:1",
        "--nproc-per-node",
        "3",
        "--no-python",
        sys.executable,
        "show.py",
        "--",
        "y",
    ],
    "older": [sys.executable, "-m", "torch.distributed.launch", "--use-env", "--nproc_per_node=2", "show.py"],
}


@pytest.mark.full
@pytest.mark.parametrize("kind", RUN)
def test_a_line_of_torchrun_and_ours_start_the_same(kind: str, desk: Desk, tmp_path: Path) -> None:
    theirs = places(desk, tmp_path / "theirs", RUN[kind])
    assert len(theirs) == (3 if kind == "program" else 2)
    shown = desk.here("launch", "--from", "--", *RUN[kind])
    assert shown.code == 0, shown.err
    ours = shown.out.splitlines()[0]
    assert places(desk, tmp_path / "ours", [sys.executable, "-m", *shlex.split(ours)]) == theirs


@pytest.mark.full
@pytest.mark.skipif(bool(missing("mpirun")), reason="openmpi-bin is not installed")
def test_a_line_of_mpirun_and_ours_start_the_same(desk: Desk, tmp_path: Path) -> None:
    own = "mpirun -np 2 -mca btl_tcp_if_include lo --oversubscribe -x GIVEN -x OTHER=1 --map-by slot --tag-output"
    argv = [*shlex.split(own), sys.executable, "show.py", "-np", "3"]
    theirs = places(desk, tmp_path / "theirs", argv)
    assert theirs["rank-1"][1] == ["-np", "3"]
    shown = desk.here("launch", "--from", "--json", "--", *argv)
    assert shown.json["notes"] == []
    ours = places(desk, tmp_path / "ours", [sys.executable, "-m", *shown.json["command"]])
    assert ours == theirs


# --- case by case ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected", "notes"),
    [
        ("torchrun train.py", "unisono launch -n 1 --max-restarts 0 -- python train.py", []),
        (
            "torchrun --nproc-per-node=2 --max-restarts=3 --log-dir logs -r 3 train.py -r 4",
            "unisono launch -n 2 --dir logs -- python train.py -r 4",
            ["-r 3"],
        ),
        ("A=1 B='x y' torchrun --nproc-per-node=2 train.py",
         "unisono launch -n 2 --env A=1 --env 'B=x y' --max-restarts 0 -- python train.py", []),
        ("python -u -m torch.distributed.run --nproc-per-node=gpu train.py",
         "unisono launch -n 4 --max-restarts 0 -- python train.py", ["--nproc-per-node gpu"]),
        (
            "torchrun --nnodes=1:4 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=n1:29500 train.py",
            "unisono launch -n 32 --hostfile hosts --max-restarts 0 -- python train.py",
            ["--nnodes 1:4", "--rdzv-backend c10d", "--rdzv-endpoint n1:29500", "the hosts"],
        ),
        ("python3 -m torch.distributed.launch --nproc_per_node=2 train.py",
         "unisono launch -n 2 --max-restarts 0 -- python train.py", ["--local-rank=N of each process"]),
        ("msrun train.py", "unisono launch -n 8 --max-restarts 0 -- python train.py", ["msrun"]),
        ("msrun --worker_num 2 --local_worker_num=2 --log_dir=out --join=True --bind_core True train.py --a",
         "unisono launch -n 2 --dir out --max-restarts 0 -- python train.py --a", ["--join True", "--bind_core True", "msrun"]),
        ("msrun --worker_num=16 --local_worker_num=8 --node_rank=1 --master_addr=10.0.0.1 train.py",
         "unisono launch -n 16 --hostfile hosts --max-restarts 0 -- python train.py",
         ["--master_addr 10.0.0.1", "--node_rank 1", "msrun", "the hosts"]),
        ("mpirun -np 4 --hostfile h -x A -mca plm_rsh_args '-p 2222' --bind-to socket ./a.out -np 2",
         "unisono launch --mpirun -n 4 --hostfile h --env A --mpirun-args '--mca plm_rsh_args '\"'\"'-p 2222'\"'\"' "
         "--bind-to socket' -- ./a.out -np 2", []),
        ("mpirun -n 2 -H n1,n2 python t.py", "unisono launch --mpirun -n 2 --hostfile hosts -- python t.py", ["the hosts"]),
        ("horovodrun -np 4 -H n1:2,n2:2 -p 2222 --network-interface eth1 --autotune python train.py",
         "unisono launch -n 4 --hostfile hosts --ssh-port 2222 --interface eth1 --max-restarts 0 -- python train.py",
         ["--autotune", "horovodrun", "the hosts"]),
        ("horovodrun -np 2 --mpi --mpi-args='--map-by node' python train.py",
         "unisono launch --mpirun -n 2 --mpirun-args '--map-by node' -- python train.py", ["horovodrun"]),
        ("horovodrun -np 2 --gloo --network-interfaces eth0,eth1 python train.py",
         "unisono launch -n 2 --max-restarts 0 -- python train.py", ["--network-interfaces eth0,eth1", "horovodrun"]),
        ("accelerate launch --num_processes=2 --num_cpu_threads_per_process 3 --gpu_ids 2,3 --multi_gpu -m pkg.train --x",
         "unisono launch -n 2 --env OMP_NUM_THREADS=3 --env CUDA_VISIBLE_DEVICES=2,3 --max-restarts 0 -- python -m pkg.train --x",
         ["accelerate launch"]),
        ("accelerate launch --use_fsdp --fsdp-version 2 --mixed-precision bf16 train.py",
         "unisono launch -n 4 --env ACCELERATE_MIXED_PRECISION=bf16 --max-restarts 0 -- python train.py",
         ["--mixed_precision bf16", "--fsdp_version 2", "--use_fsdp", "accelerate without a number of processes",
          "accelerate launch"]),
        ("deepspeed --num_gpus=2 --no_local_rank train.py --deepspeed ds.json",
         "unisono launch -n 2 --max-restarts 0 -- python train.py --deepspeed ds.json", []),
        ("deepspeed -H h --num_gpus 4 --ssh_port 22 --launcher openmpi train.py",
         "unisono launch --hostfile h --ssh-port 22 --max-restarts 0 -- python train.py",
         ["--launcher openmpi", "4 processes per host", "--local_rank=N of each process"]),
        ("deepspeed --include n1@n2:0,2 train.py", "unisono launch --hostfile hosts --max-restarts 0 -- python train.py",
         ["-i n1@n2:0,2", "--local_rank=N of each process", "the hosts"]),
        ("python tools/launch.py -n 2 -s 1 --launcher local python train.py --kv-store dist_async",
         "unisono launch -n 2 --servers 1 --max-restarts 0 -- python train.py --kv-store dist_async", []),
        ("launch.py -n2 -H h --env-worker A:1 --env B --sync-dst-dir /tmp/x python train.py --kv-store=dist_device_sync",
         "unisono launch -n 2 --hostfile h --env B --env A=1 --max-restarts 0 -- python train.py --kv-store=dist_device_sync",
         ["--sync-dst-dir /tmp/x", "2 servers"]),
        ("../../tools/launch.py -n 2 -H h --launcher mpi python train.py",
         "unisono launch --mpirun -n 2 --hostfile h -- python train.py", ["2 servers"]),
        ("python launch.py -n 2 -s 1 --launcher sge python train.py",
         "unisono launch -n 2 --servers 1 --max-restarts 0 -- python train.py", ["--launcher sge"]),
        ("DMLC_ROLE=worker DMLC_NUM_WORKER=3 DMLC_NUM_SERVER=2 DMLC_PS_ROOT_URI=n1 DMLC_INTERFACE=eth1 A=1 python train.py",
         "unisono launch -n 3 --servers 2 --interface eth1 --env A=1 --max-restarts 0 -- python train.py",
         ["DMLC_ROLE=worker", "DMLC_PS_ROOT_URI=n1"]),
    ],
)  # fmt: skip
def test_lines(given: str, expected: str, notes: list[str]) -> None:
    assert line(given, accelerators=4) == (expected, notes)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("", "--from --\n  rule: it is a line of torchrun"),
        ("python train.py", "--from -- python train.py\n  rule: it is a line of torchrun"),
        ("accelerate config", "--from -- accelerate config\n"),
        ("torchrun --nproc-per-node=2", "it names no program to start"),
        ("torchrun --new-option=2 train.py", "unknown arguments: --new-option=2"),
        ("torchrun --nproc-per-node=none train.py", "'none' is no number"),
        ("torchrun --nproc-per-node=0 train.py", "'0' is no whole number from 1 to 4,096"),
        (f"torchrun --nproc-per-node={'9' * 20} train.py", f"'{'9' * 20}' is no whole number from 1 to 4,096"),
        (f"torchrun --nproc-per-node={'9' * 5000} train.py", "is no whole number from 1 to 4,096"),
        ("torchrun --nnodes", "expected one argument"),
        ("mpirun python train.py", "the number of processes is missing"),
        ("mpirun -np 2 --unheard of python train.py", "unknown arguments: --unheard"),
        ("mpirun -np 1 a : -np 1 b", "several programs"),
        ("DMLC_NUM_WORKER=x python train.py", "'x' is no whole number"),
        ("DMLC_NUM_WORKER=2", "--from --\n"),
    ],
)
def test_a_line_that_cannot_be_read_is_refused(given: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        translate_line(shlex.split(given), lambda: 0)
    assert message in str(caught.value)


def test_a_remark_is_a_line_that_a_shell_leaves_out(desk: Desk) -> None:
    done = desk.here("launch", "--from", "--", "torchrun", "--master_addr", "\x1b[31mx\nrm y", "train.py")
    assert "# --master-addr '\\x1b[31mx rm y': ranks of one host meet at" in done.out
    assert all(line.startswith(("unisono launch ", "# ")) for line in done.out.splitlines())


def test_options_of_a_launch_beside_a_line_of_another_are_refused(desk: Desk) -> None:
    done = desk.here("launch", "--from", "-n", "2", "--env", "A=1", "--", "torchrun", "train.py")
    assert done.code == 2
    assert "--from with options of a launch (processes, settings)" in done.err


@pytest.mark.parametrize("name", ["accelerate", "horovodrun", "msrun"])
def test_all_options_of_the_packages_are_known(name: str) -> None:
    """As their own parsers have them: names, and the number of words after them."""
    known = {spelled: option.num_values for option in LAUNCHERS[name].options for spelled in option.names}
    facts = json.loads(FACTS.read_text())[name]["options"]
    assert {spelled: known.get(spelled) for names, _ in facts for spelled in names} == {
        spelled: count for names, count in facts for spelled in names
    }


def test_all_options_of_this_torchrun_are_known() -> None:
    known = {spelled: option.num_values for option in LAUNCHERS["torchrun"].options for spelled in option.names}
    for action in get_args_parser()._actions:
        if action.option_strings and "--help" not in action.option_strings:
            counts = {known.get(spelled) for spelled in action.option_strings}
            assert counts == {0 if action.nargs == 0 else 1}, action.option_strings


@pytest.mark.skipif(bool(missing("mpirun")), reason="openmpi-bin is not installed")
def test_all_options_of_this_mpirun_are_known() -> None:
    known = {spelled: option.num_values for option in LAUNCHERS["mpirun"].options for spelled in option.names}
    for topic in ("mapping", "ranking", "binding", "launch", "output", "input", "general", "debug"):
        told = subprocess.run(["mpirun", "--help", topic], env=os.environ | AS_ROOT, capture_output=True, text=True)
        for row in told.stdout.splitlines():
            words = row.split()
            if not words or not words[0].startswith("-") or words[0] in ("-h|--help", "-V|--version"):
                continue
            if "---" in words[0]:
                continue
            counts = {known.get(spelled) for spelled in words[0].split("|")}
            assert counts == {len([word for word in words if word.startswith("<arg")])}, row


@pytest.mark.parametrize("name", LAUNCHERS)
def test_no_name_is_there_twice_and_each_option_has_a_counterpart_or_a_reason(name: str) -> None:
    options = LAUNCHERS[name].options
    names = [spelled for option in options for spelled in option.names]
    assert len(names) == len(set(names))
    assert all(bool(option.decides) != bool(option.why) for option in options)
