"""The parts of a job that MXNet's tracker starts: its scheduler keeps the store, its servers report their addresses there.

A tracker starts one script as worker, server and scheduler. ``take_role`` turns the latter two into processes of
``unisono.kvstore.server.dmlc``, which end with the job. They learn its end from the connection to the scheduler's store
that each worker holds while it lives: the kernel closes it when a worker dies.

    store at DMLC_PS_ROOT_URI:DMLC_PS_ROOT_PORT     dmlc/server/<n>    host:port of server n
    its members                                     worker <n>, server <any>, and rank <n> for the rendezvous of all ranks
"""

from __future__ import annotations

import atexit
import os
import stat
import sys
from collections.abc import Mapping
from datetime import timedelta

from torch.distributed import DistNetworkError, DistStoreError

from unisono.dist.interpreter import module_command, module_path
from unisono.dist.job_store import JobStore
from unisono.dist.jobspec import JobSpec
from unisono.dist.rendezvous import open_store
from unisono.dist.secret import SECRET_BYTES
from unisono.errors import CommError, LaunchError
from unisono.storage.files import os_reason

SERVER = "dmlc/server/{}"
SCHEDULER_WAIT_S = 120.0  # for the scheduler, and for all servers to report

_MODULE = "unisono.kvstore.server.dmlc"
# the connection of this process to the scheduler
_SCHEDULER_STORES: dict[int, JobStore] = {}


def take_role(job: JobSpec) -> None:
    """Return in a worker; a server or scheduler of MXNet's tracker becomes that process and never returns.

    A worker of a job with a scheduler first connects to it. Raises LaunchError for a server without a secret or certificates
    and for wrong ones, CommError where no scheduler answers.
    """
    if job.source != "dmlc":
        return
    if job.role == "worker":
        if job.servers:
            check_credentials(os.environ)
            worker_store(job)
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
    """Raise LaunchError if the secret's file or the folder of certificates is missing or of another kind.

    Their content is read when it is used.
    """
    new_secret = "umask 077; head -c 32 /dev/urandom > secret (one file, copied); UNISONO_SECRET_FILE=secret"
    for name, kind, is_kind, nearest in (
        ("UNISONO_SECRET_FILE", f"a plain file of {SECRET_BYTES} bytes", stat.S_ISREG, new_secret),
        (
            "UNISONO_TLS",
            "a folder of certificates",
            stat.S_ISDIR,
            "UNISONO_TLS=FOLDER of the certificates, or unset it",
        ),
    ):
        if not (value := environ.get(name)):
            continue
        fault = ""
        try:
            facts = os.stat(value)
            if not is_kind(facts.st_mode):
                fault = "it is something else"
            elif name == "UNISONO_SECRET_FILE" and facts.st_size != SECRET_BYTES:
                fault = f"it holds {facts.st_size} bytes"
        except (OSError, ValueError) as error:
            fault = os_reason(error) if isinstance(error, OSError) else str(error)
        if fault:
            raise LaunchError(
                given=f"{name}={value}: {fault}",
                rule=f"it is {kind}, the same on all hosts",
                consequence="this process could not prove that it belongs to the job, so nothing was started",
                nearest=nearest,
            )


def has_credentials(environ: Mapping[str, str]) -> bool:
    """Whether a secret or a folder of certificates is set."""
    return any(environ.get(name) for name in ("UNISONO_SECRET_FILE", "UNISONO_SECRET_FD", "UNISONO_TLS"))


def scheduler_store(job: JobSpec, name: str) -> JobStore:
    """A connection to the scheduler's store, as its member ``name``. Raises CommError where no scheduler answers in 120 s."""
    try:
        return open_store(job, SCHEDULER_WAIT_S, name=name)
    except CommError as error:
        raise CommError(
            given=f"no scheduler at {job.master_addr}:{job.master_port} (DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT) in "
            f"{SCHEDULER_WAIT_S:g} s",
            rule=f"a job of DMLC_NUM_SERVER={job.servers} has a process with DMLC_ROLE=scheduler there",
            consequence=f"this {job.role} knows no other process and was not started",
            nearest="the tracker's log of the scheduler; DMLC_NUM_SERVER=0 for a job without servers and scheduler",
        ) from error


def worker_store(job: JobSpec) -> JobStore:
    """This worker's connection to the scheduler, which lives as long as the process."""
    pid = os.getpid()
    if pid not in _SCHEDULER_STORES:
        connection = _SCHEDULER_STORES[pid] = scheduler_store(job, f"worker {job.rank}")

        def leave() -> None:
            if os.getpid() == pid:  # not in a fork
                connection.leave()

        atexit.register(leave)
    return _SCHEDULER_STORES[pid]


def server_addresses(
    job: JobSpec, timeout_s: float = SCHEDULER_WAIT_S, store: JobStore | None = None
) -> list[tuple[str, int]]:
    """Host and port of each server, once all have reported. Raises CommError naming those that have not."""
    store = store or worker_store(job)
    keys = [SERVER.format(number) for number in range(job.servers)]
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except DistStoreError as error:
        missing = [str(number) for number, key in enumerate(keys) if not store.check([key])]
        raise CommError(
            given=f"server {', '.join(missing)} of {job.servers} has not reported within {timeout_s:g} s",
            rule="all servers listen before the first worker begins",
            consequence="no step was made",
            nearest="the tracker's log of that server says why it did not start",
        ) from error
    except DistNetworkError as error:
        raise CommError(
            given=f"the scheduler ended before {job.role} {job.rank} knew the {job.servers} servers of the job",
            rule="the scheduler stays until the last worker has left",
            consequence="no step was made",
            nearest="the tracker's log of the scheduler",
        ) from error
    pairs = (store.get(key).decode().rpartition(":") for key in keys)
    return [(host, int(port)) for host, _, port in pairs]
