"""A run's folder whose ``config.toml`` is no file: neither is it read, nor do the defaults begin a run there."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Desk, problem


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(str(path))


MADE: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a device": lambda path: path.symlink_to(os.devnull),
    "a socket": make_socket,
    "a link to nothing": lambda path: path.symlink_to("elsewhere"),
}


@pytest.mark.parametrize("kind", MADE)
def test_what_it_is(desk: Desk, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    monkeypatch.chdir(run_dir)  # names of sockets are short
    MADE[kind](Path("config.toml"))
    (tmp_path / "own.toml").write_text("[train]\nsteps = 4\n")
    file, setting = run_dir / "config.toml", f"--set=run.dir={run_dir}"
    expected = problem(
        f"{file}, which is {kind}",
        "a run's folder holds its config.toml, a file with its settings",
        "the settings of the run are unknown, and nothing was started",
        f"another run.dir for a new run, or the config.toml of this one in its place (ls -l {file})",
    )
    for arguments in (
        ("train", "--debug", setting),
        ("train", setting),
        ("train", "--debug", str(tmp_path / "own.toml"), setting),
        ("config", "show", setting),
        ("eval", str(run_dir)),
        ("generate", str(run_dir), "--prompt=a"),
        ("checkpoint", "export", str(run_dir), str(tmp_path / "out")),
    ):
        done = desk.here(*arguments)
        assert (done.code, done.err) == (2, expected), (arguments, done)
    assert [path.name for path in run_dir.iterdir()] == ["config.toml"]


def test_none_is_a_new_run(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert desk.here("config", "show", f"--set=run.dir={tmp_path}/run").code == 0
    done = desk.here("eval", f"{tmp_path}/run")
    assert (done.code, done.err.splitlines()[0]) == (2, f"unisono: run folder '{tmp_path}/run'")
