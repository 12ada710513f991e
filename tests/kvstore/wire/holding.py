"""A server process for tests that kill it: ``python holding.py PORT EPOCH``; the secret comes by descriptor.

Answers a push with its digest, so that the pusher can tell that what arrived is what was sent. Ends with its input.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import xxhash

from unisono.kvstore.wire.auth import Peer
from unisono.kvstore.wire.frame import Frame, Limits, Op, buffers
from unisono.kvstore.wire.secret import read_secret
from unisono.kvstore.wire.serving import Server, listen


class Digesting:
    """Keeps nothing."""

    def hello(self, peer: Peer, facts: dict[str, Any]) -> dict[str, Any]:
        return {"pid": os.getpid()}

    def handle(self, peer: Peer, frame: Frame) -> Frame:
        digest = xxhash.xxh3_64()
        for part in buffers(frame):
            digest.update(part)
        return Frame(Op.ACK, seq=digest.intdigest(), clock=frame.seq)

    def gone(self, peer: Peer) -> None:
        pass


if __name__ == "__main__":
    secret = read_secret(os.environ)
    server = Server([listen("127.0.0.1", int(sys.argv[1]))], Digesting(), secret, Limits(), epoch=int(sys.argv[2]))
    print(server.addresses[0][1], flush=True)
    sys.stdin.read()
    server.close()
