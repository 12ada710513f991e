"""Command lines of other launchers as lines of ``unisono launch``. Nothing is run, and no file is read. Needs no torch.

What a line asks for that has no counterpart is told, argument by argument, with the reason. A line that cannot be read as that
launcher reads it is refused.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Final

from unisono.errors import ConfigError
from unisono.launch.launcher_options import LAUNCHERS, Launcher, LauncherOption
from unisono.launch.options import MAX_PROCESSES, LaunchOptions
from unisono.sanitize import shorten

_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", flags=re.ASCII | re.DOTALL)
_PYTHON: Final = re.compile(r"python[0-9.]*", flags=re.ASCII)
_PYTHON_VALUES: Final = ("-X", "-W")  # options of Python that take a word
_MODULES: Final[Mapping[str, str]] = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torch.distributed.launch",
    "accelerate.commands.launch": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
}
_PROGRAMS: Final[Mapping[str, str]] = {
    **{name: name for name in ("torchrun", "msrun", "horovodrun", "deepspeed", "mpirun", "launch.py")},
    "mpiexec": "mpirun",
    "mpirun.openmpi": "mpirun",
    "dmlc-submit": "launch.py",
}
_DIGITS: Final = 20  # of a number of a line
_HOSTS_FILE: Final = "hosts"  # the name of the file that is to be written
_SYNCHRONOUS: Final = re.compile(r"dist(_device)?_sync(_device)?|horovod")


@dataclass(frozen=True, kw_only=True, slots=True)
class TranslatedLine:
    """A line of ``unisono launch``, and what it leaves out: pairs of an argument and the reason."""

    argv: list[str]
    notes: list[tuple[str, str]]


@dataclass(kw_only=True, slots=True)
class _Asked:
    """What a line asks for, as far as it was read.

    Attributes:
        num_processes: Processes in all; 0 if it was not said.
        num_per_host: Processes of each host; 0 if it was not said.
        num_hosts: Hosts.
        num_servers: Parameter servers.
        hostfile: File of hosts.
        hosts: Lines of a file of hosts that is to be written.
        ssh_port: Port of ssh.
        max_restarts: Restarts after a crash.
        folder: Folder of logs.
        interface: Network interface.
        variables: Environment variables, NAME=VALUE or NAME.
        by_mpirun: Whether mpirun starts the processes.
        mpirun_words: Arguments for mpirun.
        is_module: Whether the program is a module of Python.
        is_program: Whether the program is one by itself, not a script.
        gets_local_rank: Whether the script gets its local rank as an argument.
        notes: What has no counterpart.
    """

    num_processes: int = 0
    num_per_host: int = 0
    num_hosts: int = 1
    num_servers: int = 0
    hostfile: str = ""
    hosts: list[str] = field(default_factory=list[str])
    ssh_port: str = ""
    max_restarts: int = 0
    folder: str = ""
    interface: str = ""
    variables: list[str] = field(default_factory=list[str])
    by_mpirun: bool = False
    mpirun_words: list[str] = field(default_factory=list[str])
    is_module: bool = False
    is_program: bool = False
    gets_local_rank: bool = True
    notes: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])


def translate_line(words: Sequence[str], count_accelerators: Callable[[], int]) -> TranslatedLine:
    """The line of ``unisono launch`` that does what ``words``, the line of another launcher, does.

    Args:
        words: The line, as a shell divides it.
        count_accelerators: The accelerators of this host, for launchers that start a process for each.

    Raises:
        ConfigError: It is no line of a launcher that is known, or not one that this launcher would read.
    """
    asked = _Asked()
    rest = _take_variables(list(words), asked)
    name, rest = _launcher_of(rest)
    if name == "worker":
        return _of_dmlc_worker(rest, asked)
    launcher = LAUNCHERS[name]
    taken, command = _parsed(name, launcher, rest)
    if not command:
        raise _unreadable(name, rest, "it names no program to start")
    if name == "mpirun" and ":" in command:
        raise _unreadable(name, rest, "several programs, with ':' between them; a launch has one")
    for option, values in taken:
        _apply(name, option, values, asked, command, count_accelerators)
    asked.by_mpirun |= name == "mpirun"
    _count(name, launcher, asked, command, count_accelerators)
    program = _program(launcher, asked, command)
    if launcher.passes_local_rank and asked.gets_local_rank and not asked.is_program:
        spelled = f"{launcher.passes_local_rank}=N of each process"
        asked.notes.append((spelled, "the script is not given it: LOCAL_RANK in the environment has it"))
    asked.notes += launcher.remarks
    return _rendered(asked, program)


# --- reading -----------------------------------------------------------------------------------------------------------


def _take_variables(words: list[str], asked: _Asked) -> list[str]:
    """The words after ``NAME=VALUE …``, as a shell and ``env`` take them; the variables go into ``asked``."""
    if words[:1] == ["env"]:
        words = words[1:]
    while words and _VARIABLE.fullmatch(words[0]):
        asked.variables.append(words.pop(0))
    return words


def _launcher_of(words: list[str]) -> tuple[str, list[str]]:
    """The launcher of a line and the words after its name; ``worker`` for a program without one."""
    if not words:
        raise _unknown("")
    program = PurePath(words[0]).name
    if program in _PROGRAMS:
        return _PROGRAMS[program], words[1:]
    if program == "accelerate" and words[1:2] == ["launch"]:
        return "accelerate", words[2:]
    if not _PYTHON.fullmatch(program):
        return "worker", words
    rest = words[1:]
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        rest = rest[2 if rest[0] in _PYTHON_VALUES else 1 :]
    if rest[:1] == ["-m"] and rest[1:2] and rest[1] in _MODULES:
        return _MODULES[rest[1]], rest[2:]
    if rest and PurePath(rest[0]).name in ("launch.py", "dmlc-submit"):
        return "launch.py", rest[1:]
    return "worker", words


def _parsed(
    name: str, launcher: Launcher, words: list[str]
) -> tuple[list[tuple[LauncherOption, list[str]]], list[str]]:
    """The options of a line with their values, each as often as it is given, and the command."""
    # all but Open MPI parse their lines with argparse, which takes abbreviations
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=name != "mpirun")
    for number, option in enumerate(launcher.options):
        if option.num_values:
            count = None if option.num_values == 1 else option.num_values
            parser.add_argument(*option.names, dest=str(number), action="append", nargs=count)
        else:
            parser.add_argument(*option.names, dest=str(number), action="count")
    parser.add_argument("command", nargs="*" if launcher.reads_anywhere else argparse.REMAINDER)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            found, unknown = parser.parse_known_args(words)
    except SystemExit:
        raise _unreadable(name, words, said.getvalue().strip().rpartition("error: ")[2]) from None
    command: list[str] = found.command
    if launcher.reads_anywhere:
        command, unknown = command + unknown, []
    if command[:1] == ["--"]:
        command = command[1:]
    if unknown:
        raise _unreadable(name, words, f"unknown arguments: {shlex.join(unknown)}")
    taken: list[tuple[LauncherOption, list[str]]] = []
    for number, option in enumerate(launcher.options):
        given = getattr(found, str(number))
        for each in given if isinstance(given, list) else [None] * (given or 0):
            values: list[str] = [] if each is None else [each] if isinstance(each, str) else each
            taken.append((option, values))
    return taken, command


def _apply(
    name: str,
    option: LauncherOption,
    values: list[str],
    asked: _Asked,
    command: list[str],
    count_accelerators: Callable[[], int],
) -> None:
    """Note in ``asked`` what an option decides.

    Args:
        name: The launcher.
        option: The option.
        values: Its values.
        asked: What the line asks for.
        command: The program and its arguments.
        count_accelerators: The accelerators of this host.
    """
    spelled = shlex.join([option.names[0], *values])
    value = values[0] if values else ""
    match option.decides:
        case "num_processes" | "num_servers":
            setattr(asked, option.decides, _whole(name, spelled, value))
        case "num_per_host":
            asked.num_per_host = _per_host(name, spelled, value, asked, count_accelerators)
        case "num_hosts":
            fewest, _, most = value.partition(":")
            asked.num_hosts = _whole(name, spelled, most or fewest)
            if most and most != fewest:
                asked.notes.append(
                    (spelled, f"a job that all-reduces has as many hosts as its hosts file: {most} here")
                )
        case "max_restarts":
            asked.max_restarts = _whole(name, spelled, value, least=0)
        case "hostfile" | "ssh_port" | "folder" | "interface":
            setattr(asked, option.decides, value)
            if option.decides == "interface" and "," in value:
                asked.interface = ""
                asked.notes.append((spelled, "--interface is one network interface, which every host has"))
        case "host_list":
            asked.hosts += [_host_line(each) for each in value.split(",")]
        case "variable":
            asked.variables.append(value if "=" in value or ":" not in value else value.replace(":", "=", 1))
        case "threads":
            asked.variables.append(f"OMP_NUM_THREADS={value}")
        case "devices":
            if value != "all":
                asked.variables.append(f"CUDA_VISIBLE_DEVICES={value}")
        case "include":
            _include(spelled, value, asked)
        case "precision":
            asked.variables.append(f"ACCELERATE_MIXED_PRECISION={value}")
            asked.notes.append((spelled, "Accelerate reads it; a unisono program has plan.precision"))
        case "module":
            asked.is_module = True
        case "no_python":
            asked.is_program = True
        case "no_local_rank":
            asked.gets_local_rank = False
        case "by_mpirun":
            asked.by_mpirun = True
        case "mpirun_text":
            asked.mpirun_words += shlex.split(value)
        case "mpirun_words":
            asked.mpirun_words += [option.names[0], *values]
        case "tracker":
            _tracker(spelled, value, asked)
        case "as_here":
            pass
        case "":
            asked.notes.append((spelled, option.why))


def _per_host(name: str, spelled: str, value: str, asked: _Asked, count_accelerators: Callable[[], int]) -> int:
    """The number in ``value``, which may also be ``auto``, ``cpu`` or a kind of device, on this host."""
    if value.isdecimal():
        return _whole(name, spelled, value)
    if value not in ("auto", "cpu", "gpu", "xpu"):
        raise _unreadable(name, [spelled], f"{value!r} is no number")
    count = 0 if value == "cpu" else count_accelerators()
    count = count or (0 if value in ("gpu", "xpu") else os.cpu_count() or 1)
    asked.notes.append((spelled, f"--processes is a number: {max(1, count)} by what this host has"))
    return max(1, count)


def _include(spelled: str, value: str, asked: _Asked) -> None:
    """DeepSpeed's ``localhost:0,1`` and ``n1@n2:0,1``."""
    parts = [each.partition(":")[::2] for each in value.split("@")]
    if [host for host, _ in parts] == ["localhost"]:
        devices = parts[0][1]
        if devices:
            asked.variables.append(f"CUDA_VISIBLE_DEVICES={devices}")
            asked.num_per_host = len(devices.split(","))
        return
    asked.hosts += [f"{host} slots={len(slots.split(','))}" if slots else host for host, slots in parts]
    if any(slots for _, slots in parts):
        asked.notes.append(
            (spelled, "a host's processes use its first devices; --env CUDA_VISIBLE_DEVICES is for all hosts")
        )


def _tracker(spelled: str, value: str, asked: _Asked) -> None:
    match value:
        case "mpi":
            asked.by_mpirun = True
        case "sge" | "yarn" | "mesos" | "slurm" | "kubernetes":
            reason = "this launcher starts processes here or over ssh, or by mpirun or srun, and submits nothing to other systems"
            asked.notes.append((spelled, reason))
        case _:  # on this host, or on those of the file
            pass


def _host_line(text: str) -> str:
    host, _, slots = text.partition(":")
    return f"{host} slots={slots}" if slots else host


def _whole(name: str, spelled: str, value: str, least: int = 1) -> int:
    # int() refuses thousands of digits
    if not value.isdecimal() or len(value) > _DIGITS or not least <= int(value) <= MAX_PROCESSES:
        raise _unreadable(name, [spelled], f"{shorten(value)!r} is no whole number from {least} to {MAX_PROCESSES:,}")
    return int(value)


# --- what it comes to --------------------------------------------------------------------------------------------------


def _count(
    name: str, launcher: Launcher, asked: _Asked, command: list[str], count_accelerators: Callable[[], int]
) -> None:
    """Fill in the number of processes and servers as the launcher does.

    Args:
        name: The launcher.
        launcher: Its defaults.
        asked: What the line asks for.
        command: The program and its arguments.
        count_accelerators: The accelerators of this host.
    """
    if name == "launch.py":
        _mxnet_servers(asked, command)
    if name == "msrun":
        asked.num_processes = asked.num_processes or launcher.num_processes
        per_host = asked.num_per_host or launcher.num_processes
        asked.num_hosts = -(-asked.num_processes // per_host)
        asked.num_per_host = per_host if asked.num_hosts > 1 else asked.num_processes
    if not (asked.num_processes or asked.num_per_host or asked.hostfile or asked.hosts):
        if launcher.num_processes < 0:
            raise _unreadable(name, command, "the number of processes is missing")
        asked.num_per_host = launcher.num_processes or max(1, count_accelerators())
        if launcher.num_processes == 0:
            reason = f"one process for each accelerator of this host, {asked.num_per_host} here"
            asked.notes.append((f"{name} without a number of processes", reason))
    if not asked.num_processes and asked.num_per_host and not asked.hostfile:
        asked.num_processes = asked.num_per_host * asked.num_hosts
    if asked.num_hosts > 1 and not asked.hostfile and not asked.hosts:
        slots = asked.num_per_host or -(-asked.num_processes // asked.num_hosts)
        asked.hosts = [f"HOST{number} slots={slots}" for number in range(1, asked.num_hosts + 1)]
    elif asked.hostfile and asked.num_per_host and not asked.num_processes:
        reason = "the slots of the hosts file are the processes of a host; -n is their number in all"
        asked.notes.append((f"{asked.num_per_host} processes per host", reason))
    if asked.hostfile and asked.num_hosts > 1:
        asked.notes.append(
            (f"{asked.num_hosts} hosts", "all hosts of the hosts file are used: leave the others out of it")
        )


def _mxnet_servers(asked: _Asked, command: list[str]) -> None:
    """MXNet's tracker starts as many servers as workers; sums of all ranks need none here, and are refused beside servers."""
    asked.num_servers = asked.num_servers or asked.num_processes
    if any(_SYNCHRONOUS.fullmatch(word.rpartition("=")[2]) for word in command):
        reason = "gradients of dist_sync are all-reduced among the workers; servers serve dist_async"
        asked.notes.append((f"{asked.num_servers} servers", reason))
        asked.num_servers = 0
    elif asked.by_mpirun:
        reason = "mpirun starts workers only; with plan.sync=dist_async unisono train starts launch.num_servers servers itself"
        asked.notes.append((f"{asked.num_servers} servers", reason))
        asked.num_servers = 0


def _program(launcher: Launcher, asked: _Asked, command: list[str]) -> list[str]:
    if not launcher.runs_python or asked.is_program:
        return command
    if asked.is_module:
        return ["python", "-m", *command]
    if launcher is LAUNCHERS["msrun"] and not command[0].endswith(".py"):
        return command
    return ["python", *command]


def _rendered(asked: _Asked, program: list[str]) -> TranslatedLine:
    notes = asked.notes
    if asked.hosts:
        written = "write a file " + _HOSTS_FILE + " with the lines: " + "; ".join(asked.hosts)
        notes = [*notes, ("the hosts", written)]
    hostfile = asked.hostfile or (_HOSTS_FILE if asked.hosts else "")
    argv = ["unisono", "launch"]
    if asked.by_mpirun:
        argv.append("--mpirun")
    if asked.num_processes:
        argv += ["-n", str(asked.num_processes)]
    if asked.num_servers:
        argv += ["--servers", str(asked.num_servers)]
    if hostfile:
        argv += ["--hostfile", hostfile]
    if asked.ssh_port and hostfile and not asked.by_mpirun:
        argv += ["--ssh-port", asked.ssh_port]
    elif asked.ssh_port:
        notes = [*notes, (f"ssh port {asked.ssh_port}", "no host is reached over ssh by this launcher")]
    if asked.interface:
        argv += ["--interface", asked.interface]
    for variable in asked.variables:
        argv += ["--env", variable]
    if asked.folder and asked.by_mpirun:
        notes = [*notes, (f"logs in {asked.folder}", "mpirun's own --output-filename, in --mpirun-args, writes them")]
    elif asked.folder:
        argv += ["--dir", asked.folder]
    if asked.mpirun_words and asked.by_mpirun:
        argv += ["--mpirun-args", shlex.join(asked.mpirun_words)]
    elif asked.mpirun_words:
        notes = [*notes, (shlex.join(asked.mpirun_words), "they are for mpirun, which starts nothing here")]
    if not asked.by_mpirun and asked.max_restarts != LaunchOptions().max_restarts:
        argv += ["--max-restarts", str(asked.max_restarts)]
    return TranslatedLine(argv=[*argv, "--", *program], notes=notes)


_DMLC: Final[Mapping[str, str]] = {
    "DMLC_ROLE": "the launch starts the processes of all roles",
    "DMLC_PS_ROOT_URI": "the launcher chooses where the processes meet",
    "DMLC_PS_ROOT_PORT": "the launcher chooses where the processes meet",
    "DMLC_WORKER_ID": "the launcher numbers its processes",
    "DMLC_SERVER_ID": "the launcher numbers its processes",
    "DMLC_TASK_ID": "the launcher numbers its processes",
    "DMLC_NODE_HOST": "servers listen at the address of their host, or of --interface",
}


def _of_dmlc_worker(command: list[str], asked: _Asked) -> TranslatedLine:
    """One process of a job of MXNet's tracker, started by hand with ``DMLC_…=… python train.py``."""
    given = dict(variable.split("=", 1) for variable in asked.variables)
    if "DMLC_NUM_WORKER" not in given or not command:
        raise _unknown(shlex.join(command))
    asked.num_processes = _whole("DMLC", "DMLC_NUM_WORKER", given.pop("DMLC_NUM_WORKER"))
    asked.num_servers = _whole("DMLC", "DMLC_NUM_SERVER", given.pop("DMLC_NUM_SERVER", "0"), least=0)
    if asked.num_servers:
        _mxnet_servers(asked, command)
    asked.interface = given.pop("DMLC_INTERFACE", "")
    asked.notes += [(f"{name}={given.pop(name)}", why) for name, why in _DMLC.items() if name in given]
    asked.variables = [f"{name}={value}" for name, value in given.items()]
    return _rendered(asked, command)


# --- errors ------------------------------------------------------------------------------------------------------------


def _unknown(line: str) -> ConfigError:
    return ConfigError(
        given=f"--from -- {line}".rstrip(),
        rule="it is a line of torchrun, python -m torch.distributed.run or .launch, msrun, mpirun, horovodrun, accelerate "
        "launch, deepspeed, MXNet's launch.py, or DMLC_NUM_WORKER=… and a program",
        consequence="it is not known what the line does, so none was written",
        nearest="unisono launch --from -- torchrun --nproc-per-node=2 train.py",
    )


def _unreadable(name: str, words: Sequence[str], reason: str) -> ConfigError:
    return ConfigError(
        given=f"a line of {name} ({shlex.join(words)}): {reason}",
        rule=f"the line is one that {name} reads, of the version that is known here",
        consequence="an argument could be taken for the program, so no line was written",
        nearest=f"correct it, or leave the argument out and see `{name} --help` for what it does",
    )
