"""The server side: a thread per connection reads a request, has it handled and answers, in that order.

Memory is bounded by connections x (one request + its answer), each at most ``limits.max_payload_bytes``: a peer that
does not read its answers blocks only its own connection, which is closed after a while. A peer's credits limit the
requests it may send ahead; those wait in the kernel's buffers. While a handler runs (a barrier, say) the peer gets a
heartbeat every second, which distinguishes waiting from a server that hangs.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from unisono.dist.address import refuse_every_interface, require_private
from unisono.errors import CommError, LaunchError, UnisonoError
from unisono.kvstore.wire.auth import Identity, preauth_limits, server_handshake
from unisono.kvstore.wire.channel import Channel, ConnectionLost
from unisono.kvstore.wire.frame import Frame, Limits, Op, error_frame, json_frame, read_json
from unisono.kvstore.wire.shared_slots import accept_shared_slots, sharing_scope
from unisono.kvstore.wire.tls import TLSContexts

HEARTBEAT_S = 1.0
_BACKLOG = 1024


class RequestHandler(Protocol):
    """Handles the requests of a server. Called from a thread per connection."""

    def hello(self, peer: Identity, facts: dict[str, Any]) -> dict[str, Any]:
        """Admit a peer that proved itself. Raises UnisonoError to refuse; the peer gets its text."""
        ...

    def handle(self, peer: Identity, frame: Frame) -> Frame:
        """The answer. May block; a UnisonoError becomes an ERROR reply. The request may come twice (a lost answer)."""
        ...

    def gone(self, peer: Identity) -> None:
        """A connection that ``hello`` admitted has closed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The limits on connections, on those that have not authenticated, and each one's credits."""

    max_connections: int = 512
    max_unauthenticated: int = 64
    credits_per_connection: int = 8


def listen(host: str, port: int = 0, *, tls: bool = False) -> socket.socket:
    """A listener on one address. Raises ConfigError for all interfaces at once, or a public one without TLS;
    LaunchError where the port is taken or the address is not this machine's."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        raise LaunchError(
            given=f"{host!r} is no address that is known here: {error}",
            rule="a server listens at the name or IP address of one interface of this machine",
            consequence="no port was opened",
            nearest="the address of an interface, such as 127.0.0.1; ip -brief address lists them",
        ) from error
    refuse_every_interface(str(address[0]), host)
    require_private(str(address[0]), tls=tls)
    try:
        return socket.create_server(address, family=family, backlog=_BACKLOG)
    except OSError as error:
        raise LaunchError(
            given=f"{address[0]} port {address[1]} cannot be listened at: {os.strerror(error.errno or 0)}",
            rule="a server has an address of this machine and a port that nobody else listens at",
            consequence="no port was opened",
            nearest="port 0 takes a free one; to see who has this one: ss -ltnp",
        ) from error


class FrameServer:
    """Serves ``handler`` on ``listeners`` until ``close``.

    A peer that has seen a higher restart count than this server's proves that it was replaced:
    ``on_stale(restart_count)`` is called, and every later request is refused.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        handler: RequestHandler,
        secret: bytes,
        limits: Limits,
        *,
        restart_count: int = 0,
        admission: Admission | None = None,
        on_stale: Callable[[int], None] = lambda restart_count: None,
        tls: TLSContexts | None = None,
    ) -> None:
        self._listeners, self._handler, self._secret, self._limits = list(listeners), handler, secret, limits
        self._restart_count, self._on_stale, self._tls = restart_count, on_stale, tls
        self._admission = admission or Admission()
        self._lock = threading.Lock()
        self._threads: dict[socket.socket, threading.Thread] = {}
        self._unauthenticated: dict[socket.socket, None] = {}
        # channels whose handler is running
        self._busy: set[Channel] = set()
        self._newest = restart_count
        self._closing = threading.Event()
        self._wake, self._woken = socket.socketpair()
        self._loops = [
            threading.Thread(target=loop, name=f"unisono-wire-{loop.__name__[1:]}", daemon=True)
            for loop in (self._accept, self._send_heartbeats)
        ]
        for loop in self._loops:
            loop.start()

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Host and port of every listener."""
        return [listener.getsockname()[:2] for listener in self._listeners]

    # --- new connections

    def _accept(self) -> None:
        with selectors.DefaultSelector() as selector:
            for listener in self._listeners:
                listener.setblocking(False)
                selector.register(listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while not self._closing.is_set():
                for key, _ in selector.select():
                    if isinstance(key.fileobj, socket.socket) and key.fileobj is not self._woken:
                        # the peer may have left again, or descriptors have run out: the next one is waited for
                        try:
                            sock, address = key.fileobj.accept()
                        except OSError:
                            self._closing.wait(0.05)
                            continue
                        self._admit(sock, f"{address[0]}:{address[1]}")

    def _admit(self, sock: socket.socket, address: str) -> None:
        with self._lock:
            if len(self._threads) >= self._admission.max_connections:
                sock.close()
                return
            if len(self._unauthenticated) >= self._admission.max_unauthenticated:
                # drop the one that has not proved itself for longest: a handshake takes milliseconds
                oldest = next(iter(self._unauthenticated))
                del self._unauthenticated[oldest]
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(oldest, socket.SHUT_RDWR)
            thread = threading.Thread(target=self._serve, args=(sock, address), name="unisono-wire-peer", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the machine has no thread left: this one comes again, and the others are served
                sock.close()
                return
            self._unauthenticated[sock] = None
            self._threads[sock] = thread

    def _serve(self, sock: socket.socket, address: str) -> None:
        try:
            if self._tls:
                sock = encrypted = self._wrapped(self._tls.server, sock)
                encrypted.do_handshake()
            channel = Channel(sock, preauth_limits(self._limits), until=time.monotonic() + self._limits.handshake_s)
            peer, seen = server_handshake(channel, self._secret, self._restart_count, address, self._limits)
            with self._lock:
                self._unauthenticated.pop(sock, None)
            channel.limits = self._limits
            self._note_restart_count(seen)
            try:
                self._serve_requests(channel, peer)
            finally:
                channel.close()  # with its shared memory, to which another thread may still refer
        except (CommError, OSError):
            # the peer is lost, and its own side notices
            return
        finally:
            with self._lock:
                self._unauthenticated.pop(sock, None)
                self._threads.pop(sock, None)
            sock.close()

    def _wrapped(self, context: ssl.SSLContext, plain: socket.socket) -> ssl.SSLSocket:
        plain.settimeout(self._limits.handshake_s)
        sock = context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
        with self._lock:
            self._threads[sock] = self._threads.pop(plain)
            self._unauthenticated.pop(plain, None)
            self._unauthenticated[sock] = None
        return sock

    # --- one peer

    def _serve_requests(self, channel: Channel, peer: Identity) -> None:
        hello = channel.receive(wait_s=self._limits.handshake_s)
        if hello is None or hello.op is not Op.HELLO:
            return
        channel.deadline = None
        self._busy.add(channel)
        try:
            self._refuse_if_replaced()
            reply = self._handler.hello(peer, read_json(hello))
        except UnisonoError as error:
            channel.send(replace(error_frame(error), ticket=hello.ticket))
            return
        finally:
            self._busy.discard(channel)
        try:
            granted = json_frame(
                Op.JSON, {"credits": self._admission.credits_per_connection, "host": sharing_scope(), "reply": reply}
            )
            channel.send(replace(granted, ticket=hello.ticket))
            while frame := channel.receive():
                self._busy.add(channel)
                try:
                    answer = self._answer(channel, peer, frame)
                except Exception as error:
                    channel.send(replace(error_frame(_fault(frame, error)), ticket=frame.ticket))
                    # not an OSError any more, which would pass for a lost peer below
                    raise RuntimeError(f"the handler failed at {frame.op.name}") from error
                finally:
                    self._busy.discard(channel)
                channel.send(answer)
        finally:
            self._handler.gone(peer)

    def _answer(self, channel: Channel, peer: Identity, frame: Frame) -> Frame:
        try:
            self._note_restart_count(frame.server_restart_count)
            self._refuse_if_replaced()
            self._check_identity(peer, frame)
            answer = self._handler.handle(peer, frame) if frame.op is not Op.MEMORY else self._share(channel, frame)
        except UnisonoError as error:
            answer = error_frame(error)
        return replace(
            answer,
            ticket=frame.ticket,
            server_restart_count=self._restart_count,
            slot=frame.slot,
            job=peer.job,
            worker=peer.index,
            worker_restart_count=peer.worker_restart_count,
        )

    def _share(self, channel: Channel, frame: Frame) -> Frame:
        """Map the memory that the client offers, with at most a slot per credit."""
        channel.shared_slots = accept_shared_slots(
            read_json(frame), self._admission.credits_per_connection, self._limits.max_payload_bytes
        )
        return Frame(Op.ACK)

    def _note_restart_count(self, restart_count: int) -> None:
        with self._lock:
            is_newer, self._newest = restart_count > self._newest, max(self._newest, restart_count)
        if is_newer:
            self._on_stale(restart_count)

    def _refuse_if_replaced(self) -> None:
        if self._newest > self._restart_count:
            raise CommError(
                given=f"this server is of restart {self._restart_count}, and restart {self._newest} has taken its place",
                rule="a server that was replaced takes no more requests",
                consequence="the request was refused and has changed nothing",
                nearest="end this old server process",
            )

    def _check_identity(self, peer: Identity, frame: Frame) -> None:
        for name, given, expected in (
            ("server restart count", frame.server_restart_count, self._restart_count),
            ("job", frame.job, peer.job),
            ("worker", frame.worker, peer.index),
            ("worker restart count", frame.worker_restart_count, peer.worker_restart_count),
        ):
            if given != expected:
                raise CommError(
                    given=f"{frame.op.name} with {name} {given}, where this connection's is {expected}",
                    rule="every request has the job and the restart counts of its connection",
                    consequence="the request was refused and has changed nothing",
                    nearest="open a new connection: the server's hello has its restart count",
                )

    def _send_heartbeats(self) -> None:
        while not self._closing.wait(HEARTBEAT_S):
            for channel in list(self._busy):
                # its own thread finds out when the peer is gone
                with contextlib.suppress(ConnectionLost):
                    channel.send_unless_busy(Frame(Op.HEARTBEAT))

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop listening, end every connection and join their threads. Requests that block in the handler must be woken
        first.

        Raises CommError when a handler has not returned after ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        self._closing.set()
        self._wake.close()
        for loop in self._loops:
            loop.join()
        for sock in (*self._listeners, self._woken):
            sock.close()
        with self._lock:
            threads = list(self._threads.items())
        for sock, _ in threads:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)
        for _, thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if left := sum(thread.is_alive() for _, thread in threads):
            raise CommError(
                given=f"{left} requests are still being handled {timeout_s:g} s after the server was told to close",
                rule="the handler ends its waiting requests before the server closes",
                consequence="their threads are left behind",
                nearest="wake barriers and clocks first",
            )


def _fault(frame: Frame, error: Exception) -> CommError:
    return CommError(
        given=f"the server failed at {frame.op.name}: {type(error).__name__}: {error}",
        rule="a handler answers, or refuses with a UnisonoError",
        consequence="the connection was closed; whether the request took effect is not known",
        nearest="see the server's output for the traceback",
    )
