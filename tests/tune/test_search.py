"""When a search begins a further trial, and when it ends; trainings are processes that write one event."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest
import small_trainings

from unisono.errors import ConfigError
from unisono.tune import search, unwritable
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


@pytest.mark.parametrize(
    "said",
    [
        "Traceback\nOSError: [Errno 28] No space left on device",
        "unisono: run.dir 'a': Read-only file system\n  rule: a folder it can write to",
        "RuntimeError: Disk quota exceeded",
        "unisono: the checkpoint of the last step, 3, could not be written to a\n  rule: committed",
    ],
)
def test_a_trial_on_a_full_disk_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    full, folder = tmp_path / "full", tmp_path / "search"
    small_trainings.install(monkeypatch, full=full)
    full.write_text(said)
    study = opened(folder)
    with pytest.raises(ConfigError) as caught:
        searched(study)
    (problem,) = caught.value.problems
    line = next(line for line in said.removeprefix("unisono: ").splitlines() if line not in ("Traceback",))
    assert re.fullmatch(
        rf"{re.escape(str(folder))}/trials, which a training could not write: {re.escape(line)}; [\d.,]+ \w+ are free there",
        problem.given,
    )
    assert problem.consequence == (
        "the command ended; this training does not count, and the same command makes it again"
    )
    assert [record.outcome for record in study.records()] == ["running"]
    full.unlink()
    again = opened(folder)
    assert searched(again) == ["done", "done"]
    assert [record.settings for record in again.records()] == [{"count": "2"}, {"count": "3"}]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (errno.ENOSPC, "ENOSPC, No space left on device"),
        (errno.EROFS, "EROFS, Read-only file system"),
        (errno.EDQUOT, "EDQUOT, Disk quota exceeded"),
        (errno.EMFILE, None),
    ],
)
def test_a_trial_without_room_for_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, reason: str | None
) -> None:
    def create(path: Path, data: bytes) -> None:
        raise OSError(code, os.strerror(code), str(path))

    full = tmp_path / "full"
    small_trainings.install(monkeypatch, full=full)
    full.touch()
    monkeypatch.setattr(unwritable, "create_file", create)
    study = opened(tmp_path / "search")
    if reason is None:
        assert searched(study) == ["failed", "failed"]
    else:
        with pytest.raises(ConfigError, match=f"could not write: {reason}; "):
            searched(study)
        assert [record.outcome for record in study.records()] == ["running"]


def test_a_full_disk_elsewhere_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as /dev/shm, which the settings of a trial may fill."""
    full = tmp_path / "full"
    small_trainings.install(monkeypatch, full=full)
    full.write_text("OSError: [Errno 28] No space left on device: '/elsewhere/cache'")
    assert searched(opened(tmp_path / "search")) == ["failed", "failed"]


def test_a_trial_that_fails_with_room_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = tmp_path / "full"
    small_trainings.install(monkeypatch, full=full)
    full.write_text("unisono: no sample\n  rule: one or more")
    study = opened(tmp_path / "search")
    assert searched(study) == ["failed", "failed"]
    assert [path.name for path in (tmp_path / "search/trials").iterdir() if ".room" in path.name] == []
