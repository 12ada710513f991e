"""A process that takes trials can be killed between any two lines of the journal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from unisono.tune import study
from unisono.tune.space import read_space
from unisono.tune.study import JOURNAL_FILE, Study, StudyOptions, TrialRecord

pytest.importorskip("optuna.importance")

CONTINUOUS = ("a=0.0..1", "b=log:1e-3..1", "c=x,y,z")


def made_in(
    folder: Path, space: tuple[str, ...], sampler: str, limit: int | None, first: Mapping[str, str] | None
) -> list[TrialRecord]:
    """The trials of a search, each made to its end; its value follows from its settings."""
    search = Study(folder, read_space(space), StudyOptions(sampler=sampler, seed=1), {}, first=first)
    while (trial := search.take_trial(limit)) is not None:
        value = sum(ord(text) if text.isalpha() else float(text) for text in trial.settings.values())
        search.report(trial, [(1, value + 1.0)])
        search.add_time(trial, 1.0)
        search.finish(trial, "done", value)
    return search.records()


@pytest.mark.parametrize(
    ("space", "sampler", "limit", "first"),
    [
        (("a=1..2", "b=x,y"), "grid", None, None),
        (CONTINUOUS, "random", 3, None),
        (CONTINUOUS, "random", 2, {"a": "0.5", "b": "0.1", "c": "y"}),
        (CONTINUOUS, "tpe", 4, None),
    ],
)
def test_a_journal_cut_at_every_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    space: tuple[str, ...],
    sampler: str,
    limit: int | None,
    first: Mapping[str, str] | None,
) -> None:
    """The search that goes on makes the same trials, each with all its settings, and none twice."""
    monkeypatch.setattr(study, "_STARTUP_TRIALS", 2)
    whole = made_in(tmp_path / "whole", space, sampler, limit, first)
    assert len(whole) == limit or (sampler == "grid" and len(whole) == 4)
    assert all(set(record.settings) == set(read_space(space)) for record in whole)
    assert [record.from_configuration for record in whole] == [first is not None, *[False] * (len(whole) - 1)]
    lines = (tmp_path / "whole" / JOURNAL_FILE).read_bytes().splitlines(keepends=True)
    assert len(lines) > 8 * len(whole)
    for count, line in enumerate(lines):
        folder = tmp_path / str(count)
        folder.mkdir()
        (folder / JOURNAL_FILE).write_bytes(b"".join(lines[:count]))
        assert [seen(record) for record in made_in(folder, space, sampler, limit, first)] == list(map(seen, whole)), (
            line
        )


def seen(record: TrialRecord) -> tuple[object, ...]:
    """Of a trial that was ended twice the time is longer."""
    curve = dict(record.curve)
    return record.number, dict(record.settings), record.outcome, record.value, curve, record.from_configuration


def test_a_trial_that_was_not_wholly_ended_is_running(tmp_path: Path) -> None:
    made_in(tmp_path / "whole", CONTINUOUS, "random", 1, None)
    journal = tmp_path / "whole" / JOURNAL_FILE
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:-1]))  # the state is the last
    search = Study(tmp_path / "whole", read_space(CONTINUOUS), StudyOptions(sampler="random", seed=1), {})
    assert [record.outcome for record in search.records()] == ["running"]
    assert search.best() is None
