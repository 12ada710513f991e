"""``~`` at the beginning of a path that a command writes to is the user's home, where no shell expands it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import Desk

from unisono.config import load_config
from unisono.train.config import RunConfig


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    return folder


@pytest.mark.parametrize(
    ("arguments", "made"),
    [
        ("data dedup a.jsonl --out=~/out", "out/report.json"),
        ("data leak a.jsonl b.jsonl --out=~/out", "out/report.json"),
        ("data columns a.jsonl --out=~/out", "out/report.json"),
        ("data balance a.jsonl --label=label --out=~/out", "out/report.json"),
        ("data labels a.jsonl --label=label --out=~/out", "out/report.json"),
        ("data convert a.jsonl ~/a.csv", "a.csv"),
        ("data pack a.jsonl ~/a.bin --text-column=text", "a.bin.report.json"),
        ("init ~/run.toml", "run.toml"),
    ],
)
def test_outputs(desk: Desk, home: Path, arguments: str, made: str) -> None:
    lines = [json.dumps({"text": f"one {number}", "label": "xy"[number % 2]}) for number in range(4)]
    for name in ("a.jsonl", "b.jsonl"):
        (desk.folder / name).write_text("\n".join(lines) + "\n")
    desk.here(*arguments.split())
    assert (home / made).exists()
    assert not (desk.folder / "~").exists()


def test_run_dir(home: Path) -> None:
    for resolved in (
        load_config(RunConfig, overrides=["run.dir=~/run"]),
        load_config(RunConfig, environ={"UNISONO__RUN__DIR": "~/run"}),
    ):
        assert resolved.value.run.dir == str(home / "run")
        assert resolved.encoded["run.dir"] == str(home / "run")
