"""Looking at real processes and sockets from the outside, for tests that kill things."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    """Returns as soon as ``condition()`` holds; fails after ``timeout_s``, which only bounds a broken run."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"still not so after {timeout_s} s: {what}"
        time.sleep(0.02)


def marked(mark: str) -> list[int]:
    """Pids of running processes (zombies aside) that have ``mark`` in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if mark.encode() in (entry / "environ").read_bytes() and is_running(int(entry.name)):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def is_running(pid: int) -> bool:
    """The process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def command_lines() -> str:
    """All argument vectors on this machine, as any local user could read them."""
    lines = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                lines.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            except OSError:
                continue
    return "\n".join(lines)


def listening(pid: int) -> list[str]:
    """``address:port`` in the kernel's hexadecimal for every TCP socket that process ``pid`` listens on."""
    links = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.add(os.readlink(fd))
        except OSError:
            continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in links:
                found.append(fields[1])
    return found


def shared_fds(pid: int | str = "self") -> int:
    """Mappings and descriptors of the wire's shared memory that process ``pid`` has."""
    maps = Path(f"/proc/{pid}/maps").read_text().count("memfd:unisono-wire")
    return maps + sum("memfd:unisono-wire" in _link(fd) for fd in Path(f"/proc/{pid}/fd").iterdir())


def _link(fd: Path) -> str:
    try:
        return os.readlink(fd)
    except OSError:
        return ""
