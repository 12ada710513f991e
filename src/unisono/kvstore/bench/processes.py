"""Workers and servers of a measurement as processes of their own, which end with whoever started them.

Each holds the read end of a pipe as its standard input and leaves when that closes: however the starter ends, nothing stays
behind. What a process needs to know comes through the same pipe or its environment; a server's secret by a descriptor.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from unisono.dist import JobSpec
from unisono.errors import CommError, Problem
from unisono.kvstore.bench.settings import Settings
from unisono.launch.share import TUNED_ALLOCATOR

if TYPE_CHECKING:
    from unisono.dist import World

_MODULE = "unisono.kvstore.bench"


def measure_here(settings: Settings, workers: int, *, timeout_s: float = 3600.0) -> dict[str, Any]:
    """Measure with ``workers`` processes on this host; what ``measure`` gives rank 0. Raises CommError where one fails."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        logs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(workers)]
        processes: list[subprocess.Popen[str]] = []
        for rank in range(workers):
            spec = JobSpec(
                run_id="bench",
                rank=rank,
                local_rank=rank,
                world=workers,
                local_world=workers,
                master_port=listener.getsockname()[1],
                source="unisono",
                listen_fd=listener.fileno() if rank == 0 else None,
            )
            process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, "worker"],
                env=_environ() | spec.environ(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=logs[rank],
                text=True,
                pass_fds=[listener.fileno()] if rank == 0 else [],
            )
            stack.callback(_end, process)
            assert process.stdin is not None
            process.stdin.write(json.dumps(asdict(settings)) + "\n")
            process.stdin.flush()
            processes.append(process)
        listener.close()
        assert processes[0].stdout is not None
        late = threading.Timer(timeout_s, lambda: [process.kill() for process in processes])
        stack.callback(late.cancel)
        late.start()
        told = processes[0].stdout.read()
        codes = [process.wait() for process in processes]
        for rank, (code, log) in enumerate(zip(codes, logs, strict=True)):
            if code:
                log.seek(0)
                raise _failed(f"worker {rank} ended with {code}: {log.read()[-2000:].strip()}")
        return json.loads(told)


@contextmanager
def servers(world: World, count: int) -> Generator[tuple[list[tuple[str, int]], bytes]]:
    """Server processes, the n-th on the host of rank n modulo the number of ranks; addresses and secret. A collective.

    The secret is new and reaches the other ranks by the job's own collectives, which are as private as its gradients.
    """
    from unisono.kvstore.wire.serving import listen

    secret = bytes.fromhex(world.broadcast_json(secrets.token_hex(32)))
    mine = [server for server in range(count) if server % world.world == world.rank]
    with ExitStack() as stack:
        listeners = {server: stack.enter_context(listen(_address(world))) for server in mine}
        told = world.gather_json({server: each.getsockname()[:2] for server, each in listeners.items()})
        everyone = {int(server): (str(host), int(port)) for each in told for server, (host, port) in each.items()}
        addresses = [everyone[server] for server in range(count)]
        for server, listener in listeners.items():
            _start_server(stack, server, addresses, listener, secret)
        yield addresses, secret


def _start_server(
    stack: ExitStack, server: int, addresses: list[tuple[str, int]], listener: socket.socket, secret: bytes
) -> None:
    read, write = os.pipe()
    os.write(write, secret)
    os.close(write)
    environ = {
        "UNISONO_SERVER": str(server),
        "UNISONO_SERVER_ADDRESSES": ",".join(f"{host}:{port}" for host, port in addresses),
        "UNISONO_EPOCH": "0",
        "UNISONO_LISTEN_FD": str(listener.fileno()),
        "UNISONO_SECRET_FD": str(read),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", _MODULE, "server"],
        env=_environ() | environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[listener.fileno(), read],
        text=True,
    )
    os.close(read)
    stack.callback(_end, process)


def end_with_starter() -> None:
    """Leave at once when standard input closes."""

    def watch() -> None:
        # not through sys.stdin: its lock would be held while the interpreter ends
        while os.read(0, 4096):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="unisono-bench-starter", daemon=True).start()


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _environ() -> dict[str, str]:
    """This process's, without what numbers it, with its path of modules and what our launcher adds."""
    numbers = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept: Mapping[str, str] = {
        name: value for name, value in os.environ.items() if not name.startswith("UNISONO_") and name not in numbers
    }
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    return {**TUNED_ALLOCATOR, **kept, **threads, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def _address(world: World) -> str:
    """Of this host, as the job's other hosts see it."""
    if world.job.is_local:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # nothing is sent: the kernel only chooses a route
        probe.connect((world.job.master_addr, 9))
        return str(probe.getsockname()[0])


def _failed(given: str) -> CommError:
    return CommError(
        Problem(
            given=given,
            rule="every worker measures to the end",
            consequence="there is no result",
            nearest="see what that worker said",
        )
    )
