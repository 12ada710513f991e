"""A TCP proxy that harms what passes, frame by frame, for tests of what must survive a bad network.

    with Chaos(("127.0.0.1", port), seed=3, drop=0.05, corrupt=0.02) as proxy:
        connect to proxy.address

The first frames of a connection (the exchange of proofs and the hello) pass unharmed, so that tests spend their time on
requests. ``half_open`` and ``target`` may be changed while it runs.
"""

from __future__ import annotations

import contextlib
import random
import select
import socket
import struct
import threading
import time
from collections import Counter
from typing import Self

HEADER_BYTES = 64
_PAYLOAD_BYTES = struct.Struct("<I")
_PAYLOAD_AT = 48
_PIECE_BYTES = 16384
# frames in each direction before anything is harmed
_SPARED = 2
_KEPT_S = 0.05


class Chaos:
    """Each rate is a probability per frame; ``delay_s`` is the longest, drawn anew for each frame.

    ``drop`` closes the connection in the middle of a frame. ``duplicate`` sends a frame twice, ``reorder`` after the next
    one, ``corrupt`` with one byte changed. ``bytes_per_s`` limits each direction; ``under_way`` then holds, for each
    connection it sends on, how many bytes of its newest frame are through, of how many. ``done`` counts what was harmed how.
    """

    def __init__(
        self,
        target: tuple[str, int],
        *,
        seed: int,
        drop: float = 0.0,
        duplicate: float = 0.0,
        reorder: float = 0.0,
        corrupt: float = 0.0,
        delay_s: float = 0.0,
        bytes_per_s: float = 0.0,
    ) -> None:
        self.target, self._draw = target, random.Random(seed)
        self._rates = {"drop": drop, "duplicate": duplicate, "reorder": reorder, "corrupt": corrupt}
        self._delay_s, self._bytes_per_s = delay_s, bytes_per_s
        self.half_open = threading.Event()
        self.done: Counter[str] = Counter()
        self.under_way: dict[socket.socket, tuple[int, int]] = {}
        self._ended = threading.Event()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._start(self._accept)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        for each in (self._listener, *self._sockets):
            _shut(each)
        for thread in self._threads:
            thread.join()
        for each in (self._listener, *self._sockets):
            each.close()

    def _start(self, function: object, *args: object) -> None:
        thread = threading.Thread(target=function, args=args, name="chaos", daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self.target)
            except OSError:
                client.close()
                continue
            self._sockets += [client, server]
            if self._ended.is_set():
                # these two came too late to be shut by whoever ends us
                _shut(client)
                _shut(server)
            self._start(self._carry, client, server)
            self._start(self._carry, server, client)

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        kept: bytes | None = None
        count = 0
        with contextlib.suppress(OSError):
            while True:
                if kept is not None and not select.select([source], [], [], _KEPT_S)[0]:
                    # nothing follows that it could be behind of
                    self._send(sink, kept)
                    kept = None
                frame = _frame(source)
                count += 1
                harm = "" if count <= _SPARED else self._harm()
                if self.half_open.is_set():
                    # the connection stays open and silent
                    self.done["half_open"] += 1
                    while not self._ended.is_set() and self.half_open.is_set() and source.recv(_PIECE_BYTES):
                        pass
                    break
                if self._delay_s:
                    self._ended.wait(self._draw.uniform(0, self._delay_s))
                if harm:
                    self.done[harm] += 1
                if harm == "drop":
                    sink.sendall(frame[: self._draw.randrange(len(frame))])
                    break
                if harm == "corrupt":
                    at = self._draw.randrange(len(frame))
                    frame = frame[:at] + bytes([frame[at] ^ self._draw.randrange(1, 256)]) + frame[at + 1 :]
                if harm == "reorder" and kept is None:
                    kept = frame
                    continue
                self._send(sink, frame)
                if harm == "duplicate":
                    self._send(sink, frame)
                if kept is not None:
                    self._send(sink, kept)
                    kept = None
        _shut(source)
        _shut(sink)

    def _harm(self) -> str:
        drawn = self._draw.random()
        for harm, rate in self._rates.items():
            if drawn < rate:
                return harm
            drawn -= rate
        return ""

    def _send(self, sink: socket.socket, frame: bytes) -> None:
        if not self._bytes_per_s:
            sink.sendall(frame)
            return
        for start in range(0, len(frame), _PIECE_BYTES):
            piece = frame[start : start + _PIECE_BYTES]
            sink.sendall(piece)
            self.under_way[sink] = start + len(piece), len(frame)
            time.sleep(len(piece) / self._bytes_per_s)


def _frame(source: socket.socket) -> bytes:
    header = _exactly(source, HEADER_BYTES)
    return header + _exactly(source, *_PAYLOAD_BYTES.unpack_from(header, _PAYLOAD_AT))


def _exactly(source: socket.socket, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        piece = source.recv(min(count - len(found), 1 << 20))
        if not piece:
            raise ConnectionError("closed")
        found += piece
    return bytes(found)


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
