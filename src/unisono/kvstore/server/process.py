"""One server process, from its environment to its end.

    UNISONO_SERVER             which server this is, from 0
    UNISONO_SERVERS            how many there are
    UNISONO_EPOCH              its incarnation, one higher at each restart
    UNISONO_LISTEN_FD          a listening socket handed down by the launcher, or
    UNISONO_SERVER_ADDRESS     host:port of the one interface to listen on
    UNISONO_SNAPSHOTS          folder of snapshots; unset: none are kept
    UNISONO_SNAPSHOT_EVERY_S   seconds between them, 60 if unset

There are no arguments: what others can see of a process says nothing. On SIGTERM and SIGINT the server answers what is under
way, saves itself and leaves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from unisono.dist import StopNotice
from unisono.errors import LaunchError, Problem
from unisono.kvstore.server.service import Service

_LOOK_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """The place of one server. Exactly one of ``listen_fd`` and ``address`` is set; ``snapshots`` is this server's own."""

    server: int
    servers: int
    epoch: int
    listen_fd: int | None = None
    address: tuple[str, int] | None = None
    snapshots: Path | None = None
    snapshot_every_s: float = 60.0


class Serving(Protocol):
    """What brings requests to a service."""

    def close(self) -> None:
        """Answer what is under way, and take no more."""
        ...


def seat_from_environ(environ: Mapping[str, str]) -> Seat:
    """The seat that ``environ`` describes. Raises LaunchError naming the variable that is missing or wrong."""
    server, servers = _whole(environ, "UNISONO_SERVER"), _whole(environ, "UNISONO_SERVERS")
    if server >= servers:
        raise _wrong("UNISONO_SERVER", str(server), f"with UNISONO_SERVERS={servers}, servers are 0 to {servers - 1}")
    given = [name for name in ("UNISONO_LISTEN_FD", "UNISONO_SERVER_ADDRESS") if name in environ]
    if len(given) != 1:
        both = " and ".join(given) or "neither of UNISONO_LISTEN_FD and UNISONO_SERVER_ADDRESS"
        raise _wrong(both, "set", "a server listens on one socket: one handed down, or one address")
    folder = environ.get("UNISONO_SNAPSHOTS")
    return Seat(
        server=server,
        servers=servers,
        epoch=_whole(environ, "UNISONO_EPOCH"),
        listen_fd=_whole(environ, "UNISONO_LISTEN_FD") if "UNISONO_LISTEN_FD" in environ else None,
        address=_address(environ["UNISONO_SERVER_ADDRESS"]) if "UNISONO_SERVER_ADDRESS" in environ else None,
        snapshots=Path(folder) / f"server-{server}" if folder else None,
        snapshot_every_s=_seconds(environ, "UNISONO_SNAPSHOT_EVERY_S", 60.0),
    )


def run(seat: Seat, service: Service, serve: Callable[[Seat, Service], Serving]) -> None:
    """Serve until a stop signal; then save, so that nothing acknowledged is lost. Call it on the main thread."""
    with StopNotice() as notice:
        serving = serve(seat, service)
        while not notice.wait(_LOOK_S):
            pass
        service.close()  # who waits is let go
        serving.close()  # from here on nothing more is acknowledged
        if seat.snapshots is not None and service.began:
            service.save()


def _whole(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name)
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
        raise _wrong("UNISONO_SERVER_ADDRESS", repr(text), "it is host:port")
    return host, int(port)


def _wrong(name: str, value: str, rule: str) -> LaunchError:
    return LaunchError(
        Problem(
            given=f"{name} is {value}",
            rule=rule,
            consequence="the server was not started",
            nearest="start servers with unisono launch, which sets their environment",
        )
    )
