"""Models as files: configurations of runs have the parameters of the model that they build, and names stay names."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from unisono.config import load_config
from unisono.errors import ConfigError
from unisono.planner.layout import LayoutError
from unisono.planner.layout_columns import read_layout
from unisono.planner.model_files import is_model_file, read_model
from unisono.planner.model_presets import PRESETS
from unisono.planner.peak_memory import peak_memory
from unisono.train.build import build_model, find_tokenizer
from unisono.train.config import RunConfig

GIVEN = {"gpu_type": "h100", "gpus": "8"}
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96,
    "vocab_size": 128, "max_position_embeddings": 128,
}  # fmt: skip


def configured(file: Path, model: dict[str, object], **sections: dict[str, object]) -> Path:
    """A configuration in ``file``."""
    lines: list[str] = []
    for section, values in {"model": model, **sections}.items():
        lines += [f"[{section}]", *(f"{name} = {json.dumps(value)}" for name, value in values.items())]
    file.write_text("\n".join(lines) + "\n")
    return file


def built(file: Path) -> nn.Module:
    """The model of a configuration, as a run builds it."""
    config = load_config(RunConfig, [file]).value
    with torch.device("meta"):
        return build_model(config, find_tokenizer(config))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", ["gpt", "moe", "bert"])
def test_a_configuration_has_all_parameters_of_the_model_that_it_builds(tmp_path: Path, name: str, seed: int) -> None:
    rng = random.Random(f"{name} {seed}")
    heads = rng.choice([2, 4, 8])
    model: dict[str, object] = {
        "num_layers": rng.randrange(1, 6),
        "dim": heads * 2 * rng.randrange(1, 12),
        "num_heads": heads,
        "ffn_dim": rng.choice([0, 40, 72]),
        "vocab_size": rng.choice([0, 512, 1001]),
    }
    if name != "bert":
        model |= {"num_kv_heads": rng.choice([1, 2, heads]), "tied": rng.random() < 0.5}
        model["head_dim"] = rng.choice([0, 6, 16])
    if name == "moe":
        model |= {"num_experts": rng.choice([0, 3, 8]), "balance": rng.choice(["bias", "loss", "none"])}
    if not model.get("num_experts", 1):
        del model["num_experts"], model["balance"]
    kind = "masked_language_model" if name == "bert" else "language_model"
    seq_len = rng.choice([16, 128])
    file = configured(
        tmp_path / "config.toml", model, components={"model": name}, task={"kind": kind}, data={"seq_len": seq_len}
    )
    shape = read_model(str(file))
    assert shape.params == sum(parameter.numel() for parameter in built(file).parameters()), model
    assert (shape.max_seq_len, bool(shape.experts)) == (seq_len, name == "moe")
    assert read_model(str(tmp_path)) == shape  # as the folder of a run


def test_parameters_beside_the_matrices_are_held_and_take_no_time_to_compute_with(tmp_path: Path) -> None:
    file = configured(tmp_path / "config.toml", {"vocab_size": 512}, components={"model": "gpt"})
    layout = read_layout({"model": str(file), "fsdp": "8"} | GIVEN)
    bare = replace(layout, model=replace(layout.model, other_params=0))
    assert layout.model.other_params == 9 * 128
    held, least = peak_memory([layout, bare]).states
    assert held - least == pytest.approx(9 * 128 * 16 / 8)
    assert layout.model.active_params == bare.model.active_params


def test_the_name_of_a_preset_is_no_folder_and_a_path_is_no_preset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("llama-3-8b", "mine"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps(LLAMA))
    assert read_layout({"model": "llama-3-8b"} | GIVEN).model == PRESETS["llama-3-8b"]
    paths = ("./llama-3-8b", "mine", "mine/config.json", str(tmp_path / "mine"))
    found = [read_layout({"model": name} | GIVEN) for name in paths]
    assert {layout.model.layers for layout in found} == {4}
    assert {layout.seq_len for layout in found} == {128}
    assert not any(map(is_model_file, ("", "nobody-1b", "meta-llama/Llama-3-8B", "gpt-1.5b")))
    with pytest.raises(ConfigError, match="there is no such file"):
        read_layout({"model": "./llama-3-70b"} | GIVEN)
    with pytest.raises(LayoutError, match="a file describes the whole shape"):
        read_layout({"model": "mine", "layers": "2"} | GIVEN)


def test_a_home_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_model("~/config.json").layers == 4


@pytest.mark.parametrize(
    ("model", "sections", "said"),
    [
        ({}, {"task": {"kind": "image"}, "data": {"train": "a"}}, "components.model 'resnet' for task.kind 'image'"),
        ({}, {"task": {"kind": "text"}, "data": {"train": "a"}}, "components.model 'bert' for task.kind 'text'"),
        ({}, {"components": {"model": "abacus"}}, "components.model 'abacus'"),
        ({"pretrained": "folder"}, {}, "model.pretrained = 'folder'"),
        ({}, {"data": {"tokenizer": "none.json"}}, "no tokenizer to take it from"),
    ],
    ids=str,
)
def test_configurations_of_other_models_are_refused_with_what_works(
    tmp_path: Path, model: dict[str, object], sections: dict[str, dict[str, object]], said: str
) -> None:
    file = configured(tmp_path / "mine.toml", model, **sections)
    with pytest.raises(ConfigError) as caught:
        read_model(str(file))
    (problem,) = caught.value.problems
    assert problem.given.startswith(f"{file}: ")
    assert said in problem.given
    if "tokenizer" in said:
        assert problem.nearest == "model.vocab_size in the file"
    else:
        assert f"unisono plan auto {file} or unisono plan fit {file}" in problem.nearest


def test_a_model_of_ones_own_is_traced_for_its_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "mine.py").write_text(
        "from unisono import RunConfig\nfrom unisono.train.config import Components\n\n"
        "from unisono.models.gpt import GPT, ModelOptions\n\n"
        "def net(config):\n    return GPT(ModelOptions(num_layers=3, dim=32, num_heads=2, vocab_size=48))\n\n"
        "def config():\n    return RunConfig(components=Components(model=net))\n"
    )
    file = tmp_path / "mine.toml"
    file.write_text('base = "mine.py"\ndata.seq_len = 64\n')
    found = read_model(str(file))
    assert (found.layers, found.hidden, found.vocab, found.max_seq_len) == (3, 32, 48, 64)
    assert read_model(str(file), seq_len=32).max_seq_len == 32
    assert read_model(str(tmp_path / "mine.py")).layers == 3
    file.write_text('base = "mine.py"\n[task]\nkind = "image"\n[data]\ntrain = "a"\n')
    with pytest.raises(ConfigError, match=r"components\.model 'of your own'"):
        read_model(str(file))


@pytest.mark.parametrize("name", [".", "./none", "none.toml", "\0.json", "x" * 5000 + ".json"], ids=repr)
def test_paths_without_a_model_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        read_model(name)
    assert len(caught.value.problems[0].given) < 600
