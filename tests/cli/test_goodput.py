"""The goodput ledger of real runs with real kills, from the command that trains to the one that reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import Desk, events_of


def ledger_of(desk: Desk, run_dir: Path, *settings: str, fault: str, ranks: int) -> dict[str, Any]:
    """Train in ``ranks`` processes of which ``fault`` kills one, and read what the report says of it."""
    launch = [f"--set=launch.num_processes={ranks}", "--set=launch.max_restarts=1", "--set=train.steps=12"]
    save = ["--set=checkpoint.every_steps=4", "--set=checkpoint.asynchronous=false", "--set=train.eval_every_steps=6"]
    done = desk.process(
        "train", f"--set=run.dir={run_dir}", *desk.settings, *launch, *save, *settings, UNISONO_FAULT=fault
    )
    assert done.code == 0, done.err
    assert "launch: restarting all ranks as attempt 1" in done.err
    assert "in steps that count" in done.out  # the summary of the run
    report = desk.here("report", str(run_dir), "--json")
    assert report.code == 0, report.err
    found = report.json["goodput"]
    record = json.loads((run_dir / "launch.json").read_text())
    wall_s = record["attempts"][-1]["ended_at_s"] - record["attempts"][0]["began_at_s"]
    assert found["wall_s"] == pytest.approx(wall_s, rel=0.005)
    assert sum(found["seconds"].values()) == pytest.approx(wall_s, rel=0.005)
    assert all(seconds >= 0 for seconds in found["seconds"].values())
    for attempt, launched in zip(found["attempts"], record["attempts"], strict=True):
        assert sum(attempt["seconds"].values()) == pytest.approx(attempt["wall_s"])
        assert attempt["wall_s"] == pytest.approx(launched["ended_at_s"] - launched["began_at_s"], rel=0.005)
        assert attempt["seconds"]["starting"] > 0.5  # of the interpreter, torch and the model
    assert found["goodput_frac"] == pytest.approx(
        (found["seconds"]["useful"] + found["seconds"]["repeated"]) / wall_s, rel=0.01
    )
    return found


@pytest.mark.full
def test_a_kill_in_the_middle_of_a_checkpoint(desk: Desk, tmp_path: Path) -> None:
    """The checkpoint of step 8 is never complete: the run goes on from step 4."""
    run_dir = tmp_path / "run"
    found = ledger_of(desk, run_dir, fault="mid_shard@8", ranks=1)
    first, second = found["attempts"]
    assert (first["first_step"], first["last_step"], first["lost_steps"], first["end"]) == (1, 8, 4, "no end")
    assert (second["first_step"], second["last_step"], second["repeated_steps"]) == (5, 12, 4)
    assert second["end"] == "finished"
    # by hand, from the events of the steps that were made twice
    steps = [event for event in events_of(run_dir) if event["kind"] == "step" and 5 <= event["step"] <= 8]

    def step_s(event: dict[str, Any]) -> float:
        pauses = event["time/ckpt_stall_frac"] + event["time/eval_frac"] + event["time/other_frac"]
        return event["time/window_s"] * (1 - pauses)

    times = {attempt: sum(step_s(event) for event in steps if event["attempt"] == attempt) for attempt in (1, 2)}
    assert found["seconds"]["repeated"] == pytest.approx(times[2], rel=1e-3)
    assert first["seconds"]["lost"] >= times[1]
    assert found["seconds"]["checkpoint"] > 0
    assert found["seconds"]["evaluation"] > 0


@pytest.mark.full
def test_a_kill_of_one_of_two_ranks(desk: Desk, tmp_path: Path) -> None:
    found = ledger_of(desk, tmp_path / "run", fault="backward@6:1", ranks=2)
    first, second = found["attempts"]
    assert (first["last_step"], first["lost_steps"]) == (6, 2)
    assert (second["first_step"], second["repeated_steps"], second["end"]) == (5, 2, "finished")
