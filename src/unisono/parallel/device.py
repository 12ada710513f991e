"""The device of this rank, and the numeric switches of its backend. The only place that may name a vendor's backend."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch

from unisono.errors import PlanError, nearest_name
from unisono.plan.plan import Plan

# what a plan's precision computes in, by torch's name; fp8 is a matter of single layers
COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


def find_device(asked: str, local_rank: int) -> torch.device:
    """The torch device for ``plan.device``: ``auto``, ``cpu`` or an accelerator type. Raises PlanError when it is absent."""
    present = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if asked == "cpu" or (asked == "auto" and present is None):
        return torch.device("cpu")
    if present is None or asked not in ("auto", present.type):
        raise PlanError(
            given=f"plan.device {asked!r}",
            rule=f"this torch ({torch.__version__}) sees "
            + ("only the CPU" if present is None else f"{present.type!r} and the CPU"),
            consequence="nothing was started",
            nearest=f"plan.device={('cpu' if present is None else present.type)!r}, or a torch built for {asked!r} "
            "and its driver",
        )
    count = torch.accelerator.device_count()
    if local_rank >= count:
        raise PlanError(
            given=f"local rank {local_rank}",
            rule=f"one rank per device, and this host shows {count} of type {present.type!r}",
            consequence="two ranks would share a device",
            nearest=f"launch.num_processes={count}, or make more devices visible",
        )
    return torch.device(present.type, local_rank)


def computes_bf16(device: torch.device) -> bool:
    """Whether bf16 matrix products run in hardware rather than by conversion to fp32."""
    if device.type == "cpu":
        adapter: Any = torch.cpu
        return bool(adapter._is_avx512_bf16_supported() or adapter._is_amx_tile_supported())
    backend: Any = getattr(torch, device.type, None)
    supported = getattr(backend, "is_bf16_supported", None)
    return bool(supported()) if supported is not None else False


def computes_fp8(device_type: str) -> bool:
    """Whether the device has matrix products of 8-bit floats."""
    if device_type != "cuda" or not torch.cuda.is_available():
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability() >= (8, 9)


def set_backend(plan: Plan) -> None:
    """Apply tf32, autotune and determinism, all explicitly: none is left to a library's default."""
    if plan.mesh.device == "cpu":
        # Scattered additions (an embedding's gradient in compiled code, index_put) otherwise race between threads, and a
        # resumed run is not bit-equal. Filling new memory is torch's debugging aid and would only cost.
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    torch.backends.cuda.matmul.allow_tf32 = plan.backend.tf32
    torch.backends.cudnn.allow_tf32 = plan.backend.tf32
    torch.backends.cudnn.benchmark = plan.backend.autotune
    torch.backends.cudnn.deterministic = not plan.backend.autotune


def autocast(precision: str, device_type: str) -> contextlib.AbstractContextManager[Any]:
    """A context of forward passes with matrix products in bf16 or fp16, and reductions in fp32.

    Args:
        precision: ``fp32`` (nothing changes), ``bf16`` or ``fp16``; with ``fp8`` what is outside of fp8 layers is in bf16.
        device_type: Type of the device that computes, such as ``cuda`` or ``cpu``.

    Raises:
        PlanError: There is no such precision.
    """
    if precision not in COMPUTE_DTYPES:
        raise PlanError(
            given=f"precision {precision!r}",
            rule=f"a forward pass computes in {', '.join(COMPUTE_DTYPES)}",
            consequence="nothing was computed",
            nearest=nearest_name(precision, COMPUTE_DTYPES),
        )
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device_type, dtype=COMPUTE_DTYPES[precision])


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """Memory of an accelerator, as its caching allocator counts it.

    Attributes:
        now_bytes: In tensors now.
        peak_bytes: Most that was in tensors.
        peak_reserved_bytes: Most that the allocator had taken from the device, for tensors and free blocks between them.
        limit_bytes: Memory of the device.
        num_alloc_retries: Allocations that succeeded only after all free blocks were given back to the device.
    """

    now_bytes: int
    peak_bytes: int
    peak_reserved_bytes: int
    limit_bytes: int
    num_alloc_retries: int


def device_memory(device: torch.device) -> DeviceMemory | None:
    """The memory of an accelerator; None on the CPU, whose memory is that of the process."""
    if device.type == "cpu":
        return None
    backend: Any = getattr(torch, device.type)
    return DeviceMemory(
        now_bytes=int(torch.accelerator.memory_allocated()),
        peak_bytes=int(torch.accelerator.max_memory_allocated()),
        peak_reserved_bytes=int(torch.accelerator.max_memory_reserved()),
        limit_bytes=int(backend.mem_get_info()[1]),
        num_alloc_retries=int(torch.accelerator.memory_stats().get("num_alloc_retries", 0)),
    )
