"""The accelerators of this host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from unisono.doctor.check import Check, judged

_GIB: Final = 2**30


def check_devices() -> Iterator[Check]:
    """DEV01 to DEV03."""
    import torch

    if not torch.accelerator.is_available():
        yield judged("DEV01", "devices", "torch sees the CPU alone", warning=_no_device_cure())
        return
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    backend: Any = getattr(torch, kind.type)
    names = [str(backend.get_device_name(index)) for index in range(torch.accelerator.device_count())]
    evidence = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    mixed = "ranks of unlike devices wait for the slowest: choose like ones with CUDA_VISIBLE_DEVICES"
    yield judged("DEV01", "devices", evidence, warning=mixed if len(set(names)) > 1 else "")
    free = [backend.mem_get_info(index) for index in range(len(names))]
    held = {index: total - left for index, (left, total) in enumerate(free) if left < 0.9 * total}
    yield judged(
        "DEV02",
        "memory held by others",
        ", ".join(f"device {index}: {count / _GIB:.3g} GiB" for index, count in held.items()) or "none",
        warning="end the processes that hold it (nvidia-smi)" if held else "",
    )


def _no_device_cure() -> str:
    """What is missing where the host has a device that torch does not see; empty where it has none."""
    from unisono.launch.resources import accelerator_files

    found = accelerator_files()
    return f"the host has {', '.join(found)}: install the torch that was built for it, and its driver" if found else ""
