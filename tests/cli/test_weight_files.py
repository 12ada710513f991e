"""``unisono checkpoint import`` and ``export --format``: weights of MXNet and MindSpore."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from commands import Desk
from safetensors.torch import load_file, save_file
from states import bits
from torch import Tensor

from unisono.checkpoint import list_checkpoints, open_checkpoint
from unisono.cli.checkpoint import _FAMILIES
from unisono.interop.model_folder import NAME_MAPS
from unisono.interop.weight_file import open_weights, write_weights_file

FIXTURES = Path(__file__).parents[1] / "interop" / "fixtures"
MODELS = Path(__file__).parents[1] / "interop" / "models"
SUFFIXES = {"mxnet": ".params", "mindspore": ".ckpt"}


def load(path: Path) -> dict[str, Tensor]:
    with open_weights(path) as weights:
        return {name: tensor.load() for name, tensor in weights.tensors.items()}


def test_the_command_writes_safetensors_that_the_package_opens(desk: Desk, tmp_path: Path) -> None:
    out = tmp_path / "mx.safetensors"
    done = desk.here("checkpoint", "import", str(FIXTURES / "named.params"), "--out", str(out), "--json")
    found = load_file(out)
    assert done.json["format"] == "mxnet"
    assert done.json["tensors"]["csr"] == {"dtype": "float32", "shape": [3, 4]}
    assert done.json["bytes"] == out.stat().st_size
    assert {name: bits(tensor) for name, tensor in found.items()} == {
        name: bits(tensor) for name, tensor in load(FIXTURES / "named.params").items()
    }
    again = desk.here("checkpoint", "import", str(FIXTURES / "named.params"), "--out", str(out))
    assert (again.code, "a file that exists is not overwritten" in again.err) == (2, True)


def test_the_suffix_of_the_result_is_its_format(desk: Desk, tmp_path: Path) -> None:
    done = desk.here("checkpoint", "import", str(FIXTURES / "all.ckpt"), "--out", str(tmp_path / "a.params"))
    assert "15 tensors of" in done.out
    assert "text that no tensor holds: note" in done.out
    with open_weights(tmp_path / "a.params") as weights:
        assert weights.format == "mxnet"
    refused = desk.here("checkpoint", "import", str(FIXTURES / "all.ckpt"), "--out", str(tmp_path / "a.bin"))
    assert refused.code == 2
    assert "try:  " + str(tmp_path / "a.safetensors") in refused.err


def test_a_damaged_file_leaves_nothing_behind(desk: Desk, tmp_path: Path) -> None:
    source = tmp_path / "cut.params"
    source.write_bytes((FIXTURES / "named.params").read_bytes()[:-1])
    outcome = desk.here("checkpoint", "import", str(source), "--out", str(tmp_path / "a.safetensors"))
    assert outcome.code == 2
    assert "nothing was written" in outcome.err
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize("kind", ["mxnet", "mindspore"])
def test_a_run_is_exported_to_one_file(desk: Desk, mine: Path, kind: str) -> None:
    done = desk.here("checkpoint", "export", str(mine), "--format", kind, "--json")
    path = mine / f"export{SUFFIXES[kind]}"
    assert done.json["path"] == str(path)
    found = load(path)
    newest = max(entry.path for entry in list_checkpoints(mine / "checkpoints") if entry.state == "committed")
    saved = open_checkpoint(newest)
    names = {name.removeprefix("model/") for name in saved.names() if name.startswith("model/")}
    assert names <= set(found)
    assert all(bits(found[name]) == bits(saved.tensor(f"model/{name}")) for name in names)
    again = desk.here("checkpoint", "export", str(mine), "--format", kind)
    assert "a file that exists is not overwritten" in again.err


def test_a_known_model_becomes_a_folder_of_transformers(desk: Desk, tmp_path: Path) -> None:
    source, out = MODELS / "models_resnet_bottleneck.ckpt", tmp_path / "resnet"
    command = ("checkpoint", "import", str(source), "--out", str(out), "--as", "auto", "--set", "image_size=33")
    done = desk.here(*command, "--json")
    assert len(done.json["tensors"]) == 122
    assert done.json["tensors"]["classifier.1.weight"] == {"dtype": "float32", "shape": [5, 32]}
    assert {key: value for key, value in done.json.items() if key not in ("tensors", "left_out")} == {
        "source": str(source),
        "format": "mindspore",
        "path": str(out),
        "model": "bottleneck ResNet of mindspore/models",
        "architecture": "ResNetForImageClassification",
    }
    assert "moments.conv1.weight" in done.json["left_out"]
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    config = json.loads((out / "config.json").read_text())
    assert (config["layer_type"], config["depths"], config["hidden_sizes"]) == (
        "bottleneck",
        [2, 1, 1, 1],
        [8, 16, 24, 32],
    )
    assert load_file(out / "model.safetensors").keys() >= {
        "classifier.1.weight",
        "resnet.embedder.embedder.convolution.weight",
    }
    again = desk.here(*command)
    assert (again.code, "is not overwritten" in again.err) == (2, True)
    text = desk.here(*command[:3], "--out", str(tmp_path / "other"), *command[5:]).out
    assert f"bottleneck ResNet of mindspore/models: 122 tensors of {source}" in text
    assert "left out: state of the optimizer, and counters: global_step, learning_rate, momentum, moments" in text


def test_all_families_can_be_asked_for() -> None:
    assert set(_FAMILIES) == {name_map.family for name_map in NAME_MAPS}


def test_a_known_model_is_named_without_as(desk: Desk, tmp_path: Path) -> None:
    source = str(MODELS / "gluon_resnet_basic.params")
    done = desk.here("checkpoint", "import", source, "--out", str(tmp_path / "a.safetensors"))
    assert "with --as resnet the ResNet v1 of Gluon's model zoo becomes a folder that transformers loads" in done.out
    done = desk.here("checkpoint", "import", source, "--out", str(tmp_path / "b.safetensors"), "--json")
    assert done.json["model"] == "ResNet v1 of Gluon's model zoo"
    done = desk.here(
        "checkpoint", "import", str(FIXTURES / "named.params"), "--out", str(tmp_path / "c.ckpt"), "--json"
    )
    assert done.json["model"] is None


@pytest.mark.parametrize(
    ("source", "options", "words"),
    [
        (
            "models/gluon_resnet_basic.params",
            ("--as", "bert"),
            "names say which model the weights are of: BERT of GluonNLP",
        ),
        ("models/mindcv_resnet_basic.ckpt", ("--as", "auto"), "ResNet of MindCV: no image_size"),
        (
            "models/gluonnlp_bert.params",
            ("--as", "bert", "--set", "heads"),
            "a value of config.json has the form NAME=VALUE",
        ),
        ("models/gluonnlp_bert.params", ("--set", "num_attention_heads=4"), "--set num_attention_heads=4 without --as"),
        ("fixtures/named.params", ("--as", "auto"), "nothing was written"),
    ],
)
def test_a_model_that_is_refused_leaves_nothing_behind(
    desk: Desk, tmp_path: Path, source: str, options: tuple[str, ...], words: str
) -> None:
    done = desk.here("checkpoint", "import", str(FIXTURES.parent / source), "--out", str(tmp_path / "hf"), *options)
    assert (done.code, words in done.err) == (2, True), done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("out", [".", "/", "", ".."])
def test_a_folder_is_no_name_of_a_file(desk: Desk, out: str) -> None:
    refused = desk.here("checkpoint", "import", str(FIXTURES / "all.ckpt"), "--out", out)
    assert refused.code == 2
    assert f"try:  {Path(out) / 'weights.safetensors'}" in refused.err


def test_a_folder_that_is_a_file_is_named(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").touch()
    out = tmp_path / "a.safetensors" / "b" / "c.safetensors"
    refused = desk.here("checkpoint", "import", str(FIXTURES / "all.ckpt"), "--out", str(out))
    assert f"the file is written into a folder, and {tmp_path / 'a.safetensors'} is none" in refused.err
    assert "mkdir" not in refused.err


@pytest.mark.parametrize("arguments", [("--out=e.ckpt",), ("--out=e", "--as=gpt2")])
def test_a_file_without_tensors_is_refused(desk: Desk, arguments: tuple[str, ...]) -> None:
    save_file({}, desk.folder / "empty.safetensors")
    refused = desk.here("checkpoint", "import", "empty.safetensors", *arguments)
    assert (refused.code, "empty.safetensors (safetensors), which holds no tensors" in refused.err) == (2, True)
    assert not (desk.folder / "e.ckpt").exists()


def test_a_file_of_no_known_format_is_refused_with_those_that_are_read(desk: Desk) -> None:
    (desk.folder / "notes.txt").write_text("in 2024, weights were lost")
    refused = desk.here("checkpoint", "import", "notes.txt", "--out=a.safetensors")
    assert "notes.txt: it begins as a file of none of the formats that are read" in refused.err
    assert "MXNet's .params" in refused.err


def test_the_name_of_the_header_is_no_name_of_a_tensor(desk: Desk) -> None:
    layout = [("__metadata__", torch.float32, (1,))]
    write_weights_file(desk.folder / "meta.params", "mxnet", layout, lambda _: torch.ones(1))
    refused = desk.here("checkpoint", "import", "meta.params", "--out=a.safetensors")
    assert (refused.code, "a tensor called '__metadata__'" in refused.err) == (2, True), refused.err
    assert not (desk.folder / "a.safetensors").exists()
    assert desk.here("checkpoint", "import", "meta.params", "--out=a.ckpt").code == 0


def test_the_last_setting_of_a_name_counts(desk: Desk) -> None:
    source = str(MODELS / "models_resnet_bottleneck.ckpt")
    sizes = ("--set=image_size=-1", "--set=image_size=33")
    assert desk.here("checkpoint", "import", source, "--out=a", "--as=auto", *sizes).code == 0
    assert "The last of a name counts." in " ".join(desk.here("checkpoint", "import", "--help").out.split())
