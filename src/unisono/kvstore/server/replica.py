"""The next server, which keeps a second copy of this one's chunks (chain replication of two, van Renesse & Schneider 2004).

A push is forwarded there before it is acknowledged. A server that starts anew takes its chunks from there, so what was
acknowledged outlives any one server.
"""

from __future__ import annotations

import threading

from unisono.kvstore.server.agreed import Agreed
from unisono.kvstore.server.payload import SLOT_BYTES
from unisono.kvstore.server.process import Seat
from unisono.kvstore.server.service import Service
from unisono.kvstore.wire.auth import Peer
from unisono.kvstore.wire.connection import Connection
from unisono.kvstore.wire.frame import LARGE, Frame, Op, buffers
from unisono.kvstore.wire.message import json_frame

_DEADLINE_S = 30.0


class Replica:
    """The connection of the server at ``seat`` to the one after it, opened when the run is known."""

    def __init__(self, seat: Seat, secret: bytes) -> None:
        self._seat, self._secret = seat, secret
        self._lock = threading.Lock()
        self._link: Connection | None = None

    def restore(self, service: Service) -> None:
        """Take over what the next server keeps, before anyone is let in. A server without a snapshot has just begun."""
        if service.agreed is None:
            return
        for chunk in service.agreed.placement().on(self._seat.server):
            answer = self.forward(service.agreed, json_frame(Op.STATE, {"chunks": [chunk.number]}))
            service.adopt(b"".join(buffers(answer)))

    def forward(self, agreed: Agreed, frame: Frame) -> Frame:
        """The next server's answer. Raises CommError where it cannot be reached, and what it refuses with."""
        with self._lock:
            if self._link is None:
                me = Peer("server", self._seat.server, self._seat.epoch, agreed.job, "")
                facts, address = agreed.json(), self._seat.next_address
                self._link = Connection(
                    address, self._secret, me, facts, limits=LARGE, deadline_s=_DEADLINE_S, slot_bytes=SLOT_BYTES
                )
        return self._link.request(frame).result()
