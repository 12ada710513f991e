"""A server answers requests, whatever order, repetition or nonsense they come in; a replica and a restart lose nothing."""

from __future__ import annotations

import random
import struct
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch
from procs import wait_until
from torch import Tensor

from unisono.errors import CommError, UnisonoError
from unisono.kvstore.compression import find_codec
from unisono.kvstore.server.chunk_optimizer import ServerOptimizerSpec
from unisono.kvstore.server.chunk_payload import BATCH_SHARD, CODED, REFUSED, WRITE, raw_bytes, write_chunks
from unisono.kvstore.server.chunk_state import decode_chunk_state, encode_chunk_state, merge_chunks
from unisono.kvstore.server.parameter_server import ParameterServer
from unisono.kvstore.server.pull_compression import PullDecoder
from unisono.kvstore.server.run_spec import RunSpec
from unisono.kvstore.server.snapshot import latest_snapshot_number
from unisono.kvstore.wire.auth import Identity
from unisono.kvstore.wire.frame import DTYPES, Frame, Op, json_frame, payload_views, read_json
from unisono.optim import OptimOptions
from unisono.optim.groups import Role

TABLE = {"a": ((40, 64), torch.float32), "b": ((7,), torch.float32)}
AGREED = RunSpec(table=TABLE, num_servers=1, chunk_bytes=8192, staleness=1, num_batch_shards=4, batch_shards_per_step=2)
RECIPE = ServerOptimizerSpec(options=OptimOptions(kind="sgd", lr=1.0), roles=dict.fromkeys(TABLE, Role.DECAY))


def received(frame: Frame) -> Frame:
    """As it comes off the wire: one buffer that may be written."""
    return replace(frame, payload=memoryview(bytearray(b"".join(payload_views(frame)))))


class Worker:
    """A worker without network: frames go through bytes."""

    def __init__(
        self, service: ParameterServer, worker: int = 0, incarnation: int = 1, agreed: RunSpec = AGREED
    ) -> None:
        self.service, self.placement = service, agreed.placement()
        self.peer = Identity("worker", worker, incarnation, 0, "here")
        self.greeting = service.hello(self.peer, agreed.to_json())

    def ask(self, frame: Frame) -> Frame:
        return received(self.service.handle(self.peer, received(frame)))

    def json(self, op: Op, **content: object) -> dict:
        return read_json(self.ask(json_frame(op, content)))

    def chunks(self) -> list:
        return self.placement.chunks_on(self.greeting["server"])

    def data(self, op: Op, values: dict[str, Tensor], **fields: object) -> Frame:
        parts = [
            (c.number, raw_bytes(values[c.key].flatten()[c.start : c.start + c.num_elements])) for c in self.chunks()
        ]
        prefix = None if op is Op.INIT else (float("nan"), 0)
        return replace(write_chunks(op, parts, dtype="float32", prefix=prefix), **fields)

    def init(self, values: dict[str, Tensor]) -> None:
        self.ask(self.data(Op.INIT, values))
        self.ask(json_frame(Op.OPTIMIZER, RECIPE.to_json()))

    def push(self, gradients: dict[str, Tensor], seq: int, op: Op = Op.PUSH, flags: int = 0) -> Frame:
        return self.ask(self.data(op, gradients, seq=seq, flags=flags))

    def pull(self) -> dict[str, Tensor]:
        numbers = [n for chunk in self.chunks() for n in (chunk.number, chunk.nbytes)]
        asked = Frame(Op.PULL, entries=len(self.chunks()), payload=struct.pack(f"<{len(numbers)}I", *numbers))
        return self.unpacked(self.ask(asked))

    def state(self) -> Frame:
        return self.ask(json_frame(Op.STATE, {"chunks": [chunk.number for chunk in self.chunks()]}))

    def unpacked(self, answer: Frame) -> dict[str, Tensor]:
        assert answer.op is Op.DATA
        data = memoryview(answer.payload)[8 * answer.entries :]
        pieces: dict[str, list[Tensor]] = {}
        for chunk in self.chunks():
            pieces.setdefault(chunk.key, []).append(torch.frombuffer(data[: chunk.nbytes], dtype=chunk.dtype))
            data = data[chunk.nbytes :]
        assert not data
        return {key: torch.cat(parts) for key, parts in pieces.items()}


def filled(value: float) -> dict[str, Tensor]:
    return {key: torch.full(shape, value) for key, (shape, _) in TABLE.items()}


@pytest.fixture
def service() -> Iterator[ParameterServer]:
    service = ParameterServer(0)
    yield service
    service.close()


def test_init_push_pull(service: ParameterServer) -> None:
    worker = Worker(service)
    assert len(worker.chunks()) == 3  # a key of two chunks, and a small one
    worker.init(filled(1.0))
    answer = worker.push(filled(0.5), seq=0)
    assert (answer.op, answer.entries, answer.clock, answer.flags) == (Op.ACK, 3, 1, 0)
    pulled = worker.pull()
    for key, value in pulled.items():
        assert value.tolist() == pytest.approx([0.4999] * len(value)), key
    again = worker.push(filled(0.5), seq=0)
    assert (again.entries, again.clock) == (0, 1)
    both = worker.push(filled(0.0), seq=1, op=Op.PUSHPULL)
    assert both.clock == 2
    assert all(torch.equal(value, worker.pull()[key]) for key, value in worker.unpacked(both).items())
    late = Worker(service, worker=1)
    assert late.ask(late.data(Op.INIT, filled(9.0))).entries == 0
    assert torch.equal(late.pull()["a"], worker.pull()["a"])
    stats = worker.json(Op.STATS)
    counts = stats["counts"]
    assert (counts["applied"], counts["duplicates"], counts["push"], stats["chunks"]) == (6, 3, 2, 3)
    assert counts["bytes_in"] > 3 * 2567 * 4
    assert Worker(service, worker=0, incarnation=2).greeting["seq"] == 2


class Coded(Worker):
    """A worker that has its pulls coded; bf16, and whole numbers, so that codes are exact."""

    def __init__(self, service: ParameterServer, **more: int) -> None:
        super().__init__(service, agreed=replace(AGREED, codec="bf16"), **more)
        self.copies = PullDecoder(find_codec("bf16"))

    def asks(self, op: Op = Op.PULL, seq: int = 0) -> Frame:
        """A pull, or a push of -1 and a pull."""
        chunks = self.chunks()
        self.based = self.copies.bases(chunks)
        if op is Op.PULL:
            return write_chunks(op, [(c.number, memoryview(b"")) for c in chunks], dtype="float32", based=self.based)
        parts = [(c.number, raw_bytes(-torch.ones(c.num_elements))) for c in chunks]
        return replace(write_chunks(op, parts, dtype="float32", prefix=(float("nan"), 0), based=self.based), seq=seq)

    def takes(self, answer: Frame) -> tuple[int, set[float]]:
        """Its codec, and what the values are."""
        into = [torch.empty(c.num_elements) for c in self.chunks()]
        self.copies.decode(answer, self.chunks(), self.based, [raw_bytes(each) for each in into])
        return answer.codec, {float(each) for value in into for each in value.unique()}


PLAIN = ServerOptimizerSpec(
    options=OptimOptions(kind="sgd", lr=1.0, momentum=0.0), roles=dict.fromkeys(TABLE, Role.NO_DECAY)
)


@pytest.fixture
def timeless() -> Iterator[ParameterServer]:
    """No lease ends, however slow the machine."""
    service = ParameterServer(0, now=lambda: 0.0)
    yield service
    service.close()


def test_values_come_back_coded(timeless: ParameterServer) -> None:
    service = timeless
    worker = Coded(service)
    worker.ask(worker.data(Op.INIT, filled(1.0)))
    worker.ask(json_frame(Op.OPTIMIZER, PLAIN.to_json()))
    assert worker.takes(worker.ask(worker.asks())) == (0, {1.0})
    assert worker.takes(worker.ask(worker.asks(Op.PUSHPULL))) == (CODED, {2.0})
    both = worker.asks(Op.PUSHPULL, seq=1)
    lost = worker.ask(both)
    late = Worker(service, worker=1, agreed=replace(AGREED, codec="bf16"))
    late.push(filled(-1.0), seq=0)
    again = worker.ask(both)
    assert (bytes(again.payload), again.clock) == (bytes(lost.payload), 2)  # as it was then
    assert worker.takes(again) == (CODED, {3.0})
    assert worker.takes(worker.ask(worker.asks())) == (CODED, {4.0})
    assert set(late.pull()["a"].tolist()) == {4.0}  # who names no base is answered in full
    refused = worker.asks(Op.PUSHPULL, seq=2)
    nan = (torch.frombuffer(bytearray(b"".join(payload_views(refused))), dtype=torch.uint8)).clone()
    nan[-4:] = torch.tensor([float("nan")]).view(torch.uint8)
    answer = worker.ask(replace(refused, payload=memoryview(nan.numpy())))
    assert answer.flags & REFUSED
    assert worker.takes(answer) == (CODED, {4.0})


@pytest.mark.parametrize("how", ["load", "leave", "die", "replace"])
def test_shadows_go_with_their_worker_and_with_replaced_values(how: str) -> None:
    now = [0.0]
    service = ParameterServer(0, now=lambda: now[0])
    try:
        worker = Coded(service)
        worker.ask(worker.data(Op.INIT, filled(1.0)))
        assert [worker.takes(worker.ask(worker.asks()))[0] for _ in range(2)] == [0, CODED]
        match how:
            case "load":
                worker.ask(replace(worker.state(), op=Op.STATE, flags=WRITE))
            case "leave":
                worker.ask(Frame(Op.BYE))
            case "die":
                now[0] += 7.0
                wait_until(lambda: service.num_live_workers == 0, "the end of a lease")
            case _:
                worker.service.hello(
                    replace(worker.peer, worker_restart_count=2), replace(AGREED, codec="bf16").to_json()
                )
                worker.peer = replace(worker.peer, worker_restart_count=2)
        assert [worker.takes(worker.ask(worker.asks()))[0] for _ in range(2)] == [0, CODED]
    finally:
        service.close()


def test_an_earlier_process_of_a_worker_is_fenced(service: ParameterServer) -> None:
    old = Worker(service, incarnation=1)
    old.init(filled(0.0))
    Worker(service, incarnation=2)
    with pytest.raises(CommError, match="worker 0 of restart 1"):
        old.push(filled(1.0), seq=0)
    with pytest.raises(CommError, match="restart 2 has taken over"):
        Worker(service, incarnation=1)


def test_a_non_finite_push_is_flagged(service: ParameterServer) -> None:
    worker = Worker(service)
    worker.init(filled(0.0))
    answer = worker.push(filled(float("nan")), seq=0)
    assert (answer.entries, answer.flags) == (0, REFUSED)
    assert worker.pull()["b"].tolist() == [0.0] * 7


def test_rows(service: ParameterServer) -> None:
    worker = Worker(service)
    worker.init(filled(0.0))
    ids = torch.tensor([0, 3])
    part = memoryview(raw_bytes(ids).tobytes() + raw_bytes(torch.ones(2, 64)).tobytes())
    ask = write_chunks(Op.ROWS, [(0, part)], dtype="float32", prefix=(2.0, 0))
    assert worker.ask(replace(ask, flags=WRITE, seq=0)).entries == 1
    got = worker.ask(write_chunks(Op.ROWS, [(0, raw_bytes(torch.tensor([2, 3])))], dtype="float32"))
    values = torch.frombuffer(memoryview(got.payload)[8:], dtype=torch.float32).view(2, 64)
    assert values.tolist() == [[0.0] * 64, [-2.0] * 64]
    with pytest.raises(CommError, match="with 7 bytes of rows"):
        worker.ask(write_chunks(Op.ROWS, [(0, memoryview(bytes(7)))], dtype="float32"))


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (
            replace(AGREED, table=TABLE | {"b": ((8,), torch.float32)}),
            r"worker 1 has key 'b' as \[8\] float32\n.*it is \[7\] float32",
        ),
        (replace(AGREED, table=TABLE | {"c": ((8,), torch.float32)}), r"has key 'c' as \[8\] float32\n.*it is absent"),
        (replace(AGREED, staleness=None), "has staleness = None\n.*it is 1"),
        (replace(AGREED, num_batch_shards=9), "has units = 9\n.*it is 4"),
    ],
)
def test_a_worker_with_another_table_is_not_let_in(service: ParameterServer, other: RunSpec, text: str) -> None:
    Worker(service)
    with pytest.raises(CommError, match=text):
        Worker(service, worker=1, agreed=other)


@pytest.mark.parametrize(
    "change",
    [
        {"table": 3},
        {"servers": -1},
        {"units": "4"},
        {"table": {"a": [[2], "pickle"]}},
        {"table": {"a": [[1 << 60], "int8"]}},
    ],
)
def test_a_hello_that_is_none(service: ParameterServer, change: dict) -> None:
    with pytest.raises(CommError, match="a hello that cannot be read"):
        service.hello(Identity("worker", 0, 1, 0, ""), AGREED.to_json() | change)


def claimed(worker: Worker, seq: int = 0) -> tuple[str, int]:
    answer = read_json(worker.ask(replace(json_frame(Op.CLAIM, {"wait_s": 0}), seq=seq)))
    return answer["kind"], answer["number"]


def begin(worker: Worker) -> None:
    assert claimed(worker) == ("begin", 0)
    assert worker.json(Op.DONE, kind="begin", number=0) == {"new": True}


def test_work_is_claimed_done_and_dealt_again(service: ParameterServer) -> None:
    first, second = Worker(service, 0), Worker(service, 1)
    begin(first)
    assert claimed(first, 1) == ("unit", 0)
    assert claimed(first, 1) == ("unit", 0)  # the answer was lost
    assert claimed(second, 1) == ("unit", 1)
    first.ask(Frame(Op.BYE))
    assert claimed(second, 2) == ("unit", 0)
    assert second.ask(json_frame(Op.DONE, {"kind": "stop"})).op is Op.ACK
    assert claimed(second, 9) == ("wait", 0)
    for unit in (0, 1):
        assert second.json(Op.DONE, kind="unit", number=unit) == {"new": True}
    assert claimed(second, 3) == ("save", 2)
    assert second.json(Op.DONE, kind="save", number=2) == {"new": True}
    assert claimed(second, 4) == ("stopped", 2)
    with pytest.raises(CommError, match="number = -3"):
        second.json(Op.DONE, kind="unit", number=-3)
    with pytest.raises(CommError, match="kind is begin, unit, save, stop or finish"):
        second.json(Op.DONE, kind="rest", number=0)
    assert claimed(first, 2) == ("stopped", 2)  # one that comes back joins again


def test_a_unit_that_two_workers_computed_is_applied_once(service: ParameterServer) -> None:
    first, second = Worker(service, 0), Worker(service, 1)
    first.init(filled(0.0))
    assert first.push(filled(1.0), seq=2, flags=BATCH_SHARD).entries == 3
    assert second.push(filled(1.0), seq=2, flags=BATCH_SHARD).entries == 0
    assert second.push(filled(1.0), seq=2).entries == 3  # its own number 2 is another one


def test_a_barrier_opens_for_the_living(service: ParameterServer) -> None:
    workers = [Worker(service, number) for number in range(3)]
    arrived: list[int] = []

    def arrive(worker: Worker) -> None:
        worker.json(Op.STATS)
        worker.ask(json_frame(Op.BARRIER, {"number": 0}))
        arrived.append(worker.peer.index)

    threads = [threading.Thread(target=arrive, args=(worker,)) for worker in workers[:2]]
    for thread in threads:
        thread.start()
    threads[0].join(0.2)
    assert not arrived
    workers[2].ask(Frame(Op.BYE))
    for thread in threads:
        thread.join(10)
    assert sorted(arrived) == [0, 1]
    workers[0].ask(json_frame(Op.BARRIER, {"number": 0}))  # an answer that was lost
    workers[2].ask(Frame(Op.BYE))


def test_who_waits_at_a_later_barrier_has_passed_the_earlier_ones() -> None:
    """A restarted server has forgotten barrier 5; one worker asks for it again, the other is already at 6."""
    service = ParameterServer(0)
    ahead, behind = Worker(service, 0), Worker(service, 1)
    waiting = threading.Thread(target=lambda: ahead.ask(json_frame(Op.BARRIER, {"number": 6})))
    waiting.start()
    waiting.join(0.1)
    behind.ask(json_frame(Op.BARRIER, {"number": 5}))
    assert waiting.is_alive()
    behind.ask(json_frame(Op.BARRIER, {"number": 6}))
    waiting.join(10)
    assert not waiting.is_alive()
    service.close()


def test_a_stopping_server_lets_everyone_go() -> None:
    service = ParameterServer(0)
    worker, _ = Worker(service, 0), Worker(service, 1)
    errors: list[str] = []

    def wait(frame: Frame) -> None:
        try:
            worker.ask(frame)
        except CommError as error:
            errors.append(str(error))

    threads = [
        threading.Thread(target=wait, args=(frame,))
        for frame in (json_frame(Op.BARRIER, {"number": 0}), Frame(Op.TICK, clock=9))
    ]
    for thread in threads:
        thread.start()
    threads[0].join(0.1)
    service.close()
    for thread in threads:
        thread.join(10)
    assert sorted("stopping" in text for text in errors) == [True, True]


def test_a_claim_that_waits_and_is_sent_again_takes_one_unit(service: ParameterServer) -> None:
    holder, worker = Worker(service, 0), Worker(service, 1)
    begin(holder)
    for seq in range(4):
        assert claimed(holder, seq + 1) == ("unit", seq)
    units: list[int] = []
    claim = replace(json_frame(Op.CLAIM, {"wait_s": 20}), seq=1)
    threads = [threading.Thread(target=lambda: units.append(read_json(worker.ask(claim))["number"])) for _ in range(2)]
    for thread in threads:
        thread.start()
    threads[0].join(0.1)
    holder.ask(Frame(Op.BYE))
    holder.ask(Frame(Op.BYE))
    for thread in threads:
        thread.join(10)
    assert units == [0, 0]


def test_a_unit_is_not_dealt_to_one_who_died_while_it_waited(service: ParameterServer) -> None:
    holder, dead, other = (Worker(service, number) for number in range(3))
    begin(holder)
    for seq in range(4):
        assert claimed(holder, seq + 1) == ("unit", seq)
    errors: list[str] = []

    def claim() -> None:
        with pytest.raises(CommError) as info:
            dead.json(Op.CLAIM, wait_s=20)
        errors.append(str(info.value))

    thread = threading.Thread(target=claim)
    thread.start()
    thread.join(0.1)
    Worker(service, 1, incarnation=2)
    holder.ask(Frame(Op.BYE))  # what it held goes to the one who waits
    thread.join(10)
    assert "worker 1 of restart 1" in errors[0]
    assert [claimed(other, seq) for seq in range(4)] == [("unit", seq) for seq in range(4)]


def test_a_lost_worker_gives_its_units_back_and_holds_nobody_up() -> None:
    said: list[str] = []
    service = ParameterServer(0, say=said.append)
    lost, alive = Worker(service, 0), Worker(service, 1)
    begin(lost)
    assert claimed(lost, 1) == ("unit", 0)
    service.gone(lost.peer)
    beat = threading.Thread(target=lambda: [alive.ask(Frame(Op.HEARTBEAT)) for _ in range(3)])
    beat.start()
    assert alive.ask(Frame(Op.TICK, clock=2)).clock == 2  # waits for the lease of the other to end
    beat.join()
    assert claimed(alive, 1) == ("unit", 0)
    assert any("worker 0 sent no heartbeat" in text for text in said)
    service.close()


def test_a_snapshot_continues(tmp_path: Path) -> None:
    service = ParameterServer(0, snapshots=tmp_path)
    worker = Worker(service)
    worker.init(filled(1.0))
    wait_until(lambda: latest_snapshot_number(tmp_path) == 1, "its own first snapshot, as soon as there are values")
    worker.push(filled(0.25), seq=0)
    worker.ask(Frame(Op.TICK, clock=3))
    begin(worker)
    worker.ask(replace(json_frame(Op.CLAIM, {}), seq=1))
    worker.json(Op.DONE, kind="unit", number=0)
    assert worker.json(Op.SNAPSHOT) == {"number": 3}  # the begin of the run wrote one too
    before = worker.pull()
    worker.push(filled(0.25), seq=1)
    service.close()

    said: list[str] = []
    again = ParameterServer(0, snapshots=tmp_path, say=said.append)
    back = Worker(again)
    assert "continues from snapshot 3" in said[0]
    assert (back.greeting["clock"], back.greeting["seq"], back.greeting["optimizer"]) == (3, 1, True)
    assert all(torch.equal(value, before[key]) for key, value in back.pull().items())
    assert back.push(filled(0.25), seq=0).entries == 0
    assert back.push(filled(0.25), seq=1).entries == 3
    assert claimed(back) == ("unit", 1)
    again.close()


def test_a_push_that_a_snapshot_lacks_is_made_again(tmp_path: Path) -> None:
    """It was acknowledged; then the server was killed, before it was told that the batch shard is done."""
    service = ParameterServer(0, snapshots=tmp_path)
    worker = Worker(service)
    worker.init(filled(1.0))
    wait_until(lambda: latest_snapshot_number(tmp_path) == 1, "its own first snapshot")
    begin(worker)
    claim = read_json(worker.ask(replace(json_frame(Op.CLAIM, {}), seq=1)))
    assert (claim["kind"], claim["number"]) == ("unit", 0)
    worker.json(Op.SNAPSHOT)
    worker.push(filled(0.25), seq=0, flags=BATCH_SHARD)
    service.close()
    again = ParameterServer(0, snapshots=tmp_path)
    back = Worker(again)
    done = {"kind": "unit", "number": 0, "history_id": claim["history_id"]}
    assert back.json(Op.DONE, **done) == {"new": False}
    second = back.json(Op.CLAIM)
    assert (second["kind"], second["number"]) == ("unit", 0)
    assert back.push(filled(0.25), seq=0, flags=BATCH_SHARD).entries == 3
    assert back.json(Op.DONE, **{**done, "history_id": second["history_id"]}) == {"new": True}
    again.close()


def test_a_run_begins_once_whenever_the_server_is_killed_after_that(tmp_path: Path) -> None:
    service = ParameterServer(0, snapshots=tmp_path)
    worker = Worker(service)
    assert claimed(worker) == ("begin", 0)
    worker.init(filled(1.0))
    wait_until(lambda: latest_snapshot_number(tmp_path) > 0, "the first snapshot, with all values")
    worker.json(Op.SNAPSHOT)
    worker.json(Op.DONE, kind="begin", number=2)
    killed_here = ParameterServer(0, snapshots=tmp_path)
    assert claimed(Worker(killed_here, incarnation=2)) == ("unit", 2)
    for each in (service, killed_here):
        each.close()


def test_an_acknowledged_push_is_on_the_replica() -> None:
    agreed = replace(AGREED, num_servers=2, num_batch_shards=0)
    backup = ParameterServer(1)
    link = Identity("server", 0, 1, 0, "server 0")
    backup.hello(link, agreed.to_json())
    primary = ParameterServer(0, forward=lambda agreed, frame: backup.handle(link, received(frame)))
    worker = Worker(primary, agreed=agreed)
    worker.init(filled(1.0))
    for seq in range(3):
        worker.push(filled(0.1), seq=seq)
    replaced = ParameterServer(1)  # the backup is killed and starts with nothing
    replaced.hello(link, agreed.to_json())
    backup.close()
    backup = replaced
    worker.push(filled(0.1), seq=3)
    assert (
        worker.json(Op.STATS)["counts"]["mirrored_whole"] == 2
    )  # after the first push, which knew no optimizer, and now
    worker.push(filled(0.1), seq=4)
    primary.close()

    restarted = ParameterServer(0)
    for chunk in worker.chunks():  # one by one, so that a frame stays small
        state = backup.handle(link, json_frame(Op.STATE, {"chunks": [chunk.number]}))
        restarted.adopt_replica_state(b"".join(payload_views(state)))
    back = Worker(restarted, agreed=agreed)
    assert all(torch.equal(value, worker.pull()[key]) for key, value in back.pull().items())
    assert [back.push(filled(0.1), seq=seq).entries for seq in (4, 5)] == [0, len(back.chunks())]
    for service in (backup, restarted):
        service.close()


def test_finished_work_is_on_the_replica_before_later_work_is_handed_out() -> None:
    agreed = replace(AGREED, num_servers=2, num_batch_shards=8, batch_shards_per_save=4, staleness=None)
    link, is_reachable, numbers = Identity("server", 0, 1, 0, "server 0"), True, count()
    backup = ParameterServer(1)

    def forward(agreed: RunSpec, frame: Frame) -> Frame:
        if not is_reachable:
            raise CommError(given="a replica that is away", rule="", consequence="", nearest="")
        return backup.handle(link, received(frame))

    def next_item(worker: Worker) -> tuple[str, int]:
        return claimed(worker, seq=next(numbers))

    def restarted(number: int) -> Worker:
        """At a server 0 that has nothing but what the replica has."""
        service = ParameterServer(0)
        answer = backup.handle(link, json_frame(Op.STATE, {"chunks": []}))
        service.adopt_replica_state(b"".join(payload_views(answer)))
        services.append(service)
        return Worker(service, worker=number, agreed=agreed)

    backup.hello(link, agreed.to_json())
    primary = ParameterServer(0, forward=forward)
    services = [backup, primary]
    worker = Worker(primary, agreed=agreed)
    assert next_item(worker) == ("begin", 0)
    worker.json(Op.DONE, kind="begin", number=0)
    for number in range(4):
        assert next_item(worker) == ("unit", number)
        worker.json(Op.DONE, kind="unit", number=number, weight=2.0)
    assert next_item(restarted(1)) == ("save", 4)
    assert next_item(worker) == ("save", 4)
    worker.json(Op.DONE, kind="save", number=4)
    is_reachable = False
    assert next_item(worker) == ("unit", 4)
    with pytest.raises(CommError, match="a replica that is away"):
        worker.json(Op.DONE, kind="unit", number=4)
    is_reachable = True
    assert next_item(restarted(2)) == ("unit", 4)
    worker.json(Op.DONE, kind="unit", number=4)  # sent again, and told again
    answer = restarted(3).json(Op.CLAIM)
    assert (answer["kind"], answer["number"], answer["weight"]) == ("unit", 5, 8.0)
    for content in ({}, {"units": "many"}):
        image = encode_chunk_state({"recipe": None, "chunks": {}, "deal": content}, {})
        with pytest.raises(CommError, match="a work queue that cannot be read"):
            backup.handle(link, Frame(Op.STATE, flags=WRITE, payload=image))
    for service in services:
        service.close()


def test_state_goes_out_and_comes_in_as_a_checkpoint_names_it(service: ParameterServer) -> None:
    worker = Worker(service)
    worker.init(filled(1.0))
    worker.push(filled(0.5), seq=0)
    image = worker.state()
    whole = merge_chunks(worker.placement, decode_chunk_state(bytes(image.payload))[1])
    assert whole.keys() == {"a", "b", "optim/momentum_buffer/a", "optim/momentum_buffer/b"}
    worker.push(filled(0.5), seq=1)
    worker.ask(Frame(Op.STATE, flags=WRITE, payload=image.payload))
    assert torch.equal(worker.pull()["a"], whole["a"].flatten())
    with pytest.raises(CommError, match="state of 4 bytes"):
        worker.ask(Frame(Op.STATE, flags=WRITE, payload=b"spam"))


def test_requests_that_are_none(service: ParameterServer) -> None:
    with pytest.raises(CommError, match="a server that knows no run"):
        service.handle(Identity("worker", 0, 1, 0, ""), Frame(Op.PULL))
    worker = Worker(service)
    with pytest.raises(CommError, match="ACK as a request"):
        worker.ask(Frame(Op.ACK))
    assert worker.json(Op.SNAPSHOT) == {"number": None}  # it has no folder for them
    fourth = ParameterServer(3)
    with pytest.raises(CommError, match="knows of 1 servers, at server 3"):
        Worker(fourth)
    fourth.close()


@pytest.mark.parametrize("count", [5000, pytest.param(100_000, marks=pytest.mark.full)])
def test_mutated_frames_change_nothing_but_what_they_say(service: ParameterServer, count: int) -> None:
    """Security row 7: entries, sizes, dtypes, codecs and row numbers are taken from strangers' bytes with care."""
    rng = random.Random(7)
    worker = Coded(service)
    worker.init(filled(1.0))
    ids = memoryview(raw_bytes(torch.tensor([0, 3])).tobytes() + raw_bytes(torch.ones(2, 64)).tobytes())
    numbers = struct.pack("<4I", 0, 4, 1, 4)
    seeds = [
        worker.data(Op.PUSH, filled(0.1)),
        worker.data(Op.INIT, filled(0.1)),
        replace(write_chunks(Op.ROWS, [(0, ids)], dtype="float32", prefix=(0.1, 0)), flags=WRITE),
        write_chunks(Op.ROWS, [(0, raw_bytes(torch.tensor([2, 3])))], dtype="float32"),
        Frame(Op.PULL, entries=2, payload=numbers),
        worker.asks(),
        worker.asks(Op.PUSHPULL),
        json_frame(Op.OPTIMIZER, RECIPE.to_json()),
        json_frame(Op.DONE, {"kind": "unit", "number": 1}),
        json_frame(Op.STATE, {"chunks": [0, 1, 2]}),
        Frame(Op.STATE, flags=WRITE, payload=worker.state().payload),
    ]
    refused = 0
    for seq in range(count):
        frame = received(rng.choice(seeds))
        data = bytearray(frame.payload)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(min(len(data), 80))
            data[at] = rng.choice([0, 1, 0x7F, 0xFF, rng.randrange(256)])
        if rng.random() < 0.3:
            del data[rng.randrange(len(data)) :]
        change = {
            "entries": rng.choice([0, 1, 2, 3, 200, 65535]),
            "codec": rng.choice([0, CODED, 9]),
            "flags": rng.randrange(16),
            "dtype": rng.randrange(len(DTYPES)),
        }
        frame = replace(
            frame, seq=seq, payload=memoryview(data), **{k: v for k, v in change.items() if rng.random() < 0.2}
        )
        try:
            service.handle(worker.peer, frame)
        except UnisonoError:
            refused += 1
    assert refused > count // 2
    assert worker.pull()["a"].shape == (2560,)
    assert worker.push(filled(0.0), seq=10**6).entries == 3
