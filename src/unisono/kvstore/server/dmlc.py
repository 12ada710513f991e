"""``python -m unisono.kvstore.server.dmlc``: the scheduler and the servers of a job that MXNet's tracker started.

The scheduler keeps the store where ranks meet and servers report their addresses, until the last worker has left.
A server serves until the scheduler closes its connection. Place and role are in ``DMLC_*``; see ``dist.dmlc``.
"""

from __future__ import annotations

import math
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterable

from unisono.dist import JobSpec, StopNotice, job_from_environ
from unisono.dist.dmlc import SERVER, require_credentials, scheduler_store, server_addresses
from unisono.dist.rendezvous import listen_at_master, serve_store
from unisono.dist.secret import job_secret
from unisono.errors import CommError, LaunchError, UnisonoError
from unisono.kvstore.server import __main__ as server_process
from unisono.kvstore.server.child_servers import DRAIN
from unisono.kvstore.wire.frame_server import listen
from unisono.launch.network_interface import choose_interface

_POLL_S = 0.2
# a worker that was lost has so long to come back (a tracker may start it again), and a server that is late to come
_RETURN_S = 10.0
# workers may read data for long before they join
_ARRIVAL_S = 1800.0


def main() -> int:
    """Run this process's role until the job has ended; returns the exit code."""
    try:
        job = job_from_environ(os.environ)
        if job.source != "dmlc" or job.role == "worker":
            raise LaunchError(
                given=f"{__spec__.name if __spec__ else __name__} as a {job.role} of a job by {job.source}",
                rule="it is a server or scheduler of MXNet's tracker, which sets DMLC_ROLE",
                consequence="nothing was started",
                nearest="the tracker's launch.py with your own script as its command",
            )
        return _keep_store(job) if job.role == "scheduler" else _serve(job)
    except UnisonoError as error:
        server_process.say(f"unisono: {error}")
        return error.exit_code


# --- the scheduler -------------------------------------------------------------------------------------------------


def _keep_store(job: JobSpec) -> int:
    listener = listen_at_master(job, "the scheduler")
    store = serve_store(job, listener, job_secret(job, os.environ), "scheduler")
    assert store.server is not None
    deadline, idle_since_s = time.monotonic() + _ARRIVAL_S, math.inf
    with StopNotice() as notice:
        while not notice.wait(_POLL_S):
            now = time.monotonic()
            came, present, lost = store.server.members()
            if len(_named(came, "worker")) < job.world_size:
                if now > deadline:
                    raise CommError(
                        given=f"{len(_named(came, 'worker'))} of {job.world_size} workers after {_ARRIVAL_S:g} s",
                        rule="every worker joins the job: join_world, create_kvstore or a Trainer",
                        consequence="the scheduler and the servers end",
                        nearest="the log of a worker that did not come",
                    )
                continue
            idle_since_s = math.inf if _named(present, "worker") else min(idle_since_s, now)
            # one that was lost may come back, and a server may be slower to start than a short job
            is_complete = not _named(lost, "worker") and len(_named(came, "server")) >= job.servers
            if now - idle_since_s > (0 if is_complete else _RETURN_S):
                break
    store.close()
    return 0


def _named(names: Iterable[str], kind: str) -> set[str]:
    return {name for name in names if name.startswith(f"{kind} ")}


# --- a server ------------------------------------------------------------------------------------------------------


def _serve(job: JobSpec) -> int:
    # what can be wrong on this host alone is found before the scheduler is waited for
    require_credentials(os.environ)
    host = os.environ.get("DMLC_NODE_HOST") or choose_interface(job.interface, job.master_addr).address
    listener = listen(host, tls=bool(os.environ.get("UNISONO_TLS")))
    store = scheduler_store(job, f"server {secrets.randbelow(10**9)}")
    number = job.server_index if job.server_index is not None else store.add("dmlc/servers", 1) - 1
    if number >= job.servers:
        raise LaunchError(
            given=f"server {number} of DMLC_NUM_SERVER={job.servers}",
            rule="a job has as many servers as it says",
            consequence="this one was not started",
            nearest="one process with DMLC_ROLE=server less",
        )
    store.set(SERVER.format(number), f"{host}:{listener.getsockname()[1]}")
    try:
        addresses = server_addresses(job, store=store)
    except CommError:
        if store.is_open:
            raise
        server_process.say("the job has ended before all of its servers had come")
        return 0

    def end_with_the_scheduler() -> None:
        store.wait_for_end()
        os.kill(os.getpid(), signal.SIGTERM)

    os.environ |= {
        "UNISONO_SERVER": str(number),
        "UNISONO_SERVER_ADDRESSES": ",".join(f"{host}:{port}" for host, port in addresses),
        "UNISONO_RESTART_COUNT": "0",
        "UNISONO_LISTEN_FD": str(listener.detach()),
        DRAIN: "1",
    }
    watch = threading.Thread(target=end_with_the_scheduler, name="unisono-scheduler", daemon=True)
    # from here on a stop signal is the server's: its handler is there once it listens
    return server_process.main(watch.start)


if __name__ == "__main__":
    sys.exit(main())
