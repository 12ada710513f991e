"""Zeros among the weights: which become 0, which layers stay, and what is said of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from commands import make_desk
from torch import Tensor, nn

from unisono.compress.scores import Criterion, input_norms
from unisono.compress.sparse import Sparsity, layer_names, sparse_copy
from unisono.config import load_config
from unisono.errors import ConfigError
from unisono.models.layer_patterns import OUTER_LAYERS, matching_layers
from unisono.models.quantize_options import QuantizeOptions
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
    assert record["kept_dense"] == {"a table of embeddings": ["embedding.weight"]}
    assert any("sparse tensor cores" in line for line in lines)


def test_rows_that_fit_no_pattern_stay(settings: list[str]) -> None:
    with opened(settings, "model.ffn_dim=30") as run:
        made, record, lines = sparse_copy(run, run.model, sparsity(pattern="2:4"))
        assert record["kept_dense"]["its rows do not fit 2:4"] == [f"blocks.{n}.ffn.down.weight" for n in range(2)]
        assert bool((made.get_parameter("blocks.0.ffn.down.weight") != 0).all())
    assert "dense, its rows do not fit 2:4: blocks.0.ffn.down.weight, blocks.1.ffn.down.weight" in lines


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


class Mixed(nn.Module):
    """Layers of torch of which some are never called: the projection of an attention, and a head that only training uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(512, 16)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
        self.grouped = nn.Conv2d(16, 32, (1, 3), padding=(0, 1), groups=4)
        self.depthwise = nn.Conv2d(32, 32, 1, groups=32)
        self.auxiliary = nn.Linear(32, 8)
        self.up = nn.Linear(32, 512)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.encoder(self.table(tokens))
        hidden = self.depthwise(self.grouped(hidden.mT[:, :, None]))[:, :, 0].mT  # [B, T, 32]
        if self.training:
            hidden = hidden + self.auxiliary(hidden).mean()
        return self.up(input=hidden)


@pytest.mark.parametrize("criterion", ["magnitude", "activation", "taylor"])
def test_layers_that_no_sample_reaches_are_compared_by_magnitude(settings: list[str], criterion: Criterion) -> None:
    model = Mixed().eval()
    with opened(settings) as run:
        made, record, lines = sparse_copy(run, model, sparsity(criterion=criterion))
    unreached = {
        "magnitude": [],
        "activation": ["encoder.self_attn.out_proj.weight", "auxiliary.weight"],
        "taylor": ["auxiliary.weight"],
    }[criterion]
    assert record["by_magnitude"] == unreached
    assert [line for line in lines if line.startswith("by magnitude")] == (
        [f"by magnitude, as no training sample reached them: {', '.join(unreached)}"] if unreached else []
    )
    assert record["kept_dense"]["not the weight of a linear layer, convolution or experts"] == [
        "encoder.self_attn.in_proj_weight"
    ]
    before, after = dict(model.named_parameters()), dict(made.named_parameters())
    for name in unreached:
        rows = before[name].abs()
        assert torch.equal(after[name] == 0, rows < rows.median(1, keepdim=True).values.nextafter(torch.tensor(2.0)))
    for name in ("encoder.linear1.weight", "encoder.linear2.weight", "grouped.weight"):
        rows = after[name].flatten(1)
        assert set((rows == 0).sum(1).tolist()) == {rows.shape[1] // 2}


def test_a_grouped_convolution_has_the_norms_of_its_own_channels(settings: list[str]) -> None:
    model, seen = Mixed().eval(), list[Tensor]()
    with opened(settings) as run:
        handle = model.grouped.register_forward_pre_hook(lambda _layer, inputs: seen.append(inputs[0].double()))
        made, _, _ = sparse_copy(run, model, sparsity())
        handle.remove()
    norms = torch.cat(seen).square().sum((0, 2, 3)).sqrt()  # [16]
    for channel in range(32):
        group = channel // 8
        scores = model.grouped.weight[channel].abs().double() * norms[4 * group : 4 * group + 4, None, None]
        lowest = scores.flatten().argsort()[:6].sort().values
        assert (made.get_parameter("grouped.weight")[channel].flatten() == 0).nonzero().flatten().equal(lowest)


def test_experts_that_no_sample_reaches_lose_their_least_weights(settings: list[str]) -> None:
    experts = ("components.model=moe", "model.num_experts=4", "model.num_experts_per_token=1", "model.ffn_dim=16")
    with opened(settings, *experts) as run:
        with torch.no_grad():
            run.model.get_parameter("blocks.1.ffn.router.weight").zero_()  # of equal experts one gets all tokens
        made, record, _ = sparse_copy(run, run.model, sparsity())
        name = "blocks.1.ffn.experts.up"
        norms = input_norms(run, run.model, [name], 4)[name]  # [E, I]
        unreached = (norms == 0).all(1).nonzero().flatten().tolist()
        assert unreached
        for expert in unreached:
            rows = run.model.get_parameter(name)[expert].abs()
            kept = rows.topk(8, dim=1).indices.sort(1).values
            found = (made.get_parameter(name)[expert] != 0).nonzero()[:, 1].reshape(len(rows), 8)
            assert torch.equal(found, kept)
    assert record["by_magnitude"] == []


def test_which_layers_can_be_sparse() -> None:
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict(
        {
            "mlp": nn.ModuleDict({"fc_out": nn.Linear(4, 4), "score": nn.Linear(4, 4)}),
            "first": shared,
            "second": nn.Linear(4, 4),
            "scaled": nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
            "lm_head": nn.Linear(4, 4),
        }
    )
    model["second"].weight = shared.weight
    assert list(layer_names(model)) == ["mlp.fc_out", "mlp.score", "first"]
    assert matching_layers(["mlp.fc_out", "lm_head.decoder", "lm_head"], OUTER_LAYERS) == ["lm_head.decoder", "lm_head"]
    assert QuantizeOptions().skip == OUTER_LAYERS


@pytest.mark.parametrize("criterion", ["magnitude", "activation"])
def test_weights_that_are_not_finite_are_refused(settings: list[str], criterion: Criterion) -> None:
    with opened(settings) as run:
        with torch.no_grad():
            run.model.get_parameter("blocks.1.ffn.up.weight")[0, 0] = float("nan")
        with pytest.raises(ConfigError, match="not finite"):
            sparse_copy(run, run.model, sparsity(criterion=criterion))
