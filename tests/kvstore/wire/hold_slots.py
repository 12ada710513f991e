"""A server process for tests that kill it: ``python holding.py PORT EPOCH ANSWERS``; the secret comes by descriptor.

Answers a push with its digest, so that the pusher can tell that what arrived is what was sent, and so many pushes at most: it
is then in the middle of one until it is killed. Ends with its input.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import xxhash

from unisono.dist.secret import read_or_create_secret
from unisono.kvstore.wire.auth import Identity
from unisono.kvstore.wire.frame import Frame, Limits, Op, payload_views
from unisono.kvstore.wire.frame_server import FrameServer, listen


class Digesting:
    """Keeps nothing."""

    def __init__(self, answers: int) -> None:
        self._left = threading.Semaphore(answers)

    def hello(self, peer: Identity, facts: dict[str, Any]) -> dict[str, Any]:
        return {"pid": os.getpid()}

    def handle(self, peer: Identity, frame: Frame) -> Frame:
        self._left.acquire()
        digest = xxhash.xxh3_64()
        for part in payload_views(frame):
            digest.update(part)
        return Frame(Op.ACK, seq=digest.intdigest(), clock=frame.seq)

    def gone(self, peer: Identity) -> None:
        pass


if __name__ == "__main__":
    secret = read_or_create_secret(os.environ)
    port, epoch, answers = map(int, sys.argv[1:])
    server = FrameServer([listen("127.0.0.1", port)], Digesting(answers), secret, Limits(), restart_count=epoch)
    print(server.addresses[0][1], flush=True)
    sys.stdin.read()
    server.close()
