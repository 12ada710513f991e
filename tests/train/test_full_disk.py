"""A disk that is full: the run's own error is shown, and a run that is finished stays finished."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tiny

from unisono.errors import CheckpointError


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=4m", "none", folder], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("this machine lets us mount nothing: no disk was full")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(folder: Path) -> None:
    # a checkpoint is written at the same time: how much is free is not known before
    with suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def run_until_full(disk: Path, error: Exception | None = None) -> None:
    with tiny.trainer(disk / "run", steps=6, every_steps=1) as run:
        for step in run:
            if step.index == 2:
                fill(disk)
                if error is not None:
                    raise error


def test_the_error_of_a_run_that_fills_its_disk_is_shown(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(CheckpointError) as caught:
        run_until_full(small_disk)
    assert "ENOSPC" in str(caught.value) or "could not be written" in str(caught.value)
    assert all((problem.rule, problem.nearest) for problem in caught.value.problems)
    # the checkpoint that failed has given its room back, or the save of the loop's end has taken it again
    recorded = list(small_disk.rglob("failure-rank-0.json"))
    assert recorded or "the failure of this rank could not be recorded" in caplog.text


def test_an_error_of_the_loop_is_not_replaced_by_the_disk(small_disk: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        run_until_full(small_disk, ZeroDivisionError())


class NoRoomFor:
    """``write_atomically`` on a disk that has no room for files of a name."""

    def __init__(self, name: str, write: Any) -> None:
        self.name, self.write = name, write

    def __call__(self, path: Path, *parts: Any, **options: Any) -> None:
        if self.name in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.write(path, *parts, **options)


def test_a_report_that_does_not_fit_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from unisono.observe.options import ObserveOptions
    from unisono.report import render

    monkeypatch.setattr(render, "write_atomically", NoRoomFor("report.html", render.write_atomically))
    with tiny.trainer(tmp_path / "run", steps=2, observe=ObserveOptions(console="off", report=True)) as run:
        assert run.fit().reason == "finished"
    assert "report.html was not written: ENOSPC, No space left on device" in caplog.text
    assert not (tmp_path / "run/report.html").exists()
    assert [event["reason"] for event in tiny.events(tmp_path / "run") if event["kind"] == "run_end"] == ["finished"]


def test_a_report_that_fails_otherwise_is_a_warning_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from unisono.observe.options import ObserveOptions
    from unisono.report import render

    monkeypatch.setattr(render, "diagnose", lambda facts: 1 / 0)
    with tiny.trainer(tmp_path / "run", steps=2, observe=ObserveOptions(console="off", report=True)) as run:
        assert run.fit().reason == "finished"
    assert "report.html was not written: ZeroDivisionError: division by zero" in caplog.text


def test_a_finished_run_on_a_small_disk_ends_well_without_its_report(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from unisono.observe.options import ObserveOptions

    with tiny.trainer(small_disk / "run", steps=3, observe=ObserveOptions(console="off", report=True)) as run:
        run.fit()
        fill(small_disk)
    assert "report.html was not written: ENOSPC, No space left on device" in caplog.text
