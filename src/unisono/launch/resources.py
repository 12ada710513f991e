"""What each process of a launch gets of this host, decided once, set explicitly and written down.

A launcher that leaves threads to chance makes the same job give other bits under another launcher, as torchrun sets one
thread and mpirun none. Variables the user has set stay as they are; what is in force, and from where, is recorded.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from unisono.launch.host_resources import allowed_cores, core_shares, count_accelerators, cpu_quota, host_busy_frac
from unisono.launch.options import LaunchOptions

# glibc hands large blocks back to the kernel on every free, and each step faults its activations in again, page by page
# (measured: 140 000 faults a step become 13). These keep freed memory in the process, in huge pages where the kernel
# allows them by madvise; the price is a resident size that stays near its peak. Other allocators ignore them.
TUNED_ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    "MALLOC_TOP_PAD_": "268435456",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")

# GNU OpenMP's threads spin at the end of each parallel region. On a host with other work they spin away the time slice
# of the thread they wait for, and a short spin makes a step several times faster; on a quiet host sleeping and waking costs
# 5 to 15 % of a step, and the library's own long spin is right (docs/log.md).
_SHORT_SPIN = {"GOMP_SPINCOUNT": "1000"}
_BUSY_FRAC = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class ResourceShare:
    """``affinity`` holds the logical CPUs of each process, or is None when they are not pinned; ``*_from`` says why."""

    processes: int
    threads: int
    threads_from: str
    waiting: dict[str, str]
    waiting_from: str
    allocator: dict[str, str]
    affinity: list[list[int]] | None
    numa: str
    cores_allowed: int
    cpu_quota: float | None

    def environ(self) -> dict[str, str]:
        """Variables for every process of the launch."""
        return {name: str(self.threads) for name in _THREAD_VARIABLES} | self.waiting | self.allocator

    def record(self) -> dict[str, Any]:
        """The same as JSON types, for ``launch.json`` and the workers' ``run_start`` event."""
        return asdict(self)


def divide_host(
    options: LaunchOptions, environ: Mapping[str, str] | None = None, *, busy_frac: float | None = None
) -> ResourceShare:
    """The share of each process under ``options``, on this host and under ``environ`` (default: this process's).

    ``busy_frac`` of the host's processor time that others use; None measures it, which takes a tenth of a second.
    """
    environ = os.environ if environ is None else environ
    processes = options.num_processes or max(1, count_accelerators())
    cores = allowed_cores()
    quota = cpu_quota()
    usable = len(cores) if quota is None else min(len(cores), max(1, math.ceil(quota)))
    threads, threads_from = _threads(options, environ, usable, processes)
    waiting, waiting_from = _waiting(environ, threads, host_busy_frac() if busy_frac is None else busy_frac)
    affinity, numa = _affinity(options, processes)
    allocator = TUNED_ALLOCATOR if options.allocator == "tuned" else {}
    return ResourceShare(
        processes=processes,
        threads=threads,
        threads_from=threads_from,
        waiting=waiting,
        waiting_from=waiting_from,
        allocator={name: environ.get(name, value) for name, value in allocator.items()},
        affinity=affinity,
        numa=numa,
        cores_allowed=len(cores),
        cpu_quota=quota,
    )


def _threads(options: LaunchOptions, environ: Mapping[str, str], usable: int, processes: int) -> tuple[int, str]:
    if options.num_threads:
        return options.num_threads, "launch.num_threads"
    given = environ.get(_THREAD_VARIABLES[0], "")
    if given.isdigit() and int(given) > 0:
        return int(given), f"environment {_THREAD_VARIABLES[0]}"
    return max(1, usable // processes), f"{usable} usable cores / {processes} processes"


def _waiting(environ: Mapping[str, str], threads: int, busy_frac: float) -> tuple[dict[str, str], str]:
    given = {name: environ[name] for name in _SHORT_SPIN if name in environ}
    if given:
        return given, "environment"
    if threads == 1:
        return {}, "one thread waits for nobody"
    if busy_frac < _BUSY_FRAC:
        return {}, f"the library's own: others use {100 * busy_frac:.0f} % of this host"
    return dict(_SHORT_SPIN), f"short: others use {100 * busy_frac:.0f} % of this host"


def _affinity(options: LaunchOptions, processes: int) -> tuple[list[list[int]] | None, str]:
    if options.numa == "off":
        return None, "off"
    if processes == 1:
        return None, "not pinned: one process has the whole host"
    if not hasattr(os, "sched_setaffinity"):
        return None, "not pinned: this system has no affinity call"
    cores = allowed_cores()
    divided = core_shares(cores, processes)
    if divided is None:
        return None, f"not pinned: {processes} processes on {len(cores)} cores"
    return divided, "bind"
