"""Samples of the host and the device: CPU share, resident memory, memory limits.

No thread: the training loop calls ``Monitor.sample`` at each logged step. Power, temperature and clocks of accelerators
are not sampled.
"""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psutil

if TYPE_CHECKING:
    import torch

_NO_LIMIT_BYTES: Final = 1 << 60  # cgroup v1 writes "no limit" as the largest page-aligned number


class Monitor:
    """Samples this process, this host and, if given, one accelerator.

    Args:
        device: The training device; None or a CPU reports host memory as ``mem/…``.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._process = psutil.Process()
        self._device = device if device is not None and device.type != "cpu" else None
        self._rss_peak_bytes = 0
        self._host_limit_bytes = host_memory_limit_bytes()
        psutil.cpu_percent()  # the first call has nothing to compare with

    def sample(self) -> dict[str, float | int]:
        """Fields of a ``step`` event.

        Returns:
            ``sys/cpu_frac`` (use of all cores of the host since the last sample, 0 to 1), ``sys/rss_bytes``,
            ``sys/rss_peak_bytes``, and the training device's ``mem/peak_bytes`` and ``mem/limit_bytes``. On an accelerator
            these come from ``torch.accelerator``; on a CPU they are the peak resident set and ``host_memory_limit_bytes``.
        """
        rss_bytes = self._process.memory_info().rss
        # the kernel updates its counters in batches, so its own peak may be below a sample
        self._rss_peak_bytes = max(self._rss_peak_bytes, peak_rss_bytes(), rss_bytes)
        fields: dict[str, float | int] = {
            "sys/cpu_frac": psutil.cpu_percent() / 100.0,
            "sys/rss_bytes": rss_bytes,
            "sys/rss_peak_bytes": self._rss_peak_bytes,
            "mem/peak_bytes": self._rss_peak_bytes,
            "mem/limit_bytes": self._host_limit_bytes,
        }
        if self._device is not None:
            import torch

            fields["mem/peak_bytes"] = torch.accelerator.max_memory_reserved(self._device)
            fields["mem/limit_bytes"] = torch.accelerator.get_memory_info(self._device)[1]
        return fields


def peak_rss_bytes() -> int:
    """Peak resident set size of this process, in bytes."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    # other systems; on Linux this value would include the parent's memory before exec
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


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
