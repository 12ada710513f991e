"""The adapters that are built in, and which one a process uses. Only here are ``torch.accelerator`` and vendors' backends called.

``torch.accelerator`` drives CUDA and ROCm devices, XPU, MPS, and what other packages register (Ascend by torch_npu). Use on
other devices than CUDA's was not tried.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, partial
from importlib.metadata import entry_points
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.device.adapter import (
    ADAPTER_GROUP,
    DeviceAdapter,
    DeviceMemory,
    DeviceRandom,
    DeviceStreams,
)
from unisono.device.health import DeviceHealth, no_health, nvml_health
from unisono.device.kernel_log import no_errors, xid_errors
from unisono.device.npu_smi import npu_health

_CUDA: Final = "cuda"
_LOG: Final = logging.getLogger("unisono.device")


def present_adapter() -> DeviceAdapter:
    """The accelerator that this process sees, else the CPU."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is not None:
        return adapter_for(kind.type)
    others = (adapter for name, adapter in _plugged().items() if name != "cpu" and adapter.count())
    return next(others, adapter_for("cpu"))


@cache
def adapter_for(device_type: str) -> DeviceAdapter:
    """The adapter of a device type of torch."""
    if (other := _plugged().get(device_type)) is not None:
        return other
    return _cpu() if device_type == "cpu" else _accelerator(device_type)


def adapter_of(device: torch.device) -> tuple[DeviceAdapter, int]:
    """The adapter of a device, and its number."""
    return adapter_for(device.type), device.index or 0


@cache
def _plugged() -> dict[str, DeviceAdapter]:
    """Adapters of other packages, by device type; one that cannot be imported is left out with a warning."""
    found: dict[str, DeviceAdapter] = {}
    for entry in entry_points(group=ADAPTER_GROUP):
        try:
            adapter = entry.load()
            if not isinstance(adapter, DeviceAdapter) or adapter.name != entry.name:
                raise TypeError(f"it is not a DeviceAdapter of the name {entry.name!r}")
            found[entry.name] = adapter
        except Exception as error:
            _LOG.warning("device %s of %s is left out: %s: %s", entry.name, entry.value, type(error).__name__, error)
    return found


def _nothing(*arguments: object) -> None:
    """What the CPU does where another device would have to be set or waited for."""


def _cpu() -> DeviceAdapter:
    kernels: Any = torch.cpu
    return DeviceAdapter(
        name="cpu",
        count=lambda: 1,
        set_current=_nothing,
        device_name=lambda index: "cpu",
        collective_backend=lambda: "gloo",
        synchronize=_nothing,
        streams=None,
        memory=_nothing,
        random=None,
        health=no_health,
        kernel_errors=no_errors,
        pci_address=lambda index: "",
        reaches=None,
        computes_bf16=lambda: bool(kernels._is_avx512_bf16_supported() or kernels._is_amx_tile_supported()),
        computes_fp8=lambda: False,
        has_tf32=False,
        fork_random=lambda index: torch.random.fork_rng(devices=[]),
    )


def _accelerator(name: str) -> DeviceAdapter:
    """What ``torch.accelerator`` and the module ``torch.<name>`` offer; the module may be absent (``torch.device("meta")``)."""
    backend: Any = getattr(torch, name, None)
    is_cuda = name == _CUDA
    accelerator: Any = torch.accelerator

    def current_stream(index: int) -> Any:
        return accelerator.current_stream(torch.device(name, index))

    def new_stream(index: int) -> Any:
        return torch.Stream(device=torch.device(name, index))

    def new_event() -> Any:
        return torch.Event(device=name, enable_timing=True)

    def count() -> int:
        kind = accelerator.current_accelerator() if accelerator.is_available() else None
        return int(accelerator.device_count()) if kind is not None and kind.type == name else 0

    def device_name(index: int) -> str:
        naming = getattr(backend, "get_device_name", None)
        return str(naming(index)) if callable(naming) else name

    def memory(index: int) -> DeviceMemory:
        free, limit = accelerator.get_memory_info(index)
        return DeviceMemory(
            now_bytes=int(accelerator.memory_allocated(index)),
            peak_bytes=int(accelerator.max_memory_allocated(index)),
            peak_reserved_bytes=int(accelerator.max_memory_reserved(index)),
            limit_bytes=int(limit),
            free_bytes=int(free),
            num_alloc_retries=int(accelerator.memory_stats(index).get("num_alloc_retries", 0)),
        )

    def set_random_state(state: Tensor) -> None:
        backend.set_rng_state(state)

    def fork_random(index: int) -> AbstractContextManager[Any]:
        return torch.random.fork_rng(devices=[index], device_type=name)

    def computes_bf16() -> bool:
        supported = getattr(backend, "is_bf16_supported", None)
        return bool(supported()) if callable(supported) else False

    def pci_address(index: int) -> str:
        properties = backend.get_device_properties(index) if hasattr(backend, "get_device_properties") else None
        parts = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
        return "" if None in parts else "{:04x}:{:02x}:{:02x}.0".format(*parts)

    def of_nvidia(index: int) -> DeviceHealth:
        return nvml_health(pci_address(index), index)

    readers: dict[str, Callable[[int], DeviceHealth]] = {"npu": npu_health}
    if is_cuda and torch.version.hip is None:
        readers[_CUDA] = of_nvidia
    reaches: Any = getattr(backend, "can_device_access_peer", None)
    return DeviceAdapter(
        name=name,
        count=count,
        set_current=accelerator.set_device_index,
        device_name=device_name,
        collective_backend=partial(dist.get_default_backend_for_device, name),
        synchronize=lambda index: accelerator.synchronize(torch.device(name, index)),
        streams=DeviceStreams(current=current_stream, new=new_stream, new_event=new_event),
        memory=memory,
        random=DeviceRandom(state=lambda: backend.get_rng_state(), set_state=set_random_state),
        health=readers.get(name, no_health),
        kernel_errors=xid_errors if is_cuda else no_errors,
        pci_address=pci_address,
        reaches=reaches,
        computes_bf16=computes_bf16,
        computes_fp8=_computes_fp8 if is_cuda else lambda: False,
        has_tf32=is_cuda,
        fork_random=fork_random,
    )


def _computes_fp8() -> bool:
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability() >= (8, 9)


def set_kernel_choice(*, tf32: bool, autotune: bool) -> None:
    """Whether fp32 products run as TF32, and whether convolution kernels are chosen by timing rather than deterministic."""
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = autotune
    torch.backends.cudnn.deterministic = not autotune


def cuda_release() -> str | None:
    """The CUDA release that this torch was built for, such as ``12.6``; None for another device."""
    return torch.version.cuda


def toolkit() -> str:
    """What this torch was built for, in words."""
    cuda = cuda_release()
    return f"CUDA {cuda}" if cuda else f"ROCm {torch.version.hip}" if torch.version.hip else "the CPU"


def library_versions() -> dict[str, str]:
    """Versions of the libraries of this torch's devices, by name: NCCL and cuDNN, where it has them."""
    found: dict[str, str] = {}
    nccl: Any = getattr(torch.cuda, "nccl", None)
    try:
        found["NCCL"] = ".".join(map(str, nccl.version()))
    except Exception:  # no NCCL in this build: which error that is differs between builds
        _LOG.debug("this torch has no NCCL")
    if torch.backends.cudnn.is_available():
        found["cuDNN"] = str(torch.backends.cudnn.version())
    return found
