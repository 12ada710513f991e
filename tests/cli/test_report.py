"""``unisono report``: the report of a run that was killed, and of a folder that holds none."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import Desk
from event_streams import write_events


def test_the_report_of_a_run_without_an_end(desk: Desk, tmp_path: Path) -> None:
    write_events(tmp_path / "run", lambda rank, step: {"forward": 0.06, "data_wait": 0.04})
    done = desk.here("report", str(tmp_path / "run"), "--json")
    assert (done.code, done.json["report"]) == (0, str(tmp_path / "run/report.html")), done.err
    page = (tmp_path / "run/report.html").read_text()
    assert "DATA01: training waits for data" in page
    assert "costs 40% of the time" in page


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_the_launcher_has_the_report_written_where_rank_0_was_killed(desk: Desk, tmp_path: Path, ranks: int) -> None:
    run_dir = tmp_path / "run"
    launch = [f"--set=launch.num_processes={ranks}", "--set=launch.max_restarts=0"]
    done = desk.process("train", f"--set=run.dir={run_dir}", *desk.settings, *launch, UNISONO_FAULT="backward@3:0")
    assert done.code == 1
    assert "was killed by signal 9 (SIGKILL)" in done.err
    assert "report.html was not written" not in done.err
    assert "Run run" in (run_dir / "report.html").read_text()


def test_a_folder_without_events(desk: Desk, tmp_path: Path) -> None:
    done = desk.here("report", str(tmp_path))
    assert (done.code, list(tmp_path.iterdir())) == (2, [])
    assert "a report is made from the events of rank 0" in done.err


def test_a_report_that_cannot_be_written(desk: Desk, tmp_path: Path) -> None:
    write_events(tmp_path / "run", lambda rank, step: {"forward": 0.06})
    (tmp_path / "run/report.html").mkdir()
    done = desk.here("report", str(tmp_path / "run"))
    assert (done.code, done.out) == (2, "")
    assert "report.html cannot be written: EISDIR" in done.err
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"events", "report.html"}


def test_a_run_ends_well_where_its_report_cannot_be_made(
    desk: Desk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run/events/rank00001.jsonl").mkdir(parents=True)
    done = desk.train(tmp_path / "run")
    assert done.code == 0, done.err
    assert "report.html was not written: events file" in caplog.text
