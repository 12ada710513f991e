"""Which addresses the processes of a job listen at and talk over without encryption."""

from __future__ import annotations

import ipaddress
import os
import socket

import psutil

from unisono.errors import ConfigError


def free_port(host: str, family: int = socket.AF_INET) -> int:
    """A port of ``host`` that nothing uses now."""
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def is_private(host: str) -> bool:
    """Whether ``host`` (a numeric address) is loopback or of a private network."""
    address = _parsed(host)
    return address.is_private and not address.is_unspecified


def refuse_every_interface(host: str, given: str) -> None:
    """Raise ConfigError when ``host`` (a numeric address) means all interfaces; ``given`` is what the user gave."""
    if _parsed(host).is_unspecified:
        raise ConfigError(
            given=f"{given or 'no host'} means every interface of this machine",
            rule="a server listens on one interface",
            consequence="no port was opened",
            nearest="give the address of one interface, such as 127.0.0.1",
        )


def require_private(host: str, *, tls: bool) -> None:
    """Raise ConfigError when ``host`` (a numeric address) is public and traffic would be unencrypted."""
    if tls or is_private(host):
        return
    raise ConfigError(
        given=f"the address {host} is not a private one, and no TLS is set up",
        rule="gradients and values are sent unencrypted only over loopback and private networks",
        consequence="no connection was made and no port opened",
        nearest="launch.tls=FOLDER (or unisono launch --tls FOLDER) with certificates, or a private address",
    )


def require_private_ranks(host: str) -> None:
    """Raise ConfigError when ranks would all-reduce over the public address ``host`` (numeric)."""
    if is_private(host):
        return
    raise ConfigError(
        given=f"the ranks would meet over {host}, which is not a private address",
        rule="Gloo and NCCL encrypt nothing and know no passwords, so ranks use loopback and private networks alone",
        consequence="no connection was made and no port opened",
        nearest="MASTER_ADDR (or the hosts file) with a private address of rank 0's host, or a tunnel such as WireGuard",
    )


def interface_of(address: str) -> str | None:
    """The network interface of this host that has the numeric ``address``; None if none has."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return name
    return None


def address_of(interface: str) -> str | None:
    """The IPv4 address of an interface of this host; None if it has none."""
    entries = psutil.net_if_addrs().get(interface, ())
    return next((entry.address for entry in entries if entry.family == socket.AF_INET), None)


def address_towards(host: str) -> str:
    """This host's address on the way to ``host``, or on the interface that GLOO_SOCKET_IFNAME names. Sends no packet. Raises
    OSError."""
    named = address_of(os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0])
    if named is not None:
        return named
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _parsed(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
