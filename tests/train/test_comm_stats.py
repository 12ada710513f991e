"""What events say of links: bytes and bytes per second, from real runs of each distributed kind.

Bytes by axis are compared with what reaches torch's process groups (``TorchCollectives``).
"""

from __future__ import annotations

import socket
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist
from asynchronous import together, worker
from nursery import Nursery
from parameter_servers import parameter_servers
from pool import Pool
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from unisono.measure.calibration import CALIBRATION_FILE, SHARED_MEMORY, Calibration, LinkRate, add_to_calibration
from unisono.parallel.mesh import GROUP_NAMES
from unisono.parallel.timed_collectives import recording_exposed_time
from unisono.parallel.traffic import GroupTraffic, all_gather_wire_bytes, all_reduce_wire_bytes
from unisono.plan.rules import ParameterPlacement
from unisono.train import comm_stats, loop

STEPS = 6


def told(world: Any, run_dir: str, every: int, **changes: Any) -> dict[str, Any]:
    """The events, and how many bytes the parameters have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm_stats, "_EVENT_EVERY_STEPS", every)
        with tiny.trainer(run_dir, world=world, steps=STEPS, **changes) as run:
            parameters = sum(p.nbytes for p in run.state.sharded.parameters.values())
            run.fit()
    return {"events": events_of(run_dir, world.rank), "parameters": parameters}


def events_of(run_dir: str | Path, rank: int) -> list[dict[str, Any]]:
    found = tiny.events(run_dir, rank)
    for event in found:
        if event["kind"] == "links":
            for link in event["links"]:
                assert link["sent_bytes_per_s"] == pytest.approx(link["sent_bytes"] / event["wall_s"])
                assert link["received_bytes_per_s"] == pytest.approx(link["received_bytes"] / event["wall_s"])
    kinds = [event["kind"] for event in found]
    assert "links" not in kinds[kinds.index("run_end") :]
    return [event for event in found if event["kind"] == "links"]


@pytest.mark.parametrize(
    ("changes", "steps", "share"),
    [
        # every step sends all gradients; 4 steps, and the 2 that were left at the end
        ({"sync": "dist_sync"}, [4, 2], [4, 2]),
        pytest.param({"sync": "dist_sync", "compression": "bf16"}, [4, 2], [2, 1], marks=pytest.mark.full),
        # one round of averages in steps 1 to 4, one in the rest
        pytest.param({"sync": "dist_local", "local_steps": 3}, [4, 2], [1, 1]),
    ],
)
def test_ranks_tell_what_they_gave_to_sums(
    tmp_path: Path, pool: Pool, changes: dict[str, Any], steps: list[int], share: list[float]
) -> None:
    for outcome in pool.run(told, str(tmp_path / "run"), 4, **changes):
        events = outcome["events"]
        assert [event["steps"] for event in events] == steps
        assert [event["step"] for event in events] == [4, 6]
        # a few bytes more: the totals of a step are not of gradients and not counted
        for event, times in zip(events, share, strict=True):
            (link,) = event["links"]
            assert link["peer"].startswith(("shared memory", "gloo"))
            assert link["sent_bytes"] == link["received_bytes"] == times * outcome["parameters"]
            # of two ranks a ring sends exactly that
            (row,) = [row for row in event["axes"] if row["group"] == "dp_replicate"]
            assert (row["axis"], row["ranks"], row["hosts"]) == ("dp", 2, 1)
            assert row["transport"] == link["peer"].partition(":")[0]
            assert row["payload_bytes"] == row["wire_bytes"] == link["sent_bytes"]
            assert row["collectives"] >= times


def with_measured_links(world: Any, run_dir: str, cache: str, rate: float) -> dict[str, Any]:
    """As ``told``, where a sum of any size was measured to go at ``rate`` bytes per second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", cache)
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        path = Path(cache) / "unisono" / CALIBRATION_FILE
        host, ranks = socket.gethostname(), world.world_size
        for transport in ("shared memory", "gloo") if world.rank == 0 else ():
            sizes = {1: 1 / rate, 1 << 30: (1 << 30) / rate}
            links = [
                LinkRate(
                    operation="all_reduce",
                    transport=transport,
                    ranks=ranks,
                    hosts=(host,),
                    nbytes=nbytes,
                    seconds=seconds,
                    spread_frac=0.0,
                )
                for nbytes, seconds in sizes.items()
            ]
            add_to_calibration(path, links=links)
        world.barrier()
        return told(world, run_dir, 6)


def test_the_share_of_what_the_link_was_measured_to_do(tmp_path: Path, pool: Pool) -> None:
    for outcome in pool.run(with_measured_links, str(tmp_path / "run"), str(tmp_path / "cache"), 1e6):
        (event,) = outcome["events"]
        (link,) = event["links"]
        assert link["measured_bytes_per_s"] == pytest.approx(1e6)
        assert link["used_frac"] == pytest.approx(link["sent_bytes_per_s"] / 1e6)
        # memory has no interface
        assert link.get("interface", "lo") == "lo"
        assert ("interface" in link) == link["peer"].startswith("gloo")
        (row,) = [row for row in event["axes"] if row["group"] == "dp_replicate"]
        assert row["expected_s"] == pytest.approx(row["wire_bytes"] / 1e6)
        assert row["measured_bytes_per_s"] == pytest.approx(1e6)
        assert row["used_frac"] == pytest.approx(link["used_frac"])
        assert event["comm/dp_used_frac"] == pytest.approx(row["used_frac"])
        assert [name for name in event if name.startswith("comm/")] == ["comm/dp_used_frac"]
        assert row["expected_latency_s"] == pytest.approx(row["collectives"] / 1e6)  # those of a byte
        assert ("interface" in row) == (row["transport"] == "gloo")


@pytest.mark.parametrize(
    ("row", "expected_s"),
    [
        # a sum of 3 ranks has 4/3 of its bytes on the wire, a gather 2/3: it takes as long as a sum of half of them
        ({"transport": "gloo", "ranks": 3, "sums": 3000}, 0.003),
        ({"transport": "gloo", "ranks": 3, "parts": 3000}, 0.0015),
        ({"transport": SHARED_MEMORY, "ranks": 3, "payload": 3000}, 0.003),
        ({"transport": "gloo", "ranks": 2, "operation": "send", "payload": 3000}, 0.006),
        ({"transport": "gloo", "ranks": 2, "sums": 3000}, None),
        ({"transport": "gloo", "ranks": 3, "hosts": 2, "sums": 3000}, None),
        ({"transport": "gloo", "ranks": 3, "sums": 3000, "wait_is_for_link": False}, None),
    ],
)
def test_the_time_that_traffic_was_measured_to_need(row: dict[str, Any], expected_s: float | None) -> None:
    sums, parts, payload = (row.pop(name, 0) for name in ("sums", "parts", "payload"))
    group = GroupTraffic(**{"axis": "dp", "group": "shard", "hosts": 1, **row})
    wire_bytes = all_reduce_wire_bytes(sums, 3) + all_gather_wire_bytes(parts, 3) + payload
    if group.ranks == 2 and sums:
        wire_bytes = sums
    group.add(sums + parts + payload, wire_bytes, sums + parts // 2 + payload, count=7)
    rate: dict[str, Any] = {"ranks": 3, "hosts": ("a",), "spread_frac": 0.0}
    links = [
        LinkRate(operation="all_reduce", transport=transport, nbytes=nbytes, seconds=nbytes / 1e6, **rate)
        for transport in ("gloo", SHARED_MEMORY)
        for nbytes in (1, 10_000)
    ]
    links.append(LinkRate(operation="send", transport="gloo", nbytes=100, seconds=2e-4, **rate))
    made = comm_stats.axis_row(group, Calibration(links=links), "a", wall_s=2.0)
    assert (made["collectives"], made["wire_bytes_per_s"]) == (7, 7 * wire_bytes / 2.0)
    if expected_s is None:
        assert not {"expected_s", "measured_bytes_per_s", "used_frac"} & made.keys()
        return
    assert made["expected_s"] == pytest.approx(7 * expected_s)
    assert made["expected_latency_s"] == pytest.approx(7e-6)
    assert made["measured_bytes_per_s"] == pytest.approx(wire_bytes / expected_s)
    assert made["used_frac"] == pytest.approx(7 * expected_s / 2.0)


def test_messages_of_many_sizes_take_few_entries() -> None:
    group = GroupTraffic(axis="ep", group="ep", transport="gloo", ranks=2, hosts=1)
    for nbytes in range(5000):
        group.add(2 * nbytes, nbytes, nbytes)
    assert len(group.messages) == 14
    assert sum(each.count for each in group.messages.values()) == 5000
    assert sum(each.wire_bytes for each in group.messages.values()) == 5000 * 4999 // 2


def test_what_is_gathered_comes_from_all_others(tmp_path: Path, pool: Pool) -> None:
    """int8 codes are gathered: of three ranks each sends one and gets two."""
    for outcome in pool.run(told, str(tmp_path / "run"), 6, ranks=3, compression="int8", global_batch=9):
        (event,) = outcome["events"]
        (link,) = event["links"]
        assert link["received_bytes"] == 2 * link["sent_bytes"]
        assert link["peer"] == "gloo: compressed"
        assert STEPS * outcome["parameters"] / 4 < link["sent_bytes"] < STEPS * outcome["parameters"] / 3
        (row,) = [row for row in event["axes"] if row["group"] == "dp_replicate"]
        assert (row["payload_bytes"], row["wire_bytes"]) == (link["sent_bytes"], link["received_bytes"])
        assert row["collectives"] == STEPS


class TorchCollectives(TorchDispatchMode):
    """Counts what torch gives to its process groups, whoever calls: by group [number, bytes of the larger tensor, or of the input
    of an exchange]."""

    SENDS = ("allreduce_", "_allgather_base_", "_reduce_scatter_base_", "alltoall_base_", "send")

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # its operations on local tensors come here too
        name = func.name().removeprefix("c10d::")
        if name in self.SENDS:
            (group,) = [
                arg for arg in args if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type())
            ]
            group = dist.ProcessGroup.unbox(group)
            count = self.calls.setdefault(group.group_desc, [0, 0]) if group.size() > 1 else [0, 0]
            count[0] += 1
            tensors = [arg for arg in pytree.tree_leaves(args) if isinstance(arg, torch.Tensor)]
            count[1] += tensors[1].nbytes if name == "alltoall_base_" else max(tensor.nbytes for tensor in tensors)
        return func(*args, **(kwargs or {}))


def counted_twice(world: Any, run_dir: str, plan: dict[str, Any]) -> dict[str, Any]:
    """The event of a whole run, and what torch was given meanwhile."""
    counting = TorchCollectives()

    @contextmanager
    def both(*args: Any) -> Generator[None]:
        with recording_exposed_time(*args), counting:
            yield

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "recording_exposed_time", both)
        patch.setenv("XDG_CACHE_HOME", f"{run_dir}-cache")  # where no link was measured
        outcome = told(world, run_dir, 100, **plan)
    return {**outcome, "calls": counting.calls}


@pytest.mark.parametrize(
    ("ranks", "plan", "groups"),
    [
        (2, {"dp_shard": 2}, {("dp", "shard")}),
        pytest.param(2, {"dp_shard": 2, "zero": 2, "micro_batch": 2}, {("dp", "shard")}, marks=pytest.mark.full),
        (2, {"tp": 2, "sequence_parallel": True}, {("tp", "tp")}),
        pytest.param(2, {"cp": 2}, {("cp", "cp"), ("dp", "shard")}, marks=pytest.mark.full),
        (2, {"pp": 2, "micro_batch": 2}, {("pp", "pp"), ("pp", "stages"), ("pp", "shared parameters")}),
        (2, {"dp_shard": 2, "ep": 2, "sizes": {"num_experts": 4}}, {("dp", "shard"), ("ep", "ep")}),
        pytest.param(
            4, {"dp_shard": 2, "dp_replicate": 2}, {("dp", "shard"), ("dp", "dp_replicate")}, marks=pytest.mark.full
        ),
    ],
)
def test_the_traffic_of_each_axis(
    tmp_path: Path, pool: Pool, ranks: int, plan: dict[str, Any], groups: set[tuple[str, str]]
) -> None:
    for outcome in pool.run(counted_twice, str(tmp_path / "run"), plan, ranks=ranks):
        (event,) = outcome["events"]
        rows = event["axes"]
        assert {(row["axis"], row["group"]) for row in rows if row["group"] != "all"} == groups
        given: dict[str, list[int]] = {}
        for name, (number, nbytes) in outcome["calls"].items():
            known = given.setdefault(group_of(name), [0, 0])
            known[0] += number
            known[1] += nbytes
        told_of = {row["group"]: [row["collectives"], row["payload_bytes"]] for row in rows}
        # the totals of a step are sent beside sums of gradients: some numbers, which are not counted there
        assert told_of in (given, {name: counts for name, counts in given.items() if name != "all"})
        assert told_of.get("all", given["all"]) == given["all"] == [STEPS, pytest.approx(STEPS * 40, abs=STEPS * 24)]
        for row in rows:
            assert (row["transport"], row["hosts"]) == ("gloo", 1)
            # sums of two ranks, and messages, put the payload on the wire, all else half of it
            assert row["payload_bytes"] // 2 - row["collectives"] <= row["wire_bytes"] <= 2 * row["payload_bytes"]
            assert "expected_s" not in row


def test_the_traffic_of_placements(tmp_path: Path, pool: Pool) -> None:
    """In each of two blocks DTensor sums the outputs, and for gate and up the gradients of the inputs; a step adds up a norm."""
    columns, rows = ("tp", None), (None, "tp")
    placements = tuple(
        ParameterPlacement(module="blocks.*.ffn", parameter=f"{name}.weight", dims=dims)
        for name, dims in (("gate", columns), ("up", columns), ("down", rows))
    )
    replicas = {"tp": 2, "dp_shard": 1, "placements": placements}
    for outcome in pool.run(told, str(tmp_path / "replicas"), 4, ranks=4, **replicas):
        for event in outcome["events"]:
            assert {row["group"] for row in event["axes"]} >= {"tp", "dp_replicate"}
    for outcome in pool.run(told, str(tmp_path / "run"), 4, tp=2, placements=placements):
        assert [event["steps"] for event in outcome["events"]] == [4, 2]
        for event in outcome["events"]:
            (row,) = [row for row in event["axes"] if row["group"] == "tp"]
            activations = 8 * tiny.SEQ_LEN * 16 * 4
            assert row["collectives"] == 7 * event["steps"]
            assert row["payload_bytes"] == row["wire_bytes"] == event["steps"] * (6 * activations + 4)


def group_of(name: str) -> str:
    """The group of an event, by torch's description of it."""
    if name.startswith("stage"):
        return "stages" if name.startswith("stage ") else "shared parameters"
    return name if name in GROUP_NAMES else "all"


def test_one_process_has_no_link(tmp_path: Path, pool: Pool) -> None:
    (outcome,) = pool.run(told, str(tmp_path / "run"), 1, ranks=1)
    assert outcome["events"] == []


@pytest.mark.full
def test_asynchronous_workers_tell_of_each_server(tmp_path: Path, pool: Pool, nursery: Nursery) -> None:
    with parameter_servers(tmp_path, 2, nursery=nursery) as servers:
        outcomes = together(pool, servers, tmp_path / "run", 2, worker, every_steps=0)
        peers = [f"{host}:{port}" for host, port in servers.addresses]
    for rank, outcome in enumerate(outcomes):
        events = [event for event in tiny.events(tmp_path / "run", rank) if event["kind"] == "links"]
        units = len(outcome["samples"])
        assert sum(event["steps"] for event in events) == units
        for event in events:
            assert [link["peer"] for link in event["links"]] == peers
            # gradients go, values come, with headers; at the end a checkpoint's state
            for way in ("sent_bytes", "received_bytes"):
                moved = sum(link[way] for link in event["links"])
                assert units * outcome["bytes"] <= moved < (units + 8) * (outcome["bytes"] + 4096)
            assert {link["apart"] for link in event["links"]} == {""}
            for link in event["links"]:
                assert link["pushes"] > 0
                assert link["lag_square_total"] >= 0
                assert 0 < link["busy_s"] <= min(event["wall_s"], link["served_s"])
                assert link["cpu_s"] > 0
