"""Files of another run in the folder of a run: readers of all ranks leave them out, and say so."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from event_streams import COMPUTE, write_events

from unisono.compare.run_figures import read_figures
from unisono.diagnose import diagnose, read_run
from unisono.observe.events import decode_event, encode, events_path
from unisono.observe.goodput import read_goodput
from unisono.observe.rank_status import statuses_and_notes
from unisono.report.render import write_report

NOTE = "rank00006.jsonl: left out, as its events are of the run other, the others of run"


def rewrite(path: Path, first: int = 0, **fields: Any) -> None:
    """Change fields of all events from the line ``first`` on."""
    lines = path.read_bytes().splitlines()
    events = [decode_event(line) or {} for line in lines]
    changed = [{**event, **(fields if place >= first else {})} for place, event in enumerate(events)]
    path.write_bytes(b"".join(encode(event) + b"\n" for event in changed))


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Two ranks, and the file of rank 1 of another run, which was slower."""
    own = write_events(tmp_path / "run", lambda rank, step: COMPUTE, began_s=1.8e9)
    slow = {**COMPUTE, "forward": 0.2}
    other = write_events(tmp_path / "other", lambda rank, step: slow, began_s=1.8e9)
    rewrite(events_path(other, 1), run="other")
    shutil.copy(events_path(other, 1), events_path(own, 6))
    return own


def test_a_file_of_another_run_is_left_out(mixed: Path) -> None:
    facts = read_run(mixed)
    assert (facts.rank_numbers, list(facts.notes)) == ((0, 1), [NOTE])
    assert diagnose(facts) == []  # with rank 6: a critical BAL01
    goodput, figures = read_goodput(mixed), read_figures(mixed)
    assert goodput is not None
    assert goodput.wall_s == pytest.approx(40 * 0.075, rel=0.01)
    assert (figures.values["run/ranks"], list(figures.notes)) == (2.0, [NOTE])
    assert NOTE in write_report(mixed).read_text()
    statuses, notes = statuses_and_notes(mixed)
    assert ([status.rank for status in statuses], notes) == ([0, 1], [NOTE])


def test_a_copy_under_another_name_is_no_rank(mixed: Path) -> None:
    events_path(mixed, 6).rename(mixed / "events/rank00001 (copy).jsonl")
    note = "rank00001 (copy).jsonl: left out, as its name is not that of a rank's file, such as rank00003.jsonl"
    facts, goodput = read_run(mixed), read_goodput(mixed)
    assert goodput is not None
    assert (facts.rank_numbers, list(facts.notes)) == ((0, 1), [note])
    assert goodput.wall_s == pytest.approx(40 * 0.075, rel=0.01)
    assert [status.rank for status in statuses_and_notes(mixed)[0]] == [0, 1]


def test_the_rank_is_that_of_the_file_s_name(mixed: Path) -> None:
    rewrite(events_path(mixed, 6), run="run")
    assert [status.rank for status in statuses_and_notes(mixed)[0]] == [0, 1, 6]


def test_a_folder_that_was_renamed_is_one_run(tmp_path: Path) -> None:
    """Two ranks in attempt 1 under the old name, three in attempt 2; rank 3 has ended with attempt 1."""
    run_dir = write_events(tmp_path / "run", lambda rank, step: COMPUTE, ranks=4)
    again = write_events(tmp_path / "again", lambda rank, step: COMPUTE, ranks=3, began_s=100.0)
    for rank in range(3):
        rewrite(events_path(again, rank), run="new name", attempt=2)
        old = events_path(run_dir, rank).read_bytes() if rank < 2 else b""
        events_path(run_dir, rank).write_bytes(old + events_path(again, rank).read_bytes())
    facts = read_run(run_dir)
    assert (facts.rank_numbers, facts.notes) == ((0, 1, 2), ())
    statuses, notes = statuses_and_notes(run_dir)
    assert ([status.rank for status in statuses], notes) == ([0, 1, 2, 3], [])
    assert read_figures(run_dir).values["run/ranks"] == 4.0


def test_files_without_a_name_of_their_run_stay(tmp_path: Path) -> None:
    run_dir = write_events(tmp_path / "run", lambda rank, step: COMPUTE, ranks=3)
    rewrite(events_path(run_dir, 0), run=None)
    rewrite(events_path(run_dir, 2), run=7)
    assert (read_run(run_dir).rank_numbers, len(statuses_and_notes(run_dir)[0])) == ((0, 1, 2), 3)
