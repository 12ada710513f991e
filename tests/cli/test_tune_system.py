"""``unisono tune system``: what it tries by itself, and an interrupted sweep that goes on."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from commands import Desk

from unisono.doctor import child
from unisono.doctor.child import TrainOutcome
from unisono.launch import resources
from unisono.launch.resources import Core
from unisono.observe.events import events_path
from unisono.storage.run_folder import PLAN_FILE
from unisono.tune import system
from unisono.tune.system import Candidate


def trainings(calls: list[dict[str, str]], *, interrupted_at: int = 0) -> Callable[..., TrainOutcome]:
    """Trainings of which the files are made up: with a micro-batch of 4 they take half of the time."""

    def train(run_dir: Path, arguments: Sequence[str], *, timeout_s: float) -> TrainOutcome:
        texts = [each.removeprefix("--set=").split("=", 1) for each in arguments if each.startswith("--set=")]
        settings = dict(texts)
        calls.append(settings)
        if len(calls) == interrupted_at:
            raise KeyboardInterrupt
        micro_batch = int(settings.get("plan.micro_batch", 2))
        events_path(run_dir, 0).parent.mkdir(parents=True)
        batch = {"global_batch": 8, "micro_batch": micro_batch, "accumulation": 8 // micro_batch}
        (run_dir / PLAN_FILE).write_text(json.dumps({"batch": batch}))
        step: dict[str, Any] = {"kind": "step", "train/loss": 1.0, "time/window_s": 0.1 if micro_batch == 4 else 0.2}
        lines = [json.dumps({**step, "step": number}) for number in range(1, 31)]
        events_path(run_dir, 0).write_text("\n".join(lines) + "\n")
        return TrainOutcome(run_dir=run_dir, code=0, took_s=1.0, said="")

    return train


def one_candidate(*_given: Any, **_options: Any) -> list[Candidate]:
    return [Candidate(name="launch.allocator", value="system")]


def test_a_sweep_tries_the_micro_batch_and_goes_on(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, calls = tmp_path / "system", list[dict[str, str]]()
    monkeypatch.setattr(system, "candidates_of", one_candidate)
    command = ["tune", "system", *desk.settings, f"--out={out}", "--pairs=2"]
    monkeypatch.setattr(child, "train_child", trainings(calls, interrupted_at=6))
    first = desk.here(*command)
    assert first.code == 75
    assert f"the same command goes on in {out}" in first.err
    assert "launch.allocator=system: 1 times the time" in first.out
    assert "launch.allocator=system" in (out / "report.html").read_text()
    assert len(json.loads((out / "report.json").read_text())["comparisons"]) == 1
    assert [path.name for path in out.iterdir() if path.name.startswith(".trainings")] == []
    calls.clear()
    monkeypatch.setattr(child, "train_child", trainings(calls))
    done = desk.here(*command, "--json")
    assert done.code == 0, done.err
    tried = [(each["name"], each["value"]) for each in done.json["comparisons"]]
    assert tried == [("launch.allocator", "system"), ("plan.micro_batch", 4), ("plan.micro_batch", 1)]
    assert [settings.get("plan.micro_batch") for settings in calls] == [None, "4", "4", None, "4", "1"]
    assert (done.json["out"], done.json["report"]) == (str(out), str(out / "report.html"))
    assert done.json["kept"] == {"plan.micro_batch": 4}
    assert tomllib.loads((out / "system.toml").read_text())["plan"]["micro_batch"] == 4
    calls.clear()
    assert desk.here(*command, "--json").json == done.json
    assert calls == []
    other = desk.here(*command[:-1], "--pairs=1")
    assert other.code == 2
    assert "--pairs 1 for the sweep in" in other.err


def test_a_training_on_a_full_disk_is_made_again(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, made = tmp_path / "system", trainings([])

    def train(run_dir: Path, arguments: Sequence[str], *, timeout_s: float) -> TrainOutcome:
        if not any("launch.allocator" in each for each in arguments):
            return made(run_dir, arguments, timeout_s=timeout_s)
        return TrainOutcome(run_dir=run_dir, code=1, took_s=1.0, said="OSError: [Errno 28] No space left on device")

    monkeypatch.setattr(system, "candidates_of", one_candidate)
    command = ["tune", "system", *desk.settings, f"--out={out}", "--pairs=1", "--try=launch.allocator=system"]
    monkeypatch.setattr(child, "train_child", train)
    first = desk.here(*command)
    assert first.code == 2
    assert (
        f"{out}/.trainings, which a training could not write: OSError: [Errno 28] No space left on device; "
        in first.err
    )
    assert " are free there\n" in first.err
    assert json.loads((out / "report.json").read_text())["comparisons"] == []
    monkeypatch.setattr(child, "train_child", made)
    done = desk.here(*command, "--json")
    assert done.code == 0, done.err
    assert [each["name"] for each in done.json["comparisons"]] == ["launch.allocator"]


@pytest.mark.parametrize(
    ("setting", "variable", "tried"),
    [
        ("launch.num_threads=4", "", ["2"]),
        ("launch.num_processes=4", "", ["4"]),
        ("launch.num_processes=1", "", ["16"]),
        ("launch.num_processes=4", "6", ["3"]),
        ("launch.num_threads=1", "6", []),
    ],
)
def test_half_of_the_threads_of_a_rank_are_tried(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, variable: str, tried: list[str]
) -> None:
    cores = [Core(node=0, cpus=(index,)) for index in range(32)]
    monkeypatch.setattr(resources, "allowed_cores", lambda: cores)
    monkeypatch.setattr(resources, "cpu_quota", lambda: None)
    monkeypatch.setattr(resources, "count_accelerators", lambda: 0)
    monkeypatch.setattr(Desk, "environ", desk.environ | {"OMP_NUM_THREADS": variable})
    calls = list[dict[str, str]]()
    monkeypatch.setattr(child, "train_child", trainings(calls))
    command = ["tune", "system", *desk.settings, f"--set={setting}", f"--out={tmp_path / 'system'}", "--pairs=1"]
    done = desk.here(*command, "--json")
    assert done.code == 0, done.err
    found = [str(each["value"]) for each in done.json["comparisons"] if each["name"] == "launch.num_threads"]
    assert found == tried


def test_the_value_of_the_configuration_is_no_candidate(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[dict[str, str]]()
    monkeypatch.setattr(child, "train_child", trainings(calls))
    command = ["tune", "system", *desk.settings, "--set=plan.micro_batch=2", "--pairs=1"]
    done = desk.here(*command, f"--out={tmp_path / 'system'}", "--try=plan.micro_batch=2,4", "--json")
    assert done.code == 0, done.err
    assert [each["value"] for each in done.json["comparisons"]] == [4]
    assert done.json["doubt"].startswith("Fewer than 3 pairs are no evidence for or against plan.micro_batch=4: ")
    assert done.json["doubt"] in (tmp_path / "system" / "report.html").read_text()
    three = desk.here(*command[:-1], f"--out={tmp_path / 'three'}", "--try=plan.micro_batch=4", "--json")
    assert (three.json["kept"], three.json["doubt"]) == ({"plan.micro_batch": 4}, None)
    own = desk.here(*command, f"--out={tmp_path / 'own'}", "--try=plan.micro_batch=2")
    assert own.code == 2
    assert own.err.startswith("unisono: --try plan.micro_batch=2, which the configuration has\n")


@pytest.mark.parametrize("values", ["0.1..0.5", "log:1e-4..1e-2"])
def test_a_range_without_steps_is_refused(desk: Desk, tmp_path: Path, values: str) -> None:
    out = tmp_path / "system"
    done = desk.here("tune", "system", *desk.settings, f"--try=optim.lr={values}", f"--out={out}")
    assert done.code == 2
    assert done.err.startswith(f"unisono: --try optim.lr={values.replace('1e-4..1e-2', '0.0001..0.01')}\n  rule: ")
    assert "a list, an integer range or a range with a step" in done.err
    assert not out.exists()


@pytest.mark.parametrize(
    ("tried", "said", "nearest"),
    [
        ("optim.lrr=0.1", "unknown key optim.lrr", "did you mean optim.lr?"),
        ("plan.precision=fp32,fp99", 'plan.precision = "fp99"', "fp32"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_before_any_training(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tried: str, said: str, nearest: str
) -> None:
    calls, out = list[dict[str, str]](), tmp_path / "system"
    monkeypatch.setattr(child, "train_child", trainings(calls))
    done = desk.here(
        "tune", "system", *desk.settings, f"--out={out}", "--try=launch.allocator=system", f"--try={tried}"
    )
    assert done.code == 2
    given, *_, proposed = done.err.splitlines()
    assert said in given
    assert nearest in proposed
    assert (calls, out.exists()) == ([], False)


@pytest.mark.full
def test_the_micro_batch_of_a_real_plan(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is 4 of 4 samples: only half of it can be tried."""
    monkeypatch.setattr(system, "candidates_of", one_candidate)
    done = desk.here("tune", "system", *desk.settings, f"--out={tmp_path / 'system'}", "--pairs=1", "--json")
    assert done.code == 0, done.err
    found = [(each["name"], each["value"], each["reason"]) for each in done.json["comparisons"]]
    assert found == [("launch.allocator", "system", ""), ("plan.micro_batch", 2, "")]
