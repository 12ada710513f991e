"""A script that is edited and run again resumes with the edit named, and an unchanged one with nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from unisono.errors import CheckpointError
from unisono.observe.events import read_events
from unisono.train.code_record import code_differences, code_parts

SCRIPT = """
from functools import partial, cache
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR, StepLR
from unisono import CheckpointOptions, LoaderOptions, ObserveOptions, PlanOptions, Trainer, TrainOptions

FACTOR = 0.5
data = [(torch.full((4,), float(n)), n % 2) for n in range(200)]

class Net(nn.Module):
    def __init__(self, alpha=1):
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(4, 2)
        self.alpha, self._beta, self.names, self.calls = alpha, 2.0, ("a", "b"), 0
    def forward(self, inputs):
        self.calls += 1
        return self.scaled(self.head(inputs))
    def scaled(self, outputs):
        return outputs * self.alpha

def smoothed(outputs, batch):
    '''A mean.'''
    return FACTOR * F.cross_entropy(outputs, batch["targets"], label_smoothing=helper(0.1))

def helper(share):
    return min(share, 0.5) if share in {0.1, 0.2, "x"} else 0.0

def of(factor, kept=object()):
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    def objective(outputs, batch):
        assert kept is not None
        return factor * loss(outputs, batch["targets"])
    return objective

def by_weight(outputs, batch, factor=1.0, call=None):
    return factor * F.cross_entropy(outputs, batch["targets"])

def configured(config):
    itself = []
    itself.append(itself)
    def objective(outputs, batch):
        assert itself
        return config["factor"] * F.cross_entropy(outputs, batch["targets"])
    return objective

class Loss:
    def __init__(self, power=2, root="/nowhere/at/all"):
        self.power, self.root, self.calls = power, root, 0
    def __call__(self, outputs, batch):
        self.calls += 1
        return (outputs.sum(-1) - batch["targets"]).abs().pow(self.power).mean()
    def method(self, outputs, batch):
        return self(outputs, batch)

@cache
def cached(outputs, batch):
    return F.cross_entropy(outputs, batch["targets"])

given = {}
model = Net()
# HERE

def build(folder, **more):
    values = {
        "model": model,
        "data": data,
        "plan": PlanOptions(device="cpu", precision="fp32", global_batch=4),
        "objective": smoothed,
        "optimizer": partial(torch.optim.SGD, lr=0.01),
        "options": TrainOptions(steps=2, eval_every_steps=0),
        "loader": LoaderOptions(num_workers=0),
        "checkpoint": CheckpointOptions(every_steps=0),
        "observe": ObserveOptions(console="off", trackers=(), report=False),
    }
    return Trainer(run_dir=folder, **(values | given | more))
"""


def script(*lines: str, edit: tuple[str, str] | None = None, name: str = "script.py") -> dict[str, Any]:
    """The names of the script after ``lines`` were put into it and ``edit`` was made."""
    text = SCRIPT.replace("# HERE", "\n".join(lines))
    if edit is not None:
        assert text.count(edit[0]) == 1
        text = text.replace(*edit)
    names: dict[str, Any] = {"__name__": "script"}
    exec(compile(text, name, "exec"), names)
    return names


def train(names: dict[str, Any], folder: Path) -> None:
    with names["build"](folder) as run:
        next(iter(run))


def listed(names: dict[str, Any], folder: Path, *, resume: str = "auto") -> list[str]:
    """The differences of the run that resumes."""
    with names["build"](folder, resume=resume) as run:
        return [e for e in read_events(run.events.path).events if e["kind"] == "resumed"][-1]["differences"]


def assert_told(folder: Path, first: dict[str, Any], second: dict[str, Any], told: Sequence[str]) -> None:
    train(first, folder)
    with pytest.raises(CheckpointError) as caught, second["build"](folder, resume="strict"):
        pass
    assert f" with {'; '.join(told)}\n" in str(caught.value)
    assert listed(second, folder) == list(told)


LOSS = "given['objective'] = nn.CrossEntropyLoss({})"
SCHEDULE = "given['schedule'] = {}"
PIECES = {
    "loss": (
        LOSS.format(""),
        LOSS.format("label_smoothing=0.3"),
        ["objective: `label_smoothing` of `CrossEntropyLoss` 0.0 then, 0.3 now"],
    ),
    "loss weight": (
        LOSS.format(""),
        LOSS.format("weight=torch.tensor([1.0, 5.0])"),
        ["objective: `weight` of `CrossEntropyLoss` has changed"],
    ),
    "loss weights": (
        LOSS.format("weight=torch.tensor([1.0, 4.0])"),
        LOSS.format("weight=torch.tensor([1.0, 5.0])"),
        ["objective: `weight` of `CrossEntropyLoss` has changed"],
    ),
    "closure": (
        "given['objective'] = of(1.0)",
        "given['objective'] = of(2.0)",
        ["objective: `factor` of `objective` 1.0 then, 2.0 now"],
    ),
    "entry of a dict": (
        "given['objective'] = configured({'factor': 1.0, 'steps': 10})",
        "given['objective'] = configured({'factor': 2.0, 'steps': 10})",
        ["objective: `config` of `objective` {'factor': 1.0} then, {'factor': 2.0} now"],
    ),
    "lambda": (
        SCHEDULE.format("lambda step: 0.1"),
        SCHEDULE.format("lambda step: 0.2"),
        ["schedule: the code of `lambda` has changed"],
    ),
    "torch schedule": (
        SCHEDULE.format("partial(LambdaLR, lr_lambda=lambda step: 0.1)"),
        SCHEDULE.format("partial(LambdaLR, lr_lambda=lambda step: 0.2)"),
        ["optimizer.groups.0.lr 0.001 then, 0.002 now", "schedule: the code of `lambda` has changed"],
    ),
    "partial of a tensor": (
        "given['objective'] = partial(by_weight, factor=torch.arange(2000.0).sum())",
        "given['objective'] = partial(by_weight, factor=torch.arange(2001.0).sum())",
        ["objective 'by_weight(factor=tensor(1999000.))' then, 'by_weight(factor=tensor(2001000.))' now"],
    ),
    "object": (
        "given['objective'] = Loss(2)",
        "given['objective'] = Loss(1)",
        ["objective: `power` of `Loss` 2 then, 1 now"],
    ),
    "method": (
        "given['objective'] = Loss(2).method",
        "given['objective'] = Loss(1).method",
        ["objective: `power` of `Loss` 2 then, 1 now"],
    ),
    "attribute": ("", "model = Net(alpha=3)", ["model: `alpha` of `Net` 1 then, 3 now"]),
    "private attribute": ("", "model._beta = 3.0", ["model: `_beta` of `Net` 2.0 then, 3.0 now"]),
    "attribute of torch": (
        "model.extra = nn.MultiheadAttention(4, 2)",
        "model.extra = nn.MultiheadAttention(4, 2, dropout=0.5)",
        ["model: `dropout` of `MultiheadAttention` 0.0 then, 0.5 now"],
    ),
    "label": (
        "data = data[:60]",
        "data = data[:60]; data[31] = (data[31][0], 0)",
        ["data.samples: sample 31 of the 60 that are compared changed"],
    ),
    "shift": (
        "",
        "data = [(x + 1, y) for x, y in data]",
        ["data.samples: sample 0 and 63 more of the 64 that are compared changed"],
    ),
    "bad samples": (
        "",
        "given['loader'] = LoaderOptions(num_workers=0, max_bad_sample_frac=0.1)",
        ["loader.max_bad_sample_frac 0.0 then, 0.1 now"],
    ),
}


@pytest.mark.parametrize("case", PIECES)
def test_another_value_is_named(case: str, tmp_path: Path) -> None:
    before, after, told = PIECES[case]
    second = script(*(before, after) if case.startswith("private") else (after,))
    assert_told(tmp_path, script(before), second, told)


EDITS = {
    "body": ("return FACTOR * F", "return 2 * FACTOR * F", ["objective: the code of `smoothed` has changed"]),
    "constant of the module": (
        "FACTOR = 0.5",
        "FACTOR = 0.25",
        ["objective: `FACTOR` of `smoothed` 0.5 then, 0.25 now"],
    ),
    "function that it calls": ("min(share, 0.5)", "max(share, 0.5)", ["objective: the code of `helper` has changed"]),
    "forward": ("self.head(inputs))", "self.head(inputs) + 1)", ["model: the code of `Net.forward` has changed"]),
    "method": ("outputs * self.alpha", "outputs / self.alpha", ["model: the code of `Net.scaled` has changed"]),
}


@pytest.mark.parametrize("case", EDITS)
def test_an_edit_is_named(case: str, tmp_path: Path) -> None:
    old, new, told = EDITS[case]
    assert_told(tmp_path, script(), script(edit=(old, new)), told)


def test_a_loss_of_a_closure_and_a_default(tmp_path: Path) -> None:
    lines = "given['objective'] = of(1.0)"
    second = script(
        lines, edit=("nn.CrossEntropyLoss(label_smoothing=0.1)", "nn.CrossEntropyLoss(label_smoothing=0.2)")
    )
    told = ["objective: `label_smoothing` of `CrossEntropyLoss` 0.1 then, 0.2 now"]
    assert_told(tmp_path / "a", script(lines), second, told)
    lines = "given['objective'] = by_weight"
    told = ["objective: the default of `factor` of `by_weight` 1.0 then, 2.0 now"]
    assert_told(tmp_path / "b", script(lines), script(lines, edit=("batch, factor=1.0", "batch, factor=2.0")), told)


TRANSFORMERS = """
from transformers import BertConfig, BertForSequenceClassification
config = BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8, num_labels=2)
torch.manual_seed(0)
model = BertForSequenceClassification(config)
data = [{"input_ids": torch.full((4,), n % 8), "labels": n % 2} for n in range(20)]
given["objective"] = "model_loss"
"""
SAME = {
    "function": "",
    "lambda": "given |= {'objective': lambda o, b: F.cross_entropy(o, b['targets']), 'schedule': lambda step: 0.1 / (step + 1)}",
    "partial": "given['objective'] = partial(by_weight, factor=2.0, call=lambda: 1)",
    "partial of an object": "given['objective'] = partial(by_weight, call=object())",
    "nested": "given['objective'] = of(1.0)",
    "loss": LOSS.format("weight=torch.tensor([1.0, 5.0]), label_smoothing=0.1"),
    "object": "given['objective'] = Loss()",
    "method": "given['objective'] = Loss().method",
    "cached": "given['objective'] = cached.__wrapped__",
    "scheduler": SCHEDULE.format("partial(StepLR, step_size=1)"),
    "scheduler of a lambda": SCHEDULE.format("lambda optimizer: LambdaLR(optimizer, lambda step: 0.5)"),
    "random samples": "class Random(list):\n    def __getitem__(self, n): return torch.rand(4), n % 2\ndata = Random(range(9))",
    "transformers": TRANSFORMERS,
    "samples with objects": "data = [{'inputs': x, 'targets': y, 'name': {'text': str(y)}} for x, y in data]",
}


@pytest.mark.parametrize("case", SAME)
def test_the_same_script_has_no_differences(case: str, tmp_path: Path) -> None:
    """Also where lines, docstrings, the name of the file and the folder are others."""
    train(script(SAME[case]), tmp_path)
    moved = script("", "", SAME[case], edit=("'''A mean.'''", "'''Another text.'''"), name="/elsewhere/moved.py")
    assert listed(moved, tmp_path, resume="strict") == []
    without = script(SAME[case], edit=("    '''A mean.'''\n", "    # a comment\n"))
    without["given"] |= {}
    moved_to = tmp_path.with_name(tmp_path.name + "-moved")
    tmp_path.rename(moved_to)
    assert listed(without, moved_to, resume="strict") == []


def test_values_that_training_changes_are_not_compared(tmp_path: Path) -> None:
    """The cell of a notebook is run twice, with the model and the objective that the first run has left."""
    names = script("given['objective'] = Loss()")
    train(names, tmp_path)
    assert names["model"].calls > 0
    assert names["given"]["objective"].calls > 0
    assert listed(names, tmp_path, resume="strict") == []
    names["model"].alpha = 3
    assert listed(names, tmp_path) == ["model: `alpha` of `Net` 1 then, 3 now"]


def test_entries_of_a_dict_that_a_function_does_not_read_are_not_compared(tmp_path: Path) -> None:
    train(script("given['objective'] = configured({'factor': 1.0, 'steps': 10})"), tmp_path)
    longer = script("given['objective'] = configured({'factor': 1.0, 'steps': 20})")
    assert listed(longer, tmp_path, resume="strict") == []


def test_other_versions_of_python_and_checkpoints_without_a_record() -> None:
    def record(factor: float, python: str = "cpython-311") -> dict[str, Any]:
        code = script(
            f"given['objective'] = of({factor})", edit=("return factor * loss(", f"return {factor} * factor * loss(")
        )
        return {"format": 1, "python": python, "parts": {"objective": code_parts(code["given"]["objective"])}}

    told = ["objective: `factor` of `objective` 1.0 then, 2.0 now"]
    assert code_differences(record(1.0), record(2.0), {"objective"}) == [
        *told,
        "objective: the code of `objective` has changed",
    ]
    assert code_differences(record(1.0), record(2.0, "cpython-312"), {"objective"}) == told
    assert code_differences({}, record(2.0), {"objective"}) == []
    assert code_differences({**record(1.0), "format": 0}, record(2.0), {"objective"}) == []


TWICE = """
import sys
from pathlib import Path
build(Path(sys.argv[1]), resume=sys.argv[2]).__enter__().__exit__(None, None, None) if sys.argv[2] == "strict" else None
if sys.argv[2] != "strict":
    with build(Path(sys.argv[1])) as run:
        next(iter(run))
"""


@pytest.mark.full
def test_two_processes_have_the_same_record(tmp_path: Path) -> None:
    """With other hashes of strings, and from another folder."""
    lines = (
        "given |= {'objective': partial(smoothed), 'collate_fn': lambda s: {'inputs': torch.stack([x for x, _ in s]), "
        "'targets': torch.tensor([y for _, y in s])}}"
    )
    text = SCRIPT.replace("# HERE", lines) + TWICE
    for folder, resume, seed in (("a", "auto", "1"), ("b", "strict", "2")):
        (tmp_path / folder).mkdir()
        file = tmp_path / folder / "run.py"
        file.write_text(text if folder == "a" else "\n\n" + text)
        done = subprocess.run(
            [sys.executable, str(file), str(tmp_path / "run"), resume],
            cwd=tmp_path / folder,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
