"""``unisono quantize`` and ``prune`` of a Python script's run: what other commands make of the result, and metrics of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
from commands import Desk, Outcome

from unisono.checkpoint import open_checkpoint

SCRIPT = """
import sys

import torch
from torch import nn

from unisono import PlanOptions, Trainer, TrainOptions
from unisono.train import Metric

torch.manual_seed(0)
points = torch.randn(256, 2)
samples = [(point, int(point[0] * point[1] > 0)) for point in points]
held_out = samples[:64]


def hits(outputs, batch, loss, weight):
    right = outputs.argmax(-1) == batch["targets"]
    return torch.stack([right.float().sum(), torch.tensor(float(len(right)))])


def net():
    return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))


metrics = {"hit_rate": Metric(size=2, sums=hits, value=lambda total: total[0] / total[1])}
if __name__ == "__main__":
    plan, options = PlanOptions(global_batch=32, precision="fp32"), TrainOptions(steps=60, eval_every_steps=0)
    Trainer(
        net(), samples, plan, objective="cross_entropy", eval_data=held_out, metrics=metrics, options=options, run_dir=sys.argv[1]
    ).fit()
"""
SMALLER = {"quantize": ["--scheme=int8"], "prune": ["--sparsity=0.5", "--criterion=magnitude"]}


@pytest.fixture(scope="module")
def script(shared_desk: Desk) -> Path:
    """The script, beside the folder ``own`` of its finished run, to be read only."""
    path = shared_desk.folder / "smaller_script.py"
    path.write_text(SCRIPT)
    command = [sys.executable, str(path), str(path.with_name("own"))]
    subprocess.run(command, check=True, capture_output=True, env=shared_desk.child_environ())
    return path


def parts(script: Path) -> list[str]:
    return [f"--model={script}:net", f"--data={script}:held_out", f"--metrics={script}:metrics"]


def smaller(desk: Desk, script: Path, command: str, out: Path, *more: str) -> Outcome:
    given = [command, str(script.with_name("own")), *SMALLER[command], *parts(script), f"--out={out}", *more]
    return desk.here(*given, "--json")


@pytest.mark.parametrize("command", list(SMALLER))
def test_other_commands_take_the_result_with_the_same_code(
    desk: Desk, script: Path, tmp_path: Path, command: str
) -> None:
    out = tmp_path / "out"
    done = smaller(desk, script, command, out)
    assert done.code == 0, done.err
    after = done.json["figures"]["after"]["evaluation"]
    evaluated = desk.here("eval", str(out), *parts(script), "--json")
    assert evaluated.code == 0, evaluated.err
    assert evaluated.json["evaluation"] == pytest.approx(after, rel=1e-6)
    without_metrics = desk.here("eval", str(out), *parts(script)[:2], "--json")
    assert without_metrics.json["evaluation"] == {"loss": pytest.approx(after["loss"], rel=1e-6)}
    exported = desk.here("checkpoint", "export", str(out), str(tmp_path / "hf"), parts(script)[0])
    assert exported.code == 0, exported.err
    found = safetensors.torch.load_file(tmp_path / "hf" / "model.safetensors")
    (folder,) = (out / "checkpoints").iterdir()
    snapshot = open_checkpoint(folder)
    assert found
    for name, tensor in found.items():
        assert tensor.equal(snapshot.tensor(f"model/{name}")), name


def test_the_result_says_what_is_missing_without_its_code(desk: Desk, script: Path, tmp_path: Path) -> None:
    assert smaller(desk, script, "quantize", tmp_path / "out").code == 0
    told = desk.here("eval", str(tmp_path / "out"))
    assert told.code == 2
    assert "the run of a Python script, without --model" in told.err or "without --data" in told.err


def test_a_metric_of_ones_own_may_be_large_or_small(desk: Desk, script: Path, tmp_path: Path) -> None:
    """Before, whatever was not known was taken for a metric that is to be small, and a worse model was written."""
    given = ("--metric=hit_rate", "--max-drop=0", "--sparsity=0.9")
    unknown = smaller(desk, script, "prune", tmp_path / "a", *given)
    assert unknown.code == 2
    assert unknown.json["problems"][0]["given"] == "--metric hit_rate, which is no built-in metric"
    assert unknown.json["problems"][0]["nearest"] == "--metric hit_rate --maximize, or --minimize"
    worse = smaller(desk, script, "prune", tmp_path / "b", *given, "--maximize")
    assert worse.code == 1
    assert not (tmp_path / "b").exists()
    figures = worse.json["figures"]
    before, after = (figures[when]["evaluation"]["hit_rate"] for when in ("before", "after"))
    assert after < before
    assert worse.json["drop"] == pytest.approx((before - after) / before)
    taken = smaller(desk, script, "prune", tmp_path / "c", *given, "--minimize")
    assert taken.code == 0, taken.err
    assert taken.json["drop"] == pytest.approx((after - before) / before)


def test_the_card_says_what_judged_the_model_and_how_sure_the_time_is(desk: Desk, script: Path, tmp_path: Path) -> None:
    done = smaller(desk, script, "quantize", tmp_path / "out", "--samples=8")
    assert done.code == 0, done.err
    figures = done.json["figures"]
    assert (figures["samples"], figures["num_held_out"]) == (8, 64)
    low, high = figures["latency_quartiles"]
    card = (tmp_path / "out" / "export" / "README.md").read_text()
    assert "8 of the run's 64 held-out samples" in card
    assert f"(quartiles {low:.2f} to {high:.2f})" in card
    assert json.loads((tmp_path / "out" / "compression.json").read_text())["figures"] == figures
