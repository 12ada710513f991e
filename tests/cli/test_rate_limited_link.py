"""Two ranks on two hosts, which are network namespaces with a slow cable between them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from commands import Desk
from netns import Cable, cable

from unisono.diagnose import Finding, diagnose, read_run

pytestmark = pytest.mark.full


# the hosts are one machine, whose memory both could use
NO_SHARED_MEMORY = """
from unisono import RunConfig
from unisono.errors import ConfigError
from unisono.kvstore.allreduce import buckets


def refuse(world):
    raise ConfigError(given="two hosts", rule="", consequence="", nearest="")


def config():
    buckets.SharedMemoryAllReduce = refuse
    return RunConfig()
"""


def found(desk: Desk, line: Cable, run_dir: Path) -> dict[str, Finding]:
    """The findings of a run of a rank at each end."""
    own = run_dir.with_name("own.py")
    own.write_text(NO_SHARED_MEMORY)
    settings = [f"--set=run.dir={run_dir}", *desk.settings, "--set=model.dim=128", "--set=train.steps=20"]
    settings += ["--set=train.eval_every_steps=0", "--set=checkpoint.every_steps=0", "--set=plan.device=cpu"]
    processes: list[subprocess.Popen[str]] = []
    for rank, namespace in enumerate((line.here, line.there)):
        environ = desk.child_environ(
            RANK=str(rank),
            WORLD_SIZE="2",
            LOCAL_RANK="0",
            LOCAL_WORLD_SIZE="1",
            GROUP_RANK=str(rank),
            MASTER_ADDR=line.here_address,
            MASTER_PORT="29517",
            GLOO_SOCKET_IFNAME="end",
        )
        command = ["ip", "netns", "exec", namespace, sys.executable, "-m", "unisono", "train", str(own), *settings]
        processes.append(subprocess.Popen(command, cwd=desk.folder, env=environ, stderr=subprocess.PIPE, text=True))
    for process in processes:
        _, errors = process.communicate(timeout=150)
        assert process.returncode == 0, errors
    return {finding.id: finding for finding in diagnose(read_run(run_dir))}


def test_steps_wait_for_a_slow_cable(desk: Desk, tmp_path: Path) -> None:
    with cable(20) as line:
        finding = found(desk, line, tmp_path / "run")["COMM01"]
    assert finding.title == "steps wait for communication along dp"
    assert finding.cost_frac > 0.3
