"""``unisono launch``: runs a command as the processes of one job, here, on the hosts of a file, or by mpirun or srun."""

from __future__ import annotations

import os
import shlex
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from unisono.cli.common import ExpandedPath, common_options, print_result
from unisono.cli.terminal import echo
from unisono.errors import ConfigError, Problem
from unisono.launch import LaunchOptions
from unisono.launch.forwarded_env import forwarded, parse_settings
from unisono.launch.hostfile import Host, read_hostfile
from unisono.launch.job import SERVER, describe_launch, dry_run_text, run_job
from unisono.launch.launcher_lines import translate_line
from unisono.launch.membership import claim_ranks, read_membership
from unisono.launch.mpi_slurm import ExecCommand, mpirun, srun
from unisono.launch.network_interface import interface_by_name
from unisono.launch.process_layout import JobLayout, assign_processes
from unisono.launch.resources import count_accelerators
from unisono.sanitize import printable


@click.command("launch", context_settings={"allow_interspersed_args": False})
@click.option("-n", "--processes", type=click.IntRange(min=1), help="Number of workers (default 1, or one per slot).")
@click.option("--servers", type=click.IntRange(min=0), default=0, help="Number of parameter servers, for dist_async.")
@click.option("--hostfile", type=ExpandedPath(path_type=Path), help="File of hosts to reach over ssh, one a line.")
@click.option("--ssh-port", type=click.IntRange(1, 65535), help="ssh port of hosts without one in the file.")
@click.option(
    "--interface", metavar="NAME", help="Network interface of every host (default: the way to rank 0's host)."
)
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port of rank 0 (default: any free port).")
@click.option(
    "--env", "settings", multiple=True, metavar="NAME[=VALUE]", help="Environment variable for every process."
)
@click.option("--elastic", is_flag=True, help="Workers may leave a job with servers, and others join it (--join).")
@click.option(
    "--join", type=ExpandedPath(path_type=Path), help="Folder of a running --elastic launch to join as workers."
)
@click.option("--first-rank", type=click.IntRange(0), help="Rank of the first that joins, with a copy of the folder.")
@click.option("--tls", default="", metavar="FOLDER", help="Certificates for connections to servers.")
@click.option("--max-restarts", type=click.IntRange(min=0), default=3, help="Most restarts after crashes (default 3).")
@click.option(
    "--dir",
    "folder",
    type=ExpandedPath(path_type=Path),
    help="Folder of logs and launch.json (default runs/launch-TIME-PID).",
)
@click.option("--mpirun", "by_mpirun", is_flag=True, help="Let Open MPI's mpirun start the processes.")
@click.option(
    "--mpirun-args",
    "own_arguments",
    default="",
    metavar="TEXT",
    help="Further arguments of mpirun: '-mca btl_tcp_if_include eth1 --map-by node'.",
)
@click.option("--srun", "by_srun", is_flag=True, help="Start them as a step of this SLURM allocation.")
@click.option("--dry-run", is_flag=True, help="Show what would run where, and start nothing.")
@click.option(
    "--from",
    "is_foreign",
    is_flag=True,
    help="COMMAND is a line of another launcher, such as torchrun: show the line of this one, and start nothing.",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@common_options
@click.pass_context
def command(context: click.Context, command: tuple[str, ...], as_json: bool, is_foreign: bool, **options: Any) -> int:
    """Run COMMAND as one job: `unisono launch -n 4 -- unisono train`, or any program that finds its place with torch's env://.

    Exit codes: 0 ok, 1 failed, 2 the user must change something, 75 preempted (start again), 76 failed and would again.
    """
    if is_foreign:
        return _show_translated(context, command, as_json=as_json)
    arguments = _Arguments(**options)
    _check_unused(arguments)
    if arguments.by_mpirun or arguments.by_srun:
        handover = _handover(command, arguments)
        return _show_handover(handover, as_json=as_json) if arguments.dry_run else handover.run()
    # two launches in the same second need two folders
    folder = arguments.folder or Path(time.strftime(f"runs/launch-%Y%m%d-%H%M%S-{os.getpid()}"))
    job = (
        _layout(command, arguments, folder) if arguments.join is None else _joining(command, arguments, arguments.join)
    )
    for host in job.hosts:
        if host.role == "scheduler":
            echo(f"launch: {host.name} runs nothing: this launcher is the scheduler", err=True)
    if not arguments.dry_run:
        return run_job(job, folder)
    described = describe_launch(job)
    print_result(as_json, described, dry_run_text(described))
    return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Arguments:
    """Options of the command line, as click passes them."""

    processes: int | None
    servers: int
    elastic: bool
    join: Path | None
    first_rank: int | None
    hostfile: Path | None
    ssh_port: int | None
    interface: str | None
    port: int
    settings: tuple[str, ...]
    tls: str
    max_restarts: int
    folder: Path | None
    by_mpirun: bool
    own_arguments: str
    by_srun: bool
    dry_run: bool

    @property
    def launch(self) -> LaunchOptions:
        return LaunchOptions(max_restarts=self.max_restarts, tls=self.tls)


def _handover(command: tuple[str, ...], arguments: _Arguments) -> ExecCommand:
    """The command line of mpirun or srun."""
    environ = forwarded(os.environ, parse_settings(arguments.settings, os.environ))
    if arguments.by_srun:
        return srun(command, processes=arguments.processes, interface=arguments.interface, forwarded=environ)
    return mpirun(
        command,
        processes=arguments.processes,
        hostfile=arguments.hostfile,
        interface=arguments.interface,
        forwarded=environ,
        options=arguments.launch,
        own_arguments=_words(arguments.own_arguments),
    )


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(
            given=f"--mpirun-args {text!r}: {error}",
            rule="it is divided into words as a shell does it",
            consequence="nothing was started",
            nearest="close each quotation mark",
        ) from None


def _layout(command: tuple[str, ...], arguments: _Arguments, folder: Path) -> JobLayout:
    """The processes of the job on this host or on those of the hostfile."""
    environ = parse_settings(arguments.settings, os.environ)
    if arguments.hostfile is None:
        if arguments.interface:
            interface_by_name(arguments.interface)
        hosts = [Host(name="this host", slots=arguments.processes or 1, here=True)]
    else:
        hosts = read_hostfile(arguments.hostfile, port=arguments.ssh_port)
        environ = forwarded(os.environ, environ)
    return JobLayout(
        command=command,
        server_command=SERVER,
        hosts=tuple(hosts),
        slots=assign_processes(hosts, arguments.processes, arguments.servers),
        run_id=folder.absolute().name,
        options=arguments.launch,
        environ=environ,
        interface=arguments.interface,
        port=arguments.port,
        snapshots=str(folder.absolute() / "servers"),
        elastic=arguments.elastic,
    )


def _joining(command: tuple[str, ...], arguments: _Arguments, folder: Path) -> JobLayout:
    """Workers of this host that join the job of ``folder``."""
    hosts = [Host(name="this host", slots=arguments.processes or 1, here=True)]
    slots = assign_processes(hosts, arguments.processes, 0)
    job = read_membership(folder)
    ranks = claim_ranks(job, len(slots), arguments.first_rank)
    return JobLayout(
        command=command,
        server_command=SERVER,
        hosts=tuple(hosts),
        slots=tuple(replace(slot, index=rank) for slot, rank in zip(slots, ranks, strict=True)),
        run_id=job.run_id,
        options=arguments.launch,
        environ=parse_settings(arguments.settings, os.environ),
        interface=arguments.interface,
        elastic=True,
        joins=job,
    )


def _show_translated(context: click.Context, command: tuple[str, ...], *, as_json: bool) -> int:
    """Print the line of this launcher that does what ``command``, a line of another one, does, and what it leaves out."""
    given = [name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    others = sorted(set(given) - {"command", "as_json", "is_foreign"})
    if others:
        raise ConfigError(
            given=f"--from with options of a launch ({', '.join(others)})",
            rule="--from starts nothing: the line that it shows has all options",
            consequence="they would have no effect, so no line was written",
            nearest="add them to the line that is shown",
        )
    line = translate_line(command, count_accelerators)
    notes = [{"argument": argument, "reason": reason} for argument, reason in line.notes]
    shown = [shlex.join(line.argv), *(printable(f"# {argument}: {reason}") for argument, reason in line.notes)]
    print_result(as_json, {"command": line.argv, "notes": notes}, shown)
    return 0


def _show_handover(handover: ExecCommand, *, as_json: bool) -> int:
    settings = [f"{name}={value}" for name, value in sorted(handover.environ.items())]
    text = shlex.join(["env", *settings, *handover.argv])
    print_result(as_json, {"command": handover.argv, "environ": handover.environ}, text)
    return 0


def _check_unused(arguments: _Arguments) -> None:
    """Raise ``ConfigError`` for options that would have no effect together."""
    handed_over = arguments.by_mpirun or arguments.by_srun
    by = "--mpirun" if arguments.by_mpirun else "--srun"
    no_hosts = arguments.hostfile is None
    rules = [
        (arguments.by_mpirun and arguments.by_srun, "--mpirun and --srun", "one of them starts the processes"),
        (
            bool(arguments.own_arguments) and not arguments.by_mpirun,
            "--mpirun-args without --mpirun",
            "they are arguments of mpirun",
        ),
        (handed_over and arguments.servers > 0, f"{by} with --servers", f"{by} starts workers only"),
        (
            handed_over and arguments.port > 0,
            f"{by} with --port",
            "ranks take MASTER_PORT from --env, or derive it alike",
        ),
        (arguments.by_srun and not no_hosts, "--srun with --hostfile", "SLURM knows its hosts"),
        (
            arguments.ssh_port is not None and (no_hosts or arguments.by_mpirun),
            "--ssh-port without ssh",
            "it belongs to --hostfile",
        ),
        (
            arguments.port > 0 and arguments.servers > 0,
            "--port with --servers",
            "workers of an asynchronous job do not meet",
        ),
        (
            arguments.elastic and not arguments.servers,
            "--elastic without --servers",
            "workers of dist_async alone can leave and join: the others all-reduce",
        ),
        (
            arguments.join is not None and bool(arguments.servers or arguments.port or not no_hosts or handed_over),
            "--join with --servers, --port, --hostfile, --mpirun or --srun",
            "workers join the servers of a running job, from this host",
        ),
        (
            arguments.first_rank is not None and arguments.join is None,
            "--first-rank without --join",
            "ranks begin at 0",
        ),
        (
            bool(arguments.tls) and not arguments.servers and arguments.join is None,
            "--tls without --servers",
            "Gloo and NCCL, which carry all else, encrypt nothing",
        ),
        (
            arguments.port > 0 and no_hosts,
            "--port without --hostfile",
            "ranks of one host meet at a port the launcher holds",
        ),
    ]
    problems = [
        Problem(
            given=combination,
            rule=rule,
            consequence="it would have no effect, so nothing was started",
            nearest="leave one out",
        )
        for holds, combination, rule in rules
        if holds
    ]
    if problems:
        raise ConfigError(*problems)
