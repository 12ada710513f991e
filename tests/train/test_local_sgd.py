"""Local steps through the trainer: equal to as many models in one process, resumed bit for bit, to and from other kinds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F
from pool import Pool

from unisono.data.order.permutation import Permutation
from unisono.errors import ConfigError, PlanError
from unisono.plan.options import PlanOptions
from unisono.plan.resolve import derive_plan

STEPS = 9
PLAN = {"sync": "dist_local", "local_steps": 4}
TRAINED = {"kind": "sgd", "lr": 0.3, "momentum": 0.9, "clip_norm": 0.0, "weight_decay": 0.0}


def plain_models(outer_lr: float, outer_momentum: float) -> list[list[float]]:
    """Two models in one process, averaged every fourth step by DiLoCo's rule (arXiv 2311.08105); the losses of each."""
    data, order = tiny.RaggedTokens(), Permutation(tiny.SAMPLES, seed=0)
    models = [tiny.model(), tiny.model()]
    optimizers = [torch.optim.SGD(each.parameters(), lr=1.0, momentum=0.9) for each in models]
    outer = [p.detach().clone() for p in models[0].parameters()]
    momentum = [torch.zeros_like(p) for p in outer]
    losses: list[list[float]] = [[], []]
    for step in range(STEPS):
        warm = (step + 1) / 2 if step < 2 else 0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * (step - 2) / (STEPS - 2)))
        for rank, (network, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            mine = order(np.arange(8 * step + 4 * rank, 8 * step + 4 * rank + 4))
            batch = {k: torch.from_numpy(v) for k, v in data.read(mine).items()}
            logits = network(batch["tokens"]).logits()
            each = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="none")
            loss = (each * batch["weights"].flatten()).sum() / batch["weights"].sum()
            optimizer.param_groups[0]["lr"] = 0.3 * warm
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[rank].append(float(loss.detach()))
        if (step + 1) % 4 == 0:
            both = zip(outer, momentum, *(network.parameters() for network in models), strict=True)
            with torch.no_grad():
                for w, m, a, b in both:
                    delta = ((w - a) + (w - b)) / 2
                    m.mul_(outer_momentum).add_(delta)
                    w.sub_(outer_lr * (delta + outer_momentum * m))
                    a.copy_(w)
                    b.copy_(w)
    return losses


def train(world: Any, run_dir: str, **changes: Any) -> dict[str, Any]:
    return tiny.complete(run_dir, world=world, **{"steps": STEPS, **TRAINED, **PLAN, **changes})


@pytest.mark.parametrize(("outer_lr", "outer_momentum"), [pytest.param(1.0, 0.0, marks=pytest.mark.full), (0.7, 0.9)])
def test_equals_models_averaged_in_one_process(
    tmp_path: Path, pool: Pool, outer_lr: float, outer_momentum: float
) -> None:
    outcomes = pool.run(train, str(tmp_path / "run"), outer_lr=outer_lr, outer_momentum=outer_momentum)
    expected = plain_models(outer_lr, outer_momentum)
    for outcome, losses in zip(outcomes, expected, strict=True):
        assert outcome["losses"] == pytest.approx(losses, rel=1e-5)


def cut_and_resumed(world: Any, whole: str, run_dir: str, at: int, **changes: Any) -> list[Any]:
    undisturbed = train(world, whole, **changes)
    train(world, run_dir, stop_after=at, **changes)
    rest = train(world, run_dir, **changes)
    return [undisturbed["losses"][at:], rest["losses"], undisturbed["digest"], rest["digest"]]


# in the middle of a round, and while the average of one of two fragments is under way
@pytest.mark.parametrize(("at", "changes"), [(6, {}), (5, {"num_fragments": 2, "outer_delay_steps": 2})])
def test_resumes_bit_for_bit(tmp_path: Path, pool: Pool, at: int, changes: dict[str, Any]) -> None:
    for whole, rest, digest, again in pool.run(
        cut_and_resumed, str(tmp_path / "whole"), str(tmp_path / "cut"), at, **changes
    ):
        assert rest == whole
        assert again == digest


def then_otherwise(world: Any, run_dir: str, first: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
    before = tiny.complete(run_dir, world=world, steps=STEPS, stop_after=4, **TRAINED, **first)
    with tiny.trainer(run_dir, world=world, steps=STEPS, **TRAINED, **then) as run:
        shared = {name: tensor.clone() for name, tensor in run.state.global_state().items()}
        own = {name: p.detach().clone() for name, p in run.state.sharded.parameters.items()}
        losses = [step.loss for step in run]
    same = all(torch.equal(shared[f"model/{name}"], p) for name, p in own.items())
    return {"before": before["losses"], "losses": losses, "same": same}


@pytest.mark.parametrize(("first", "then"), [(PLAN, {"sync": "dist_sync"}), ({"sync": "dist_sync"}, PLAN)])
def test_goes_on_under_another_kind(tmp_path: Path, pool: Pool, first: dict[str, Any], then: dict[str, Any]) -> None:
    """At the end of a round ranks agree: parameters are kept, momentum is that of the rank that saved it."""
    for outcome in pool.run(then_otherwise, str(tmp_path / "run"), first, then):
        assert outcome["same"]
        assert len(outcome["losses"]) == STEPS - 4
        assert np.isfinite(outcome["losses"]).all()
        assert outcome["losses"][-1] < outcome["before"][0]


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    def plan(**options: Any) -> None:
        derive_plan(PlanOptions(**{"global_batch": 8, **options}), world_size=4, device="cpu", native_bf16=False)

    with pytest.raises(PlanError) as caught:
        plan(sync="dist_local", dp_shard=2, precision="fp16", global_batch=6, num_fragments=17)
    assert [problem.given for problem in caught.value.problems] == [
        "dp_shard 2 with global_batch 6 on 4 ranks",
        "sync 'dist_local' with dp_shard 2",
        "sync 'dist_local' with global_batch 6 on 4 ranks",
        "sync 'dist_local' with fp16",
        "num_fragments 17 with local_steps 16",
    ]
    assert "try:  num_fragments=16, or local_steps=17" in str(caught.value)
    with pytest.raises(
        PlanError, match=r"local_steps 4 with sync 'dist_sync'\n  rule: local_steps is read by dist_local"
    ):
        plan(local_steps=4)
    with pytest.raises(PlanError, match=r"outer_delay_steps 4 with local_steps 4"):
        plan(sync="dist_local", local_steps=4, outer_delay_steps=4)
    with pytest.raises(ConfigError, match=r"train.ema_decay 0.9 with plan.sync 'dist_local'"):
        tiny.trainer(tmp_path, sync="dist_local", ema_decay=0.9).__enter__()
