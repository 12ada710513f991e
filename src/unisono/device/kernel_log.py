"""Errors of devices in the kernel's log. Needs no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

KERNEL_LOG: Final = Path("/dev/kmsg")
_RECORD_BYTES: Final = (
    8192  # the kernel gives one record at a time, and none is longer (Documentation/ABI/testing/dev-kmsg)
)
_MAX_RECORDS: Final = 100_000
# the driver writes "NVRM: Xid (PCI:0000:3b:00): 79, pid=…, GPU has fallen off the bus."; older ones without "PCI:"
_XID: Final = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]{1,20})\): ([0-9]{1,4})\b")
# "Application error" or "User error" in NVIDIA's list of Xid errors: programs cause them on a healthy device
_XIDS_OF_PROGRAMS: Final = frozenset({13, 31, 43, 45, 66, 69})


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelError:
    """An error of a device that the kernel's log holds.

    Attributes:
        place: The device, as the log names it: its PCI address.
        code: Number or name that its vendor gives such errors, such as ``Xid 79``.
        of_program: Whether a program that uses the device can cause it.
        count: How often the log has it.
    """

    place: str
    code: str
    of_program: bool
    count: int


def kernel_lines(path: Path = KERNEL_LOG) -> list[str] | None:
    """The messages that the kernel's log holds since the boot, oldest first; None where this user may not read it."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    lines: list[str] = []
    try:
        for _ in range(_MAX_RECORDS):
            try:
                record = os.read(handle, _RECORD_BYTES)
            except BrokenPipeError:  # the record was overwritten meanwhile: the next read gives the oldest that is left
                continue
            except BlockingIOError:  # there are no more
                break
            if not record:
                break
            lines += record.decode(errors="replace").splitlines()
    except OSError:
        return None
    finally:
        os.close(handle)
    return lines


def xid_errors(lines: Iterable[str]) -> list[KernelError]:
    """The Xid errors that the driver of NVIDIA devices has reported, by device and number."""
    counts: dict[tuple[str, int], int] = {}
    for line in lines:
        if (found := _XID.search(line)) is not None:
            key = found.group(1), int(found.group(2))
            counts[key] = counts.get(key, 0) + 1
    return [
        KernelError(place=place, code=f"Xid {number}", of_program=number in _XIDS_OF_PROGRAMS, count=count)
        for (place, number), count in sorted(counts.items())
    ]


def no_errors(lines: Iterable[str]) -> list[KernelError]:
    """Of devices whose driver has no messages that we know: none."""
    return []
