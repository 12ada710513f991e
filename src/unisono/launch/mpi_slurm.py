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

from unisono.errors import LaunchError, Problem
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
    own_arguments: Sequence[str] = (),
) -> ExecCommand:
    """The mpirun command line. Ranks of several hosts meet at the first host of the file.

    Binding is turned off: mpirun would bind each rank to one core, which all its threads would share.

    Args:
        command: What each rank runs.
        processes: Number of ranks; None: one, or one for each slot of the file.
        hostfile: File of hosts.
        interface: Network interface of Gloo and NCCL.
        forwarded: Variables for the ranks.
        options: Share of a rank in its host.
        own_arguments: Further arguments of mpirun, which come last. With one about binding, binding is as it says.

    Raises LaunchError for arguments of mpirun in the place of which this command has options.
    """
    _require_no_counterparts(own_arguments)
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
    is_bound = any(_name_of(word) in _BINDING for word in own_arguments)
    binding = [] if is_bound else ["--bind-to", "none"]
    return ExecCommand(argv=["mpirun", *where, *binding, *names, *own_arguments, *command], environ=environ)


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


# arguments of mpirun, by name without dashes, and the option of ``unisono launch`` that decides the same
_COUNTERPARTS = {
    **dict.fromkeys(("n", "np", "c"), "-n"),
    **dict.fromkeys(("hostfile", "machinefile", "default-hostfile", "H", "host"), "--hostfile"),
}
_BINDING = ("bind-to", "bind-to-none", "bind-to-core", "bind-to-socket", "cpu-set", "rankfile", "rf")


def _name_of(word: str) -> str:
    """The name of an option of mpirun, which takes one dash or two; empty for another word."""
    return word.lstrip("-").partition("=")[0] if word.startswith("-") else ""


def _require_no_counterparts(words: Sequence[str]) -> None:
    problems = [
        Problem(
            given=f"{word} among the arguments for mpirun",
            rule=f"number and hosts of the ranks are options of this command: {option}",
            consequence="nothing was started",
            nearest=f"unisono launch --mpirun {option} …",
        )
        for word in words
        if (option := _COUNTERPARTS.get(_name_of(word)))
    ]
    if problems:
        raise LaunchError(*problems)


def _interface(name: str | None) -> dict[str, str]:
    return interface_by_name(name).environ() if name else {}


def _secret_file() -> dict[str, str]:
    name = "UNISONO_SECRET_FILE"
    return {name: os.path.abspath(os.environ[name])} if os.environ.get(name) else {}
