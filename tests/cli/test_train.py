"""``unisono train``: the run of a small model, and going on with what is in its folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from commands import Desk, events_of, losses_of, steps_of


@pytest.mark.full
def test_a_model_that_no_process_holds_is_the_same_model(desk: Desk, trained: Path) -> None:
    run_dir = desk.folder / "spread"
    spread = ["--set=launch.num_processes=2", "--set=plan.tp=2", "--set=model.num_kv_heads=1"]
    done = desk.process("train", f"--set=run.dir={run_dir}", *desk.settings, *spread, "--json")
    assert done.code == 0, done.err
    assert losses_of(run_dir) == pytest.approx(losses_of(trained), rel=1e-5)
    assert done.json["sample"].startswith("def ")
    start, alone = (
        next(event for event in events_of(each) if event["kind"] == "run_start") for each in (run_dir, trained)
    )
    assert start["parameters"] == alone["parameters"]
    assert start["held_bytes"]["parameters"] < alone["held_bytes"]["parameters"] == 4 * alone["parameters"]
    assert "perf/matmul_ceiling_frac" in steps_of(run_dir)[-1]


@pytest.mark.full
def test_debug_makes_the_same_run_as_a_launch(desk: Desk, trained: Path) -> None:
    run_dir = desk.folder / "launched"
    done = desk.process(
        "train", f"--set=run.dir={run_dir}", *desk.settings, "--set=checkpoint.every_steps=2", "--json", "-v"
    )
    assert done.code == 0, done.err
    outcome = done.json
    assert outcome["reason"] == "finished"
    assert (outcome["step"], outcome["steps_total"]) == (4, 4)
    assert outcome["run_dir"] == str(run_dir)
    assert Path(outcome["export"]) == run_dir / "export"
    assert Path(outcome["report"]) == run_dir / "report.html"
    assert outcome["sample"].startswith("def ")
    # the same samples and so the same losses; threads and prefetching do not enter
    assert losses_of(run_dir) == pytest.approx(losses_of(trained), rel=1e-6)
    launched, debugged = (events_of(each)[0] for each in (run_dir, trained))
    assert launched["order"] == debugged["order"]
    assert launched["config_hash"] != debugged["config_hash"]  # run.dir
    assert (launched["launcher"], debugged["launcher"]) == ("unisono", "single")
    # what the launcher set is in the record of the run
    assert launched["launch"]["threads"] == 1
    assert launched["launch"]["threads_from"] == "environment OMP_NUM_THREADS"
    assert launched["launch"]["restarted"] is False
    # -v reaches the workers: every event is on standard error
    shown = [json.loads(line.partition(" ")[2]) for line in done.err.splitlines() if line.startswith("DEBUG {")]
    assert [event["kind"] for event in shown] == [event["kind"] for event in events_of(run_dir)]


def test_text_output_says_how_it_went_and_what_next(desk: Desk, tmp_path: Path) -> None:
    run_dir = tmp_path / "a run"
    done = desk.train(run_dir)
    assert done.code == 0, done.err
    assert done.err == ""
    lines = done.out.splitlines()
    assert any(line.startswith("step=1 steps_total=4 loss=5.") for line in lines)
    assert any(line.startswith("result   Finished 4 of 4 steps in ") for line in lines)
    assert lines[-4:] == [
        f"export   {run_dir}/export",
        f"try next unisono generate '{run_dir}'",
        f"         unisono eval '{run_dir}'",
        f"         unisono train --set 'run.dir={run_dir}' --set train.steps=8"
        "  # stretches the cosine schedule to the new length",
    ]


def test_a_finished_run_has_everything_in_its_folder(trained: Path) -> None:
    assert sorted(path.name for path in trained.iterdir()) == [
        *("checkpoints", "config.toml", "events", "export", "metrics.csv", "plan.json", "report.html", "run.lock"),
    ]
    assert sorted(path.name for path in (trained / "export").iterdir()) == ["config.json", "model.safetensors"]
    assert (trained / "export/config.json").stat().st_size > 0


def test_the_folder_alone_is_enough_to_go_on(desk: Desk, mine: Path) -> None:
    """Settings come from the folder's config.toml; what is set again wins and is kept."""
    before = losses_of(mine)
    done = desk.here("train", "--debug", f"--set=run.dir={mine}", "--set=train.steps=6")
    assert done.code == 0, done.err
    assert losses_of(mine)[:4] == before
    assert [event["step"] for event in steps_of(mine)] == [1, 2, 3, 4, 5, 6]
    assert "steps = 6" in (mine / "config.toml").read_text()
    assert "seq_len = 16" in (mine / "config.toml").read_text()
    again = desk.here("train", "--debug", f"--set=run.dir={mine}", "--json")
    assert again.code == 0, again.err
    assert (again.json["step"], again.json["steps_total"], again.json["reason"]) == (6, 6, "finished")
    assert len(steps_of(mine)) == 6


def test_epochs_are_resolved_into_steps(desk: Desk, tmp_path: Path) -> None:
    """The folder's config.toml has the steps; epochs set later take their place, and steps that of the epochs."""
    rows = [
        {"text": f"it was {word} {at}", "label": label} for at in range(10) for word, label in (("bad", 0), ("ok", 1))
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = ["task.kind=text", f"data.train={tmp_path}/rows.jsonl", f"data.eval={tmp_path}/rows.jsonl", "data.seq_len=8"]
    small = ["model.num_layers=1", "model.dim=16", "model.num_heads=2", "plan.global_batch=8", "observe.trackers=[]"]
    (tmp_path / "run.toml").write_text("[train]\nsteps = 1000\neval_every_steps = 3\n")
    run_dir = tmp_path / "run"
    settings = [f"--set={text}" for text in (f"run.dir={run_dir}", *task, *small)]
    done = desk.here("train", "--debug", str(tmp_path / "run.toml"), *settings, "--set=train.epochs=1.5")
    assert done.code == 0, done.err
    # 30 of 20 samples in batches of 8
    for shown in ("; 3 steps per epoch; ", " at step 4 (cosine)", "step=4 steps_total=4 ", " epoch=2 epochs_total=2 "):
        assert shown in done.out
    assert [event["train/epoch"] for event in steps_of(run_dir)] == [1, 1, 1, 2]
    assert "\nsteps = 4\nepochs = 0.0\neval_every_steps = 3\n" in (run_dir / "config.toml").read_text()
    start = next(event for event in events_of(run_dir) if event["kind"] == "run_start")
    assert start["origins"]["train.steps"] == start["origins"]["train.epochs"] == "train.epochs = 1.5"

    longer = desk.here("train", "--debug", f"--set=run.dir={run_dir}", "--set=train.epochs=2", "--json")
    assert longer.code == 0, longer.err
    assert (longer.json["step"], longer.json["steps_total"]) == (5, 5)
    again = desk.here("train", "--debug", f"--set=run.dir={run_dir}", "--set=train.steps=6", "--json")
    assert again.json["step"] == 6
    assert desk.here("eval", str(run_dir), "--json").code == 0


@pytest.mark.parametrize("steps", [20, 300])  # 300 is the default
def test_steps_and_epochs_are_refused(desk: Desk, tmp_path: Path, steps: int) -> None:
    settings = (f"--set=run.dir={tmp_path}/run", f"--set=train.steps={steps}", "--set=train.epochs=2")
    done = desk.here("train", "--debug", *settings)
    assert done.code == 2
    assert done.err == (
        f"unisono: --set: train.steps: train.steps {steps} with train.epochs 2\n"
        "  rule: one of them is the length of the run\n"
        "  so:   it is unclear where the run ends\n"
        f"  try:  train.epochs=2 without train.steps, or train.steps={steps} without train.epochs\n"
    )
    assert not (tmp_path / "run").exists()


def test_an_export_in_the_way_costs_the_run_nothing_else(desk: Desk, mine: Path) -> None:
    (mine / "export/notes.txt").write_text("my own")
    (mine / "report.html").unlink()
    done = desk.here("train", "--debug", f"--set=run.dir={mine}", "--set=train.steps=6")
    assert done.code == 2
    assert f"export to '{mine}/export', where there is notes.txt\n" in done.err
    assert "Finished 6 of 6 steps" in done.out
    assert (mine / "report.html").exists()
    assert (mine / "export/notes.txt").read_text() == "my own"


def test_a_setting_is_judged_with_what_was_kept_not_with_the_defaults(desk: Desk, mine: Path) -> None:
    # 32 heads fit the default dim of 256, not the 16 of this run
    done = desk.here("train", "--debug", f"--set=run.dir={mine}", "--set=model.num_heads=32")
    assert done.code == 2
    assert "heads 32 with dim 16" in done.err
    # and 8 of 16 fit this run, where the default kv_heads is 2 and this run's is 1
    shown = desk.here("config", "show", f"--set=run.dir={mine}", "--set=model.num_heads=8", "--json")
    assert shown.json["values"]["model.num_heads"] == {"value": "8", "origin": "--set"}
    assert shown.json["values"]["model.dim"]["origin"].startswith(f"{mine}/config.toml:")


def test_where_to_start_was_said_for_one_start(desk: Desk, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    first = desk.train(run_dir, "--set=run.resume=never", "--set=train.steps=2")
    assert first.code == 0, first.err
    assert 'resume = "never"' in (run_dir / "config.toml").read_text()
    again = desk.train(run_dir, "--set=run.resume=never", "--set=train.steps=2")
    assert again.code == 2
    assert f"resume 'never' in {run_dir}, which holds 1 checkpoints up to step 2" in again.err
    shown = desk.here("config", "show", f"--set=run.dir={run_dir}", "--json").json["values"]["run.resume"]
    assert shown == {"value": '"auto"', "origin": "default"}
    second = desk.here("train", "--debug", f"--set=run.dir={run_dir}", "--set=train.steps=3")
    assert second.code == 0, second.err
    assert [event["step"] for event in steps_of(run_dir)] == [1, 2, 3]


def test_a_restarted_worker_goes_on_from_the_newest(desk: Desk, mine: Path) -> None:
    """A crash after ``run.resume=PATH`` must not throw away what was saved since."""
    (path,) = (mine / "checkpoints").glob("*2")
    shutil.copytree(path, mine / "kept/step-00000002")
    environ = {
        **{"UNISONO_RUN_ID": "x", "UNISONO_RESTART_COUNT": "1", "UNISONO_RANK": "0", "UNISONO_LOCAL_RANK": "0"},
        **{"UNISONO_WORLD": "1", "UNISONO_LOCAL_WORLD": "1", "UNISONO_MASTER_ADDR": "127.0.0.1"},
        **{"UNISONO_MASTER_PORT": "0", "UNISONO_LAUNCH": json.dumps({"restarted": True})},
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        done = desk.here(
            "train",
            f"--set=run.dir={mine}",
            f"--set=run.resume={mine}/kept/step-00000002",
            "--set=train.steps=5",
            "--json",
        )
    assert done.code == 0, done.err
    assert done.json["step"] == 5
    (resumed,) = [event for event in events_of(mine) if event["kind"] == "resumed"]
    assert resumed["step"] == 4


def test_debug_is_eager_and_keeps_the_configuration(desk: Desk, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = desk.train(run_dir, "--set=plan.compile=regional", "--set=train.steps=1", "--set=model.num_layers=2")
    assert done.code == 0, done.err
    start = events_of(run_dir)[0]
    assert start["plan"]["backend"]["compile"] == "off"
    assert start["config"]["plan.compile"] == "regional"
    assert 'compile = "regional"' in (run_dir / "config.toml").read_text()
    assert "workers = -1" in (run_dir / "config.toml").read_text()


def test_debug_inside_a_job_is_refused(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    done = desk.train(tmp_path / "run")
    assert done.code == 2
    assert done.err == (
        "unisono: rank 1: train --debug as rank 1 of 2 of a job that torchrun started\n"
        "  rule: --debug is the whole run in one process\n"
        "  so:   2 runs would write into one folder, so nothing was started\n"
        "  try:  start it outside the job, or leave --debug out\n"
    )
    assert not (tmp_path / "run").exists()


def test_an_error_in_the_runs_own_file_is_said_when_another_configuration_is_given(desk: Desk, mine: Path) -> None:
    own = mine / "config.toml"
    other = mine.parent / "other.toml"
    other.write_text(own.read_text())
    own.write_text(text := own.read_text() + "\n[train.extra]\nlearning_rat = 1\n")
    done = desk.here("train", "--debug", str(other), f"--set=run.dir={mine}", "--set=train.steps=5")
    assert done.code == 2
    assert "config.toml:" in done.err
    assert "unknown section train.extra" in done.err
    assert own.read_text() == text
    (mine.parent / "other.py").write_text("raise ValueError('ran')\n")
    own.write_text(
        text
        := f'base = "{mine.parent}/other.py"\n[components]\nmodel = "python:Model"\n[train]\nsteps = "many"\nstep = 3\n'
    )
    done = desk.here("train", "--debug", str(other), f"--set=run.dir={mine}", "--set=train.steps=5")
    assert done.code == 2
    assert [line.partition("config.toml:")[2] for line in done.err.splitlines() if "config.toml:" in line] == [
        '5: train.steps = "many"',
        "6: unknown key train.step = 3",
    ]
    assert own.read_text() == text
    own.write_text("a = = b")
    done = desk.here("train", "--debug", str(other), f"--set=run.dir={mine}", "--set=train.steps=5")
    assert done.code == 2
    assert "config.toml" in done.err
