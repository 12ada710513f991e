"""A run goes on under any other plan, and under the same plan bit by bit."""

from __future__ import annotations

import hashlib
import shutil
from functools import cache
from pathlib import Path

import pytest
import tiny
from plan_edit import changed
from plans import STEPS, on_ranks, save_at
from pool import Pool

from unisono import PlanOptions, Trainer
from unisono.dist import JobSpec, World
from unisono.errors import CommError
from unisono.plan.resolve import derive_plan
from unisono.plan.rules import EmbeddingRule
from unisono.train.objectives import next_token

AT = 3
GPT = {"num_layers": 4, "num_heads": 4, "num_kv_heads": 2}
MOE = {**GPT, "num_experts": 4, "num_experts_per_token": 2, "ffn_dim": 16}
MODELS = {"tied": GPT, "untied": {**GPT, "tied": False}, "moe": MOE}

# name: ranks, what the plan says
PLANS: dict[str, tuple[int, dict]] = {
    "one": (1, {}),
    "dp_shard": (2, {"dp_shard": 2}),
    "tp": (2, {"tp": 2, "sequence_parallel": True}),
    "pp": (2, {"pp": 2}),
    "interleaved": (2, {"pp": 2, "schedule": "interleaved"}),
    "zbv": (2, {"pp": 2, "schedule": "zbv"}),
    "cp": (2, {"cp": 2}),
    "pp-dp_shard": (4, {"pp": 2, "dp_shard": 2}),
    "dp_shard-cp": (4, {"dp_shard": 2, "cp": 2}),
    "ep": (2, {"dp_shard": 2, "ep": 2}),
    "dp_shard-ep": (4, {"dp_shard": 4, "ep": 2}),
}
EXPERTS = {"ep", "dp_shard-ep"}
OF = {"tied": PLANS.keys() - EXPERTS, "untied": PLANS.keys() - EXPERTS, "moe": {"one", "pp", *EXPERTS}}


def settings(model: str, plan: str, **more: object) -> tuple[int, dict]:
    ranks, changes = PLANS[plan]
    return ranks, {"micro_batch": 2, "sizes": MODELS[model], **changes, **more}


@cache
def undisturbed(folder: Path, model: str) -> dict:
    return on_ranks(World(JobSpec()), str(folder / f"{model}-alone"), settings(model, "one")[1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("across")


def saved(pool: Pool, folder: Path, model: str, plan: str) -> Path:
    """The checkpoint of a run that was left after step 3."""
    run_dir = folder / f"{model}-{plan}"
    if not run_dir.exists():
        ranks, changes = settings(model, plan)
        pool.run(save_at, str(run_dir), changes, AT, ranks=ranks)
    return run_dir / "checkpoints" / f"step-{AT:08d}"


def goes_on(pool: Pool, folder: Path, model: str, before: str, after: str) -> None:
    path, alone = saved(pool, folder, model, before), undisturbed(folder, model)
    run_dir = folder / "after"
    shutil.rmtree(run_dir, ignore_errors=True)
    ranks, changes = settings(model, after, resume=str(path))
    for outcome in pool.run(on_ranks, str(run_dir), changes, ranks=ranks):
        assert outcome["losses"] == pytest.approx(alone["losses"][AT:], rel=1e-5), f"{before} to {after}"
        assert outcome["norms"] == pytest.approx(alone["norms"][AT:], rel=1e-4), f"{before} to {after}"


def test_goes_on_under_another_plan(pool: Pool, folder: Path) -> None:
    goes_on(pool, folder, "moe", "ep", "pp")


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("model", "after"), [(model, plan) for model in OF for plan in PLANS if plan in OF[model]])
def test_goes_on_after_other_plans(pool: Pool, folder: Path, model: str, after: str) -> None:
    """With a head of its own after some: what differs from a tied one is where the last rank of a pipeline keeps it."""
    for before in sorted(OF[model]) if model != "untied" else ("one", "pp-dp_shard", "tp"):
        goes_on(pool, folder, model, before, after)


def cut_or_straight(world: World, run_dir: str, changes: dict, until: int | None) -> dict:
    """To the end, or left after ``until``; digests of this rank's state and generators, and its losses."""
    losses = []
    with tiny.trainer(run_dir, world=world, steps=STEPS, **changes) as run:
        for step in run:
            losses.append(step.loss)
            if step.index == until:
                break
        generators = hashlib.sha256()
        for tensor in run.state.rank_state(0).values():
            generators.update(tensor.numpy().tobytes())
        return {
            "losses": losses,
            "digest": tiny.digest(run),
            "generators": generators.hexdigest(),
            "draw_rank": run.state.sharded._dims.rng_rank,
        }


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("tied", "pp"),
        ("moe", "ep"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in [
                ("tied", "interleaved"),
                ("tied", "zbv"),
                ("tied", "cp"),
                ("tied", "tp"),
                ("untied", "pp"),
                ("untied", "dp_shard-cp"),
                ("tied", "pp-dp_shard"),
                ("moe", "pp"),
                ("moe", "dp_shard-ep"),
            ]
        ),
    ],
)
def test_a_run_that_is_cut_has_the_bits_of_one_that_is_not(pool: Pool, tmp_path: Path, model: str, plan: str) -> None:
    ranks, changes = settings(model, plan, dropout=0.1, recompute="full", ema_decay=0.9)
    straight = pool.run(cut_or_straight, str(tmp_path / "straight"), changes, None, ranks=ranks)
    before = pool.run(cut_or_straight, str(tmp_path / "cut"), changes, AT, ranks=ranks)
    after = pool.run(cut_or_straight, str(tmp_path / "cut"), changes, None, ranks=ranks)
    for one, two, whole in zip(before, after, straight, strict=True):
        assert one["losses"] + two["losses"] == whole["losses"]
        assert two["digest"] == whole["digest"]
        assert two["generators"] == whole["generators"]
    drawn = {outcome["draw_rank"]: outcome["generators"] for outcome in straight}
    assert len(set(drawn.values())) == len(drawn), "ranks that compute different things draw the same numbers"


def odd_one(world: World, run_dir: str, base: dict, odd: dict, sizes: dict) -> str:
    """Rank 1 has another plan or model; what it is told."""
    plan = changed(
        derive_plan(
            PlanOptions(device="cpu", precision="fp32", global_batch=8, micro_batch=2, **base),
            world_size=world.world_size,
            device="cpu",
            native_bf16=False,
        ),
        **(odd if world.rank == 1 else {}),
    )
    network = tiny.model(**GPT, **(sizes if world.rank == 1 else {}))
    try:
        with Trainer(network, tiny.RaggedTokens(), plan, objective=next_token, run_dir=run_dir, world=world):
            return "started"
    except CommError as error:
        return str(error)


RULES = (EmbeddingRule(module="embedding"),)


@pytest.mark.parametrize(
    ("base", "odd", "told"),
    [
        (
            {"pp": 2},
            {"schedule": "gpipe"},
            ('plan is {"pipeline.schedule": "gpipe"} on rank 1', '{"pipeline.schedule": "1f1b"} on rank 0'),
        ),
        (
            {"dp_shard": 2},
            {"dp_shard": 1, "cp": 2, "accumulation": 4},
            ('"mesh.cp": 2', '"mesh.dp_shard": 1', '"mesh.cp": 1'),
        ),
        *(
            pytest.param(*each, marks=pytest.mark.full)
            for each in (
                (
                    {"pp": 2},
                    {"pipeline.layers_per_stage": (1, 3)},
                    (
                        'plan is {"pipeline.layers_per_stage": [1, 3]} on rank 1',
                        '{"pipeline.layers_per_stage": []} on rank 0',
                    ),
                ),
                (
                    {"tp": 2},
                    {"rules": RULES},
                    (
                        'plan is {"tensor_parallel.rules": [{"module": "embedding"',
                        '{"tensor_parallel.rules": []} on rank 0',
                    ),
                ),
                (
                    {"tp": 2},
                    {"sequence_parallel": True},
                    ('plan is {"tensor_parallel.sequence_parallel": true} on rank 1',),
                ),
                (
                    {"pp": 2},
                    {"recompute": "full", "recompute.blocks_per_stage": (1, 1)},
                    ('"recompute.blocks_per_stage": [1, 1], "recompute.mode": "full"} on rank 1',),
                ),
            )
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_another_plan_on_one_rank_ends_all_with_the_difference(
    pool: Pool, tmp_path: Path, base: dict, odd: dict, told: tuple[str, ...]
) -> None:
    for text in pool.run(odd_one, str(tmp_path), base, odd, {}, ranks=2):
        assert "plan is the same on all 2 ranks" in text
        for part in told:
            assert part in text


def test_another_model_on_one_rank_ends_all_with_the_difference(pool: Pool, tmp_path: Path) -> None:
    for text in pool.run(odd_one, str(tmp_path), {"pp": 2}, {}, {"vocab_size": 56}, ranks=2):
        assert 'parameter table is {"embedding.weight": "[56, 16] torch.float32"} on rank 1' in text
        assert '{"embedding.weight": "[48, 16] torch.float32"} on rank 0' in text
