"""Payloads through memory that both sides map: the same bytes as through the socket, and nothing for a peer that lies."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from procs import shared_fds, wait_until

from unisono.kvstore.wire import connection as connection_module
from unisono.kvstore.wire import frame_server, shared_slots
from unisono.kvstore.wire.auth import Identity, client_handshake, preauth_limits
from unisono.kvstore.wire.channel import Channel, ConnectionLost
from unisono.kvstore.wire.frame import HEADER_BYTES, Frame, Limits, Op, Slot, json_frame, pack, read_json

ME = Identity("worker", 3, 1, 77, "")
SLOT = 10_000
FIELDS = {"worker": 3, "worker_restart_count": 1, "job": 77}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = named_memory()  # what another program has left is not of these tests
    yield
    wait_until(lambda: shared_fds() == 0, "mappings and descriptors are gone")
    assert named_memory() <= before


def named_memory() -> set[str]:
    """Names of ours in ``/dev/shm``, but for the user's folder of data sets that other tests keep in memory."""
    return {name for name in os.listdir("/dev/shm") if "unisono" in name and name != f"unisono-{os.getuid()}"}


def test_all_sizes_arrive_as_they_were(wires: Any, counting: Any) -> None:
    address = wires.serve(counting).addresses[0]
    shared, plain = wires.connect(address, slot_bytes=SLOT), wires.connect(address)
    draw = random.Random(1)
    # several parts, an answer of 8 bytes more than the request, and what no slot holds
    sizes = [(0,), (1,), (3, 5, 0, 90), (SLOT - 8,), (SLOT - 4, 4), (SLOT + 1,), (7 * SLOT,)] * 3
    data = [[draw.randbytes(size) for size in each] for each in sizes]
    pushes = [
        shared.request(Frame(Op.PUSH, seq=seq, payload=[memoryview(part) for part in each]))
        for seq, each in enumerate(data)
    ]
    assert {push.result(10).op for push in pushes} == {Op.ACK}
    for connection in (shared, plain):
        into = [[memoryview(bytearray(size)) for size in each] for each in sizes]
        pulls = [connection.request(Frame(Op.PULL, seq=n, entries=1), into=each) for n, each in enumerate(into)]
        for pull, got, want in zip(pulls, into, data, strict=True):
            assert bytes(pull.result(10).payload) == bytes(8)
            assert [bytes(part) for part in got] == want
        whole = connection.request(Frame(Op.PULL, seq=2, entries=1)).result(10)
        assert bytes(whole.payload) == bytes(8) + b"".join(data[2])
    wire, other = shared.traffic(), plain.traffic()
    assert (wire.no_shared_memory_reason, other.no_shared_memory_reason, other.shared_sent_bytes) == (
        "",
        "none was asked for",
        0,
    )
    through_socket = 3 * (SLOT + 1 + 7 * SLOT)
    assert wire.sent_bytes < through_socket + 20_000
    assert wire.shared_sent_bytes > 3 * 2 * (SLOT - 8)
    for connection in (shared, plain):
        connection.close()


def test_more_requests_than_slots(wires: Any, counting: Any) -> None:
    address = wires.serve(counting).addresses[0]
    many = [wires.connect(address, slot_bytes=SLOT, me=replace(ME, index=n)) for n in range(20)]
    data = [bytes([n]) * SLOT for n in range(200)]
    pushes = [many[n % 20].request(Frame(Op.PUSH, seq=n, payload=each)) for n, each in enumerate(data)]
    for push in pushes:
        push.result(20)
    assert counting.held == dict(enumerate(data))
    assert shared_fds() == 20 * 4  # client and server are one process here: each maps it, and mmap keeps a descriptor
    for each in many:
        each.close()


def test_a_peer_that_was_sent_heartbeats_leaves_nothing(
    wires: Any, counting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame_server, "HEARTBEAT_S", 0.001)
    beats: list[Frame] = []
    monkeypatch.setattr(Channel, "send_unless_busy", lambda channel, frame: beats.append(frame))
    connection = wires.connect(wires.serve(counting).addresses[0], slot_bytes=SLOT)
    counting.gate.clear()
    waiting = connection.request(Frame(Op.BARRIER, seq=1))
    wait_until(lambda: bool(beats), "a heartbeat")
    counting.gate.set()
    waiting.result(10)
    assert shared_fds() > 0
    connection.close()
    wait_until(lambda: shared_fds() == 0, "its memory is gone, though the server's own threads go on")


def test_why_there_is_no_memory_is_said(wires: Any, counting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    address = wires.serve(counting, limits=Limits(max_payload_bytes=SLOT)).addresses[0]

    def apart(**options: Any) -> str:
        connection = wires.connect(address, **({"slot_bytes": SLOT} | options))
        assert connection.request(Frame(Op.PUSH, seq=1, payload=bytes(100))).result(10).op is Op.ACK
        traffic = connection.traffic()
        connection.close()
        assert traffic.shared_sent_bytes == (0 if traffic.no_shared_memory_reason else 100)
        return traffic.no_shared_memory_reason

    assert apart() == ""
    assert apart(slot_bytes=0) == "none was asked for"
    assert "8 slots of 10001 bytes, where 8 of 10000 are the most" in apart(slot_bytes=SLOT + 1)
    with monkeypatch.context() as patch:
        patch.setattr(connection_module, "sharing_scope", lambda: "another host")
        assert apart() == "worker and server do not run on one Linux host, in one process table, as one user"

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert apart() == "this host gave no memory (No space left on device)"


def _met(address: tuple[str, int], secret: bytes) -> Channel:
    """A peer that holds the secret, and from here on behaves as badly as its test wants."""
    limits = Limits(message_s=0.5, stall_s=0.3, handshake_s=5)
    channel = Channel(socket.create_connection(address), preauth_limits(limits))
    client_handshake(channel, secret, ME, 0, limits)
    channel.limits = limits
    channel.send(json_frame(Op.HELLO, {"plan": "same"}))
    assert channel.receive(wait_s=5) is not None
    return channel


def _unsealed(size: int) -> int:
    fd = os.memfd_create(shared_slots.MEMFD_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    return fd


def test_offers_that_are_no_memory_are_refused(wires: Any, counting: Any, secret: bytes, tmp_path: Path) -> None:
    channel = _met(wires.serve(counting).addresses[0], secret)
    fd, good = shared_slots.create_shared_slots(2, SLOT)
    file = (tmp_path / "file").open("w+b")
    file.write(bytes(2 * SLOT))
    reader, writer = os.pipe()
    loose, grows = _unsealed(2 * SLOT), _unsealed(2 * SLOT)
    fcntl.fcntl(grows, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    offers = [
        ({"slots": 0}, "0 slots of"),
        ({"slots": 9}, "9 slots of 10000 bytes, where 8 of"),
        ({"slot_bytes": 1 << 60}, "2 slots of 1152921504606846976 bytes"),
        ({"slot_bytes": SLOT + 1}, "memory whose size is not sealed at 2 x 10001"),
        ({"slot_bytes": SLOT - 1}, "memory whose size is not sealed at 2 x 9999"),
        ({"pid": -1}, "an offer without pid, fd, slots, slot_bytes"),
        ({"pid": True}, "an offer without"),
        ({"fd": "../../mem"}, "an offer without"),
        ({"fd": 1 << 40}, "memory that cannot be opened (No such file or directory)"),
        ({"pid": 1 << 22}, "memory that cannot be opened (No such file or directory)"),
        ({"fd": file.fileno()}, "something else than memory"),
        ({"fd": reader}, "something else than memory"),
        ({"fd": channel._sock.fileno()}, "something else than memory"),
        ({"fd": loose}, "memory whose size is not sealed"),
        ({"fd": grows}, "memory whose size is not sealed"),
    ]
    for wrong, said in offers:
        channel.send(replace(json_frame(Op.MEMORY, good | wrong), **FIELDS))
        reply = channel.receive(wait_s=5)
        assert reply is not None
        assert reply.op is Op.ERROR
        assert f"shared memory was refused: {said}" in read_json(reply)["problems"][0]["given"]
    channel.send(replace(json_frame(Op.MEMORY, good), **FIELDS))
    reply = channel.receive(wait_s=5)
    assert reply is not None
    assert reply.op is Op.ACK
    for size in (0, SLOT, 4 * SLOT):  # neither side can be made to fault
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    channel.close()
    file.close()
    for each in (fd, reader, writer, loose, grows):
        os.close(each)


def test_slots_that_are_not_there_end_the_connection(wires: Any, counting: Any, secret: bytes) -> None:
    address = wires.serve(counting).addresses[0]
    fd, offer = shared_slots.create_shared_slots(2, SLOT)
    for has, number, nbytes in (
        (False, 1, 10),
        (True, 3, 10),
        (True, 255, 10),
        (True, 2, SLOT + 1),
        (True, 1, 1 << 26),
    ):
        channel = _met(address, secret)
        if has:
            channel.send(replace(json_frame(Op.MEMORY, offer), **FIELDS))
            assert channel.receive(wait_s=5) is not None
        frame = Frame(Op.PUSH, seq=9, slot=Slot(number, memoryview(b"")), **FIELDS)
        length = [memoryview(bytes(1))] * nbytes if nbytes < SLOT else [memoryview(bytes(nbytes))]
        channel._sock.sendall(pack(frame, length))
        with pytest.raises(ConnectionLost):
            channel.receive(wait_s=5)
        channel.close()
    os.close(fd)
    assert counting.arrived == []


def test_mutated_headers_leave_a_server_that_serves(wires: Any, counting: Any, secret: bytes) -> None:
    address = wires.serve(counting, limits=Limits(message_s=0.5, stall_s=0.05, handshake_s=5)).addresses[0]
    fd, offer = shared_slots.create_shared_slots(2, SLOT)
    draw = random.Random(5)
    channel, answered, cut = None, 0, 0
    for _ in range(400):
        if channel is None:
            channel = _met(address, secret)
            channel.send(replace(json_frame(Op.MEMORY, offer), **FIELDS))
            assert channel.receive(wait_s=5) is not None
            channel.shared_slots = shared_slots.map_slots(fd, 2, SLOT)
        slot = Slot(draw.choice((1, 2)), memoryview(b""))
        frame = bytearray(pack(Frame(Op.PUSH, seq=5, slot=slot, **FIELDS), [memoryview(bytes(draw.randrange(SLOT)))]))
        for _ in range(draw.choice((0, 0, 1, 2))):
            frame[draw.randrange(HEADER_BYTES)] = draw.randrange(256)
        try:
            channel._sock.sendall(frame)
            answered += channel.receive(wait_s=5) is not None
        except (ConnectionLost, OSError):
            cut += 1
            channel.close()
            channel = None
    if channel is not None:
        channel.close()
        channel = None
    os.close(fd)
    assert answered > 100
    assert cut > 100
    assert all(seq == 5 for seq in counting.arrived)
    connection = wires.connect(address, slot_bytes=SLOT)
    assert connection.request(Frame(Op.PUSH, seq=1, payload=bytes(SLOT))).result(10).op is Op.ACK
    connection.close()


def test_an_answer_in_another_slot_is_not_read(wires: Any, counting: Any) -> None:
    server = wires.serve(counting)
    connection = wires.connect(server.addresses[0], slot_bytes=SLOT)
    connection.request(Frame(Op.PUSH, seq=1, payload=b"right")).result(10)
    honest, lied = server._answer, threading.Event()

    def lying(channel: Channel, peer: Identity, frame: Frame) -> Frame:
        answer = honest(channel, peer, frame)
        if lied.is_set() or frame.slot is None:
            return answer
        lied.set()
        return replace(answer, slot=channel.shared_slots.slots[frame.slot.number - 2])

    server._answer = lying
    got = bytearray(5)
    connection.request(Frame(Op.PULL, seq=1, entries=1), into=memoryview(got)).result(10)
    assert lied.is_set()
    assert bytes(got) == b"right"
    assert connection.traffic().num_reconnects == 1
    connection.close()


def test_a_killed_worker_leaves_nothing(wires: Any, counting: Any, secret: bytes) -> None:
    server = wires.serve(counting)
    handed = os.memfd_create("secret", 0)
    os.write(handed, secret)
    environ = os.environ | {"UNISONO_SECRET_FD": str(handed), "PYTHONPATH": os.pathsep.join(sys.path)}
    script = [sys.executable, str(Path(__file__).parent / "push_forever.py"), str(server.addresses[0][1])]
    with subprocess.Popen(script, env=environ, pass_fds=[handed]) as child:
        os.close(handed)
        wait_until(lambda: len(counting.applied) > 20, "it pushes")
        assert shared_fds() == 2
        child.send_signal(signal.SIGKILL)
    wait_until(lambda: len(counting.left) == 1, "it is let go")
    wait_until(lambda: shared_fds() == 0, "its memory is gone")
    assert all(each == bytes(1 << 20) for each in counting.held.values())
    counting.held.clear()
