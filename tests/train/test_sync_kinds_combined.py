"""dist_async and dist_local with precisions, codecs, checkpoints of each other, a bound, and staleness_lr_decay."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from asynchronous import SHARED, digests, one_process, place, samples_of, together, worker
from nursery import Nursery
from parameter_servers import parameter_servers
from pool import Pool
from procs import wait_until

from unisono.data.loading.loader import StepBatch
from unisono.dist import JobSpec
from unisono.train.async_worker import AsyncWorker

pytestmark = pytest.mark.full

LOCAL = {"sync": "dist_local", "local_steps": 4}


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> Callable[[], Any]:
    """Servers belong to one run."""
    return lambda: parameter_servers(tmp_path_factory.mktemp("servers"), 1, nursery=nursery)


def follows(losses: list[float], exact: list[float]) -> bool:
    return losses == pytest.approx(exact, rel=0.02) and losses != exact


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_precisions_of_an_asynchronous_worker(
    tmp_path: Path, pool: Pool, fresh: Callable[[], Any], precision: str
) -> None:
    """As one process of that precision bit for bit, loss scaling included; near fp32."""
    changes: dict[str, Any] = {"precision": precision, "every_steps": 0}
    if precision == "fp16":
        changes["loss_scale"] = 1024.0
    with fresh() as servers:
        (outcome,) = together(pool, servers, tmp_path / "run", 1, **changes)
    (alone,) = pool.run(one_process, str(tmp_path / "alone"), ranks=1, **changes)
    (exact,) = pool.run(one_process, str(tmp_path / "exact"), ranks=1, every_steps=0)
    assert outcome["losses"] == alone["losses"]
    assert outcome["values"] == alone["values"]
    assert follows(outcome["losses"], exact["losses"])


def local(world: Any, run_dir: str, **changes: Any) -> dict[str, Any]:
    return tiny.complete(run_dir, world=world, **{"steps": 8, **LOCAL, **changes})


def test_local_steps_in_bf16_follow_those_in_fp32(tmp_path: Path, pool: Pool) -> None:
    half = pool.run(local, str(tmp_path / "half"), precision="bf16")
    exact = pool.run(local, str(tmp_path / "exact"))
    for one, other in zip(half, exact, strict=True):
        assert follows(one["losses"], other["losses"])


def stopped_local(world: Any, run_dir: str, at: int) -> dict[str, str]:
    """Digests of what ranks agree on, at the end of a round or within one."""
    with tiny.trainer(run_dir, world=world, steps=8, **LOCAL) as run:
        for step in run:
            if step.index == at:
                break
        with run.averaged_weights():
            return digests(run)


def asynchronous_from(
    job: JobSpec, addresses: list[str], secret: str, run_dir: str, ranks: int, **changes: Any
) -> dict[str, Any]:
    world = place(job, addresses, secret, ranks)
    with tiny.trainer(run_dir, world=world, sync="dist_async", **{**SHARED, "steps": 8, **changes}) as run:
        begun, samples = digests(run), [step.sample_ids.tolist() for step in run]
    return {"begun": begun, "samples": samples, "values": digests(run)}


def test_an_asynchronous_run_with_a_codec_is_resumed(tmp_path: Path, pool: Pool, fresh: Callable[[], Any]) -> None:
    """What the servers had is kept bit for bit, and no sample is lost or repeated; residuals start at zero."""
    changes: dict[str, Any] = {"steps": 8, "compression": "int8"}
    with fresh() as servers:
        first, _ = together(pool, servers, tmp_path / "run", 2, stop_at=4, **changes)
    with fresh() as servers:
        rest = together(pool, servers, tmp_path / "run", 2, asynchronous_from, **changes)
    assert first["preempted"]
    assert first["values"] in [outcome["begun"] for outcome in rest]
    ids = chain.from_iterable(chain.from_iterable(outcome["samples"] for outcome in rest))
    assert sorted(ids) == samples_of(first["step"], 8)


def local_from(world: Any, run_dir: str) -> dict[str, Any]:
    with tiny.trainer(run_dir, world=world, steps=12, **LOCAL) as run:
        begun = digests(run)
        return {"begun": begun, "losses": [step.loss for step in run]}


def test_local_steps_go_on_asynchronously_and_back(tmp_path: Path, pool: Pool, fresh: Callable[[], Any]) -> None:
    """Stopped two steps into a round: what the ranks agreed on before it is what goes on; back, it is bit for bit."""
    agreed, same = pool.run(stopped_local, str(tmp_path / "run"), 6)
    assert agreed == same
    with fresh() as servers:
        (middle,) = together(pool, servers, tmp_path / "run", 1, asynchronous_from)
    assert middle["begun"] == agreed
    assert sorted(chain.from_iterable(middle["samples"])) == samples_of(6, 8)
    for outcome in pool.run(local_from, str(tmp_path / "run")):
        assert outcome["begun"] == middle["values"]
        assert len(outcome["losses"]) == 4


def around(
    patch: pytest.MonkeyPatch, started: Callable[[int], None], finishing: Callable[[AsyncWorker, int], None]
) -> None:
    """Call these when a unit has begun and has the values it starts from, and when its push is acknowledged."""
    start, finish = AsyncWorker.start_batch_shard, AsyncWorker.finish_batch_shard

    def start_batch_shard(async_worker: AsyncWorker, batch: StepBatch) -> None:
        start(async_worker, batch)
        started(batch.batch_shard)

    def finish_batch_shard(async_worker: AsyncWorker, batch_shard: int, weight: float) -> None:
        finishing(async_worker, batch_shard)
        finish(async_worker, batch_shard, weight)

    patch.setattr(AsyncWorker, "start_batch_shard", start_batch_shard)
    patch.setattr(AsyncWorker, "finish_batch_shard", finish_batch_shard)


def one_slow(job: JobSpec, *given: Any, **changes: Any) -> dict[str, Any]:
    """When units began and were done; the second worker is slow, and the first begins its second unit while it has one."""
    begun: dict[int, float] = {}
    done: dict[int, float] = {}
    mark = Path(given[2]) / "slow"

    def started(unit: int) -> None:
        begun[unit] = time.monotonic()
        if job.rank == 1:
            mark.touch()
            time.sleep(0.5)
        elif len(begun) == 2:
            wait_until(mark.exists, "the slow worker has a unit", 60)

    with pytest.MonkeyPatch.context() as patch:
        around(patch, started, lambda async_worker, unit: done.update({unit: time.monotonic()}))
        worker(job, *given, **changes)
    return {"begun": begun, "done": done}


@pytest.mark.parametrize("staleness", [0, 1, None])
def test_no_unit_begins_before_those_that_the_bound_asks_for(
    tmp_path: Path, pool: Pool, fresh: Callable[[], Any], staleness: int | None
) -> None:
    (tmp_path / "run").mkdir()
    with fresh() as servers:
        both = together(pool, servers, tmp_path / "run", 2, one_slow, staleness=staleness, every_steps=0, steps=8)
    begun: dict[int, float] = both[0]["begun"] | both[1]["begun"]
    done: dict[int, float] = both[0]["done"] | both[1]["done"]
    assert sorted(begun) == sorted(done) == list(range(16))
    lag = 0
    for unit, at in begun.items():
        open_steps = [other // 2 for other in done if done[other] >= at]
        lag = max(lag, unit // 2 - min(open_steps))
    assert lag > 1 if staleness is None else lag <= staleness


def in_order(
    job: JobSpec, addresses: list[str], secret: str, run_dir: str, ranks: int, staleness_lr_decay: bool
) -> Any:
    """Both compute a unit of the only step from the same values; the first pushes, then the second. The first's values behind
    its own push, and in the end."""
    folder = Path(run_dir)
    world = place(job, addresses, secret, ranks)
    changes: dict[str, Any] = {"kind": "sgd", "lr": 0.1, "momentum": 0.0, "clip_norm": 0.0, "weight_decay": 0.0}

    def values() -> dict[str, np.ndarray]:
        return {name: p.detach().numpy().copy() for name, p in run.state.sharded.parameters.items()}

    def started(unit: int) -> None:
        (folder / f"has.{job.rank}").touch()
        wait_until(lambda: len(list(folder.glob("has.*"))) == 2, "both have a unit", 60)
        if job.rank == 1:
            wait_until((folder / "pushed").exists, "the first has pushed", 60)

    def finishing(dealt: AsyncWorker, unit: int) -> None:
        if job.rank == 0:
            dealt.pull_model()
            own.update(values())
            (folder / "pushed").touch()

    own: dict[str, np.ndarray] = {}
    with pytest.MonkeyPatch.context() as patch:
        around(patch, started, finishing)
        with tiny.trainer(
            folder,
            world=world,
            sync="dist_async",
            steps=1,
            staleness=0,
            staleness_lr_decay=staleness_lr_decay,
            **changes,
        ) as run:
            before = values()
            for _ in run:
                pass
    return before, own, values()


def test_a_late_gradient_is_damped_by_how_late_it_is(tmp_path: Path, pool: Pool, fresh: Callable[[], Any]) -> None:
    """One push of another's came first: it counts 1 / (1 + 1)."""
    steps: list[dict[str, np.ndarray]] = []
    for staleness_lr_decay in (False, True):
        (run_dir := tmp_path / f"staleness_lr_decay-{staleness_lr_decay}").mkdir()
        with fresh() as servers:
            (before, own, last), _ = together(
                pool, servers, run_dir, 2, in_order, staleness_lr_decay=staleness_lr_decay
            )
        steps += [{name: own[name] - before[name] for name in own}, {name: last[name] - own[name] for name in own}]
    first, second, one, damped = steps
    for name in damped:
        other = first[name] + second[name] - one[name]  # who has which unit is open
        np.testing.assert_allclose(damped[name], other / 2, rtol=1e-3, atol=1e-6)
    assert max(float(abs(each).max()) for each in damped.values()) > 1e-4
