"""Whether the hosts of a job can be reached: names, ssh without a password, and the same interpreter there. No torch."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from unisono.dist.interpreter import code_command
from unisono.doctor.check import Check, judged
from unisono.launch.host_agent_client import agent_command
from unisono.launch.hostfile import Host, read_hostfile
from unisono.sanitize import printable, shorten

_ANSWER_S: Final = 30.0
_QUESTION: Final = "import platform; print('unisono-doctor', platform.python_version())"
_SHOWN_CHARS: Final = 300


def check_hosts(hostfile: Path, ssh_port: int | None = None) -> Iterator[Check]:
    """JOB02 and JOB03 for the hosts of a file; raises LaunchError for a file that cannot be read."""
    hosts = read_hostfile(hostfile, port=ssh_port)
    names = _names([host.name for host in hosts])
    yield names
    yield _interpreters(hosts)


def check_slurm(environ: Mapping[str, str]) -> Iterator[Check]:
    """JOB02 for the hosts of this process's SLURM allocation; nothing outside of one."""
    if not (listed := environ.get("SLURM_JOB_NODELIST")) or shutil.which("scontrol") is None:
        return
    told = subprocess.run(
        ["scontrol", "show", "hostnames", listed],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if told.returncode or not told.stdout.split():
        yield judged(
            "JOB02",
            "names of the hosts",
            f"scontrol does not read SLURM_JOB_NODELIST={printable(listed)}: {printable(told.stderr.strip())}",
            failure="ask SLURM for the allocation again (salloc, sbatch)",
        )
        return
    yield _names(told.stdout.split())


def _names(names: Sequence[str]) -> Check:
    unknown: list[str] = []
    for name in names:
        try:
            socket.getaddrinfo(name, None)
        except OSError as error:
            unknown.append(f"{name}: {error.strerror or error}")
    evidence = "; ".join(unknown) or f"{', '.join(names[:4])}{', …' if len(names) > 4 else ''} resolve"
    cure = "add the name to /etc/hosts or the name server, or give the address in its place"
    return judged("JOB02", "names of the hosts", evidence, failure=cure if unknown else "")


def _interpreters(hosts: Sequence[Host]) -> Check:
    """Ask all hosts at the same time for the version of this very interpreter, over ssh without a password."""
    title, here = "ssh and the interpreter", ".".join(map(str, sys.version_info[:3]))
    script = f"cd {shlex.quote(os.getcwd())} || exit\nexec {shlex.join(code_command(_QUESTION))}\n"
    asked: list[subprocess.Popen[str] | OSError] = []
    for host in hosts:
        try:
            asked.append(
                subprocess.Popen(
                    agent_command(host),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    errors="replace",
                    start_new_session=True,
                )
            )
        except OSError as error:
            asked.append(error)
    troubles: list[str] = []
    for host, process in zip(hosts, asked, strict=True):
        if isinstance(process, OSError):
            troubles.append(f"{host.name}: ssh cannot be started: {process.strerror}")
            continue
        try:
            answer, said = process.communicate(script, timeout=_ANSWER_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            troubles.append(f"{host.name}: no answer after {_ANSWER_S:g} s")
            continue
        version = next((line.split()[1] for line in answer.splitlines() if line.startswith("unisono-doctor ")), "")
        if not version:
            words = printable(" ".join((said or answer).split()))
            troubles.append(f"{host.name}: {shorten(words, _SHOWN_CHARS) or f'exit code {process.returncode}'}")
        elif version != here:
            troubles.append(f"{host.name}: {sys.executable} is Python {version} there, {here} here")
    evidence = "; ".join(troubles) or f"{len(hosts)} hosts have {sys.executable}, Python {here}"
    cure = "ssh HOST true has to work without a question, and the interpreter and this folder have to be there as here"
    return judged("JOB03", title, evidence, failure=cure if troubles else "")
