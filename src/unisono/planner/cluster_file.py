"""Clusters that searches and predictions are for: a device and how many there are, by name or as a TOML file. Imports no torch.

    device = "h100"            # a preset, whose figures stand for those that are left out; or a name of one's own
    num_devices = 32
    devices_per_domain = 8     # that links of their own connect
    efficiency = 0.7           # share of the peak that large matrix products were measured to reach

    [tflops]
    bf16 = 800

All nodes are equal: what waits for the slowest is not predicted.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, cast

from unisono.config import load_config, option
from unisono.config.fields import BASE, options_repr
from unisono.config.toml_file import read_toml
from unisono.config.values import shown
from unisono.errors import ConfigError, nearest_name
from unisono.planner.devices import DEVICES, Device, find_device
from unisono.planner.layout import LayoutError
from unisono.units import GIB

SUFFIX: Final = ".toml"
_NODES: Final = "nodes"  # a table that files of other tools have
_T, _GB = 1e12, 1e9
_CALIBRATE: Final = "unisono plan calibrate --output FILE.toml measures those of this machine"


@dataclass(frozen=True, kw_only=True, slots=True)
class TflopsOptions:
    """Peak of matrix products in TFLOP/s, dense, by precision."""

    __repr__ = options_repr

    bf16: float | None = option(None, "In bfloat16.", ge=1e-4, le=1e6)
    fp16: float | None = option(None, "In float16.", ge=1e-4, le=1e6)
    fp8: float | None = option(None, "In 8 bits.", ge=1e-4, le=1e6)
    fp4: float | None = option(None, "In 4 bits.", ge=1e-4, le=1e6)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterOptions:
    """A cluster of equal nodes."""

    __repr__ = options_repr

    device: str = option("", "A preset such as h100, whose figures stand for those left out; or a name of one's own.")
    num_devices: int | None = option(None, "Devices of the cluster.", ge=1, le=1 << 24)
    devices_per_domain: int | None = option(
        None, "Devices that fast links connect, such as those of a node.", ge=1, le=1 << 24
    )
    memory_gib: float | None = option(None, "Memory of a device.", ge=1e-3, le=1e6)
    memory_tb_per_s: float | None = option(None, "Bandwidth of that memory, read and written.", ge=1e-5, le=1e4)
    link_gb_per_s: float | None = option(
        None, "Bandwidth between devices of a domain, in one direction.", ge=1e-5, le=1e6
    )
    network_gbit_per_s: float | None = option(
        None, "Bandwidth from a device to other domains, in one direction.", ge=1e-5, le=1e6
    )
    host_gb_per_s: float | None = option(
        None, "Bandwidth from a device to the memory of its host, in one direction.", ge=1e-5, le=1e6
    )
    efficiency: float | None = option(
        None, "Share of the peak that large matrix products were measured to reach.", ge=1e-3, le=1
    )
    tflops: TflopsOptions = TflopsOptions()


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """``num_devices`` of ``device``, in domains of equal size."""

    device: Device
    num_devices: int


def is_cluster_file(name: str) -> bool:
    """Whether ``name`` is that of a file, and not of a device."""
    return name.lower().endswith(SUFFIX)


def find_cluster(name: str) -> Cluster:
    """The cluster of a TOML file, or of a device and a count such as ``h100x64``.

    Raises:
        ConfigError: The file is wrong.
        LayoutError: There is no such device, or it has unequal domains.
    """
    if is_cluster_file(name):
        return read_cluster(Path(name))
    match = re.fullmatch(r"(.+?)\s*x\s*([0-9]{1,9})", name, re.IGNORECASE)
    if match is None or not int(match[2]):
        raise LayoutError(
            f"--cluster {name}",
            "a cluster is a device and how many there are, or a TOML file",
            f"h100x64, or mine{SUFFIX}",
        )
    return even_cluster(named_device(match[1]), int(match[2]))


def named_device(name: str) -> Device:
    """The preset of a name. Raises LayoutError for one that is not known."""
    device = find_device(name)
    if device is None:
        rule = f"it is one of {', '.join(sorted(DEVICES))}, or a TOML file (mine{SUFFIX}) with its figures"
        raise LayoutError(f"gpu_type {name!r}, a device without a preset", rule, nearest_name(name.lower(), DEVICES))
    return device


def even_cluster(device: Device, num_devices: int) -> Cluster:
    """Devices of a preset in whole domains, or in domains of which as many are used as the largest power of two.

    The latter is how racks of 72 are used. Raises LayoutError for other counts.
    """
    power = 1 << (device.domain.bit_length() - 1)
    for used in (device.domain, power):
        if num_devices <= device.domain or num_devices % used == 0:
            return Cluster(device=replace(device, domain=used), num_devices=num_devices)
    less = num_devices // power * power
    raise LayoutError(
        f"{num_devices} devices of {device.name} in domains of {device.domain}",
        "domains are of equal size, as a prediction is that of a cluster of equal nodes",
        f"{less} or {less + power} devices, or a TOML file with another number of devices_per_domain",
    )


def read_cluster(path: Path, *, num_devices: int = 0) -> Cluster:
    """The cluster of a TOML file; with ``num_devices``, as many of its devices.

    Raises:
        ConfigError: It cannot be read, figures are missing, or its nodes are not equal.
    """
    path = Path(os.path.expanduser(path))
    with suppress(OSError, ValueError):  # why is said below
        _refuse_others(path, read_toml(path).values)
    return as_cluster(load_config(ClusterOptions, [path]).value, place=str(path), num_devices=num_devices)


def as_cluster(options: ClusterOptions, *, place: str, num_devices: int = 0) -> Cluster:
    """The cluster of some options.

    Args:
        options: What is known of it.
        place: Where that is from, for errors.
        num_devices: How many devices there are, in place of what ``options`` say; 0: as they say.

    Raises:
        ConfigError: Figures are missing, or the domains are not equal.
    """
    count = num_devices or options.num_devices
    preset = DEVICES.get(options.device.lower())
    tflops = {name: value for name in fields_of(TflopsOptions) if (value := getattr(options.tflops, name))}
    domain = options.devices_per_domain or (preset.domain if preset else None) or (1 if count == 1 else None)
    link = options.link_gb_per_s or (preset.link_bytes_per_s / _GB if preset else None)
    network = options.network_gbit_per_s or (preset.network_bytes_per_s * 8 / _GB if preset else None)
    needed: dict[str, object] = {"num_devices": count, "devices_per_domain": domain}
    if preset is None:
        needed |= {
            "memory_gib": options.memory_gib,
            "memory_tb_per_s": options.memory_tb_per_s,
            "tflops.bf16 (or tflops.fp16)": "bf16" in tflops or "fp16" in tflops,
        }
    if count and domain:
        needed |= {"link_gb_per_s": link or min(count, domain) == 1, "network_gbit_per_s": network or count <= domain}
    if missing := [name for name, value in needed.items() if not value]:
        near = "" if preset else nearest_name(options.device.lower(), DEVICES)
        raise _refused(
            f"{place}: no {', no '.join(missing)}" + ("" if preset else f", of device {options.device!r}"),
            "a cluster has all figures that a prediction needs; only a device with a preset has them without being given",
            f"{near}; {_CALIBRATE}" if near else f"{missing[0].split()[0]} = …, or {_CALIBRATE}",
        )
    assert count is not None
    assert domain is not None
    unlimited = math.inf  # that nothing is sent over
    base = preset or Device(
        name=options.device or Path(place).stem,
        tflops={},
        memory_bytes=0.0,
        memory_bytes_per_s=0.0,
        link_bytes_per_s=unlimited,
        domain=1,
        network_bytes_per_s=unlimited,
        source=place,
    )
    device = replace(
        base,
        tflops={**base.tflops, **tflops},
        memory_bytes=options.memory_gib * GIB if options.memory_gib else base.memory_bytes,
        memory_bytes_per_s=options.memory_tb_per_s * _T if options.memory_tb_per_s else base.memory_bytes_per_s,
        link_bytes_per_s=link * _GB if link else unlimited,
        domain=domain,
        network_bytes_per_s=network / 8 * _GB if network else unlimited,
        efficiency=options.efficiency,
        host_bytes_per_s=options.host_gb_per_s * _GB if options.host_gb_per_s else base.host_bytes_per_s,
        host_link=place if options.host_gb_per_s else base.host_link,
    )
    if options.devices_per_domain is None:
        try:
            return even_cluster(device, count)
        except LayoutError as error:
            raise _refused(f"{place}: {error.given}", error.rule, error.nearest) from error
    if count > domain and count % domain:
        raise _refused(
            f"{place}: {count} devices with devices_per_domain = {domain}",
            "domains are of equal size, as a prediction is that of a cluster of equal nodes",
            f"num_devices = {count // domain * domain}, or devices_per_domain = {math.gcd(count, domain)}",
        )
    return Cluster(device=device, num_devices=count)


def fields_of(kind: type) -> tuple[str, ...]:
    """Names of the options of a section."""
    return tuple(each.name for each in fields(kind))


def _refuse_others(path: Path, values: Mapping[str, Any]) -> None:
    """Raise ConfigError for keys of files that are no cluster of equal nodes."""
    if BASE in values:
        raise _refused(
            f"{path}: {BASE} = {shown(values[BASE])}",
            "a cluster is described by one file",
            f"without {BASE}, with the figures of that file",
        )
    if _NODES in values:
        raise _refused(
            f"{path}: {_NODES}, which may be mixed",
            "a cluster has num_devices equal devices, devices_per_domain in each node; steps of unlike nodes are not predicted",
            _equal_part(values[_NODES]) + "the figures of the slowest device for all",
        )


def _equal_part(nodes: object) -> str:
    """The largest part of ``nodes`` with the same device and count, as options; empty if they do not say it."""
    counts: Counter[tuple[str, int]] = Counter()
    for node in cast("Sequence[Any]", nodes) if isinstance(nodes, list) else ():
        each = cast("Mapping[str, Any]", node) if isinstance(node, dict) else {}
        device, count = each.get("device"), each.get("num_devices", each.get("count"))
        if isinstance(device, str) and isinstance(count, int) and count > 0:
            counts[device, count] += 1
    if not counts:
        return ""
    device, count = max(counts, key=lambda kind: kind[1] * counts[kind])
    total = count * counts[device, count]
    part = f"device = {shown(device)}, num_devices = {total}, devices_per_domain = {count}"
    return f"{part}, which is {'all' if len(counts) == 1 else 'the largest equal part'} of it; or "


def _refused(given: str, rule: str, nearest: str) -> ConfigError:
    return ConfigError(given=given, rule=rule, consequence="nothing was predicted", nearest=nearest)
