"""``unisono tune params``: real trainings, kills of the search and of trials, and files that other commands take."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from commands import Desk, events_of, losses_of, problem
from little_memory import small_memory
from procs import wait_until
from report_pages import charts

from unisono.doctor import child
from unisono.observe.events import events_path
from unisono.tune.space import read_space
from unisono.tune.study import JOURNAL_FILE, Study, StudyOptions

pytest.importorskip("optuna")

LR = "--space=optim.lr=log:1e-4..1e-2"


def search(desk: Desk, out: Path, *arguments: str, code: int = 0) -> dict[str, Any]:
    done = desk.here("tune", "params", *desk.settings, f"--out={out}", "--json", *arguments)
    assert done.code == code, done.out + done.err
    return done.json


def test_the_best_trial_trains_again_bit_for_bit(desk: Desk, tmp_path: Path) -> None:
    out = tmp_path / "search"
    found = search(desk, out, LR, "--space=optim.kind=adamw,sgd", "--trials=3")
    values = {trial["number"]: trial["value"] for trial in found["trials"]}
    best = found["best"]
    assert best["value"] == min(values.values()) == values[best["number"]]
    assert len(set(values.values())) == 3
    settings = tomllib.loads((out / "best.toml").read_text())
    assert settings["optim"] == {"lr": float(best["settings"]["optim.lr"]), "kind": best["settings"]["optim.kind"]}
    again = desk.here("train", str(out / "best.toml"))
    assert again.code == 0, again.err
    assert losses_of(out / "best") == losses_of(Path(best["run_dir"])) != []
    compared = desk.here("compare", *(trial["run_dir"] for trial in found["trials"]), "--json")
    assert compared.code == 0
    assert "parallel" in (out / "report.html").read_text()


def test_trials_at_the_same_time_on_a_grid(desk: Desk, tmp_path: Path) -> None:
    out = tmp_path / "search"
    found = search(
        desk, out, "--space=optim.lr=1e-3,2e-3", "--space=optim.weight_decay=0.0,0.1", "--sampler=grid", "--parallel=2"
    )
    assert sorted(tuple(trial["settings"].values()) for trial in found["trials"]) == [
        ("1e-3", "0.0"),
        ("1e-3", "0.1"),
        ("2e-3", "0.0"),
        ("2e-3", "0.1"),
    ]
    for trial in found["trials"]:
        record = tomllib.loads((Path(trial["run_dir"]) / "config.toml").read_text())
        assert record["launch"]["num_threads"] >= 1
        assert record["optim"]["weight_decay"] == float(trial["settings"]["optim.weight_decay"])


def started(desk: Desk, out: Path, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "unisono", "tune", "params", *desk.settings, f"--out={out}", *arguments]
    return subprocess.Popen(command, cwd=desk.folder, env=desk.child_environ(), stdout=subprocess.DEVNULL)


@pytest.mark.full
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_search_that_was_stopped_goes_on(desk: Desk, tmp_path: Path, sent: signal.Signals) -> None:
    out = tmp_path / "search"
    arguments = [LR, "--trials=2", "--set=train.steps=400", "--set=checkpoint.every_steps=20"]
    process = started(desk, out, *arguments)
    first = out / "trials" / "0000"
    wait_until(lambda: any(first.glob("checkpoints/step-*/COMMIT")), "a checkpoint of the first trial", timeout_s=90.0)
    process.send_signal(sent)
    process.wait(timeout=90)
    wait_until(lambda: not trainings(first), "its training ends too")
    num_steps = len(losses_of(first))
    assert 20 <= num_steps < 400
    found = search(desk, out, *arguments)
    assert [trial["outcome"] for trial in found["trials"]] == ["done", "done"]
    kinds = [event["kind"] for event in events_of(first)]
    assert "resumed" in kinds
    whole = desk.here(
        "train", *desk.settings, *arguments[2:], f"--set=run.dir={tmp_path / 'whole'}",
        f"--set=optim.lr={found['trials'][0]['settings']['optim.lr']}",
    )  # fmt: skip
    assert whole.code == 0
    assert losses_of(tmp_path / "whole")[-1] == losses_of(first)[-1]


def trainings(run_dir: Path) -> list[int]:
    """Processes whose command line names the folder."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if f"run.dir={run_dir}" in command:
                found.append(int(entry.name))
    return found


@pytest.mark.full
def test_two_searches_share_a_folder(desk: Desk, tmp_path: Path) -> None:
    out = tmp_path / "search"
    processes = [started(desk, out, LR, "--trials=5") for _ in range(2)]
    assert [process.wait(timeout=170) for process in processes] == [0, 0]
    found = search(desk, out, LR, "--trials=5")
    assert [trial["outcome"] for trial in found["trials"]] == ["done"] * 5
    for trial in found["trials"]:
        assert len(losses_of(Path(trial["run_dir"]))) == 4


@pytest.mark.full
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_trial_that_is_done_stays_when_the_search_is_stopped(
    desk: Desk, tmp_path: Path, sent: signal.Signals
) -> None:
    out = tmp_path / "search"
    arguments = ["--space=optim.lr=1e-3,2e-3", "--sampler=grid", "--set=train.steps=400"]
    arguments.append("--set=checkpoint.every_steps=20")
    process = started(desk, out, *arguments)
    first, second = (out / "trials" / name for name in ("0000", "0001"))
    wait_until(lambda: any(second.glob("checkpoints/step-*/COMMIT")), "a checkpoint of the second trial", timeout_s=150)
    before = contents(first)
    process.send_signal(sent)
    code = process.wait(timeout=90)
    assert code == (-sent if sent == signal.SIGKILL else 75)
    wait_until(lambda: not trainings(second), "its training ends too")
    if sent != signal.SIGKILL:
        page = (out / "report.html").read_text()
        assert "done" in page
        assert "running" in page
        assert tomllib.loads((out / "best.toml").read_text())["optim"] == {"lr": 1e-3}
    found = search(desk, out, *arguments)
    assert [trial["outcome"] for trial in found["trials"]] == ["done", "done"]
    assert contents(first) == before
    assert [event["kind"] for event in events_of(second)].count("resumed") == 1


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_ctrl_c_once_leaves_a_search_that_goes_on(desk: Desk, tmp_path: Path) -> None:
    """The training that runs saves; a second Ctrl-C is not needed."""
    out = tmp_path / "search"
    arguments = [LR, "--trials=1", "--set=train.steps=4000"]
    command = [sys.executable, "-m", "unisono", "tune", "params", *desk.settings, f"--out={out}", *arguments]
    process = subprocess.Popen(
        command, cwd=desk.folder, env=desk.child_environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    first = out / "trials" / "0000"
    wait_until(lambda: events_path(first, 0).exists() and len(losses_of(first)) > 4, "some steps", timeout_s=90.0)
    process.send_signal(signal.SIGINT)
    said, errors = process.communicate(timeout=90)
    assert (process.returncode, said.count("trial 0: ")) == (75, 1)
    assert f"unisono: interrupted; the same command goes on in {out}\n" in errors
    assert "Traceback" not in errors
    assert trainings(first) == []
    assert any(first.glob("checkpoints/step-*/COMMIT"))
    assert 4 < len(losses_of(first)) < 4000


CURVES = """
import time

import numpy as np
import torch
from unisono.train.config import Components, RunConfig


class Model(torch.nn.Linear):
    num_steps, is_bad = 0, False

    def forward(self, x):
        self.num_steps += self.training
        if self.is_bad and self.num_steps > 20:
            time.sleep(60)
            raise RuntimeError("nobody has ended this trial")
        return super().forward(x)


def model(run):
    made = Model(4, 1)
    made.is_bad = run.optim.lr < 1e-3
    return made


def config():
    return RunConfig(
        components=Components(
            model=model,
            data=lambda run: ([(np.ones(4, np.float32), np.ones(1, np.float32))] * 64,) * 2,
            objective="mean_squared_error",
        )
    )
"""


@pytest.mark.full
@pytest.mark.parametrize(("pruner", "num_before"), [("median", 5), ("halving", 2)])
def test_a_trial_with_a_bad_curve_is_ended(desk: Desk, tmp_path: Path, pruner: str, num_before: int) -> None:
    """It would never end by itself."""
    config, out = tmp_path / "own.py", tmp_path / "search"
    config.write_text(CURVES)
    values = [*(f"0.0{number + 2}" for number in range(num_before)), "1e-6"]
    settings = {"train.steps": 40, "train.eval_every_steps": 2, "plan.global_batch": 4, "observe.console": "off"}
    command = ["tune", "params", str(config), *(f"--set={name}={value}" for name, value in settings.items())]
    command += [f"--space=optim.lr={','.join(values)}", "--sampler=grid", f"--pruner={pruner}", f"--out={out}"]
    done = desk.here(*command)
    assert done.code == 0, done.err
    found = desk.here(*command, "--json").json
    *good, bad = found["trials"]
    assert [(trial["outcome"], trial["last_step"]) for trial in good] == [("done", 40)] * num_before
    assert (bad["outcome"], bad["reason"]) == ("pruned", "others were better at the same step")
    steps = [event["step"] for event in events_of(Path(bad["run_dir"])) if "eval/loss" in event]
    assert bad["last_step"] in steps
    assert max(steps) < 40
    assert trainings(Path(bad["run_dir"])) == []
    assert found["best"]["number"] < num_before
    assert f"trial {num_before}: pruned, eval/loss {bad['value']:.6g}; others were better" in done.out
    assert f"pruned at step {bad['last_step']}" in (out / "report.html").read_text()


def test_the_setting_that_counts_is_shown_first(desk: Desk, tmp_path: Path) -> None:
    """One decides the value, the other changes nothing."""
    out, space = tmp_path / "search", ["run.seed=1..1000", "optim.lr=log:1e-4..1e-2"]
    arguments = [*(f"--space={text}" for text in space), "--sampler=random", "--trials=1"]
    assert search(desk, out, *arguments)["importances"] == {}
    needs = "The importance of settings needs 10 completed trials; 1 is."
    assert needs in (out / "report.html").read_text()
    lines = map(json.loads, (out / JOURNAL_FILE).read_text().splitlines())
    (identity,) = (line["user_attr"]["identity"] for line in lines if "identity" in line.get("user_attr", ()))
    study = Study(out.absolute(), read_space(space), StudyOptions(sampler="random"), identity)
    for _ in range(80):  # each would be a training
        trial = study.take_trial(None)
        assert trial is not None
        trial.run_dir.mkdir(parents=True)
        (trial.run_dir / "config.toml").touch()
        study.finish(trial, "done", abs(math.log(float(trial.settings["optim.lr"]) / 1e-3)))
    found = search(desk, out, *arguments)
    assert len(found["trials"]) == 81
    assert list(found["importances"]) == ["optim.lr", "run.seed"]
    assert found["importances"]["optim.lr"] > 0.8
    page = (out / "report.html").read_text()
    assert "Importance of settings" in page
    assert needs not in page
    assert "how values differ" not in page
    (bars,) = charts(page)["importances"]["data"]
    assert bars["y"] == ["run.seed", "optim.lr"]  # the first is drawn lowest
    assert bars["x"] == [round(100 * found["importances"][name], 1) for name in bars["y"]]


@pytest.mark.parametrize("verb", ["params", "lr", "batch", "system", "folds", "coord-check"])
def test_a_search_in_a_job_is_refused(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    out, space = tmp_path / "search", [LR] if verb == "params" else []
    done = desk.here("tune", verb, *desk.settings, *space, f"--out={out}")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("unisono: rank 1: this process is rank 1 of 2 of a job that torchrun started\n")
    assert f"2 jobs would write into {out}, so nothing was started" in done.err
    assert not out.exists()


@pytest.mark.full
def test_a_search_that_is_launched_is_refused(desk: Desk, tmp_path: Path) -> None:
    out = tmp_path / "search"
    tune = ["-m", "unisono", "tune", "params", *desk.settings, LR, f"--out={out}"]
    done = desk.process("launch", "-n", "2", "--dir", str(tmp_path / "job"), "--", sys.executable, *tune)
    assert done.code == 2
    assert "of 2 of a job that unisono started" in done.out + done.err
    assert not out.exists()


@pytest.mark.parametrize("verb", ["params", "folds"])
def test_a_search_without_its_package(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)  # as of a name that is known to be absent
    table, out = tmp_path / "table.csv", tmp_path / "search"
    table.write_text("a,price\n" + "".join(f"{number},{2 * number}\n" for number in range(30)))
    settings = {"task.kind": "table", "task.predicts": "number", "task.target": "price", "data.train": table}
    given = [f"--set={name}={value}" for name, value in settings.items()]
    done = desk.here("tune", verb, *given, *([LR] if verb == "params" else []), f"--out={out}")
    assert done.code == 2
    assert done.err == problem(
        "a search of settings needs the package 'optuna', which is not installed",
        "it comes with the extra 'tune'",
        "nothing was started",
        "pip install 'unisono[tune]'",
    )
    assert not out.exists()


OWN = """
import numpy as np
import torch
from unisono.train.config import Components, RunConfig

LIMIT = 0.005


def model(run):
    if run.optim.lr > LIMIT:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
    return torch.nn.Linear(4, 1)


def config():
    return RunConfig(
        components=Components(
            model=model,
            data=lambda run: ([(np.ones(4, np.float32), np.ones(1, np.float32))] * 64,) * 2,
            objective="mean_squared_error",
        )
    )
"""


def test_a_trial_out_of_memory_is_a_result(desk: Desk, tmp_path: Path) -> None:
    config = tmp_path / "own.py"
    config.write_text(OWN)
    settings = ["--set=train.steps=3", "--set=plan.global_batch=4", "--space=optim.lr=0.01,0.001", "--sampler=grid"]
    done = desk.here("tune", "params", str(config), *settings, f"--out={tmp_path / 'search'}", "--json")
    assert done.code == 0, done.err
    first, second = done.json["trials"]
    assert (first["outcome"], second["outcome"]) == ("out_of_memory", "done")
    assert "CUDA out of memory" in first["reason"]


@pytest.mark.full
def test_a_trial_that_the_kernel_ends_for_lack_of_memory(desk: Desk, tmp_path: Path) -> None:
    config = tmp_path / "own.py"
    with small_memory(64) as members:
        hoard = f"open({str(members)!r}, 'w').write(str(os.getpid())); [bytearray(b'x') * 2**20 for _ in range(400)]"
        config.write_text(
            OWN.replace(
                'raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")', hoard
            ).replace("import numpy", "import os\n\nimport numpy")
        )
        settings = ["--set=train.steps=3", "--set=plan.global_batch=4", "--space=optim.lr=0.01,0.001", "--sampler=grid"]
        done = desk.here("tune", "params", str(config), *settings, f"--out={tmp_path / 'search'}", "--json")
    assert done.code == 0, done.err
    first, second = done.json["trials"]
    assert (first["outcome"], second["outcome"]) == ("out_of_memory", "done")
    assert "most likely out of memory" in first["reason"]


def test_a_killed_trial_is_made_on(desk: Desk, tmp_path: Path) -> None:
    out = tmp_path / "search"
    arguments = [LR, "--trials=1", "--set=train.steps=300", "--set=checkpoint.every_steps=20"]
    process = started(desk, out, *arguments)
    first = out / "trials" / "0000"
    wait_until(lambda: any(first.glob("checkpoints/step-*/COMMIT")), "a checkpoint", timeout_s=90.0)
    for pid in trainings(first):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    assert process.wait(timeout=150) == 0
    found = search(desk, out, *arguments)
    assert [trial["outcome"] for trial in found["trials"]] == ["done"]
    assert "resumed" in [event["kind"] for event in events_of(first)]


@pytest.mark.full
def test_a_rank_of_a_trial_is_killed(desk: Desk, tmp_path: Path) -> None:
    """The trial goes on, and what is written for the best one trains again as it did, in one go."""
    out = tmp_path / "search"
    arguments = [LR, "--trials=1", "--set=launch.num_processes=2", "--set=train.steps=200"]
    arguments.append("--set=checkpoint.every_steps=20")
    process = started(desk, out, *arguments)
    first = out / "trials" / "0000"
    wait_until(lambda: any(first.glob("checkpoints/step-*/COMMIT")), "a checkpoint", timeout_s=120.0)
    _launcher, *ranks = sorted(trainings(first))
    assert len(ranks) >= 2
    os.kill(ranks[-1], signal.SIGKILL)
    assert process.wait(timeout=170) == 0
    found = search(desk, out, *arguments)
    assert [trial["outcome"] for trial in found["trials"]] == ["done"]
    assert "resumed" in [event["kind"] for event in events_of(first)]
    again = desk.process("train", str(out / "best.toml"))
    assert again.code == 0, again.err
    assert len(losses_of(out / "best")) == 200
    assert losses_of(out / "best")[-20:] == losses_of(first)[-20:]


@pytest.mark.parametrize("budget", ["--max-s=0.5", "--max-device-s=0.5"])
def test_a_budget_of_time_ends_it(desk: Desk, tmp_path: Path, budget: str) -> None:
    found = search(desk, tmp_path / "search", LR, budget, "--trials=5")
    assert [trial["outcome"] for trial in found["trials"]] == ["done"]
    assert found["trials"][0]["device_s"] > 0.5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--space=optim.lrr=1..2"], "optim.lr"),
        (["--space=optim.kind=adamw,adamx"], "adamx"),
        (["--space=optim.lr=0.001,0.01", "--set=optim.lr=0.1"], "a setting has one value, or is searched"),
        (["--space=run.dir=a,b"], "--out is the folder of the search"),
        (["--space=optim.lr=0.0..1", "--sampler=grid"], "a grid needs a list"),
    ],
)
def test_a_wrong_search_starts_nothing(desk: Desk, tmp_path: Path, arguments: list[str], words: str) -> None:
    out = tmp_path / "search"
    assert words in json.dumps(search(desk, out, *arguments, code=2)["problems"])
    assert not out.exists()


def test_trials_that_all_fail_end_the_search(desk: Desk, tmp_path: Path) -> None:
    config, out = tmp_path / "own.py", tmp_path / "search"
    config.write_text(OWN.replace('torch.OutOfMemoryError("CUDA out', 'ValueError("out'))
    settings = ["--set=train.steps=3", "--set=plan.global_batch=4", "--space=optim.lr=0.01,0.02,0.03,0.04"]
    done = desk.here("tune", "params", str(config), *settings, "--sampler=grid", f"--out={out}", "--json")
    assert done.code == 2
    (problem,) = done.json["problems"]
    assert problem["given"].startswith("the first 3 trials, which all failed; the last one: ")
    assert "ValueError: out of memory" in problem["given"]
    assert (out / "report.html").read_text().count("failed") >= 3


def test_a_trial_that_fails_says_what_to_try(desk: Desk, tmp_path: Path) -> None:
    out, missing = tmp_path / "search", tmp_path / "missing"
    arguments = ["--set=task.kind=table", "--set=task.target=a", f"--set=data.train={missing}"]
    done = desk.here("tune", "params", *arguments, LR, "--trials=1", f"--out={out}")
    (line,) = (line for line in done.out.splitlines() if line.startswith("trial 0: failed; "))
    output = (out / "trials" / "0000.output.txt").read_text()
    (remedy,) = (text.partition("try:")[2].strip() for text in output.splitlines() if text.startswith("  try:"))
    assert line.endswith(f"; try: {remedy}")
    assert "compared by at most" not in done.out


def test_a_metric_that_no_run_has(desk: Desk, tmp_path: Path) -> None:
    """The first training ends the search."""
    out = tmp_path / "search"
    (problem,) = search(desk, out, LR, "--trials=5", "--metric=eval/los", code=2)["problems"]
    assert problem["given"].startswith("--metric eval/los, and trial 0, which trained without it: its events have no")
    assert "they have eval/accuracy, " in problem["given"]
    assert ", eval/loss, " in problem["given"]
    assert problem["nearest"] == "another folder and --metric NAME: did you mean 'eval/loss'?"
    assert [path.name for path in sorted((out / "trials").iterdir())] == ["0000", "0000.output.txt"]
    assert "failed" in (out / "report.html").read_text()


def test_a_range_of_learning_rates(desk: Desk, tmp_path: Path) -> None:
    """The rate rises at every step, and the training ends once the loss does."""
    out = tmp_path / "range"
    settings = [each for each in desk.settings if not each.startswith(("--set=train.steps", "--set=train.eval_every"))]
    done = desk.here(
        "tune", "lr", *settings, "--set=schedule.kind=wsd", f"--out={out}", "--steps=80", "--high=1000", "--json"
    )
    assert done.code == 0, done.err
    found = done.json
    assert 20 <= len(found["lrs"]) <= 80
    assert found["lrs"] == sorted(found["lrs"])
    assert found["lrs"][0] == pytest.approx(1e-6)
    assert found["lrs"][1] / found["lrs"][0] == pytest.approx(1e9 ** (1 / 79))
    assert found["suggested_lr"] < found["diverged_lr"] <= 1000
    again = desk.here("tune", "lr", *settings, f"--out={out}")
    assert again.code == 2
    assert "this command begins anew" in again.err


@pytest.mark.full
def test_the_largest_batch_that_memory_has_room_for(desk: Desk, tmp_path: Path) -> None:
    out = tmp_path / "batch"
    done = desk.here("tune", "batch", *desk.settings, f"--out={out}", "--max-micro-batch=6", "--json")
    assert done.code == 0, done.err
    found = done.json
    assert (found["largest"], found["hit_memory_limit"], found["proposed"]) == (6, False, 4)
    assert [probe["micro_batch"] for probe in found["probes"]] == [1, 2, 4, 6]
    assert all(probe["peak_bytes"] > 0 and probe["samples_per_s"] > 0 for probe in found["probes"])


OUT_OF_MEMORY = """
import numpy as np
import torch
from unisono.train.config import Components, RunConfig


class Model(torch.nn.Linear):
    def forward(self, x):
        if len(x) > 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return super().forward(x)


def config():
    return RunConfig(
        components=Components(
            model=lambda run: Model(4, 1),
            data=lambda run: ([(np.ones(4, np.float32), np.ones(1, np.float32))] * 64,) * 2,
            objective="mean_squared_error",
        )
    )
"""


@pytest.mark.full
def test_the_largest_batch_by_real_failures(desk: Desk, tmp_path: Path) -> None:
    config = tmp_path / "own.py"
    config.write_text(OUT_OF_MEMORY)
    done = desk.here("tune", "batch", str(config), "--set=plan.global_batch=8", f"--out={tmp_path / 'batch'}", "--json")
    assert done.code == 0, done.err
    assert (done.json["largest"], done.json["hit_memory_limit"], done.json["proposed"]) == (5, True, 4)
    assert {probe["micro_batch"]: probe["fits"] for probe in done.json["probes"]} == {
        **{1: True, 2: True, 4: True, 8: False},
        **{6: False, 5: True},
    }


def test_cross_validation(desk: Desk, tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text("a,b,price\n" + "".join(f"{i},{i % 3},{2 * i + i % 3}\n" for i in range(30)))
    config = tmp_path / "table.toml"
    config.write_text(
        f'[task]\nkind = "table"\npredicts = "number"\ntarget = "price"\n[data]\ntrain = "{table}"\n'
        "[train]\nsteps = 3\n[plan]\nglobal_batch = 8\n"
    )
    out = tmp_path / "folds"
    done = desk.here("tune", "folds", str(config), "--folds=3", f"--out={out}", "--json")
    assert done.code == 0, done.err
    found = done.json
    assert (found["out"], found["report"]) == (str(out), str(out / "report.html"))
    run = tomllib.loads((Path(found["trials"][0]["run_dir"]) / "config.toml").read_text())
    assert run["train"]["num_eval_samples"] == 0  # each sample is held out, and evaluated
    values = list(found["values"].values())
    assert len(set(values)) == 3
    assert found["mean"] == pytest.approx(sum(values) / 3)
    assert found["standard_deviation"] > 0
    held_out = [
        tomllib.loads((Path(trial["run_dir"]) / "config.toml").read_text())["data"] for trial in found["trials"]
    ]
    assert [(data["eval_frac"], data["eval_fold"]) for data in held_out] == [(1 / 3, fold) for fold in range(3)]
    again = desk.here("tune", "folds", str(config), "--folds=3", f"--out={out}", "--json")
    assert again.json["values"] == found["values"]


@pytest.mark.full
def test_a_setting_that_makes_steps_faster(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transform that sleeps: with two workers its time is hidden. The file that is written trains as the trainings did."""
    train_child, losses = child.train_child, list[list[float]]()

    def train(*given: Any, **options: Any) -> child.TrainOutcome:
        outcome = train_child(*given, **options)
        losses.append(outcome.losses())
        return outcome

    monkeypatch.setattr(child, "train_child", train)
    config = tmp_path / "own.py"
    config.write_text(SLEEPING)
    out = tmp_path / "system"
    settings = ["--set=plan.global_batch=8", "--set=loader.num_workers=0"]
    done = desk.here(
        "tune", "system", str(config), *settings, f"--out={out}", "--try=loader.num_workers=2,4", "--pairs=2", "--json"
    )
    assert done.code == 0, done.err
    assert set(done.json["kept"]) == {"loader.num_workers"}
    assert done.json["speedup"] > 1.2
    assert all(each["same_losses"] for each in done.json["comparisons"])
    overlay = tomllib.loads((out / "system.toml").read_text())
    assert overlay["base"] == str(config)
    assert overlay["plan"] == {"global_batch": 8}
    assert overlay["loader"]["num_workers"] in (2, 4)
    assert [path.name for path in out.iterdir() if path.name.startswith(".trainings")] == []
    again = desk.here("train", str(out / "system.toml"), f"--set=run.dir={tmp_path / 'run'}", "--set=train.steps=30")
    assert again.code == 0, again.err
    assert len(losses) >= 6
    assert all(each == losses_of(tmp_path / "run") for each in losses)


SLEEPING = """
import time


import numpy as np
import torch
from unisono.train.config import Components, RunConfig


class Rows:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return np.full(4, index, np.float32), np.full(1, index % 3, np.float32)


def sleep(sample, rng):
    time.sleep(0.005)
    return sample


def config():
    return RunConfig(
        components=Components(
            model=lambda run: torch.nn.Linear(4, 1),
            data=lambda run: (Rows(), Rows()),
            transform=sleep,
            objective="mean_squared_error",
        )
    )
"""


def test_the_column_of_a_group_is_looked_up_first(desk: Desk, tmp_path: Path) -> None:
    table, out = tmp_path / "table.csv", tmp_path / "folds"
    table.write_text("user,price\n" + "".join(f"{i},{2 * i}\n" for i in range(30)))
    settings = {"task.kind": "table", "task.predicts": "number", "task.target": "price", "data.train": table}
    given = [f"--set={name}={value}" for name, value in settings.items()]
    done = desk.here("tune", "folds", *given, "--group=usr", f"--out={out}")
    assert done.code == 2
    assert done.err == problem(
        f"--group usr, and {table} without this column",
        "all samples with one value of a column are held out together",
        "nothing was started",
        "did you mean 'user'?",
    )
    assert not out.exists()


def test_all_combinations_are_tried_once(desk: Desk, tmp_path: Path) -> None:
    out = tmp_path / "search"
    arguments = ["tune", "params", *desk.settings, "--space=optim.kind=adamw,sgd", f"--out={out}", "--trials=5"]
    done = desk.here(*arguments)
    assert done.code == 0, done.err
    assert "all 2 combinations are tried\n" in done.out
    assert "compared by at most 4 held-out samples; train.num_eval_samples=0 takes all\n" in done.out
    assert "The importance of settings needs 10 completed trials; 2 are.\n" in done.out
    found = desk.here(*arguments, "--json").json
    assert sorted(trial["settings"]["optim.kind"] for trial in found["trials"]) == ["adamw", "sgd"]
    assert (found["combinations"], found["num_eval_samples"]) == (2, 4)
    assert "at most 4" in (out / "report.html").read_text()


def test_why_a_trial_diverged(desk: Desk, tmp_path: Path) -> None:
    """Its reason begins with what was not finite."""
    config = tmp_path / "own.py"
    config.write_text(OWN.replace("torch.nn.Linear(4, 1)", "Model(4, 1)").replace("LIMIT = 0.005", NAN))
    settings = ["--set=train.steps=9", "--set=train.max_skips=2", "--set=plan.global_batch=4", "--space=optim.lr=0.01"]
    settings += ["--space=optim.beta2=0.9,0.99", "--sampler=grid", "--trials=1"]
    done = desk.here("tune", "params", str(config), *settings, f"--out={tmp_path / 'search'}")
    assert done.code == 1, done.err
    assert "trial 0: diverged; all 2 steps of the run were skipped, the last one with loss nan" in done.out


NAN = """LIMIT = 1


class Model(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * float("nan")
"""


def test_the_metrics_that_the_page_names_are_those_of_runs(desk: Desk, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/tuning.md").read_text()
    (row,) = (line for line in page.splitlines() if line.startswith("| `--metric "))
    of_corpus, of_shards = row.split("with token shards")
    assert desk.train(tmp_path / "corpus").code == 0
    assert desk.here("data", "pack", "corpus", "metrics.bin").code == 0
    settings = [each for each in desk.settings if not each.startswith("--set=data.corpus")]
    run = ["train", "--debug", f"--set=run.dir={tmp_path / 'shards'}", "--set=data.train=metrics-*.bin"]
    assert desk.here(*run, *settings).code == 0
    named = ["eval/accuracy", "eval/bits_per_byte", "eval/loss", "eval/perplexity"]
    assert sorted(set(re.findall(r"eval/\w+", row))) == named
    assert set(re.findall(r"eval/\w+", of_shards)) == {"eval/loss", "eval/perplexity"}
    for folder, words in (("corpus", of_corpus), ("shards", of_shards)):
        evaluations = [event for event in events_of(tmp_path / folder) if event["kind"] == "eval"]
        assert set(re.findall(r"eval/\w+", words)) <= set(evaluations[-1])
    assert "eval/bits_per_byte" not in evaluations[-1]
