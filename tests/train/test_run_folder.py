"""The folder of a run: what cannot be one is refused before anything starts, and it stays where it was."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import tiny
import torch

from unisono.checkpoint import list_checkpoints
from unisono.cli.main import entry
from unisono.dist import JobSpec, World
from unisono.errors import CheckpointError, ConfigError
from unisono.train import LoopCheckpoints
from unisono.train.guard import StepGuard


def bad_folders(folder: Path) -> dict[str, str]:
    (folder / "file").write_text("x")
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "nowhere").symlink_to(folder / "none" / "there")
    return {
        str(folder / "file"): f"{folder}/file is not a folder",
        str(folder / "file" / "under"): "ENOTDIR, Not a directory",
        str(folder / "loop" / "under"): "ELOOP, Too many levels of symbolic links",
        str(folder / "nowhere"): f"{folder}/nowhere is a link to nothing",
        str(folder / ("n" * 300)): "ENAMETOOLONG, File name too long",
        "a\0b": "a name with a NUL character",
        "": "an empty name, which is the current folder",
    }


def test_what_cannot_be_the_folder_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = bad_folders(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    for given, fault in folders.items():
        with pytest.raises(ConfigError) as caught:
            tiny.trainer(given)
        (problem,) = caught.value.problems
        assert problem.given == f"run_dir {given!r}: {fault}"
        assert problem.rule == "a run keeps its configuration, events and checkpoints in a folder it can write to"
        assert problem.consequence == "nothing was started"
        with pytest.raises(CheckpointError) as refused:
            LoopCheckpoints(given, {}, World(JobSpec()))
        assert refused.value.problems[0].given == f"folder {given!r}: {fault}"
    assert sorted(tmp_path.rglob("*")) == before


def test_the_command_line_refuses_the_same_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folders = bad_folders(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    for given in folders:
        value = given if "\0" not in given else '"a\\u0000b"'
        monkeypatch.setattr(sys, "argv", ["unisono", "train", "--set", f"run.dir={value}"])
        with pytest.raises(SystemExit) as ended:
            entry()
        assert ended.value.code == 2, given
        said = capfd.readouterr().err
        assert "Traceback" not in said, given
        assert all(part in said for part in ("run.dir", "  rule: ", "  so:   nothing was ", "  try:  ")), said
    assert sorted(tmp_path.rglob("*")) == before


def test_a_loop_may_change_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with tiny.trainer("runs/a", steps=3, every_steps=1) as run:
        assert "run_dir='runs/a'" in repr(run)
        for _ in run:
            os.chdir(tmp_path / "elsewhere")
    assert [entry.step for entry in list_checkpoints(tmp_path / "runs/a/checkpoints")] == [1, 2, 3]
    assert 'dir = "runs/a"' in (tmp_path / "runs/a/config.toml").read_text()
    os.chdir(tmp_path)
    with tiny.trainer("runs/a", steps=4):
        (event,) = [event for event in tiny.events("runs/a") if event["kind"] == "resumed"]
        assert event["path"] == "runs/a/checkpoints/step-00000003"
    with LoopCheckpoints("loop", {"guard": StepGuard(torch.device("cpu"))}, World(JobSpec())) as checkpoints:
        os.chdir(tmp_path / "elsewhere")
        checkpoints.save(1)
    assert [entry.step for entry in list_checkpoints(tmp_path / "loop")] == [1]
    assert not list((tmp_path / "elsewhere").iterdir())
