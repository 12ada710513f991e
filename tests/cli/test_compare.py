"""``unisono compare``: the table, JSON, and the exit codes that CI reads."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import Desk
from event_streams import write_events


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    """Two runs, of which the second needs twice the time for a step."""
    folders = [tmp_path / name for name in ("main", "mine")]
    for folder, seconds in zip(folders, (0.05, 0.1), strict=True):
        write_events(folder, lambda rank, step, seconds=seconds: {"forward": seconds}, fields={"train/loss": 2.0})
    return [str(folder) for folder in folders]


def test_limits_decide_the_exit_code(desk: Desk, runs: list[str]) -> None:
    done = desk.here("compare", *runs)
    assert done.code == 0, done.err
    assert "2.000" in next(line for line in done.out.splitlines() if line.startswith("perf/step_s"))
    kept = desk.here("compare", *runs, "--max-ratio", "perf/step_s=2.5", "--max-delta", "train/loss=0.01")
    assert (kept.code, kept.out.splitlines()[-1]) == (0, "2 limits kept")
    broken = desk.here("compare", *runs, "--max-ratio", "perf/step_s=1.05", "--max-delta", "train/loss=0.01")
    assert broken.code == 1
    assert broken.out.splitlines()[-1].startswith(
        f"broken by {runs[1]}: --max-ratio perf/step_s=1.05: perf/step_s is 2 times"
    )
    told = desk.here("compare", *runs, *runs, "--max-ratio", "perf/step_s=1.05", "--json")
    assert (told.code, [each["run_dir"] for each in told.json["broken"]]) == (1, [runs[1], runs[1]])
    assert [each["b"] for each in told.json["comparisons"]] == [runs[1], *runs]


def test_wrong_command_lines(desk: Desk, runs: list[str], tmp_path: Path) -> None:
    done = desk.here("compare", runs[0])
    assert (done.code, "needs two or more" in done.err) == (2, True)
    done = desk.here("compare", runs[0], str(tmp_path / "nothing"))
    assert (done.code, "has no events of a rank" in done.err) == (2, True)
    done = desk.here("compare", *runs, "--max-ratio", "perf/step_ms=1")
    assert (done.code, "did you mean 'perf/step_s'?" in done.err) == (2, True)
    done = desk.here("compare", *runs, "--max-ratio", "perf/step_s")
    assert (done.code, "the name of a figure and a number" in done.err) == (2, True)
