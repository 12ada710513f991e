"""A real SLURM of one node, this machine: munged, slurmctld and slurmd with ports, keys and folders of their own, no systemd."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from procs import wait_until
from tools import missing


@contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Yields the variables that lead to it; skips the test where SLURM is not installed (.ci/run installs it) or not allowed."""
    path = f"{os.environ['PATH']}{os.pathsep}/usr/sbin"
    programs = [shutil.which(name, path=path) for name in ("munged", "slurmctld", "slurmd", "srun")]
    if None in programs and missing("munged", "slurmctld", "slurmd", "srun"):
        pytest.skip("slurm-wlm and munge are not installed")
    if os.geteuid() != 0:
        pytest.skip("slurmd starts tasks as other users, so it has to be root")
    munged, slurmctld, slurmd, _ = map(str, programs)
    ports = [_free_port(), _free_port()]
    node = socket.gethostname().partition(".")[0]
    for name in ("munge", "state", "spool"):
        (folder / name).mkdir(mode=0o700)
    (folder / "munge/key").write_bytes(os.urandom(128))
    (folder / "munge/key").chmod(0o400)
    (folder / "slurm.conf").write_text(f"""
ClusterName=test
SlurmctldHost={node}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
MpiDefault=none
SwitchType=switch/none
NodeName={node} NodeAddr=127.0.0.1 CPUs={os.cpu_count()} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
""")
    environ = {"SLURM_CONF": str(folder / "slurm.conf")}
    files = {"key": "key", "socket": "socket", "pid": "pid", "log": "log", "seed": "seed"}
    options = [f"--{name}{'' if name == 'socket' else '-file'}={folder}/munge/{file}" for name, file in files.items()]
    started: list[subprocess.Popen[bytes]] = []
    with (folder / "daemons.log").open("wb") as said:

        def start(argv: list[str]) -> None:
            started.append(subprocess.Popen(argv, env=os.environ | environ, stdout=said, stderr=said))

        try:
            start([munged, "--force", "--foreground", *options])
            wait_until((folder / "munge/socket").exists, "munged answers")
            start([slurmctld, "-D", "-c"])
            start([slurmd, "-D"])

            def idle() -> bool:
                told = subprocess.run(
                    ["sinfo", "-h", "-o", "%T"], env=os.environ | environ, capture_output=True, text=True, check=False
                )
                return told.stdout.strip() == "idle"

            wait_until(idle, "the node takes jobs", 60)
            yield environ
        finally:
            for process in reversed(started):
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(20)
                process.kill()
                process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
