"""The host's name and its interfaces. No torch."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil

from unisono.doctor.check import Check, judged
from unisono.sanitize import printable

_INFINIBAND: Final = Path("/sys/class/infiniband")
_SHOWN: Final = 4


def check_network() -> Iterator[Check]:
    """NET01 and NET02; NET03 on a host with InfiniBand or RoCE."""
    yield _own_name()
    yield _interfaces()
    yield from infiniband_ports()


def infiniband_ports(folder: Path = _INFINIBAND) -> Iterator[Check]:
    """NET03: ports of InfiniBand and RoCE devices, as the kernel shows them below ``folder``; nothing where there are none.

    Source: Documentation/ABI/stable/sysfs-class-infiniband. A port that is down may have no cable, so one is enough.
    """
    ports = [port for port in sorted(folder.glob("*/ports/*")) if port.is_dir()]
    if not ports:
        return
    told = {f"{port.parent.parent.name} port {port.name}": _state_and_rate(port) for port in ports}
    is_active = any(state == "ACTIVE" for state, _ in told.values())
    shown = [f"{name}: {state or 'not known'}" + (f", {rate}" if rate else "") for name, (state, rate) in told.items()]
    cure = (
        "NCCL uses sockets: connect a cable, load the driver of the port, start a subnet manager (ibstat shows which)"
    )
    evidence = printable("; ".join(shown[:_SHOWN]) + ("; …" if len(shown) > _SHOWN else ""))
    yield judged("NET03", "InfiniBand ports", evidence, warning="" if is_active else cure)


def _state_and_rate(port: Path) -> tuple[str, str]:
    """Such as ``ACTIVE`` and ``100 Gb/sec (4X EDR)``; empty where the kernel does not tell it."""
    told: list[str] = []
    for name in ("state", "rate"):
        try:
            told.append((port / name).read_text(errors="replace").strip()[:100])
        except OSError:
            told.append("")
    return re.sub("^[0-9]+: ", "", told[0]), told[1]


def _own_name() -> Check:
    name, title = socket.gethostname(), "the host's name"
    own = {address.address for found in psutil.net_if_addrs().values() for address in found}
    try:
        resolved = {str(info[4][0]) for info in socket.getaddrinfo(name, None)}
    except OSError as error:
        cure = f"other hosts cannot find this one by its name: add {name} to /etc/hosts or the name server"
        return judged("NET01", title, f"{name}: {error.strerror or error}", warning=cure)
    foreign = sorted(
        address for address in resolved if address.partition("%")[0] not in own and not _is_loopback(address)
    )
    cure = "the name leads to another host: mend /etc/hosts or the name server, or give the launcher --master-addr"
    evidence = f"{name} is {', '.join(sorted(resolved))}"
    return judged("NET01", title, evidence, failure=cure if foreign else "")


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _interfaces() -> Check:
    states, addresses = psutil.net_if_stats(), psutil.net_if_addrs()
    rates = {
        name: states[name].speed
        for name, found in addresses.items()
        if name in states
        and states[name].isup
        and any(one.family in (socket.AF_INET, socket.AF_INET6) and not _is_loopback(one.address) for one in found)
    }
    shown = [f"{name} ({rate:,} Mbit/s)" if rate else name for name, rate in rates.items()]
    is_slow = bool(rates) and all(0 < rate < 10_000 for rate in rates.values())
    return judged(
        "NET02",
        "network interfaces",
        ", ".join(shown) or "none but loopback: this host runs alone",
        warning="gradients between hosts want 10 Gbit/s or more" if is_slow else "",
    )
