"""``unisono launch``: one command in many processes, here or on the hosts of a file, or handed over to mpirun or srun."""

from __future__ import annotations

import os
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from unisono.cli.common import every_verb, print_json
from unisono.errors import ConfigError, Problem
from unisono.launch import LaunchOptions
from unisono.launch.forwarded_env import forwarded, parse_settings
from unisono.launch.hostfile import Host, read_hostfile
from unisono.launch.job import SERVER, describe_launch, dry_run_text, run_job
from unisono.launch.mpi_slurm import ExecCommand, mpirun, srun
from unisono.launch.network_interface import interface_by_name
from unisono.launch.process_layout import JobLayout, assign_processes


@click.command("launch", context_settings={"allow_interspersed_args": False})
@click.option("-n", "--processes", type=click.IntRange(min=1), help="Workers in all (default 1, or one per slot).")
@click.option("--servers", type=click.IntRange(min=0), default=0, help="Parameter servers beside them, for dist_async.")
@click.option("--hostfile", type=click.Path(path_type=Path), help="Hosts to reach over ssh, one a line.")
@click.option("--ssh-port", type=click.IntRange(1, 65535), help="For hosts whose line names no port.")
@click.option(
    "--interface", metavar="NAME", help="Network interface of every host (default: the way to rank 0's host)."
)
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Where ranks meet (default: any free port).")
@click.option("--env", "settings", multiple=True, metavar="NAME[=VALUE]", help="A variable for every process.")
@click.option("--tls", default="", metavar="FOLDER", help="Certificates, for what goes to servers.")
@click.option("--max-restarts", type=click.IntRange(min=0), default=3, help="After crashes (default 3).")
@click.option(
    "--dir", "folder", type=click.Path(path_type=Path), help="For logs and launch.json (default runs/launch-TIME)."
)
@click.option("--mpirun", "by_mpirun", is_flag=True, help="Let Open MPI's mpirun start the processes.")
@click.option("--srun", "by_srun", is_flag=True, help="Start them as a step of this SLURM allocation.")
@click.option("--dry-run", is_flag=True, help="Show what would run where, and start nothing.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@every_verb
def command(**flags: Any) -> int:
    """Run COMMAND as one job: `unisono launch -n 4 -- unisono train`, or any program that finds its place with
    torch's env://.

    Exit codes: 0 ok, 1 failed, 2 the user must change something, 75 preempted with the state saved, 76 failed and
    would again.
    """
    return _launch(_Flags(**flags))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Flags:
    """The options of the verb, as declared above."""

    command: tuple[str, ...]
    processes: int | None
    servers: int
    hostfile: Path | None
    ssh_port: int | None
    interface: str | None
    port: int
    settings: tuple[str, ...]
    tls: str
    max_restarts: int
    folder: Path | None
    by_mpirun: bool
    by_srun: bool
    dry_run: bool
    as_json: bool


def _launch(flags: _Flags) -> int:
    _refuse_inert(flags)
    options = LaunchOptions(max_restarts=flags.max_restarts, tls=flags.tls)
    extra = parse_settings(flags.settings, os.environ)
    if flags.by_mpirun or flags.by_srun:
        handover = _handover(flags, options, forwarded(os.environ, extra))
        return _show_handover(handover, as_json=flags.as_json) if flags.dry_run else handover.run()
    folder = flags.folder or Path(time.strftime("runs/launch-%Y%m%d-%H%M%S"))
    job = _layout(flags, options, extra, folder)
    if not flags.dry_run:
        return run_job(job, folder)
    description = describe_launch(job)
    if flags.as_json:
        print_json(description)
    else:
        click.echo(dry_run_text(description))
    return 0


def _layout(flags: _Flags, options: LaunchOptions, extra: dict[str, str], folder: Path) -> JobLayout:
    if flags.hostfile is None:
        if flags.interface:
            interface_by_name(flags.interface)
        hosts = [Host(name="this host", slots=flags.processes or 1, here=True)]
        environ = extra
    else:
        hosts = read_hostfile(flags.hostfile, port=flags.ssh_port)
        environ = forwarded(os.environ, extra)
    for host in hosts:
        if host.role == "scheduler":
            click.echo(f"launch: {host.name} runs nothing: this launcher is the scheduler", err=True)
    return JobLayout(
        command=flags.command,
        server_command=SERVER,
        hosts=tuple(hosts),
        slots=assign_processes(hosts, flags.processes, flags.servers),
        run_id=folder.absolute().name,
        options=options,
        environ=environ,
        interface=flags.interface,
        port=flags.port,
        snapshots=str(folder.absolute() / "servers"),
    )


def _handover(flags: _Flags, options: LaunchOptions, variables: dict[str, str]) -> ExecCommand:
    if flags.by_srun:
        return srun(flags.command, processes=flags.processes, interface=flags.interface, forwarded=variables)
    return mpirun(
        flags.command,
        processes=flags.processes,
        hostfile=flags.hostfile,
        interface=flags.interface,
        forwarded=variables,
        options=options,
    )


def _show_handover(handover: ExecCommand, *, as_json: bool) -> int:
    if as_json:
        print_json({"command": handover.argv, "environ": handover.environ})
    else:
        settings = [f"{name}={value}" for name, value in sorted(handover.environ.items())]
        click.echo(shlex.join(["env", *settings, *handover.argv]))
    return 0


def _refuse_inert(flags: _Flags) -> None:
    """Raises ConfigError for options that would have no effect."""
    handed_over = flags.by_mpirun or flags.by_srun
    by = "--mpirun" if flags.by_mpirun else "--srun"
    wrong = [
        (flags.by_mpirun and flags.by_srun, "--mpirun and --srun", "one of them starts the processes"),
        (handed_over and flags.servers > 0, f"{by} with --servers", f"{by} starts workers only"),
        (handed_over and flags.port > 0, f"{by} with --port", "ranks take MASTER_PORT from --env, or derive it alike"),
        (flags.by_srun and flags.hostfile is not None, "--srun with --hostfile", "SLURM knows its hosts"),
        (
            flags.ssh_port is not None and (flags.hostfile is None or flags.by_mpirun),
            "--ssh-port without ssh",
            "it belongs to --hostfile",
        ),
        (
            flags.port > 0 and flags.servers > 0,
            "--port with --servers",
            "workers of an asynchronous job do not meet",
        ),
        (
            bool(flags.tls) and not flags.servers,
            "--tls without --servers",
            "Gloo and NCCL, which carry all else, encrypt nothing",
        ),
        (
            flags.port > 0 and flags.hostfile is None,
            "--port without --hostfile",
            "ranks of one host meet at a port the launcher holds",
        ),
    ]
    problems = [
        Problem(
            given=given,
            rule=rule,
            consequence="it would have no effect, so nothing was started",
            nearest="leave one out",
        )
        for holds, given, rule in wrong
        if holds
    ]
    if problems:
        raise ConfigError(*problems)
