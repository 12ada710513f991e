"""dist_async through the trainer, with real servers: one worker is one process bit for bit, several share the work exactly."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from asynchronous import (
    SHARED,
    STEPS,
    digests,
    one_process,
    place,
    samples_of,
    statistics,
    together,
    worker,
    worker_statistics,
)
from nursery import Nursery
from parameter_servers import ParameterServers, parameter_servers
from pool import Pool
from procs import wait_until

from unisono.checkpoint import verify
from unisono.data.order.permutation import Permutation
from unisono.dist import JobSpec, World
from unisono.errors import ConfigError, LaunchError, PlanError
from unisono.kvstore.backends.server_client import Claim
from unisono.kvstore.server.work_queue import WAIT, WorkItem
from unisono.plan.options import PlanOptions
from unisono.plan.resolve import derive_plan
from unisono.train import async_worker
from unisono.train.async_worker import AsyncWorker


@pytest.fixture
def servers(tmp_path: Path, nursery: Nursery) -> Iterator[ParameterServers]:
    with parameter_servers(tmp_path, 2, nursery=nursery) as made:
        yield made


def worker_that_tells(*given: Any, **changes: Any) -> dict[str, Any]:
    """Of bytes after every unit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(async_worker, "_EVENT_EVERY_SHARDS", 1)
        return worker(*given, **changes)


def worker_in_turn(job: JobSpec, *given: Any, **changes: Any) -> dict[str, Any]:
    """After its first unit a worker waits until the other one has had one too.

    It has claimed a second one by then: before the save that waits for all units there is a third one for the other.
    """
    run_dir = Path(given[2])

    def begun() -> None:
        (run_dir / f"begun.{job.rank}").touch()
        wait_until(lambda: len(list(run_dir.glob("begun.*"))) == 2, "the other worker has a unit too")

    return worker(job, *given, at_step=begun, **changes)


class DealtServers:
    """Hands out these items, each once."""

    def __init__(self, *items: WorkItem) -> None:
        self._items = list(items)

    def claim(self, *, wait: bool) -> Claim:
        return Claim(item=self._items.pop(0), weight=8.0, is_last=False)


def test_a_save_that_is_claimed_ahead_is_not_lost() -> None:
    """While this worker computes a shard, others may have done it too: the save after it is then handed out ahead."""
    claims = AsyncWorker.__new__(AsyncWorker)
    claims.__dict__.update(_bounded=False, _unused_item=None, work_item=WAIT)
    claims.__dict__["_servers"] = DealtServers(WorkItem("unit", 3), WorkItem("save", 4), WorkItem("unit", 4))
    claim = claims._claim_shard
    assert [claim(True), claim(False), claim(False)] == [3, None, None]
    assert claims.work_item == WAIT
    assert claim(True) is None
    assert claims.work_item == WorkItem("save", 4)
    assert claim(True) == 4


def test_statistics_of_a_batch_norm_are_those_of_the_workers_samples(
    tmp_path: Path, pool: Pool, servers: ParameterServers
) -> None:
    (found,) = together(pool, servers, tmp_path / "run", 1, does=worker_statistics)
    (alone,) = pool.run(statistics, str(tmp_path / "alone"), ranks=1)
    assert found["model/1.num_batches_tracked"] == [6]
    assert found == alone


@pytest.mark.parametrize("optim", [{}, pytest.param({"kind": "lamb", "lr": 1e-2}, marks=pytest.mark.full)])
def test_one_worker_is_one_process_bit_for_bit(
    tmp_path: Path, pool: Pool, servers: ParameterServers, optim: dict[str, Any]
) -> None:
    (outcome,) = together(pool, servers, tmp_path / "run", 1, micro_batch=3, **optim)
    (alone,) = pool.run(one_process, str(tmp_path / "alone"), ranks=1, micro_batch=3, **optim)
    assert outcome["losses"] == alone["losses"]
    assert outcome["samples"] == alone["samples"]
    assert outcome["weight"] == alone["weight"]
    assert outcome["values"] == alone["values"]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"staleness": 0}, marks=pytest.mark.full),
        pytest.param({"compression": "int8", "staleness_lr_decay": True}, marks=pytest.mark.full),
    ],
)
def test_workers_share_the_work_and_end_with_the_same_values(
    tmp_path: Path, pool: Pool, servers: ParameterServers, changes: dict[str, Any]
) -> None:
    first, second = together(pool, servers, tmp_path / "run", 2, worker_in_turn, every_steps=3, **changes)
    done = [ids for outcome in (first, second) for ids in outcome["samples"]]
    assert sorted(chain.from_iterable(done)) == samples_of(0, STEPS)
    assert first["step"] == second["step"] == STEPS
    assert first["values"] == second["values"]
    assert min(map(len, (first["samples"], second["samples"]))) > 0
    weights = tiny.RaggedTokens().read(Permutation(tiny.SAMPLES, seed=0)(torch.arange(8 * STEPS).numpy()))["weights"]
    assert first["weight"] == float(weights.sum())
    events = tiny.events(tmp_path / "run", 0)
    assert [event["step"] for event in events if event["kind"] == "checkpoint_saved"] == [3, 6]
    codecs = [event["codec"] for event in events if event["kind"] == "compression"]
    assert codecs == ([changes["compression"]] if "compression" in changes else [])


@pytest.mark.full
def test_an_event_tells_bytes_of_both_directions(tmp_path: Path, pool: Pool, servers: ParameterServers) -> None:
    together(pool, servers, tmp_path / "run", 2, worker_that_tells, compression="bf16", every_steps=0)
    told = [event for rank in (0, 1) for event in tiny.events(tmp_path / "run", rank) if event["kind"] == "compressed"]
    assert len(told) == 2 * STEPS
    for event in told:
        assert event["pull_bytes_in"] == event["bytes_in"] == 2 * event["bytes_out"] > 0
        assert event["residual_norms"]
    # a worker's first is in full
    assert {event["pull_bytes_in"] / event["pull_bytes_out"] for event in told} == {1.0, 2.0}


def test_what_two_workers_saved_one_process_goes_on_from(tmp_path: Path, pool: Pool, servers: ParameterServers) -> None:
    outcomes = together(pool, servers, tmp_path / "run", 2, steps=8, stop_at=3)
    assert all(outcome["preempted"] for outcome in outcomes)
    step = outcomes[0]["step"]
    assert 3 <= step == outcomes[1]["step"] < 8
    assert verify(tmp_path / "run" / "checkpoints" / f"step-{step:08d}") == []
    (rest,) = pool.run(one_process, str(tmp_path / "run"), ranks=1, steps=8)
    assert sorted(chain.from_iterable(rest["samples"])) == samples_of(step, 8)


def test_goes_on_under_another_kind_and_back(tmp_path: Path, pool: Pool, servers: ParameterServers) -> None:
    """Four steps in one process, two asynchronous ones, two more in one process: one worker, so all of it is exact."""
    run_dir = tmp_path / "run"
    changes = {"steps": 8, "every_steps": 0}
    (whole,) = pool.run(one_process, str(tmp_path / "whole"), ranks=1, **changes)
    (first,) = pool.run(part_of_one, str(run_dir), 4, ranks=1, **changes)
    (second,) = together(pool, servers, run_dir, 1, stop_at=6, **changes)
    (third,) = pool.run(one_process, str(run_dir), ranks=1, **changes)
    assert first["losses"] + second["losses"] + third["losses"] == whole["losses"]
    assert third["weight"] == whole["weight"]
    assert third["values"] == whole["values"]


def part_of_one(world: World, run_dir: str, until: int, **changes: Any) -> dict[str, Any]:
    return tiny.complete(run_dir, world=world, stop_after=until, **{**SHARED, **changes})


def test_what_cannot_be_asynchronous_is_refused(tmp_path: Path) -> None:
    def plan(**options: Any) -> None:
        derive_plan(
            PlanOptions(**{"global_batch": 8, "sync": "dist_async", **options}),
            world_size=4,
            device="cpu",
            native_bf16=False,
        )

    with pytest.raises(
        PlanError, match="sync 'dist_async' with tp 2\n  rule: ranks that update without each other hold"
    ):
        plan(tp=2)
    with pytest.raises(PlanError, match="sync 'dist_async' with global_batch 6 on 4 ranks"):
        plan(global_batch=6)
    with pytest.raises(PlanError, match="local_steps 4 with sync 'dist_async'"):
        plan(local_steps=4)
    alone = World.alone(JobSpec(world_size=2, local_world=2))
    with pytest.raises(LaunchError, match="'dist_async' in a job that single started without parameter servers"):
        tiny.trainer(tmp_path / "a", sync="dist_async", world=alone).__enter__()
    with pytest.raises(ConfigError, match="'dist_async' with a stream"):
        tiny.trainer(tmp_path / "b", sync="dist_async", world=alone, data=iter(())).__enter__()
    with pytest.raises(ConfigError, match=r"ema_decay 0.9 with plan.sync 'dist_async'"):
        tiny.trainer(tmp_path / "c", sync="dist_async", world=alone, ema_decay=0.9).__enter__()


def joining(job: JobSpec, addresses: list[str], secret: str, run_dir: str) -> dict[str, Any]:
    """Rank 2 of a job of two. It comes when both have made a unit, and they make a second one when it has made one."""
    folder, began = Path(run_dir), 2 if job.rank == 2 else 0
    names = {"RUN_ID": "run", "RESTART_COUNT": 0, "RANK": job.rank, "WORLD": 2, "LOCAL_RANK": 0, "LOCAL_WORLD": 1}
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0, "SERVERS": 2, "SERVER_ADDRESSES": ",".join(addresses)}
    os.environ.update({f"UNISONO_{name}": str(value) for name, value in names.items()})
    place(job, addresses, secret)

    def begun(ranks: int) -> None:
        wait_until(lambda: len(list(folder.glob("begun.*"))) >= ranks, f"{ranks} workers have made a unit", 60)

    begun(began)
    samples: list[list[int]] = []
    # under a bound nobody takes units ahead, so there are some left
    with tiny.trainer(run_dir, **SHARED, sync="dist_async", staleness=2) as run:
        for step in run:
            samples.append(step.sample_ids.tolist())
            (folder / f"begun.{job.rank}").touch()
            begun(3)
    return {"samples": samples, "values": digests(run), "world": run.plan.mesh.world_size}


@pytest.mark.full
def test_one_that_was_not_there_at_the_start_joins(tmp_path: Path, pool: Pool, servers: ParameterServers) -> None:
    (run_dir := tmp_path / "run").mkdir()
    addresses = [f"{host}:{port}" for host, port in servers.addresses]
    outcomes = pool.run(
        joining, addresses, str(servers.secret_file), str(run_dir), ranks=3, joined=False, timeout_s=150
    )
    assert all(outcome["samples"] for outcome in outcomes)
    done = [ids for outcome in outcomes for ids in outcome["samples"]]
    assert sorted(chain.from_iterable(done)) == samples_of(0, STEPS)
    assert {outcome["world"] for outcome in outcomes} == {2}
    assert outcomes[0]["values"] == outcomes[1]["values"] == outcomes[2]["values"]
    assert [event["kind"] for event in tiny.events(run_dir, 2)].count("run_start") == 1
