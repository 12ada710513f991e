"""Traced memory against really executed ranks: the same counter of live storages in both, at every operator of a step."""

from __future__ import annotations

import tempfile
from typing import Any

import matrix
import pytest
import tiny
from matrix import CASES, Case
from pool import Pool

from unisono.dist import JobSpec, World
from unisono.measure.live_storages import LiveStorages
from unisono.train.dry_run import STEPS, begin_step, phases_as_kinds
from unisono.train.trainer import Trainer

# larger plans take long to execute, and add no axis
TRACED = [case for case in CASES if case.ranks <= 4]
# also in the short tier
SHORT = {"gpt-dp_shard2", "gpt-pp2-schedule=interleaved"}


def trainer_of(folder: str, world: Any, model: str, settings: dict[str, Any]) -> Trainer:
    layers, settings = settings["layers"], {name: value for name, value in settings.items() if name != "layers"}
    network, data, objective = matrix.MODELS[model](layers)
    return tiny.trainer(folder, world=world, network=network, data=data, objective=objective, **settings)


def executed(world: World, model: str, settings: dict[str, Any]) -> dict[str, int]:
    """Bytes by kind at this rank's peak in a step that is really made."""
    live = LiveStorages()
    live.kind = "buffers"
    with tempfile.TemporaryDirectory() as folder:
        run = trainer_of(str(world.broadcast_json(folder)), world, model, settings)
        with live, run:
            runner = run._loop.runner
            with phases_as_kinds(live, runner.timers):
                batches = run._loop.loader.iterate(0, STEPS)
                for _ in range(STEPS):
                    live.kind = "batch"
                    batch = next(batches)
                    begin_step(live, run.model, run.state)
                    runner.train_step.run(batch)
                    del batch
            by_kind = dict(live.peak.by_kind)
            world.barrier()
    return by_kind


def without_buffers(by_kind: dict[str, int]) -> int:
    """The buffers of collectives have a fixed size, beside which errors would not show in tiny models."""
    return sum(size for kind, size in by_kind.items() if kind != "buffers")


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=[] if case.name in SHORT else pytest.mark.full) for case in TRACED],
)
def test_traced_memory_is_that_of_executed_ranks(pool: Pool, tmp_path, case: Case) -> None:
    settings = {**matrix.settings_of(case), "steps": STEPS}
    real = pool.run(executed, case.model, settings, ranks=case.ranks, timeout_s=240)
    run = trainer_of(str(tmp_path), World(JobSpec(world_size=case.ranks)), case.model, settings)
    traced = run.dry_run(case.ranks)
    last = run.dry_run(case.ranks, [case.ranks - 1])
    for rank in [*traced, *last]:
        by_kind = real[rank.rank]
        assert without_buffers(rank.peak.by_kind) == pytest.approx(without_buffers(by_kind), rel=0.005), (
            f"rank {rank.rank}: {rank.peak.by_kind} against {by_kind}"
        )
        assert rank.peak.by_kind.get("buffers", 0) == pytest.approx(by_kind.get("buffers", 0), rel=0.001, abs=64)
