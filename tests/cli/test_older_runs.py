"""A run that an earlier state of the library made stays readable: its events, diagnosis, report, comparison and live view.

``older_run`` was made by ``unisono train`` before events had a version: two ranks, 30 steps, a checkpoint and an evaluation. Its
steps have no ``time/window_s``, and its ``links`` events no axes.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from commands import Desk

from unisono.compare.run_figures import read_figures
from unisono.diagnose import diagnose, read_run
from unisono.observe.events import events_path
from unisono.observe.goodput import GoodputLedger, launch_spans
from unisono.observe.history import read_history, steady_readings
from unisono.observe.rank_status import rank_statuses
from unisono.report import write_report

OLDER_RUN = Path(__file__).parents[1] / "support/older_run"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return shutil.copytree(OLDER_RUN, tmp_path / "run")


def test_its_events_are_older() -> None:
    lines = [json.loads(line) for line in events_path(OLDER_RUN, 0).read_text().splitlines()]
    assert not any("schema" in line or "axes" in line or "time/window_s" in line for line in lines)
    assert sum(line["kind"] == "step" for line in lines) == 30


def test_its_history(run_dir: Path) -> None:
    history = read_history(events_path(run_dir, 0))
    assert (history.notes, history.steps.tolist()) == ((), list(range(1, 31)))
    readings = steady_readings(history)
    assert len(readings.rows) >= 20
    assert (readings.wall_s > 0).all()
    ledger = GoodputLedger()
    for rank in (0, 1):
        ledger.add(read_history(events_path(run_dir, rank)))
    goodput = ledger.result(launch_spans(run_dir))
    assert goodput is not None
    assert 0 < goodput.goodput_frac < 1


def test_its_diagnosis(run_dir: Path) -> None:
    facts = read_run(run_dir)
    assert (facts.rank_numbers, facts.notes) == ((0, 1), ())
    assert "DATA01" in [finding.id for finding in diagnose(facts)]


def test_its_report_and_live_view(run_dir: Path, desk: Desk) -> None:
    page = write_report(run_dir).read_text()
    assert "training waits for data" in page
    assert [(status.rank, status.ended) for status in rank_statuses(run_dir)] == [(0, "finished"), (1, "finished")]
    done = desk.here("top", str(run_dir), "--once")
    assert done.code == 0, done.err


def test_it_can_be_compared(run_dir: Path, desk: Desk) -> None:
    assert read_figures(run_dir).values["run/ranks"] == 2
    done = desk.here("compare", str(run_dir), str(OLDER_RUN))
    assert done.code == 0, done.err
