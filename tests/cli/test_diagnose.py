"""``unisono diagnose``: texts, JSON, and settings that are written and then remove what they were written for."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from commands import Desk
from event_streams import write_events

from unisono.diagnose import write_overlay
from unisono.errors import ConfigError

# a loader that one thread can hide behind the rest of the step
SLOW = """
import time

from unisono import Components, RunConfig
from unisono.train import Every


def read_slowly(sample, rng):
    time.sleep(0.003)
    return sample


def pause(step, model):
    time.sleep(0.03)


def config():
    return RunConfig(components=Components(transform=read_slowly, callbacks=lambda run: [Every(steps=1, call=pause)]))
"""


def test_findings_as_text_and_as_json(desk: Desk, tmp_path: Path) -> None:
    write_events(tmp_path / "run", lambda rank, step: {"forward": 0.06, "data_wait": 0.04})
    done = desk.here("diagnose", str(tmp_path / "run"))
    assert done.code == 0, done.err
    assert "1. DATA01 (critical): training waits for data, costs 40% of the time" in done.out
    assert "2 ranks, steps 3 to 40 measured" in done.out
    found = desk.here("diagnose", str(tmp_path / "run"), "--json").json
    assert [(finding["id"], finding["cost_frac"]) for finding in found["findings"]] == [("DATA01", pytest.approx(0.4))]


def slow_at_times(rank: int, step: int) -> dict[str, float]:
    """Rank 1 is slow in three of four steps, and rank 0 waits for it."""
    extra_s = 0.03 if step % 4 else 0.0
    return {"forward": 0.06 + extra_s} if rank else {"forward": 0.06, "comm_exposed_dp": extra_s}


def test_findings_say_how_sure_they_are_what_would_be_saved_and_which_ranks(desk: Desk, tmp_path: Path) -> None:
    def told(name: str, times: Any, **options: Any) -> str:
        done = desk.here("diagnose", str(write_events(tmp_path / name, times, **options)))
        assert done.code == 0, done.err
        return done.out

    waiting = told("a", lambda rank, step: {"forward": 0.06, "data_wait": 0.04}, settings={"loader.num_workers": 0})
    assert "1. DATA01 (critical): training waits" in waiting
    assert "try: --set loader.num_workers=-1 (would save 40% of a step)" in waiting
    assert "1. BAL01 (critical, likely): rank 1 is slower than the others, costs" in told("b", slow_at_times)
    unused = told("c", lambda rank, step: {"forward": 0.06}, fields={"perf/mfu": 0.1})
    assert "1. UTIL01 (critical, possible): the device" in unused
    assert "would save" not in unused

    def nearly_full(rank: int, step: int) -> dict[str, float]:
        return {"mem/peak_bytes": 0.95e9 if rank else 0.5e9, "mem/limit_bytes": 1e9}

    full = told("d", lambda rank, step: {"forward": 0.06}, fields_of=nearly_full)
    assert "1. MEM01 (warning): memory is nearly full, rank 1\n" in full


def test_a_healthy_run_and_a_torn_file(desk: Desk, tmp_path: Path) -> None:
    write_events(tmp_path / "run", lambda rank, step: {"forward": 0.06})
    with (tmp_path / "run/events/rank00001.jsonl").open("ab") as file:
        file.write(b'{"kind":"step","st')
    done = desk.here("diagnose", str(tmp_path / "run"))
    assert (done.code, done.out.splitlines()[-1]) == (0, "no findings")
    assert "rank00001.jsonl: left out the last line" in done.out


@pytest.mark.parametrize("made", [False, True])
def test_a_folder_without_events(desk: Desk, tmp_path: Path, made: bool) -> None:
    if made:
        (tmp_path / "run").mkdir()
    done = desk.here("diagnose", str(tmp_path / "run"))
    assert done.code == 2
    assert "has no events of a rank" in done.err


def test_an_overlay_is_a_new_file_over_the_run_s_configuration(desk: Desk, mine: Path, tmp_path: Path) -> None:
    settings = {"loader.num_workers": 0}
    write_events(mine, lambda rank, step: {"forward": 0.06, "data_wait": 0.04}, settings=settings)
    overlay = tmp_path / "faster.toml"
    done = desk.here("diagnose", str(mine), "--apply", str(overlay))
    assert done.code == 0, done.err
    assert f"try: unisono train {overlay}" in done.out
    shown = desk.here("config", "show", str(overlay), "--json").json["values"]
    assert (shown["loader.num_workers"]["value"], shown["run.dir"]["value"]) == ("-1", f'"{mine}-2"')
    again = desk.here("diagnose", str(mine), "--apply", str(overlay))
    assert (again.code, "one that exists is not overwritten" in again.err) == (2, True)


@pytest.mark.parametrize("name", ["o", "o.txt", "o.json", "o.py", "o.toml.", ".toml"])
def test_an_overlay_has_a_name_that_train_takes(desk: Desk, mine: Path, tmp_path: Path, name: str) -> None:
    settings = {"loader.num_workers": 0}
    write_events(mine, lambda rank, step: {"forward": 0.06, "data_wait": 0.04}, settings=settings)
    before = set(tmp_path.iterdir())
    done = desk.here("diagnose", str(mine), "--apply", str(tmp_path / name))
    assert (done.code, "an overlay is a .toml file" in done.err) == (2, True)
    assert set(tmp_path.iterdir()) == before


def test_an_overlay_of_the_run_in_the_working_folder(desk: Desk, mine: Path, tmp_path: Path) -> None:
    settings = {"loader.num_workers": 0}
    write_events(mine, lambda rank, step: {"forward": 0.06, "data_wait": 0.04}, settings=settings)
    mine.with_name("mine-2").symlink_to("elsewhere")  # a link that leads nowhere yet is somebody's choice too
    done = Desk(folder=mine, cache=desk.cache).here("diagnose", ".", "--apply", str(tmp_path / "faster.toml"))
    assert done.code == 0, done.err
    assert f'dir = "{mine}-3"' in (tmp_path / "faster.toml").read_text()


def test_an_overlay_of_a_folder_whose_name_is_no_text(desk: Desk, mine: Path, tmp_path: Path) -> None:
    odd = mine.rename(os.fsdecode(os.fsencode(tmp_path) + b"/odd-\xff"))
    write_events(odd, lambda rank, step: {"forward": 0.06, "data_wait": 0.04}, settings={"loader.num_workers": 0})
    done = desk.here("diagnose", str(odd), "--apply", str(tmp_path / "faster.toml"))
    assert (done.code, (tmp_path / "faster.toml").exists()) == (2, False)
    assert "is no UTF-8" in done.err


def test_an_overlay_needs_a_configuration(desk: Desk, tmp_path: Path) -> None:
    settings = {"loader.num_workers": 0}
    write_events(tmp_path / "run", lambda rank, step: {"forward": 0.06, "data_wait": 0.04}, settings=settings)
    done = desk.here("diagnose", str(tmp_path / "run"), "--apply", str(tmp_path / "faster.toml"))
    assert (done.code, (tmp_path / "faster.toml").exists()) == (2, False)
    assert "the folder of a run of unisono train" in done.err


def test_an_overlay_is_not_written_over_another_user_s_run(desk: Desk, mine: Path, tmp_path: Path) -> None:
    settings = {"loader.num_workers": 0}
    write_events(mine, lambda rank, step: {"forward": 0.06, "data_wait": 0.04}, settings=settings)
    (mine / "config.toml").chmod(0o666)
    done = desk.here("diagnose", str(mine), "--apply", str(tmp_path / "faster.toml"))
    assert (done.code, (tmp_path / "faster.toml").exists()) == (2, False)
    assert "another user's run" in done.err


def test_nothing_to_change_writes_nothing(desk: Desk, mine: Path, tmp_path: Path) -> None:
    write_events(mine, lambda rank, step: {"forward": 0.06})
    done = desk.here("diagnose", str(mine), "--apply", str(tmp_path / "faster.toml"))
    assert (done.code, (tmp_path / "faster.toml").exists()) == (0, False)
    assert "was not written: no finding changes a setting" in done.out


def test_the_settings_remove_what_they_were_written_for(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    run_dir, overlay = tmp_path / "run", tmp_path / "faster.toml"
    settings = ["--set=train.steps=24", "--set=train.eval_every_steps=0", "--set=loader.num_workers=0"]
    files = [str(tmp_path / "slow.py"), f"--set=run.dir={run_dir}"]
    done = desk.here("train", *files, *desk.settings, *settings)
    assert done.code == 0, done.err
    found = desk.here("diagnose", str(run_dir), "--apply", str(overlay), "--json").json
    assert (found["findings"][0]["id"], found["patch"]) == ("DATA01", {"loader.num_workers": -1})
    done = desk.here("train", str(overlay))
    assert done.code == 0, done.err
    after = desk.here("diagnose", f"{run_dir}-2", "--json").json
    assert "DATA01" not in [finding["id"] for finding in after["findings"]]
    gain = after["gain"]
    assert (gain["parent"], gain["gone"], gain["stays"]) == (str(run_dir), ["DATA01"], [])
    assert gain["gain_frac"] == pytest.approx(1 - gain["after_s"] / gain["before_s"])
    assert gain["expected_frac"] == pytest.approx(found["findings"][0]["expected_gain"])
    told = desk.here("diagnose", f"{run_dir}-2").out
    assert f"since {run_dir}, whose diagnosis it follows: DATA01 gone; a step takes" in told
    page = desk.here("report", f"{run_dir}-2")
    assert page.code == 0, page.err
    assert "whose diagnosis it follows: DATA01 gone" in Path(f"{run_dir}-2", "report.html").read_text()


def test_settings_of_a_strategy_file_are_changed_in_a_copy_of_it(desk: Desk, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text('{"batch": {"micro_batch": 4, "accumulation": 1}, "recompute": {"mode": "full"}}')
    run_dir, overlay = tmp_path / "run", tmp_path / "smaller.toml"
    done = desk.train(run_dir, f"--plan={plan}", "--set=train.eval_every_steps=0", "--set=model.num_layers=2")
    assert done.code == 0, done.err
    patch = {"plan.micro_batch": 2, "plan.recompute": "none", "loader.num_workers": 0}
    assert write_overlay(overlay, run_dir, patch) == tmp_path / "run-2"
    assert json.loads((tmp_path / "smaller.plan.json").read_text()) == {
        "batch": {"micro_batch": 2},
        "recompute": {"mode": "none"},
    }
    done = desk.here("train", str(overlay))
    assert done.code == 0, done.err
    made = json.loads((tmp_path / "run-2/plan.json").read_text())
    assert (made["batch"]["micro_batch"], made["batch"]["accumulation"]) == (2, 2)
    assert made["recompute"]["mode"] == "none"


@pytest.mark.parametrize("exists", ["smaller.toml", "smaller.plan.json"])
def test_an_overlay_that_cannot_be_written_leaves_no_strategy_file(tmp_path: Path, exists: str) -> None:
    plan, run_dir = tmp_path / "plan.json", tmp_path / "run"
    plan.write_text('{"batch": {"micro_batch": 4}}')
    run_dir.mkdir()
    (run_dir / "config.toml").write_text(f'[plan]\nfile = "{plan}"\n')
    (tmp_path / exists).write_text("mine")
    before = set(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=re.escape(f"{exists}: EEXIST")):
        write_overlay(tmp_path / "smaller.toml", run_dir, {"plan.micro_batch": 2})
    assert (set(tmp_path.iterdir()), (tmp_path / exists).read_text()) == (before, "mine")


def test_a_setting_without_a_value_is_one_that_train_takes(desk: Desk, mine: Path, tmp_path: Path) -> None:
    write_overlay(tmp_path / "o.toml", mine, {"plan.staleness": None, "optim.decay_exclude": ["norm"]})
    shown = desk.here("config", "show", str(tmp_path / "o.toml"), "--json").json["values"]
    assert (shown["plan.staleness"]["value"], shown["optim.decay_exclude"]["value"]) == ('"none"', '["norm"]')


def test_a_script_is_told_its_own_options(desk: Desk, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    write_events(run_dir, lambda rank, step: {"forward": 0.06, "data_wait": 0.04}, settings={})
    (run_dir / "config.toml").write_text("[loader]\nnum_workers = 0\n")
    done = desk.here("diagnose", str(run_dir))
    assert "try: LoaderOptions(num_workers=-1)" in done.out
    done = desk.here("diagnose", str(run_dir), "--apply", str(tmp_path / "faster.toml"))
    assert (done.code, (tmp_path / "faster.toml").exists()) == (2, False)
    assert "try:  in the script: LoaderOptions(num_workers=-1)" in done.err


def test_a_run_that_was_started_again_after_its_end_is_judged_by_its_steps(desk: Desk, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert desk.train(run_dir, "--set=train.steps=12").code == 0
    before = desk.here("diagnose", str(run_dir))
    assert desk.train(run_dir, "--set=train.steps=12").code == 0
    again = desk.here("diagnose", str(run_dir))
    assert "attempt 2 has made no step yet: the figures are those of attempt 1" in again.out
    assert before.out.splitlines()[0] in again.out


def test_errors_of_processes_without_a_launcher(desk: Desk, tmp_path: Path) -> None:
    errors = {0: ("CommError", "rank 1 is gone"), 1: ("ValueError", "my bug")}

    def end(rank: int, step: int) -> list[dict[str, Any]]:
        name, message = errors[rank]
        return [{"kind": "run_end", "reason": "failed", "error": name, "message": message}] if step == 40 else []

    write_events(tmp_path / "run", lambda rank, step: {"forward": 0.06}, extra=end)
    (finding,) = desk.here("diagnose", str(tmp_path / "run"), "--json").json["findings"]
    assert (finding["id"], finding["ranks"]) == ("EXIT01", [1])
    assert finding["evidence"] == ["rank 1: ValueError: my bug"]
