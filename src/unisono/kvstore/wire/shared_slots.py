"""Payloads through memory that two processes of one host map; headers still go through the socket.

The client makes an anonymous file with as many slots as it has credits, and the server opens it through /proc. A
request occupies a slot until its answer, whose payload is written to the same slot: no payload is copied through the
kernel, and a server reads gradients where the worker wrote them. The file has no name and disappears with its last
process. Its size is sealed, so neither side can make the other fault by truncating it. The exchange over the socket
orders both sides' accesses on every processor.

Payloads in memory are not digested: damage here could equally happen before they got here. A peer may write to a slot
out of turn. It has proved itself and is of the same user, so it could change more than that; counts are still read once
and compared with the slot, and torch checks its indices.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from unisono.dist.roll_call import host_id
from unisono.errors import CommError
from unisono.kvstore.wire.frame import Slot, protocol_error

MEMFD_NAME = "unisono-wire"


class SharedSlots:
    """The slots of a connection; none where payloads follow their headers. Unmapped with the last view of them."""

    def __init__(self, slots: Sequence[Slot] = ()) -> None:
        self.slots = tuple(slots)

    def slot(self, number: int, nbytes: int) -> Slot:
        """Slot ``number``, from 1. Raises CommError where there is none, or it is smaller than ``nbytes``."""
        if not 0 < number <= len(self.slots) or nbytes > self.slots[number - 1].view.nbytes:
            has = f"{len(self.slots)} slots of {self.slots[0].view.nbytes} bytes" if self.slots else "no slots"
            given = f"a frame with {nbytes} bytes in slot {number}"
            raise protocol_error(given, f"this connection has {has}", "nothing was read, and the connection is closed")
        return self.slots[number - 1]


def copy_into_slot(slot: Slot, parts: Sequence[memoryview]) -> None:
    """Copy ``parts`` into the slot, back to back. A part that is already in place, because the answer was written
    there, stays."""
    start, memory = 0, np.frombuffer(slot.view, np.uint8)
    for part in parts:
        source, target = np.frombuffer(part, np.uint8), memory[start : start + part.nbytes]
        if source.ctypes.data != target.ctypes.data:
            target[:] = source  # numpy lets other threads run meanwhile; a memoryview does not
        start += part.nbytes


def copy_from_slot(data: memoryview, parts: Iterable[memoryview]) -> None:
    """Copy ``data`` of a slot into ``parts``, which it fills exactly."""
    start, memory = 0, np.frombuffer(data, np.uint8)
    for part in parts:
        np.frombuffer(part, np.uint8)[:] = memory[start : start + part.nbytes]
        start += part.nbytes


def sharing_scope() -> str:
    """An id that is equal for processes that can share memory: one boot of one host, one process table, one user. Empty
    where none can."""
    return f"{host_id()}/{os.geteuid()}" if sys.platform == "linux" else ""


def create_shared_slots(slots: int, slot_bytes: int) -> tuple[int, dict[str, int]]:
    """An anonymous file of sealed size, to be closed once both sides map it, and the offer for ``accept_shared_slots``.

    Raises OSError where the system lacks such files, or memory.
    """
    fd = os.memfd_create(MEMFD_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, slots * slot_bytes)  # the memory is there, or an error is
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd, {"pid": os.getpid(), "fd": fd, "slots": slots, "slot_bytes": slot_bytes}


def map_slots(fd: int, slots: int, slot_bytes: int) -> SharedSlots:
    """Map the memory of ``fd``, which may be closed afterwards."""
    memory = memoryview(mmap.mmap(fd, slots * slot_bytes))
    return SharedSlots([Slot(n + 1, memory[n * slot_bytes :][:slot_bytes]) for n in range(slots)])


def accept_shared_slots(offer: Mapping[str, Any], most_slots: int, most_bytes: int) -> SharedSlots:
    """Map another process's offer. Raises CommError unless it is an anonymous file of exactly that size, sealed."""
    pid, number, slots, size = (offer.get(name) for name in ("pid", "fd", "slots", "slot_bytes"))
    if not all(type(n) is int and n >= 0 for n in (pid, number, slots, size)):
        raise _refused(f"an offer without {', '.join(('pid', 'fd', 'slots', 'slot_bytes'))}")
    slots, size = int(str(slots)), int(str(size))
    if not 0 < slots <= most_slots or not 0 < size <= most_bytes:
        raise _refused(f"{slots} slots of {size} bytes, where {most_slots} of {most_bytes} are the most")
    path = f"/proc/{pid}/fd/{number}"
    try:
        # looked at before it is opened: to open something else could wait, or have effects of its own
        if not os.readlink(path).startswith(f"/memfd:{MEMFD_NAME}") or not stat.S_ISREG(os.stat(path).st_mode):
            raise _refused("something else than memory")
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _refused(f"memory that cannot be opened ({error.strerror})") from error
    try:
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS or os.fstat(fd).st_size != slots * size:
            raise _refused(f"memory whose size is not sealed at {slots} x {size} bytes")
        return map_slots(fd, slots, size)
    except OSError as error:
        raise _refused(f"memory that cannot be mapped ({error.strerror})") from error
    finally:
        os.close(fd)


def _refused(given: str) -> CommError:
    return CommError(
        given=f"shared memory was refused: {given}",
        rule="a peer on this host, of this user, offers an anonymous file of sealed size",
        consequence="payloads go through the socket",
        nearest="run worker and server as one user, in one process table",
    )


_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL if sys.platform == "linux" else 0
