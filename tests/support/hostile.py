"""A worker that holds the secret and sends 100,000 frames that no worker would send."""

from __future__ import annotations

import random
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from unisono.errors import CommError, UnisonoError
from unisono.kvstore.wire.auth import Identity, client_handshake, preauth_limits
from unisono.kvstore.wire.channel import Channel
from unisono.kvstore.wire.frame import (
    CODECS,
    DTYPES,
    HEADER_BYTES,
    PEER_LIMITS,
    Frame,
    Op,
    json_frame,
    pack,
    payload_views,
    unpack,
)

# what waits for other workers would only wait here too; a higher epoch is how a server is told to leave
_NEVER = {Op.TICK, Op.BARRIER, Op.CLAIM}
_AHEAD = 6  # below the credits of a connection
_SEQS = (
    0,
    1,
    2,
    9,
    2**31,
    2**63 - 1,
    2**63,
    2**64 - 1,
)  # few: numbers that are kept one by one would fill memory, as told
_WILD = (0, 1, 2, 3, 7, 127, 255, 4095, 65535, 2**31 - 1, 2**31, 2**32 - 1)


class Hostile:
    """Sends mutations of ``seeds``, all of which alone change nothing, to the server at ``address``; ``seen`` counts answers."""

    def __init__(
        self, address: tuple[str, int], secret: bytes, job: int, facts: dict[str, Any], seeds: list[Frame]
    ) -> None:
        self._address, self._secret, self._facts, self._job = address, secret, facts, job
        self._seeds = [replace(seed, payload=b"".join(map(bytes, payload_views(seed)))) for seed in seeds]
        self._draw = random.Random(11)
        self.seen: Counter[str] = Counter()
        self._worker = 100

    def send(self, count: int) -> None:
        """``count`` frames, most with a digest that is right; a new connection whenever the server has closed one."""
        left = count
        while left:
            sock = socket.create_connection(self._address, 20)
            channel = Channel(sock, preauth_limits(PEER_LIMITS), until=time.monotonic() + 20)
            try:
                left -= self._talk(channel, sock, self._join(channel), left)
            finally:
                channel.close()

    def _join(self, channel: Channel) -> Identity:
        self._worker += 1
        me = Identity("worker", self._worker, 0, self._job, "the server")
        epoch = client_handshake(channel, self._secret, me, 0, PEER_LIMITS)
        assert epoch == 0
        channel.limits, channel.deadline = PEER_LIMITS, None
        hello = replace(json_frame(Op.HELLO, self._facts), job=me.job, worker=me.index)
        channel.send(hello)
        answer = channel.receive(wait_s=20)
        assert answer is not None
        assert answer.op is Op.JSON, bytes(*payload_views(answer))
        self.seen["connections"] += 1
        return me

    def _talk(self, channel: Channel, sock: socket.socket, me: Identity, most: int) -> int:
        """How many it took before the server closed the connection."""
        sent = waiting = 0
        with suppress(CommError):  # lost: what was sent counts
            for data in self._mutated(me):
                sock.settimeout(20)
                try:
                    sock.sendall(data)
                except OSError:
                    break
                finally:
                    sock.setblocking(False)
                sent, waiting = sent + 1, waiting + 1
                if waiting == _AHEAD or sent == most:
                    while waiting:
                        if (answer := channel.receive(wait_s=20)) is None:
                            raise AssertionError(f"no answer within 20 s; the last was {data[:HEADER_BYTES].hex()}")
                        if answer.op is not Op.HEARTBEAT:
                            self.seen[answer.op.name] += 1
                            waiting -= 1
                if sent == most:
                    break
        return sent

    def _mutated(self, me: Identity) -> Iterator[bytes]:
        while True:
            seed = self._draw.choice(self._seeds)
            frame = self._changed(replace(seed, job=me.job, worker=me.index))
            data = bytearray(pack(frame, payload_views(frame)) + bytes(frame.payload))
            if self._draw.random() < 0.01:  # damage that the digest or the limits must find, which ends the connection
                data[self._draw.randrange(len(data))] ^= 1 << self._draw.randrange(8)
                with suppress(UnisonoError):
                    if unpack(data[:HEADER_BYTES], PEER_LIMITS).nbytes > len(data) - HEADER_BYTES:
                        continue  # it would be waited for
            yield bytes(data)

    def _changed(self, frame: Frame) -> Frame:
        draw = self._draw
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            match draw.randrange(8):
                case 0:
                    frame = replace(frame, op=draw.choice([op for op in Op if op not in _NEVER]))
                case 1:
                    frame = replace(frame, entries=draw.choice((0, 1, 2, 3, 700, 8192)))
                case 2:
                    frame = replace(frame, dtype=draw.randrange(len(DTYPES)), codec=draw.randrange(CODECS))
                case 3:
                    frame = replace(frame, flags=draw.randrange(256))
                case 4:
                    frame = replace(frame, seq=draw.choice(_SEQS), clock=draw.choice(_SEQS))
                case 5:
                    other = {
                        "job": frame.job ^ 1,
                        "worker": frame.worker + 1,
                        "worker_restart_count": frame.worker_restart_count + 1,
                    }
                    name = draw.choice(list(other))
                    frame = replace(frame, **{name: other[name]})
                case 6:
                    frame = replace(frame, payload=self._other_words(bytes(frame.payload)))
                case _:
                    length = draw.choice((0, 1, 7, 8, 24, len(frame.payload) - 1, len(frame.payload) + 4))
                    frame = replace(frame, payload=bytes(frame.payload)[: max(length, 0)].ljust(max(length, 0), b"\0"))
        return frame

    def _other_words(self, payload: bytes) -> bytes:
        """The beginning alone is changed, which is a table or JSON: what follows are values, all of them zero."""
        data, draw = bytearray(payload), self._draw
        room = min(len(data), 600 if data[:1] == b"{" or data[8:9] == b"{" else 24)
        if not room:
            return bytes(draw.randbytes(draw.randrange(1, 40)))
        if data[:1] == b"{" or data[8:9] == b"{":
            for _ in range(draw.choice((1, 2, 5))):
                data[draw.randrange(room)] = draw.choice(b'{}[]",:0123456789-.eEaxntf\\\x00\xff')
        else:
            place = 4 * draw.randrange(room // 4) if room >= 4 else 0
            data[place : place + 4] = draw.choice(_WILD).to_bytes(4, "little")
        return bytes(data)
