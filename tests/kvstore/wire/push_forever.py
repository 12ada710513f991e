"""A worker process for tests that kill it: ``python pushing.py PORT``; pushes through shared memory until it is killed."""

from __future__ import annotations

import itertools
import os
import sys

from unisono.dist.secret import read_or_create_secret
from unisono.kvstore.wire.auth import Identity
from unisono.kvstore.wire.connection import Connection, Endpoint
from unisono.kvstore.wire.frame import Frame, Limits, Op

if __name__ == "__main__":
    me = Identity("worker", 4, 0, 77, "")
    address = ("127.0.0.1", int(sys.argv[1]))
    connection = Connection(
        Endpoint(address, read_or_create_secret(os.environ)), me, {}, limits=Limits(), slot_bytes=1 << 20
    )
    data = bytes(1 << 20)
    for round_ in itertools.count():
        pushes = [connection.request(Frame(Op.PUSH, seq=8 * round_ + n, payload=data)) for n in range(8)]
        for push in pushes:
            push.result()
