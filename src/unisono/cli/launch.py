"""``unisono launch``: one command in many processes, here or on the hosts of a file, or handed over to mpirun or srun."""

from __future__ import annotations

import os
import shlex
import time
from pathlib import Path

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
def command(
    processes: int | None,
    servers: int,
    hostfile: Path | None,
    ssh_port: int | None,
    interface: str | None,
    port: int,
    settings: tuple[str, ...],
    tls: str,
    max_restarts: int,
    folder: Path | None,
    by_mpirun: bool,
    by_srun: bool,
    dry_run: bool,
    command: tuple[str, ...],
    as_json: bool,
) -> int:
    """Run COMMAND as one job: `unisono launch -n 4 -- unisono train`, or any program that finds its place with torch's env://.

    Exit codes: 0 ok, 1 failed, 2 the user must change something, 75 preempted with the state saved, 76 failed and would again.
    """
    _refuse_inert(hostfile, servers, ssh_port, port, tls, by_mpirun=by_mpirun, by_srun=by_srun)
    options = LaunchOptions(max_restarts=max_restarts, tls=tls)
    extra = parse_settings(settings, os.environ)
    if by_mpirun or by_srun:
        travels = forwarded(os.environ, extra)
        if by_mpirun:
            handover = mpirun(
                command, processes=processes, hostfile=hostfile, interface=interface, forwarded=travels, options=options
            )
        else:
            handover = srun(command, processes=processes, interface=interface, forwarded=travels)
        return _show_handover(handover, as_json=as_json) if dry_run else handover.run()
    if hostfile is None:
        if interface:
            interface_by_name(interface)
        hosts = [Host(name="this host", slots=processes or 1, here=True)]
        environ = extra
    else:
        hosts = read_hostfile(hostfile, port=ssh_port)
        environ = forwarded(os.environ, extra)
    for host in hosts:
        if host.role == "scheduler":
            click.echo(f"launch: {host.name} runs nothing: this launcher is the scheduler", err=True)
    folder = folder or Path(time.strftime("runs/launch-%Y%m%d-%H%M%S"))
    job = JobLayout(
        command=command,
        server_command=SERVER,
        hosts=tuple(hosts),
        slots=assign_processes(hosts, processes, servers),
        run_id=folder.absolute().name,
        options=options,
        environ=environ,
        interface=interface,
        port=port,
        snapshots=str(folder.absolute() / "servers"),
    )
    if not dry_run:
        return run_job(job, folder)
    shown = describe_launch(job)
    if as_json:
        print_json(shown)
    else:
        click.echo(dry_run_text(shown))
    return 0


def _show_handover(handover: ExecCommand, *, as_json: bool) -> int:
    if as_json:
        print_json({"command": handover.argv, "environ": handover.environ})
    else:
        settings = [f"{name}={value}" for name, value in sorted(handover.environ.items())]
        click.echo(shlex.join(["env", *settings, *handover.argv]))
    return 0


def _refuse_inert(
    hostfile: Path | None, servers: int, ssh_port: int | None, port: int, tls: str, *, by_mpirun: bool, by_srun: bool
) -> None:
    """Options that would act on nothing."""
    by = "--mpirun" if by_mpirun else "--srun"
    wrong = [
        (by_mpirun and by_srun, "--mpirun and --srun", "one of them starts the processes"),
        ((by_mpirun or by_srun) and servers > 0, f"{by} with --servers", f"{by} starts workers only"),
        (
            (by_mpirun or by_srun) and port > 0,
            f"{by} with --port",
            "ranks take MASTER_PORT from --env, or derive it alike",
        ),
        (by_srun and hostfile is not None, "--srun with --hostfile", "SLURM knows its hosts"),
        (
            ssh_port is not None and (hostfile is None or by_mpirun),
            "--ssh-port without ssh",
            "it belongs to --hostfile",
        ),
        (port > 0 and servers > 0, "--port with --servers", "workers of an asynchronous job do not meet"),
        (bool(tls) and not servers, "--tls without --servers", "Gloo and NCCL, which carry all else, encrypt nothing"),
        (
            port > 0 and hostfile is None,
            "--port without --hostfile",
            "ranks of one host meet at a port the launcher holds",
        ),
    ]
    problems = [
        Problem(
            given=given,
            rule=rule,
            consequence="it would act on nothing, so nothing was started",
            nearest="leave one out",
        )
        for holds, given, rule in wrong
        if holds
    ]
    if problems:
        raise ConfigError(*problems)
