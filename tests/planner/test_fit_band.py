"""Plans that are predicted to fit hold no more than was predicted, by more than the stated band, once they are executed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from pool import Pool
from traced_memory import EXECUTED_STEPS, executed, trainer_of, without_buffers

from unisono.dist import JobSpec, World
from unisono.plan.options import PlanOptions
from unisono.plan.plan import Plan
from unisono.planner.fit import Ladder, Rung
from unisono.train.dry_run import RankMemory
from unisono.train.setup import resolve_plan

# by which docs/plans.md ("Memory before a run") says that an executed rank may hold more than was predicted
BAND = 0.005
DROPLESS_BAND = 0.1  # mixtures of experts in which no token is dropped: predicted are equal shares
MODELS = ("gpt", "gpt-moe", "gpt-moe-capped", "bert", "resnet")
ATTEMPTS = 4  # on several ranks, where Gloo's threads may hold a tensor for longer than the step needs it
DRAWS = 12
SHORT_OF_MEMORY = 0.9  # of what the configured plan needs, in a fourth of the draws: each rung is traced


def drawn(number: int) -> tuple[str, int, dict[str, Any], float]:
    """A model, the number of ranks, settings of the run, and the part of the configured plan's peak that there is memory for."""
    rng = random.Random(number)
    model, ranks = MODELS[number % len(MODELS)], 1 if number < len(MODELS) else 2
    axes: list[dict[str, Any]] = [{}]
    if ranks == 2:
        axes = [{}, {"dp_shard": 2, "zero": 1}, {"dp_shard": 2, "zero": 2}, {"dp_shard": 2, "zero": 3}]
        axes += [{"tp": 2}] if model != "resnet" else []
    chosen = rng.choice(axes)
    micro_batch, accumulation = rng.choice([1, 2, 3, 4]), rng.choice([1, 2, 3])
    settings = {
        "layers": 2,
        "micro_batch": micro_batch,
        "global_batch": micro_batch * accumulation * (1 if "tp" in chosen else ranks),
        "recompute": rng.choice(["none", "selective", "full"]),
        "precision": rng.choice(["fp32", "bf16"]),
        "steps": EXECUTED_STEPS,
        **chosen,
    }
    return model, ranks, settings, SHORT_OF_MEMORY if number % 4 == 3 else 1.0


def fitting(folder: Path, model: str, ranks: int, settings: dict[str, Any], memory_frac: float) -> Rung:
    """What ``plan fit`` finds for the part ``memory_frac`` of what the configured plan needs; that plan where nothing fits."""
    common = {name: value for name, value in settings.items() if name in ("layers", "steps")}
    of_plan = {name: value for name, value in settings.items() if name not in common}

    def trace(options: PlanOptions, num_ranks: int, wanted: Sequence[int]) -> tuple[Plan, list[RankMemory]]:
        run = trainer_of(str(folder), World(JobSpec(world_size=num_ranks)), model, {**common, **asdict(options)})
        return resolve_plan(options, JobSpec(world_size=num_ranks))[1], run.dry_run(num_ranks, wanted)

    options = PlanOptions(device="cpu", **of_plan)
    configured = trace(options, ranks, ())
    budget_bytes = int(memory_frac * max(rank.peak.bytes for rank in configured[1]))
    ladder = Ladder(
        trace=lambda tried, num_ranks, wanted: configured if tried == options else trace(tried, num_ranks, wanted),
        options=options,
        num_ranks=ranks,
        budget_bytes=budget_bytes,
        native_bf16=False,
        tried=lambda rung: None,
    )
    found = ladder.climb()
    assert found is None or found.fits(budget_bytes)
    return found or ladder.rungs[0]


@pytest.mark.full
@pytest.mark.parametrize("number", range(DRAWS))
def test_no_plan_that_is_predicted_to_fit_exceeds_its_band(pool: Pool, tmp_path: Path, number: int) -> None:
    model, ranks, settings, memory_frac = drawn(number)
    rung = fitting(tmp_path, model, ranks, settings, memory_frac)
    assert rung.largest is not None
    predicted, settings = rung.largest.peak, {**settings, **rung.settings}
    band = DROPLESS_BAND if model == "gpt-moe" else BAND
    # on one rank and without a limit of the experts' tokens the highest step counts, with real routing
    is_highest = ranks == 1 or model == "gpt-moe"
    limit = (1 + band) * without_buffers(predicted.by_kind)
    held: list[int] = []
    for _ in range(1 if is_highest else ATTEMPTS):
        executions = pool.run(executed, model, settings, routes_equally=not is_highest, ranks=ranks, timeout_s=120)
        again = [without_buffers(by_kind) for by_kind in executions]
        held = [min(pair) for pair in zip(held or again, again, strict=True)]
        for by_kind in executions:
            assert by_kind.get("buffers", 0) <= predicted.by_kind.get("buffers", 0)
        if max(held) <= limit:
            break
    assert max(held) <= limit, f"{settings}: {held} of {predicted}"


def test_draws_have_each_value_of_each_setting() -> None:
    draws = [drawn(number) for number in range(DRAWS)]
    assert {(model, ranks) for model, ranks, _, _ in draws} == {(model, ranks) for model in MODELS for ranks in (1, 2)}
    settings = [each for _, _, each, _ in draws]
    assert {each["recompute"] for each in settings} == {"none", "selective", "full"}
    assert {each["precision"] for each in settings} == {"fp32", "bf16"}
    assert {each.get("zero") for each in settings} == {None, 1, 2, 3}
    assert any("tp" in each for each in settings)
    assert {each["global_batch"] // each["micro_batch"] for each in settings} >= {1, 2, 3}
    assert len({frac for *_, frac in draws}) == 2
