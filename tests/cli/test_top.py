"""``unisono top``: a run that goes on, one that has ended, torn files, and a folder without events."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import Desk
from event_streams import write_events

from unisono.observe.events import encode, events_path
from unisono.observe.rank_status import rank_statuses


def add(run_dir: Path, rank: int, *lines: bytes) -> None:
    with events_path(run_dir, rank).open("ab") as file:
        file.write(b"".join(lines))


def test_ranks_of_a_run_that_goes_on(desk: Desk, tmp_path: Path) -> None:
    fields = {"train/loss": 2.5, "perf/step_s": 0.1, "mem/now_bytes": 2**30, "mem/limit_bytes": 2**32}
    run = write_events(
        tmp_path / "run", lambda rank, step: {"forward": 0.08, "data_wait": 0.02}, steps=300, fields=fields
    )
    system = {"kind": "system", "t": 5.0, "rank": 0, "step": 300, "sys/process_cpus": 1.5}
    add(run, 0, encode(system) + b"\n")
    add(run, 1, b'{"kind":"step","st')
    done = desk.here("top", str(run), "--once")
    assert done.code == 0, done.err
    header, *rows = done.out.splitlines()
    assert header.split() == [
        "rank",
        "step",
        "loss",
        "step",
        "time",
        "data",
        "comm",
        "memory",
        "CPUs",
        "device",
        "seen",
    ]
    assert rows[0].split()[:11] == ["0", "300", "2.5", "100", "ms", "20%", "0%", "1", "GiB", "of", "4"]
    assert " 1.5 " in rows[0]
    assert "ago" in rows[1]
    ranks = desk.here("top", str(run), "--json").json["ranks"]
    assert [(rank["rank"], rank["step"]["step"], rank["ended"]) for rank in ranks] == [(0, 300, ""), (1, 300, "")]


def test_a_run_that_has_ended_ends_the_command(desk: Desk, tmp_path: Path) -> None:
    run = write_events(tmp_path / "run", lambda rank, step: {"forward": 0.08}, ranks=1)
    add(run, 0, encode({"kind": "run_end", "t": 9.0, "rank": 0, "reason": "finished"}) + b"\n")
    done = desk.here("top", str(run))
    assert (done.code, "finished" in done.out) == (0, True), done.err


@pytest.mark.parametrize("mode", ["--once", "--json"])
def test_a_time_between_looks_where_there_is_one(desk: Desk, tmp_path: Path, mode: str) -> None:
    run = write_events(tmp_path / "run", lambda rank, step: {"forward": 0.08}, ranks=1)
    done = desk.here("top", str(run), mode, "--every-s", "2.0")
    assert done.code == 2
    assert f"--every-s with {mode}" in done.out + done.err
    assert "it would have no effect" in done.out + done.err
    assert desk.here("top", str(run), mode).code == 0


def test_a_second_attempt_has_not_ended(tmp_path: Path) -> None:
    run = write_events(tmp_path / "run", lambda rank, step: {"forward": 0.08}, ranks=1)
    end = {"kind": "run_end", "t": 9.0, "rank": 0, "reason": "failed"}
    start = {"kind": "run_start", "t": 10.0, "rank": 0, "attempt": 2}
    add(run, 0, encode(end) + b"\n", encode(start) + b"\n")
    (status,) = rank_statuses(run)
    assert (status.ended, status.step) == ("", {})  # the steps are of the attempt before


def test_a_folder_without_events(desk: Desk, tmp_path: Path) -> None:
    done = desk.here("top", str(tmp_path), "--once")
    assert done.code == 2
    assert "has no events of a rank" in done.err
