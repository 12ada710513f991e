from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from modes import mode_of, umask

from unisono.errors import ConfigError
from unisono.observe.events import (
    Event,
    EventLog,
    events_path,
    next_attempt,
    number,
    read_events,
)

REPO_SRC = Path(__file__).parents[2] / "src"


def open_log(path: Path, *, attempt: int = 1, rank: int = 0) -> EventLog:
    return EventLog(path, rank=rank, run_id="r1", attempt=attempt)


def child(code: str, *args: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        env=os.environ | {"PYTHONPATH": str(REPO_SRC)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_one_json_line_per_event(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    clock = iter([10.0, 11.0])
    with EventLog(
        path, rank=3, run_id="r", attempt=2, wall_clock=lambda: 1.5, monotonic_clock=lambda: next(clock)
    ) as log:
        log.emit("step", step=1, **{"train/loss": 2.5})
        log.emit("note", text="line\nbreak", where=Path("/a/b"), many=(1, 2), table={"x": {"y": None}}, yes=True)
    first, second = path.read_text().splitlines()
    assert json.loads(first) == {
        "kind": "step",
        "t": 1.5,
        "m": 10.0,
        "rank": 3,
        "run": "r",
        "attempt": 2,
        "step": 1,
        "train/loss": 2.5,
    }
    read = json.loads(second)
    assert read["text"] == "line\nbreak"
    assert read["where"] == "/a/b"
    assert read["many"] == [1, 2]
    assert read["table"] == {"x": {"y": None}}
    assert read["yes"] is True


def test_file_and_folder_follow_the_umask(tmp_path: Path) -> None:
    path = events_path(tmp_path / "run", 7)
    with umask(0o020):
        open_log(path).close()
    assert path.name == "rank00007.jsonl"
    assert (mode_of(path), mode_of(path.parent)) == (0o644, 0o755)


def test_non_finite_numbers_by_the_rule(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    heard: list[Event] = []
    with open_log(path) as log:
        log.subscribe(heard.append)
        log.emit("step", step=1, a=math.nan, b=math.inf, c=-math.inf, d=[math.nan], e={"f": math.inf}, g=1.0)
    line = path.read_text()
    event = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (event["a"], event["b"], event["c"], event["d"], event["e"]) == (
        "NaN",
        "Infinity",
        "-Infinity",
        ["NaN"],
        {"f": "Infinity"},
    )
    assert math.isnan(number(event["a"]) or 0.0)
    assert number(event["b"]) == math.inf
    assert number(event["c"]) == -math.inf
    assert math.isnan(heard[0]["a"])  # listeners get the number itself


def test_number_is_strict() -> None:
    assert number(3) == 3.0
    assert number("3") is None
    assert number(True) is None
    assert number(None) is None
    assert number("infinity") is None


def test_numpy_values_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    with open_log(path) as log:
        log.emit(
            "x", a=np.float32(0.5), b=np.int64(3), c=np.array([1.0, np.nan]), d=np.float64(np.inf), e=np.bool_(True)
        )
    event = read_events(path).events[0]
    assert (event["a"], event["b"], event["c"], event["d"], event["e"]) == (0.5, 3, [1.0, "NaN"], "Infinity", True)


def test_a_tensor_is_refused_by_name(tmp_path: Path) -> None:
    with open_log(tmp_path / "e.jsonl") as log, pytest.raises(TypeError) as caught:
        log.emit("step", step=1, extra={"loss": torch.zeros(())})
    assert "event field step.extra.loss is a torch.Tensor; events take numbers, strings" in str(caught.value)


def test_envelope_fields_cannot_be_given(tmp_path: Path) -> None:
    with (
        open_log(tmp_path / "e.jsonl") as log,
        pytest.raises(TypeError, match="event 'step': attempt, rank belong to every"),
    ):
        log.emit("step", rank=1, attempt=2)


def test_secrets_reach_neither_file_nor_listener(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    heard: list[Event] = []
    with open_log(path) as log:
        log.subscribe(heard.append)
        log.emit("run_start", hf_token="canary1", config={"wandb": {"api_key": "canary2"}}, argv=["--token", "canary3"])
        log.emit("warning", message="cannot reach https://me:canary4@host/x")
        log.emit("x", hf_token="canary5")
    assert "canary" not in path.read_text()
    assert "canary" not in str(heard)
    assert path.read_text().count("[redacted]") == 5


def test_a_listener_that_raises_is_detached_and_the_rest_go_on(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    heard: list[Event] = []

    def broken(event: Event) -> None:
        raise ValueError(f"cannot show {event['kind']}")

    with open_log(path) as log:
        log.subscribe(broken, "picture")
        log.subscribe(heard.append)
        log.emit("step", step=1)
        log.emit("step", step=2)
    kinds = [event["kind"] for event in read_events(path).events]
    assert kinds == ["step", "sink_failed", "step"]
    assert sorted(event["kind"] for event in heard) == ["sink_failed", "step", "step"]
    failed = read_events(path).events[1]
    assert (failed["sink"], failed["error"], failed["during"]) == ("picture", "ValueError: cannot show step", "step")


def test_two_listeners_that_raise_on_everything(tmp_path: Path) -> None:
    def broken(event: Event) -> None:
        raise RuntimeError("no")

    with open_log(tmp_path / "e.jsonl") as log:
        log.subscribe(broken, "one")
        log.subscribe(broken, "two")
        log.emit("step", step=1)
    failed = [event["sink"] for event in read_events(log.path).events if event["kind"] == "sink_failed"]
    assert sorted(failed) == ["one", "two"]


def test_a_listener_may_emit(tmp_path: Path) -> None:
    with open_log(tmp_path / "e.jsonl") as log:
        log.subscribe(lambda event: log.emit("echo") if event["kind"] == "step" else None)
        log.emit("step", step=1)
    assert [event["kind"] for event in read_events(log.path).events] == ["step", "echo"]


def test_threads_do_not_mix_lines(tmp_path: Path) -> None:
    with open_log(tmp_path / "e.jsonl") as log:

        def work(who: int) -> None:
            for i in range(300):
                log.emit("x", who=who, i=i, pad="p" * 50 * who)

        threads = [threading.Thread(target=work, args=(who,)) for who in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    events = read_events(log.path).events
    assert len(events) == 1200
    for who in range(4):
        assert [event["i"] for event in events if event["who"] == who] == list(range(300))


WRITER = """
import sys
from pathlib import Path
from unisono.observe.events import EventLog, next_attempt
path = Path(sys.argv[1])
log = EventLog(path, rank=0, run_id="r", attempt=next_attempt(path))
i = 0
while True:
    log.emit("x", i=i, pad="p" * 3000)
    i += 1
"""


def test_kill_leaves_whole_lines_and_the_next_attempt_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    for attempt in (1, 2):
        process = child(WRITER, path)
        while (next_attempt(path) if path.exists() else 1) <= attempt:
            assert process.poll() is None, process.communicate()[1]
        size = path.stat().st_size
        while path.stat().st_size < size + 200_000:
            assert process.poll() is None, process.communicate()[1]
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    history = read_events(path)
    for attempt in (1, 2):
        seen = [event["i"] for event in history.events if event["attempt"] == attempt]
        assert seen == list(range(len(seen)))
        assert len(seen) > 10
    assert len(history.damaged_lines) <= 2


def test_torn_tail_is_left_out_and_said(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    with open_log(path) as log:
        for step in (1, 2, 3):
            log.emit("step", step=step)
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    history = read_events(path)
    assert [event["step"] for event in history.events] == [1, 2]
    assert history.torn_tail
    assert history.damaged_lines == (3,)
    assert history.notes() == ("e.jsonl: left out the last line, which is incomplete: its process was killed",)
    # going on closes the torn line first, so that the next event is not glued to it
    with open_log(path, attempt=next_attempt(path)) as log:
        log.emit("resumed", step=2)
    history = read_events(path)
    assert [event["kind"] for event in history.events] == ["step", "step", "resumed"]
    assert history.events[-1]["attempt"] == 2
    assert not history.torn_tail
    assert history.notes() == ("e.jsonl: left out 1 incomplete line(s) (3): a write was cut short",)


@pytest.mark.parametrize("wrong", [-4, 0, True, 1 << 60, 10**30, 999_999_999, "7", 7.5, None])
@pytest.mark.parametrize("num_wrong", [1, 300])  # all of the end that is read first
def test_a_damaged_attempt_does_not_number_the_next_one(tmp_path: Path, wrong: object, num_wrong: int) -> None:
    path = tmp_path / "e.jsonl"
    with open_log(path, attempt=7) as log:
        log.emit("step", step=1)
    event = {"kind": "x", "attempt": wrong, "pad": "p" * 1000}
    with path.open("ab") as file:
        file.write((json.dumps(event).encode() + b"\n") * num_wrong)
    assert next_attempt(path) == 8


@pytest.mark.parametrize("cut", range(1, 90, 7))
def test_any_cut_loses_one_line_at_most(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "e.jsonl"
    with open_log(path) as log:
        log.emit("step", step=1)
        log.emit("step", step=2)
    path.write_bytes(path.read_bytes()[:-cut])
    history = read_events(path)
    # without its newline the last line may still be whole, then it counts
    assert [event["step"] for event in history.events] == ([1, 2] if cut == 1 else [1])
    with open_log(path, attempt=2) as log:
        log.emit("step", step=2)
    assert [event["step"] for event in read_events(path).events] == ([1, 2, 2] if cut == 1 else [1, 2])


def test_next_attempt_reads_only_the_end(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    assert next_attempt(path) == 1
    path.write_text("")
    assert next_attempt(path) == 1
    with open_log(path, attempt=4) as log:
        log.emit("run_start", big="b" * 300_000)
        for step in range(50):
            log.emit("step", step=step)
    assert next_attempt(path) == 5
    with path.open("ab") as file:
        file.write(b"torn " + b"x" * 200_000)  # longer than the first look from the end
    assert next_attempt(path) == 5
    path.write_text("no json at all\n")
    assert next_attempt(path) == 1


FULL_DISK = """
import resource, sys
from pathlib import Path
from unisono.observe.events import EventLog
path = Path(sys.argv[1])
heard = []
log = EventLog(path, rank=0, run_id="r", attempt=1)
log.subscribe(heard.append)
log.emit("step", step=0)
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 50, hard))   # room for half a line
for step in range(1, 6):
    log.emit("step", step=step)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
log.emit("step", step=6)
log.close()
print([(e["kind"], e.get("step"), e.get("sink")) for e in heard])
"""


def test_disk_that_fills_and_empties(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    out, err = child(FULL_DISK, path).communicate()
    assert err == ""
    heard = eval(out)  # noqa: S307 our own child's repr
    # listeners hear every step, and once that events are being lost
    assert [step for kind, step, _ in heard if kind == "step"] == list(range(7))
    assert [sink for kind, _, sink in heard if kind == "sink_failed"] == ["events"]
    history = read_events(path)
    assert [(event["kind"], event.get("step")) for event in history.events] == [
        ("step", 0),
        ("events_lost", None),
        ("step", 6),
    ]
    assert history.events[1]["lines"] == 5
    assert history.damaged_lines == (2,)


def test_a_folder_of_events_that_is_a_link_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/events").symlink_to(tmp_path / "other")
    with pytest.raises(ConfigError, match="cannot be opened for appending: events is a link"):
        EventLog(events_path(tmp_path / "run", 0), rank=0, run_id="r", attempt=0)
    assert not list((tmp_path / "other").iterdir())


def test_symlink_fifo_and_folder_are_refused(tmp_path: Path) -> None:
    target = tmp_path / "target"
    link, fifo, folder = tmp_path / "link", tmp_path / "fifo", tmp_path / "folder"
    link.symlink_to(target)
    os.mkfifo(fifo)
    folder.mkdir()
    for path, reason in ((link, "symbolic link"), (fifo, "not a regular file"), (folder, "directory")):
        with pytest.raises(ConfigError) as caught:
            open_log(path)
        (problem,) = caught.value.problems
        assert str(path) in problem.given
        assert reason in problem.given
        assert problem.rule == "each rank appends its events to a regular file inside the run folder"
        assert problem.consequence == "nothing was started"
    assert not target.exists()


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match=r"events file .*/file/events/rank00000.jsonl cannot be opened for appending: Not a"
    ):
        open_log(events_path(tmp_path / "file", 0))


def test_emit_after_close_reaches_listeners_only(tmp_path: Path) -> None:
    heard: list[Event] = []
    log = open_log(tmp_path / "e.jsonl")
    log.subscribe(heard.append)
    log.close()
    log.close()
    log.emit("step", step=1)
    assert [event["kind"] for event in heard] == ["step"]
    assert read_events(log.path).events == ()
