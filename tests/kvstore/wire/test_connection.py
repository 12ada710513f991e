"""Requests over real sockets: order, credits, memory, loss, and the texts of what goes wrong."""

from __future__ import annotations

import re
import time
from typing import Any

import numpy as np
import pytest
from procs import wait_until

from unisono.errors import CommError
from unisono.kvstore.wire.frame import Frame, Limits, Op
from unisono.kvstore.wire.frame_server import Admission


def test_a_push_is_answered_and_a_pull_lands_in_the_memory_given(wires: Any, counting: Any) -> None:
    server = wires.serve(counting)
    connection = wires.connect(server.addresses[0])
    values = np.arange(1000, dtype=np.float32)
    pushed = connection.request(Frame(Op.PUSH, seq=4, payload=[memoryview(b"head"), memoryview(values)]))
    assert pushed.result(10).op is Op.ACK
    got = np.zeros(1001, np.float32)
    reply = connection.request(Frame(Op.PULL, seq=4, entries=2), into=memoryview(got)).result(10)
    assert (reply.op, reply.entries, reply.payload.nbytes) == (Op.DATA, 2, 16)
    np.testing.assert_array_equal(got[1:], values)
    assert counting.peers[0].index == 3
    assert counting.facts == [{"plan": "same"}]
    assert connection.hello == {"seen": 1}
    traffic = connection.traffic()
    assert traffic.sent_bytes > 4004
    assert traffic.received_bytes > 4020
    assert (traffic.num_queued, traffic.num_in_flight, traffic.num_reconnects) == (0, 0, 0)


def test_a_hundred_megabytes_arrive_bit_for_bit(wires: Any, counting: Any) -> None:
    limits = Limits(max_payload_bytes=128 << 20)
    server = wires.serve(counting, limits=limits)
    connection = wires.connect(server.addresses[0], limits=limits)
    values = np.random.default_rng(0).integers(0, 256, 100 << 20, dtype=np.uint8)
    connection.request(Frame(Op.PUSH, seq=1, payload=memoryview(values))).result(60)
    got = np.empty_like(values)
    connection.request(Frame(Op.PULL, seq=1), into=memoryview(got)).result(60)
    assert np.array_equal(got, values)


def test_higher_priority_goes_first_and_equals_in_the_order_of_call(wires: Any, counting: Any) -> None:
    server = wires.serve(counting, admission=Admission(credits_per_connection=1))
    connection = wires.connect(server.addresses[0])
    counting.gate.clear()
    first = connection.request(Frame(Op.BARRIER))
    assert counting.entered.wait(10)
    wanted = [(1, 0), (2, 0), (3, 9), (4, -1), (5, 9)]
    futures = [connection.request(Frame(Op.PUSH, seq=seq), priority=priority) for seq, priority in wanted]
    assert (connection.traffic().num_queued, connection.traffic().num_in_flight) == (5, 1)
    counting.gate.set()
    assert [future.result(10).op for future in (first, *futures)] == [Op.ACK] * 6
    assert counting.arrived == [3, 5, 1, 2, 4]


def test_no_more_requests_fly_than_credits_were_granted(wires: Any, counting: Any) -> None:
    server = wires.serve(counting, admission=Admission(credits_per_connection=3))
    connection = wires.connect(server.addresses[0])
    counting.gate.clear()
    futures = [connection.request(Frame(Op.BARRIER)) for _ in range(10)]
    wait_until(lambda: connection.traffic().num_in_flight == 3, "as many as were granted are under way")
    deadline = time.monotonic() + 0.3
    while time.monotonic() < deadline:
        assert connection.traffic().num_in_flight == 3
    counting.gate.set()
    for future in futures:
        future.result(10)


@pytest.mark.full
def test_an_answer_that_takes_long_is_waited_for(wires: Any, counting: Any) -> None:
    server = wires.serve(counting)
    connection = wires.connect(server.addresses[0], silence_s=2.0)
    counting.gate.clear()
    waiting = connection.request(Frame(Op.BARRIER))
    time.sleep(3.0)
    assert not waiting.done()
    counting.gate.set()
    assert waiting.result(10).op is Op.ACK
    assert connection.traffic().num_reconnects == 0


def test_the_servers_error_is_raised_as_it_was(wires: Any, counting: Any) -> None:
    connection = wires.connect(wires.serve(counting).addresses[0])
    with pytest.raises(CommError) as caught:
        connection.request(Frame(Op.CLAIM)).result(10)
    assert caught.value.problems[0].given == "CLAIM"
    # the connection goes on
    assert connection.request(Frame(Op.PUSH, seq=1)).result(10).op is Op.ACK


def test_an_answer_that_does_not_fit_the_memory_leaves_it_alone(wires: Any, counting: Any) -> None:
    connection = wires.connect(wires.serve(counting).addresses[0])
    connection.request(Frame(Op.PUSH, seq=1, payload=b"x" * 100)).result(10)
    for size in (101, 50):
        memory = bytearray(size)
        with pytest.raises(CommError) as caught:
            connection.request(Frame(Op.PULL, seq=1), into=memoryview(memory)).result(10)
        assert caught.value.problems[0].given == f"PULL was answered with 100 bytes for {size} bytes of memory"
        assert memory == bytearray(size)


def test_a_payload_over_the_limit_is_refused_before_it_is_sent(wires: Any, counting: Any) -> None:
    connection = wires.connect(wires.serve(counting).addresses[0], limits=Limits(max_payload_bytes=1000))
    with pytest.raises(CommError) as caught:
        connection.request(Frame(Op.PUSH, payload=b"x" * 1001))
    assert caught.value.problems[0].given == "PUSH with 1001 bytes"
    assert caught.value.problems[0].rule == "a frame carries at most 1000"
    assert "adamw" in caught.value.problems[0].nearest


def test_what_is_not_answered_when_it_is_closed_fails(wires: Any, counting: Any) -> None:
    connection = wires.connect(wires.serve(counting).addresses[0])
    counting.gate.clear()
    waiting = connection.request(Frame(Op.BARRIER))
    connection.close()
    with pytest.raises(CommError, match="was closed by this process"):
        waiting.result(10)
    with pytest.raises(CommError, match="was closed by this process"):
        connection.request(Frame(Op.PUSH))


def test_a_handler_that_refuses_hello_is_quoted(wires: Any, counting: Any) -> None:
    address = wires.serve(counting).addresses[0]
    with pytest.raises(CommError) as caught:
        wires.connect(address, facts={"plan": "other"})
    assert str(caught.value) == "plan other\n  rule: one plan\n  so:   refused\n  try:  plan same"
    assert counting.left == []


def test_nobody_there_is_said_with_the_address_and_the_time(wires: Any, counting: Any) -> None:
    server = wires.serve(counting)
    (host, port), *_ = server.addresses
    server.close()
    with pytest.raises(CommError) as caught:
        wires.connect((host, port), deadline_s=0.5)
    said = caught.value.problems[0].given
    assert re.match(rf"the server at 127\.0\.0\.1:{port} has not answered for [0-9.]+ s \(.*refused", said), said


def test_after_a_loss_what_was_not_answered_is_sent_again_in_order(
    wires: Any, counting: Any, another_counting: Any
) -> None:
    server = wires.serve(counting, restart_count=1)
    (host, port), *_ = server.addresses
    hellos: list[dict[str, Any]] = []
    connection = wires.connect((host, port), on_reconnect=hellos.append)
    counting.gate.clear()
    futures = [connection.request(Frame(Op.BARRIER))]
    futures += [connection.request(Frame(Op.PUSH, seq=seq)) for seq in range(30)]
    deadline = time.monotonic() + 10
    while connection.traffic().num_in_flight < 8:
        assert time.monotonic() < deadline
    assert counting.entered.wait(10)
    # the barrier keeps all of it unanswered
    with pytest.raises(CommError, match="1 requests are still being handled"):
        server.close(timeout_s=0.2)
    counting.gate.set()
    second = another_counting()
    wires.serve(second, port=port, restart_count=2)
    assert [future.result(20).op for future in futures] == [Op.ACK] * 31
    assert counting.arrived == []
    assert second.arrived == list(range(30))
    assert hellos == [{"seen": 1}]
    assert connection.traffic().num_reconnects == 1
    assert len(counting.left) == 1


def test_the_clock_of_an_idle_connection_starts_when_the_server_is_lost(
    wires: Any, counting: Any, another_counting: Any
) -> None:
    server = wires.serve(counting, restart_count=1)
    (host, port), *_ = server.addresses
    connection = wires.connect((host, port), deadline_s=2.0)
    time.sleep(2.5)  # longer than the deadline, and nothing was asked
    server.close(timeout_s=5)
    time.sleep(0.3)  # the connection finds nobody
    wires.serve(another_counting(), port=port, restart_count=2)
    assert connection.request(Frame(Op.PUSH, seq=0)).result(20).op is Op.ACK


def test_when_the_server_stays_away_everything_that_waits_fails(wires: Any, counting: Any) -> None:
    server = wires.serve(counting)
    connection = wires.connect(server.addresses[0], deadline_s=1.0)
    counting.gate.clear()
    futures = [connection.request(Frame(Op.BARRIER)) for _ in range(12)]
    assert counting.entered.wait(10)
    with pytest.raises(CommError, match="still being handled"):
        server.close(timeout_s=0.2)
    counting.gate.set()
    for future in futures:
        assert "has not answered for" in str(future.exception(20))
    with pytest.raises(CommError, match="has not answered for"):
        connection.request(Frame(Op.PUSH))
