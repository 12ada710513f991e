"""Runs of a GPT in the maximal update parametrization: groups of the optimizer, resume, tensor parallelism, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from plans import like_one_process
from pool import Pool

from unisono.errors import ConfigError
from unisono.optim import OptimOptions

SIZES = {"dim": 32, "num_heads": 4, "num_kv_heads": 2, "mup_base_dim": 16}


def groups(tmp_path: Path, sizes: dict[str, Any], **changes: Any) -> dict[str, tuple[float, float]]:
    """Learning rate and weight decay of each parameter."""
    with tiny.trainer(tmp_path / "run", sizes={**SIZES, **sizes}, **changes) as run:
        names = {id(p): name for name, p in run.model.named_parameters()}
        return {
            names[id(p)]: (group["lr"], group["weight_decay"])
            for group in run.state.optimizer.param_groups
            for p in group["params"]
        }


@pytest.mark.parametrize("tied", [True, False])
def test_rates_of_adamw(tmp_path: Path, tied: bool) -> None:
    found = groups(tmp_path, {"tied": tied}, lr=0.01, weight_decay=0.1)
    assert found["embedding.weight"] == (0.01, 0.0)
    assert found["blocks.0.ffn_norm.weight"] == (0.01, 0.0)
    assert found["blocks.1.ffn.down.weight"] == (0.005, 0.2)
    assert found["norm.weight"] == ((0.005 if tied else 0.01), 0.0)
    if not tied:
        assert found["head.weight"] == (0.005, 0.2)


def test_rates_of_sgd(tmp_path: Path) -> None:
    found = groups(tmp_path, {"tied": False}, kind="sgd", lr=0.01, weight_decay=0.1, clip_norm=0.0)
    assert found["embedding.weight"] == (0.02, 0.0)
    assert found["norm.weight"] == (0.02, 0.0)
    assert found["blocks.1.ffn.down.weight"] == (0.01, 0.1)
    assert found["head.weight"] == (0.005, 0.2)


def test_a_table_of_groups_multiplies_the_rate_of_the_width(tmp_path: Path) -> None:
    tables = ({"match": "blocks.0.*", "lr_scale": 3.0, "weight_decay": 0.3},)
    found = groups(tmp_path, {}, lr=0.01, groups=tables)
    assert found["blocks.0.ffn.up.weight"] == pytest.approx((0.015, 0.6))
    assert found["blocks.1.ffn.up.weight"] == (0.005, 0.2)


def test_at_the_base_width_the_run_is_the_one_without_mup(tmp_path: Path) -> None:
    plain = tiny.complete(tmp_path / "plain", sizes={**SIZES, "mup_base_dim": 0})
    mup = tiny.complete(tmp_path / "mup", sizes={**SIZES, "mup_base_dim": 32})
    assert (mup["losses"], mup["digest"]) == (plain["losses"], plain["digest"])


@pytest.mark.parametrize("tied", [True, False])
def test_resumes_bitwise(tmp_path: Path, tied: bool) -> None:
    sizes = {**SIZES, "tied": tied}
    whole = tiny.complete(tmp_path / "whole", sizes=sizes)
    first = tiny.complete(tmp_path / "parts", sizes=sizes, stop_after=3)
    second = tiny.complete(tmp_path / "parts", sizes=sizes)
    assert first["losses"] + second["losses"] == whole["losses"]
    assert second["digest"] == whole["digest"]


@pytest.mark.parametrize(
    ("axes", "tied"),
    [
        ({"tp": 2}, True),
        ({"dp_shard": 2}, False),
        pytest.param({"tp": 2}, False, marks=pytest.mark.full),
        pytest.param({"pp": 2, "micro_batch": 2}, True, marks=pytest.mark.full),
    ],
)
def test_two_processes_train_like_one(pool: Pool, tmp_path: Path, axes: dict[str, Any], tied: bool) -> None:
    like_one_process(pool, tmp_path, 2, sizes={**SIZES, "tied": tied}, **axes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"kind": "lars"}, "optim.kind 'lars'"), ({"kind": "adam", "weight_decay": 0.1}, "a weight decay of adam")],
)
def test_an_optimizer_that_does_not_follow_the_width(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words), tiny.trainer(tmp_path / "run", sizes=SIZES, **changes):
        pass


def test_an_optimizer_of_the_users_own(tmp_path: Path) -> None:
    given = tiny.trainer(tmp_path / "run", sizes=SIZES)
    given._inputs.optim.given = torch.optim.AdamW
    with pytest.raises(ConfigError, match="a model of mup_base_dim 16"), given:
        pass


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_best_rate_of_a_narrow_model_is_that_of_a_wide_one() -> None:
    """On a grid of factors of 4; without muP the best rate at four times the width is two places smaller."""

    def best(width: int, base: int) -> int:
        losses = [final_loss(width, base, 4.0**-power) for power in range(1, 7)]
        return min(range(len(losses)), key=losses.__getitem__)

    narrow = best(32, 32)
    assert abs(best(128, 32) - narrow) <= 1
    assert best(128, 0) >= narrow + 2


def final_loss(width: int, base: int, lr: float) -> float:
    """Mean loss of the last 10 of 60 steps; nine of ten tokens are the sum of the two before them, modulo 32."""
    from unisono.models.gpt import GPT
    from unisono.models.mup import width_ratio
    from unisono.models.options import ModelOptions
    from unisono.optim import build_optimizer
    from unisono.optim.width_scaling import lr_scales

    torch.manual_seed(0)
    heads = width // 16
    options = ModelOptions(
        num_layers=2, dim=width, num_heads=heads, num_kv_heads=heads, vocab_size=32, tied=False, mup_base_dim=base
    )
    model = GPT(options)
    scales = lr_scales(model.width_kinds(), width_ratio(options), "adamw")
    optimizer = build_optimizer(model, OptimOptions(lr=lr), lr_scales=scales)
    generator = torch.Generator().manual_seed(1)
    losses: list[float] = []
    for _ in range(60):
        tokens = torch.randint(0, 32, (32, 17), generator=generator)
        for place in range(2, 17):
            known = torch.rand(32, generator=generator) < 0.9
            rule = (tokens[:, place - 1] + tokens[:, place - 2]) % 32
            tokens[:, place] = torch.where(known, rule, tokens[:, place])
        logits = model(tokens[:, :-1]).logits()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return sum(losses[-10:]) / 10
