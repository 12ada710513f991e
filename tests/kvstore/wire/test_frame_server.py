"""Strangers, liars and dawdlers at a live server: none gets in, none keeps others out."""

from __future__ import annotations

import hmac
import json
import os
import random
import resource
import socket
import threading
import time
from dataclasses import replace
from typing import Any
from unittest import mock

import psutil
import pytest
from intruder import NOBODY, as_another_user, needs_another_user, until_closed
from procs import listening, wait_until

from unisono.errors import CommError, ConfigError
from unisono.kvstore.wire.auth import AuthError, Identity, client_handshake, preauth_limits
from unisono.kvstore.wire.channel import Channel, ConnectionLost
from unisono.kvstore.wire.frame import HEADER_BYTES, Frame, Limits, Op, json_frame, pack, read_json
from unisono.kvstore.wire.frame_server import Admission, listen

ME = Identity("worker", 3, 1, 77, "")
HASTY = Limits(max_payload_bytes=1 << 20, message_s=0.5, stall_s=0.3, handshake_s=0.5)


def _works(wires: Any, address: tuple[str, int], **options: Any) -> None:
    connection = wires.connect(address, **options)
    assert connection.request(Frame(Op.PUSH, seq=1)).result(10).op is Op.ACK
    connection.close()


def _is_ended(sock: socket.socket) -> bool:
    """Whether the server has ended this connection, with or without bytes before."""
    sock.setblocking(False)
    try:
        while sock.recv(4096):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


def _authenticated(address: tuple[str, int], secret: bytes, limits: Limits = HASTY) -> Channel:
    """A peer that holds the secret, and from here on behaves as badly as its test wants."""
    channel = Channel(socket.create_connection(address), preauth_limits(limits))
    epoch = client_handshake(channel, secret, ME, 0, limits)
    channel.limits = limits
    hello = json_frame(Op.HELLO, {"plan": "same"})
    channel.send(hello)
    reply = channel.receive(wait_s=5)
    assert reply is not None
    assert read_json(reply)["credits"] == 8
    assert epoch == 0
    return channel


def test_a_wrong_secret_is_refused_on_both_sides(wires: Any, counting: Any) -> None:
    server = wires.serve(counting)
    with pytest.raises(AuthError) as caught:
        wires.connect(server.addresses[0], secret=bytes(32))
    assert "the proof that came from 127.0.0.1:" in str(caught.value)
    assert "start both sides with the same UNISONO_SECRET_FILE" in str(caught.value)
    assert counting.peers == []
    _works(wires, server.addresses[0])


def test_a_server_without_the_secret_gets_nothing(wires: Any, counting: Any) -> None:
    def impostor(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        channel = Channel(sock, HASTY)
        channel.send(json_frame(Op.HELLO, {"nonce": "0" * 64, "epoch": 0}))
        heard.append(channel.receive(wait_s=5))
        channel.send(json_frame(Op.HELLO, {"proof": "0" * 64}))
        try:
            heard.append(channel.receive(wait_s=5))
        except ConnectionLost:
            heard.append(None)
        channel.close()

    heard: list[Frame | None] = []
    with listen("127.0.0.1") as listener:
        thread = threading.Thread(target=impostor, args=(listener,))
        thread.start()
        with pytest.raises(AuthError, match="gave a wrong proof"):
            wires.connect(listener.getsockname())
        thread.join()
    assert heard[0] is not None
    assert "plan" not in read_json(heard[0])
    assert heard[1] is None


def test_no_secret_and_a_replayed_exchange_are_refused(wires: Any, counting: Any, secret: bytes) -> None:
    server = wires.serve(counting)
    recorded: list[bytes] = []

    class Recorder(socket.socket):
        def sendmsg(self, buffers: Any, *args: Any) -> int:  # type: ignore[override]
            recorded.append(b"".join(bytes(part) for part in buffers))
            return super().sendmsg(buffers, *args)

    sock = Recorder()
    sock.connect(server.addresses[0])
    channel = Channel(sock, HASTY)
    client_handshake(channel, secret, ME, 0, HASTY)
    channel.close()
    assert len(recorded) == 1
    for attempt in (recorded[0], pack(Frame(Op.PUSH, worker=3, worker_restart_count=1, job=77), [])):
        replay = Channel(socket.create_connection(server.addresses[0]), HASTY)
        replay.receive(wait_s=5)
        replay._sock.sendall(attempt)
        try:
            reply = replay.receive(wait_s=5)
            assert reply is not None
            assert reply.op is Op.ERROR
        except ConnectionLost:
            pass
        replay.close()
    assert counting.peers == []
    _works(wires, server.addresses[0])


def strangers_attempts(address: tuple[str, int]) -> dict[str, Any]:
    """What a process without the secret does at the port: proofs of guessed secrets, requests without a proof, noise."""
    said: list[str] = []
    for guess in (b"", bytes(32), b"guessed" * 5):
        channel = Channel(socket.create_connection(address, 10), preauth_limits(HASTY))
        try:
            with mock.patch.object(hmac, "compare_digest", return_value=True):  # it does not mind who the server is
                client_handshake(channel, guess, ME, 0, HASTY)
            channel.send(json_frame(Op.HELLO, {"plan": "same"}))
            reply = channel.receive(wait_s=5)
            said.append("closed" if reply is None else "refused" if reply.op is Op.ERROR else "admitted")
        except (AuthError, ConnectionLost):
            said.append("refused")
        channel.close()
    stamps = {"worker": 3, "worker_restart_count": 1, "job": 77}
    for op in (Op.PUSH, Op.PULL, Op.MEMORY):
        channel = Channel(socket.create_connection(address, 10), HASTY)
        channel.receive(wait_s=5)  # the challenge
        try:
            channel.send(Frame(op, seq=9, payload=b"{}", **stamps))
            reply = channel.receive(wait_s=5)
            said.append("closed" if reply is None else reply.op.name)
        except ConnectionLost:
            said.append("closed")
        channel.close()
    with socket.create_connection(address, 10) as sock:
        sock.sendall(os.urandom(64))
        said.append(f"{len(until_closed(sock)) < 400}")
    return {"uid": os.geteuid(), "said": said}


@needs_another_user
def test_another_user_is_refused_and_the_servers_own_job_goes_on(wires: Any, counting: Any) -> None:
    server = wires.serve(counting, limits=HASTY)
    own = wires.connect(server.addresses[0])
    own.request(Frame(Op.PUSH, seq=1)).result(10)
    found = as_another_user(strangers_attempts, server.addresses[0])
    assert found["uid"] == NOBODY
    assert found["said"][:3] == ["refused"] * 3
    assert set(found["said"][3:6]) <= {"ERROR", "closed"}
    assert found["said"][6] == "True"
    assert len(counting.peers) == 1
    assert counting.arrived == [1]
    assert own.request(Frame(Op.PUSH, seq=2)).result(10).op is Op.ACK
    own.close()
    _works(wires, server.addresses[0])


def test_requests_of_another_job_worker_or_restart_are_refused(wires: Any, counting: Any, secret: bytes) -> None:
    server = wires.serve(counting)
    channel = _authenticated(server.addresses[0], secret)
    right = {"job": 77, "worker": 3, "worker_restart_count": 1}
    for field, value in {"job": 78, "worker": 4, "worker_restart_count": 2}.items():
        channel.send(Frame(Op.PUSH, **(right | {field: value})))
        reply = channel.receive(wait_s=5)
        assert reply is not None
        assert reply.op is Op.ERROR
        given = read_json(reply)["problems"][0]["given"]
        assert given == f"PUSH with {field.replace('_', ' ')} {value}, where this connection's is {right[field]}"
    channel.close()
    assert counting.arrived == []


def test_a_dribbled_hello_and_a_dribbled_request_are_cut_off(wires: Any, counting: Any, secret: bytes) -> None:
    server = wires.serve(counting, limits=HASTY)
    with socket.create_connection(server.addresses[0]) as silent:
        silent.settimeout(10)
        while silent.recv(4096):
            pass
    # bytes that keep coming buy no more time for the proof
    dribbled = 0
    hello = json_frame(Op.HELLO, {"nonce": "0" * 64})
    with socket.create_connection(server.addresses[0]) as slow, pytest.raises(OSError, match=r"Broken pipe|reset"):  # noqa: PT012
        for byte in pack(hello, [memoryview(bytes(4096))]) + bytes(4096):
            time.sleep(0.05)
            slow.send(bytes([byte]))
            dribbled += 1
    assert dribbled < 15
    channel = _authenticated(server.addresses[0], secret)
    header = pack(Frame(Op.PUSH, worker=3, worker_restart_count=1, job=77), [memoryview(bytes(100))])
    with pytest.raises(OSError, match=r"Broken pipe|reset"):  # noqa: PT012
        for byte in header + bytes(100):
            channel._sock.send(bytes([byte]))
            time.sleep(0.05)
    channel.close()
    assert counting.arrived == []
    _works(wires, server.addresses[0])


def test_who_does_not_read_answers_is_cut_off_and_holds_up_nobody(wires: Any, counting: Any, secret: bytes) -> None:
    server = wires.serve(counting, limits=HASTY)
    wires.connect(server.addresses[0]).request(Frame(Op.PUSH, seq=1, payload=bytes(1 << 20))).result(10)
    before = len(counting.left)
    channel = _authenticated(server.addresses[0], secret)
    for _ in range(40):
        channel.send(Frame(Op.PULL, worker=3, worker_restart_count=1, job=77, seq=1))
    _works(wires, server.addresses[0])
    wait_until(lambda: len(counting.left) == before + 2, "the one that does not read is let go")
    channel.close()


def test_a_thousand_connections_do_not_keep_a_worker_out(wires: Any, counting: Any) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    server = wires.serve(counting, admission=Admission(max_connections=100, max_unauthenticated=20))
    crowd = []
    try:
        for count in range(1000):
            crowd.append(socket.create_connection(server.addresses[0]))
            if count in (300, 999):
                _works(wires, server.addresses[0])
                named = [thread for thread in threading.enumerate() if thread.name == "unisono-wire-peer"]
                assert len(named) <= 100
        assert sum(map(_is_ended, crowd)) >= 900
    finally:
        for sock in crowd:
            sock.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_mutated_frames_leave_a_server_that_serves(wires: Any, counting: Any, secret: bytes) -> None:
    _fuzz(wires, counting, secret, 600)


@pytest.mark.full
def test_many_mutated_frames_leave_a_server_that_serves(wires: Any, counting: Any, secret: bytes) -> None:
    _fuzz(wires, counting, secret, 10_000)


def _fuzz(wires: Any, counting: Any, secret: bytes, count: int) -> None:
    # a busy machine may pause longer than HASTY's handshake takes, and thousands of them follow each other
    patient = replace(HASTY, handshake_s=30)
    server = wires.serve(counting, limits=replace(patient, stall_s=0.05))
    draw = random.Random(3)
    before = psutil.Process().memory_info().rss
    body = bytes(200)
    good = pack(Frame(Op.PUSH, worker=3, worker_restart_count=1, job=77, seq=5), [memoryview(body)]) + body
    channel, answered, cut = None, 0, 0
    for _ in range(count):
        channel = channel or _authenticated(server.addresses[0], secret, patient)
        frame = bytearray(good)
        for _ in range(draw.choice((0, 1, 2, 8))):
            frame[draw.randrange(HEADER_BYTES if draw.random() < 0.8 else len(frame))] = draw.randrange(256)
        whole = draw.random() < 0.9
        try:
            channel._sock.sendall(frame if whole else frame[: draw.randrange(len(frame))])
            if not whole:
                channel.shutdown()
            answered += channel.receive(wait_s=5) is not None
        except (ConnectionLost, OSError):
            cut += 1
            channel.close()
            channel = None
    if channel:
        channel.close()
    assert answered > count / 10
    assert cut > count / 2
    assert psutil.Process().memory_info().rss - before < 100 << 20
    # no mutation of the header or the payload passes for the real thing
    assert all(seq == 5 for seq in counting.arrived)
    _works(wires, server.addresses[0])


def test_a_channel_that_was_closed_says_so() -> None:
    with listen("127.0.0.1") as listener:
        channel = Channel(socket.create_connection(listener.getsockname()), HASTY)
        channel.close()
        for use in (lambda: channel.send(Frame(Op.BYE)), lambda: channel.send_unless_busy(Frame(Op.BYE))):
            with pytest.raises(ConnectionLost):
                use()


def test_it_listens_on_the_named_address_alone_and_leaves_nothing(wires: Any, counting: Any) -> None:
    before = set(listening(os.getpid()))
    threads = threading.active_count()
    server = wires.serve(counting)
    ((_, port),) = server.addresses
    assert set(listening(os.getpid())) - before == {f"0100007F:{port:04X}"}
    _works(wires, server.addresses[0])
    server.close()
    assert set(listening(os.getpid())) == before
    assert threading.active_count() == threads


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_every_interface_at_once_is_refused(host: str) -> None:
    with pytest.raises(ConfigError) as caught:
        listen(host) if host else listen("0")
    assert "means every interface of this machine" in caught.value.problems[0].given


def test_a_handler_that_fails_is_reported_to_both_sides(
    wires: Any, counting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", seen.append)
    connection = wires.connect(wires.serve(counting).addresses[0])
    with pytest.raises(CommError, match="the server failed at STATS: OSError: the disk is full"):
        connection.request(Frame(Op.STATS)).result(10)
    assert connection.request(Frame(Op.PUSH, seq=1)).result(10).op is Op.ACK
    assert str(seen[0].exc_value.__cause__) == "the disk is full"


def test_a_hello_that_is_no_object_is_refused(wires: Any, counting: Any, secret: bytes) -> None:
    server = wires.serve(counting)
    for payload in (b"[" * 100_000, b"[1]", b"\xff", json.dumps("x").encode()):
        channel = Channel(socket.create_connection(server.addresses[0]), preauth_limits(HASTY))
        client_handshake(channel, secret, ME, 0, HASTY)
        channel.send(Frame(Op.HELLO, payload=payload))
        reply = channel.receive(wait_s=5)
        assert reply is not None
        assert reply.op is Op.ERROR
        assert "not a JSON object" in read_json(reply)["problems"][0]["given"]
        channel.close()
    assert counting.peers == []
