"""What strangers, damaged states and other users of the machine can do to server processes: nothing."""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from faults_worker import table
from hostile import Hostile
from intruder import NOBODY, as_another_user, needs_another_user
from modes import public_folder
from nursery import Nursery
from parameter_servers import ParameterServers, numbers, parameter_servers, recipe
from procs import command_lines, is_running, listening, wait_until

from unisono.errors import CommError
from unisono.kvstore.server import snapshot
from unisono.kvstore.server.chunk_payload import WRITE, write_chunks
from unisono.kvstore.server.chunk_state import encode_chunk_state
from unisono.kvstore.server.run_spec import RunSpec
from unisono.kvstore.wire.auth import AuthError, Identity, client_handshake, preauth_limits
from unisono.kvstore.wire.channel import Channel
from unisono.kvstore.wire.connection import Connection, Endpoint
from unisono.kvstore.wire.frame import PEER_LIMITS, VERSION, Frame, Op, json_frame


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> Iterator[ParameterServers]:
    with begun(tmp_path_factory.mktemp("servers"), nursery=nursery) as made:
        yield made


@contextlib.contextmanager
def begun(folder: Path, **more: Any) -> Iterator[ParameterServers]:
    """A server with a run and a snapshot of it."""
    with parameter_servers(folder, 1, **more) as made:
        first = made.connect(table())
        first.init(table())
        first.set_optimizer(recipe(table()))
        first.push(table()).wait()
        first.snapshot()
        first.close()
        yield made


def resident_bytes(servers: ParameterServers) -> int:
    status = Path(f"/proc/{servers.processes[0].pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def test_it_listens_at_its_address_alone(servers: ParameterServers) -> None:
    host, port = servers.addresses[0]
    kernels = f"{int.from_bytes(socket.inet_aton(host), 'little'):08X}:{port:04X}"
    assert listening(servers.processes[0].pid) == [kernels]


@pytest.mark.full
def test_the_secret_is_nowhere_to_be_seen(tmp_path: Path) -> None:
    with begun(tmp_path) as servers:  # by its command, as a launcher starts it
        pid = servers.processes[0].pid
        forms = {servers.secret, servers.secret.hex().encode(), repr(servers.secret).encode()[2:-1]}
        places = [
            command_lines().encode(),
            Path(f"/proc/{pid}/environ").read_bytes(),
            servers.log(0).encode(),
            *(path.read_bytes() for path in servers.snapshots.rglob("*") if path.is_file()),
        ]
    assert len(places) >= 5
    assert not [form for form in forms for place in places if form in place]


def test_snapshots_are_in_folders_of_their_user(servers: ParameterServers) -> None:
    found = [path for path in servers.snapshots.rglob("*") if path.is_dir()]
    assert any(path.name.startswith("snapshot-") for path in found)
    assert {path.stat().st_mode & 0o777 for path in found} == {0o700}


def test_a_folder_of_snapshots_that_is_a_link_or_has_strange_names_leads_nowhere(tmp_path: Path) -> None:
    secret = tmp_path / "elsewhere"
    snapshot.write_snapshot(secret, {}, {"0/value": torch.zeros(1)}, after=0)
    folder = tmp_path / "snapshots"
    folder.mkdir()
    for name in ("snapshot-00000007", "snapshot-../../elsewhere".replace("/", "%2f"), "snapshot-٠٠٠٠٠٠٠٩"):
        (folder / name).symlink_to(secret / "snapshot-00000001")
    (folder / "snapshot-00000002.tmp").symlink_to(secret)
    assert snapshot.read_newest_snapshot(folder) is None
    assert snapshot.write_snapshot(folder, {}, {"0/value": torch.zeros(1)}, after=0) == 1
    assert snapshot.read_newest_snapshot(secret) is not None


def intruder(servers: ParameterServers, worker: int = 7) -> Connection:
    """A worker with the secret and bad intentions."""
    agreed = RunSpec(table={k: (tuple(v.shape), v.dtype) for k, v in table().items()}, num_servers=1)
    me = Identity("worker", worker, 0, agreed.job, "")
    return Connection(
        Endpoint(servers.addresses[0], servers.secret), me, agreed.to_json(), limits=PEER_LIMITS, deadline_s=10.0
    )


def image(**facts: Any) -> bytes:
    """Of both chunks, the second with a fact of its own."""
    good = {"version": 3, "applied": {"0": [[0, 3]]}}
    values = {"0/value": torch.ones(3000), "1/value": torch.ones(1500)}
    return encode_chunk_state({"recipe": None, "chunks": {"0": good, "1": good | facts}}, values)


HOSTILE = {
    "no image": b"\xff" * 64,
    "a header longer than the world": struct.pack("<Q", 1 << 62) + b"{}",
    "brackets without end": (lambda text: struct.pack("<Q", len(text)) + text)(b"[" * 100_000),
    "offsets beyond the bytes": (lambda text: struct.pack("<Q", len(text)) + text)(
        json.dumps({"0/value": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}).encode()
    ),
    "a version that no frame can carry": image(version=1 << 70),
    "a version below zero": image(version=-1),
    "a version that is none": image(version="soon"),
    "spans that overlap": image(applied={"0": [[5, 9], [1, 7]]}),
    "streams that are none": image(applied={"a": [[0, 1]]}),
    "applied that is none": image(applied=[1]),
    "tensors of other sizes": encode_chunk_state(
        {"recipe": None, "chunks": {"0": {"version": 0, "applied": {}}}}, {"0/value": torch.ones(7)}
    ),
    "an unknown chunk": encode_chunk_state(
        {"recipe": None, "chunks": {"9": {"version": 0, "applied": {}}}}, {"9/value": torch.ones(7)}
    ),
}


def test_hostile_states_and_sizes_are_refused_and_change_nothing(servers: ParameterServers) -> None:
    enemy, before = intruder(servers), resident_bytes(servers)
    for name, data in HOSTILE.items():
        with pytest.raises(CommError, match=r"nothing was|not taken over"):
            pytest.fail(f"{name}: {enemy.request(Frame(Op.STATE, flags=WRITE, payload=data)).result(20)}")
    for entries, sizes in ((1, [0, 1 << 31]), (2, [0, 12000, 1, 4]), (8000, [0, 4] * 8000)):
        frame = Frame(Op.INIT, entries=entries, payload=struct.pack(f"<{len(sizes)}I", *sizes) + bytes(16))
        with pytest.raises(CommError, match="nothing was done"):
            enemy.request(frame).result(20)
    enemy.close()
    assert resident_bytes(servers) - before < 64 << 20
    visitor = servers.connect(table(), worker=8)
    into = numbers((3000,), (1500,))
    into = dict(zip(table(), into.values(), strict=True))
    visitor.pull(into).wait()
    visitor.close()
    assert all(not value.any() for value in into.values())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"servers": 1 << 40}, "cannot be read"),
        ({"chunk_bytes": 8192, "table": {"a": [[1 << 41], "float32"]}}, "cannot be read"),
        ({"table": {"a": [[1 << 62, 1 << 62], "float32"]}}, "cannot be read"),
        ({"staleness": -1}, "cannot be read"),
        ({"codec": "powersgd:4"}, "it is none for the workers before it"),
    ],
)
def test_a_hello_that_asks_for_too_much_is_refused(servers: ParameterServers, change: dict, said: str) -> None:
    before = resident_bytes(servers)
    agreed = RunSpec(table={k: (tuple(v.shape), v.dtype) for k, v in table().items()}, num_servers=1)
    me = replace(Identity("worker", 9, 0, agreed.job, ""))
    with pytest.raises(CommError, match=said):
        Connection(
            Endpoint(servers.addresses[0], servers.secret),
            me,
            agreed.to_json() | change,
            limits=PEER_LIMITS,
            deadline_s=10.0,
        )
    assert resident_bytes(servers) - before < 16 << 20


@pytest.mark.full
def test_a_hundred_thousand_hostile_frames_change_nothing(nursery: Nursery, tmp_path: Path) -> None:
    """From peers that hold the secret, most with a digest that is right. Their values are zeros, so what they may legally do
    changes nothing either: every other number that turns up was made up by the server."""
    small = {"a": torch.zeros(10, 3), "b": torch.zeros(15)}
    with parameter_servers(tmp_path, 1, nursery=nursery, environ={"UNISONO_SNAPSHOTS": ""}) as servers:
        good = servers.connect(small, worker=50_000)
        good.init(small)
        chosen = recipe(small)
        good.set_optimizer(chosen)
        agreed = RunSpec(table={key: (tuple(v.shape), v.dtype) for key, v in small.items()}, num_servers=1)
        me = Identity("worker", 7, 0, agreed.job, "")
        asker = Connection(
            Endpoint(servers.addresses[0], servers.secret), me, agreed.to_json(), limits=PEER_LIMITS, deadline_s=20.0
        )
        image = asker.request(json_frame(Op.STATE, {"chunks": [0, 1]})).result(20).payload
        asker.close()
        parts = [(chunk.number, memoryview(bytes(chunk.nbytes))) for chunk in agreed.placement().chunks]
        seeds = [write_chunks(op, parts, dtype="float32", prefix=(0.5, 0)) for op in (Op.PUSH, Op.PUSHPULL)]
        seeds += [write_chunks(op, parts, dtype="float32") for op in (Op.INIT, Op.PULL, Op.ROWS)]
        seeds += [Frame(Op.STATE, flags=WRITE, payload=image), json_frame(Op.STATE, {"chunks": [0, 1]})]
        seeds += [json_frame(Op.OPTIMIZER, chosen.to_json()), json_frame(Op.DONE, {"kind": "unit", "number": 0})]
        seeds += [json_frame(Op.MEMORY, {"fd": 3, "slots": 8, "bytes": 4096}), Frame(Op.HEARTBEAT), Frame(Op.STATS)]
        enemy = Hostile(servers.addresses[0], servers.secret, agreed.job, agreed.to_json(), seeds)
        enemy.send(1000)
        before = resident_bytes(servers)
        enemy.send(99_000)
        assert resident_bytes(servers) - before < 64 << 20
        into = {key: torch.ones_like(value) for key, value in small.items()}
        good.pull(into).wait()
        assert not any(value.any() for value in into.values())
        gradients = {key: torch.full_like(value, 3.0) for key, value in small.items()}
        good.push(gradients, lr=0.5).wait()
        good.pull(into).wait()
        assert all(value.eq(-1.5).all() for value in into.values())
        good.close()
        # it answered nearly all of them, refused most, and none of them was news to it
        assert min(enemy.seen["ACK"], enemy.seen["DATA"]) > 2000, enemy.seen
        assert enemy.seen["ERROR"] > 30_000, enemy.seen
        assert enemy.seen["connections"] > 500, enemy.seen
        assert "Traceback" not in servers.log(0)
        assert "failed at" not in servers.log(0)


@pytest.mark.full
def test_a_thousand_strangers_do_not_keep_a_worker_out(servers: ParameterServers) -> None:
    pid, strangers = servers.processes[0].pid, []
    try:
        for _ in range(1000):
            stranger = socket.create_connection(servers.addresses[0])
            stranger.sendall(os.urandom(40))
            strangers.append(stranger)
        visitor = servers.connect(table(), worker=10)
        visitor.pull(table()).wait()
        visitor.close()
        assert len(list(Path(f"/proc/{pid}/fd").iterdir())) < 700
    finally:
        for stranger in strangers:
            stranger.close()
    wait_until(lambda: len(list(Path(f"/proc/{pid}/fd").iterdir())) < 60, "the strangers are gone")


@pytest.mark.full
def test_another_version_is_named(nursery: Nursery, tmp_path: Path) -> None:
    with parameter_servers(tmp_path, 1, nursery=nursery, program="other_version:serve") as servers:
        said = rf"has not answered for .* \(a frame whose version is {VERSION + 1}\)"
        with pytest.raises(CommError, match=said):
            servers.connect(table(), deadline_s=1.0)
        assert is_running(servers.processes[0].pid)


def test_another_secret_opens_nothing(servers: ParameterServers) -> None:
    enemy = Identity("worker", 11, 0, 0, "")
    with pytest.raises(CommError, match=r"the proof that came from .* is wrong"):
        Connection(Endpoint(servers.addresses[0], bytes(32)), enemy, {}, limits=PEER_LIMITS, deadline_s=10.0)
    assert is_running(servers.processes[0].pid)


def what_another_user_reaches(address: tuple[str, int], pid: int, memory: list[str], folder: str) -> dict[str, Any]:
    """Of a server process: its port, the memory that it shares with a worker, its environment and its files."""

    def tried(attempt: Callable[[], Any]) -> str:
        try:
            attempt()
        except PermissionError:
            return "not permitted"
        except AuthError:
            return "refused"
        return "done"

    def prove(secret: bytes) -> None:
        channel = Channel(socket.create_connection(address, 10), preauth_limits(PEER_LIMITS))
        try:
            with mock.patch.object(hmac, "compare_digest", return_value=True):  # it does not mind who the server is
                client_handshake(channel, secret, Identity("worker", 0, 0, 0, ""), 0, PEER_LIMITS)
        finally:
            channel.close()

    return {
        "uid": os.geteuid(),
        "proofs": [tried(lambda secret=secret: prove(secret)) for secret in (b"", bytes(32), b"guessed" * 5)],
        "memory": [
            tried(lambda path=path, how=how: os.open(path, how)) for path in memory for how in (os.O_RDONLY, os.O_RDWR)
        ],
        "process": [
            tried(lambda name=name: Path(f"/proc/{pid}/{name}").read_bytes()) for name in ("environ", "maps", "mem")
        ],
        "snapshots": tried(lambda: os.listdir(f"{folder}/server-0")),
        "planted": tried(lambda: os.mkdir(f"{folder}/server-0/snapshot-99999999")),
        "signal": tried(lambda: os.kill(pid, signal.SIGTERM)),
    }


@needs_another_user
def test_another_user_reaches_no_part_of_a_server_that_serves_its_job(nursery: Nursery) -> None:
    with public_folder() as folder, begun(folder, nursery=nursery) as servers:
        pid, into = servers.processes[0].pid, {key: torch.ones_like(value) for key, value in table().items()}
        own = servers.connect(table(), worker=12)
        own.pull(into).wait()
        memory = [str(path) for path in Path(f"/proc/{pid}/fd").iterdir() if "memfd:unisono-wire" in os.readlink(path)]
        assert memory, "the worker and the server share memory"
        found = as_another_user(what_another_user_reaches, servers.addresses[0], pid, memory, str(servers.snapshots))
        assert found == {
            "uid": NOBODY,
            "proofs": ["refused"] * 3,
            "memory": ["not permitted"] * 2 * len(memory),
            "process": ["not permitted"] * 3,
            "snapshots": "not permitted",
            "planted": "not permitted",
            "signal": "not permitted",
        }
        again = {key: torch.ones_like(value) for key, value in table().items()}
        own.pull(again).wait()
        assert all(torch.equal(again[key], into[key]) for key in into)
        own.push(table()).wait()
        own.close()
        newcomer = servers.connect(table(), worker=13)
        newcomer.pull(again).wait()
        newcomer.close()
        assert is_running(pid)
