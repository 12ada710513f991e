"""The progress of data jobs: a line on a terminal, messages elsewhere, and nothing of it on standard output."""

from __future__ import annotations

import json
import logging
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import Desk, make_desk

from unisono.cli.job_progress import JobStage, LoggedProgress

DEDUP = ("data", "dedup", "a.jsonl", "--out", "out", "--exact", "--json")


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    """A folder of its own, with a table of 2,000 documents."""
    made = make_desk(tmp_path / "desk", tmp_path / "cache")
    (made.folder / "a.jsonl").write_text(
        "".join(json.dumps({"text": f"text {number}"}) + "\n" for number in range(2000))
    )
    return made


def in_terminal(desk: Desk, *arguments: str, term: str = "xterm-256color") -> tuple[str, str]:
    """``python ARGUMENTS``: (standard output, which is a pipe; what the terminal gets, which is standard error)."""
    ours, theirs = pty.openpty()
    command, env = [sys.executable, *arguments], desk.child_environ(TERM=term)
    running = subprocess.Popen(command, cwd=desk.folder, env=env, stdout=subprocess.PIPE, stderr=theirs, text=True)
    os.close(theirs)
    seen = b""
    try:
        while True:
            try:
                seen += os.read(ours, 65536)
            except OSError:  # EIO: the other side is closed
                break
        out, _ = running.communicate()
    finally:
        os.close(ours)
    assert running.returncode == 0, seen
    return out, seen.decode()


def test_a_terminal_shows_a_line(desk: Desk) -> None:
    out, seen = in_terminal(desk, "-m", "unisono", *DEDUP)
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen)
    assert re.search(r"reading[ ━]+0%, 0 MiB of 0\.0\d+ MiB", lines)
    assert re.search(r"writing[ ━]+0%, 0 documents of 2,000 documents", lines)
    assert "reporting" in lines
    assert out.count("\n") == 1
    assert json.loads(out)["kept"] == 2000
    assert "\n" not in seen.rpartition("reporting")[2].replace("\r\n", "", 1)  # the line vanishes


@pytest.mark.parametrize("has_handler", [False, True])  # without -v, and with it
def test_messages_stand_above_the_line(desk: Desk, has_handler: bool) -> None:
    program = f"""
import logging
from unisono.cli.job_progress import job_progress
if {has_handler}:
    logging.basicConfig(format="%(message)s", handlers=[logging.StreamHandler()])
with job_progress() as progress:
    progress.begin("reading", 10, "rows")
    logging.getLogger("unisono").warning("be careful")
    progress.begin("writing", 10, "rows")
logging.getLogger("unisono").warning("the end")
print("result")
"""
    out, seen = in_terminal(desk, "-c", program)
    assert out == "result\n"
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen).replace("\r\n", "\n").split("\n")
    assert [line.split("\r")[-1].strip() for line in lines].count("be careful") == 1
    assert lines[-2].split("\r")[-1].strip() == "the end"


def test_a_terminal_without_a_cursor_and_a_pipe_show_nothing(desk: Desk) -> None:
    out, seen = in_terminal(desk, "-m", "unisono", *DEDUP, term="dumb")
    assert (json.loads(out)["kept"], seen) == (2000, "")
    done = desk.here("data", "dedup", "a.jsonl", "--out", "other", "--exact", "--json")
    assert (done.json["kept"], done.err) == (2000, "")


def test_a_pipe_gets_a_message_for_each_stage_with_v(desk: Desk) -> None:
    done = desk.here(*DEDUP, "-v")
    assert done.json["kept"] == 2000
    assert [re.sub(r"[\d.]+(s| MiB)", r"1\1", line) for line in done.err.splitlines()] == [
        "INFO reading: 1 MiB in 1s",
        "INFO writing: 2,000 documents in 1s",
        "INFO reporting: 1 page in 1s",
    ]


def test_a_message_at_most_every_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "unisono")
    now = [100.0]
    progress = LoggedProgress(clock=lambda: now[0])
    progress.begin("reading", 400 << 20, "bytes", done=100 << 20)
    for _ in range(30):
        now[0] += 1
        progress.advance(10 << 20)
    assert caplog.messages == [
        "reading: 50%, 0.195 GiB of 0.391 GiB, 10 MiB/s, 20s left",
        "reading: 75%, 0.293 GiB of 0.391 GiB, 10 MiB/s, 10s left",
        "reading: 100%, 0.391 GiB of 0.391 GiB, 10 MiB/s, 0.0s left",
    ]
    caplog.clear()
    progress.begin("writing", 8, "documents")
    now[0] += 4
    progress.advance(2)
    progress.close()
    assert caplog.messages == [
        "reading: 0.391 GiB in 30s, 100 MiB of this before",
        "writing: 2 documents of 8 documents in 4.0s",
    ]


def test_the_rate_leaves_out_the_time_before_the_first_piece() -> None:
    stage = JobStage(name="reading", total=100, unit="documents", found=40, done=40, began_s=0.0)
    assert stage.words(50.0) == "40%, 40 documents of 100 documents"
    stage.advance(10, 50.0)  # finding the place took this time, too
    assert stage.words(50.0) == "50%, 50 documents of 100 documents"
    stage.advance(10, 51.0)
    assert stage.words(51.0) == "60%, 60 documents of 100 documents, 10 documents/s, 4.0s left"
