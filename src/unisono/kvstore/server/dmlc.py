"""``python -m unisono.kvstore.server.dmlc``: the scheduler and the servers of a job that MXNet's tracker started.

The scheduler keeps the store where ranks meet and servers report their addresses, until the last worker has left.
A server serves until the scheduler closes its connection. Place and role are in ``DMLC_*``; see ``dist.dmlc``.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore

from unisono.dist import JobSpec, StopNotice, job_from_environ
from unisono.dist.dmlc import LIFELINE, SERVER, connect_lifeline, require_credentials, scheduler_store, server_addresses
from unisono.dist.rendezvous import listen_at_master
from unisono.errors import CommError, LaunchError, UnisonoError
from unisono.kvstore.server import __main__ as server_process
from unisono.kvstore.server.child_servers import DRAIN
from unisono.kvstore.wire.frame_server import listen
from unisono.launch.network_interface import choose_interface

_POLL_S = 0.2
# a worker that was lost has so long to come back: a tracker may start it again
_RETURN_S = 10.0
# workers may read data for long before they join
_ARRIVAL_S = 1800.0
_LINE_BYTES = 64


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


@dataclass(slots=True)
class _Members:
    """The processes that are connected, and the workers that have ever been."""

    lines: dict[socket.socket, bytes] = field(default_factory=dict[socket.socket, bytes])
    came: set[str] = field(default_factory=set[str])
    lost_at_s: float | None = None

    def has_ended(self, num_workers: int) -> bool:
        """Whether all workers have come and left; one that was lost may come back for a while."""
        if len(self.came) < num_workers or any(line.startswith(b"worker ") for line in self.lines.values()):
            return False
        return self.lost_at_s is None or time.monotonic() - self.lost_at_s > _RETURN_S

    def read(self, connection: socket.socket) -> bool:
        """Take what has arrived; returns False once the connection has ended."""
        try:
            data = connection.recv(_LINE_BYTES)
        except OSError:
            data = b""
        line = self.lines[connection] = self.lines[connection] + data
        name, _, rest = line.partition(b"\n")
        if name.startswith(b"worker ") and len(line) > len(name):
            self.came.add(name.decode(errors="replace"))
        if data and len(line) <= _LINE_BYTES:
            return True
        del self.lines[connection]
        if name.startswith(b"worker ") and b"bye" not in rest:
            self.lost_at_s = time.monotonic()
        return False


def _keep_store(job: JobSpec) -> int:
    listener = listen_at_master(job, "the scheduler")
    os.set_inheritable(listener.fileno(), False)
    host = str(listener.getsockname()[0])
    store = TCPStore(
        host,
        job.master_port,
        None,
        True,
        timedelta(seconds=60),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with (
        ExitStack() as connections,
        socket.create_server((host, 0), family=family, backlog=2048) as door,
        selectors.DefaultSelector() as selector,
        StopNotice() as notice,
    ):
        selector.register(door, selectors.EVENT_READ)
        PrefixStore("dmlc", store).set(LIFELINE, str(door.getsockname()[1]))
        members, deadline = _Members(), time.monotonic() + _ARRIVAL_S
        while not members.has_ended(job.world_size) and not notice.wait(0):
            for key, _ in selector.select(_POLL_S):
                if key.fileobj is door:
                    connection = connections.enter_context(door.accept()[0])
                    members.lines[connection] = b""
                    selector.register(connection, selectors.EVENT_READ)
                elif isinstance(key.fileobj, socket.socket) and not members.read(key.fileobj):
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
            if len(members.came) < job.world_size and time.monotonic() > deadline:
                raise CommError(
                    given=f"{len(members.came)} of {job.world_size} workers after {_ARRIVAL_S:g} s",
                    rule="every worker joins the job: join_world, create_kvstore or a Trainer",
                    consequence="the scheduler and the servers end",
                    nearest="the log of a worker that did not come",
                )
    return 0


# --- a server ------------------------------------------------------------------------------------------------------


def _serve(job: JobSpec) -> int:
    # what can be wrong on this host alone is found before the scheduler is waited for
    require_credentials(os.environ)
    host = os.environ.get("DMLC_NODE_HOST") or choose_interface(job.interface, job.master_addr).address
    listener = listen(host, tls=bool(os.environ.get("UNISONO_TLS")))
    store = scheduler_store(job)
    number = job.server_index if job.server_index is not None else store.add("servers", 1) - 1
    if number >= job.servers:
        raise LaunchError(
            given=f"server {number} of DMLC_NUM_SERVER={job.servers}",
            rule="a job has as many servers as it says",
            consequence="this one was not started",
            nearest="one process with DMLC_ROLE=server less",
        )
    store.set(SERVER.format(number), f"{host}:{listener.getsockname()[1]}")
    addresses = server_addresses(job)
    line = connect_lifeline(job, f"server {number}")

    def end_with_the_scheduler() -> None:
        while line.recv(_LINE_BYTES):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    os.environ |= {
        "UNISONO_SERVER": str(number),
        "UNISONO_SERVER_ADDRESSES": ",".join(f"{host}:{port}" for host, port in addresses),
        "UNISONO_EPOCH": "0",
        "UNISONO_LISTEN_FD": str(listener.detach()),
        DRAIN: "1",
    }
    watch = threading.Thread(target=end_with_the_scheduler, name="unisono-scheduler", daemon=True)
    # from here on a stop signal is the server's: its handler is there once it listens
    return server_process.main(watch.start)


if __name__ == "__main__":
    sys.exit(main())
