"""The device of this rank, and the numeric switches of its backend."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from unisono.device.torch_adapters import adapter_for, present_adapter, set_kernel_choice
from unisono.errors import PlanError, nearest_name
from unisono.plan.plan import Plan

# what a plan's precision computes in, by torch's name; fp8 is a matter of single layers
COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


def find_device(asked: str, local_rank: int) -> torch.device:
    """The torch device for ``plan.device``: ``auto``, ``cpu`` or an accelerator type; this thread uses it from now on.

    Raises PlanError when it is absent.
    """
    present = present_adapter()
    if asked == "cpu" or (asked == "auto" and present.name == "cpu"):
        return torch.device("cpu")
    if asked not in ("auto", present.name):
        raise PlanError(
            given=f"plan.device {asked!r}",
            rule=f"this torch ({torch.__version__}) sees "
            + ("only the CPU" if present.name == "cpu" else f"{present.name!r} and the CPU"),
            consequence="nothing was started",
            nearest=f"plan.device={present.name!r}, or a torch built for {asked!r} and its driver",
        )
    count = present.count()
    if local_rank >= count:
        raise PlanError(
            given=f"local rank {local_rank}",
            rule=f"one rank per device, and this host shows {count} of type {present.name!r}",
            consequence="two ranks would share a device",
            nearest=f"launch.num_processes={count}, or make more devices visible",
        )
    present.set_current(local_rank)
    return torch.device(present.name, local_rank)


def computes_bf16(device: torch.device) -> bool:
    """Whether bf16 matrix products run in hardware rather than by conversion to fp32."""
    return adapter_for(device.type).computes_bf16()


def computes_fp8(device_type: str) -> bool:
    """Whether the device has matrix products of 8-bit floats."""
    return adapter_for(device_type).computes_fp8()


_deterministic_for_cpu = False


def set_backend(plan: Plan) -> None:
    """Apply tf32, autotune and determinism, all explicitly: none is left to a library's default."""
    global _deterministic_for_cpu
    if plan.mesh.device == "cpu":
        _deterministic_for_cpu |= not torch.are_deterministic_algorithms_enabled()
        # Scattered additions (an embedding's gradient in compiled code, index_put) otherwise race between threads, and a
        # resumed run is not bit-equal. Filling new memory is torch's debugging aid and would only cost.
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    elif _deterministic_for_cpu:  # by an earlier plan of this process; what the user has set stays
        torch.use_deterministic_algorithms(False)
        _deterministic_for_cpu = False
    set_kernel_choice(tf32=plan.backend.tf32, autotune=plan.backend.autotune)


def autocast(precision: str, device_type: str, *, keeps_casts: bool = True) -> contextlib.AbstractContextManager[Any]:
    """A context of forward passes with matrix products in bf16 or fp16, and reductions in fp32.

    Args:
        precision: ``fp32`` (nothing changes), ``bf16`` or ``fp16``; with ``fp8`` what is outside of fp8 layers is in bf16.
        device_type: Type of the device that computes, as torch calls it.
        keeps_casts: Whether a weight that is used again is not converted again. Until the context ends this holds converted
            copies of all weights, also of those that sharding or recompute would free.

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
    return torch.autocast(device_type, dtype=COMPUTE_DTYPES[precision], cache_enabled=keeps_casts)


def shared_casts(precision: str, device_type: str) -> contextlib.AbstractContextManager[Any]:
    """A context of several forward passes in ``autocast``: a weight whose copies they keep is converted by the first of them.

    The copies are held until it ends. Weights must not change before, and backward passes may run inside.
    """
    return contextlib.nullcontext() if precision == "fp32" else torch.autocast(device_type, enabled=False)
