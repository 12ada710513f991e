"""Parameter servers as children of workers, for launchers that start workers only: torchrun, mpirun, srun, MXNet's trackers.

A server holds the read end of a pipe as its standard input and leaves when that closes: however its worker ends, no server stays
behind. A worker that is done waits until nobody needs its servers any more.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from unisono.launch.share import TUNED_ALLOCATOR

if TYPE_CHECKING:
    from unisono.dist import World

DRAIN = "UNISONO_DRAIN"  # set: on SIGTERM a server stays until its last worker has left

_MODULE = "unisono.kvstore.server.beside"


@contextmanager
def servers_beside(
    world: World, count: int, more: Mapping[str, str] | None = None
) -> Generator[tuple[list[tuple[str, int]], bytes]]:
    """Server processes, the n-th on the host of rank n modulo the number of ranks; addresses and secret. A collective.

    The secret is new and reaches the other ranks by the job's own collectives, which are as private as its gradients. ``more``
    is for the servers' environment. Left in order, it waits until no worker is connected; left by an error, it does not.
    """
    from unisono.kvstore.wire.serving import listen

    secret = bytes.fromhex(world.broadcast_json(secrets.token_hex(32)))
    mine = [server for server in range(count) if server % world.world == world.rank]
    children: list[subprocess.Popen[str]] = []
    with ExitStack() as stack:
        listeners = {server: stack.enter_context(listen(_address(world))) for server in mine}
        told = world.gather_json({server: each.getsockname()[:2] for server, each in listeners.items()})
        everyone = {int(server): (str(host), int(port)) for each in told for server, (host, port) in each.items()}
        addresses = [everyone[server] for server in range(count)]
        for server, listener in listeners.items():
            children.append(_start(stack, server, addresses, listener, secret, more or {}))
            listener.close()
        yield addresses, secret
        for child in children:
            child.send_signal(signal.SIGTERM)
        for child in children:
            child.wait()


def environ_of_a_child() -> dict[str, str]:
    """This process's, without what numbers it, with its path of modules and what our launcher adds."""
    numbers = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith("UNISONO_") and name not in numbers
    }
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    return {**TUNED_ALLOCATOR, **kept, **threads, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def end_with_starter() -> None:
    """Leave at once when standard input closes."""

    def watch() -> None:
        # not through sys.stdin: its lock would be held while the interpreter ends
        while os.read(0, 4096):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="unisono-starter", daemon=True).start()


def end(process: subprocess.Popen[str]) -> None:
    """Now, and let go of its pipes."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _start(
    stack: ExitStack,
    server: int,
    addresses: list[tuple[str, int]],
    listener: socket.socket,
    secret: bytes,
    more: Mapping[str, str],
) -> subprocess.Popen[str]:
    read, write = os.pipe()
    os.write(write, secret)
    os.close(write)
    environ = {
        "UNISONO_SERVER": str(server),
        "UNISONO_SERVER_ADDRESSES": ",".join(f"{host}:{port}" for host, port in addresses),
        "UNISONO_EPOCH": "0",
        "UNISONO_LISTEN_FD": str(listener.fileno()),
        "UNISONO_SECRET_FD": str(read),
        DRAIN: "1",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", _MODULE],
        env=environ_of_a_child() | environ | dict(more),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        pass_fds=[listener.fileno(), read],
        text=True,
        start_new_session=True,  # a signal to the worker's group is for the worker, which needs its server to stop in order
    )
    os.close(read)
    stack.callback(end, process)
    return process


def _address(world: World) -> str:
    """Of this host, as the job's other hosts see it."""
    if world.job.is_local:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # nothing is sent: the kernel only chooses a route
        probe.connect((world.job.master_addr, 9))
        return str(probe.getsockname()[0])


if __name__ == "__main__":
    end_with_starter()
    from unisono.kvstore.server.__main__ import main

    sys.exit(main())
