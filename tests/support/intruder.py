"""What another user of the machine can do with a port of a job: functions for a process without rights and without secret."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore

from unisono.dist.authentication import (
    LENGTH,
    AuthenticationRefused,
    Challenge,
    Hello,
    PeerError,
    Verdict,
    authenticate,
    frame,
    receive,
)

NOBODY = 65534

needs_another_user = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can act as another user: this attack of another user was not tried"
)


def as_another_user(attack: Callable[..., Any], *args: Any) -> Any:
    """``attack(*args)`` in a process of its own, of user 65534 where the tests are root's. Its result, of JSON types."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with contextlib.suppress(ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            os.write(writer, json.dumps(attack(*args)).encode())
        except BaseException as error:
            os.write(writer, json.dumps(f"failed: {error!r}").encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        answer = json.loads(pipe.read())
    os.waitpid(pid, 0)
    return answer


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), 10)


def late_hello(port: int, run_id: str, world_size: int) -> list[str]:
    """Names itself rank 1, without a secret, with a guessed one, and with a secret that it claims not to need."""
    said: list[str] = []
    for secret in (None, bytes(32), b"guessed" * 5):
        with connect(port) as sock:
            try:
                authenticate(sock, secret, "rank 1", run_id, world_size)
                said.append("admitted")
            except AuthenticationRefused as error:
                said.append(error.reason)
    with connect(port) as sock:
        receive(sock, Challenge, time.monotonic() + 5)
        sock.sendall(frame(Hello(bytes(32), True, "rank 1", run_id, world_size, b"")))
        said.append(until_closed(sock).decode(errors="replace"))
    with connect(port) as sock:  # requests before any proof
        receive(sock, Challenge, time.monotonic() + 5)
        for number in range(400):
            with contextlib.suppress(OSError):
                sock.sendall(frame(["set", f"junk {number}", b"x" * 1000]))
        said.append(until_closed(sock).decode(errors="replace"))
    return said


def junk(port: int) -> list[str]:
    """A length that nobody would send, a line without end, nothing at all, a torch client."""
    said: list[str] = []
    for data in (LENGTH.pack(2**31 - 1), b"GET /" + b"a" * 2**20, LENGTH.pack(5) + b"\xc1" * 5, b"validate\x00init"):
        with connect(port) as sock:
            receive(sock, Challenge, time.monotonic() + 5)
            with contextlib.suppress(OSError):
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
            said.append(until_closed(sock).decode(errors="replace"))
    return said


def until_closed(sock: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    data = b""
    sock.settimeout(20)
    with contextlib.suppress(ConnectionError):
        while more := sock.recv(65536):
            data += more
    return data


def drip(port: int, longest_s: float) -> float:
    """One byte after another; after how many seconds it is cut off."""
    began_s = time.monotonic()
    with connect(port) as sock:
        receive(sock, Challenge, time.monotonic() + 5)
        sock.settimeout(0.05)
        sent = LENGTH.pack(4000)
        while time.monotonic() - began_s < longest_s:
            try:
                sock.send(sent[:1] or b"a")
                sent = sent[1:]
                if not sock.recv(1):
                    break
            except TimeoutError:
                continue
            except OSError:
                break
    return time.monotonic() - began_s


def hold(port: int, count: int, reader: int, ready: int) -> int:
    """Open connections, as many as it can, and hold them until ``reader`` ends."""
    held = []
    for _ in range(count):
        with contextlib.suppress(OSError):
            held.append(connect(port))
    os.write(ready, b"!")
    os.read(reader, 1)
    return len(held)


def take_a_place_in_gloo(ports: list[int], reader: int, ready: int) -> str:
    """Connects to gloo's listeners under the numbers of the first pairs, and returns what it is sent, in hexadecimal."""
    held = []
    for port in ports:
        for number in range(4):
            with contextlib.suppress(OSError):
                held.append(connect(port))
                held[-1].sendall(number.to_bytes(8, "little"))
    os.write(ready, b"!")
    os.read(reader, 1)
    data = b""
    for sock in held:
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            while more := sock.recv(65536):
                data += more
    return data.hex()


def change_the_place_of_rank_0(port: int, run_id: str, reader: int, ready: int) -> dict[str, Any]:
    """Writes its own address into torchrun's store once rank 0's is there, and answers there as a rank 0 would, without the
    secret. Returns what was in its place, and what each rank that came has sent, in hexadecimal."""
    key = f"unisono/{run_id}/rank 0"
    store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60), wait_for_workers=False)
    store.wait([key])
    before, heard = store.get(key).decode(), list[str]()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        store.set(key, f"127.0.0.1:{listener.getsockname()[1]}")
        os.write(ready, b"!")
        while reader not in select.select([reader, listener], [], [])[0]:
            sock, _ = listener.accept()
            with sock, contextlib.suppress(OSError):
                sock.settimeout(5)
                sock.sendall(frame(Challenge(bytes(32), True)))
                heard.append(sock.recv(65536).hex())
                sock.sendall(frame(Verdict(proof=bytes(32))))
    return {"uid": os.geteuid(), "before": before, "heard": heard}


__all__ = [
    "NOBODY",
    "PeerError",
    "as_another_user",
    "change_the_place_of_rank_0",
    "drip",
    "hold",
    "junk",
    "late_hello",
    "needs_another_user",
    "take_a_place_in_gloo",
]
