"""The client side: requests are sent by priority, several at a time, and survive the loss of the connection.

One thread connects and sends, another receives. Requests without an answer when a connection broke are sent again on
the next one, in the same order and before new ones: a request may reach the server twice, which the server's sequence
numbers make harmless. All pending requests fail only when no answer has come for ``deadline_s`` since the first loss.
"""

from __future__ import annotations

import heapq
import itertools
import os
import random
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from unisono.dist.address import require_private
from unisono.errors import CommError, UnisonoError
from unisono.kvstore.wire.auth import AuthError, Identity, client_handshake, preauth_limits
from unisono.kvstore.wire.channel import Channel, ConnectionLost
from unisono.kvstore.wire.frame import (
    Frame,
    FrameHeader,
    Limits,
    Op,
    Slot,
    json_frame,
    payload_views,
    protocol_error,
    read_error,
    read_json,
)
from unisono.kvstore.wire.shared_slots import create_shared_slots, map_slots, sharing_scope
from unisono.kvstore.wire.tls import TLSContexts, permanent_tls_error

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_CHECK_S = 0.5
# besides the entries of a DATA payload, eight bytes each
_PREFIX_BYTES = 16


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server's address, and the credentials to connect to it; without ``tls`` nothing is encrypted."""

    address: tuple[str, int]
    secret: bytes = field(repr=False)
    tls: TLSContexts | None = None


@dataclass(slots=True, eq=False)
class _Request:
    frame: Frame
    into: list[memoryview]
    future: Future[Frame]
    # size of an answer that did not fit ``into``
    misfit: int | None = None
    # its slot of the connection it was sent on last
    slot: Slot | None = None


@dataclass(frozen=True, slots=True)
class Traffic:
    """A connection's counters; ``num_queued`` and ``num_in_flight`` are requests not yet sent and not yet answered.

    ``shared_sent_bytes`` were put into shared memory by this side instead of the socket, and ``shared_received_bytes``
    were read from it. ``no_shared_memory_reason`` is empty where there is shared memory.
    """

    sent_bytes: int
    received_bytes: int
    shared_sent_bytes: int
    shared_received_bytes: int
    no_shared_memory_reason: str
    num_reconnects: int
    num_queued: int
    num_in_flight: int


class Connection:
    """A connection to the server at ``endpoint`` that reconnects by itself.

    ``me`` identifies this side, ``facts`` are compared by the server's handler; ``hello`` is its answer. After a
    reconnection ``on_reconnect`` gets the new answer before anything is sent again; it may queue requests, and must not
    wait for them. ``silence_s``: how long a server with pending requests may send nothing. ``slot_bytes``: payloads up
    to this size go through memory that a server on this host shares; 0 for none.

    Raises AuthError for a wrong proof or certificate, the handler's own error when it refuses, CommError without an
    answer within ``deadline_s``.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        me: Identity,
        facts: Mapping[str, Any],
        *,
        limits: Limits,
        deadline_s: float = 60.0,
        silence_s: float = 6.0,
        slot_bytes: int = 0,
        on_reconnect: Callable[[dict[str, Any]], None] = lambda hello: None,
    ) -> None:
        self._address, self._secret, self._tls = endpoint.address, endpoint.secret, endpoint.tls
        self._facts, self._limits = dict(facts), limits
        self._me = replace(me, address=f"{self._address[0]}:{self._address[1]}")
        self._deadline_s, self._silence_s, self._on_reconnect = deadline_s, silence_s, on_reconnect
        self._slot_bytes = slot_bytes
        self._changed = threading.Condition()
        self._queue: list[tuple[int, int, _Request]] = []
        self._to_resend: deque[tuple[int, _Request]] = deque()
        self._in_flight: dict[int, _Request] = {}
        self._tickets = itertools.count(1)
        self._server_restart_count = self._credits = self._num_reconnects = 0
        self._sent = self._received = self._shared_sent = self._shared_received = 0
        self._no_shared_memory_reason = ""
        self._free_slots: list[Slot] = []
        self._lost: Channel | None = None
        self._failed: UnisonoError | None = None
        self._closed = False
        self._lost_since_s: float | None = time.monotonic()
        self._last: Exception | None = None
        self.hello: dict[str, Any] = {}
        self._channel = self._connect(first=True)
        self._lost_since_s = None  # the server has answered the hello
        self._thread = threading.Thread(target=self._run, name="unisono-wire-send", daemon=True)
        self._thread.start()

    def request(
        self, frame: Frame, priority: int = 0, into: Sequence[memoryview] | memoryview | None = None
    ) -> Future[Frame]:
        """Queue ``frame``; the future gets the reply, or the error that the server raised. Higher priority goes first.

        Job, restart counts, worker and ticket are filled in. The payload's memory must stay unchanged until the answer.
        With ``into`` the data of a DATA reply go straight there, and the reply's payload is the part before them (the
        table of entries); the content of that memory is undefined until the future is done. Callbacks of the future run
        in the receiving thread and must not close the connection. Raises CommError when the payload is too large, or
        the connection was closed or given up.
        """
        size = sum(part.nbytes for part in payload_views(frame))
        if size > self._limits.max_payload_bytes:
            raise CommError(
                given=f"{frame.op.name} with {size} bytes",
                rule=f"a frame carries at most {self._limits.max_payload_bytes}",
                consequence="it was not sent",
                nearest="an optimizer without layer-wise norms (adamw, sgd), so that keys can be cut; or smaller tensors",
            )
        parts = [into] if isinstance(into, memoryview) else list(into or ())
        request = _Request(frame, [part.cast("B") for part in parts], Future())
        # it cannot be cancelled: the server may have it already
        request.future.set_running_or_notify_cancel()
        with self._changed:
            if self._failed:
                raise self._failed
            ticket = next(self._tickets)
            heapq.heappush(self._queue, (-priority, ticket, request))
            self._changed.notify_all()
        return request.future

    @property
    def has_given_up(self) -> bool:
        """Whether the server was away for too long: only a new connection may reach it again."""
        with self._changed:
            return self._failed is not None

    def traffic(self) -> Traffic:
        """Counters since the connection was made."""
        with self._changed:
            channel = self._channel
            return Traffic(
                self._sent + channel.sent_bytes,
                self._received + channel.received_bytes,
                self._shared_sent + channel.shared_sent_bytes,
                self._shared_received + channel.shared_received_bytes,
                self._no_shared_memory_reason,
                self._num_reconnects,
                len(self._queue) + len(self._to_resend),
                len(self._in_flight),
            )

    def close(self) -> None:
        """Close the connection; unanswered requests fail."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._channel.shutdown()
        self._thread.join()

    # --- connecting

    def _connect(self, *, first: bool) -> Channel:
        pause = _FIRST_PAUSE_S
        while True:
            try:
                return self._connect_once()
            except (ConnectionLost, AuthError, OSError) as error:
                if first and isinstance(error, AuthError):
                    raise
                self._last = error
            pause = min(2 * pause, _LONGEST_PAUSE_S)
            # workers that lost the same server do not come back all at once
            drawn = pause * random.uniform(0.5, 1.0)
            since = self._lost_since_s or 0.0
            if time.monotonic() + drawn > since + self._deadline_s:
                raise self._given_up_error(time.monotonic() - since)
            with self._changed:
                if self._changed.wait_for(lambda: self._closed, drawn):
                    raise self._closed_error()

    def _connect_once(self) -> Channel:
        sock = socket.create_connection(self._address, timeout=self._limits.handshake_s)
        try:
            host = str(sock.getpeername()[0])
            require_private(host, tls=self._tls is not None)
            if self._tls:
                sock = self._tls.client.wrap_socket(sock, server_hostname=self._address[0])
            channel = Channel(sock, preauth_limits(self._limits), until=time.monotonic() + self._limits.handshake_s)
            restart_count = client_handshake(channel, self._secret, self._me, self._server_restart_count, self._limits)
            channel.limits, channel.deadline = self._limits, None
            channel.send(self._stamped(json_frame(Op.HELLO, self._facts), 0, restart_count))
            content = read_json(self._reply(channel))
            self._server_restart_count = restart_count
            self._credits, self.hello = int(content["credits"]), dict(content["reply"])
            self._no_shared_memory_reason = self._offer_shared_memory(channel, str(content["host"]))
            self._free_slots = list(channel.shared_slots.slots)
        except BaseException as error:
            sock.close()
            # the server sends an alert about this side's certificate instead of its hello
            if refused := permanent_tls_error(
                error if isinstance(error, ssl.SSLError) else error.__cause__, self._me.address
            ):
                raise refused from error
            raise
        return channel

    def _reply(self, channel: Channel) -> Frame:
        # a slow server sends heartbeats
        while (reply := channel.receive(wait_s=self._silence_s)) and reply.op is Op.HEARTBEAT:
            pass
        if reply is None:
            raise TimeoutError("no answer to the hello")
        if reply.op is Op.ERROR:
            raise read_error(reply)
        return reply

    def _offer_shared_memory(self, channel: Channel, host: str) -> str:
        """Offer shared memory; returns why there is none, or ""."""
        if not self._slot_bytes:
            return "none was asked for"
        if not host or host != sharing_scope():
            return "worker and server do not run on one Linux host, in one process table, as one user"
        try:
            fd, offer = create_shared_slots(self._credits, self._slot_bytes)
        except OSError as error:
            return f"this host gave no memory ({error.strerror})"
        try:
            channel.send(self._stamped(json_frame(Op.MEMORY, offer), 0, self._server_restart_count))
            self._reply(channel)
            channel.shared_slots = map_slots(fd, self._credits, self._slot_bytes)
        except (ConnectionLost, AuthError):
            raise
        except CommError as refusal:
            return refusal.problems[0].given
        finally:
            os.close(fd)
        return ""

    def _stamped(self, frame: Frame, ticket: int, server_restart_count: int) -> Frame:
        me = self._me
        return replace(
            frame,
            ticket=ticket,
            server_restart_count=server_restart_count,
            job=me.job,
            worker=me.index,
            worker_restart_count=me.worker_restart_count,
        )

    # --- the sending thread

    def _run(self) -> None:
        try:
            while True:
                receiver = threading.Thread(target=self._receive, args=(self._channel,), daemon=True)
                receiver.name = "unisono-wire-receive"
                receiver.start()
                self._send(self._channel)
                self._channel.shutdown()
                receiver.join()
                self._channel.close()
                if self._closed:
                    raise self._closed_error()
                self._replace()
        except UnisonoError as error:
            self._fail(error)
        except BaseException as error:
            self._channel.close()
            self._fail(self._sender_failed_error(error))
            raise

    def _send(self, channel: Channel) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._lost is channel or self._may_send())
                if self._closed or self._lost is channel:
                    return
                if self._to_resend:
                    ticket, request = self._to_resend.popleft()
                else:
                    _, ticket, request = heapq.heappop(self._queue)
                self._in_flight[ticket] = request
                request.slot = self._free_slots.pop() if self._free_slots else None
            try:
                channel.send(
                    replace(self._stamped(request.frame, ticket, self._server_restart_count), slot=request.slot)
                )
            except ConnectionLost as error:
                self._mark_lost(channel, error)

    def _may_send(self) -> bool:
        return bool(self._to_resend or self._queue) and len(self._in_flight) < self._credits

    def _replace(self) -> None:
        with self._changed:
            self._lost_since_s = self._lost_since_s or time.monotonic()
            self._to_resend.extendleft(reversed(self._in_flight.items()))
            self._in_flight.clear()
        new = self._connect(first=False)
        with self._changed:
            self._sent += self._channel.sent_bytes
            self._received += self._channel.received_bytes
            self._shared_sent += self._channel.shared_sent_bytes
            self._shared_received += self._channel.shared_received_bytes
            self._channel, self._lost = new, None
            self._num_reconnects += 1
            if not self._to_resend and not self._queue:
                self._lost_since_s = None
            closed = self._closed
        if closed:
            # close() may have shut the one before
            new.close()
            raise self._closed_error()
        self._on_reconnect(self.hello)

    # --- the receiving thread

    def _receive(self, channel: Channel) -> None:
        try:
            while True:
                reply = channel.receive(self._place, wait_s=_CHECK_S)
                if reply is not None:
                    self._complete(reply)
                elif self._in_flight and time.monotonic() - channel.last_activity_s > self._silence_s:
                    raise TimeoutError(f"no sign of life for {self._silence_s:g} s")
        except (ConnectionLost, TimeoutError) as error:
            self._mark_lost(channel, error)

    def _place(self, announced: FrameHeader) -> Sequence[memoryview] | None:
        request = self._in_flight.get(announced.frame.ticket)
        slot = request.slot.number if request is not None and request.slot is not None else 0
        if announced.slot_number not in (0, slot):
            raise _wrong_slot(announced.slot_number, slot)
        if request is None or not request.into or announced.frame.op is not Op.DATA:
            return None
        before = announced.nbytes - sum(part.nbytes for part in request.into)
        fits = 0 <= before <= 8 * announced.frame.entries + _PREFIX_BYTES
        # set again by every answer: this one may prove damaged and be sent again
        request.misfit = None if fits else announced.nbytes
        return [memoryview(bytearray(before)), *request.into] if fits else None

    def _complete(self, reply: Frame) -> None:
        with self._changed:
            request = self._in_flight.pop(reply.ticket, None)
            if request is None:  # a heartbeat, which has no ticket, or a duplicate
                return
            if request.slot is not None:
                self._free_slots.append(request.slot)
            self._lost_since_s = None
            self._changed.notify_all()
        if reply.op is Op.ERROR:
            request.future.set_exception(_error(reply))
        elif reply.op is Op.DATA and request.misfit is not None:
            request.future.set_exception(self._misfit(request))
        else:
            request.future.set_result(reply)

    def _mark_lost(self, channel: Channel, error: Exception) -> None:
        with self._changed:
            if self._lost is not channel:
                self._lost, self._last = channel, error
            self._changed.notify_all()

    # --- the end

    def _fail(self, error: UnisonoError) -> None:
        with self._changed:
            self._failed = error
            waiting = [*self._in_flight.values(), *(r for _, r in self._to_resend), *(r for *_, r in self._queue)]
            self._in_flight.clear()
            self._to_resend.clear()
            self._queue.clear()
            self._free_slots.clear()
        for request in waiting:
            request.future.set_exception(error)

    def _given_up_error(self, waited_s: float) -> CommError:
        return CommError(
            given=f"the server at {self._me.address} has not answered for {waited_s:.1f} s ({_summary(self._last)})",
            rule=f"a server that is lost is back within {self._deadline_s:g} s",
            consequence="what was sent to it and not answered may have been applied or not",
            nearest="see why that server ended, or why it cannot be reached from here",
        )

    def _closed_error(self) -> CommError:
        return CommError(
            given=f"the connection to the server at {self._me.address} was closed by this process",
            rule="requests are made while it is open, and their answers waited for before it is closed",
            consequence="what was not answered may have been applied or not",
            nearest="wait for the futures, then close",
        )

    def _sender_failed_error(self, error: BaseException) -> CommError:
        return CommError(
            given=f"sending to {self._me.address} failed with {type(error).__name__}: {error}",
            rule="on_reconnect does not raise, and payloads stay readable until they are answered",
            consequence="the connection has ended",
            nearest="see the traceback of the thread unisono-wire-send",
        )

    def _misfit(self, request: _Request) -> CommError:
        wanted = sum(part.nbytes for part in request.into)
        return CommError(
            given=f"{request.frame.op.name} was answered with {request.misfit} bytes for {wanted} bytes of memory",
            rule="data fill the memory they were asked for, with nothing but their table before them",
            consequence="the memory was not written to",
            nearest="ask for exactly the chunks the memory is for",
        )


def _wrong_slot(given: int, own: int) -> ConnectionLost:
    error = protocol_error(
        f"an answer in slot {given} to a request in slot {own}",
        "an answer lies in the slot of its request, or follows its header",
        "nothing was read from there, and the connection is closed",
    )
    return ConnectionLost(*error.problems)


def _error(reply: Frame) -> UnisonoError:
    try:
        return read_error(reply)
    except CommError as error:
        return error


def _summary(error: Exception | None) -> str:
    if isinstance(error, UnisonoError):
        return error.problems[0].given
    return f"{type(error).__name__}: {error}"
