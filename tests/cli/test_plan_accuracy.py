"""``unisono plan accuracy``: real predictions, real runs, and what the next prediction makes of them."""

from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from commands import Desk, Outcome, make_desk

from unisono.dist.interpreter import module_command
from unisono.measure import DeviceRate, add_to_calibration
from unisono.measure.calibration import CALIBRATION_FILE
from unisono.measure.ceiling import cpu_name
from unisono.planner.plan_record import PLAN_RECORD_FILE, read_plan_record

LENGTH = 14  # of which 12 steps are steady
PINNED = ("--set=plan.micro_batch=2", "--set=plan.recompute=none")


@pytest.fixture
def own(tmp_path: Path) -> Desk:
    """A desk of which nothing is recorded."""
    return make_desk(tmp_path / "desk", tmp_path / "cache")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches run in the process of the test, which has one thread as a rank would have."""
    monkeypatch.setenv("UNISONO_TRIES_RANKS", "")


def record_file(desk: Desk) -> Path:
    return desk.cache / "unisono" / PLAN_RECORD_FILE


def succeeded(outcome: Outcome) -> Outcome:
    assert outcome.code == 0, outcome.err or outcome.out
    return outcome


def predicted(desk: Desk, *settings: str) -> dict[str, Any]:
    return succeeded(desk.here("plan", "auto", "--json", *desk.settings, *PINNED, *settings)).json


def trained(desk: Desk, run_dir: str, *arguments: str, steps: int = LENGTH) -> Outcome:
    ends = f"--set=train.steps={steps}", "--set=train.eval_every_steps=0"
    return succeeded(desk.train(run_dir, *PINNED, *ends, *arguments))


def accuracy(desk: Desk) -> dict[str, Any]:
    return succeeded(desk.here("plan", "accuracy", "--json")).json


def test_nothing_is_recorded_of_a_plan_that_was_not_predicted(own: Desk) -> None:
    assert accuracy(own) == {
        "file": str(record_file(own)),
        "predictions": 0,
        "runs": 0,
        "machines": [],
        "layout_runs": 0,
        "devices": [],
    }
    first, second = succeeded(own.here("plan", "accuracy")).out.splitlines()
    assert first == f"no run is recorded; no predicted plans in {record_file(own)}"
    assert "unisono plan auto" in second
    trained(own, "unknown")
    assert not record_file(own).exists()


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("here")
def test_a_run_is_recorded_with_the_prediction_of_its_plan(own: Desk) -> None:
    (candidate,) = predicted(own)["candidates"]
    assert (candidate["learned_factor"], candidate["learned_runs"]) == (1.0, 0)
    assert "1 predicted plan in" in succeeded(own.here("plan", "accuracy")).out
    trained(own, "short", steps=8)
    trained(own, "wider", "--set=model.dim=32")
    trained(own, "verified", "--set=observe.verify_every_steps=1")
    assert accuracy(own)["runs"] == 0
    trained(own, "first", "--set=optim.lr=0.01")
    (machine,) = accuracy(own)["machines"]
    (plan,) = machine["plans"]
    assert (plan["runs"], plan["steps"], plan["axes"]) == (1, LENGTH - 2, [])
    assert plan["predicted_step_s"] == candidate["step_s"]
    assert plan["predicted_peak_bytes"] == candidate["peak_bytes"]
    assert plan["measured_peak_bytes"] is None  # the memory of a host is not that of tensors
    assert plan["ratio"] == pytest.approx(plan["measured_step_s"] / plan["predicted_step_s"])
    assert machine["median_error_frac"] == pytest.approx(abs(1 / plan["ratio"] - 1))
    assert "recompute none" in plan["plan"]

    # it goes on with the plan that it has, which names rules and stages as well
    trained(own, "first", "--plan=auto", "--set=optim.lr=0.01", steps=2 * LENGTH)
    (machine,) = accuracy(own)["machines"]
    assert [plan["runs"] for plan in machine["plans"]] == [2]
    shown = succeeded(own.here("plan", "accuracy")).out.splitlines()
    assert shown[0].endswith(f"torch {machine['torch']}")
    assert f"(2 runs, {2 * LENGTH - 4} steps)" in shown[2]
    assert shown[-1].startswith("  median error of 2 runs: ")


@pytest.mark.usefixtures("here")
def test_the_next_prediction_is_corrected_and_the_record_keeps_the_uncorrected_one(own: Desk) -> None:
    predicted(own)
    trained(own, "run")
    content = json.loads(record_file(own).read_text())
    (run,) = content["runs"]
    # three predictions that were half of what was measured, and one on another host that was far off
    for number in range(3):
        run["predicted"]["at_s"] = float(number)
        run["step_s"] = 2 * run["predicted"]["step_s"]
        content["runs"].append(json.loads(json.dumps(run)))
    run["step_s"] *= 100
    run["predicted"]["machine"]["host"] = "elsewhere"
    content["runs"] = [*content["runs"][1:], *[run] * 5]
    record_file(own).write_text(json.dumps(content))
    outcome = predicted(own)
    (candidate,) = outcome["candidates"]
    assert (candidate["learned_factor"], candidate["learned_runs"]) == (2.0, 3)
    assert (outcome["learned_factor"], outcome["learned_runs"]) == (2.0, 3)
    uncorrected = candidate["work_s"] + candidate["bubble_s"] + candidate["straggler_s"]
    assert candidate["step_s"] == pytest.approx(2 * uncorrected)
    (kept,) = read_plan_record(record_file(own)).predictions
    assert kept.step_s == pytest.approx(uncorrected)
    text = succeeded(own.here("plan", "auto", *own.settings, *PINNED)).out
    assert "times 2 learned from 3 runs" in text
    assert "earlier runs took 2 times as long as predicted, the median of 3: without that" in text


@pytest.mark.usefixtures("here")
def test_a_record_that_cannot_be_written_or_read_stops_nothing(own: Desk, caplog: pytest.LogCaptureFixture) -> None:
    predicted(own)
    lock = record_file(own).with_name(f".{PLAN_RECORD_FILE}.lock")
    lock.unlink()
    lock.symlink_to(own.folder / "elsewhere")  # is not followed
    trained(own, "run")
    assert "the step time was not recorded" in caplog.text
    assert accuracy(own)["runs"] == 0
    predicted(own)
    assert "the predictions were not kept" in caplog.text
    record_file(own).write_text('{"version": 1, "predictions": [{"plan": 3}], "runs": 7}')
    trained(own, "another")
    assert accuracy(own)["predictions"] == 0


def calibrate(desk: Desk) -> None:
    """As if ``plan calibrate`` had measured a slow device: the figures do not matter, as what runs took corrects them."""
    rate = DeviceRate(
        hosts=(socket.gethostname(),),
        name=cpu_name(),
        ranks=1,
        tflops=0.01,
        memory_bytes=2**34,
        memory_bytes_per_s=1e10,
        spread_frac=0.0,
    )
    add_to_calibration(desk.cache / "unisono" / CALIBRATION_FILE, devices=[rate])


LAYOUTS = ("--set=plan.precision=bf16", "--set=plan.global_batch=4", "--set=model.num_layers=2")


def test_runs_teach_the_search_of_layouts(own: Desk) -> None:
    calibrate(own)
    trained(own, "fp32", "--set=plan.precision=fp32", "--set=plan.global_batch=4")  # no device has a peak in fp32
    assert accuracy(own)["layout_runs"] == 0
    changes = ("--set=plan.micro_batch=1", "--set=plan.micro_batch=2", "--set=plan.recompute=full")
    for number, change in enumerate(changes):
        trained(own, f"run{number}", *LAYOUTS, change)
    shown = accuracy(own)
    (device,) = shown["devices"]
    assert (shown["layout_runs"], device["runs"], device["device"]) == (3, 3, cpu_name())
    assert [each["layout"] for each in device["layouts"]] == [
        "data parallel alone",
        "micro_batch=2",
        "micro_batch=2 recompute=full",
    ]
    ratios = sorted(each["ratio"] for each in device["layouts"])
    for each in device["layouts"]:
        assert each["steps"] == LENGTH - 2
        assert each["ratio"] == pytest.approx(each["measured_step_s"] / each["predicted_step_s"])
    text = succeeded(own.here("plan", "accuracy")).out
    assert f"layouts on {cpu_name()}, as unisono plan --cluster predicts them" in text
    assert "median error of 3 runs" in text

    job = ("plan", "--model=run0", "--global-batch=4")
    best = succeeded(own.here(*job, "--json")).json["best"]
    assert (best["learned_factor"], best["learned_runs"]) == (pytest.approx(ratios[1]), 3)
    record_file(own).unlink()
    unlearned = succeeded(own.here(*job, "--json")).json["best"]
    assert unlearned["learned_runs"] == 0
    assert best["step_s"] == pytest.approx(ratios[1] * unlearned["step_s"])
    assert sum(best["prediction"]["parts_s"].values()) == pytest.approx(best["step_s"])


@pytest.mark.full
def test_what_was_learned_is_said_in_text_and_on_the_page(own: Desk) -> None:
    calibrate(own)
    for number in range(3):
        trained(own, f"run{number}", *LAYOUTS, f"--set=plan.micro_batch={1 << number}")
    done = succeeded(own.here("plan", "--model=run0", "--global-batch=4", "--report=page.html", "--apply=plan.json"))
    assert "times as long as predicted, the median of 3: without that " in done.out
    assert "by 3 runs" in (own.folder / "page.html").read_text()
    # a run with the strategy file that was found is recorded as well
    sets = [each for each in own.settings if not each.startswith("--set=plan.")]
    ends = ("--set=model.num_layers=2", f"--set=train.steps={LENGTH}", "--set=train.eval_every_steps=0")
    succeeded(own.here("train", "--plan=plan.json", "--set=run.dir=found", *sets, *ends))
    assert accuracy(own)["layout_runs"] == 4


INTERRUPTS = """
import os
import signal

from unisono.train import Every
from unisono.train.config import Components, RunConfig


def interrupt(*_):
    os.kill(os.getpid(), signal.SIGTERM)


def config():
    return RunConfig(components=Components(callbacks=lambda config: [Every(steps=14, call=interrupt)]))
"""


@pytest.mark.full
@pytest.mark.usefixtures("here")
def test_an_interrupted_run_and_two_at_once_are_recorded(own: Desk) -> None:
    predicted(own)
    (own.folder / "own.py").write_text(INTERRUPTS)
    lasting = [*own.settings, *PINNED, "--set=train.steps=1000", "--set=train.eval_every_steps=0"]
    outcome = own.process("train", "--debug", "own.py", *lasting, "--set=run.dir=stopped")
    assert outcome.code == 75, outcome.err
    assert accuracy(own)["runs"] == 1
    ends = [*own.settings, *PINNED, f"--set=train.steps={LENGTH}", "--set=train.eval_every_steps=0"]
    started = [
        subprocess.Popen(
            module_command("unisono", "train", "--debug", *ends, f"--set=run.dir=run{number}"),
            cwd=own.folder,
            env=own.child_environ(),
            stdout=subprocess.DEVNULL,
        )
        for number in range(2)
    ]
    assert [process.wait(timeout=300) for process in started] == [0, 0]
    assert accuracy(own)["runs"] == 3


@pytest.mark.full
def test_ranks_are_recorded_and_the_run_goes_on_under_the_same_plan(own: Desk) -> None:
    """With ``tp``, whose rules the run adds to its plan: two processes, links that are really measured."""
    succeeded(own.process("plan", "calibrate", "--processes=2"))
    sets = [*own.settings, *PINNED, "--set=launch.num_processes=2", "--set=train.eval_every_steps=0"]
    sets += ["--set=plan.tp=2", "--set=plan.dp_shard=1", "--set=plan.cp=1", "--set=plan.pp=1"]
    for steps, count in ((LENGTH, 1), (2 * LENGTH, 2)):
        run = ("--set=run.dir=run", f"--set=train.steps={steps}", "--set=model.num_kv_heads=2")
        succeeded(own.process("train", "--plan=auto", *sets, *run))
        (machine,) = accuracy(own)["machines"]
        (plan,) = machine["plans"]
        assert (plan["runs"], plan["axes"]) == (count, ["tp"])
        assert set(plan["predicted_parts_s"]) >= {"work", "tp"}
