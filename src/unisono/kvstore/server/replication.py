"""Replication: the next server keeps a replica of this one's chunks (a chain of two, van Renesse & Schneider 2004).

A push is forwarded there before it is acknowledged, and a new server process restores its chunks from there, so
acknowledged pushes survive the loss of any one server.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from unisono.kvstore.server.chunk_payload import SLOT_BYTES
from unisono.kvstore.server.parameter_server import ParameterServer
from unisono.kvstore.server.process import ServerSettings
from unisono.kvstore.server.run_spec import RunSpec
from unisono.kvstore.wire.auth import Peer
from unisono.kvstore.wire.connection import Connection
from unisono.kvstore.wire.frame import PEER_LIMITS, Frame, Op, payload_views
from unisono.kvstore.wire.message import json_frame
from unisono.kvstore.wire.tls import TLSContexts

_DEADLINE_S = 30.0


class ReplicaClient:
    """The connection of a server to the next one, opened once the run is known."""

    def __init__(self, seat: ServerSettings, secret: bytes, tls: TLSContexts | None) -> None:
        self._seat, self._secret, self._tls = seat, secret, tls
        self._lock = threading.Lock()
        self._link: Connection | None = None

    def restore(self, service: ParameterServer) -> None:
        """Restore this server's chunks from the replica, before workers connect. Both servers must be listening: they
        may ask each other."""
        agreed = service.run_spec or self._told()
        if agreed is None:
            return
        for chunk in agreed.placement().chunks_on(self._seat.server_index):
            answer = self.forward(agreed, json_frame(Op.STATE, {"chunks": [chunk.number]}))
            service.adopt_replica_state(b"".join(payload_views(answer)))

    def forward(self, agreed: RunSpec, frame: Frame) -> Frame:
        """The next server's answer. Raises CommError if it cannot be reached, or its refusal."""
        with self._lock:
            if self._link is None or self._link.has_given_up:
                self._link = self._connect(agreed.job, agreed.to_json())
            link = self._link
        return link.request(frame).result()

    def _told(self) -> RunSpec | None:
        """The run's spec from the next server, where this one died before its first snapshot; None if no run has begun."""
        link = self._connect(0, {})
        link.close()
        told = link.hello["agreed"]
        return RunSpec.from_json(told) if told is not None else None

    def _connect(self, job: int, facts: Mapping[str, Any]) -> Connection:
        me = Peer("server", self._seat.server_index, self._seat.server_restart_count, job, "")
        return Connection(
            self._seat.next_address,
            self._secret,
            me,
            facts,
            limits=PEER_LIMITS,
            deadline_s=_DEADLINE_S,
            slot_bytes=SLOT_BYTES,
            tls=self._tls,
        )
