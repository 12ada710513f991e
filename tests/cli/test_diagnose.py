"""``unisono diagnose``: texts, JSON, and settings that are written and then remove what they were written for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from commands import Desk
from event_streams import write_events

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
