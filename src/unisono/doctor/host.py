"""Limits of the host and of this process: memory, files, cores, clock. No torch."""

from __future__ import annotations

import ctypes
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil

from unisono.doctor.check import Check, judged
from unisono.launch.resources import allowed_cores, cpu_quota
from unisono.observe.host_memory import host_memory_limit_bytes
from unisono.units import GIB

_MIN_SHARED_BYTES: Final = GIB
_MIN_FILES: Final = 65_536
_TIME_ERROR: Final = 5  # of adjtimex(2): the clock is not synchronised


def check_host(*, shared_memory: Path = Path("/dev/shm")) -> Iterator[Check]:
    """HOST01 to HOST06."""
    yield _shared_memory(shared_memory)
    yield _open_files()
    yield _cores()
    yield _memory()
    yield _swap()
    yield _clock()


def _shared_memory(folder: Path) -> Check:
    title = "shared memory"
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        cure = "mount a tmpfs there; in a container: --ipc=host or --shm-size=8g"
        return judged("HOST01", title, f"{folder}: {error.strerror}", failure=cure)
    evidence = f"{folder} has {usage.total / GIB:.3g} GiB, {usage.free / GIB:.3g} free"
    cure = "worker processes of the loader and sums between processes pass batches there; in a container: --shm-size=8g"
    return judged("HOST01", title, evidence, failure=cure if usage.free < _MIN_SHARED_BYTES else "")


def _open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = "unlimited" if hard == resource.RLIM_INFINITY else f"{hard:,}"
    is_low = soft != resource.RLIM_INFINITY and soft < _MIN_FILES
    cure = f"ulimit -n {_MIN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MIN_FILES)}"
    if soft == hard:
        cure = f"a higher limit by the administrator (nofile {_MIN_FILES} in /etc/security/limits.conf, --ulimit of a container)"
    return judged(
        "HOST02",
        "open files of a process",
        f"{'unlimited' if soft == resource.RLIM_INFINITY else f'{soft:,}'}, at most {most}",
        warning=cure if is_low else "",
    )


def _cores() -> Check:
    cores, quota, present = len(allowed_cores()), cpu_quota(), psutil.cpu_count(logical=False) or 0
    evidence = f"{cores} of {max(cores, present)} physical cores may be used" + (
        "" if quota is None else f", and {quota:g} CPUs of time"
    )
    cure = ""
    if cores < present:
        cure = "this process is pinned; under SLURM: srun --cpus-per-task, or SLURM_CPUS_PER_TASK=…"
    elif quota is not None and quota < cores:
        cure = "the control group limits the time of the cores: more CPUs for the container"
    return judged("HOST03", "cores", evidence, warning=cure)


def _memory() -> Check:
    limit, total, available = (
        host_memory_limit_bytes(),
        psutil.virtual_memory().total,
        psutil.virtual_memory().available,
    )
    evidence = f"{limit / GIB:.3g} GiB for this process, {min(limit, available) / GIB:.3g} available"
    cure = ""
    if limit < total / 2:
        cure = f"the control group gives it a part of {total / GIB:.3g} GiB: a larger limit for the container"
    elif available < total / 10:
        cure = "other processes hold the memory: end them"
    return judged("HOST04", "memory", evidence, warning=cure)


def _swap() -> Check:
    swap = psutil.swap_memory()
    evidence = f"{swap.used / GIB:.3g} of {swap.total / GIB:.3g} GiB used"
    is_used = swap.total > 0 and swap.used > swap.total / 4
    return judged("HOST05", "swap", evidence, warning="memory was short: end other processes" if is_used else "")


def _clock() -> Check:
    title, cure = (
        "clock",
        "start a time service (systemctl enable --now systemd-timesyncd): times of hosts are compared",
    )
    state = _clock_state()
    if state is None:
        return judged("HOST06", title, "this system does not say whether its clock is synchronised")
    is_off = state == _TIME_ERROR
    return judged("HOST06", title, "not synchronised" if is_off else "synchronised", warning=cure if is_off else "")


def _clock_state() -> int | None:
    """The clock's state as ``adjtimex(2)`` returns it, which changes nothing; None where there is no such call."""
    try:
        library = ctypes.CDLL(None, use_errno=True)
        state = int(library.adjtimex(ctypes.create_string_buffer(512)))  # zeros: a question, no adjustment
    except (OSError, AttributeError):
        return None
    return state if state >= 0 else None
