"""``unisono compare --first-difference``: runs of the command line and of scripts, replayed by child processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from commands import Desk

from unisono.compare.replay_child import is_of_script

SCRIPT = """
import sys

import torch
from torch import nn

from unisono import CheckpointOptions, ObserveOptions, PlanOptions, Trainer, TrainOptions

RUN_DIR, SLOPE = sys.argv[1], float(sys.argv[2])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(4, 8)
        self.act = nn.LeakyReLU(SLOPE)
        self.outer = nn.Linear(8, 3)

    def forward(self, inputs):
        return self.outer(self.act(self.inner(inputs)))


generator = torch.Generator().manual_seed(1)
data = [(torch.randn(4, generator=generator), n % 3) for n in range(12)]
with Trainer(
    Net(),
    data,
    PlanOptions(global_batch=4, device="cpu"),
    objective=nn.CrossEntropyLoss(),
    options=TrainOptions(steps=3),
    checkpoint=CheckpointOptions(every_steps=1),
    run_dir=RUN_DIR,
    observe=ObserveOptions(console="off", trackers=(), report=False),
) as run:
    run.fit()
print("not reached by a replay", file=open(RUN_DIR + "/after.txt", "w"))
"""

CONFIGURATION = """
import torch
from torch import nn

from unisono import CheckpointOptions, Components, ObserveOptions, OptimOptions, PlanOptions, RunConfig, TrainOptions


def model(run):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(run.optim.eps * 1e6), nn.Linear(8, 3))


def data(run):
    generator = torch.Generator().manual_seed(1)
    return tuple([(torch.randn(4, generator=generator), n % 3) for n in range(12)] for _ in range(2))


def config():
    return RunConfig(
        components=Components(model=model, data=data, objective=nn.CrossEntropyLoss()),
        plan=PlanOptions(global_batch=4, device="cpu"),
        optim=OptimOptions(eps=1e-8),
        train=TrainOptions(steps=3),
        checkpoint=CheckpointOptions(every_steps=1),
        observe=ObserveOptions(console="off", trackers=(), report=False),
    )
"""


def files(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


@pytest.mark.full
def test_runs_of_the_command_line(desk: Desk, tmp_path: Path) -> None:
    runs = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    for run_dir, more in zip(
        runs, ("optim.weight_decay=0.1", "optim.weight_decay=0.2", "launch.max_restarts=1"), strict=True
    ):
        assert desk.train(run_dir, "--set=checkpoint.every_steps=1", f"--set={more}").code == 0
    before = [files(run_dir) for run_dir in runs]
    done = desk.here("compare", "--first-difference", str(runs[0]), str(runs[1]), "--json")
    assert done.code == 1, done.err
    divergence = done.json["divergence"]
    assert (done.json["verdict"], divergence["step"], divergence["phase"]) == ("diverged", 1, "optimizer")
    assert done.json["replayed_steps"] <= 2
    assert any(text.startswith("weight_decay of group") for text in divergence["because"])
    assert [each["key"] for each in done.json["settings"]] == ["optim.weight_decay"]
    same = desk.here("compare", "--first-difference", str(runs[0]), str(runs[2]))
    assert (same.code, "no divergence: checkpoints of the same steps have the same bits too" in same.out) == (0, True)
    assert before == [files(run_dir) for run_dir in runs]


@pytest.mark.full
def test_runs_of_a_script(desk: Desk, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    commands = []
    for name, slope in (("a", "0.01"), ("b", "0.02")):
        arguments = [str(script), str(tmp_path / name), slope]
        subprocess.run([sys.executable, *arguments], env=desk.child_environ(), check=True, timeout=100)
        (tmp_path / name / "after.txt").unlink()
        commands += ["--script", " ".join(arguments)]
    compared = ["compare", "--first-difference", str(tmp_path / "a"), str(tmp_path / "b")]
    refused = desk.here(*compared)
    assert (refused.code, "--script 'train.py ARGUMENTS'" in refused.err) == (2, True)
    for wrong in (f"python {script}", f"{sys.executable} {script}", f"{script}x", "'", ""):
        refused = desk.here(*compared, "--script", wrong)
        assert (refused.code, "without python before it" in refused.err) == (2, True), refused.err
    done = desk.here(*compared, *commands)
    assert done.code == 1, done.err
    assert "first divergence: step 1, forward" in done.out
    assert "aten.leaky_relu.default" in done.out
    assert "act is LeakyReLU(negative_slope=0.01) in A, LeakyReLU(negative_slope=0.02) in B" in done.out
    assert not list(tmp_path.glob("*/after.txt"))
    script.write_text("raise RuntimeError('not the script it was')")
    failed = desk.here(*compared, *commands)
    assert (failed.code, "not the script it was" in failed.err) == (2, True)
    script.write_text("")
    failed = desk.here(*compared, *commands)
    assert (failed.code, "ended without a step of a Trainer" in failed.err) == (2, True)


@pytest.mark.full
def test_runs_of_a_python_configuration(desk: Desk, tmp_path: Path) -> None:
    """Their folders name the file with the code, so they are replayed from the folder, if that file may run."""
    file = tmp_path / "mine.py"
    file.write_text(CONFIGURATION)
    runs = [str(tmp_path / "a"), str(tmp_path / "b")]
    for run_dir, eps in zip(runs, ("1e-8", "2e-8"), strict=True):
        done = desk.here("train", "--debug", str(file), f"--set=run.dir={run_dir}", f"--set=optim.eps={eps}")
        assert done.code == 0, done.err
    compared = ["compare", "--first-difference", *runs]
    for script in (str(file), f"python {file}"):
        refused = desk.here(*compared, "--script", script)
        assert (refused.code, "the same without --script" in refused.err) == (2, True), refused.err
    file.write_text(CONFIGURATION + "# changed since\n")
    refused = desk.here(*compared)
    assert refused.code == 2
    assert f"{file} is a file that you have not run in this form" in refused.err
    assert "add --trust-python" in refused.err
    done = desk.here(*compared, "--trust-python")
    assert done.code == 1, done.err
    assert "first divergence: step 1, forward" in done.out
    assert "1 is LeakyReLU(negative_slope=0.01) in A, LeakyReLU(negative_slope=0.02) in B" in done.out
    assert "does not repeat the run" not in done.out


@pytest.mark.parametrize(
    ("text", "is_script"),
    [
        ('[components]\nmodel = "python:Net"\n', True),
        ('base = "mine.py"\n[components]\nmodel = "python:Net"\n', False),
        ('[components]\nmodel = ""\n', False),
    ],
)
def test_which_runs_are_of_scripts(tmp_path: Path, text: str, is_script: bool) -> None:
    (tmp_path / "config.toml").write_text(text)
    assert is_of_script(tmp_path) == is_script


def test_wrong_command_lines(desk: Desk, tmp_path: Path) -> None:
    runs = [str(tmp_path / "a"), str(tmp_path / "b")]
    for arguments, reason in (
        (runs[:1], "takes two runs"),
        ([*runs, str(tmp_path / "c")], "takes two runs"),
        ([*runs, "--full"], "takes no limits"),
        ([*runs, "--max-ratio", "perf/step_s=1"], "takes no limits"),
        ([*runs, "--script", "a.py", "--script", "b.py", "--script", "c.py"], "at most twice"),
        (runs, "has no run"),
    ):
        done = desk.here("compare", "--first-difference", *arguments)
        assert (done.code, reason in done.err) == (2, True), done.err
    done = desk.here("compare", *runs, "--script", "a.py")
    assert (done.code, "--script is for --first-difference" in done.err) == (2, True)
    done = desk.here("compare", *runs, "--timeout-s", "5")
    assert (done.code, "--timeout-s is for --first-difference" in done.err) == (2, True)
