"""Components of the user's own: from the Python configuration file, and by name from an installed entry point."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from commands import Desk, events_of, problem

PLUGIN = '''
"""Regression on a line, as a package would bring it."""
import numpy as np
import torch
from unisono import Metric


class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, inputs):
        return self.layer(inputs)


def model(run):
    return Line()


def squared(outputs, batch):
    error = outputs - batch["targets"]
    return error.square().sum(), torch.tensor(float(error.numel()))


def line(run):
    xs = np.linspace(-1, 1, 40, dtype=np.float32)[:, None]
    pairs = list(zip(xs, 2 * xs, strict=True))
    return pairs[:32], pairs[32:]


def flip(sample, rng):
    sign = np.float32(rng.choice([-1, 1]))
    return {name: value * sign for name, value in sample.items()}


def worst():
    def sums(outputs, batch, loss_sum, weight):
        return torch.stack([loss_sum, weight]).double()
    return Metric(size=2, sums=sums, value=lambda total: 100 * total[0] / total[1])


def more(run):
    return {"percent": worst()}
'''
ENTRY_POINTS = """
[unisono.models]
line-model = unisono_line:model
[unisono.objectives]
line-loss = unisono_line:squared
[unisono.datasets]
line-data = unisono_line:line
[unisono.transforms]
line-flip = unisono_line:flip
[unisono.metrics]
line-worst = unisono_line:worst
line-more = unisono_line:more
[unisono.sinks]
"""
PARTS = [
    "--set=components.model=line-model",
    "--set=components.objective=line-loss",
    "--set=components.data=line-data",
    "--set=components.transform=line-flip",
    '--set=components.metrics=["line-worst"]',
    "--set=components.own_metrics=line-more",
]
SMALL = [
    *("--set=train.steps=40", "--set=plan.global_batch=8", "--set=optim.lr=0.1", "--set=plan.precision=fp32"),
    *("--set=optim.weight_decay=0", "--set=observe.console=off"),
]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with entry points, installed as pip leaves it: a module and its dist-info."""
    site = tmp_path / "site"
    info = site / "unisono_line-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "unisono_line.py").write_text(PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: unisono-line\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, "unisono_line", raising=False)
    return site


@pytest.mark.usefixtures("installed")
def test_every_part_comes_from_an_entry_point(desk: Desk, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = desk.here("train", "--debug", f"--set=run.dir={run_dir}", *PARTS, *SMALL, "--json")
    assert done.code == 0, done.err
    start = events_of(run_dir)[0]
    assert start["parameters"] == 2
    assert done.json["evaluation"].keys() == {"loss", "line-worst", "percent"}
    assert done.json["evaluation"]["loss"] < 0.1
    assert done.json["evaluation"]["percent"] == pytest.approx(100 * done.json["evaluation"]["loss"])
    # names are text, so the folder alone is enough
    again = desk.here("train", "--debug", f"--set=run.dir={run_dir}", "--set=train.steps=41", "--json")
    assert again.json["step"] == 41
    assert desk.here("eval", str(run_dir), "--json").json["evaluation"] == again.json["evaluation"]


@pytest.mark.usefixtures("installed")
def test_a_name_that_is_nearly_an_entry_point(desk: Desk, tmp_path: Path) -> None:
    done = desk.here(
        "train", "--debug", f"--set=run.dir={tmp_path}/run", *PARTS, *SMALL, "--set=components.data=line-date"
    )
    assert done.code == 2
    assert done.err == problem(
        "components.data = 'line-date'",
        "it is built in (auto, tokens), an installed entry point of the group 'unisono.datasets' (line-data), or a callable "
        "of a Python file",
        "the run lacks this component, and nothing was started",
        "did you mean 'line-data'?; or code of your own, in a Python file as unisono init --python writes one",
    )
    wrong = desk.here(
        "train", "--debug", f"--set=run.dir={tmp_path}/run", *SMALL, '--set=components.metrics=["acuracy"]'
    )
    assert wrong.code == 2
    assert "unisono: components.metrics = 'acuracy'\n" in wrong.err
    assert "did you mean 'accuracy'?" in wrong.err
    assert not (tmp_path / "run").exists()


def test_an_entry_point_that_cannot_be_imported(desk: Desk, installed: Path, tmp_path: Path) -> None:
    (installed / "unisono_line.py").write_text("import no_such_package_at_all\n")
    done = desk.here("train", "--debug", f"--set=run.dir={tmp_path}/run", *PARTS, *SMALL)
    assert done.code == 2
    assert done.err == problem(
        "components.data = 'line-data', entry point 'unisono_line:line' of unisono-line: "
        "ModuleNotFoundError: No module named 'no_such_package_at_all'",
        "an entry point names something that can be imported",
        "the run lacks this component, and nothing was started",
        "repair or reinstall that package",
    )


def test_every_part_comes_from_a_python_file(desk: Desk, tmp_path: Path) -> None:
    path, run_dir = tmp_path / "run.py", tmp_path / "run"
    path.write_text(
        PLUGIN
        + "\n\ndef config():\n    from unisono import Components, RunConfig\n    return RunConfig(parts=Components(model=model,"
        " objective=squared, data=line, transform=flip, own_metrics=more))\n"
    )
    done = desk.here("train", str(path), "--debug", f"--set=run.dir={run_dir}", *SMALL, "--json")
    assert done.code == 0, done.err
    assert done.json["evaluation"].keys() == {"loss", "percent"}
    assert done.json["evaluation"]["loss"] < 0.1
    kept = (run_dir / "config.toml").read_text()
    assert f'base = "{path}"' in kept
    assert 'objective = "python:squared"' in kept


@pytest.mark.parametrize(
    ("body", "given"),
    [("return [1.0]", "list"), ("return 1, 2", "(int, int)"), ("return [1.0], [2.0], [3.0]", "(list, list, list)")],
)
def test_data_that_is_no_pair(desk: Desk, tmp_path: Path, body: str, given: str) -> None:
    path = tmp_path / "run.py"
    path.write_text(
        f"from unisono import Components, RunConfig\ndef data(run):\n    {body}\n"
        "def config():\n    return RunConfig(parts=Components(data=data))\n"
    )
    done = desk.here("train", str(path), "--debug", f"--set=run.dir={tmp_path}/run", *SMALL)
    assert done.code == 2
    assert done.err == problem(
        f"components.data returned {given}",
        "it returns a pair (training data, held-out data), each a Dataset or indexable with a length",
        "there is nothing to train on",
        "return train, held_out",
    )


def test_a_model_that_is_none(desk: Desk, tmp_path: Path) -> None:
    path = tmp_path / "run.py"
    path.write_text(
        "import torch\nfrom unisono import Components, RunConfig\n"
        "def config():\n    return RunConfig(parts=Components(model=lambda run: torch.nn.Linear))\n"
    )
    done = desk.here("train", str(path), "--debug", f"--set=run.dir={tmp_path}/run", *desk.settings)
    assert done.code == 2
    assert done.err == problem(
        "components.model returned type",
        "it returns a torch.nn.Module",
        "there is nothing to train",
        "return the module itself, not its class or its weights",
    )
    assert [item.name for item in tmp_path.iterdir()] == ["run.py"]


def test_gpt_on_data_of_ones_own_needs_a_vocabulary(desk: Desk, tmp_path: Path) -> None:
    path = tmp_path / "run.py"
    path.write_text(
        "from unisono import Components, RunConfig\n"
        "def config():\n    return RunConfig(parts=Components(data=lambda run: ([1.0], [1.0])))\n"
    )
    done = desk.here("train", str(path), "--debug", f"--set=run.dir={tmp_path}/run", *desk.settings)
    assert done.code == 2
    assert done.err == problem(
        "model.vocab_size 0 with data of your own",
        "0 means the tokenizer's size, and there is no tokenizer",
        "the embedding has no size",
        "set model.vocab_size to one more than the largest token",
    )


def test_an_error_in_the_users_model_is_shown_once_from_the_users_code_on(desk: Desk, tmp_path: Path) -> None:
    path, run_dir = tmp_path / "run.py", tmp_path / "run"
    path.write_text(
        PLUGIN.replace("return self.layer(inputs)", 'raise ValueError("no such column")')
        + "\n\ndef config():\n    from unisono import Components, RunConfig\n    return RunConfig(parts=Components(model=model,"
        " objective=squared, data=line))\n"
    )
    done = desk.process("train", str(path), f"--set=run.dir={run_dir}", *SMALL)
    assert done.code == 1
    assert done.err.count("Traceback (most recent call last)") == 1
    assert 'raise ValueError("no such column")' in done.err
    for plumbing in ("click", "unisono/cli/", "runpy"):
        assert plumbing not in done.err
    assert "ValueError on rank 0 before the first finished step" in done.err
    assert "restarting" not in done.err


@pytest.mark.full
def test_an_error_in_the_users_data_is_no_reason_to_start_again(desk: Desk, tmp_path: Path) -> None:
    path, run_dir = tmp_path / "run.py", tmp_path / "run"
    path.write_text(
        PLUGIN.replace("return pairs[:32], pairs[32:]", "return pairs[0][99]")
        + "\n\ndef config():\n    from unisono import Components, RunConfig\n    return RunConfig(parts=Components(model=model,"
        " objective=squared, data=line))\n"
    )
    done = desk.process("train", str(path), f"--set=run.dir={run_dir}", *SMALL)
    assert done.code == 1
    assert done.err.count("Traceback (most recent call last)") == 1
    assert "IndexError on rank 0 before the first finished step" in done.err
    assert "restarting" not in done.err


def test_changed_initial_values_are_told_on_resume(desk: Desk, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    short = ("--set=schedule.kind=constant",)
    init = '--set=components.init=[{match = "*", kind = "normal", std = 0.02}]'
    assert desk.train(run_dir, *short, "--set=train.steps=1").code == 0
    strict = desk.train(run_dir, *short, "--set=train.steps=2", init, "--set=run.resume=strict")
    assert strict.code != 0
    assert "with components.init 'default' then, [{'match': '*', 'kind': 'normal', 'std': 0.02}] now" in strict.err
    auto = desk.train(run_dir, *short, "--set=train.steps=2", init)
    assert auto.code == 0, auto.err
    (resumed,) = [event for event in events_of(run_dir) if event["kind"] == "resumed"]
    assert resumed["differences"][0].startswith("components.init 'default' then")


POINTS = """
import neighbour
import numpy as np
import torch
from unisono import RunConfig
from unisono.train import Components


class Points:
    def __init__(self, change):
        self.change = change

    def __len__(self):
        return 64

    def __getitem__(self, index):
        x = self.change(np.array([index], np.float32))
        return x, 2 * x


def model(run):
    return torch.nn.Linear(1, 1)


def data(run):
    return Points(neighbour.half), Points(neighbour.half)


def config():
    return RunConfig(components=Components(model=model, data=data, objective="mean_squared_error"))
"""


@pytest.mark.full
def test_worker_processes_have_the_data_set_of_the_configuration(desk: Desk, tmp_path: Path) -> None:
    (desk.folder / "neighbour.py").write_text("def half(values):\n    return values / 2\n")
    path, run_dir = desk.folder / "points.py", tmp_path / "run"
    path.write_text(POINTS)
    more = ["--set=loader.worker_kind=process", "--set=loader.num_workers=1", "--set=train.steps=3"]
    more += ["--set=plan.global_batch=4", "--set=plan.device=cpu"]
    done = desk.process("train", str(path), f"--set=run.dir={run_dir}", *more)
    assert done.code == 0, done.err
    assert [event["step"] for event in events_of(run_dir) if event["kind"] == "step"][-1] == 3
