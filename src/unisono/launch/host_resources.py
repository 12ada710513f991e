"""What this host offers a job: physical cores it may use, in neighbourly order, and accelerators. Torch-free.

Affinity masks and control-group quotas both count: a container limited to 2 CPUs of a 64-core host gets 2 threads, not
64 that take turns.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_SYSFS = Path("/sys/devices/system")


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
    """Share of this host's processor time in use over a tenth of a second in which this process sleeps, 0 to 1."""
    return psutil.cpu_percent(interval=0.1) / 100


def cpu_quota() -> float | None:
    """CPUs' worth of time the control group grants (``cpu.max``, or version 1's ``cfs_quota``); None if unlimited."""
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

    None when there are fewer cores than processes: they have to take turns anyway, and the scheduler does that better.
    """
    if len(cores) < processes:
        return None
    bounds = [len(cores) * index // processes for index in range(processes + 1)]
    return [sorted(cpu for core in cores[low:high] for cpu in core.cpus) for low, high in itertools.pairwise(bounds)]


def count_accelerators() -> int:
    """Accelerators torch sees on this host.

    Torch is asked, in a process of its own, only where a device file hints at an accelerator: importing it takes
    seconds, and a child of a process that initialised a device could not use it.
    """
    hints = re.compile(r"nvidia[0-9]+|kfd|davinci[0-9]+|accel[0-9]+|dxg")
    found = any(hints.fullmatch(name) for name in _listdir(Path("/dev"))) or any(
        name.startswith("renderD") for name in _listdir(Path("/dev/dri"))
    )
    if not found:
        return 0
    question = "import torch; print(torch.accelerator.device_count() if torch.accelerator.is_available() else 0)"
    answer = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True, check=False)
    last = answer.stdout.strip().splitlines()[-1:]
    return int(last[0]) if answer.returncode == 0 and last and last[0].isdigit() else 0


def oom_kills() -> int | None:
    """Processes the kernel's out-of-memory killer has ended since boot; None where it is not told."""
    match = re.search(r"^oom_kill ([0-9]+)$", _read(Path("/proc/vmstat")), flags=re.MULTILINE)
    return None if match is None else int(match.group(1))


def _nodes() -> dict[int, int]:
    """The NUMA node of each logical CPU; empty where the kernel does not tell."""
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
