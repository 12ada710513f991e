"""A journal with values that no search writes is refused before a trial starts; so is a file system without locks."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unisono.errors import ConfigError
from unisono.tune.folder import exclusive_lock
from unisono.tune.space import read_space
from unisono.tune.study import JOURNAL_FILE, Study, StudyOptions

pytest.importorskip("optuna.importance")


def study(folder: Path) -> Study:
    return Study(folder, read_space(["lr=log:1e-4..1e-1"]), StudyOptions(), {})


def finished(folder: Path) -> Path:
    """The journal of a search with a trial that is done with the value 2."""
    search = study(folder)
    trial = search.take_trial(None)
    assert trial is not None
    search.report(trial, [(1, 4.0)])
    search.add_time(trial, 2.0)
    search.finish(trial, "done", 2.0)
    return folder / JOURNAL_FILE


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"value":2.0', '"value":"abc"'),
        ('"value":2.0', '"value":1e999'),
        ('"value":2.0', '"value":true'),
        ('"value":2.0', '"value":1.0'),
        ('"values":[2.0]', '"values":[1e999]'),
        ('"intermediate_value":4.0', '"intermediate_value":1e999'),
        ('"took_s":2.0', '"took_s":[1]'),
        ('"outcome":"done"', '"outcome":["a"]'),
        ('"outcome":"done"', '"outcome":"won"'),
        ('"outcome":"done"', '"other":1'),
        ('"param_value_internal":', '"param_value_internal":"x","a":'),
    ],
)
def test_a_damaged_value(tmp_path: Path, before: str, after: str) -> None:
    journal = finished(tmp_path)
    text = journal.read_text()
    assert before in text
    journal.write_text(text.replace(before, after))
    damaged = journal.read_bytes()
    with pytest.raises(ConfigError, match=r"journal\.jsonl, which cannot be read: "):
        study(tmp_path)
    assert journal.read_bytes() == damaged


def test_a_value_that_is_damaged_meanwhile(tmp_path: Path) -> None:
    search = study(tmp_path)
    trial = search.take_trial(None)
    assert trial is not None
    search.add_time(trial, 2.0)
    journal = tmp_path / JOURNAL_FILE
    line = next(line for line in journal.read_text().splitlines() if '"took_s"' in line)
    with journal.open("a") as file:
        file.write(line.replace("2.0", '"x"') + "\n")
    for read in (search.records, search.best):
        with pytest.raises(ConfigError, match="took_s is 'x', and should be a finite number"):
            read()


@pytest.mark.parametrize("content", [b'{"text": "a"}', b'{"text": "a"}\n{"text": "b"}', b"\x00"])
def test_a_torn_file_that_is_no_journal(tmp_path: Path, content: bytes) -> None:
    (tmp_path / JOURNAL_FILE).write_bytes(content)
    with pytest.raises(ConfigError, match="which cannot be read: it is no journal"):
        study(tmp_path)
    assert (tmp_path / JOURNAL_FILE).read_bytes() == content


@pytest.mark.parametrize("name", [JOURNAL_FILE, ".journal.lock"])
def test_a_link_or_a_pipe_in_place_of_a_file_of_the_search(tmp_path: Path, name: str) -> None:
    finished(tmp_path / "search")
    place = tmp_path / "search" / name
    place.rename(tmp_path / "elsewhere")
    before = (tmp_path / "elsewhere").read_bytes()
    place.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=rf"{name}, which .*is a link"):
        study(tmp_path / "search")
    assert (tmp_path / "elsewhere").read_bytes() == before
    place.unlink()
    os.mkfifo(place)
    with pytest.raises(ConfigError, match=rf"{name}, which .*is no regular file"):
        study(tmp_path / "search")


@pytest.mark.parametrize("content", [b"{", b'{"op_code":0,"worker_id":"a'])
def test_a_journal_torn_in_its_first_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / JOURNAL_FILE).write_bytes(content)
    assert study(tmp_path).records() == []


@pytest.mark.parametrize("use", [study, lambda folder: exclusive_lock(folder / ".lock").__enter__()])
def test_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: Callable[[Path], Any]
) -> None:
    """Two processes would write into one journal at the same time."""

    def refuse(*_given: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ConfigError, match="whose file system has no locks"):
        use(tmp_path)
