"""``unisono quantize`` and training with rounded numbers, of models of one's own: what reads a weight or reaches a layer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import Desk

MODELS = """
import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.memory = nn.LSTM(16, 16, batch_first=True)
        self.smooth = nn.Conv1d(16, 16, 3, padding=1)
        self.fc = nn.Linear(16, 16)
        self.head = nn.Linear(16, 11)

    def forward(self, tokens):
        x, _ = self.memory(self.encoder(self.embed(tokens)))
        return self.head(self.fc(self.smooth(x.mT).mT))


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 16)
        self.fc = nn.Linear(16, 16)
        self.other = nn.Linear(16, 16)
        self.head = nn.Linear(16, 11)

    def forward(self, tokens):
        x = self.other(self.embed(tokens))
        return self.head(x @ self.fc.weight.t())


class Branch(Reader):
    def forward(self, tokens):
        x = self.other(self.embed(tokens))
        return self.head(x if x.shape[0] < 1000 else self.fc(x))


def loss(outputs, batch):
    losses = nn.functional.cross_entropy(outputs.flatten(0, 1), batch["targets"].flatten(), reduction="none")
    return losses.sum(), torch.tensor(float(len(losses)))


texts = torch.arange(96).reshape(16, 6) % 11
train = [{"tokens": text[:-1], "targets": text[1:]} for text in texts]
held_out = train[:4]
"""
SCRIPT = """
import models
from unisono import PlanOptions, Trainer, TrainOptions

if __name__ == "__main__":
    for Model in (models.Encoder, models.Reader, models.Branch):
        plan = PlanOptions(device="cpu", precision="fp32", global_batch=4)
        name, options = Model.__name__, TrainOptions(steps=2, eval_every_steps=0)
        Trainer(Model(), models.train, plan, objective=models.loss, options=options, run_dir=f"runs/{name}").fit()
"""
CONFIG = """
from models import held_out, loss, train, {model}

from unisono.train import Components, RunConfig


def config():
    return RunConfig(
        components=Components(model=lambda _: {model}(), data=lambda _: (train, held_out), objective=loss)
    )
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models.py, and with the runs of a Python script, one for each model."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "models.py").write_text(MODELS)
    (folder / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=folder, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return folder


def quantize(desk: Desk, folder: Path, model: str, out: Path, *more: str) -> Any:
    code = [f"--{name}={folder / 'models.py'}:{of}" for name, of in (("model", model), ("data", "held_out"))]
    given = [
        "quantize",
        str(folder / "runs" / model),
        f"--out={out}",
        *code,
        f"--objective={folder / 'models.py'}:loss",
    ]
    return desk.here(*given, *more)


def trained_in_rounds(desk: Desk, folder: Path, model: str, run_dir: Path, *more: str) -> Any:
    config = folder / f"{model.lower()}_config.py"
    config.write_text(CONFIG.format(model=model))
    settings = ("train.steps=2", "plan.global_batch=4", "plan.precision=fp32", "plan.device=cpu", f"run.dir={run_dir}")
    return desk.here("train", str(config), "--debug", *(f"--set={each}" for each in (*settings, *more)))


AWARE = ("quantize.scheme=int4", "quantize.group_size=8", "quantize.aware=true")


def kept_reasons(record: dict[str, Any]) -> dict[str, int]:
    return {kept["reason"]: kept["bytes"] for kept in record["kept"]}


def test_layers_of_a_fused_operation_and_other_kinds_are_kept_by_name(desk: Desk, folder: Path, tmp_path: Path) -> None:
    done = quantize(desk, folder, "Encoder", tmp_path / "out", "--scheme=int4", "--group-size=8", "--json")
    assert done.code == 0, done.out + done.err
    assert [layer["name"] for layer in done.json["layers"]] == ["fc"]
    reasons = kept_reasons(done.json)
    assert reasons["its weight is read by TransformerEncoderLayer"] == 4 * (2 * 16 * 32 + 32 + 16)
    assert reasons["weights of LSTM, which no scheme covers"] == 4 * 2 * 64 * 16
    assert reasons["weights of Conv1d, which no scheme covers"] == 4 * 16 * 16 * 3
    assert reasons["weights of MultiheadAttention, which no scheme covers"] == 4 * 4 * 16 * 16
    card = (tmp_path / "out/export/README.md").read_text()
    assert "- layers:" not in card
    assert "relative_error" not in card
    assert " times as long as before" in card


def test_training_in_rounds_evaluates_the_layers_that_it_rounds(desk: Desk, folder: Path, tmp_path: Path) -> None:
    """Only ``fc`` is rounded, in training as in evaluation, so that the stored model is the same."""
    run_dir = tmp_path / "run"
    trained = trained_in_rounds(desk, folder, "Encoder", run_dir, *AWARE)
    assert trained.code == 0, trained.err
    done = desk.here("quantize", str(run_dir), f"--out={tmp_path / 'out'}", "--json")
    assert done.code == 0, done.out + done.err
    figures = done.json["figures"]
    assert figures["before"]["evaluation"] == figures["after"]["evaluation"]
    assert [layer["name"] for layer in done.json["layers"]] == ["fc"]


def test_code_that_reads_a_weight_is_refused(desk: Desk, folder: Path, tmp_path: Path) -> None:
    for scheme in ("int8", "int8_static"):
        refused = quantize(desk, folder, "Reader", tmp_path / "out", f"--scheme={scheme}")
        assert refused.code == 2
        assert "the layer fc of Reader, whose weight is read other than by its own forward pass" in refused.err
        assert "--skip 'fc'" in refused.err
    assert os.listdir(tmp_path) == []
    done = quantize(desk, folder, "Reader", tmp_path / "out", "--skip=fc", "--json")
    assert done.code == 0, done.out
    assert [layer["name"] for layer in done.json["layers"]] == ["other"]


def test_code_that_reads_a_weight_is_not_trained_in_rounds(desk: Desk, folder: Path, tmp_path: Path) -> None:
    refused = trained_in_rounds(desk, folder, "Reader", tmp_path / "run", *AWARE)
    assert refused.code == 2
    assert "the layer fc of Reader, whose weight is read other than by its own forward pass" in refused.err
    assert "quantize.skip with 'fc'" in refused.err
    kept = trained_in_rounds(desk, folder, "Reader", tmp_path / "kept", *AWARE, "quantize.skip=['fc']")
    assert kept.code == 0, kept.err
    plain = trained_in_rounds(desk, folder, "Branch", tmp_path / "branch", *AWARE)
    assert plain.code == 0, plain.err


def test_a_layer_that_no_sample_reaches_has_no_static_scale(desk: Desk, folder: Path, tmp_path: Path) -> None:
    refused = quantize(desk, folder, "Branch", tmp_path / "out", "--scheme=int8_static", "--calibration-samples=3")
    assert refused.code == 2
    assert "the layer fc, which none of 3 calibration samples reaches" in refused.err
    assert "--skip 'fc'" in refused.err
    assert os.listdir(tmp_path) == []
    assert quantize(desk, folder, "Branch", tmp_path / "out", "--scheme=int8").code == 0


def test_what_calibrates_is_named(desk: Desk, folder: Path, trained: Path, tmp_path: Path) -> None:
    own = quantize(desk, folder, "Encoder", tmp_path / "own", "--scheme=int8_static")
    assert own.code == 0, own.err
    assert "scales of activations: from samples of --data, which also judge the result" in own.out
    task = desk.here("quantize", str(trained), f"--out={tmp_path / 'task'}", "--scheme=int8_static")
    assert "scales of activations: from training samples" in task.out
    record = json.loads((tmp_path / "own/compression.json").read_text())
    assert record["calibration"]["source"] == "samples of --data, which also judge the result"
    code = [f"--{name}={folder / 'models.py'}:{of}" for name, of in (("model", "Encoder"), ("data", "held_out"))]
    pruned = desk.here(
        *("prune", str(folder / "runs/Encoder"), "--sparsity=0.5", f"--out={tmp_path / 'pruned'}", *code),
        f"--objective={folder / 'models.py'}:loss",
    )
    assert pruned.code == 0, pruned.err
    assert "what matters least: by activation on samples of --data, which also judge the result" in pruned.out
