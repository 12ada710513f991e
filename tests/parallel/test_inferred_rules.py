"""Inferred rules, followed: every gradient is that of the whole model; the trainer infers them by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F
from cut import compare, difference
from pool import Pool
from stacks import TOKENS, VOCAB, Stack
from torch import Tensor, nn

from unisono.dist import JobSpec, World
from unisono.observe.formatting import event_message
from unisono.plan.tp_inference import infer_rules

BATCH = {"tokens": torch.zeros(2, TOKENS, dtype=torch.long)}


def loss_of(model: nn.Module) -> Tensor:
    tokens = torch.randint(0, VOCAB, (2, TOKENS + 1), generator=torch.Generator().manual_seed(5))
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")


def cut(world: World, kind: str) -> dict:
    model = Stack(kind).double()
    rules = infer_rules(model, {"tokens": torch.zeros(1, TOKENS, dtype=torch.long)}).rules
    return difference(world, model, loss_of, rules=rules)


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("mixer", 2),
        ("parallel", 2),
        ("encoder", 2),
        ("decoder", 2),
        pytest.param("parallel", 4, marks=pytest.mark.full),
    ],
)
def test_every_gradient_is_that_of_the_whole_model(pool: Pool, kind: str, ranks: int) -> None:
    outcomes = pool.run(cut, kind, ranks=ranks)
    compare(outcomes)
    assert outcomes[0]["held"] < (0.58 if ranks == 2 else 0.35)


class FewTokens(tiny.RaggedTokens):
    """Of the small vocabulary, as long as the mixer's token layers."""

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {name: each[:, :TOKENS] % VOCAB for name, each in super().read(indices).items()}


def of_logits(logits: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    losses = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="none")
    return (losses * batch["weights"].flatten()).sum(), batch["weights"].sum()


def trained(world: World, run_dir: str, stop_after: int, axes: dict) -> list[tuple[float, float]]:
    found = []
    with tiny.trainer(
        run_dir, world=world, steps=4, network=Stack("mixer"), objective=of_logits, data=FewTokens(), **axes
    ) as run:
        for step in run:
            found.append((step.loss, float(step.stats[1])))
            if step.index == stop_after:
                break
        assert run.plan.tensor_parallel.rules == (
            run.plan.tensor_parallel.rules if run.plan.mesh.tp == 1 else infer_rules(Stack("mixer"), BATCH).rules
        )
    return found


def test_the_trainer_infers_rules_and_goes_on_on_one_rank(pool: Pool, tmp_path: Path) -> None:
    alone = trained(World(JobSpec()), str(tmp_path / "alone"), 4, {})
    first = pool.run(trained, str(tmp_path / "run"), 2, {"tp": 2}, ranks=2)[0]
    rest = trained(World(JobSpec()), str(tmp_path / "run"), 4, {})
    for found, expected in zip([*first, *rest], alone, strict=True):
        assert found[0] == pytest.approx(expected[0], rel=1e-5)
        assert found[1] == pytest.approx(expected[1], rel=1e-4)
    said = [event for event in tiny.events(tmp_path / "run") if event["kind"] == "rules_inferred"]
    assert [rule["module"] for rule in said[0]["rules"]] == ["blocks.*.tokens", "blocks.*.channels", "words", "last"]
    line = event_message(said[0])
    assert line is not None
    assert "inferred for blocks.*.tokens, blocks.*.channels, words, last" in line.text
