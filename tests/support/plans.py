"""Runs of the tiny model under a plan, on the ranks of a pool, beside the same run on one process."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
import tiny
import torch
from pool import Pool

from unisono.checkpoint import open_checkpoint
from unisono.dist import JobSpec, World

STEPS = 6
# settings that say how a step is spread, not what it computes
OF_RANKS = {
    *(
        "dp_shard",
        "zero",
        "fsdp.shard_threshold_numel",
        "fsdp.ignored_modules",
        "micro_batch",
        "tp",
        "sequence_parallel",
        "cp",
        "pp",
        "schedule",
        "ep",
    ),
}


def on_ranks(world: World, run_dir: str, changes: dict) -> dict:
    norms: list[float] = []
    with tiny.trainer(run_dir, world=world, **{"steps": STEPS, **changes}) as run:
        losses, samples = [], []
        for step in run:
            losses.append(step.loss)
            norms.append(float(step.stats[1]))
            samples.append(step.sample_ids.tolist())
        pieces = run.state.sharded
        return {
            "losses": losses,
            "norms": norms,
            "samples": samples,
            "digest": tiny.digest(run),
            "data_rank": run.state.sharded._dims.data_rank,
            "held": sum(p.numel() for p in pieces.parameters.values()) / pieces.num_parameters,
        }


def state(run_dir: Path, step: int = STEPS) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint but the generators, whole."""
    snapshot = open_checkpoint(run_dir / "checkpoints" / f"step-{step:08d}")
    return {name: snapshot.tensor(name) for name in snapshot.names() if not name.startswith("rng/")}


def like_one_process(pool: Pool, tmp_path: Path, ranks: int, **changes: object) -> list[dict]:
    """Runs on ``ranks`` and on one; losses, norms, samples and the saved state must be those of one process."""
    alone = on_ranks(World(JobSpec()), str(tmp_path / "alone"), {k: v for k, v in changes.items() if k not in OF_RANKS})
    together = pool.run(on_ranks, str(tmp_path / "run"), dict(changes), ranks=ranks)
    for outcome in together:
        assert outcome["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert outcome["norms"] == pytest.approx(alone["norms"], rel=1e-4)
    first = {outcome["data_rank"]: outcome for outcome in reversed(together)}
    parts_of_steps = zip(*(first[rank]["samples"] for rank in sorted(first)), strict=True)
    samples = [list(chain.from_iterable(parts)) for parts in parts_of_steps]
    assert samples == alone["samples"]
    mine, theirs = state(tmp_path / "run"), state(tmp_path / "alone")
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(
            tensor, theirs[name], rtol=1e-3, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
    return together


def save_at(world: World, run_dir: str, changes: dict, step: int) -> None:
    with tiny.trainer(run_dir, world=world, **{"steps": STEPS, **changes}) as run:
        for each in run:
            if each.index == step:
                break
