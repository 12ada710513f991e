"""Accelerators by name: what a data sheet says of one, and of the links between them. Imports no torch.

Figures are per device and dense. Memory is in GiB where data sheets say GB, as devices have it.
``link_bytes_per_s`` is that of one direction between the devices of a domain: half of the total that NVLink's data sheets give.
``network_bytes_per_s`` is that of the network card that systems of the maker have for each device.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from unisono.units import GIB

Precision = Literal["bf16", "fp16", "fp8", "fp4"]

_T: Final = 1e12
_GB: Final = 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """An accelerator and its neighbours.

    Attributes:
        name: As presets name it.
        tflops: Peak of matrix products in TFLOP/s, dense, by precision.
        memory_bytes: Size of its memory.
        memory_bytes_per_s: Bandwidth of its memory.
        link_bytes_per_s: Bandwidth to the devices of its domain, in one direction.
        domain: Devices that such links connect.
        network_bytes_per_s: Bandwidth to devices outside of the domain, in one direction.
        source: Where the figures are from.
        efficiency: Share of the peak that large matrix products were measured to reach; None: as was fitted to published runs.
        architecture: Of its matrix units, which it has in common with other devices; empty if that is not known.
        power_share: Power of the device over its peak in 16 bits, as a multiple of that of the first device of its architecture;
            1 if that is not known. Large products are limited by power.
        host_bytes_per_s: Bandwidth to the memory of its host, in one direction; 0 if no data sheet says it.
        host_link: The link that this is the bandwidth of, and where that is said.
    """

    name: str
    tflops: Mapping[Precision, float]
    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    domain: int
    network_bytes_per_s: float
    source: str
    efficiency: float | None = None
    architecture: str = ""
    power_share: float = 1.0
    host_bytes_per_s: float = 0.0
    host_link: str = ""

    def peak_flops(self, precision: Precision) -> float | None:
        """Peak of ``precision`` in FLOP/s; None if the device has none."""
        peak = self.tflops.get(precision)
        return None if peak is None else peak * _T


def _device(
    name: str,
    memory_gib: float,
    memory_tb_per_s: float,
    link_gb_per_s: float,
    domain: int,
    network_gbit_per_s: float,
    source: str,
    **tflops: float,
) -> Device:
    return Device(
        name=name,
        tflops=dict(tflops),  # pyright: ignore[reportArgumentType]
        memory_bytes=memory_gib * GIB,
        memory_bytes_per_s=memory_tb_per_s * _T,
        link_bytes_per_s=link_gb_per_s * _GB,
        domain=domain,
        network_bytes_per_s=network_gbit_per_s / 8 * _GB,
        source=source,
        architecture=next((arch for arch, names in _ARCHITECTURES.items() if name in names), ""),
        power_share=_POWER_W[name] / tflops["bf16"] / _FIRST_W_PER_TFLOPS[name] if name in _POWER_W else 1.0,
        host_bytes_per_s=next((gb_per_s * _GB for gb_per_s, _, names in _HOST_LINKS if name in names), 0.0),
        host_link=next((link for _, link, names in _HOST_LINKS if name in names), ""),
    )


# of devices for training; those for graphics have other matrix units under the same names
_ARCHITECTURES: Final = {
    "ampere": ("a100-80", "a100-40"),
    "hopper": ("h100", "h100-pcie", "h100-hbm2e", "h200", "gh200", "h800"),
    "blackwell": ("gb200", "b200", "b300", "gb300"),
}
# thermal design power of those, from the same data sheets; of the first of an architecture, over its peak
_POWER_W: Final[Mapping[str, float]] = {
    **{"a100-40": 400, "a100-80": 400},
    **{"h100": 700, "h100-pcie": 350, "h100-hbm2e": 500, "h200": 700, "gh200": 700, "h800": 700},
    **{"b200": 1000, "gb200": 1200, "b300": 1100, "gb300": 1400},
}
_FIRST_W_PER_TFLOPS: Final[Mapping[str, float]] = {
    name: watts
    for architecture, watts in (("ampere", 400 / 312), ("hopper", 700 / 989.4), ("blackwell", 1200 / 2500))
    for name in _ARCHITECTURES[architecture]
}
# GB/s in one direction, by the data sheets of the devices. Those of a TPU say none
_HOST_LINKS: Final = (
    (16, "PCIe 3.0 x16", ("v100",)),
    (32, "PCIe 4.0 x16", ("a100-40", "a100-80", "l40s", "rtx-4090", "rtx-a6000")),
    (64, "PCIe 5.0 x16", ("h100", "h100-pcie", "h100-hbm2e", "h200", "h800", "b200", "mi300x")),
    (128, "PCIe 6.0 x16", ("b300",)),
    (450, "NVLink-C2C, half of the total", ("gh200",)),
    (225, "NVLink-C2C of two devices, half of the total", ("gb200", "gb300")),
)
_ALL: Final = (
    _device("v100", 32, 0.9, 150, 8, 100, "NVIDIA V100 data sheet; DGX-2", fp16=125),
    _device("a100-40", 40, 1.555, 300, 8, 200, "NVIDIA A100 data sheet; DGX A100", bf16=312, fp16=312),
    _device("a100-80", 80, 2.039, 300, 8, 200, "NVIDIA A100 data sheet; DGX A100", bf16=312, fp16=312),
    _device("h100", 80, 3.35, 450, 8, 400, "NVIDIA H100 data sheet, SXM; DGX H100", bf16=989.4, fp16=989.4, fp8=1978.9),
    _device("h100-pcie", 80, 2.0, 64, 8, 400, "NVIDIA H100 data sheet, PCIe", bf16=756, fp16=756, fp8=1513),
    _device("h100-hbm2e", 96, 2.4, 450, 8, 400, "at 500 W (arXiv 2410.06511)", bf16=756, fp16=756, fp8=1513),
    _device("h200", 141, 4.8, 450, 8, 400, "NVIDIA H200 data sheet; DGX H200", bf16=989.4, fp16=989.4, fp8=1978.9),
    _device("gh200", 96, 4.0, 450, 1, 400, "NVIDIA GH200 data sheet", bf16=989.4, fp16=989.4, fp8=1978.9),
    _device("h800", 80, 3.35, 200, 8, 400, "DeepSeek-V3 (arXiv 2412.19437)", bf16=989.4, fp16=989.4, fp8=1978.9),
    _device("b200", 180, 7.7, 900, 8, 400, "NVIDIA HGX B200 table; DGX B200", bf16=2250, fp16=2250, fp8=4500, fp4=9000),
    _device("gb200", 186, 8.0, 900, 72, 400, "NVIDIA GB200 NVL72 data sheet", bf16=2500, fp16=2500, fp8=5000, fp4=10000),
    _device("b300", 288, 7.7, 900, 8, 800, "NVIDIA HGX B300 table", bf16=2250, fp16=2250, fp8=4500, fp4=13500),
    _device("gb300", 288, 8.0, 900, 72, 800, "NVIDIA GB300 NVL72 data sheet", bf16=2500, fp16=2500, fp8=5000, fp4=15000),
    _device("mi300x", 192, 5.3, 448, 8, 400, "AMD MI300X data sheet", bf16=1307, fp16=1307, fp8=2615),
    _device("tpu-v4", 32, 1.2, 150, 4096, 50, "Google Cloud TPU v4 page; 6 links of a torus", bf16=275),
    _device("tpu-v5e", 16, 0.819, 100, 256, 25, "Google Cloud TPU v5e page; 4 links of a torus", bf16=197),
    _device("tpu-v5p", 95, 2.765, 300, 8960, 50, "Google Cloud TPU v5p page; 6 links of a torus", bf16=459),
    _device("tpu-v6e", 32, 1.64, 224, 256, 50, "Google Cloud TPU v6e page; 4 links of a torus", bf16=918),
    _device("tpu-v7x", 192, 7.37, 600, 9216, 100, "Google Cloud TPU7x page; 6 links of a torus", bf16=2307, fp8=4614),
    _device("l40s", 48, 0.864, 32, 8, 200, "NVIDIA L40S data sheet; PCIe 4.0", bf16=362, fp16=362, fp8=733),
    _device("rtx-4090", 24, 1.008, 32, 8, 100, "NVIDIA Ada white paper; PCIe 4.0", bf16=165.2, fp16=165.2, fp8=330.3),
    _device("rtx-a6000", 48, 0.768, 56, 2, 100, "NVIDIA RTX A6000 data sheet", bf16=154.8, fp16=154.8),
)  # fmt: skip
DEVICES: Final[Mapping[str, Device]] = {device.name: device for device in _ALL}

# first match wins
_NAMES: Final = (
    (r"H100(?!\d).*(HBM2e|96GB)", "h100-hbm2e"),
    (r"H100(?!\d).*PCIe", "h100-pcie"),
    (r"GH200", "gh200"),
    (r"GB300", "gb300"),
    (r"GB200", "gb200"),
    (r"B300", "b300"),
    (r"B200", "b200"),
    (r"H800", "h800"),
    (r"H200", "h200"),
    (r"H100", "h100"),
    (r"A100(?!\d).*40", "a100-40"),
    (r"A100", "a100-80"),
    (r"V100", "v100"),
    (r"MI300X", "mi300x"),
    (r"TPU ?v4", "tpu-v4"),
    (r"TPU ?v5e", "tpu-v5e"),
    (r"TPU ?v5p", "tpu-v5p"),
    (r"TPU ?v6e", "tpu-v6e"),
    (r"TPU ?(v7|7x)", "tpu-v7x"),
    (r"L40S", "l40s"),
    (r"4090", "rtx-4090"),
    (r"A6000", "rtx-a6000"),
)


def find_device(name: str) -> Device | None:
    """The preset for a name such as ``H100-80GB`` or ``a100-40``; None for one that is not known."""
    if name.lower() in DEVICES:
        return DEVICES[name.lower()]
    for pattern, preset in _NAMES:
        if re.search(rf"(?<!\d){pattern}(?!\d)", name, re.IGNORECASE):  # H1000 is no H100
            return DEVICES[preset]
    return None
