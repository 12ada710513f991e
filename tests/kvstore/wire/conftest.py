"""A server whose handler counts, and connections to it; whatever a test opens is closed after it."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from unisono.errors import CommError
from unisono.kvstore.wire.auth import Identity
from unisono.kvstore.wire.connection import Connection, Endpoint
from unisono.kvstore.wire.frame import Frame, Limits, Op, payload_views
from unisono.kvstore.wire.frame_server import FrameServer, listen

SECRET = bytes(range(32))


class Counting:
    """Applies a push once per sequence number, answers a pull with what the last push of that number held."""

    def __init__(self) -> None:
        self.applied: Counter[int] = Counter()
        self.arrived: list[int] = []
        self.held: dict[int, bytes] = {}
        self.peers: list[Identity] = []
        self.left: list[Identity] = []
        self.facts: list[dict[str, Any]] = []
        # a barrier waits for the gate; entered says that one does
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()
        self._lock = threading.Lock()

    def hello(self, peer: Identity, facts: dict[str, Any]) -> dict[str, Any]:
        if facts.get("plan") == "other":
            raise CommError(given="plan other", rule="one plan", consequence="refused", nearest="plan same")
        self.peers.append(peer)
        self.facts.append(facts)
        return {"seen": len(self.peers)}

    def handle(self, peer: Identity, frame: Frame) -> Frame:
        if frame.op is Op.BARRIER:
            self.entered.set()
            self.gate.wait(30)
            return Frame(Op.ACK, seq=frame.seq)
        if frame.op is Op.STATS:
            raise OSError("the disk is full")
        if frame.op is Op.PULL:
            table = bytes(8 * frame.entries)
            return Frame(
                Op.DATA,
                seq=frame.seq,
                entries=frame.entries,
                payload=[memoryview(table), memoryview(self.held[frame.seq])],
            )
        if frame.op is Op.PUSH:
            with self._lock:
                self.arrived.append(frame.seq)
                if frame.seq not in self.applied:
                    self.applied[frame.seq] += 1
                    self.held[frame.seq] = b"".join(bytes(part) for part in payload_views(frame))
            return Frame(Op.ACK, seq=frame.seq)
        raise CommError(given=frame.op.name, rule="push or pull", consequence="refused", nearest="push")

    def gone(self, peer: Identity) -> None:
        self.left.append(peer)


class Wires:
    """Opens servers and connections."""

    def __init__(self) -> None:
        self._open = contextlib.ExitStack()

    def serve(self, handler: Any, port: int = 0, **options: Any) -> FrameServer:
        options = {"secret": SECRET, "limits": Limits()} | options
        server = FrameServer([listen("127.0.0.1", port)], handler, **options)
        self._open.callback(server.close)
        if isinstance(handler, Counting):
            self._open.callback(handler.gate.set)
        return server

    def connect(self, address: tuple[str, int], **options: Any) -> Connection:
        options = {
            "me": Identity("worker", 3, 1, 77, ""),
            "facts": {"plan": "same"},
            "limits": Limits(),
            "deadline_s": 20.0,
        } | options
        endpoint = Endpoint(address, options.pop("secret", SECRET), options.pop("tls", None))
        connection = Connection(endpoint, **options)
        self._open.callback(connection.close)
        return connection

    def close(self) -> None:
        self._open.close()


@pytest.fixture
def wires() -> Iterator[Wires]:
    made = Wires()
    yield made
    made.close()


@pytest.fixture
def counting() -> Counting:
    return Counting()


@pytest.fixture
def secret() -> bytes:
    return SECRET


@pytest.fixture
def another_counting() -> Callable[[], Counting]:
    return Counting
