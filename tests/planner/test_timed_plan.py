"""Step times from ranks that were timed alone: what they exchange is what real ranks exchange, and the sum of the parts."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from pool import Pool

from unisono.dist import JobSpec, World
from unisono.errors import ConfigError
from unisono.measure.calibration import Calibration, LinkRate
from unisono.parallel.traffic import GroupTraffic
from unisono.plan.options import PlanOptions
from unisono.plan.pipeline_schedule import stage_index
from unisono.plan.resolve import derive_plan
from unisono.planner.timed_plan import predict_step
from unisono.train.rank_timing import PassDuration, RankTiming

STEPS = 4
SIZES = {"num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "tied": False}
AXES: dict[str, dict[str, Any]] = {
    "dp_replicate": {},
    "dp_shard": {"dp_shard": 2},
    "tp": {"tp": 2},
    "tp_sequence": {"tp": 2, "sequence_parallel": True},
    "cp": {"cp": 2},
    "1f1b": {"pp": 2, "micro_batch": 2},
    "zbv": {"pp": 2, "micro_batch": 2, "schedule": "zbv"},
}


def trainer(folder: Path | str, world: World, axes: dict[str, Any]) -> Any:
    return tiny.trainer(folder, world=world, steps=STEPS, sizes=SIZES, **axes)


def exchanged(world: World, folder: str, axes: dict[str, Any]) -> list[tuple[str, str, int, int]]:
    """What this rank of a real job says that it exchanged, for each step."""
    with trainer(folder, world, axes) as run:
        for _ in run:
            pass
    (event,) = [event for event in tiny.events(folder, world.rank) if event["kind"] == "links"]
    rows = [
        (row["axis"], row["group"], row["collectives"] / STEPS, row["payload_bytes"] / STEPS) for row in event["axes"]
    ]
    return sorted(rows)


@pytest.mark.parametrize("axes", AXES.values(), ids=AXES)
def test_a_rank_alone_exchanges_what_it_does_in_a_job(pool: Pool, tmp_path: Path, axes: dict[str, Any]) -> None:
    real = pool.run(exchanged, str(tmp_path / "real"), axes, ranks=2)
    timings = trainer(tmp_path / "alone", World(JobSpec(world_size=2)), axes).time_ranks(2, [0, 1])
    for rank, timing in enumerate(timings):
        assert timing.rank == rank
        assert timing.steps >= 3
        assert timing.step_s > 0
        kinds = {"1f1b": "FB", "zbv": "FIW"}.get(str(axes.get("schedule", "1f1b")), "") if axes.get("pp") else ""
        assert sorted((each.kind, each.stage) for each in timing.passes) == sorted(
            (kind, stage) for kind in kinds for stage in timing.stages
        )
        assert all(each.seconds > 0 for each in timing.passes)
        rows = [
            (
                group.axis,
                group.group,
                sum(each.count for each in group.messages.values()),
                sum(each.payload_bytes for each in group.messages.values()),
            )
            for group in timing.traffic
        ]
        for (axis, name, count, size), (real_axis, real_name, real_count, real_size) in zip(
            sorted(rows), real[rank], strict=True
        ):
            assert (axis, name) == (real_axis, real_name)
            # in the first step of a job a stage tells the next one the shape of what it passes on: one message of ten integers
            headers = 1 if name == "stages" else 0
            assert 0 <= real_count - count <= headers / STEPS
            assert 0 <= real_size - size <= headers * 80 / STEPS


def test_nothing_is_trained_and_nothing_is_left(tmp_path: Path) -> None:
    run = trainer(tmp_path / "run", World(JobSpec(world_size=2)), {"dp_shard": 2})
    before = {name: value.clone() for name, value in run._inputs.model.state_dict().items()}
    run.time_ranks(2)
    after = run._inputs.model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert not (tmp_path / "run").exists()
    assert not torch.distributed.is_initialized()


def link(operation: Any, transport: str, ranks: int, nbytes: int, seconds: float) -> LinkRate:
    return LinkRate(
        operation=operation,
        transport=transport,
        ranks=ranks,
        hosts=(socket.gethostname(),),
        nbytes=nbytes,
        seconds=seconds,
        spread_frac=0.0,
    )


def timing(step_s: float, *groups: GroupTraffic, rank: int = 0) -> RankTiming:
    return RankTiming(rank=rank, stages=(), step_s=step_s, steps=3, spread_frac=0.0, traffic=groups)


def group(axis: str, operation: Any = "all_reduce", transport: str = "gloo", nbytes: int = 1000) -> GroupTraffic:
    made = GroupTraffic(axis=axis, group=axis, transport=transport, ranks=2, hosts=1, operation=operation)
    made.add(nbytes, nbytes, nbytes, count=3)
    return made


LINKS = Calibration(
    links=[
        link("all_reduce_in_step", "gloo", 2, 4, 0.001),
        link("all_reduce_in_step", "gloo", 2, 1004, 0.003),
        link("all_reduce", "gloo", 2, 4, 0.0001),  # between idle ranks: for sums that are not in a step
        link("all_reduce", "gloo", 2, 1004, 0.0002),
        link("send", "gloo", 2, 1000, 0.0002),  # between idle ranks
        link("send_in_step", "gloo", 2, 1000, 0.002),
    ]
)


def plan(**options: Any) -> Any:
    return derive_plan(PlanOptions(device="cpu", **options), world_size=2, device="cpu", native_bf16=False)


def test_the_slowest_rank_and_its_messages_count() -> None:
    predicted = predict_step(plan(tp=2), [timing(0.5), timing(0.6, group("tp"), group("dp"), rank=1)], LINKS)
    # 996 of 1,000 bytes between both measured sizes
    each = 0.001 + 0.002 * 996 / 1000
    assert predicted.communication_s == pytest.approx({"tp": 3 * each, "dp": 3 * each})
    assert predicted.work_s == 0.6
    assert predicted.bubble_s == 0
    assert predicted.step_s == pytest.approx(0.6 + 6 * each)


@pytest.mark.parametrize(("schedule", "passes"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 1 / 2), ("zbv", 1 / 6)])
def test_stages_wait_for_each_other(schedule: Any, passes: float) -> None:
    """Of equal stages, as long as the published bubbles: the part of a rank's work on one micro-batch (Narayanan et al. 2021,
    section 2.2; Qi et al. 2024, arXiv 2401.10241)."""
    given = plan(pp=2, schedule=schedule, global_batch=8, micro_batch=2)
    assert given.batch.accumulation == 4
    chunks = given.stages_per_rank
    timings = [
        replace(
            timing(4 * 0.6 + 0.1, rank=rank),
            passes=tuple(
                PassDuration(kind, stage, seconds / chunks)
                for stage in range(2 * chunks)
                for kind, seconds in (("F", 0.2), ("B", 0.4), ("I", 0.2), ("W", 0.2))
                if (kind in "FIW" if schedule == "zbv" else kind in "FB")
                and stage in {stage_index(schedule, 2, rank, chunk) for chunk in range(chunks)}
            ),
        )
        for rank in range(2)
    ]
    predicted = predict_step(given, timings, LINKS)
    assert predicted.bubble_s == pytest.approx(passes * 0.6)
    assert predicted.step_s == pytest.approx(4 * 0.6 + 0.1 + passes * 0.6)
    assert [len(row) for row in predicted.timeline] == [4 * chunks * (3 if schedule == "zbv" else 2)] * 2


def test_a_stage_waits_for_messages_and_for_a_slower_stage() -> None:
    given = plan(pp=2, schedule="1f1b", global_batch=8, micro_batch=2)
    timings = [
        replace(timing(4 * 0.3, group("pp", "send")), passes=(PassDuration("F", 0, 0.1), PassDuration("B", 0, 0.2))),
        replace(
            timing(4 * 0.6, group("pp", "send"), rank=1), passes=(PassDuration("F", 1, 0.2), PassDuration("B", 1, 0.4))
        ),
    ]
    predicted = predict_step(given, timings, LINKS)
    assert predicted.communication_s == {}
    # the slower stage waits for the first hidden state; the other one makes the last backward pass when all is over
    assert predicted.bubble_s == pytest.approx(0.1 + 0.2 + 2 * 0.002)
    assert predicted.step_s == pytest.approx(4 * 0.6 + 0.1 + 0.2 + 2 * 0.002)


def test_more_ranks_wait_for_a_slower_one() -> None:
    def straggler_s(ranks: int, spread_frac: float) -> float:
        given = derive_plan(
            PlanOptions(device="cpu", global_batch=64), world_size=ranks, device="cpu", native_bf16=False
        )
        varying = replace(timing(1.0), spread_frac=spread_frac)
        return predict_step(given, [varying], LINKS).straggler_s

    assert straggler_s(1, 0.1) == 0
    assert straggler_s(2, 0.0) == 0
    # of a normal distribution whose quartiles are 0.1 apart, 0.564 and 1.424 standard deviations of 0.0741
    assert straggler_s(2, 0.1) == pytest.approx(0.564 * 0.0741, rel=0.05)
    assert straggler_s(8, 0.1) == pytest.approx(1.424 * 0.0741, rel=0.05)


def test_a_link_that_was_not_measured_is_an_error() -> None:
    with pytest.raises(ConfigError, match="2 ranks exchange bytes over nccl") as caught:
        predict_step(plan(), [timing(1.0, group("dp", transport="nccl"))], LINKS)
    assert "unisono plan calibrate --processes 2" in str(caught.value)
