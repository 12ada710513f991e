"""``unisono quantize --backend torchao``: a folder that either back end loads, and what is said without the package."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Desk
from peer_packages import folder_of_packages
from test_quantize import evaluation, logits, quantized, tensors

from unisono.cli.common import load_run
from unisono.dist import JobSpec, World
from unisono.models import quantized_torchao
from unisono.train.build import find_tokenizer
from unisono.train.load import load_model

PYTHON = os.environ.get("UNISONO_TORCHAO_PYTHON")
BACKEND = "UNISONO__QUANTIZE__BACKEND"


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
@pytest.mark.parametrize("scheme", ["int8", "int8_dynamic", "int8_static", "int4"])
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
    group = {"int4": ["--group-size=8"], "int8_static": ["--calibration-samples=4", "--percentile=99.9"]}
    given = ("quantize", str(trained), f"--out={of_torchao}", f"--scheme={scheme}", "--backend=torchao")
    told = with_torchao(*given, *group.get(scheme, []))
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
