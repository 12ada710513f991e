"""The console in a real pseudo-terminal, in a pipe that closes, on a full disk, in a locale without Unicode."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from histories import history_of

from unisono.observe.console import Console
from unisono.observe.events import Event, EventLog, read_events
from unisono.observe.formatting import RunEndFacts
from unisono.observe.run_summary import summarise

SRC = Path(__file__).parents[2] / "src"

# emits `total` steps, with what a run says in between; waits where a test wants to step in
RUN = """
import sys, time
from pathlib import Path
from unisono.observe.console import Console
from unisono.observe.events import EventLog
from unisono.observe.formatting import RunEndFacts
from unisono.observe.history import read_history
from unisono.observe.run_summary import summarise

folder, total, pause_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
with EventLog(folder / "e.jsonl", rank=0, run_id="r", attempt=1) as log, Console(plain_every_s=0.0) as console:
    log.subscribe(console, console.name)
    log.emit("run_start", steps_total=total)
    for step in range(1, total + 1):
        log.emit("step", step=step, steps_total=total, eta_s=1.0,
                 **{"train/loss": 5.0 / step, "perf/tokens_per_s": 1000.0, "train/lr": 1e-3, "mem/peak_bytes": 2**30})
        time.sleep(pause_s)
        if step == total // 2 and "talk" in sys.argv:
            log.emit("eval", step=step, **{"eval/loss": 1.5})
            print("printed by the user")
            log.emit("notice", code="SLOW01", what="fp32", why="no bf16", cost="2x", fix="none")
            log.emit("warning", code="DATA01", message="evil \\x1b[2J\\x1b]0;title\\x07 text")
    log.emit("run_end", reason="finished", step=total)
    facts = RunEndFacts(sample_text="gr\\u00fc\\u00dfe \\u6f22 <b>\\x1b[31m", next_commands=("unisono generate x",))
    console.summary(summarise(read_history(log.path)), facts)
(folder / "done").write_text("done")
"""


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    return kept | {"PYTHONPATH": str(SRC), "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"} | more


def in_terminal(
    tmp_path: Path, columns: int, *args: object, until: Callable[[bytes], bool] | None = None, **env: str
) -> str:
    """Run ``RUN`` on a pseudo-terminal of that width; kill it once ``until`` says so. Returns what the terminal got."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, str(tmp_path), *map(str, args)],
        stdin=child,
        stdout=child,
        stderr=child,
        env=environment(**env),
        start_new_session=True,
    )
    os.close(child)
    seen = b""
    try:
        while True:
            try:
                chunk = os.read(parent, 65536)
            except OSError:  # EIO: the other side is closed
                break
            if not chunk:
                break
            seen += chunk
            if until is not None and until(seen):
                os.kill(process.pid, signal.SIGKILL)
                until = None
    finally:
        os.close(parent)
        process.wait()
    return seen.decode()


def visible(raw: str) -> list[str]:
    """Lines as they were sent, without control sequences."""
    lines = raw.replace("\r\n", "\n").split("\n")
    return [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).split("\r")[-1].rstrip() for line in lines]


def test_terminal_shows_bar_status_messages_and_summary(tmp_path: Path) -> None:
    raw = in_terminal(tmp_path, 100, 6, 0.0, "talk")
    lines = visible(raw)
    assert any(line.startswith("━") for line in lines)
    assert "step 6/6 100.0% | loss 0.8333 | lr 1.00e-03 | 1k tok/s | mem peak 1 GiB | eta 1.0s | warn DATA01" in lines
    assert "eval step=3 loss=1.5" in lines
    assert "printed by the user" in lines
    assert "notice: SLOW01: fp32; why: no bf16; cost: 2x; fix: none" in lines
    assert r"warning: DATA01: evil \x1b[2J\x1b]0;title\x07 text" in lines
    assert any(line.startswith("result   Finished 6 of 6 steps") for line in lines)
    assert r"sample   | grüße 漢 <b>\x1b[31m" in lines
    assert "try next unisono generate x" in lines
    assert "\x1b[2J" not in raw
    assert "\x1b]0;" not in raw
    assert (tmp_path / "done").exists()


@pytest.mark.parametrize("columns", [1, 12, 40])
def test_narrow_terminal_never_wraps_the_live_lines(tmp_path: Path, columns: int) -> None:
    raw = in_terminal(tmp_path, columns, 4, 0.0)
    live = raw.split("result")[0]
    assert all(len(line) <= columns for line in visible(live))
    assert (tmp_path / "done").exists()
    assert all(event["kind"] != "sink_failed" for event in read_events(tmp_path / "e.jsonl").events)


def test_killed_process_leaves_the_cursor_visible(tmp_path: Path) -> None:
    raw = in_terminal(tmp_path, 80, 10_000, 0.02, until=lambda seen: b"step" in seen)
    assert not (tmp_path / "done").exists()
    switches = re.findall(r"\x1b\[\?25[lh]", raw)
    assert switches[-1] == "\x1b[?25h"


def test_dumb_terminal_gets_plain_lines(tmp_path: Path) -> None:
    raw = in_terminal(tmp_path, 80, 3, 0.0, TERM="dumb")
    assert "\x1b" not in raw
    assert "step=3 steps_total=3 loss=1.6667" in raw


def test_terminal_without_unicode(tmp_path: Path) -> None:
    raw = in_terminal(tmp_path, 80, 6, 0.0, "talk", PYTHONIOENCODING="ascii")
    assert raw.isascii()
    assert r"sample   | gr??e ? <b>\x1b[31m" in visible(raw)
    assert any(re.fullmatch(r"loss     #[-_.~=+*#]+  5 -> 0.8333", line) for line in visible(raw))
    assert (tmp_path / "done").exists()


def piped(tmp_path: Path, *args: object, stdout: Any = subprocess.PIPE, **env: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", RUN, str(tmp_path), *map(str, args)],
        stdout=stdout,
        stderr=subprocess.PIPE,
        env=environment(**env),
    )


def test_pipe_gets_key_value_lines(tmp_path: Path) -> None:
    out, err = piped(tmp_path, 4, 0.0, "talk").communicate()
    assert err == b""
    lines = out.decode().splitlines()
    assert lines[0] == "step=1 steps_total=4 loss=5.0000 lr=0.001 tokens_per_s=1000 mem_peak_bytes=1073741824 eta_s=1"
    assert [line.split()[0] for line in lines if line.startswith("step=")] == ["step=1", "step=2", "step=3", "step=4"]
    assert r"warning: DATA01: evil \x1b[2J\x1b]0;title\x07 text" in lines
    assert "\x1b" not in out.decode()


def test_pipe_in_a_locale_without_unicode(tmp_path: Path) -> None:
    ascii_locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    out, err = piped(tmp_path, 4, 0.0, "talk", **ascii_locale).communicate()
    assert err == b""
    assert out.isascii()
    assert rb"sample   | gr??e ? <b>\x1b[31m" in out


def test_reader_that_goes_away_does_not_stop_the_run(tmp_path: Path) -> None:
    with piped(tmp_path, 200, 0.001) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first = process.stdout.readline()
        process.stdout.close()
        complaints = process.stderr.read()
    assert first.startswith(b"step=1 ")
    assert complaints == b""
    assert process.returncode == 0  # not 120, which Python ends with when stdout cannot be flushed
    assert (tmp_path / "done").exists()
    events = read_events(tmp_path / "e.jsonl").events
    failed = [event for event in events if event["kind"] == "sink_failed"]
    assert [(event["sink"], event["error"]) for event in failed] == [
        ("console", "BrokenPipeError: [Errno 32] Broken pipe")
    ]
    assert sum(event["kind"] == "step" for event in events) == 200


def test_full_disk_behind_stdout_does_not_stop_the_run(tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        process = piped(tmp_path, 3, 0.0, stdout=full)
        _, err = process.communicate()
    assert err == b""
    assert process.returncode == 0
    assert (tmp_path / "done").exists()
    (failed,) = [event for event in read_events(tmp_path / "e.jsonl").events if event["kind"] == "sink_failed"]
    assert failed["error"] == "OSError: [Errno 28] No space left on device"


def step(n: int, total: int = 100) -> Event:
    return {"kind": "step", "step": n, "steps_total": total, "train/loss": 1.0, "attempt": 1}


def test_plain_lines_at_most_every_interval_and_always_first_and_last() -> None:
    now = 0.0
    stream = io.StringIO()
    console = Console(stream=stream, plain_every_s=10.0, clock=lambda: now)
    for n in range(1, 48):
        console(step(n))
        now += 1.0
    assert re.findall(r"step=(\d+) ", stream.getvalue()) == ["1", "11", "21", "31", "41"]
    console({"kind": "run_end", "reason": "preempted"})
    assert re.findall(r"step=(\d+) ", stream.getvalue()) == ["1", "11", "21", "31", "41", "47"]
    console.close()
    assert stream.getvalue().count("step=47 ") == 1


def test_plain_last_step_of_the_run_is_shown_at_once() -> None:
    stream = io.StringIO()
    console = Console(stream=stream, plain_every_s=1000.0, clock=lambda: 0.0)
    for n in (1, 2, 3):
        console(step(n, total=3))
    assert re.findall(r"step=(\d+) ", stream.getvalue()) == ["1", "3"]


def test_coded_messages_and_skips_are_said_once() -> None:
    stream = io.StringIO()
    console = Console(stream=stream)
    for n in (1, 2, 3):
        console({"kind": "warning", "code": "DATA01", "message": f"wait {n}", "attempt": 1})
        console({"kind": "skipped_step", "step": n, "loss": "NaN", "attempt": 1})
        console({"kind": "warning", "message": f"uncoded {n}", "attempt": 1})
    assert stream.getvalue().splitlines() == [
        "warning: DATA01: wait 1",
        "warning: step 1 skipped on all ranks: loss nan",
        "warning: uncoded 1",
        "warning: uncoded 2",
        "warning: uncoded 3",
    ]


def test_off_is_silent() -> None:
    stream = io.StringIO()
    with Console(stream=stream, mode="off") as console:
        console(step(1))
        console.summary(summarise(history_of([])), RunEndFacts(sample_text="x"))
    assert stream.getvalue() == ""


def test_closed_stream_is_detached_by_the_log(tmp_path: Path) -> None:
    stream = io.StringIO()
    console = Console(stream=stream)
    with EventLog(tmp_path / "e.jsonl", rank=0, run_id="r", attempt=1) as log:
        log.subscribe(console, console.name)
        log.emit("step", step=1, steps_total=3)
        stream.close()
        log.emit("step", step=3, steps_total=3)
        log.emit("step", step=3, steps_total=3)
    console.summary(summarise(history_of([])))
    (failed,) = [event for event in read_events(tmp_path / "e.jsonl").events if event["kind"] == "sink_failed"]
    assert failed["error"] == "ValueError: I/O operation on closed file"


def test_slow_steps_do_not_redraw_more_often_than_the_cadence() -> None:
    class Terminal(io.StringIO):
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

    now = 0.0
    stream = Terminal()
    console = Console(stream=stream, mode="rich", clock=lambda: now)
    for n in range(1, 101):
        console(step(n, total=1000))
        now += 0.01  # a hundred steps in a second
    drawn = re.findall(r"step (\d+)/1000", stream.getvalue())
    assert drawn == ["1", "51"]
    console.close()
    assert re.findall(r"step (\d+)/1000", stream.getvalue())[-1] == "100"
