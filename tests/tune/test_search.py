"""When a search begins a further trial, and when it ends; trainings are processes that write one event."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import small_trainings

from unisono.errors import ConfigError
from unisono.tune import search
from unisono.tune.search import Budget, Search
from unisono.tune.slots import Slot
from unisono.tune.space import read_space
from unisono.tune.study import Study, StudyOptions

pytest.importorskip("optuna")


@pytest.fixture(autouse=True)
def trainings(monkeypatch: pytest.MonkeyPatch) -> None:
    small_trainings.install(monkeypatch)


def opened(folder: Path, space: str = "count=2..3", metric: str = "eval/loss") -> Study:
    return Study(folder, read_space([space]), StudyOptions(metric=metric, sampler="grid"), {})


def searched(study: Study, *, metric: str = "eval/loss", seconds: float = 0.0, **options: Any) -> list[str]:
    """How the trials of this process ended."""
    ends: list[str] = []
    Search(
        study=study,
        arguments=[f"--set=seconds={seconds}"],
        metric=metric,
        budget=options.get("budget", Budget()),
        slots=options.get("slots", [Slot()]),
        on_start=lambda trial: None,
        on_end=lambda trial, outcome, value, reason: ends.append(outcome),
    ).run()
    return ends


def test_a_metric_that_no_event_has_ends_the_search(tmp_path: Path) -> None:
    study = opened(tmp_path, "count=1..3", metric="eval/acuracy")
    with pytest.raises(ConfigError) as caught:
        searched(study, metric="eval/acuracy")
    (problem,) = caught.value.problems
    assert problem.given == (
        "--metric eval/acuracy, and trial 0, which trained without it: its events have no eval/acuracy; they have train/loss"
    )
    assert problem.nearest == "another folder and --metric NAME: one of: train/loss"
    with pytest.raises(ConfigError, match=r"did you mean 'eval/accuracy'\?"):
        searched(opened(tmp_path / "all", "count=3..4", metric="eval/acuracy"), metric="eval/acuracy")
    assert [record.outcome for record in study.records()] == ["failed"]


def test_a_trial_without_the_metric_of_others_has_failed(tmp_path: Path) -> None:
    study = opened(tmp_path, "count=3,1,2")
    assert searched(study) == ["done", "failed", "done"]
    assert study.records()[1].reason == "its events have no eval/loss; they have train/loss"


def test_running_trials_of_others_count_for_a_budget(tmp_path: Path) -> None:
    other, study = opened(tmp_path), opened(tmp_path)
    trial = other.take_trial(None)
    assert trial is not None
    other.add_time(trial, 30.0, ranks=4)
    assert searched(study, budget=Budget(device_s=120.0)) == []
    assert [record.device_s for record in study.records()] == [120.0]
    assert searched(study, budget=Budget(device_s=121.0)) == ["done"]


def test_the_time_of_a_running_trial_is_in_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_POLL_S", 0.02)
    monkeypatch.setattr(search, "_RECORD_S", 0.05)
    study = opened(tmp_path)
    times: list[float] = []
    add_time = study.add_time

    def record(*given: Any, **options: Any) -> None:
        add_time(*given, **options)
        times.append(opened(tmp_path).records()[0].device_s)  # as another process sees it

    monkeypatch.setattr(study, "add_time", record)
    assert searched(study, seconds=0.5, slots=[Slot(num_processes=3)], budget=Budget(trials=1)) == ["done"]
    assert len(times) > 3
    assert times == sorted(times)
    (done,) = study.records()
    assert times[-1] == done.device_s == pytest.approx(3 * done.took_s)
    assert 0.5 <= done.took_s < 60.0
