"""Optimizer, schedule, collate function, transforms and callbacks of the user's own, from Python and from entry points."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from commands import Desk, events_of, problem

PARTS = '''
"""Regression on a line."""
from functools import partial
from pathlib import Path

import numpy as np
import torch
from unisono import Components, RunConfig
from unisono.train import Every, mean_squared_error


class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, inputs):
        return self.layer(inputs)


def model(run):
    return Line()


def line(run):
    xs = np.linspace(-1, 1, 40, dtype=np.float32)[:, None]
    pairs = list(zip(xs, 2 * xs, strict=True))
    return pairs[:32], pairs[32:]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


TWO = {"*.bias": torch.optim.SGD, "*": torch.optim.AdamW}


def falling(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)


def rows(samples):
    xs, ys = zip(*samples, strict=True)
    return {"inputs": np.stack(xs), "targets": np.stack(ys)}


def halves(a, b, rng):
    both = {name: (value + b[name]) / 2 for name, value in a.items()}
    return both, both


def double(batch):
    return batch | {name: 2 * batch[name] for name in ("inputs", "targets")}


def watch(run):
    file = Path(run.run.dir).with_name("watched")

    def note(step, model):
        file.write_text((file.read_text() if file.exists() else "") + f"{step.index} ")

    return [Every(steps=20, call=note)]
'''
SMALL = [
    *("--set=train.steps=40", "--set=plan.global_batch=8", "--set=plan.precision=fp32", "--set=observe.console=off"),
]
CONFIG = """

def config():
    return RunConfig(components=Components(model=model, objective=mean_squared_error, data=line, {more}))
"""
ENTRY_POINTS = """
[unisono.models]
line-model = unisono_line:model
[unisono.datasets]
line-data = unisono_line:line
[unisono.optimizers]
line-sgd = unisono_line:sgd
line-two = unisono_line:TWO
[unisono.schedules]
line-falling = unisono_line:falling
[unisono.collate_fns]
line-rows = unisono_line:rows
[unisono.transforms]
line-halves = unisono_line:halves
line-double = unisono_line:double
[unisono.callbacks]
line-watch = unisono_line:watch
"""


def write(folder: Path, more: str) -> Path:
    path = folder / "run.py"
    path.write_text(PARTS + CONFIG.replace("{more}", more))
    return path


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    info = site / "unisono_line-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "unisono_line.py").write_text(PARTS)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: unisono-line\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, "unisono_line", raising=False)


def test_a_torch_optimizer_of_a_python_file_trains_and_its_run_is_evaluated_and_exported(
    desk: Desk, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    path = write(tmp_path, "optimizer=sgd, schedule=falling, collate_fn=rows, callbacks=watch")
    done = desk.here("train", str(path), "--debug", f"--set=run.dir={run_dir}", *SMALL, "--json")
    assert done.code == 0, done.err
    start = events_of(run_dir)[0]
    assert start["optimization"] == "sgd, lr 0.1, schedule of your own"
    steps = [event for event in events_of(run_dir) if event["kind"] == "step"]
    wanted = [0.1 * 0.9 ** (event["step"] - 1) for event in steps]
    assert [event["train/lr"] for event in steps] == pytest.approx(wanted)
    assert len(steps) > 1
    assert (tmp_path / "watched").read_text() == "20 40 "
    kept = (run_dir / "config.toml").read_text()
    for line in ('optimizer = "python:sgd"', 'schedule = "python:falling"', 'collate_fn = "python:rows"'):
        assert f"\n{line}\n" in kept
    again = desk.here("eval", str(run_dir), "--json")
    assert again.json["evaluation"]["loss"] == pytest.approx(done.json["evaluation"]["loss"])
    assert desk.here("checkpoint", "export", str(run_dir), str(tmp_path / "out")).code == 0
    shown = desk.here("config", "show", str(run_dir / "config.toml"))
    assert shown.code == 0, shown.err
    assert 'optimizer = "python:sgd"' in shown.out


def test_a_class_of_torch_has_its_own_rate_and_the_section_schedule(desk: Desk, tmp_path: Path) -> None:
    run_dir, path = tmp_path / "run", write(tmp_path, "optimizer=torch.optim.AdamW")
    done = desk.here(
        "train", str(path), "--debug", f"--set=run.dir={run_dir}", *SMALL, "--set=schedule.kind=linear", "--json"
    )
    assert done.code == 0, done.err
    assert events_of(run_dir)[0]["optimization"] == "AdamW, lr 0.001 falling to 0.0001 at step 40 (linear)"


def test_optimizers_by_pattern(desk: Desk, tmp_path: Path) -> None:
    run_dir, path = tmp_path / "run", write(tmp_path, "optimizer=TWO")
    done = desk.here("train", str(path), "--debug", f"--set=run.dir={run_dir}", *SMALL)
    assert done.code == 0, done.err
    assert 'optimizer = "python:*.bias: SGD, *: AdamW"' in (run_dir / "config.toml").read_text()
    assert desk.here("eval", str(run_dir)).code == 0


@pytest.mark.usefixtures("installed")
def test_every_part_comes_from_an_entry_point(desk: Desk, tmp_path: Path) -> None:
    run_dir, file = tmp_path / "run", tmp_path / "run.toml"
    file.write_text(
        '[components]\nmodel = "line-model"\nobjective = "mean_squared_error"\ndata = "line-data"\noptimizer = "line-sgd"\n'
        'schedule = "line-falling"\ncollate_fn = "line-rows"\n'
        'batch_transform = "line-double"\ncallbacks = "line-watch"\n'
    )
    done = desk.here("train", str(file), "--debug", f"--set=run.dir={run_dir}", *SMALL)
    assert done.code == 0, done.err
    assert events_of(run_dir)[0]["optimization"] == "sgd, lr 0.1, schedule of your own"
    # the folder alone is enough to resume; another optimizer and schedule are told
    setting = f"--set=run.dir={run_dir}"
    other = ("--set=components.optimizer=line-two", "--set=components.schedule=")
    strict = desk.here("train", "--debug", setting, "--set=train.steps=41", *other, "--set=run.resume=strict")
    assert strict.code != 0
    for text in ("optimizer.kind 'sgd' then, '*.bias: sgd, *: adamw' now", "schedule 'falling' then"):
        assert text in strict.err
    assert desk.here("train", "--debug", setting, "--set=train.steps=41").code == 0


@pytest.mark.usefixtures("installed")
def test_transforms_of_pairs_and_batches_act(desk: Desk, tmp_path: Path) -> None:
    losses: list[float] = []
    for number, setting in enumerate(("", "pair_transform=line-halves", "batch_transform=line-double")):
        folder = tmp_path / str(number)
        folder.mkdir()
        more = [f"--set=components.{setting}"] if setting else []
        path = write(folder, "optimizer=sgd")
        done = desk.here("train", str(path), "--debug", f"--set=run.dir={folder}/run", *SMALL, *more)
        assert done.code == 0, done.err
        losses.append(next(event["train/loss"] for event in events_of(folder / "run") if event["kind"] == "step"))
    assert losses[2] > 2 * losses[0]
    assert losses[1] < losses[0]


@pytest.mark.usefixtures("installed")
def test_a_name_that_is_nearly_an_entry_point(desk: Desk, tmp_path: Path) -> None:
    path = write(tmp_path, "optimizer='line-sdg'")
    done = desk.here("train", str(path), "--debug", f"--set=run.dir={tmp_path}/run", *SMALL)
    assert done.code == 2
    assert done.err == problem(
        "components.optimizer = 'line-sdg'",
        "it is built in (nothing is), an installed entry point of the group 'unisono.optimizers' (line-sgd, line-two), or a "
        "callable of a Python file",
        "the run lacks this component, and nothing was started",
        "did you mean 'line-sgd'?; or code of your own, in a Python file as unisono init --python writes one",
    )


@pytest.mark.parametrize(
    ("more", "setting", "given"),
    [
        ("optimizer=sgd", "optim.lr=0.2", "optim.lr: lr 0.2 with components.optimizer"),
        ("optimizer=sgd", "optim.kind=sgd", "optim.kind: kind 'sgd' with components.optimizer"),
        ("optimizer=sgd", "optim.freeze=['*.bias']", "optim.freeze: freeze ('*.bias',) with components.optimizer"),
        (
            "schedule=falling",
            "schedule.warmup_steps=3",
            "schedule.warmup_steps: warmup_steps 3 with components.schedule",
        ),
    ],
)
def test_a_setting_that_would_do_nothing_is_an_error(
    more: str, setting: str, given: str, desk: Desk, tmp_path: Path
) -> None:
    path = write(tmp_path, more)
    done = desk.here("train", str(path), "--debug", f"--set=run.dir={tmp_path}/run", *SMALL, f"--set={setting}")
    assert done.code == 2
    name = given.partition(":")[0].partition(".")[2]
    assert done.err == problem(
        f"--set: {given}", "nothing reads it there", "it would change nothing", f"leave {name} out"
    )


def test_the_clipping_of_section_optim_holds_for_an_own_optimizer(desk: Desk, tmp_path: Path) -> None:
    losses: list[float] = []
    for number, clip in enumerate(("0", "0.001")):
        folder = tmp_path / str(number)
        folder.mkdir()
        path, setting = write(folder, "optimizer=sgd, schedule=falling"), f"--set=optim.clip_norm={clip}"
        done = desk.here("train", str(path), "--debug", f"--set=run.dir={folder}/run", *SMALL, setting, "--json")
        assert done.code == 0, done.err
        steps = [event for event in events_of(folder / "run") if event["kind"] == "step"]
        losses.append(sum(event["train/loss"] for event in steps[-8:]))
    assert losses[0] < 0.5 * losses[1]


@pytest.mark.parametrize(
    ("body", "given"), [("return 3", "int"), ("return []", ""), ("return [print]", "[builtin_function_or_method]")]
)
def test_callbacks_that_are_none(body: str, given: str, desk: Desk, tmp_path: Path) -> None:
    path = write(tmp_path, "callbacks=other")
    path.write_text(path.read_text() + f"\n\ndef other(run):\n    {body}\n")
    done = desk.here("train", str(path), "--debug", f"--set=run.dir={tmp_path}/run", *SMALL)
    assert done.code == (2 if given else 0)
    if given:
        assert done.err == problem(
            f"components.callbacks returned {given}",
            "it returns a list of Every",
            "nothing would be called",
            "return [Every(steps=100, call=function)], from unisono.train import Every",
        )


def test_an_optimizer_that_was_made_already_is_refused_by_name(desk: Desk, tmp_path: Path) -> None:
    path = write(tmp_path, "optimizer=sgd(Line().parameters())")
    done = desk.here("train", str(path), "--debug", f"--set=run.dir={tmp_path}/run", *SMALL)
    assert done.code == 2
    assert "components.optimizer takes a string, or code of a Python file" in done.err


def test_explain_knows_them(desk: Desk) -> None:
    assert "torch.optim class" in desk.here("config", "explain", "components.optimizer").out
    properties = desk.here("config", "schema").json["properties"]["components"]["properties"]
    assert {
        "optimizer",
        "schedule",
        "collate_fn",
        "pair_transform",
        "batch_transform",
        "callbacks",
    } <= properties.keys()
