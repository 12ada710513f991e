"""Sharded data parallelism trains like one process, on any number of ranks, and goes on under another plan."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import tiny
import torch
from plans import like_one_process, on_ranks, save_at
from pool import Pool, WorkersFailed
from torch.distributed.fsdp import FSDPModule

from unisono.dist import JobSpec, World
from unisono.errors import CommError, DataError, PlanError
from unisono.plan.options import PlanOptions
from unisono.plan.resolve import derive_plan


@pytest.mark.parametrize(
    ("ranks", "dp_shard", "micro_batch", "zero"),
    [
        (2, 2, 2, 3),
        (4, 2, 1, 1),
        (4, 4, 2, 2),
        *(
            pytest.param(*case, zero, marks=pytest.mark.full)
            for case in [(2, 2, 2), (4, 2, 1), (4, 4, 2)]
            for zero in (1, 2, 3)
        ),
    ],
)
def test_trains_like_one_process(
    pool: Pool, tmp_path: Path, zero: int, ranks: int, dp_shard: int, micro_batch: int
) -> None:
    together = like_one_process(pool, tmp_path, ranks, dp_shard=dp_shard, zero=zero, micro_batch=micro_batch)
    held = [outcome["held"] for outcome in together]
    assert sum(held) == pytest.approx(ranks // dp_shard)
    assert max(held) < 1.2 / dp_shard  # 48 rows of embedding and the like are not cut evenly by 4


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "lamb"},
        {"ema_decay": 0.9},
        *(pytest.param(each, marks=pytest.mark.full) for each in ({"kind": "lars", "lr": 0.5}, {"kind": "sgd"})),
    ],
)
def test_other_optimizers_and_the_moving_average(pool: Pool, tmp_path: Path, changes: dict) -> None:
    """LAMB and LARS look at the norms of whole tensors, of which each rank has a piece."""
    like_one_process(pool, tmp_path, 3, dp_shard=3, global_batch=9, **changes)


def test_stages_compute_the_same_bits(pool: Pool, tmp_path: Path) -> None:
    """Stages 2 and 3 always; stage 1 adds micro-batches before it adds ranks, so only without accumulation."""
    found = {
        (zero, micro): [
            outcome["digest"]
            for outcome in pool.run(
                on_ranks,
                str(tmp_path / f"{zero}-{micro}"),
                {"dp_shard": 2, "zero": zero, "micro_batch": micro},
                ranks=2,
            )
        ]
        for zero in (1, 2, 3)
        for micro in (2, 4)
    }
    assert found[1, 4] == found[2, 4] == found[3, 4]
    assert found[2, 2] == found[3, 2]


@pytest.mark.parametrize(
    ("changes", "whole"),
    [
        (
            {"fsdp.shard_threshold_numel": 100, "fsdp.ignored_modules": ("embedding", "blocks.1.*.k")},
            5 * 16 + 48 * 16 + 8 * 16,
        ),
        pytest.param({"fsdp.shard_threshold_numel": 1 << 20}, None, marks=pytest.mark.full),
    ],
    ids=["some", "all"],
)
def test_what_the_plan_leaves_whole(pool: Pool, tmp_path: Path, changes: dict, whole: int | None) -> None:
    """To a layer-wise optimizer, an average and a checkpoint it is as on one process. ``whole``: elements of norms and tables."""
    common = {"dp_shard": 3, "global_batch": 9, "kind": "lamb", "ema_decay": 0.9}
    together = like_one_process(pool, tmp_path, 3, **common, **changes)
    count = sum(p.numel() for p in tiny.model().parameters())
    share = 1 if whole is None else whole / count
    assert sum(outcome["held"] for outcome in together) == pytest.approx(1 + 2 * share)


def unsharded(world: World, run_dir: str, changes: dict) -> str:
    sizes = {"num_heads": 4, "num_experts": 4, "num_experts_per_token": 2, "ffn_dim": 16}
    try:
        with tiny.trainer(run_dir, world=world, dp_shard=2, sizes=sizes, **changes):
            return ""
    except PlanError as error:
        return str(error)


def test_names_of_what_stays_whole_are_checked(pool: Pool, tmp_path: Path) -> None:
    for said in pool.run(unsharded, str(tmp_path / "a"), {"fsdp.ignored_modules": ("embeddings",)}, ranks=2):
        assert said.startswith("fsdp.ignored_modules 'embeddings'\n  rule: it names modules of the model")
        assert said.endswith("did you mean 'embedding'?")
    for said in pool.run(unsharded, str(tmp_path / "b"), {"fsdp.ignored_modules": ("blocks.*",), "ep": 2}, ranks=2):
        assert said == (
            "fsdp.ignored_modules 'blocks.*', which holds blocks.0.ffn.experts\n"
            "  rule: it names modules of the model, without experts that ep spreads\n"
            "  so:   experts would not be where tokens are sent\n"
            "  try:  modules outside them, or ep=1"
        )


def test_gathering_ahead_and_whole_parameters_change_nothing_about_resume(pool: Pool, tmp_path: Path) -> None:
    common = {"dp_shard": 2, "dropout": 0.1}
    plain = pool.run(on_ranks, str(tmp_path / "plain"), common, ranks=2)
    ahead = {**common, "fsdp.prefetch_blocks": 1}
    assert [o["digest"] for o in pool.run(on_ranks, str(tmp_path / "ahead"), ahead, ranks=2)] == [
        o["digest"] for o in plain
    ]
    changes = {**ahead, "fsdp.shard_threshold_numel": 100}
    straight = pool.run(on_ranks, str(tmp_path / "straight"), changes, ranks=2)
    pool.run(save_at, str(tmp_path / "cut"), changes, 3, ranks=2)
    resumed = pool.run(on_ranks, str(tmp_path / "cut"), changes, ranks=2)
    assert [o["digest"] for o in resumed] == [o["digest"] for o in straight]
    assert straight[0]["losses"] == pytest.approx(plain[0]["losses"], rel=1e-6)


def sent(world: World, run_dir: str, changes: dict) -> list[int]:
    """Elements of each message of gradients."""
    with tiny.trainer(run_dir, world=world, steps=1, **changes) as run:
        return [bucket.flat.numel() for bucket in run._loop.runner.train_step.sync._buckets]  # type: ignore[attr-defined]


def test_the_plan_says_how_many_gradients_travel_together(pool: Pool, tmp_path: Path) -> None:
    """Of 4 bytes each; a parameter larger than a bucket has its own."""
    (one,) = pool.run(sent, str(tmp_path / "one"), {}, ranks=2)[0]
    several = pool.run(sent, str(tmp_path / "several"), {"bucket_bytes": 4096}, ranks=2)[0]
    assert sum(several) == one
    assert len(several) > 3
    assert max(several) == max(1024, 48 * 16)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recompute_changes_no_bit(pool: Pool, tmp_path: Path, recompute: str) -> None:
    common = {"dp_shard": 2, "dropout": 0.1}
    plain = pool.run(on_ranks, str(tmp_path / "plain"), common, ranks=2)
    again = pool.run(on_ranks, str(tmp_path / "again"), {**common, "recompute": recompute}, ranks=2)
    assert [o["digest"] for o in plain] == [o["digest"] for o in again]


def test_resumes_bit_by_bit(pool: Pool, tmp_path: Path) -> None:
    changes = {"dp_shard": 2, "zero": 3, "dropout": 0.1, "ema_decay": 0.9}
    straight = pool.run(on_ranks, str(tmp_path / "straight"), changes, ranks=2)
    pool.run(save_at, str(tmp_path / "cut"), changes, 3, ranks=2)
    resumed = pool.run(on_ranks, str(tmp_path / "cut"), changes, ranks=2)
    assert [o["digest"] for o in resumed] == [o["digest"] for o in straight]
    assert resumed[0]["losses"] == straight[0]["losses"][3:]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((3, 3), (4, 2)),
        *(
            pytest.param(*each, marks=pytest.mark.full)
            for each in (((2, 2), (1, 1)), ((1, 1), (3, 3)), ((4, 2), (2, 1)))
        ),
    ],
)
def test_goes_on_under_another_plan(
    pool: Pool, tmp_path: Path, before: tuple[int, int], after: tuple[int, int]
) -> None:
    """(ranks, dp_shard) to (ranks, dp_shard): nothing is converted, and the curve is that of one process."""
    common = {"global_batch": 12, "kind": "adamw"}
    alone = on_ranks(World(JobSpec()), str(tmp_path / "alone"), common)
    pool.run(save_at, str(tmp_path / "run"), {**common, "dp_shard": before[1]}, 3, ranks=before[0])
    outcome = pool.run(on_ranks, str(tmp_path / "run"), {**common, "dp_shard": after[1]}, ranks=after[0])[0]
    assert outcome["losses"] == pytest.approx(alone["losses"][3:], rel=1e-5)
    assert outcome["norms"] == pytest.approx(alone["norms"][3:], rel=1e-4)


def test_a_step_that_does_not_count_changes_nothing_on_any_rank(pool: Pool, tmp_path: Path) -> None:
    outcomes = pool.run(poisoned, str(tmp_path / "run"), ranks=2)
    assert outcomes[0]["skipped"] == outcomes[1]["skipped"] == [False, False, True, False]
    for outcome in outcomes:
        assert outcome["pieces"][1] == outcome["pieces"][2] != outcome["pieces"][3]


def poisoned(world: World, run_dir: str) -> dict:
    pieces, skipped = [], []
    with tiny.trainer(run_dir, world=world, steps=4, dp_shard=2, data=tiny.PoisonedFrom(2), max_skips=9) as run:
        for step in run:
            skipped.append(step.skipped)
            pieces.append(torch.cat([p.detach().flatten() for p in run.state.sharded.parameters.values()]).tolist())
    return {"skipped": skipped, "pieces": pieces}


def evaluated(world: World, run_dir: str, dp_shard: int, zero: int) -> list[float]:
    """Seven samples: with three ranks and micro-batches of two, one rank has a batch less than the others."""
    found = []
    with tiny.trainer(
        run_dir, world=world, steps=3, dp_shard=dp_shard, zero=zero if dp_shard > 1 else 3, global_batch=6, micro_batch=2,
        eval_data=tiny.RaggedTokens(7), ema_decay=0.5,
    ) as run:  # fmt: skip
        for _ in run:
            found.append(run.evaluate()["loss"])
    return found


@pytest.mark.parametrize("zero", [1, 3])
def test_evaluation_between_steps_is_exact_and_sees_the_newest_weights(pool: Pool, tmp_path: Path, zero: int) -> None:
    alone = evaluated(World(JobSpec()), str(tmp_path / "alone"), 1, zero)
    assert pool.run(evaluated, str(tmp_path / "run"), 3, zero, ranks=3)[0] == pytest.approx(alone, rel=1e-5)


def looked_at(world: World, run_dir: str, dp_shard: int, zero: int) -> list[float]:
    losses = []
    tokens = torch.zeros(1, tiny.SEQ_LEN, dtype=torch.int64)
    with tiny.trainer(run_dir, world=world, steps=4, dp_shard=dp_shard, zero=zero if dp_shard > 1 else 3) as run:
        for step in run:
            losses.append(step.loss)
            with torch.no_grad():
                run.model(tokens)
    return losses


@pytest.mark.parametrize("zero", [1, 3])
def test_a_forward_pass_in_the_loops_body_disturbs_nothing(pool: Pool, tmp_path: Path, zero: int) -> None:
    alone = looked_at(World(JobSpec()), str(tmp_path / "alone"), 1, zero)
    assert pool.run(looked_at, str(tmp_path / "run"), 2, zero, ranks=2)[0] == pytest.approx(alone, rel=1e-5)


def watched(world: World, run_dir: str, dp_shard: int) -> dict:
    with tiny.trainer(run_dir, world=world, steps=1, dp_shard=dp_shard, gradient_stats_every_steps=1) as run:
        list(run)
    (event,) = (e for e in tiny.events(run_dir) if e["kind"] == "gradient_stats")
    return event["layers"]


def test_gradient_statistics_are_of_whole_tensors(pool: Pool, tmp_path: Path) -> None:
    alone = watched(World(JobSpec()), str(tmp_path / "alone"), 1)
    layers = pool.run(watched, str(tmp_path / "run"), 2, ranks=2)[0]
    assert layers.keys() == alone.keys()
    for name, figures in layers.items():
        assert figures["norm"] == pytest.approx(alone[name]["norm"], rel=1e-4)
        assert figures["max"] == pytest.approx(alone[name]["max"], rel=1e-4)


def dies(world: World, run_dir: str) -> str:
    with tiny.trainer(run_dir, world=world, steps=50, dp_shard=2) as run:
        for step in run:
            if step.index == 2 and world.rank == 1:
                import os

                os._exit(3)
    return "finished"


def test_a_rank_that_dies_ends_the_others_within_seconds_by_name(pool: Pool, tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(WorkersFailed) as caught:
        pool.run(dies, str(tmp_path / "run"), ranks=2)
    assert time.monotonic() - began < 60
    assert CommError.__name__ in caught.value.outcomes[0]
    assert "rank 1" in caught.value.outcomes[0]


def problem(world: int, **options: object) -> str:
    with pytest.raises(PlanError) as caught:
        derive_plan(PlanOptions(device="cpu", **options), world_size=world, device="cpu", native_bf16=False)
    return str(caught.value)


def test_plans_that_cannot_be() -> None:
    text = problem(6, dp_shard=4, global_batch=12)
    assert "dp_replicate 1 x dp_shard 4 on 6 ranks" in text
    assert "dp_replicate=2, dp_shard=3, or launch.num_processes=4" in text
    text = problem(4, dp_shard=2, global_batch=10)
    assert "global_batch is a multiple of the ranks" in text
    assert "plan.global_batch=8" in text
    whole = derive_plan(
        PlanOptions(device="cpu", dp_shard=0, global_batch=6), world_size=6, device="cpu", native_bf16=False
    )
    assert (whole.mesh.dp_replicate, whole.mesh.dp_shard, whole.mesh.world_size) == (1, 6, 6)


def test_a_torch_that_leaves_unused_parameters_out_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(FSDPModule, "set_reduce_scatter_unused_params", raising=False)
    with pytest.raises(PlanError) as caught:
        tiny.trainer(tmp_path, world=World(JobSpec(world_size=2)), dp_shard=2).dry_run(2)
    text = str(caught.value)
    assert f"parameters sharded over 2 ranks, with torch {torch.__version__}" in text
    assert "ranks would reduce buffers of different lengths" in text
    assert "torch 2.13 or later, or a plan with dp_shard=1, cp=1 and ep=1" in text


def keeps(world: World, run_dir: str) -> str:
    with pytest.raises(DataError) as caught, tiny.trainer(run_dir, world=world, dp_shard=2, last_batch="keep"):
        pass
    return str(caught.value)


def test_uneven_steps_are_refused(pool: Pool, tmp_path: Path) -> None:
    assert "loader.last_batch=pad" in pool.run(keeps, str(tmp_path / "run"), ranks=2)[0]
