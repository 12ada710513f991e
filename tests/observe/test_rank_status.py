"""The newest events of a rank, found at the end of its file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from unisono.observe import rank_status
from unisono.observe.events import encode, events_path
from unisono.observe.rank_status import rank_statuses


def write(run_dir: Path, events: list[dict[str, Any]]) -> Path:
    path = events_path(run_dir, 0)
    path.parent.mkdir(parents=True)
    envelope = {"t": 1.0, "m": 1.0, "rank": 0, "run": "r", "attempt": 1}
    path.write_bytes(b"".join(encode({**envelope, **event}) + b"\n" for event in events))
    return run_dir


def steps(first: int, last: int, **fields: Any) -> list[dict[str, Any]]:
    return [{"kind": "step", "step": step, "time/window_s": 1.0, **fields} for step in range(first, last + 1)]


def links(step: int) -> dict[str, Any]:
    return {"kind": "links", "step": step, "steps": 100}


def test_a_links_event_is_found_behind_the_steps_after_it(tmp_path: Path) -> None:
    events = [links(100), *steps(101, 200), links(200), *steps(201, 299), {"kind": "system", "step": 299}]
    (status,) = rank_statuses(write(tmp_path, events))
    assert (status.step["step"], status.system["step"], status.links["step"]) == (299, 299, 200)


def test_a_links_event_of_an_earlier_attempt_is_not_shown(tmp_path: Path) -> None:
    system = {"kind": "system", "step": 9}
    for with_system in (False, True):
        events = [links(100), {"kind": "run_start", "attempt": 2}, *steps(101, 110, attempt=2), *[system] * with_system]
        (status,) = rank_statuses(write(tmp_path / str(with_system), events))
        assert (status.step["step"], status.links) == (110, {})


@pytest.mark.parametrize("block", [1, 7, 64, 150, 1000, 1 << 16])
def test_lines_that_lie_in_two_blocks_are_whole(tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_status, "_BLOCK_BYTES", block)
    monkeypatch.setattr(rank_status, "_MAX_BLOCKS", 1 << 20)
    events = [{"kind": "run_start"}, links(7), *steps(8, 20), {"kind": "system", "step": 20, "note": "é" * 90}]
    (status,) = rank_statuses(write(tmp_path, events))
    assert (status.step["step"], status.system["note"], status.links["step"]) == (20, "é" * 90, 7)


def test_only_the_end_of_a_long_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_status, "_BLOCK_BYTES", 500)
    (status,) = rank_statuses(write(tmp_path, [links(1), *steps(2, 100)]))
    assert (status.step["step"], status.links) == (100, {})
