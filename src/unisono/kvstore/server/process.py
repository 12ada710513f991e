"""One server process, from its environment to its end.

    UNISONO_SERVER             index of this server, from 0
    UNISONO_SERVER_ADDRESSES   host:port of all servers, comma-separated
    UNISONO_RESTART_COUNT      its restart count, one higher at each restart
    UNISONO_LISTEN_FD          a listening socket inherited from the launcher; unset: it listens at its own host and port
    UNISONO_REPLICAS           2: the next server keeps a replica of this one
    UNISONO_SECRET_FD          inherited descriptor from which the job's secret is read (``dist.secret``)
    UNISONO_SECRET_FILE        file of the job's secret, mode 0600; neither is set: the user's own file
    UNISONO_TLS                folder of certificates (``wire.tls``); unset: no encryption
    UNISONO_SNAPSHOTS          folder of snapshots; unset: no snapshots
    UNISONO_SNAPSHOT_EVERY_S   seconds between snapshots, 60 if unset
    UNISONO_DRAIN              set: after SIGTERM, stay until the last worker has left

Configured by environment variables only: arguments are visible to other users in ``ps``. On SIGTERM and SIGINT the server
answers running requests, writes a snapshot and exits.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.dist import StopNotice
from unisono.errors import LaunchError
from unisono.kvstore.server.chunk_payload import SLOT_BYTES
from unisono.kvstore.server.parameter_server import ParameterServer
from unisono.kvstore.server.run_spec import RunSpec
from unisono.kvstore.wire.auth import Identity
from unisono.kvstore.wire.connection import Connection, Endpoint
from unisono.kvstore.wire.frame import PEER_LIMITS, Frame, Op, json_frame, payload_views
from unisono.kvstore.wire.frame_server import FrameServer
from unisono.kvstore.wire.tls import TLSContexts

_LOOK_S = 1.0
_REPLICA_DEADLINE_S = 30.0
_DRAIN_LOOK_S = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """The settings of one server among ``addresses``; ``snapshots`` is this server's own folder."""

    server_index: int
    addresses: tuple[tuple[str, int], ...]
    server_restart_count: int
    listen_fd: int | None = None
    num_copies: int = 1
    snapshots: Path | None = None
    snapshot_every_s: float = 60.0
    drain: bool = False

    @property
    def next_address(self) -> tuple[str, int]:
        """The address of the server that keeps this one's replica."""
        return self.addresses[(self.server_index + 1) % len(self.addresses)]


def server_settings(environ: Mapping[str, str]) -> ServerSettings:
    """The settings in ``environ``. Raises LaunchError naming the variable that is missing or wrong."""
    server = _whole(environ, "UNISONO_SERVER")
    addresses = server_addresses(environ)
    if server >= len(addresses):
        rule = f"UNISONO_SERVER_ADDRESSES names {len(addresses)} servers, 0 to {len(addresses) - 1}"
        raise _wrong("UNISONO_SERVER", str(server), rule)
    replicas = _whole(environ, "UNISONO_REPLICAS", 1)
    if not 1 <= replicas <= min(2, len(addresses)):
        rule = "it is 1, or 2 where there are two servers or more"
        raise _wrong("UNISONO_REPLICAS", f"{replicas} with {len(addresses)} servers", rule)
    folder = environ.get("UNISONO_SNAPSHOTS")
    return ServerSettings(
        server_index=server,
        addresses=addresses,
        server_restart_count=_whole(environ, "UNISONO_RESTART_COUNT"),
        listen_fd=_whole(environ, "UNISONO_LISTEN_FD") if "UNISONO_LISTEN_FD" in environ else None,
        num_copies=replicas,
        snapshots=Path(folder) / f"server-{server}" if folder else None,
        snapshot_every_s=_seconds(environ, "UNISONO_SNAPSHOT_EVERY_S", 60.0),
        drain="UNISONO_DRAIN" in environ,
    )


def server_addresses(environ: Mapping[str, str]) -> tuple[tuple[str, int], ...]:
    """Host and port of all servers, from UNISONO_SERVER_ADDRESSES. Raises LaunchError where it is unset or malformed."""
    text = environ.get("UNISONO_SERVER_ADDRESSES", "")
    if not text:
        raise _wrong("UNISONO_SERVER_ADDRESSES", "unset", "it names the servers, host:port with commas between")
    return tuple(_address(address) for address in text.split(","))


def run_until_stopped(settings: ServerSettings, server: ParameterServer, serve: Callable[[], FrameServer]) -> None:
    """Serve until a stop signal, then write a snapshot, so that nothing acknowledged is lost. ``serve`` opens the
    socket. Call it on the main thread."""
    with StopNotice() as notice:
        frame_server = serve()
        while not notice.wait(_LOOK_S):
            pass
        while settings.drain and server.num_live_workers:
            time.sleep(_DRAIN_LOOK_S)
        server.close()  # wakes waiting requests
        frame_server.close()  # nothing is acknowledged after this
        if settings.snapshots is not None and server.run_spec is not None:
            server.save()


def _whole(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isascii() or not text.isdigit():
        raise _wrong(name, "unset" if text is None else repr(text), "it is a whole number from 0")
    return int(text)


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name)
    try:
        value = default if text is None else float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise _wrong(name, repr(text), "it is a number of seconds above 0")
    return value


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise _wrong("UNISONO_SERVER_ADDRESSES", repr(text), "each server is host:port")
    return host, int(port)


def _wrong(name: str, value: str, rule: str) -> LaunchError:
    return LaunchError(
        given=f"{name} is {value}",
        rule=rule,
        consequence="the server was not started",
        nearest="start servers with unisono launch, which sets their environment",
    )


class ReplicaClient:
    """Keeps a replica of this server's chunks on the next server (a chain of two, van Renesse & Schneider 2004).

    A push and a report of finished work are forwarded there before they are acknowledged, and a new server process
    restores its chunks and its work queue from there, so both survive the loss of any one server. The connection is
    opened once the run is known.
    """

    def __init__(self, settings: ServerSettings, secret: bytes, tls: TLSContexts | None) -> None:
        self._settings, self._endpoint = settings, Endpoint(settings.next_address, secret, tls)
        self._lock = threading.Lock()
        self._connection: Connection | None = None

    def restore(self, server: ParameterServer) -> None:
        """Restore this server's chunks from the replica, before workers connect. Both servers must be listening: they
        may ask each other."""
        run_spec = server.run_spec or self._ask_run_spec()
        if run_spec is None:
            return
        numbers = [chunk.number for chunk in run_spec.placement().chunks_on(self._settings.server_index)]
        for chunks in [[], *([number] for number in numbers)]:  # without a chunk too: the work queue
            answer = self.forward(run_spec, json_frame(Op.STATE, {"chunks": chunks}))
            server.adopt_replica_state(b"".join(payload_views(answer)))

    def forward(self, run_spec: RunSpec, frame: Frame) -> Frame:
        """The next server's answer. Raises CommError if it cannot be reached, or its refusal."""
        with self._lock:
            if self._connection is None or self._connection.has_given_up:
                self._connection = self._connect(run_spec.job, run_spec.to_json())
            connection = self._connection
        return connection.request(frame).result()

    def _ask_run_spec(self) -> RunSpec | None:
        """The run's spec from the next server, where this one died before its first snapshot; None if no run has begun."""
        connection = self._connect(0, {})
        connection.close()
        answer = connection.hello["agreed"]
        return RunSpec.from_json(answer) if answer is not None else None

    def _connect(self, job: int, facts: Mapping[str, Any]) -> Connection:
        me = Identity("server", self._settings.server_index, self._settings.server_restart_count, job, "")
        return Connection(
            self._endpoint, me, facts, limits=PEER_LIMITS, deadline_s=_REPLICA_DEADLINE_S, slot_bytes=SLOT_BYTES
        )
