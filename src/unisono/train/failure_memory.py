"""What a rank that ran out of memory measures of it, for its failure record: sizes in bytes, by name.

allocated_bytes, allocated_peak_bytes, reserved_peak_bytes, free_bytes, limit_bytes   of a device and its allocator
resident_bytes, resident_peak_bytes, limit_bytes                       of a process on the CPU; the limit is that of all ranks
address_space_bytes, address_space_peak_bytes, address_space_limit_bytes   of one under ``RLIMIT_AS``
beside_resident_bytes, beside_address_space_bytes                      of the process as training began, without its tensors
requested_bytes                                                        the allocation that failed, where the error says it
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch

from unisono.device.torch_adapters import adapter_of
from unisono.dist.failure import error_cause
from unisono.observe.host_memory import (
    PeakMemory,
    ProcessMemory,
    address_space_limit_bytes,
    host_memory_limit_bytes,
    process_memory,
)
from unisono.parallel.memory_ledger import MemoryLedger
from unisono.train.state import TrainState

_UNITS: Final = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
# torch's allocators: "you tried to allocate 4096 bytes" of the CPU, "Tried to allocate 20.00 MiB" of a device
_REQUEST: Final = re.compile(r"ried to allocate ([0-9.]+) (bytes|KiB|MiB|GiB)")


def beside_tensors(ledger: MemoryLedger, state: TrainState) -> ProcessMemory:
    """What this process takes beside its parameters and, in a run that goes on, the optimizer's state."""
    now = process_memory()
    tensors = ledger.parameter_bytes + (ledger.state_bytes if state.step else 0)
    return ProcessMemory(
        resident_bytes=max(0, now.resident_bytes - tensors),
        address_space_bytes=max(0, now.address_space_bytes - tensors),
    )


def memory_of_failure(error: BaseException, device: torch.device, beside: ProcessMemory | None) -> dict[str, int]:
    """What is measured after ``error``; empty unless it means that memory ran out.

    Args:
        error: It holds what its frames hold: most tensors are still there.
        device: Device of the rank.
        beside: What the process took beside tensors as training began; None if it had not begun.
    """
    if error_cause(error) != "out_of_memory":
        return {}
    found: dict[str, int] = {}
    # a device that failed, or no memory for this either: the error itself must still be recorded
    with suppress(RuntimeError, OSError, MemoryError):
        found |= _requested(str(error))
        adapter, index = adapter_of(device)
        memory = adapter.memory(index)
        if memory is None:
            return found | _of_process(beside)
        found |= {
            "allocated_bytes": memory.now_bytes,
            "allocated_peak_bytes": memory.peak_bytes,
            "reserved_peak_bytes": memory.peak_reserved_bytes,
            "free_bytes": memory.free_bytes,
            "limit_bytes": memory.limit_bytes,
        }
    return found


def _of_process(beside: ProcessMemory | None) -> dict[str, int]:
    now, limit_bytes = process_memory(), address_space_limit_bytes()
    found = {
        "resident_bytes": now.resident_bytes,
        "resident_peak_bytes": PeakMemory().read(),
        "limit_bytes": host_memory_limit_bytes(),
    }
    if limit_bytes is not None:
        found |= {
            "address_space_bytes": now.address_space_bytes,
            "address_space_peak_bytes": _address_space_peak_bytes() or now.address_space_bytes,
            "address_space_limit_bytes": limit_bytes,
        }
    if beside is not None:
        found |= {
            "beside_resident_bytes": beside.resident_bytes,
            "beside_address_space_bytes": beside.address_space_bytes,
        }
    return found


def _address_space_peak_bytes() -> int:
    """Largest address space of this process until now; 0 where the system does not tell it."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmPeak:"):
                return int(line.split()[1]) * 1024
    return 0


def _requested(message: str) -> dict[str, int]:
    match = _REQUEST.search(message)
    return {} if match is None else {"requested_bytes": round(float(match[1]) * _UNITS[match[2]])}
