"""Two runs in one folder: the second start is refused and names the first, which goes on."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny
from commands import Desk, events_of, make_desk

from unisono.errors import ConfigError


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return make_desk(tmp_path / "desk", tmp_path / "cache")


def test_two_trainers_of_one_process(tmp_path: Path) -> None:
    with tiny.trainer(tmp_path / "run", steps=2) as run:
        before = (tmp_path / "run/events.jsonl").read_text() if (tmp_path / "run/events.jsonl").exists() else ""
        with pytest.raises(ConfigError, match=r"in which process .* is training"):
            tiny.trainer(tmp_path / "run", steps=2).__enter__()
        with tiny.trainer(tmp_path / "other", steps=2) as other:
            assert other.fit().step == 2
        assert run.fit().step == 2
        assert before in (run.events.path).read_text()
    with tiny.trainer(tmp_path / "run", steps=3) as again:
        assert again.fit().step == 3


def test_a_link_in_place_of_the_lock_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "run" / "run.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(ConfigError, match=r"run\.lock, which is a link"):
        tiny.trainer(tmp_path / "run", steps=2).__enter__()
    assert (tmp_path / "precious").read_text() == "mine"


@pytest.mark.full
@pytest.mark.parametrize("more", [["--debug"], ["--set=launch.num_processes=2"]], ids=["debug", "launched"])
def test_a_second_start_is_refused_and_after_a_kill_the_next_goes_on(
    desk: Desk, tmp_path: Path, more: list[str]
) -> None:
    run_dir = tmp_path / "run"
    long = [f"--set=run.dir={run_dir}", *desk.settings, "--set=train.steps=100000", "--set=checkpoint.every_steps=5"]
    first = subprocess.Popen(
        [sys.executable, "-m", "unisono", "train", *more, *long],
        cwd=desk.folder,
        env=desk.child_environ(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until = time.monotonic() + 60
        while not list(run_dir.glob("checkpoints/step-*")):
            assert time.monotonic() < until
            assert first.poll() is None
            time.sleep(0.05)
        before = (run_dir / "config.toml").read_text()
        for second in (["--debug"], []):
            done = desk.process("train", *second, f"--set=run.dir={run_dir}", "--set=optim.lr=0.5")
            assert done.code == 2, (second, done.out, done.err)
            assert "in which process" in done.err
            assert "another run.dir" in done.err or "another folder" in done.err
        assert (run_dir / "config.toml").read_text() == before
        assert first.poll() is None
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    steps = max(event["step"] for event in events_of(run_dir) if event["kind"] == "step")
    until = time.monotonic() + 60
    while True:  # the ranks of a killed launcher end by themselves
        done = desk.process("train", "--debug", f"--set=run.dir={run_dir}", f"--set=train.steps={steps + 5}")
        if done.code == 0 or time.monotonic() > until:
            break
    assert done.code == 0, done.err
