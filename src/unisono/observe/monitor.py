"""Memory of the host: this process's peak, and the limit of its cgroup."""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil

_NO_LIMIT_BYTES: Final = 1 << 60  # cgroup v1 writes "no limit" as the largest page-aligned number


def peak_rss_bytes() -> int:
    """Peak resident set size of this process, in bytes."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    # other systems; on Linux this value would include the parent's memory before exec
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


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
