"""``unisono quantize``: the folder that it writes, what other commands make of it, and what it refuses."""

from __future__ import annotations

import json
import os
import shutil
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import Desk
from peer_packages import folder_of_packages
from task_data import write_images

from unisono.checkpoint import open_checkpoint
from unisono.cli.common import load_run
from unisono.dist import JobSpec, World
from unisono.models import quantized_torchao
from unisono.models.quantized_model import stored_layers
from unisono.train.build import find_tokenizer
from unisono.train.load import load_model

PYTHON = os.environ.get("UNISONO_TORCHAO_PYTHON")
BACKEND = "UNISONO__QUANTIZE__BACKEND"
SCHEMES = ["int8", "int8_dynamic", "int8_static", "int4"]
# group 8, because the tiny model is 16 wide
OF_SCHEME = {"int4": ["--group-size=8"], "int8_static": ["--calibration-samples=4", "--percentile=99.9"]}


def quantized(desk: Desk, source: Path, out: Path, scheme: str, *more: str) -> dict[str, Any]:
    done = desk.here(
        "quantize", str(source), f"--out={out}", f"--scheme={scheme}", "--json", *OF_SCHEME.get(scheme, ()), *more
    )
    assert done.code == 0, done.err
    return done.json


def evaluation(desk: Desk, run_dir: Path) -> dict[str, float]:
    done = desk.here("eval", str(run_dir), "--json")
    assert done.code == 0, done.err
    return done.json["evaluation"]


def tensors(run_dir: Path) -> dict[str, torch.Tensor]:
    (folder,) = (run_dir / "checkpoints").iterdir()
    snapshot = open_checkpoint(folder)
    return {name: snapshot.tensor(name) for name in snapshot.names()}


def logits(run_dir: Path) -> torch.Tensor:
    config = load_run(str(run_dir)).value
    model, _ = load_model(config, find_tokenizer(config), World(JobSpec()), None)
    with torch.no_grad():
        return model(torch.arange(12)[None]).logits()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_result_is_a_run_that_computes_what_was_measured(
    desk: Desk, trained: Path, tmp_path: Path, scheme: str
) -> None:
    out = tmp_path / "out"
    told = quantized(desk, trained, out, scheme)
    assert told["scheme"] == scheme
    assert told["ok"] is True
    assert evaluation(desk, out) == told["figures"]["after"]["evaluation"]
    assert evaluation(desk, trained) == told["figures"]["before"]["evaluation"]
    assert told["figures"]["after"]["evaluation"] != told["figures"]["before"]["evaluation"]
    assert told["drop"] < 0.05
    written = desk.here("generate", str(out), "--tokens=5", "--json")
    assert written.code == 0, written.err
    record = json.loads((out / "compression.json").read_text())
    assert [layer["name"] for layer in record["layers"]] == [
        f"blocks.0.{name}"
        for name in (*(f"attention.{each}" for each in ("q", "k", "v", "out")), "ffn.gate", "ffn.up", "ffn.down")
    ]
    assert record["kept"][0]["reason"] == "a table of embeddings"
    source = load_run(str(trained)).hash
    assert record["source"]["config"] == source
    card = (out / "export/README.md").read_text()
    assert "int" in card
    assert f"- configuration: `{source}`" in card
    assert "- layers:" not in card


@pytest.mark.parametrize("scheme", SCHEMES)
def test_loaded_again_it_has_the_same_bits(desk: Desk, trained: Path, tmp_path: Path, scheme: str) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    quantized(desk, trained, one, scheme)
    quantized(desk, trained, other, scheme)
    mine, theirs = tensors(one), tensors(other)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert torch.equal(logits(one), logits(other))
    packed = [tensor for name, tensor in mine.items() if name.endswith("weight_packed")]
    assert {tensor.dtype for tensor in packed} == {torch.uint8 if scheme == "int4" else torch.int8}
    exported = desk.here("checkpoint", "export", str(one), str(tmp_path / "exported"))
    assert exported.code == 0, exported.err
    weights = "model.safetensors"
    assert (tmp_path / "exported" / weights).read_bytes() == (one / "export" / weights).read_bytes()


@pytest.mark.parametrize(("scheme", "bits", "scale_bits"), [("int8", 8, 32), ("int4", 4, 16)])
def test_the_size_is_that_of_theory(desk: Desk, tmp_path: Path, scheme: str, bits: int, scale_bits: int) -> None:
    run_dir, dim, width, layers = tmp_path / "run", 256, 768, 2  # a file's header counts for less than 2 %
    sizes = (f"--set=model.dim={dim}", f"--set=model.ffn_dim={width}", f"--set=model.num_layers={layers}")
    assert desk.train(run_dir, *sizes, "--set=train.steps=1").code == 0
    told = desk.here("quantize", str(run_dir), f"--out={tmp_path / 'out'}", f"--scheme={scheme}", "--json").json
    shapes = layers * [
        (dim, dim),
        (dim // 2, dim),
        (dim // 2, dim),
        (dim, dim),
        (width, dim),
        (width, dim),
        (dim, width),
    ]
    weights = sum(rows * columns for rows, columns in shapes)
    scales = sum(rows * (1 if scheme == "int8" else columns // 32) for rows, columns in shapes)
    kept = sum(tensor.nbytes for name, tensor in tensors(run_dir).items() if "embedding" in name or "norm" in name) // 3
    theory = weights * bits / 8 + scales * scale_bits / 8 + kept  # of three copies: weights and two of AdamW
    files = sum(file.stat().st_size for file in (tmp_path / "out/checkpoints").rglob("*.safetensors"))
    assert theory < told["figures"]["after"]["stored_bytes"] < 1.02 * theory
    assert sum(tensor.nbytes for tensor in tensors(tmp_path / "out").values()) == pytest.approx(theory, rel=0.02)
    assert theory < files < 1.02 * theory


def test_a_limit_on_the_loss(desk: Desk, trained: Path, tmp_path: Path) -> None:
    out, given = tmp_path / "out", ["quantize", str(trained), "--scheme=int4", "--group-size=16"]
    drop = desk.here(*given, f"--out={tmp_path / 'all'}", "--json").json["drop"]
    assert drop > 0
    refused = desk.here(*given, f"--out={out}", f"--max-drop={drop / 2}")
    assert refused.code == 1
    assert "refused: loss is" in refused.out
    assert not out.exists()
    assert desk.here(*given, f"--out={out}", f"--max-drop={drop * 2}").code == 0


def test_layers_that_cost_most(desk: Desk, trained: Path, tmp_path: Path) -> None:
    told = quantized(desk, trained, tmp_path / "out", "int4", "--sensitivity", "--skip=*.ffn.*")
    found = told["sensitivity"]
    assert {each["layer"] for each in found} == {f"blocks.0.attention.{name}" for name in ("q", "k", "v", "out")}
    changes = [each["change"] for each in found]
    assert changes == sorted(changes, reverse=True)
    assert len(set(changes)) == len(changes)
    before = told["figures"]["before"]["evaluation"]["loss"]
    assert all(each["loss"] - each["change"] == pytest.approx(before) for each in found)
    text = desk.here(
        "quantize", str(trained), f"--out={tmp_path / 'text'}", "--scheme=int4", "--group-size=8", "--sensitivity"
    ).out
    assert "one layer quantized alone" in text
    assert "size on disk" in text


def test_only_the_named_layers_are_kept(desk: Desk, trained: Path, tmp_path: Path) -> None:
    quantized(desk, trained, tmp_path / "out", "int8", "--skip=*.attention.*")
    config = load_run(str(tmp_path / "out")).value
    model, _ = load_model(config, find_tokenizer(config), World(JobSpec()), None)
    assert set(stored_layers(model)) == {f"blocks.0.ffn.{name}" for name in ("gate", "up", "down")}


# --- quantization-aware training ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["int8", "int8_dynamic", "int4"])
def test_after_training_with_rounding_nothing_changes(desk: Desk, tmp_path: Path, scheme: str) -> None:
    run_dir, out = tmp_path / "run", tmp_path / "out"
    group = ["--set=quantize.group_size=8"] if scheme == "int4" else []
    settings = ["--set=quantize.aware=true", f"--set=quantize.scheme={scheme}", *group]
    done = desk.train(run_dir, *settings)
    assert done.code == 0, done.err
    told = desk.here("quantize", str(run_dir), f"--out={out}", "--json").json
    assert told["scheme"] == scheme
    assert (
        told["figures"]["after"]["evaluation"] == told["figures"]["before"]["evaluation"] == evaluation(desk, run_dir)
    )
    assert torch.equal(logits(out), logits(run_dir))
    plain = desk.train(tmp_path / "plain")
    assert plain.code == 0
    assert evaluation(desk, tmp_path / "plain") != evaluation(desk, run_dir)
    refused = desk.here("quantize", str(run_dir), f"--out={tmp_path / 'other'}", "--scheme=int8_static")
    assert refused.code == 2
    assert "the weights were trained for this rounding" in refused.err
    refused = desk.here("quantize", str(run_dir), f"--out={tmp_path / 'other'}", "--sensitivity")
    assert refused.code == 2
    assert "all layers are rounded already" in refused.err


def test_averaged_weights_of_training_with_rounding_stay_as_good(desk: Desk, tmp_path: Path) -> None:
    """What is evaluated is the average, rounded; ``quantize`` stores just that."""
    run_dir, out = tmp_path / "run", tmp_path / "out"
    aware = ["--set=quantize.aware=true", "--set=quantize.scheme=int4", "--set=quantize.group_size=8"]
    done = desk.train(run_dir, *aware, "--set=train.ema_decay=0.5", "--json")
    assert done.code == 0, done.err
    told = desk.here("quantize", str(run_dir), f"--out={out}", "--json").json
    expected = evaluation(desk, run_dir)
    assert told["figures"]["before"]["evaluation"] == told["figures"]["after"]["evaluation"] == expected
    assert evaluation(desk, out) == expected
    assert desk.train(tmp_path / "last", *aware).code == 0
    assert evaluation(desk, tmp_path / "last") != expected  # the weights of the last step are others


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["quantize.scheme=int4", "quantize.group_size=8"], "stored integers have no gradient"),
        (["quantize.scheme=int8_static", "quantize.aware=true"], "scales of activations are calibrated"),
        (["quantize.scheme=int4", "quantize.group_size=12"], "a group is a multiple of 8"),
        (
            ["quantize.scheme=int4", "quantize.aware=true"],
            "quantize.group_size 32 with 16 inputs of blocks.0.attention.q",
        ),
        (
            ["quantize.scheme=int8", "quantize.aware=true", "quantize.skip=['blocks.0.attn.q']"],
            "blocks.0.attention.q",
        ),
        (["quantize.scheme=int8", "quantize.aware=true", "quantize.skip=['*']"], "no layer is left"),
        (["quantize.scheme=int8_dynamic", "quantize.aware=true", "model.num_experts=2"], "blocks.0.ffn.experts.gate"),
        (["quantize.scheme=int8", "quantize.aware=true", "quantize.backend=torchao"], "backend 'torchao' with aware"),
        (["quantize.backend=torchao"], "backend 'torchao' with scheme 'none'"),
        (["quantize.scheme=int8", "model.pretrained=x", "lora.rank=4"], "adapters are no whole model"),
    ],
)
def test_what_cannot_be_trained(desk: Desk, tmp_path: Path, settings: list[str], words: str) -> None:
    done = desk.train(tmp_path / "run", *(f"--set={each}" for each in settings))
    assert done.code == 2
    assert words in done.err


def test_parts_of_a_row_have_no_scale(desk: Desk, tmp_path: Path) -> None:
    settings = (
        "--set=quantize.scheme=int8",
        "--set=quantize.aware=true",
        "--set=plan.tp=2",
        "--set=launch.num_processes=2",
    )
    done = desk.process("train", f"--set=run.dir={tmp_path / 'run'}", *desk.settings, *settings)
    assert done.code == 2
    assert "quantize.aware with plan.tp 2" in done.err


# --- refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--scheme=int4"], "quantize.group_size=16"),  # 16 inputs
        (["--scheme=int4", "--group-size=12"], "a group is a multiple of 8"),
        (["--skip=blocks.0.attention.w"], "blocks.0.attention.q"),
        (["--skip=*"], "no layer is left"),
        (["--group-size=8"], "it is an option of --scheme int4"),
        (["--calibration-samples=8"], "it is an option of --scheme int8_static"),
        (["--scheme=int4", "--group-size=8", "--percentile=99"], "it is an option of --scheme int8_static"),
        (["--metric=f1"], "--metric f1"),
        (["--set=model.dim=8"], "leave --set out"),
    ],
)
def test_what_is_refused(desk: Desk, trained: Path, tmp_path: Path, options: list[str], words: str) -> None:
    done = desk.here("quantize", str(trained), f"--out={tmp_path / 'out'}", *options)
    assert done.code == 2
    assert words in done.err
    assert os.listdir(tmp_path) == []


def test_a_folder_that_exists(desk: Desk, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    done = desk.here("quantize", str(trained), f"--out={tmp_path / 'out'}")
    assert done.code == 2
    assert os.listdir(tmp_path / "out") == []


def test_what_is_quantized_already(desk: Desk, trained: Path, tmp_path: Path) -> None:
    quantized(desk, trained, tmp_path / "out", "int8")
    done = desk.here("quantize", str(tmp_path / "out"), f"--out={tmp_path / 'again'}")
    assert done.code == 2
    assert "a source that has int8 weights already" in done.err
    assert "a quantized model cannot be quantized again" in done.err
    before = sorted((tmp_path / "out").rglob("*"))
    trains = desk.here("train", "--debug", f"--set=run.dir={tmp_path / 'out'}", "--set=train.steps=8")
    assert trains.code == 2
    assert "stored integers have no gradient" in trains.err
    assert sorted((tmp_path / "out").rglob("*")) == before


def test_weights_that_are_no_numbers(desk: Desk, mine: Path, tmp_path: Path) -> None:
    from unisono.checkpoint.conversion import write_model

    folder = sorted((mine / "checkpoints").iterdir())[-1]
    snapshot = open_checkpoint(folder)
    values = {
        name.removeprefix("model/"): snapshot.tensor(name) for name in snapshot.names() if name.startswith("model/")
    }
    values["blocks.0.ffn.up.weight"][3, 2] = np.inf
    shutil.rmtree(mine / "checkpoints")
    write_model(mine / "checkpoints", values, step=4, meta=snapshot.meta)
    done = desk.here("quantize", str(mine), f"--out={tmp_path / 'out'}")
    assert done.code == 2
    assert "the weight of blocks.0.ffn.up" in done.err
    assert not (tmp_path / "out").exists()


# --- torchao as the back end ---------------------------------------------------------------------------------------------


@pytest.fixture
def no_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(quantized_torchao, "version", version)


@pytest.mark.usefixtures("no_torchao")
def test_without_the_package(desk: Desk, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = desk.here("quantize", str(trained), f"--out={tmp_path / 'out'}", "--backend=torchao")
    assert done.code == 2
    assert "quantize.backend 'torchao', whose package torchao is not installed" in done.err
    assert "pip install torchao" in done.err
    assert os.listdir(tmp_path) == []
    told = quantized(desk, trained, tmp_path / "out", "int8")
    assert "backend" not in told
    monkeypatch.setenv(BACKEND, "torchao")
    for command in (["eval"], ["generate", "--tokens=2"]):
        refused = desk.here(command[0], str(tmp_path / "out"), *command[1:])
        assert refused.code == 2
        assert f"{BACKEND}=torch" in refused.err


def test_layers_that_torch_computes_are_told_on_loading(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir, out = tmp_path / "run", tmp_path / "out"
    assert desk.train(run_dir, "--set=model.num_experts=2", "--set=train.steps=1").code == 0
    quantized(desk, run_dir, out, "int8")
    monkeypatch.setattr(quantized_torchao, "version", lambda _name: "0.18.0")
    monkeypatch.setenv(BACKEND, "torchao")
    config = load_run(str(out)).value
    load_model(config, find_tokenizer(config), World(JobSpec()), None)
    assert [record.getMessage() for record in caplog.records if "torchao" in record.getMessage()] == [
        "torchao computes 4 of 7 quantized layers; torch computes 3: experts"
    ]


@pytest.mark.peer
@pytest.mark.timeout(600)
@pytest.mark.skipif(PYTHON is None, reason="NOT CHECKED: no environment with torchao: tests/peers/venvs.sh torchao")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_either_back_end_loads_the_folder(
    desk: Desk, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    assert PYTHON is not None
    packages, of_torch, of_torchao = folder_of_packages(PYTHON), tmp_path / "torch", tmp_path / "torchao"

    def with_torchao(*arguments: str) -> Any:
        done = desk.process(*arguments, "--json", PYTHONPATH=packages)
        assert done.code == 0, done.err
        assert done.err == ""  # no notes of torchao on kernels of other devices
        return done.json

    quantized(desk, trained, of_torch, scheme)
    given = ("quantize", str(trained), f"--out={of_torchao}", f"--scheme={scheme}", "--backend=torchao")
    told = with_torchao(*given, *OF_SCHEME.get(scheme, []))
    assert told["backend"] == "torchao"
    assert told["what"].endswith("computed by torchao")

    mine, theirs = tensors(of_torch), tensors(of_torchao)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    weights = "export/model.safetensors"
    assert (of_torch / weights).read_bytes() == (of_torchao / weights).read_bytes()

    assert with_torchao("eval", str(of_torchao))["evaluation"] == told["figures"]["after"]["evaluation"]
    assert with_torchao("generate", str(of_torchao), "--tokens=2")["text"]
    monkeypatch.setenv(BACKEND, "torch")
    assert torch.equal(logits(of_torchao), logits(of_torch))
    assert evaluation(desk, of_torchao) == evaluation(desk, of_torch)
    # the loss is one of few samples: steps of activations move it, the order of sums does not
    near = 1e-2 if scheme in ("int8_dynamic", "int8_static") else 1e-5
    assert evaluation(desk, of_torchao)["loss"] == pytest.approx(
        told["figures"]["after"]["evaluation"]["loss"], rel=near
    )
    monkeypatch.setenv(BACKEND, "torchao")
    assert with_torchao("eval", str(of_torch))["evaluation"] == told["figures"]["after"]["evaluation"]


# --- other models ----------------------------------------------------------------------------------------------------------


def test_a_hugging_face_folder(desk: Desk, tmp_path: Path) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="NOT CHECKED: the extra 'hf' (transformers) is not installed"
    )
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    folder, out = tmp_path / "hf", tmp_path / "out"
    config = transformers.LlamaConfig(vocab_size=320, num_key_value_heads=1, head_dim=8, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    settings = [each for each in desk.settings if not each.startswith("--set=model.") and "train." not in each]
    done = desk.here("quantize", str(folder), f"--out={out}", "--scheme=int8", "--json", *settings)
    assert done.code == 0, done.err
    assert evaluation(desk, out) == done.json["figures"]["after"]["evaluation"]
    quantization = json.loads((out / "export/config.json").read_text())["quantization_config"]
    assert quantization["quant_method"] == "compressed-tensors"
    assert quantization["ignore"] == ["lm_head"]
    again = desk.here("quantize", str(out / "export"), f"--out={tmp_path / 'again'}", *settings)
    assert again.code == 2
    assert "quantization_config" in again.err


def test_a_mixture_of_experts(desk: Desk, tmp_path: Path) -> None:
    run_dir, out = tmp_path / "run", tmp_path / "out"
    assert desk.train(run_dir, "--set=model.num_experts=2", "--set=train.steps=1").code == 0
    told = quantized(desk, run_dir, out, "int4")
    assert evaluation(desk, out) == told["figures"]["after"]["evaluation"]
    assert {"blocks.0.ffn.experts.gate", "blocks.0.attention.q"} <= {layer["name"] for layer in told["layers"]}
    refused = desk.here("quantize", str(run_dir), f"--out={tmp_path / 'dynamic'}", "--scheme=int8_dynamic")
    assert refused.code == 2
    assert "blocks.0.ffn.experts.gate would be kept" in refused.err


@pytest.mark.parametrize("scheme", ["int8_static", pytest.param("int8", marks=pytest.mark.full)])
def test_images(desk: Desk, tmp_path: Path, scheme: str) -> None:
    """Convolutions have scales from training images; the first one and the head are kept."""
    run_dir, out = tmp_path / "run", tmp_path / "out"
    images = write_images(tmp_path / "images", per_class=6)
    settings = ("--set=task.kind=image", f"--set=data.train={images}", "--set=image.size=16", "--set=train.steps=2")
    done = desk.here(
        "train",
        "--debug",
        f"--set=run.dir={run_dir}",
        "--set=components.model=resnet14",
        "--set=plan.global_batch=4",
        "--set=data.eval_frac=0.25",
        *settings,
    )
    assert done.code == 0, done.err
    told = quantized(desk, run_dir, out, scheme)
    assert evaluation(desk, out) == told["figures"]["after"]["evaluation"]
    names = {layer["name"] for layer in told["layers"]}
    assert "blocks.0.conv2" in names
    assert not names & {"stem", "head"}
    assert {kept["reason"] for kept in told["kept"]} >= {"quantize.skip 'stem'", "quantize.skip 'head'"}
    assert all((layer["input_scale"] is not None) == (scheme == "int8_static") for layer in told["layers"])
    refused = desk.here("quantize", str(run_dir), f"--out={tmp_path / 'four'}", "--scheme=int4")
    assert refused.code == 2
    assert "no layer is left" in refused.err
