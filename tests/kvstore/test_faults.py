"""Workers and servers are killed, stopped, cut off, replaced: every acknowledged push counts once, and the others go on.

Workers push whole numbers, so that what the servers hold at the end says how often each push was applied.
"""

from __future__ import annotations

import itertools
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from chaos import Chaos
from faults import Worker, found, worker
from faults_worker import gradients, sums, table
from nursery import Nursery
from parameter_servers import ParameterServers, parameter_servers, recipe
from procs import wait_until

from unisono.errors import CommError
from unisono.kvstore.server.membership import LEASE_S
from unisono.kvstore.server.snapshot import latest_snapshot_number

NOTICED_S = 6.0  # a killed worker keeps others no longer than this
SMALL = 8192  # bytes of a chunk, so that each server has some of each key
HARM = {"drop": 0.02, "duplicate": 0.1, "reorder": 0.05, "corrupt": 0.02}


def lost_pushes(workers: list[Worker]) -> int:
    """How many the workers say were lost, whole or in part."""
    return sum(int(text.split("has lost ")[1].split()[0]) for each in workers for text in each.said("said"))


def all_but_the_lost(pushes: int, workers: list[Worker]) -> range:
    """How many of ``pushes`` a chunk of a restarted server can hold.

    A snapshot copies one chunk after the other. Of the one push that each worker has under way meanwhile, a chunk may
    have kept its part, though the push is lost to another.
    """
    kept = pushes - lost_pushes(workers)
    return range(kept, kept + len(workers) + 1)


# --- the network (rows 18 and 21 of the fault matrix) ----------------------------------------------------------------


@pytest.mark.parametrize("count", [12, pytest.param(100, marks=pytest.mark.full)])
def test_lost_doubled_swapped_and_damaged_frames_count_once(nursery: Nursery, tmp_path: Path, count: int) -> None:
    with (
        parameter_servers(tmp_path, 2, nursery=nursery) as servers,
        Chaos(servers.addresses[0], seed=1, **HARM) as first,
        Chaos(servers.addresses[1], seed=2, **HARM) as second,
    ):
        through = [first.address, second.address]
        workers = [
            worker(nursery, servers, tmp_path, n, addresses=through, do="pushes", pushes=count) for n in range(2)
        ]
        for each in workers:
            each.finish()
        assert found(servers) == sums(range(count), 2)
        harmed = first.done + second.done
        assert all(harmed[fault] > 0 for fault in HARM) if count == 100 else harmed


@pytest.mark.full
def test_a_worker_cut_off_is_not_waited_for_and_goes_on_when_it_is_back(nursery: Nursery, tmp_path: Path) -> None:
    with (
        parameter_servers(tmp_path, 2, nursery=nursery) as servers,
        Chaos(servers.addresses[0], seed=1) as first,
        Chaos(servers.addresses[1], seed=2) as second,
    ):
        facts: dict[str, Any] = {"do": "units", "agreed": {"num_batch_shards": 12}, "pause_s": 0.1}
        cut_off = worker(nursery, servers, tmp_path, 0, addresses=[first.address, second.address], **facts)
        cut_off.until("claimed")
        for proxy in (first, second):
            proxy.half_open.set()
        other = worker(nursery, servers, tmp_path, 1, **facts)
        other.finish()
        assert found(servers, num_batch_shards=12) == sums(range(12))
        for proxy in (first, second):
            proxy.half_open.clear()
        cut_off.finish()
        assert "worker 0 sent no heartbeat" in servers.log(0)
        assert found(servers, num_batch_shards=12) == sums(range(12))


# --- workers (row 19, and slow ones) ---------------------------------------------------------------------------------


@pytest.mark.full
def test_a_worker_killed_in_the_middle_of_a_push_is_replaced(nursery: Nursery, tmp_path: Path) -> None:
    elements = 200_000
    with parameter_servers(tmp_path, 2, nursery=nursery) as servers:
        facts: dict[str, Any] = {"do": "units", "agreed": {"num_batch_shards": 12}, "elements": elements}
        founder = servers.connect(table(elements), worker=50, num_batch_shards=12)
        founder.init(table(elements))
        founder.close()
        # what it sends trickles, so that it dies with a header and a part of the payload sent
        slow = [Chaos(address, seed=3, bytes_per_s=100_000) for address in servers.addresses]
        with slow[0], slow[1]:
            doomed = worker(nursery, servers, tmp_path, 0, addresses=[each.address for each in slow], **facts)
            wait_until(lambda: any(map(push_under_way, slow)), "a part of a push has arrived")
            doomed.child.kill()
            doomed.child.wait()
        ended_s = time.monotonic()
        assert any(map(push_under_way, slow))
        assert doomed.said("acknowledged") == []
        held = doomed.said("claimed")[-1]
        others = [
            worker(nursery, servers, tmp_path, 1, **facts),
            worker(nursery, servers, tmp_path, 0, incarnation=1, **facts),
        ]
        wait_until(lambda: held in others[0].said("claimed") + others[1].said("claimed"), "its unit is dealt again", 20)
        assert time.monotonic() - ended_s < NOTICED_S
        for each in others:
            each.finish()
        assert found(servers, elements, num_batch_shards=12) == sums(range(12))


def push_under_way(proxy: Chaos) -> bool:
    """Whether a server has a part of a large frame, or had when its proxy ended."""
    return any(0 < sent < whole and whole > 100_000 for sent, whole in proxy.under_way.values())


@pytest.mark.full
def test_a_slow_worker_holds_the_others_within_the_bound(nursery: Nursery, tmp_path: Path) -> None:
    with parameter_servers(tmp_path, 1, nursery=nursery) as servers:
        facts: dict[str, Any] = {"do": "clocks", "clocks": 12, "agreed": {"staleness": 2}, "pause_s": 0.02}
        slow = worker(nursery, servers, tmp_path, 0, **facts)
        slow.until("joined")
        fast = worker(nursery, servers, tmp_path, 1, **facts)
        while len(slow.said("clock")) < 12:
            slow.child.send_signal(signal.SIGSTOP)
            time.sleep(0.3)
            slow.child.send_signal(signal.SIGCONT)
            time.sleep(0.1)
        for each in (slow, fast):
            each.finish()
        reached = [(line["at"], line["reached"]) for line in slow.lines() if "reached" in line]
        let_go = [(line["at"], line["clock"]) for line in fast.lines() if "clock" in line]
        assert [clock for _, clock in let_go] == list(range(1, 13))
        for at, clock in let_go:
            assert max([c for when, c in reached if when <= at], default=0) >= clock - 2


@pytest.mark.full
@pytest.mark.parametrize(("how", "within_s"), [(signal.SIGKILL, NOTICED_S), (signal.SIGSTOP, LEASE_S + 2.0)])
def test_a_silent_worker_is_left_behind_after_its_lease(
    nursery: Nursery, tmp_path: Path, how: signal.Signals, within_s: float
) -> None:
    with parameter_servers(tmp_path, 1, nursery=nursery) as servers:
        facts: dict[str, Any] = {"do": "clocks", "clocks": 40, "agreed": {"staleness": 1}, "pause_s": 0.05}
        silent = worker(nursery, servers, tmp_path, 0, **facts)
        fast = worker(nursery, servers, tmp_path, 1, **facts)
        silent.until("clock", 3)
        fast.until("clock", 3)
        since_s = time.monotonic()
        silent.child.send_signal(how)
        # it is waited for at first, for at least a second, and then no longer
        wait_until(lambda: longest_wait_s(fast, since_s) > 1.0, "the other has gone on", 20)
        at = next(at for at in let_go(fast) if at > since_s + 1.0)
        assert at - since_s < within_s
        fast.finish()
        if how is signal.SIGSTOP:  # and may return
            silent.child.send_signal(signal.SIGCONT)
            silent.finish()
            assert silent.said("clock")[-1] == 40


def let_go(each: Worker) -> list[float]:
    """When its clocks were answered."""
    return [line["at"] for line in each.lines() if "clock" in line]


def longest_wait_s(each: Worker, since_s: float) -> float:
    """Between two of its clocks from then on."""
    times = [since_s, *(at for at in let_go(each) if at > since_s)]
    return max((b - a for a, b in itertools.pairwise(times)), default=0.0)


@pytest.mark.full
def test_without_a_bound_nobody_waits_for_a_stopped_worker(nursery: Nursery, tmp_path: Path) -> None:
    with parameter_servers(tmp_path, 1, nursery=nursery) as servers:
        facts: dict[str, Any] = {"do": "clocks", "clocks": 20, "pause_s": 0.01}
        stopped = worker(nursery, servers, tmp_path, 0, **facts)
        stopped.until("joined")
        stopped.child.send_signal(signal.SIGSTOP)
        worker(nursery, servers, tmp_path, 1, **facts).finish(5)
        stopped.child.send_signal(signal.SIGCONT)
        stopped.finish()


@pytest.mark.full
def test_a_worker_that_stops_reading_costs_the_server_one_answer(nursery: Nursery, tmp_path: Path) -> None:
    elements, pulls = 4_000_000, 6
    asked_bytes = pulls * elements * 6
    with parameter_servers(tmp_path, 1, nursery=nursery, environ={"UNISONO_SNAPSHOTS": ""}) as servers:
        visitor = servers.connect(table(elements), worker=5)
        visitor.init(table(elements))
        into = table(elements)
        visitor.pull(into).wait()
        before = resident_bytes(servers.processes[0].pid)
        reader = worker(nursery, servers, tmp_path, 0, do="pulls", pulls=pulls, elements=elements)
        reader.until("asked")
        reader.child.send_signal(signal.SIGSTOP)
        most = 0
        for _ in range(10):
            visitor.pull(into).wait()
            most = max(most, resident_bytes(servers.processes[0].pid))
            time.sleep(0.1)
        # an answer of 4 MiB and its source for each of two connections; the rest is the allocator's and threads'
        assert most - before < 48 << 20 < asked_bytes
        reader.child.send_signal(signal.SIGCONT)
        reader.finish()
        visitor.close()


def resident_bytes(pid: int) -> int:
    """Memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) << 10


# --- servers (row 20) ------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_without_a_replica_what_is_lost_is_said_and_no_more_than_since_the_snapshot(
    nursery: Nursery, tmp_path: Path
) -> None:
    every_s = 1.5
    with parameter_servers(tmp_path, 1, nursery=nursery, snapshot_every_s=every_s) as servers:
        workers = [worker(nursery, servers, tmp_path, n, do="pushes", pushes=150, pause_s=0.02) for n in range(2)]
        for each in workers:
            each.until("acknowledged", 20)
        wait_until(lambda: snapshot_age_s(servers) < 0.2, "a snapshot is new")
        done = [len(each.said("acknowledged")) for each in workers]
        for each, before in zip(workers, done, strict=True):
            each.until("acknowledged", before + 15)
        servers.kill(0)
        killed_s, age_s = time.monotonic(), snapshot_age_s(servers)
        servers.restart(0)
        for each in workers:
            each.finish()
        lost = lost_pushes(workers)
        assert pushes_held(servers) <= set(all_but_the_lost(2 * 150, workers))
        # every_s, a quarter of a second until the server looks, and what a busy machine adds
        assert age_s < every_s + 0.25 + 1.0
        since = [a for each in workers for a in each.lines() if 0 < killed_s - a.get("at", killed_s) < age_s + 0.1]
        assert 0 < lost <= len(since) < 2 * 150


def snapshot_age_s(servers: ParameterServers) -> float:
    """Since the newest of server 0 was written."""
    written = [path.stat().st_mtime for path in (servers.snapshots / "server-0").iterdir()]
    return time.time() - max(written)


@pytest.mark.parametrize("batch_shard", [None, 7])
def test_a_lost_push_is_said_though_nobody_waited_for_its_answer(
    nursery: Nursery, tmp_path: Path, batch_shard: int | None
) -> None:
    said: list[str] = []
    with parameter_servers(tmp_path, 2, nursery=nursery, snapshot_every_s=3600) as servers:
        agreed = {"num_batch_shards": 120, "chunk_bytes": SMALL, "report": said.append}
        client = servers.connect(table(), worker=0, **agreed)
        client.set_optimizer(recipe(table()))
        client.init(table())
        client.snapshot()
        # a server writes its first one on its own; if that came after the push, nothing would be lost
        folders = [servers.snapshots / f"server-{server}" for server in (0, 1)]
        wait_until(lambda: all(latest_snapshot_number(each) >= 2 for each in folders), "both snapshots")
        refused = client.push({"count": torch.full((3000,), torch.nan)}, batch_shard=3 if batch_shard else None)
        assert refused.wait().refused
        pushed = client.push(gradients(1), batch_shard=batch_shard)
        wait_until(pushed.done, "the answer to the push")
        for server in (0, 1):
            servers.kill(server)
            servers.restart(server)
        client.pull(table()).wait()
        client.close()
    assert sorted(said) == [
        f"server {server} was restarted and has lost 1 acknowledged pushes of worker 0" for server in (0, 1)
    ]


@pytest.mark.parametrize("batch_shard", [None, 7])
def test_a_chunk_that_a_push_did_not_reach_has_lost_nothing_of_it(
    nursery: Nursery, tmp_path: Path, batch_shard: int | None
) -> None:
    """As with frozen parameters and buffers: they are on the servers, and no push has values for them."""
    said: list[str] = []
    with parameter_servers(tmp_path, 1, nursery=nursery, snapshot_every_s=3600) as servers:
        client = servers.connect(table(), worker=0, num_batch_shards=120, report=said.append)
        client.set_optimizer(recipe(table()))
        client.init(table())
        client.push({"count": gradients(1)["count"]}, batch_shard=batch_shard).wait()
        client.snapshot()
        later = None if batch_shard is None else batch_shard + 1
        client.push({"squares": gradients(1)["squares"]}, batch_shard=later).wait()
        servers.kill(0)
        servers.restart(0)
        client.pull(table()).wait()
        client.close()
    assert said == ["server 0 was restarted and has lost 1 acknowledged pushes of worker 0"]


@pytest.mark.full
def test_units_that_a_server_lost_are_said_too(nursery: Nursery, tmp_path: Path) -> None:
    with parameter_servers(tmp_path, 2, nursery=nursery, snapshot_every_s=0.5) as servers:
        facts: dict[str, Any] = {
            "do": "units",
            "agreed": {"num_batch_shards": 120, "chunk_bytes": SMALL},
            "pause_s": 0.02,
        }
        workers = [worker(nursery, servers, tmp_path, n, **facts) for n in range(2)]
        for each in workers:
            each.until("acknowledged", 25)
        servers.kill(1)
        servers.restart(1)
        for each in workers:
            each.finish()
        held_by_other, held_by_killed = sorted(counts(servers, num_batch_shards=120, chunk_bytes=SMALL), reverse=True)
        assert held_by_other == 120
        assert held_by_killed in all_but_the_lost(120, workers)


@pytest.mark.parametrize(("victim", "away_s"), [(1, 0.0), pytest.param(0, 3.0, marks=pytest.mark.full)])
def test_with_a_replica_nothing_acknowledged_is_lost(
    nursery: Nursery, tmp_path: Path, victim: int, away_s: float
) -> None:
    with parameter_servers(tmp_path, 2, nursery=nursery, replicas=2) as servers:
        workers = [worker(nursery, servers, tmp_path, n, do="pushes", pushes=30, pause_s=0.01) for n in range(2)]
        for each in workers:
            each.until("acknowledged", 10)
        servers.kill(victim)
        time.sleep(away_s)
        servers.restart(victim)
        for each in workers:
            each.finish()
        assert lost_pushes(workers) == 0
        assert found(servers) == sums(range(30), 2)


def test_with_a_replica_the_queue_of_work_does_not_go_back(nursery: Nursery, tmp_path: Path) -> None:
    """The snapshot of server 0 is of the beginning; no save is repeated, and no unit but one that was under way."""
    agreed = {"num_batch_shards": 60, "batch_shards_per_save": 10}
    with parameter_servers(tmp_path, 2, nursery=nursery, replicas=2) as servers:
        only = worker(nursery, servers, tmp_path, 0, do="units", agreed=agreed, pause_s=0.01)
        only.until("acknowledged", 33)
        servers.kill(0)
        servers.restart(0)
        only.finish()
        assert len(only.said("claimed")) in (60, 61)
        saves = only.said("saves")
        assert sorted(set(saves)) == [10, 20, 30, 40, 50, 60]
        assert len(saves) in (6, 7)
        assert saves.count(30) == 1
        assert found(servers, **agreed) == sums(range(60))


@pytest.mark.full
def test_one_killed_before_its_first_snapshot_is_told_everything_by_its_replica(
    nursery: Nursery, tmp_path: Path
) -> None:
    nowhere = {"UNISONO_SNAPSHOTS": ""}
    with parameter_servers(tmp_path, 2, nursery=nursery, replicas=2, environ=nowhere) as servers:
        pushing = worker(nursery, servers, tmp_path, 0, do="pushes", pushes=30, pause_s=0.01)
        for victim in (0, 1):
            pushing.until("acknowledged", 10 + 8 * victim)
            servers.kill(victim)
            servers.restart(victim)
        pushing.finish()
        assert lost_pushes([pushing]) == 0
        assert found(servers) == sums(range(30))


@pytest.mark.full
def test_all_servers_killed_at_once_start_again_beside_each_other(nursery: Nursery, tmp_path: Path) -> None:
    with parameter_servers(tmp_path, 2, nursery=nursery, replicas=2, snapshot_every_s=0.3) as servers:
        small = {"chunk_bytes": SMALL}
        pushing = worker(nursery, servers, tmp_path, 0, do="pushes", pushes=100, pause_s=0.02, agreed=small)
        pushing.until("acknowledged", 40)
        for server in (0, 1):
            servers.kill(server)
        for server in (0, 1):
            servers.restart(server)
        pushing.finish(20)
        per_server = [int(text.split("has lost ")[1].split()[0]) for text in pushing.said("said")]
        # a key on each server: the sums are right but for what was said to be lost
        assert all(100 - count in (0, *per_server) for count in counts(servers, **small))


def pushes_held(servers: ParameterServers) -> set[int]:
    """How many pushes the elements of the counting key have had; one number unless a snapshot has parted a push."""
    visitor, into = servers.connect(table(), worker=99), table()
    visitor.pull(into).wait()
    visitor.close()
    return set(into["count"].int().tolist())


def counts(servers: ParameterServers, **agreed: Any) -> list[int]:
    """How many pushes the chunks of the counting key have had; there is one on each of two servers."""
    visitor = servers.connect(table(), worker=98, **agreed)
    into = table()
    visitor.pull(into).wait()
    chunks = visitor.placement.chunks_of("count")
    assert {chunk.server for chunk in chunks} == {0, 1}
    visitor.close()
    return [int(into["count"][chunk.start]) for chunk in chunks]


@pytest.mark.full
def test_a_stopped_server_that_was_replaced_leaves_when_it_wakes(nursery: Nursery, tmp_path: Path) -> None:
    with parameter_servers(tmp_path, 1, nursery=nursery, snapshot_every_s=0.3) as servers:
        pushing = worker(nursery, servers, tmp_path, 0, do="pushes", pushes=60, pause_s=0.02)
        pushing.until("acknowledged", 30)
        stopped_s = time.monotonic()
        old = servers.processes[0]
        old.send_signal(signal.SIGSTOP)
        servers.restart(0)
        pushing.finish()
        assert time.monotonic() - stopped_s < 15  # 6 s of silence, whatever the worker itself has sent meanwhile
        old.send_signal(signal.SIGCONT)
        old.wait(10)
        assert "this server was replaced and leaves" in servers.log(0)
        assert pushes_held(servers) <= set(all_but_the_lost(60, [pushing]))


# --- the machine (rows 22, 23), and those who do not fit (row 24) ----------------------------------------------------


@pytest.mark.full
def test_a_wall_clock_that_jumps_by_a_day_changes_nothing(nursery: Nursery, tmp_path: Path) -> None:
    when = tmp_path / "jump"
    environ = {"FAULTS_JUMP": str(when)}
    program = "faults_worker:jumping_server"
    with parameter_servers(tmp_path, 2, nursery=nursery, environ=environ, program=program) as servers:
        facts: dict[str, Any] = {"do": "units", "agreed": {"num_batch_shards": 30}, "pause_s": 0.05}
        workers = [
            worker(nursery, servers, tmp_path, 0, jump=str(when), **facts),
            worker(nursery, servers, tmp_path, 1, **facts),
        ]
        for each in workers:
            each.until("acknowledged", 3)
        when.touch()
        for each in workers:
            each.finish(20)
            assert each.said("reconnects") == [0]
        assert "sent no heartbeat" not in servers.log(0)
        assert found(servers, num_batch_shards=30) == sums(range(30))


def refusal(nursery: Nursery, folder: Path, program: str, port: int) -> str:
    """What a server says that cannot start."""
    folder.joinpath("secret").touch(mode=0o600)
    folder.joinpath("secret").write_bytes(bytes(range(32)))
    environ = {
        "UNISONO_SERVER": "0",
        "UNISONO_SERVER_ADDRESSES": f"127.0.0.1:{port}",
        "UNISONO_RESTART_COUNT": "0",
        "UNISONO_SECRET_FILE": str(folder / "secret"),
    }
    nursery.start(program, log=folder / "log", environ=environ).wait(20)
    return (folder / "log").read_text()


def test_a_port_that_is_taken_is_named(nursery: Nursery, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refusal(nursery, tmp_path, "unisono.kvstore.server.__main__:main", port)
    assert said.startswith(f"127.0.0.1 port {port} cannot be listened at: Address already in use\n")


def test_too_few_descriptors_are_said_at_the_start(nursery: Nursery, tmp_path: Path) -> None:
    said = refusal(nursery, tmp_path, "faults_worker:cramped_server", 1)
    assert said.startswith("a process may have 64 open files here\n  rule: a server has room for 576")


@pytest.mark.full
def test_who_comes_when_no_thread_can_be_started_is_let_in_later_and_the_others_go_on(
    nursery: Nursery, tmp_path: Path
) -> None:
    crowd = tmp_path / "crowd"
    environ, program = {"FAULTS_CROWD": str(crowd)}, "faults_worker:crowded_server"
    with parameter_servers(tmp_path, 1, nursery=nursery, environ=environ, program=program) as servers:
        first = worker(nursery, servers, tmp_path, 0, do="pushes", pushes=100, pause_s=0.03)
        first.until("acknowledged")
        crowd.touch()
        late = worker(nursery, servers, tmp_path, 1, do="pushes", pushes=5)
        wait_until(lambda: "no thread" in servers.log(0), "one was refused")
        before = len(first.said("acknowledged"))
        first.until("acknowledged", before + 5)
        assert late.said("joined") == []
        crowd.unlink()
        for each in (first, late):
            each.finish()
        assert first.said("reconnects") == [0]
        assert found(servers)[0] == 105


def test_who_does_not_fit_is_refused_by_name_and_at_once(nursery: Nursery, tmp_path: Path) -> None:
    with parameter_servers(tmp_path, 1, nursery=nursery) as servers:
        first = servers.connect(table(), labels={"plan": "a1"})
        since_s = time.monotonic()
        other = {"count": torch.zeros(3001), "squares": torch.zeros(1500)}
        for given, more, text in (
            (other, {"labels": {"plan": "a1"}}, r"key 'count' as \[3001\] float32"),
            (table(), {"labels": {"plan": "b2"}}, "plan b2\n.*it is a1"),
            (table(), {"labels": {"plan": "a1"}, "staleness": 3}, "staleness = 3\n.*it is None"),
        ):
            with pytest.raises(CommError, match=text):
                servers.connect(given, worker=1, **more)
        assert time.monotonic() - since_s < 10
        first.close()


def test_a_worker_with_another_secret_is_refused(nursery: Nursery, tmp_path: Path) -> None:
    with parameter_servers(tmp_path, 1, nursery=nursery) as servers:
        wait_until(lambda: "listens at" in servers.log(0), "the server listens")
        servers.secret = bytes(32)
        with pytest.raises(CommError, match=r"the proof that came from .* is wrong"):
            servers.connect(table(), worker=1)
