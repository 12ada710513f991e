"""Zeros among the weights: which become 0, which layers stay, and what is said of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from commands import make_desk

from unisono.compress.scores import Criterion, input_norms
from unisono.compress.sparse import Sparsity, layer_names, sparse_copy
from unisono.config import load_config
from unisono.errors import ConfigError
from unisono.train.config import RunConfig
from unisono.train.trained import trained_run

SIZES = ("model.num_layers=2", "model.dim=16", "model.num_heads=2", "model.num_kv_heads=1", "data.seq_len=16")


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    corpus = make_desk(tmp_path, tmp_path).folder / "corpus"
    return [
        f"data.corpus={corpus}",
        f"data.cache_dir={tmp_path / 'cache'}",
        *SIZES,
        "plan.precision=fp32",
        "plan.global_batch=4",
    ]


def opened(settings: list[str], *more: str) -> Any:
    config = load_config(RunConfig, overrides=[*settings, *more]).value
    return trained_run(config, None, held_out_only=False, untrained=True)


def sparsity(**given: Any) -> Sparsity:
    defaults: dict[str, Any] = {
        "fraction": 0.5,
        "pattern": "unstructured",
        "criterion": "activation",
        "samples": 4,
        "skip": (),
    }
    return Sparsity(**defaults | given)


@pytest.mark.parametrize("criterion", ["magnitude", "activation", "taylor"])
@pytest.mark.parametrize("model", ["gpt", "moe"])
def test_each_row_has_as_many_zeros(settings: list[str], criterion: Criterion, model: str) -> None:
    with opened(settings, f"components.model={model}") as run:
        made, record, _ = sparse_copy(run, run.model, sparsity(fraction=0.25, criterion=criterion))
        names = [name for weights in layer_names(run.model).values() for name in weights]
        before, after = dict(run.model.named_parameters()), dict(made.named_parameters())
    assert record["zero_weights"] * 4 == record["sparse_weights"]
    for name, weight in after.items():
        if name in names:
            assert set((weight == 0).sum(-1).flatten().tolist()) == {weight.shape[-1] // 4}
            assert torch.equal(weight, before[name] * (weight != 0))
        else:
            assert torch.equal(weight, before[name])
    assert not {"embedding.weight", "norm.weight"} & set(names)


def test_two_of_each_four(settings: list[str]) -> None:
    with opened(settings) as run:
        made, record, lines = sparse_copy(run, run.model, sparsity(pattern="2:4", criterion="magnitude"))
        weights = dict(made.named_parameters())
        before = run.model.get_parameter("blocks.0.ffn.up.weight").reshape(-1, 4)
    groups = weights["blocks.0.ffn.up.weight"].reshape(-1, 4)
    assert ((groups == 0).sum(1) == 2).all()
    assert torch.equal(groups.abs().sum(1), before.abs().topk(2).values.sum(1))
    assert record["kept_dense"] == []
    assert any("sparse tensor cores" in line for line in lines)


def test_rows_that_fit_no_pattern_stay(settings: list[str]) -> None:
    with opened(settings, "model.ffn_dim=30") as run:
        made, record, lines = sparse_copy(run, run.model, sparsity(pattern="2:4"))
        assert record["kept_dense"] == [f"blocks.{n}.ffn.down.weight" for n in range(2)]
        assert bool((made.get_parameter("blocks.0.ffn.down.weight") != 0).all())
    assert "blocks.1.ffn.down.weight" in lines[-1]


def test_weights_count_with_what_they_are_multiplied_by(settings: list[str]) -> None:
    with opened(settings) as run:
        name = "blocks.0.ffn.up.weight"
        norms = input_norms(run, run.model, [name], 4)[name]
        made, _, _ = sparse_copy(run, run.model, sparsity())
        row = (run.model.get_parameter(name)[3].abs() * norms).argsort()
        assert (made.get_parameter(name)[3] == 0).nonzero().flatten().tolist() == sorted(row[:8].tolist())


def test_layers_that_stay(settings: list[str]) -> None:
    with opened(settings) as run:
        made, record, _ = sparse_copy(run, run.model, sparsity(skip=("blocks.*.attention.*",)))
        assert bool((made.get_parameter("blocks.1.attention.q.weight") != 0).all())
        assert record["sparse_weights"] == sum(
            run.model.get_parameter(f"blocks.{n}.ffn.{kind}.weight").numel()
            for n in range(2)
            for kind in ("gate", "up", "down")
        )
        with pytest.raises(ConfigError, match="layers are blocks"):
            sparse_copy(run, run.model, sparsity(skip=("blocks.*",)))


@pytest.mark.parametrize("criterion", ["magnitude", "activation"])
def test_weights_that_are_not_finite_are_refused(settings: list[str], criterion: Criterion) -> None:
    with opened(settings) as run:
        with torch.no_grad():
            run.model.get_parameter("blocks.1.ffn.up.weight")[0, 0] = float("nan")
        with pytest.raises(ConfigError, match="not finite"):
            sparse_copy(run, run.model, sparsity(criterion=criterion))
