"""The server of a job's store: a thread that keeps what ranks write for each other and tells when all have come.

It accepts requests only from members, processes that proved themselves (``authentication``); torch's TCPStore accepts them
from everyone who reaches the port. A name has one member: while its connection lives, another one of that name is refused.
Everything is bounded: what an unauthenticated peer can make it hold, the number of such peers, a message, and all
values together.

Requests and answers (``authentication.frame``); ``job_store.JobStore`` is the other side:

    ["set", key, value]  ["get", key]  ["add", key, n]  ["compare_set", key, old, new]  ["append", key, value]
    ["delete", key]  ["check", keys]  ["num_keys"]
    ["wait", keys, seconds]           True once all keys are there, False after the seconds
    ["join", restart_count, seconds]  {prefix, restart_count} once all ranks have asked, else {missing}
    ["bye"]                           a member that ends as it should
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import re
import secrets
import selectors
import socket
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from unisono.dist.authentication import (
    HANDSHAKE_S,
    LENGTH,
    MAX_UNAUTHENTICATED_BYTES,
    REFUSALS,
    Challenge,
    Hello,
    Refusal,
    Verdict,
    check_hello,
    frame,
    make_challenge,
    prove,
)
from unisono.sanitize import shorten

# the largest request or answer: gloo writes 150 bytes for each rank under one key of each rank
MAX_MESSAGE_BYTES = 2**22
_MAX_STORE_BYTES = 2**30
_MAX_UNREAD_BYTES = 2**24
_MIN_UNAUTHENTICATED = 64
_READ_BYTES = 2**16
_NAME = re.compile(r"(rank|worker|server) [0-9]{1,9}", flags=re.ASCII)


class _BadRequest(Exception):
    """A request that cannot be met; the member gets the text."""


@dataclass(slots=True, eq=False)
class _Peer:
    """A connection. ``name`` is None until it has proved itself; ``wants``: it has asked to join the rendezvous."""

    sock: socket.socket
    address: str
    challenge: Challenge
    deadline: float
    name: str | None = None
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)
    wants: bool = False
    restart_count: int = 0
    joined: dict[str, Any] | None = None
    waiting: _Waiting | None = None


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request whose answer is due when ``keys`` are there (None: when all have joined)."""

    peer: _Peer
    keys: list[str] | None


class StoreServer:
    """Serves on ``listener`` from its start until ``owner``, a connection of this process, is closed.

    Args:
        listener: A listening socket; it is closed with the server.
        owner: One end of a socket pair; its other end is the first member, ``owner_name``.
        secret: The job's secret, or None where it has none.
        run_id: Run id of all members.
        world_size: The number of ranks that join together. They are the members ``rank 0`` to ``rank N-1``.
        owner_name: Name of the owner.
    """

    def __init__(
        self,
        listener: socket.socket,
        owner: socket.socket,
        secret: bytes | None,
        *,
        run_id: str,
        world_size: int,
        owner_name: str,
    ) -> None:
        self._listener, self._secret, self._run_id, self._world_size = listener, secret, run_id, world_size
        self._address = str(listener.getsockname()[0])
        self._ranks = [f"rank {rank}" for rank in range(world_size)]
        self._members: dict[str, _Peer] = {}
        self._unauthenticated: OrderedDict[_Peer, None] = OrderedDict()
        # every rank of a large job may be unauthenticated at the same time
        self._max_unauthenticated = max(_MIN_UNAUTHENTICATED, 2 * world_size)
        self._values: dict[str, bytes] = {}
        self._values_bytes = 0
        # by the key that is missing
        self._waiting: dict[str, list[_Waiting]] = {}
        self._due: list[tuple[float, int, _Waiting]] = []
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        # reason -> how many connections, the newest address
        self._refused: dict[str, tuple[int, str]] = {}
        self._came: set[str] = set()
        self._lost: dict[str, float] = {}
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._owner = self._add(owner, "this process")
        self._admit(self._owner, owner_name)
        self._thread = threading.Thread(target=self._serve, name="unisono-store", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """The address it listens at."""
        return self._address

    def refused(self) -> list[str]:
        """The three most frequent reasons for which connections were refused, a line each with the newest address."""
        with self._lock:
            refused = sorted(self._refused.items(), key=lambda item: -item[1][0])
        return [
            f"{count} connection{'s' if count > 1 else ''} {reason} (the newest from {address})"
            for reason, (count, address) in refused[:3]
        ]

    def members(self) -> tuple[set[str], set[str], dict[str, float]]:
        """The names that have ever come, those that are connected, and those that were lost without a ``bye`` and when."""
        with self._lock:
            return set(self._came), set(self._members), dict(self._lost)

    def join_thread(self) -> None:
        """Wait until the server has ended. Its owner's connection has been closed."""
        self._thread.join()

    # --- connections -------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while self._owner.name is not None:
                for key, events in self._selector.select(self._pause_s()):
                    if key.fileobj is self._listener:
                        self._accept()
                        continue
                    peer: _Peer = key.data
                    if events & selectors.EVENT_WRITE:
                        self._flush(peer)
                    if events & selectors.EVENT_READ:
                        self._read(peer)
                self._expire()
        finally:
            for key in list(self._selector.get_map().values()):
                sock = cast(socket.socket, key.fileobj)
                if sock is not self._listener:
                    # a fork may hold a copy of the descriptor: the connection ends nevertheless
                    with contextlib.suppress(OSError):
                        sock.shutdown(socket.SHUT_RDWR)
                sock.close()
            self._selector.close()

    def _pause_s(self) -> float | None:
        now = time.monotonic()
        times = [next(iter(self._unauthenticated)).deadline] if self._unauthenticated else []
        times += [self._due[0][0]] if self._due else []
        return max(0.0, min(times) - now) if times else None

    def _accept(self) -> None:
        # the peer may have left again, or descriptors have run out: the next one is waited for
        try:
            sock, address = self._listener.accept()
        except OSError:
            time.sleep(0.01)
            return
        if len(self._unauthenticated) >= self._max_unauthenticated:
            # a handshake takes milliseconds: the one that has not proved itself for longest makes room
            self._drop(next(iter(self._unauthenticated)), "made no proof while others came")
        peer = self._add(sock, f"{address[0]}:{address[1]}")
        self._unauthenticated[peer] = None
        self._answer(peer, peer.challenge)

    def _add(self, sock: socket.socket, address: str) -> _Peer:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        peer = _Peer(sock, address, make_challenge(self._secret), time.monotonic() + HANDSHAKE_S)
        self._selector.register(sock, selectors.EVENT_READ, peer)
        return peer

    def _admit(self, peer: _Peer, name: str) -> None:
        with self._lock:
            self._unauthenticated.pop(peer, None)
            peer.name = name
            self._members[name] = peer
            self._came.add(name)
            self._lost.pop(name, None)

    def _drop(self, peer: _Peer, reason: str = "", *, clean: bool = False) -> None:
        """Close a connection; ``reason`` is counted if its peer was unauthenticated."""
        if peer.sock.fileno() < 0:
            return
        with self._lock:
            if peer.name is None and reason:
                self._refused[reason] = (self._refused.get(reason, (0, ""))[0] + 1, peer.address)
            if peer.name is not None:
                self._members.pop(peer.name)
                if not clean:
                    self._lost[peer.name] = time.monotonic()
            self._unauthenticated.pop(peer, None)
            peer.name, peer.waiting, peer.wants = None, None, False
        self._selector.unregister(peer.sock)
        peer.sock.close()

    def _expire(self) -> None:
        now = time.monotonic()
        while self._unauthenticated and (oldest := next(iter(self._unauthenticated))).deadline <= now:
            self._drop(oldest, f"made no proof within {HANDSHAKE_S:g} s")
        while self._due and self._due[0][0] <= now:
            _, _, waiting = heapq.heappop(self._due)
            if waiting.peer.waiting is waiting:
                self._finish(waiting, False if waiting.keys is not None else {"missing": self._missing()})

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        peer.received += data
        while peer.sock.fileno() >= 0 and len(peer.received) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(peer.received)
            if length > (MAX_UNAUTHENTICATED_BYTES if peer.name is None else MAX_MESSAGE_BYTES):
                self._drop(peer, "announced a message over the size limit")
                return
            if len(peer.received) < LENGTH.size + length:
                break
            message = bytes(peer.received[LENGTH.size : LENGTH.size + length])
            del peer.received[: LENGTH.size + length]
            self._take(peer, message)
        if not data:
            self._drop(peer, "left without a proof")

    def _take(self, peer: _Peer, message: bytes) -> None:
        if peer.name is None:
            self._greet(peer, message)
            return
        if peer.waiting is not None:  # one request at a time
            self._drop(peer)
            return
        try:
            request = msgspec.msgpack.decode(message)
            answer = self._handle(peer, request)
        except _BadRequest as error:
            answer = {"error": str(error)}
        except (msgspec.DecodeError, RecursionError):
            self._drop(peer)
            return
        if peer.waiting is None and peer.sock.fileno() >= 0:
            self._answer(peer, answer)

    def _greet(self, peer: _Peer, message: bytes) -> None:
        try:
            hello = msgspec.msgpack.decode(message, type=Hello)
        except (msgspec.DecodeError, RecursionError):
            self._drop(peer, "did not speak as a process of this job")
            return
        refusal: Refusal | None = check_hello(self._secret, peer.challenge, hello, self._run_id, self._world_size)
        is_named = _NAME.fullmatch(hello.name) is not None
        if refusal is None and (not is_named or (hello.name.startswith("rank ") and hello.name not in self._ranks)):
            refusal = "name"
        if refusal is None and hello.name in self._members:
            refusal = "taken"
        if refusal is None and len(self._members) > 4 * self._world_size + _MIN_UNAUTHENTICATED:
            refusal = "full"
        if refusal is not None:
            self._answer(peer, Verdict(refusal=refusal))
            self._drop(peer, REFUSALS[refusal])
            return
        self._admit(peer, hello.name)
        self._answer(peer, Verdict(proof=prove(self._secret, "server", peer.challenge, hello)))

    def _answer(self, peer: _Peer, message: Any) -> None:
        peer.unsent += frame(message)
        self._flush(peer)

    def _flush(self, peer: _Peer) -> None:
        if peer.sock.fileno() < 0:
            return
        try:
            while peer.unsent:
                del peer.unsent[: peer.sock.send(peer.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(peer, "left without a proof")
            return
        if len(peer.unsent) > _MAX_UNREAD_BYTES:
            self._drop(peer)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
        self._selector.modify(peer.sock, events, peer)

    # --- requests ----------------------------------------------------------------------------------------------------

    def _handle(self, peer: _Peer, request: Any) -> Any:
        values = self._values
        match request:
            case ["get", str(key)]:
                return values.get(key)
            case ["set", str(key), bytes(value)]:
                self._put(key, value)
                return True
            case ["append", str(key), bytes(value)]:
                self._put(key, values.get(key, b"") + value)
                return True
            case ["add", str(key), int(number)]:
                try:
                    total = int(values.get(key, b"0")) + number
                except ValueError:
                    raise _BadRequest(f"the value of {key!r} is no number") from None
                self._put(key, str(total).encode())
                return total
            case ["compare_set", str(key), bytes(old), bytes(new)]:
                if values.get(key, b"") == old:
                    self._put(key, new)
                return values.get(key, old)
            case ["delete", str(key)]:
                value = values.pop(key, None)
                self._values_bytes -= 0 if value is None else len(value) + len(key)
                return value is not None
            case ["check", list(keys)] if all(isinstance(key, str) for key in keys):
                return all(key in values for key in keys)
            case ["num_keys"]:
                return len(values)
            case ["wait", list(keys), float(seconds)] if all(isinstance(key, str) for key in keys):
                return self._wait(peer, _Waiting(peer, keys), seconds)
            case ["join", int(restart_count), float(seconds)]:
                return self._join(peer, restart_count, seconds)
            case ["bye"]:
                self._drop(peer, clean=True)
                return True
            case _:
                raise _BadRequest(
                    f"{peer.name} sent {shorten(repr(request))}, which is no request of the store of a job, so nothing was "
                    "changed; use the same release of unisono on all ranks"
                )

    def _put(self, key: str, value: bytes) -> None:
        old = self._values.get(key)
        change = len(value) - len(old) if old is not None else len(key) + len(value)
        if self._values_bytes + change > _MAX_STORE_BYTES:
            raise _BadRequest(f"the store holds {_MAX_STORE_BYTES >> 20} MiB, which is all it takes")
        self._values[key] = value
        self._values_bytes += change
        for waiting in self._waiting.pop(key, ()):
            if waiting.peer.waiting is waiting and not self._register_missing(waiting):
                self._finish(waiting, True)

    def _wait(self, peer: _Peer, waiting: _Waiting, seconds: float) -> bool:
        """Answers at once, or leaves ``waiting`` to be answered later."""
        if not self._register_missing(waiting):
            return True
        if seconds > 0:
            self._defer(waiting, seconds)
        return False

    def _register_missing(self, waiting: _Waiting) -> bool:
        """Register ``waiting`` under the first of its keys that is missing; False if none is."""
        missing = next((key for key in waiting.keys or () if key not in self._values), None)
        if missing is not None:
            others = [each for each in self._waiting.get(missing, ()) if each.peer.waiting is each]
            self._waiting[missing] = [*others, waiting]
        return missing is not None

    def _join(self, peer: _Peer, restart_count: int, seconds: float) -> dict[str, Any]:
        if peer.name not in self._ranks:
            raise _BadRequest(f"{peer.name} is no rank of {self._world_size}")
        if peer.joined is None and not peer.wants:
            peer.wants, peer.restart_count = True, restart_count
            self._let_all_join()
        if peer.joined is not None:
            answer, peer.joined = peer.joined, None
            return answer
        self._defer(_Waiting(peer, None), seconds)
        return {}

    def _let_all_join(self) -> None:
        """Once all ranks have asked: a key prefix that no earlier group has used, and rank 0's restart count."""
        if self._missing():
            return
        peers = [self._members[name] for name in self._ranks]
        answer = {
            "prefix": f"{self._run_id}/{peers[0].restart_count}.{secrets.token_hex(16)}",
            "restart_count": peers[0].restart_count,
        }
        for peer in peers:
            peer.wants, peer.joined = False, answer
            if (waiting := peer.waiting) is not None and waiting.keys is None:
                peer.joined = None
                self._finish(waiting, answer)

    def _missing(self) -> list[int]:
        return [
            rank for rank, name in enumerate(self._ranks) if name not in self._members or not self._members[name].wants
        ]

    def _defer(self, waiting: _Waiting, seconds: float) -> None:
        waiting.peer.waiting = waiting
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._numbers), waiting))

    def _finish(self, waiting: _Waiting, answer: Any) -> None:
        waiting.peer.waiting = None
        self._answer(waiting.peer, answer)
