"""Frames over one TCP connection: no copy on send, one on receive, and a deadline for every message.

The socket does not block; a call tries first and polls only when the kernel has no data, so one thread can send while
another receives. A message that has begun must keep arriving: a peer that trickles bytes is disconnected.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import xxhash

from unisono.errors import CommError
from unisono.kvstore.wire.frame import (
    HEADER_BYTES,
    Frame,
    FrameHeader,
    Limits,
    Op,
    Slot,
    digest_mismatch,
    pack,
    payload_views,
    unpack,
)
from unisono.kvstore.wire.shared_slots import SharedSlots, copy_from_slot, copy_into_slot

# digested while still in the cache
_PIECE_BYTES = 1 << 20
_BUFFERS_PER_CALL = 512

# Where a payload goes: buffers, first to last, that hold exactly the announced bytes; None for fresh memory.
ReceiveBuffers = Callable[[FrameHeader], Sequence[memoryview] | None]


class ConnectionLost(CommError):
    """The connection is unusable: closed, timed out, or out of step."""


class Channel:
    """Sends and receives frames. One thread may send while another receives; two senders take turns.

    ``until`` (monotonic time) ends every wait, however steadily bytes trickle in; None for no deadline.
    ``shared_slots``: the memory of frames with a slot.
    """

    def __init__(self, sock: socket.socket, limits: Limits, *, until: float | None = None) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # buffer sizes stay the kernel's: one set by hand is capped low on most machines, and ends its own tuning
        # a host that vanished is noticed by the kernel; one that hangs, by the caller that waits for an answer
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):
            for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
        self._sock, self._is_tls, self.limits = sock, isinstance(sock, ssl.SSLSocket), limits
        # nothing is waited for beyond this time
        self.deadline = until
        self.shared_slots = SharedSlots()
        # a TLS socket serves one call at a time
        self._tls = threading.Lock() if self._is_tls else contextlib.nullcontext()
        self._sending = threading.Lock()
        self._header = bytearray(HEADER_BYTES)
        self.sent_bytes = self.received_bytes = self.shared_sent_bytes = self.shared_received_bytes = 0
        # when a byte last moved in either direction, signs of life of this side aside: they would pass for the other's
        self.last_activity_s = time.monotonic()

    def send(self, frame: Frame) -> None:
        """Send the frame, through its slot if the payload fits. Raises ConnectionLost when the peer is gone or does not
        read in time."""
        parts = payload_views(frame)
        if frame.slot is not None and sum(part.nbytes for part in parts) > frame.slot.view.nbytes:
            frame = replace(frame, slot=None)
        pending = [memoryview(pack(frame, parts))]
        if frame.slot is None:
            pending += parts
        else:
            copy_into_slot(frame.slot, parts)
            self.shared_sent_bytes += sum(part.nbytes for part in parts)
        num_bytes = sum(part.nbytes for part in pending)
        with self._sending:
            deadline = time.monotonic() + self.limits.time_for(num_bytes)
            while pending:
                count = self._push(pending[:_BUFFERS_PER_CALL], deadline)
                self.sent_bytes += count
                if frame.op is not Op.HEARTBEAT:
                    self.last_activity_s = time.monotonic()
                while count and count >= pending[0].nbytes:
                    count -= pending.pop(0).nbytes
                if count:
                    pending[0] = pending[0][count:]

    def send_unless_busy(self, frame: Frame) -> None:
        """Send a small frame if no other send is running and the kernel takes it at once."""
        if self._sending.acquire(blocking=False):
            try:
                if self._ready(select.POLLOUT, 0.0):
                    self._push([memoryview(pack(frame, []))], 0.0)
            finally:
                self._sending.release()

    def receive(self, place: ReceiveBuffers | None = None, *, wait_s: float | None = None) -> Frame | None:
        """The next frame; None when none has begun after ``wait_s`` seconds.

        ``place`` is called with a valid header and chooses the payload's buffers; the frame's payload is then the first
        of them. Without ``place``, a payload in a slot stays there, and the frame's payload is a view of it. Raises
        ConnectionLost, also for a damaged or oversized frame.
        """
        head = memoryview(self._header)
        if not self._fill(head[:1], None if wait_s is None else time.monotonic() + wait_s, begun=False):
            return None
        self._fill(head[1:], time.monotonic() + self.limits.message_s)
        try:
            announced = unpack(head, self.limits)
            slot = self._slot(announced)
        except CommError as error:
            raise ConnectionLost(*error.problems) from None
        if slot is not None:
            self.shared_received_bytes += announced.nbytes
        digest = xxhash.xxh3_64(seed=announced.seed)
        buffers = place(announced) if place else None
        if slot is not None and place is None:
            buffers = [slot.view[: announced.nbytes]] if announced.nbytes else []
        if buffers is None:
            buffers = [np.empty(announced.nbytes, np.uint8).data] if announced.nbytes else []
        deadline = time.monotonic() + self.limits.time_for(announced.nbytes)
        if slot is not None and place is not None:
            copy_from_slot(slot.view, buffers)
        for buffer in buffers if slot is None else ():
            for start in range(0, buffer.nbytes, _PIECE_BYTES):
                piece = buffer[start : start + _PIECE_BYTES]
                self._fill(piece, deadline)
                digest.update(piece)
        if digest.intdigest() != announced.digest:
            raise ConnectionLost(*digest_mismatch(announced, digest.intdigest()).problems)
        return replace(announced.frame, payload=buffers[0] if buffers else b"", slot=slot if place is None else None)

    def _slot(self, announced: FrameHeader) -> Slot | None:
        if not announced.slot_number:
            return None
        return self.shared_slots.slot(announced.slot_number, announced.nbytes)

    def _fill(self, view: memoryview, deadline: float | None, *, begun: bool = True) -> bool:
        while view.nbytes:
            try:
                with self._tls:
                    count = self._sock.recv_into(view)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                if self._ready(select.POLLIN, self._soon(deadline) if begun else deadline):
                    continue
                if not begun:
                    return False
                raise _lost(f"a message stopped {view.nbytes} bytes short of its next part", "in time") from None
            except OSError as error:
                raise _lost(f"the connection broke ({error})", "whole") from error
            if count == 0:
                raise _lost("the peer closed the connection", "whole")
            self.received_bytes += count
            self.last_activity_s = time.monotonic()
            view = view[count:]
        return True

    def _push(self, parts: list[memoryview], deadline: float) -> int:
        while True:
            try:
                with self._tls:
                    return self._sock.send(parts[0]) if self._is_tls else self._sock.sendmsg(parts)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                if not self._ready(select.POLLOUT, self._soon(deadline)):
                    raise _lost("the peer stopped reading", "in time") from None
            except OSError as error:
                raise _lost(f"the connection broke ({error})", "whole") from error

    def _soon(self, deadline: float | None) -> float:
        stalled = time.monotonic() + self.limits.stall_s
        return stalled if deadline is None else min(deadline, stalled)

    def _ready(self, event: int, deadline: float | None) -> bool:
        poller = select.poll()
        try:
            poller.register(self._sock, event)
        except ValueError:
            # another thread has closed it, so it has no descriptor
            raise _lost("the connection was closed here", "whole") from None
        if self.deadline is not None:
            deadline = self.deadline if deadline is None else min(deadline, self.deadline)
        if deadline is None:
            return bool(poller.poll())
        return bool(poller.poll(max(0.0, deadline - time.monotonic()) * 1000))

    def shutdown(self) -> None:
        """End both directions, which wakes threads that wait on this channel. ``close`` follows when they have left."""
        # the plain socket's: TLS would want to say goodbye, and a peer that is gone cannot answer
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Release the descriptor and the memory."""
        self.shared_slots = SharedSlots()
        self.shutdown()
        self._sock.close()


def _lost(given: str, how: str) -> ConnectionLost:
    return ConnectionLost(
        given=given,
        rule=f"a message arrives {how}, or not at all",
        consequence="this connection is closed; nothing of a message that was cut short has been used",
        nearest="see whether the other process still runs and can be reached",
    )
