"""Traced memory against really executed ranks: the same counter of live storages in both, at every operator of a step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matrix
import pytest
import tiny
from matrix import CASES, Case
from pool import Pool
from traced_memory import EXECUTED_STEPS, compare, executed, trainer_of, without_buffers

from unisono.dist import JobSpec, World
from unisono.dist.simulated_world import simulated_world
from unisono.errors import ConfigError

# larger plans take long to execute, and add no axis
TRACED = [
    *(case for case in CASES if case.ranks <= 4),
    # many micro-batches in a step, of which a trace makes three
    Case(model="gpt", axes={"dp_shard": 2}, settings={"micro_batch": 1, "zero": 1}),
    Case(model="resnet", axes={"dp_replicate": 2}, settings={"micro_batch": 1}),
]
# also in the short tier
SHORT = {"gpt-dp_shard2"}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=[] if case.name in SHORT else pytest.mark.full) for case in TRACED],
)
def test_traced_memory_is_that_of_executed_ranks(pool: Pool, tmp_path, case: Case) -> None:
    compare(pool, tmp_path, case.model, {**matrix.settings_of(case), "steps": EXECUTED_STEPS}, case.ranks)


@pytest.mark.full
@pytest.mark.parametrize(
    ("axes", "blocks"),
    [({}, (1,)), ({"dp_shard": 2}, (3,)), ({"pp": 2, "schedule": "1f1b"}, (2, 1))],
    ids=["one rank", "sharded", "pipeline"],
)
def test_traced_memory_with_some_blocks_recomputed_is_that_of_executed_ranks(
    pool: Pool, tmp_path: Path, axes: dict[str, Any], blocks: tuple[int, ...]
) -> None:
    some = {"recompute": "full", "recompute.blocks_per_stage": blocks}
    settings = {"layers": 4, "micro_batch": 1, "steps": EXECUTED_STEPS, **some, **axes}
    compare(pool, tmp_path, "gpt", settings, 2 if axes else 1)


@pytest.mark.parametrize(
    ("ranks", "plan"),
    [(1, {"recompute": "full"}), (2, {}), pytest.param(2, {"dp_shard": 2, "zero": 3}, marks=pytest.mark.full)],
)
def test_a_model_that_reads_values_is_measured_as_it_is_executed(
    pool: Pool, tmp_path: Path, ranks: int, plan: dict[str, Any]
) -> None:
    settings = {"layers": 2, "global_batch": 12, "micro_batch": 3, "steps": EXECUTED_STEPS, **plan}
    measured = compare(pool, tmp_path, "choosing", settings, ranks)
    assert {rank.confidence for rank in measured} == {"measured"}
    assert {rank.needs_values for rank in measured} == {"aten.nonzero.default"}


def test_a_stage_is_traced_alone_as_behind_the_others(tmp_path: Path) -> None:
    settings = {"layers": 2, "pp": 2, "global_batch": 6, "micro_batch": 3, "schedule": "gpipe"}
    run = trainer_of(str(tmp_path), World(JobSpec(world_size=2)), "gpt", settings)
    assert run.dry_run(2, [1]) == run.dry_run(2)[1:]


def test_a_rank_of_a_job_simulates_no_other() -> None:
    with (
        simulated_world(1, 4),
        pytest.raises(ConfigError, match="rank 0 of 2 simulated in a process that is rank 1 of 4"),
        simulated_world(0, 2),
    ):
        pass
    with simulated_world(0, 2) as world:  # the first one left nothing behind
        assert (world.rank, world.world_size) == (0, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_traced_memory_is_that_of_an_accelerator(tmp_path: Path, recompute: str) -> None:
    settings = {"layers": 4, "device": "auto", "precision": "bf16", "recompute": recompute, "steps": EXECUTED_STEPS}
    (traced,) = trainer_of(str(tmp_path), World(JobSpec()), "gpt", settings).dry_run(1)
    by_kind = executed(World.alone(JobSpec()), "gpt", settings)
    assert without_buffers(traced.peak.by_kind) == pytest.approx(without_buffers(by_kind), rel=0.005)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_sharded_weights_are_not_held_in_16_bits(tmp_path: Path, recompute: str) -> None:
    """A further block adds its shards, and what recompute keeps of it, which is less than its weights."""
    peaks: list[int] = []
    for layers in (4, 8):
        sizes = {"num_layers": layers, "dim": 256, "num_heads": 4, "num_kv_heads": 4, "tied": False}
        settings: dict[str, Any] = {"micro_batch": 1, "global_batch": 8, "recompute": recompute, "precision": "bf16"}
        run = tiny.trainer(tmp_path, world=World(JobSpec(world_size=8)), sizes=sizes, dp_shard=8, **settings)
        (memory,) = run.dry_run(8, [0])
        peaks.append(memory.peak.bytes)
    block = sum(math.prod(shape) for shape in ((256, 768), (256, 256), (256, 768), (256, 768), (768, 256)))
    # parameters, gradients and both moments in 32 bits on eight ranks; the weights in 16 bits would be as much again
    assert (peaks[1] - peaks[0]) / 4 == pytest.approx(16 / 8 * block, rel=0.1)
