"""How cores, devices and memory of this host are connected. No torch on a host without accelerators."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from unisono.doctor.check import Check, judged
from unisono.launch.resources import accelerator_files, allowed_cores

_PCI: Final = Path("/sys/bus/pci/devices")
_SHOWN: Final = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class PciLink:
    """The place of a device on the PCI bus; 0 or -1 where the system does not say.

    Attributes:
        address: Such as ``0000:3b:00.0``.
        node: NUMA node.
        width: Lanes in use.
        max_width: Lanes that the device has.
    """

    address: str
    node: int
    width: int
    max_width: int


def check_topology() -> Iterator[Check]:
    """TOPO01 to TOPO03; the last two for accelerators."""
    links: list[PciLink] = []
    if accelerator_files():
        from unisono.device.torch_adapters import present_adapter

        adapter = present_adapter()
        count = 0 if adapter.name == "cpu" else adapter.count()
        links = [pci_link(adapter.pci_address(index)) for index in range(count)]
        if count and adapter.reaches is not None:
            yield _peers([[adapter.reaches(i, j) for j in range(count) if i != j] for i in range(count)])
        if count:
            yield lanes(links)
    yield numa(Counter(core.node for core in allowed_cores()), links)


def numa(cores: Counter[int], links: Sequence[PciLink]) -> Check:
    """TOPO01: cores and devices of each NUMA node; a device whose node has no core of this process is far from all of them."""
    nodes = sorted(cores)
    evidence = ", ".join(f"node {node}: {cores[node]} {'core' if cores[node] == 1 else 'cores'}" for node in nodes)
    far = [f"device {index}" for index, link in enumerate(links) if link.node >= 0 and link.node not in cores]
    evidence += "".join(f", device {index} on node {link.node}" for index, link in enumerate(links) if link.node >= 0)
    cure = f"let this process use cores of the nodes of {', '.join(far)}: batches pass through memory of another node"
    return judged("TOPO01", "NUMA nodes", evidence, warning=cure if far else "")


def lanes(links: Sequence[PciLink]) -> Check:
    """TOPO02: devices that use fewer PCI lanes than they have."""
    narrow = [(index, link) for index, link in enumerate(links) if 0 < link.width < link.max_width]
    evidence = ", ".join(f"device {index} uses {link.width} of {link.max_width} lanes" for index, link in narrow)
    known = sorted({link.width for link in links if link.width})
    devices = "1 device" if len(links) == 1 else f"{len(links)} devices"
    all_well = f"{devices} with {', '.join(map(str, known))} lanes" if known else "not known"
    cure = "reseat these cards, or look at the slots in the manual of the mainboard: copies to the device are slower"
    return judged("TOPO02", "PCI lanes", evidence or all_well, warning=cure if narrow else "")


def _peers(reaches: Sequence[Sequence[bool]]) -> Check:
    """TOPO03: pairs of devices that cannot read each other's memory (the P2P matrix)."""
    missing = [
        f"{index}-{other + (other >= index)}"
        for index, row in enumerate(reaches)
        for other, can in enumerate(row)
        if not can and index < other + (other >= index)
    ]
    count = len(reaches)
    evidence = f"all pairs of {count} devices" if count > 1 else "one device"
    if missing:
        evidence = f"not {', '.join(missing[:_SHOWN])}{', …' if len(missing) > _SHOWN else ''}"
    cure = "ranks of tp on devices that reach each other (CUDA_VISIBLE_DEVICES); ACS off in the BIOS; nvidia-smi topo -p2p r"
    return judged("TOPO03", "peer access of devices", evidence, warning=cure if missing else "")


def pci_link(address: str, folder: Path = _PCI) -> PciLink:
    """What the system says of the device at ``address``."""
    return PciLink(
        address=address,
        node=_number(folder / address / "numa_node", -1),
        width=_number(folder / address / "current_link_width", 0),
        max_width=_number(folder / address / "max_link_width", 0),
    )


def _number(path: Path, unknown: int) -> int:
    try:
        text = path.read_text(errors="replace").strip()
    except OSError:
        return unknown
    return int(text) if re.fullmatch(r"-?[0-9]{1,6}", text) else unknown
