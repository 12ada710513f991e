"""What the journal of a search keeps: over kills, between processes, and of trials that did not end well."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from unisono.errors import ConfigError
from unisono.tune.space import Space, read_space
from unisono.tune.study import JOURNAL_FILE, Study, StudyOptions, Trial

pytest.importorskip("optuna.importance")

LR = ("lr=log:1e-4..1e-1",)


def study(folder: Path, *space: str, **options: Any) -> Study:
    return Study(folder, read_space(space or LR), StudyOptions(**options), {"configuration": "a"})


def begun(search: Study, limit: int | None = None) -> Trial:
    trial = search.take_trial(limit)
    assert trial is not None
    return trial


def bowl(lr: str, best: float = 3e-3) -> float:
    return abs(math.log(float(lr) / best))


def test_a_trial_comes_back_as_it_was_recorded(tmp_path: Path) -> None:
    search = study(tmp_path)
    trial = begun(search)
    search.report(trial, [(1, 4.0), (2, 3.0), (2, 2.5), (3, math.nan)])
    search.add_time(trial, 2.0, ranks=2)
    search.add_time(trial, 1.5, ranks=2)
    search.finish(trial, "done", 2.5)
    (record,) = study(tmp_path).records()
    assert (record.outcome, record.value, record.took_s, record.device_s) == ("done", 2.5, 3.5, 7.0)
    assert (dict(record.curve), record.settings) == ({1: 4.0, 2: 2.5}, trial.settings)
    assert record.run_dir == tmp_path / "trials" / "0000"


def test_the_choice_follows_from_seed_and_journal(tmp_path: Path) -> None:
    """Whether one process makes all trials, or each a process of its own."""
    chosen: list[list[str]] = []
    for name, is_reopened in (("one", False), ("many", True)):
        search = study(tmp_path / name, seed=3)
        values: list[str] = []
        for _ in range(14):
            search = study(tmp_path / name, seed=3) if is_reopened else search
            trial = begun(search)
            values.append(trial.settings["lr"])
            search.finish(trial, "done", bowl(values[-1]))
        chosen.append(values)
    assert chosen[0] == chosen[1]
    assert len(set(chosen[0])) == 14
    assert begun(study(tmp_path / "other", seed=4)).settings["lr"] != chosen[0][0]


def test_a_trial_that_nobody_makes_is_taken_up(tmp_path: Path) -> None:
    first, second = study(tmp_path), study(tmp_path)
    trial, other = begun(first), begun(second)
    assert (trial.number, other.number) == (0, 1)
    first.report(trial, [(5, 1.0)])
    first.release(trial)
    again = begun(second, 2)
    assert (again.number, again.settings, again.reported) == (0, trial.settings, {5})
    assert second.take_trial(2) is None
    second.finish(again, "done", 1.0)
    assert sorted(path.name for path in (tmp_path / "trials").iterdir()) == [".0001.lock"]


def begin_and_die(folder: str) -> None:
    begun(study(Path(folder)))
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("torn", [False, True])
def test_a_killed_process_loses_nothing(tmp_path: Path, torn: bool) -> None:
    search = study(tmp_path)
    search.finish(begun(search), "done", 1.0)
    process = multiprocessing.get_context("spawn").Process(target=begin_and_die, args=(str(tmp_path),))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    if torn:
        with (tmp_path / JOURNAL_FILE).open("ab") as file:
            file.write(b'{"op_code":6,"work')
    later = study(tmp_path)
    assert [record.outcome for record in later.records()] == ["done", "running"]
    assert begun(later, 2).number == 1


def test_a_line_that_another_process_has_torn(tmp_path: Path) -> None:
    """By a kill, or on a full disk: who is at work goes on behind the line before it."""
    search = study(tmp_path)
    trial = begun(search)
    with (tmp_path / JOURNAL_FILE).open("ab") as file:
        file.write(b'{"op_code":6,"work')
    search.report(trial, [(1, 2.0)])
    search.finish(trial, "done", 2.0)
    assert [(each.outcome, dict(each.curve)) for each in study(tmp_path).records()] == [("done", {1: 2.0})]


@pytest.mark.parametrize("sampler", ["grid", "random", "tpe"])
def test_a_kill_while_a_trial_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampler: str) -> None:
    """Before each line of the journal: the trial has all its settings, and a grid is tried whole."""
    backends = pytest.importorskip("optuna.storages.journal")
    write, is_killed, number = backends.JournalFileBackend.append_logs, True, 0
    while is_killed:
        folder, left = tmp_path / str(number), iter(range(number))

        def append(backend: Any, logs: Any, left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise KeyboardInterrupt
            write(backend, logs)

        search = study(folder, "a=1..2", "b=x,y", sampler=sampler)
        with monkeypatch.context() as patch:
            patch.setattr(backends.JournalFileBackend, "append_logs", append)
            try:
                search.release(begun(search))
                is_killed = False
            except KeyboardInterrupt:
                pass
        later = study(folder, "a=1..2", "b=x,y", sampler=sampler)
        trials = [begun(later, 4) for _ in range(4)]
        assert later.take_trial(4) is None
        assert [trial.number for trial in trials] == [0, 1, 2, 3]
        assert all(list(trial.settings) == ["a", "b"] for trial in trials)
        if sampler == "grid":
            found = [tuple(trial.settings.values()) for trial in trials]
            assert found == [("1", "x"), ("1", "y"), ("2", "x"), ("2", "y")]
        number += 1
    assert number > 3


def test_a_grid_is_tried_whole_and_once(tmp_path: Path) -> None:
    first = study(tmp_path, "a=1..2", "b=x,y", sampler="grid")
    second = study(tmp_path, "a=1..2", "b=x,y", sampler="grid")
    trials = [begun(first), begun(second), begun(first), begun(second)]
    assert first.take_trial(None) is second.take_trial(None) is None
    assert [tuple(trial.settings.values()) for trial in trials] == [("1", "x"), ("1", "y"), ("2", "x"), ("2", "y")]


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_no_combination_is_tried_twice(tmp_path: Path, sampler: str) -> None:
    """Whether one process makes all trials, or each a process of its own."""
    space, chosen = ("a=1..3", "b=x,y,z,w"), list[list[tuple[str, ...]]]()
    for name, is_reopened in (("one", False), ("many", True)):
        search = study(tmp_path / name, *space, sampler=sampler)
        values: list[tuple[str, ...]] = []
        for number in range(12):
            search = study(tmp_path / name, *space, sampler=sampler) if is_reopened else search
            trial = begun(search, 20)
            values.append(tuple(trial.settings.values()))
            search.finish(trial, "done", float(number))
        assert search.take_trial(20) is None
        chosen.append(values)
    assert chosen[0] == chosen[1]
    assert len(set(chosen[0])) == 12
    assert chosen[0] != sorted(chosen[0])


def test_a_combination_that_another_process_tries(tmp_path: Path) -> None:
    first, second = (study(tmp_path, "a=x,y", sampler="random") for _ in range(2))
    assert {begun(first).settings["a"], begun(second).settings["a"]} == {"x", "y"}
    assert first.take_trial(None) is None


def test_lack_of_memory_is_a_result(tmp_path: Path) -> None:
    search = study(tmp_path)
    search.finish(begun(search), "out_of_memory", reason="out of memory")
    search.finish(begun(search), "failed", reason="a wrong setting")
    search.finish(begun(search), "diverged", 9.0)
    assert search.best() is None
    search.finish(begun(search), "done", 2.0)
    assert [(record.outcome, record.value, record.reason) for record in search.records()] == [
        ("out_of_memory", None, "out of memory"),
        ("failed", None, "a wrong setting"),
        ("diverged", 9.0, ""),
        ("done", 2.0, ""),
    ]


def test_the_setting_that_counts(tmp_path: Path) -> None:
    search = study(tmp_path, "a=0.0..1", "b=0.0..1", sampler="random")
    for _ in range(100):
        trial = begun(search)
        search.finish(trial, "done", float(trial.settings["a"]) + 0.01 * float(trial.settings["b"]))
    weights = search.importances()
    assert weights["a"] > 0.9
    assert sum(weights.values()) == pytest.approx(1.0)


def test_a_pruner_ends_what_is_worse(tmp_path: Path) -> None:
    search = study(tmp_path, pruner="median")
    for value in range(5):
        trial = begun(search)
        assert not search.report(trial, [(10, float(value))])
        search.finish(trial, "done", float(value))
    assert search.report(begun(search), [(10, 9.0)])
    assert not search.report(begun(search), [(10, 0.5)])


def test_halving_ends_all_but_the_best(tmp_path: Path) -> None:
    """A whole trial has 400 steps: after one, those at 4 are compared."""
    search = study(tmp_path, pruner="halving")
    trial = begun(search)
    assert not search.report(trial, [(step, 5.0) for step in range(1, 401)])
    search.finish(trial, "done", 5.0)
    good, bad, better = begun(search), begun(search), begun(search)
    assert not search.report(good, [(4, 2.0)])
    assert not search.report(bad, [(3, 9.0)])
    assert search.report(bad, [(4, 9.0)])
    search.finish(bad, "pruned", 9.0, reason="others were better")
    assert not search.report(better, [(4, 1.0)])
    record = search.records()[bad.number]
    assert (record.outcome, record.to_json()["last_step"], record.value) == ("pruned", 4, 9.0)


def run_trials(folder: str, count: int, meeting: Any) -> None:
    search = study(Path(folder), sampler="random")
    meeting.wait()
    while (trial := search.take_trial(count)) is not None:
        search.report(trial, [(1, 2.0)])
        search.finish(trial, "done", bowl(trial.settings["lr"]))


def test_processes_share_a_journal(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    meeting = spawn.Barrier(2)
    processes = [spawn.Process(target=run_trials, args=(str(tmp_path), 30, meeting)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    records = study(tmp_path, sampler="random").records()
    assert [record.number for record in records] == list(range(30))
    assert all((each.outcome, dict(each.curve)) == ("done", {1: 2.0}) for each in records)
    assert [each.value for each in records] == [bowl(each.settings["lr"]) for each in records]
    assert len({each.settings["lr"] for each in records}) == 30
    assert list((tmp_path / "trials").iterdir()) == []


def test_the_largest_value(tmp_path: Path) -> None:
    search = study(tmp_path, metric="eval/accuracy", maximize=True)
    for value in (0.5, 0.9, 0.7):
        search.finish(begun(search), "done", value)
    best = search.best()
    assert best is not None
    assert best.number == 1
    assert search.importances() == {}


@pytest.mark.parametrize("change", [{"seed": 1}, {"metric": "eval/accuracy"}, {"sampler": "random"}])
def test_another_search_in_the_folder_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    study(tmp_path)
    with pytest.raises(ConfigError, match=f"{next(iter(change))} "):
        study(tmp_path, **change)
    with pytest.raises(ConfigError, match="space "):
        study(tmp_path, "lr=log:1e-4..1")
    with pytest.raises(ConfigError, match="configuration b for the search"):
        Study(tmp_path, read_space(LR), StudyOptions(), {"configuration": "b"})
    study(tmp_path, pruner="median")  # it may change: values that were reported stay


@pytest.mark.parametrize(
    "content",
    [b"{}\n", b"[1]\n", b"no json\n{}\n", b'{"op_code": 99}\n', b"\xff\xfe\n", b"[" * 5000 + b"\n", b"null\n"],
)
def test_a_damaged_journal(tmp_path: Path, content: bytes) -> None:
    (tmp_path / JOURNAL_FILE).write_bytes(content)
    with pytest.raises(ConfigError, match="which cannot be read"):
        study(tmp_path)
    assert (tmp_path / JOURNAL_FILE).read_bytes() == content


def test_the_journal_of_another_user(tmp_path: Path) -> None:
    study(tmp_path)
    (tmp_path / JOURNAL_FILE).chmod(0o666)
    with pytest.raises(ConfigError, match="another user can have written"):
        study(tmp_path)


@pytest.mark.full
def test_tpe_finds_better_values_than_chance() -> None:
    """The smallest of 40 values of a bowl in three settings; 20 pairs of searches with the same seeds."""
    import tempfile

    space: Space = read_space(["a=log:1e-5..1", "b=log:1e-5..1", "c=0.0..10"])

    def smallest(sampler: str, seed: int) -> float:
        with tempfile.TemporaryDirectory() as folder:
            search = Study(Path(folder), space, StudyOptions(sampler=sampler, seed=seed), {})
            for _ in range(40):
                trial = begun(search)
                a, b, c = map(float, trial.settings.values())
                search.finish(trial, "done", bowl(str(a)) ** 2 + bowl(str(b), 1e-4) ** 2 + (c - 3.0) ** 2)
            best = search.best()
            assert best is not None
            assert best.value is not None
            return best.value

    wins = sum(smallest("tpe", seed) < smallest("random", seed) for seed in range(20))
    assert wins >= 15  # a fair coin gives so many in 2 % of such tests
