"""The network interface that the ranks of a job use, and why.

By default Gloo and NCCL guess, often the interface of the host's name, which other hosts may not reach. The
launcher sets it: the interface asked for, or the one over which this host reaches rank 0's host.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

import psutil

from unisono.errors import LaunchError

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "DMLC_INTERFACE")


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkInterface:
    """A network interface of this host, with this host's ``address`` on it; ``why`` is the reason of the choice."""

    name: str
    address: str
    why: str

    def environ(self) -> dict[str, str]:
        """The variables that make Gloo, NCCL and DMLC use it."""
        return dict.fromkeys(VARIABLES, self.name)


def choose_interface(name: str | None, towards: str) -> NetworkInterface:
    """The interface called ``name``, or for None that over which this machine reaches the host ``towards``."""
    return interface_by_name(name) if name else interface_towards(towards)


def interface_by_name(name: str) -> NetworkInterface:
    """The interface called ``name``. Raises LaunchError, listing those that are up, if it is missing or down."""
    addresses = _addresses()
    if name in addresses:
        return NetworkInterface(name=name, address=addresses[name][0], why="asked for with --interface")
    raise LaunchError(
        given=f"--interface {name!r} on host {socket.gethostname()}",
        rule="it is a network interface of every host that is up and has an address",
        consequence="nothing was started",
        nearest="one of: " + ", ".join(sorted(addresses)),
    )


def interface_towards(host: str) -> NetworkInterface:
    """The interface over which this machine reaches ``host``, which may be itself. Sends no packet.

    Raises LaunchError if the name does not resolve or no route leads there.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            source_address = str(probe.getsockname()[0])
    except OSError as error:
        raise LaunchError(
            given=f"host {socket.gethostname()} does not reach {host!r} ({error.strerror})",
            rule="all hosts of a job reach that of rank 0 by the name in the hosts file",
            consequence="the ranks could not find each other, so nothing was started",
            nearest="the address of that host in the hosts file instead of its name",
        ) from error
    for name, addresses in _addresses().items():
        if source_address in addresses or (source_address.startswith("127.") and "127.0.0.1" in addresses):
            return NetworkInterface(name=name, address=source_address, why=f"the way from here to {host} leads over it")
    raise LaunchError(
        given=f"the way to {host!r} leaves host {socket.gethostname()} from {source_address}, which is on none of its interfaces",
        rule="an address belongs to an interface that is up",
        consequence="nothing was started",
        nearest="--interface with one of: " + ", ".join(sorted(_addresses())),
    )


def _addresses() -> dict[str, list[str]]:
    """The addresses, IPv4 first, of every interface that is up and has one, by name."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    by_name: dict[str, list[str]] = {}
    for name, entries in psutil.net_if_addrs().items():
        for family in (socket.AF_INET, socket.AF_INET6):
            listed = [entry.address for entry in entries if entry.family == family]
            if listed and name in up:
                by_name.setdefault(name, []).extend(listed)
    return by_name
