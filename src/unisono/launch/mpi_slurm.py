"""Jobs handed over to mpirun or srun: this process replaces itself by their command line.

They start the processes and forward signals; Gloo or NCCL carry the gradients. Each process reads its place from the
variables of Open MPI or SLURM (``unisono.dist.jobspec``). Variables are passed by name, never by value, so ``ps``
shows no values. Ranks of several hosts prove that they belong together if UNISONO_SECRET_FILE names a file of the job's
secret that all of them can read; the name of that file is passed, never the secret.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from unisono.errors import LaunchError
from unisono.launch.forwarded_env import require_names
from unisono.launch.hostfile import read_hostfile
from unisono.launch.network_interface import interface_by_name
from unisono.launch.options import LaunchOptions
from unisono.launch.resources import divide_host


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecCommand:
    """A command line, and the variables set before it is run."""

    argv: list[str]
    environ: dict[str, str]

    def run(self) -> int:
        """Replace this process by the command. Raises LaunchError if it is not installed."""
        if shutil.which(self.argv[0]) is None:
            raise LaunchError(
                given=f"{self.argv[0]} is not on PATH",
                rule=f"--{self.argv[0]} hands the job over to it",
                consequence="nothing was started",
                nearest="without it: `unisono launch` starts processes here, and with --hostfile on other hosts",
            )
        os.execvpe(self.argv[0], self.argv, {**os.environ, **self.environ})


def mpirun(
    command: Sequence[str],
    *,
    processes: int | None,
    hostfile: Path | None,
    interface: str | None,
    forwarded: Mapping[str, str],
    options: LaunchOptions,
) -> ExecCommand:
    """The mpirun command line. Ranks of several hosts meet at the first host of the file.

    Binding is turned off: mpirun would bind each rank to one core, which all its threads would share.
    """
    environ = dict(forwarded) | _interface(interface) | _secret_file()
    if hostfile is None:
        count = processes or 1
        environ |= divide_host(replace(options, num_processes=count), {**os.environ, **environ}).environ()
        where = ["-n", str(count), "--oversubscribe"]
    else:
        hosts = read_hostfile(hostfile)
        # the host with the most ranks decides: every rank has the same number of threads
        most = replace(options, num_processes=max(host.slots for host in hosts))
        environ |= divide_host(most, {**os.environ, **environ}).environ()
        environ.setdefault("MASTER_ADDR", hosts[0].name)
        where = ["--hostfile", str(hostfile), *(["-n", str(processes)] if processes else [])]
    names = [part for name in require_names(environ) for part in ("-x", name)]
    return ExecCommand(argv=["mpirun", *where, "--bind-to", "none", *names, *command], environ=environ)


def srun(
    command: Sequence[str],
    *,
    processes: int | None,
    interface: str | None,
    forwarded: Mapping[str, str],
) -> ExecCommand:
    """The srun command line: a step of the SLURM allocation this process is in, with ``--cpus-per-task`` threads per rank.

    A failed task ends the others, because ranks of a synchronous job cannot continue alone.
    """
    environ = dict(forwarded) | _interface(interface) | _secret_file()
    if cpus := os.environ.get("SLURM_CPUS_PER_TASK"):
        environ |= {"OMP_NUM_THREADS": cpus, "MKL_NUM_THREADS": cpus}
    count = ["--ntasks", str(processes)] if processes else []
    export = ["--export", ",".join(require_names(environ)) or "NONE"]
    return ExecCommand(argv=["srun", *count, "--kill-on-bad-exit=1", *export, "--", *command], environ=environ)


def _interface(name: str | None) -> dict[str, str]:
    return interface_by_name(name).environ() if name else {}


def _secret_file() -> dict[str, str]:
    name = "UNISONO_SECRET_FILE"
    return {name: os.path.abspath(os.environ[name])} if os.environ.get(name) else {}
