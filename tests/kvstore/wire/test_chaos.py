"""Every request is applied exactly once and answered, whatever the network does to the frames."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from chaos import Chaos

from unisono.kvstore.wire.auth import Identity
from unisono.kvstore.wire.frame import Frame, Limits, Op

FAULTS: dict[str, dict[str, float]] = {
    "drop": {"drop": 0.05},
    "duplicate": {"duplicate": 0.3},
    "reorder": {"reorder": 0.3},
    "corrupt": {"corrupt": 0.05},
    "delay": {"delay_s": 0.004},
    "all": {"drop": 0.02, "duplicate": 0.1, "reorder": 0.1, "corrupt": 0.02, "delay_s": 0.001},
}
# a frame that is kept back with nothing behind it, or whose length was changed, is missed after this
QUICK = Limits(max_payload_bytes=1 << 20, message_s=1.0, stall_s=0.5, handshake_s=5.0)


def _exchange(wires: Any, counting: Any, proxy: Chaos, pushes: int, *, silence_s: float = 1.5) -> Any:
    draw = random.Random(5)
    connection = wires.connect(proxy.address, limits=QUICK, silence_s=silence_s, deadline_s=40.0)
    held = {seq: draw.randbytes(draw.choice((0, 10, 5000, 40_000))) for seq in range(pushes)}
    futures = [connection.request(Frame(Op.PUSH, seq=seq, payload=data)) for seq, data in held.items()]
    assert [future.result(60).seq for future in futures] == list(held)
    assert counting.applied == dict.fromkeys(held, 1)
    assert counting.held == held
    for seq in range(0, pushes, 10):
        got = bytearray(len(held[seq]))
        connection.request(Frame(Op.PULL, seq=seq, entries=1), into=memoryview(got)).result(60)
        assert bytes(got) == held[seq]
    return connection


@pytest.mark.parametrize("fault", list(FAULTS))
def test_each_fault_leaves_every_push_applied_once(wires: Any, counting: Any, fault: str) -> None:
    server = wires.serve(counting, limits=QUICK)
    with Chaos(server.addresses[0], seed=11, **FAULTS[fault]) as proxy:
        connection = _exchange(wires, counting, proxy, 100)
        connection.close()
    for name, rate in FAULTS[fault].items():
        assert name == "delay_s" or proxy.done[name] > 0, (name, rate, proxy.done)
    again = fault in ("drop", "corrupt", "all")
    assert connection.traffic().num_reconnects > 0 or not again


@pytest.mark.full
@pytest.mark.parametrize("seed", range(6))
def test_all_faults_at_once_for_longer(wires: Any, counting: Any, seed: int) -> None:
    server = wires.serve(counting, limits=QUICK)
    with Chaos(server.addresses[0], seed=seed, **FAULTS["all"]) as proxy:
        _exchange(wires, counting, proxy, 300).close()


def test_a_half_open_connection_is_given_up_for_another(wires: Any, counting: Any) -> None:
    server = wires.serve(counting, limits=QUICK)
    with Chaos(server.addresses[0], seed=1) as proxy:
        connection = wires.connect(proxy.address, limits=QUICK, silence_s=1.0)
        connection.request(Frame(Op.PUSH, seq=1)).result(10)
        proxy.half_open.set()
        late = connection.request(Frame(Op.PUSH, seq=2))
        time.sleep(0.5)
        assert not late.done()
        proxy.half_open.clear()
        assert late.result(20).seq == 2
        assert connection.traffic().num_reconnects >= 1
        connection.close()


@pytest.mark.full
def test_a_slow_line_is_no_reason_to_reconnect(wires: Any, counting: Any) -> None:
    server = wires.serve(counting, limits=QUICK)
    with Chaos(server.addresses[0], seed=1, bytes_per_s=500_000) as proxy:
        connection = wires.connect(proxy.address, limits=QUICK, silence_s=1.5)
        futures = [connection.request(Frame(Op.PUSH, seq=seq, payload=bytes(400_000))) for seq in range(2)]
        assert [future.result(20).seq for future in futures] == [0, 1]
        assert connection.traffic().num_reconnects == 0
        connection.close()


def test_a_replaced_server_learns_it_and_takes_nothing_more(wires: Any, counting: Any, another_counting: Any) -> None:
    stale: list[int] = []
    old = wires.serve(counting, restart_count=1, on_stale=stale.append)
    loyal = wires.connect(old.addresses[0])
    loyal.request(Frame(Op.PUSH, seq=1)).result(10)
    # somebody who has met the new one comes to the old one
    new = wires.serve(another_counting(), restart_count=2)
    with Chaos(new.addresses[0], seed=1) as proxy:
        wanderer = wires.connect(proxy.address, me=Identity("worker", 4, 1, 77, ""), deadline_s=1.0)
        proxy.target = old.addresses[0]
        new.close()
        error = wanderer.request(Frame(Op.PUSH, seq=7)).exception(20)
        assert "is of restart 1, and restart 2 has been seen" in str(error)
    assert stale == [2]
    refused = loyal.request(Frame(Op.PUSH, seq=2)).exception(10)
    assert "this server is of restart 1, and restart 2 has taken its place" in str(refused)
    assert counting.arrived == [1]
