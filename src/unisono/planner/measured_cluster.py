"""The cluster that this machine is: its accelerators by their names, else what ``unisono plan calibrate`` measured.

Imports torch only where a device file hints at an accelerator.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Sequence

from unisono.config.values import toml_value
from unisono.data.options import default_cache_dir
from unisono.errors import ConfigError
from unisono.launch.resources import accelerator_files
from unisono.measure.calibration import CALIBRATION_FILE, SHARED_MEMORY, DeviceRate, LinkRate, read_calibration
from unisono.measure.ceiling import cpu_name
from unisono.planner.cluster_file import Cluster, ClusterOptions, TflopsOptions, as_cluster, even_cluster, fields_of
from unisono.planner.devices import Device, find_device
from unisono.units import GIB

_T, _GB = 1e12, 1e9
_LEAST_BYTES = 1 << 20  # of a sum: smaller ones show the latency


def this_machine() -> Cluster:
    """The accelerators of this machine if they have a preset, else what was measured on it last.

    Raises:
        ConfigError: Its accelerators are not equal, or nothing was measured.
        LayoutError: The devices are no whole domains.
    """
    names = _accelerator_names()
    if len(set(names)) > 1:
        raise ConfigError(
            given=f"no --cluster, on a machine with {', '.join(dict.fromkeys(names))}",
            rule="a cluster has equal devices; steps of unlike ones are not predicted",
            consequence="nothing was searched",
            nearest="CUDA_VISIBLE_DEVICES with equal ones, or --cluster with the slowest device and their number",
        )
    preset = _preset(names[0]) if names else None
    if preset is not None:
        return even_cluster(preset, len(names))
    name = names[0] if names else cpu_name()
    measured = _measured_here(name)
    if measured is None:
        raise ConfigError(
            given=f"no --cluster, on a machine ({name}) that was not measured",
            rule="without --cluster the devices of this machine are taken: accelerators with a preset, or what was measured",
            consequence="nothing was searched",
            nearest="unisono plan calibrate, and the same command again; or --cluster h100x64",
        )
    return measured


def device_here(name: str) -> Device | None:
    """The device of this machine with a name as torch has it: a preset, else what was measured last; None without either.

    Raises ConfigError if what was measured is not enough.
    """
    preset = _preset(name)
    if preset is not None:
        return preset
    measured = _measured_here(name)
    return None if measured is None else measured.device


def _measured_here(name: str) -> Cluster | None:
    """The cluster that was measured on this host last, of devices of this name; None if none was."""
    host = socket.gethostname()
    known = read_calibration(default_cache_dir(os.environ) / CALIBRATION_FILE)
    rates = [rate for rate in known.devices if (rate.hosts, rate.name) == ((host,), name)]
    if not rates:
        return None
    measured = max(rates, key=lambda rate: rate.at_s)
    return as_cluster(measured_options(measured, known.links), place=f"what was measured on {host}")


def measured_options(rate: DeviceRate, links: Sequence[LinkRate]) -> ClusterOptions:
    """The cluster of the ranks that ``rate`` is of. What was not measured is left out.

    A device with a preset keeps its peak and the bandwidth of its memory, which the constants were fitted to; the share of the
    peak that was measured is given. Of another one the peak is what was measured. Links are those of sums by torch's backend on
    one host, as a ring sends them; of several hosts, messages between the slowest two ranks.
    """
    device = _preset(rate.name)
    peak = device.peak_flops("bf16") if device is not None else None
    sums = [each for each in _of_job(rate, links, "all_reduce") if each.nbytes >= _LEAST_BYTES and rate.ranks > 1]
    sent = [each for each in _of_job(rate, links, "send") if len(rate.hosts) > 1]
    # each rank sends 2 (n - 1) / n of the bytes (Patarasuk and Yuan 2009)
    ring = max((each.bytes_per_s * 2 * (rate.ranks - 1) / rate.ranks for each in sums), default=0.0)
    network = max((each.bytes_per_s for each in sent), default=0.0)
    return ClusterOptions(
        device=rate.name if device is None else device.name,
        num_devices=rate.ranks,
        devices_per_domain=rate.ranks // len(rate.hosts) if rate.ranks % len(rate.hosts) == 0 else None,
        memory_gib=_rounded(rate.memory_bytes / GIB),
        memory_tb_per_s=_rounded(rate.memory_bytes_per_s / _T) if device is None else None,
        link_gb_per_s=_rounded(ring / _GB) if len(rate.hosts) == 1 else None,
        network_gbit_per_s=_rounded(network * 8 / _GB),
        efficiency=1.0 if device is None else _rounded(min(1.0, rate.tflops * _T / peak)) if peak else None,
        tflops=TflopsOptions(bf16=_rounded(rate.tflops)) if device is None else TflopsOptions(),
    )


def cluster_text(options: ClusterOptions, heading: str) -> str:
    """The TOML file of ``options`` with what is known, below ``heading`` as a comment."""
    own = [name for name in fields_of(ClusterOptions) if name != "tflops"]
    lines = [f"# {heading}", *(f"{name} = {toml_value(value)}" for name in own if (value := getattr(options, name)))]
    peaks = {name: value for name in fields_of(TflopsOptions) if (value := getattr(options.tflops, name))}
    lines += ["", "[tflops]", *(f"{name} = {value}" for name, value in peaks.items())] if peaks else []
    return "\n".join(lines) + "\n"


def _accelerator_names() -> list[str]:
    if not accelerator_files():
        return []
    from unisono.device.torch_adapters import present_adapter

    adapter = present_adapter()
    return [] if adapter.streams is None else [adapter.device_name(index) for index in range(adapter.count())]


def _preset(name: str) -> Device | None:
    """That of the whole device: the name of a slice of one (MIG) does not tell its share."""
    return None if re.search(r"\bMIG\b", name) else find_device(name)


def _of_job(rate: DeviceRate, links: Sequence[LinkRate], operation: str) -> list[LinkRate]:
    """What its ranks exchanged, of the largest size first, by torch's backend."""
    found = [
        link
        for link in links
        if (link.operation, link.ranks, link.hosts) == (operation, rate.ranks, rate.hosts)
        and link.transport != SHARED_MEMORY
    ]
    return sorted(found, key=lambda link: -link.nbytes)


def _rounded(value: float) -> float | None:
    """With four digits; None for 0, which was not measured."""
    return float(f"{value:.4g}") if value else None
