"""Real server processes on loopback, to be connected to, killed and started again."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from nursery import FIRST_FD, Child, Nursery
from torch import Tensor

from unisono.kvstore.backends.server_client import ServerClient, ServerConfig
from unisono.kvstore.server.chunk_optimizer import ServerOptimizerSpec
from unisono.kvstore.server.run_spec import RunSpec
from unisono.optim import OptimOptions
from unisono.optim.groups import Role


class ParameterServers:
    """``count`` servers; ``addresses`` stay theirs over a restart, because this process holds their sockets. They are born in
    ``nursery`` with ``program``, or, without one, by their command, which takes seconds. ``environ``: more for them."""

    def __init__(
        self,
        folder: Path,
        count: int,
        *,
        replicas: int = 1,
        snapshot_every_s: float = 60.0,
        nursery: Nursery | None = None,
        program: str = "unisono.kvstore.server.__main__:main",
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.secret, self._folder = secrets.token_bytes(32), folder
        self._nursery, self._program = nursery, program
        self.snapshots = folder / "snapshots"
        self.secret_file = folder / "secret"
        self.secret_file.touch(mode=0o600)
        self.secret_file.write_bytes(self.secret)
        self._listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
        self.addresses: list[tuple[str, int]] = [listener.getsockname()[:2] for listener in self._listeners]
        self._more = {"UNISONO_REPLICAS": str(replicas), "UNISONO_SNAPSHOT_EVERY_S": str(snapshot_every_s)}
        self._more |= environ or {}
        self.processes: list[subprocess.Popen[str] | Child] = [self._start(server, 0) for server in range(count)]
        self.epochs = [0] * count

    def _start(self, server: int, epoch: int) -> subprocess.Popen[str] | Child:
        listener = self._listeners[server]
        own = {
            "UNISONO_SERVER": str(server),
            "UNISONO_SERVER_ADDRESSES": ",".join(f"{host}:{port}" for host, port in self.addresses),
            "UNISONO_RESTART_COUNT": str(epoch),
            "UNISONO_LISTEN_FD": str(listener.fileno()),
            "UNISONO_SECRET_FILE": str(self.secret_file),
            "UNISONO_SNAPSHOTS": str(self.snapshots),
            **self._more,
        }
        path = self._folder / f"server-{server}.{epoch}.log"
        if self._nursery is not None:
            own["UNISONO_LISTEN_FD"] = str(FIRST_FD)
            return self._nursery.start(self._program, log=path, environ=own, fds=[listener.fileno()])
        environ = {name: value for name, value in os.environ.items() if not name.startswith("UNISONO_")} | {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": "1",
            **own,
        }
        with path.open("w") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "unisono.kvstore.server"],
                env=environ,
                pass_fds=[listener.fileno()],
                stderr=log,
                text=True,
            )

    def kill(self, server: int, number: signal.Signals = signal.SIGKILL) -> None:
        """And wait until it has ended."""
        self.processes[server].send_signal(number)
        self.processes[server].wait(30)

    def restart(self, server: int) -> None:
        """A new process in its place, of a higher epoch."""
        self.epochs[server] += 1
        self.processes[server] = self._start(server, self.epochs[server])

    def log(self, server: int) -> str:
        """What its processes have said."""
        logs = [self._folder / f"server-{server}.{epoch}.log" for epoch in range(self.epochs[server] + 1)]
        return "".join(path.read_text() for path in logs if path.exists())

    def connect(
        self, table: Mapping[str, Tensor], *, worker: int = 0, incarnation: int = 0, **more: Any
    ) -> ServerClient:
        """A worker. ``more``: arguments of ``RunSpec`` and ``ServerClient``."""
        own = {name: more.pop(name) for name in ("deadline_s", "report", "shared_memory") if name in more}
        codec = more.pop("codec", None)
        agreed = RunSpec(
            table={key: (tuple(value.shape), value.dtype) for key, value in table.items()},
            num_servers=len(self.addresses),
            codec=codec.name if codec is not None else "none",
            **more,
        )
        config = ServerConfig(addresses=self.addresses, secret=self.secret, worker_restart_count=incarnation)
        return ServerClient(config, agreed, worker=worker, codec=codec, **own)

    def close(self) -> None:
        """End them all."""
        for process in self.processes:
            process.kill()
            process.wait()
        for listener in self._listeners:
            listener.close()


@contextmanager
def parameter_servers(folder: Path, count: int = 1, **more: Any) -> Iterator[ParameterServers]:
    """``ParameterServers`` that are gone afterwards."""
    made = ParameterServers(folder, count, **more)
    try:
        yield made
    finally:
        made.close()


def recipe(table: Mapping[str, Tensor], **options: Any) -> ServerOptimizerSpec:
    """One for all keys: plain SGD with rate 1 unless ``options`` say otherwise."""
    plain = {"momentum": 0.0} if options.get("kind", "sgd") == "sgd" else {}
    chosen = OptimOptions(**{"kind": "sgd", "lr": 1.0, "weight_decay": 0.0, "clip_norm": 0.0, **plain, **options})
    return ServerOptimizerSpec(options=chosen, roles=dict.fromkeys(table, Role.NO_DECAY))


def numbers(*shapes: tuple[int, ...], seed: int = 0) -> dict[str, Tensor]:
    """A table of values: ``w0``, ``w1`` …"""
    made = torch.Generator().manual_seed(seed)
    return {f"w{place}": torch.randn(shape, generator=made) for place, shape in enumerate(shapes)}
