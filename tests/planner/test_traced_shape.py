"""Shapes of models of one's own: those of the same model's shape, traced once, and searched as any other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unisono.errors import ConfigError
from unisono.models.gpt import GPT, ModelOptions
from unisono.planner import traced_shape as module
from unisono.planner.devices import DEVICES
from unisono.planner.layout_space import Job
from unisono.planner.model_shape import ModelShape
from unisono.planner.search import choose, compare
from unisono.planner.shape_cache import SHAPES_FILE
from unisono.planner.traced_shape import traced_shape

GIVEN = "model mine.py:make"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "unisono" / SHAPES_FILE


def gpt(layers: int = 4, **changes: Any) -> GPT:
    options: dict[str, Any] = {"dim": 64, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 160, "vocab_size": 96} | changes
    return GPT(ModelOptions(num_layers=layers, **options))


def shape(layers: int = 4, *, tied: bool) -> ModelShape:
    norms = (2 * layers + 1) * 64
    return ModelShape(
        layers=layers, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=160, gated=True, vocab=96, tied=tied, other_params=norms
    )  # fmt: skip


class Plain(nn.Module):
    """Blocks of one linear layer; ``output`` makes what the model returns of logits."""

    def __init__(self, layers: int = 3, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, 32)

    def forward(self, tokens: Tensor) -> Any:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.output(hidden)

    def output(self, hidden: Tensor) -> Any:
        return self.head(hidden)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("layers", [4, 30])
def test_a_traced_gpt_has_the_counts_of_its_shape(tied: bool, layers: int) -> None:
    found, known = traced_shape(lambda: gpt(layers, tied=tied), tokens=128, given=GIVEN), shape(layers, tied=tied)
    assert found.traced is not None
    assert (found.layers, found.hidden, found.vocab, found.tied) == (layers, 64, 96, tied)
    assert (found.params, found.dense_products) == (known.params, known.dense_products)
    assert found.score_dims == pytest.approx(known.score_dims)
    assert found.flops_per_token(128) == pytest.approx(known.flops_per_token(128))
    # norms keep some in 32 bits, and the table of positions is kept too
    assert 1 <= found.block_activation_bytes / known.block_activation_bytes < 1.6
    assert found.block_offload_bytes >= found.block_activation_bytes


def test_what_a_linear_layer_keeps_is_its_input() -> None:
    found = traced_shape(Plain(), tokens=64, given=GIVEN).traced
    assert found is not None
    assert (found.params, found.products, found.score_dims) == (3 * 72, 3 * 64, 0)
    assert (found.kept_bytes, found.saved_bytes) == (16, 16)


def test_a_model_is_traced_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traces: list[int] = []
    inner = module._traced  # pyright: ignore[reportPrivateUsage]

    def counted(model: nn.Module, tokens: int) -> Any:
        traces.append(tokens)
        return inner(model, tokens)

    monkeypatch.setattr(module, "_traced", counted)
    first = traced_shape(Plain(), tokens=64, given=GIVEN)
    assert traces == [64, 32]
    assert traced_shape(Plain(), tokens=64, given=GIVEN) == first
    assert traces == [64, 32]
    content = json.loads(cache.read_text())
    assert len(content["shapes"]) == 1
    traced_shape(Plain(), tokens=32, given=GIVEN)
    traced_shape(Plain(width=16), tokens=64, given=GIVEN)
    monkeypatch.setattr(Plain, "output", lambda self, hidden: self.head(hidden) * 2)
    monkeypatch.setattr(Plain, "forward", lambda self, tokens: self.head(self.layers[1](self.embedding(tokens))) + 1)
    other = traced_shape(Plain(), tokens=64, given=GIVEN)  # another forward pass, which leaves blocks out
    assert other.dense_products == 64
    assert len(traces) == 8
    cache.write_text("{")
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parents[1]))
    assert traced_shape(Plain(), tokens=64, given=GIVEN) == first
    for shapes in (
        {"version": 9, "shapes": content["shapes"]},
        {"version": 1, "shapes": {key: {} for key in content["shapes"]}},
    ):
        cache.write_text(json.dumps(shapes))
        assert traced_shape(Plain(), tokens=64, given=GIVEN) == first


class ReadsValues(Plain):
    def output(self, hidden: Tensor) -> Any:
        return self.head(hidden) if float(hidden.sum()) else hidden


class ReturnsWords(Plain):
    def output(self, hidden: Tensor) -> Any:
        return "logits"


class SkipsBlocks(Plain):
    def forward(self, tokens: Tensor) -> Any:
        return self.head(self.embedding(tokens))


def broken() -> nn.Module:
    raise OSError("no weights")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (broken, "model mine.py:make, which cannot be built: OSError: no weights"),
        (lambda: nn.Sequential(nn.Embedding(4, 4)), "model mine.py:make, a model without a list of blocks"),
        (ReadsValues, "model mine.py:make, whose forward pass of token ids [1, 64] fails without values: "),
        (SkipsBlocks, "fails without values: TypeError: it runs none of its blocks"),
        (ReturnsWords, "fails without values: TypeError: it returns str, and no logits [1, tokens, vocabulary]"),
    ],
)
def test_what_cannot_be_traced_is_refused(make: Any, said: str, cache: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        traced_shape(make, tokens=64, given=GIVEN)
    assert said in raised.value.problems[0].given
    assert not cache.exists()


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert traced_shape(Plain(), tokens=64, given=GIVEN).layers == 3


def test_a_traced_model_is_searched_like_its_shape() -> None:
    options = {"dim": 2048, "num_heads": 16, "num_kv_heads": 16, "ffn_dim": 5632, "vocab_size": 32000}
    model = traced_shape(lambda: gpt(24, **options), tokens=2048, given=GIVEN)
    job = Job(
        model=model,
        device=DEVICES["h100"],
        num_devices=16,
        precision="bf16",
        global_batch=128,
        seq_len=2048,
        pins={},
    )
    found = choose(job, compare(job))
    assert found.best is not None
    assert {each.layout.tp for each in (found.best, *found.pareto)} == {1}
    rules = {(axis, value): rule for axis, value, rule in found.refused}
    assert rules["tp", 2] == "layers of a model of one's own are not divided"
    assert rules["recompute", "selective"] == "what it keeps of a model of one's own is not known"
    assert {layout.pp for layout in compare(job).layouts} >= {1, 2, 4, 8}
    assert torch.get_default_dtype() is torch.float32
