"""Memory of the host: what this process uses of it and has used at most, and its limits: the cgroup's and RLIMIT_AS."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

# Addresses that a process takes once it trains, beside tensors: an arena of the C allocator for the threads of the backward pass,
# and code that kernels generate at their first call. Measured: 0.01 to 0.05 GiB (docs/log.md).
_TRAINING_ADDRESSES_BYTES: Final = 1 << 27
_NO_LIMIT_BYTES: Final = 1 << 60  # cgroup v1 writes "no limit" as the largest page-aligned number


class PeakMemory:
    """Most memory that this process has used, without pages of files, which leave memory when others need it.

    An estimate. The kernel knows the peak of all resident pages, and how many are of files now. As long as mapped files are only
    read on, at most as many were of files at the time of the peak, so the difference is a lower bound. It is too high where the
    pages of files went away between the peak and the next reading; a later reading at which the peak is the same changes nothing.
    Shared memory counts, in each process that maps it. So does everything where the system does not tell the pages of files.
    """

    def __init__(self) -> None:
        self._bytes = 0
        self._resident_bytes = 0  # peak of all pages at the last reading

    def read(self, proc: Path = Path("/proc")) -> int:
        """The peak until now, in bytes."""
        try:
            lines = (proc / "self" / "status").read_text().splitlines()
        except OSError:
            lines = []
        sizes = {
            name: int(value.split()[0]) * 1024
            for name, _, value in (line.partition(":") for line in lines)
            if name in ("VmHWM", "RssAnon", "RssFile", "RssShmem")
        }
        resident = sizes.get("VmHWM") or _peak_of_rusage()
        if resident > self._resident_bytes:
            self._resident_bytes = resident
            self._bytes = max(self._bytes, resident - sizes.get("RssFile", 0))
        self._bytes = max(self._bytes, sizes.get("RssAnon", 0) + sizes.get("RssShmem", 0))
        return self._bytes


def _peak_of_rusage() -> int:
    """For other systems; on Linux this value would include the parent's memory before exec."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessMemory:
    """Memory of a process: the pages that it has, and its address space, which ``RLIMIT_AS`` limits."""

    resident_bytes: int
    address_space_bytes: int


def process_memory() -> ProcessMemory:
    """Memory of this process now."""
    now = psutil.Process().memory_info()
    return ProcessMemory(resident_bytes=now.rss, address_space_bytes=now.vms)


def address_space_limit_bytes() -> int | None:
    """What ``ulimit -v`` (``RLIMIT_AS``) leaves this process; None without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def tensor_budget_bytes(
    num_ranks: int, beside: ProcessMemory, *, limit_bytes: int, address_space_limit_bytes: int | None
) -> int:
    """What the tensors of a rank may take of a host's memory.

    Args:
        num_ranks: Ranks that share the host.
        beside: What a rank takes beside its tensors.
        limit_bytes: Memory of all ranks.
        address_space_limit_bytes: ``RLIMIT_AS`` of each rank; None without a limit.
    """
    budget = limit_bytes // num_ranks - beside.resident_bytes
    if address_space_limit_bytes is not None:
        budget = min(budget, address_space_limit_bytes - beside.address_space_bytes - _TRAINING_ADDRESSES_BYTES)
    return max(0, budget)


def anonymous_memory_bytes() -> int:
    """Resident memory of this process that belongs to no file, in bytes: without the pages of mapped data files. 0 where the
    system does not say it."""
    try:
        resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    except OSError:
        return 0
    return (resident - shared) * resource.getpagesize()


def host_memory_limit_bytes(proc: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that this process may use: the minimum of physical memory and all limits of its cgroups and their parents.

    Reads cgroup v1 and v2.
    """
    limits = [psutil.virtual_memory().total]
    for folder, name in _limit_files(proc, cgroup_root):
        try:
            text = (folder / name).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < _NO_LIMIT_BYTES:  # v2 writes "max" for no limit
            limits.append(int(text))
    return min(limits)


def _limit_files(proc: Path, root: Path) -> Iterator[tuple[Path, str]]:
    """(folder, file name) of each possible limit, from this process's group up to the root of each hierarchy."""
    try:
        groups = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mounts, name = (root, root / "unified"), "memory.max"
        elif "memory" in controllers.split(","):
            mounts, name = (root / "memory",), "memory.limit_in_bytes"
        else:
            continue
        for mount in mounts:
            folder = mount / path.lstrip("/")
            # inside a container the path may be the host's, and only the root of the mount is visible
            yield from ((level, name) for level in (folder, *folder.parents) if level.is_relative_to(mount))
