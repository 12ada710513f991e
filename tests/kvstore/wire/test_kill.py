"""The server process is killed, or stopped, in the middle of a transfer; another takes its place at the same port."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from procs import command_lines, shared_fds, wait_until

from unisono.kvstore.wire.frame import Frame, Op

Start = Any


@pytest.fixture
def start(secret: bytes) -> Iterator[Start]:
    children: list[subprocess.Popen[bytes]] = []

    def started(port: int, epoch: int, answers: int = 1000) -> tuple[subprocess.Popen[bytes], int]:
        memory = os.memfd_create("secret", 0)
        os.write(memory, secret)
        environ = os.environ | {"UNISONO_SECRET_FD": str(memory), "PYTHONPATH": os.pathsep.join(sys.path)}
        script = str(Path(__file__).parent / "hold_slots.py")
        child = subprocess.Popen(
            [sys.executable, script, str(port), str(epoch), str(answers)],
            env=environ,
            pass_fds=[memory],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        os.close(memory)
        children.append(child)
        assert child.stdout is not None
        return child, int(child.stdout.readline())

    yield started
    for child in children:
        child.kill()
        child.communicate()


def _push(connection: Any, values: list[np.ndarray[Any, Any]]) -> list[Future[Frame]]:
    return [connection.request(Frame(Op.PUSH, seq=seq, payload=memoryview(each))) for seq, each in enumerate(values)]


@pytest.mark.parametrize(
    ("how", "slot_bytes"),
    [
        (signal.SIGKILL, 4 << 20),
        pytest.param(signal.SIGKILL, 0, marks=pytest.mark.full),
        pytest.param(signal.SIGSTOP, 4 << 20, marks=pytest.mark.full),
    ],
)
def test_requests_survive_a_server_that_is_replaced(
    wires: Any, start: Start, secret: bytes, how: signal.Signals, slot_bytes: int
) -> None:
    child, port = start(0, 1, answers=3)
    hellos: list[dict[str, Any]] = []
    connection = wires.connect(
        ("127.0.0.1", port), slot_bytes=slot_bytes, deadline_s=40.0, silence_s=1.0, on_reconnect=hellos.append
    )
    draw = np.random.default_rng(1)
    values = [draw.integers(0, 256, 4 << 20, dtype=np.uint8) for _ in range(20)]
    futures = _push(connection, values)
    wait_until(lambda: futures[2].done(), "some pushes are answered")
    child.send_signal(how)
    assert not all(future.done() for future in futures)
    if how == signal.SIGSTOP:
        # it holds the port until it is ended, as whoever replaces it must do
        time.sleep(2.5)
        child.kill()
    child.wait()
    second, _ = start(port, 2)
    for future, each in zip(futures, values, strict=True):
        assert future.result(40).seq == xxhash.xxh3_64_intdigest(each)
    assert hellos == [{"pid": second.pid}]
    traffic = connection.traffic()
    assert traffic.num_reconnects == 1
    assert traffic.shared_sent_bytes >= len(values) * values[0].nbytes * bool(slot_bytes)
    assert bool(traffic.no_shared_memory_reason) == (not slot_bytes)
    connection.close()
    wait_until(lambda: shared_fds() == 0, "the memory is gone")
    for form in (secret, secret.hex().encode()):
        assert form not in Path(f"/proc/{second.pid}/environ").read_bytes()
        assert form not in command_lines().encode()
