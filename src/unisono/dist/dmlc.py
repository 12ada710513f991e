"""The parts of a job that MXNet's tracker starts: its scheduler keeps the store, its servers serve, its workers report.

A tracker starts one script as worker, server and scheduler. ``take_role`` turns the latter two into processes of
``unisono.kvstore.server.dmlc``, which end with the job. They learn its end from a connection that each worker holds to
the scheduler while it lives: the kernel closes it when a worker dies.

    store at DMLC_PS_ROOT_URI:PORT     lifeline      port of the scheduler for these connections
                                       server/<n>    host:port of server n
    connection                         "worker 3\\n", and "bye\\n" at a normal end
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import stat
import sys
import time
from collections.abc import Mapping
from dataclasses import replace

from torch.distributed import PrefixStore, Store

from unisono.dist.interpreter import module_command, module_path
from unisono.dist.jobspec import JobSpec
from unisono.dist.rendezvous import open_store
from unisono.errors import CommError, LaunchError
from unisono.storage.files import os_reason

LIFELINE, SERVER = "lifeline", "server/{}"
MEET_S = 120.0

_MODULE = "unisono.kvstore.server.dmlc"
_SECRET_BYTES = 32
_POLL_S = 0.05
# this process's connection to the scheduler
_LIFELINES: dict[int, socket.socket] = {}


def take_role(job: JobSpec) -> None:
    """Return in a worker; a server or scheduler of MXNet's tracker becomes that process and never returns.

    A worker of a job with a scheduler first connects to it. Raises LaunchError for a server without a secret or certificates,
    CommError where no scheduler answers.
    """
    if job.source != "dmlc":
        return
    if job.role == "worker":
        if job.servers:
            check_credentials(os.environ)
            _report(job)
        return
    if job.role == "server":
        require_credentials(os.environ)
    sys.stdout.flush()
    sys.stderr.flush()
    # a new program of the same process: nothing of the script is left to become rank 0
    command = module_command(_MODULE)
    os.execve(command[0], command, os.environ | {"PYTHONPATH": module_path()})


def require_credentials(environ: Mapping[str, str]) -> None:
    """Raise LaunchError unless a secret or a folder of certificates is set for servers and workers."""
    if not has_credentials(environ):
        raise LaunchError(
            given=f"a {environ.get('DMLC_ROLE', 'worker')} of MXNet's tracker, and neither UNISONO_SECRET_FILE nor UNISONO_TLS",
            rule="servers and workers prove to each other that they belong to one job",
            consequence="anyone who reaches the port could change the parameters, so nothing was started",
            nearest="on every host: umask 077; head -c 32 /dev/urandom > secret (one file, copied); UNISONO_SECRET_FILE=secret",
        )
    check_credentials(environ)


def check_credentials(environ: Mapping[str, str]) -> None:
    """Raise LaunchError if the secret's file or the folder of certificates is none. Their content is read when it is used."""
    for name, kind, is_kind in (
        ("UNISONO_SECRET_FILE", "a plain file of 32 bytes", stat.S_ISREG),
        ("UNISONO_TLS", "a folder of certificates", stat.S_ISDIR),
    ):
        if not (value := environ.get(name)):
            continue
        fault = ""
        try:
            facts = os.stat(value)
            if not is_kind(facts.st_mode):
                fault = "it is something else"
            elif name == "UNISONO_SECRET_FILE" and facts.st_size != _SECRET_BYTES:
                fault = f"it holds {facts.st_size} bytes"
        except (OSError, ValueError) as error:
            fault = os_reason(error) if isinstance(error, OSError) else str(error)
        if fault:
            raise LaunchError(
                given=f"{name}={value}: {fault}",
                rule=f"it is {kind}, the same on all hosts",
                consequence="this process could not prove that it belongs to the job, so nothing was started",
                nearest="umask 077; head -c 32 /dev/urandom > secret (one file, copied); UNISONO_SECRET_FILE=secret",
            )


def has_credentials(environ: Mapping[str, str]) -> bool:
    """Whether a secret or a folder of certificates is set."""
    return any(environ.get(name) for name in ("UNISONO_SECRET_FILE", "UNISONO_SECRET_FD", "UNISONO_TLS"))


def scheduler_store(job: JobSpec) -> Store:
    """The scheduler's store, from any process of the job. Raises CommError where no scheduler answers in 120 s."""
    try:
        return PrefixStore("dmlc", open_store(replace(job, shared_store=True), MEET_S))
    except CommError as error:
        raise CommError(
            given=f"no scheduler at {job.master_addr}:{job.master_port} (DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT) in {MEET_S:g} s",
            rule=f"a job of DMLC_NUM_SERVER={job.servers} has a process with DMLC_ROLE=scheduler there",
            consequence=f"this {job.role} knows no other process and was not started",
            nearest="the tracker's log of the scheduler; DMLC_NUM_SERVER=0 for a job without servers and scheduler",
        ) from error


def server_addresses(job: JobSpec, timeout_s: float = MEET_S) -> list[tuple[str, int]]:
    """Host and port of each server, once all have reported. Raises CommError naming those that have not."""
    store = scheduler_store(job)
    keys = [SERVER.format(number) for number in range(job.servers)]
    deadline = time.monotonic() + timeout_s
    while not store.check(keys):
        if time.monotonic() > deadline:
            missing = [str(number) for number, key in enumerate(keys) if not store.check([key])]
            raise CommError(
                given=f"server {', '.join(missing)} of {job.servers} has not reported within {timeout_s:g} s",
                rule="all servers listen before the first worker begins",
                consequence="no step was made",
                nearest="the tracker's log of that server says why it did not start",
            )
        time.sleep(_POLL_S)
    pairs = (store.get(key).decode().rpartition(":") for key in keys)
    return [(host, int(port)) for host, _, port in pairs]


def connect_lifeline(job: JobSpec, name: str) -> socket.socket:
    """A connection to the scheduler that lives as long as this process, as ``name``."""
    store = scheduler_store(job)
    store.wait([LIFELINE])
    connection = socket.create_connection((job.master_addr, int(store.get(LIFELINE))), timeout=MEET_S)
    connection.settimeout(None)
    connection.sendall(f"{name}\n".encode())
    return connection


def _report(job: JobSpec) -> None:
    if os.getpid() in _LIFELINES:
        return
    pid = os.getpid()
    connection = _LIFELINES[pid] = connect_lifeline(job, f"worker {job.rank}")

    def leave() -> None:
        if os.getpid() == pid:  # not in a fork
            with contextlib.suppress(OSError):
                connection.sendall(b"bye\n")

    atexit.register(leave)
