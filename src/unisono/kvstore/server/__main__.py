"""``python -m unisono.kvstore.server``: one parameter server, configured by its environment; see ``process``."""

from __future__ import annotations

import os
import resource
import socket
import sys
import threading
from collections.abc import Callable

import torch

from unisono.dist.address import require_private
from unisono.dist.secret import read_or_create_secret
from unisono.errors import LaunchError, UnisonoError
from unisono.kvstore.server.parameter_server import ParameterServer
from unisono.kvstore.server.process import ReplicaClient, ServerSettings, run_until_stopped, server_settings
from unisono.kvstore.wire.frame import PEER_LIMITS
from unisono.kvstore.wire.frame_server import Admission, FrameServer, listen
from unisono.kvstore.wire.tls import TLSContexts, read_tls
from unisono.sanitize import printable

_OTHER_FILES = 64  # in addition to connections: snapshots, logs, libraries


def main(listening: Callable[[], None] = lambda: None) -> int:
    """Serve until a stop signal; returns the exit code. ``listening`` is called once the socket accepts connections."""
    try:
        allow_files(Admission().max_connections + _OTHER_FILES)
        settings, secret, tls = server_settings(os.environ), read_or_create_secret(os.environ), read_tls(os.environ)
        os.environ.pop("UNISONO_SECRET_FD", None)
        replica = ReplicaClient(settings, secret, tls) if settings.num_copies > 1 else None
        server = ParameterServer(
            settings.server_index,
            forward=replica.forward if replica is not None else None,
            held=replica is not None,
            snapshots=settings.snapshots,
            snapshot_every_s=settings.snapshot_every_s,
            on_stale=leave,
            say=say,
        )
        warm_up()
        run_until_stopped(settings, server, lambda: serve(settings, server, secret, replica, tls, listening))
    except UnisonoError as error:
        say(str(error))
        return error.exit_code
    return 0


def warm_up() -> None:
    """Make torch import its compiler, which takes seconds at the first optimizer step, before workers wait for an
    answer."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    parameter.grad = torch.zeros(1)
    optimizer.step()


def allow_files(count: int) -> None:
    """Allow this process ``count`` open files. Raises LaunchError where the machine's limit is lower: the server would
    leave workers waiting without a message."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        raise LaunchError(
            given=f"a process may have {hard} open files here",
            rule=f"a server has room for {count}: its connections, and files of its own",
            consequence="the server was not started",
            nearest=f"ulimit -n {count}, or LimitNOFILE of the service",
        )
    if soft != resource.RLIM_INFINITY and soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def serve(
    settings: ServerSettings,
    server: ParameterServer,
    secret: bytes,
    replica: ReplicaClient | None,
    tls: TLSContexts | None,
    listening: Callable[[], None],
) -> FrameServer:
    """Open the socket. A newer server in this one's place ends this process at once, because its answers are out of
    date.

    Servers may connect at once, because all may be starting; workers once the replica's state is restored.
    """
    if settings.listen_fd is not None:
        listener = socket.socket(fileno=settings.listen_fd)
        listener.set_inheritable(False)
        require_private(str(listener.getsockname()[0]), tls=tls is not None)
    else:
        listener = listen(*settings.addresses[settings.server_index], tls=tls is not None)
    frame_server = FrameServer(
        [listener],
        server,
        secret,
        PEER_LIMITS,
        restart_count=settings.server_restart_count,
        on_stale=lambda count: leave(f"restart {count} has taken the place of restart {settings.server_restart_count}"),
        tls=tls,
    )
    host, port = frame_server.addresses[0]
    say(
        f"server {settings.server_index} of {len(settings.addresses)}, restart {settings.server_restart_count}, "
        f"listens at {host}:{port}{' under TLS' if tls is not None else ''}"
    )
    listening()
    if replica is not None:
        replica.restore(server)
        server.admit_workers()
    return frame_server


def leave(reason: str) -> None:
    """End this process, whose state is out of date, with a line in the log only."""
    say(f"this server was replaced and leaves: {reason}")
    threading.Timer(0.2, os._exit, [0]).start()  # after the peer got its refusal


def say(text: str) -> None:
    print(printable(text, newlines=True), file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
