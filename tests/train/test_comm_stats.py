"""What events say of links: bytes, bytes per second and exposed time, from real runs of each distributed kind."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import tiny
from asynchronous import together, worker
from nursery import Nursery
from parameter_servers import parameter_servers
from pool import Pool

from unisono.measure.calibration import CALIBRATION_FILE, LinkRate, add_to_calibration
from unisono.train import comm_stats

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
            assert 0 <= event["comm_exposed_s"] <= event["wall_s"]
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
        assert sum(event["comm_exposed_s"] for event in events) > 0


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


def test_what_is_gathered_comes_from_all_others(tmp_path: Path, pool: Pool) -> None:
    """int8 codes are gathered: of three ranks each sends one and gets two."""
    for outcome in pool.run(told, str(tmp_path / "run"), 6, ranks=3, compression="int8", global_batch=9):
        (event,) = outcome["events"]
        (link,) = event["links"]
        assert link["received_bytes"] == 2 * link["sent_bytes"]
        assert link["peer"] == "gloo: compressed"
        assert STEPS * outcome["parameters"] / 4 < link["sent_bytes"] < STEPS * outcome["parameters"] / 3


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
            assert event["comm_exposed_s"] > 0
            # gradients go, values come, with headers; at the end a checkpoint's state
            for way in ("sent_bytes", "received_bytes"):
                moved = sum(link[way] for link in event["links"])
                assert units * outcome["bytes"] <= moved < (units + 8) * (outcome["bytes"] + 4096)
            assert {link["apart"] for link in event["links"]} == {""}
            for link in event["links"]:
                assert link["pushes"] > 0
                assert link["lag_total"] >= 0
                assert 0 < link["busy_s"] <= min(event["wall_s"], link["served_s"])
                assert link["cpu_s"] > 0
