"""The result of ``unisono plan fit --failed`` for a run that ran out of memory: its file in the run's folder, and as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from unisono.diagnose.ending import Ending
from unisono.storage.ownership import read_own_json
from unisono.storage.run_folder import LAUNCH_FILE, LOGS_FOLDER
from unisono.units import GIB

MEMORY_FILE: Final = "out-of-memory.json"  # in the folder of the logs
_Bytes = Annotated[int, msgspec.Meta(ge=-(1 << 60), le=1 << 60)]  # JSON has integers beyond any float


class MemoryEnding(msgspec.Struct, kw_only=True):
    """Memory of the rank that ran out of it: traced, measured, and what would fit.

    Attributes:
        rank: The rank.
        measured: What it measured, in bytes, by name (``train.failure_memory``).
        peak_bytes: Traced bytes of tensors, where a step of the configured plan needs most.
        peak_operator: The operator there.
        peak_phase: The phase of the step there.
        peak_bytes_by_kind: Those bytes by kind of storage, such as ``parameters`` or ``forward``.
        budget_bytes: What tensors of a rank may take.
        settings: The smallest change that fits, by dotted name; empty where none was found.
        measure: That change in words.
        is_cut: Whether measures were left untried, as time was over.
    """

    rank: int
    measured: dict[str, _Bytes]
    peak_bytes: _Bytes
    peak_operator: str
    peak_phase: str
    peak_bytes_by_kind: dict[str, _Bytes]
    budget_bytes: _Bytes
    settings: dict[str, str | int | float | bool]
    measure: str
    is_cut: bool


def ledger_lines(memory: MemoryEnding) -> Iterator[str]:
    """The traced bytes of the rank, and what it measured."""
    held = ", ".join(
        f"{kind} {_gib(size)}"
        for kind, size in sorted(memory.peak_bytes_by_kind.items(), key=lambda item: -item[1])
        if size
    )
    yield (
        f"traced, rank {memory.rank} holds {_gib(memory.peak_bytes)} GiB of tensors at its peak, in {memory.peak_operator} "
        f"({memory.peak_phase}): {held}"
    )
    yield f"measured, it {'; '.join(_measured(memory.measured)) or 'failed before training and left no reading'}"
    yield f"so tensors of a rank may take {_gib(memory.budget_bytes)} GiB"


def change_line(memory: MemoryEnding) -> str:
    """The smallest change that fits, as it is given on the command line."""
    if memory.settings:
        return f"the smallest change that fits: {changes_text(memory.settings)} ({memory.measure})"
    return "no change that fits was found " + (
        "in the time there was" if memory.is_cut else "among the settings of the plan"
    )


def changes_text(settings: Mapping[str, Any]) -> str:
    """``settings`` as ``--set`` takes them."""
    return " ".join(f"--set {name}={str(value).lower()}" for name, value in settings.items())


def with_memory(ending: Ending | None, run_dir: Path, *, since_s: float) -> Ending | None:
    """``ending`` with what is known of the memory that ran out. What was written before the attempt's end is of another one."""
    if ending is None or ending.kind not in ("out_of_memory", "error"):  # "error": without a launcher
        return ending
    path = run_dir / LOGS_FOLDER / MEMORY_FILE
    try:
        written_s = path.stat().st_mtime
        launched = run_dir / LAUNCH_FILE
        if written_s < max(since_s, launched.stat().st_mtime if launched.exists() else 0.0):
            return ending
        memory = read_own_json(path, lambda data: msgspec.json.decode(data, type=MemoryEnding))
    except (OSError, ValueError):
        return ending
    evidence = (*ending.evidence, *ledger_lines(memory))
    return replace(ending, evidence=evidence, advice=change_line(memory), patch=memory.settings)


def _measured(sizes: Mapping[str, int]) -> Iterator[str]:
    if {"allocated_bytes", "allocated_peak_bytes", "reserved_peak_bytes", "free_bytes", "limit_bytes"} <= sizes.keys():
        yield (
            f"had {_gib(sizes['allocated_bytes'])} GiB in tensors, at most {_gib(sizes['allocated_peak_bytes'])}, "
            f"and its allocator held at most {_gib(sizes['reserved_peak_bytes'])}"
        )
        yield f"{_gib(sizes['free_bytes'])} of the device's {_gib(sizes['limit_bytes'])} GiB were free"
    elif {"resident_peak_bytes", "limit_bytes"} <= sizes.keys():
        yield f"used at most {_gib(sizes['resident_peak_bytes'])} of {_gib(sizes['limit_bytes'])} GiB of the host"
    elif "limit_bytes" in sizes:
        yield f"was ended before its first reading; the host, or its control group, has {_gib(sizes['limit_bytes'])} GiB"
    if {"address_space_limit_bytes", "address_space_peak_bytes"} <= sizes.keys():
        yield (
            f"its address space was at most {_gib(sizes['address_space_peak_bytes'])} of "
            f"{_gib(sizes['address_space_limit_bytes'])} GiB (ulimit -v)"
        )
    beside = f"beside_{'address_space' if 'address_space_limit_bytes' in sizes else 'resident'}_bytes"
    if beside in sizes:
        yield f"{_gib(sizes[beside])} GiB of it were no tensors when training began"
    if "requested_bytes" in sizes:
        yield f"an allocation of {_gib(sizes['requested_bytes'])} GiB failed"


def _gib(size: int) -> str:
    return f"{size / GIB:.4g}"
