"""The resources of this host (cores, CPU quota, accelerators) and their division among the processes of a job. No torch.

The division is set explicitly and recorded: torchrun sets one thread and mpirun none, so a launcher that sets nothing
makes the same job give other bits under another launcher. Variables the user has set stay as they are. Affinity masks
and control-group quotas both count: a container limited to 2 CPUs of a 64-core host gets 2 threads, not 64 that take
turns.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from unisono.device.npu_smi import VISIBLE_VARIABLE
from unisono.dist.interpreter import code_command
from unisono.launch.options import LaunchOptions
from unisono.observe.host_memory import address_space_limit_bytes

_SYSFS = Path("/sys/devices/system")


# glibc hands large blocks back to the kernel on every free, and each step faults its activations in again, page by page
# (measured: 140 000 faults a step become 13). These keep freed memory in the process, in huge pages where the kernel
# allows them by madvise; the price is a resident size that stays near its peak, and address space: the heap grows by 256 MiB
# at once, and its gaps stay. Other allocators ignore them.
TUNED_ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    "MALLOC_TOP_PAD_": "268435456",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}

# Under ``ulimit -v`` the opposite: each tensor of 1 MiB or more is mapped alone and gives its addresses back when freed, so what
# tensors need decides what fits; few arenas, as each takes 64 MiB of addresses.
FRUGAL_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_ARENA_MAX": "2"}

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")

# GNU OpenMP's threads spin at the end of each parallel region. On a host with other work they spin away the time slice
# of the thread they wait for, and a short spin makes a step several times faster; on a quiet host sleeping and waking costs
# 5 to 15 % of a step, and the library's own long spin is right (docs/log.md).
_SHORT_SPIN = {"GOMP_SPINCOUNT": "1000"}
_BUSY_FRAC = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class ResourceShare:
    """The share of this host that each process of a launch gets.

    ``affinity`` has the logical CPUs of each process, or is None if processes are not pinned. ``cpu_quota`` is the
    control group's limit in CPUs. ``*_from`` says where a value comes from.
    """

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
        """Environment variables for every process of the launch."""
        return {name: str(self.threads) for name in _THREAD_VARIABLES} | self.waiting | self.allocator

    def record(self) -> dict[str, Any]:
        """The same as JSON types, for ``launch.json`` and the workers' ``run_start`` event."""
        return asdict(self)


def divide_host(
    options: LaunchOptions, environ: Mapping[str, str] | None = None, *, busy_frac: float | None = None
) -> ResourceShare:
    """Divide this host among the processes of a launch.

    Variables set in ``environ`` (default: this process's) win over computed values. ``busy_frac`` is the fraction of
    processor time that others use; None measures it, which takes 0.1 s.
    """
    environ = os.environ if environ is None else environ
    processes = options.num_processes or max(1, count_accelerators())
    cores = allowed_cores()
    quota = cpu_quota()
    usable = len(cores) if quota is None else min(len(cores), max(1, math.ceil(quota)))
    threads, threads_from = _threads(options, environ, usable, processes)
    waiting, waiting_from = _waiting(environ, threads, host_busy_frac() if busy_frac is None else busy_frac)
    affinity, numa = _affinity(processes)
    allocator = tuned_allocator() if options.allocator == "tuned" else {}
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


def tuned_allocator() -> dict[str, str]:
    """Variables of the C allocator for speed; under ``ulimit -v`` for few addresses."""
    return dict(TUNED_ALLOCATOR if address_space_limit_bytes() is None else FRUGAL_ALLOCATOR)


def _threads(options: LaunchOptions, environ: Mapping[str, str], usable: int, processes: int) -> tuple[int, str]:
    if options.num_threads:
        return options.num_threads, "launch.num_threads"
    value = environ.get(_THREAD_VARIABLES[0], "")
    if value.isdigit() and int(value) > 0:
        return int(value), f"environment {_THREAD_VARIABLES[0]}"
    return max(1, usable // processes), f"{usable} usable cores / {processes} processes"


def _waiting(environ: Mapping[str, str], threads: int, busy_frac: float) -> tuple[dict[str, str], str]:
    settings = {name: environ[name] for name in _SHORT_SPIN if name in environ}
    if settings:
        return settings, "environment"
    if threads == 1:
        return {}, "not set: one thread"
    if busy_frac < _BUSY_FRAC:
        return {}, f"the library's own: others use {100 * busy_frac:.0f} % of this host"
    return dict(_SHORT_SPIN), f"short: others use {100 * busy_frac:.0f} % of this host"


def _affinity(processes: int) -> tuple[list[list[int]] | None, str]:
    if processes == 1:
        return None, "not pinned: one process has the whole host"
    if not hasattr(os, "sched_setaffinity"):
        return None, "not pinned: this system has no affinity call"
    cores = allowed_cores()
    divided = core_shares(cores, processes)
    if divided is None:
        return None, f"not pinned: {processes} processes on {len(cores)} cores"
    return divided, "bind"


# --- the host -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Core:
    """A physical core: its NUMA node and those of its logical CPUs that this process may use."""

    node: int
    cpus: tuple[int, ...]


def allowed_cores() -> list[Core]:
    """The physical cores this process may run on, ordered by NUMA node, then by number."""
    if not hasattr(os, "sched_getaffinity"):
        return [Core(node=0, cpus=(cpu,)) for cpu in range(os.cpu_count() or 1)]
    allowed = os.sched_getaffinity(0)
    nodes = _nodes()
    siblings = {cpu: _cpu_list(_SYSFS / f"cpu/cpu{cpu}/topology/thread_siblings_list") or {cpu} for cpu in allowed}
    groups = {tuple(sorted(siblings[cpu] & allowed)) for cpu in allowed}
    return sorted(
        (Core(node=nodes.get(cpus[0], 0), cpus=cpus) for cpus in groups), key=lambda core: (core.node, core.cpus)
    )


def host_busy_frac() -> float:
    """Fraction (0 to 1) of this host's processor time that others use, measured over 0.1 s in which this process sleeps."""
    return psutil.cpu_percent(interval=0.1) / 100


def cpu_quota() -> float | None:
    """The control group's CPU limit in CPUs (``cpu.max``, or version 1's ``cfs_quota``); None if unlimited."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    quotas: list[float] = []
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            # every level above may limit too; inside a container the own level is the mount's root
            for level in [path, *map(str, Path(path).parents)]:
                fields = _read(Path(f"/sys/fs/cgroup{level}/cpu.max")).split()
                if len(fields) == 2 and fields[0] != "max":
                    quotas.append(int(fields[0]) / int(fields[1]))
        elif "cpu" in controllers.split(","):
            for level in [path, "/"]:
                quota = _read(Path(f"/sys/fs/cgroup/cpu{level}/cpu.cfs_quota_us")).strip()
                period = _read(Path(f"/sys/fs/cgroup/cpu{level}/cpu.cfs_period_us")).strip()
                if quota and period and int(quota) > 0:
                    quotas.append(int(quota) / int(period))
    return min(quotas) if quotas else None


def core_shares(cores: Sequence[Core], processes: int) -> list[list[int]] | None:
    """Logical CPUs for each of ``processes``: neighbouring whole cores, as even as possible.

    None if there are fewer cores than processes; the scheduler shares them better than a fixed pinning.
    """
    if len(cores) < processes:
        return None
    bounds = [len(cores) * index // processes for index in range(processes + 1)]
    return [sorted(cpu for core in cores[low:high] for cpu in core.cpus) for low, high in itertools.pairwise(bounds)]


def accelerator_files() -> list[str]:
    """Device files that hint at an accelerator."""
    hints = re.compile(r"nvidia[0-9]+|kfd|davinci[0-9]+|accel[0-9]+|dxg")
    devices = [f"/dev/{name}" for name in _listdir(Path("/dev")) if hints.fullmatch(name)]
    return devices + [f"/dev/dri/{name}" for name in _listdir(Path("/dev/dri")) if name.startswith("renderD")]


def visible_devices_variable() -> str:
    """The environment variable with the accelerators of this host that a process sees."""
    is_ascend = any(Path(path).name.startswith("davinci") for path in accelerator_files())
    return VISIBLE_VARIABLE if is_ascend else "CUDA_VISIBLE_DEVICES"


def count_accelerators() -> int:
    """The number of accelerators torch sees on this host.

    Torch is imported in a separate process, and only if a device file hints at an accelerator: the import takes
    seconds, and a child of a process that has initialised a device cannot use it.
    """
    if not accelerator_files():
        return 0
    question = (
        "from unisono.device.torch_adapters import present_adapter as present; "
        "print(0 if present().name == 'cpu' else present().count())"
    )
    answer = subprocess.run(code_command(question), capture_output=True, text=True, check=False)
    last = answer.stdout.strip().splitlines()[-1:]
    return int(last[0]) if answer.returncode == 0 and last and last[0].isdigit() else 0


def oom_kills() -> int | None:
    """Processes the kernel's out-of-memory killer has ended since boot; None if the kernel does not say."""
    match = re.search(r"^oom_kill ([0-9]+)$", _read(Path("/proc/vmstat")), flags=re.MULTILINE)
    return None if match is None else int(match.group(1))


def _nodes() -> dict[int, int]:
    """The NUMA node of each logical CPU; empty if the kernel does not say."""
    return {
        cpu: int(name.removeprefix("node"))
        for name in _listdir(_SYSFS / "node")
        if re.fullmatch(r"node[0-9]+", name)
        for cpu in _cpu_list(_SYSFS / "node" / name / "cpulist")
    }


def _cpu_list(path: Path) -> set[int]:
    """``"0-2,8"`` -> {0, 1, 2, 8}."""
    cpus: set[int] = set()
    for low, high in re.findall(r"([0-9]+)(?:-([0-9]+))?", _read(path)):
        cpus.update(range(int(low), int(high or low) + 1))
    return cpus


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _listdir(path: Path) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []
