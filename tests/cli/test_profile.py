"""``unisono profile``: training with a window, asking a run that goes on, showing the last profile; diagnosis of traces."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import Desk, events_of
from event_streams import write_events
from traces import TraceBuilder

from unisono.observe.events import encode, events_path
from unisono.profile import RankProfile, window
from unisono.profile.rank_profile import StepTime, profile_folder, profile_folders
from unisono.profile.window import request_path


def test_training_with_a_window_and_showing_it(desk: Desk, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = desk.process("profile", f"--set=run.dir={run}", *desk.settings, "--steps", "2:4", "--stacks")
    assert done.code == 0, done.err
    assert "\nsteps 2 to 3, 1 rank, cpu\n" in done.out
    folder = profile_folder(run, 2)
    assert sorted(path.name for path in folder.iterdir()) == ["rank-0.json", "rank-0.trace.json.gz", "trace.json.gz"]
    assert [event["code"] for event in events_of(run) if event["kind"] == "notice"] == []
    shown = desk.here("profile", str(run))
    assert shown.code == 0, shown.err
    assert shown.out.startswith("steps 2 to 3, 1 rank, cpu\n")
    texts = ("phase (rank 0)", "forward", "aten::mm", "memory at its peak", str(folder / "trace.json.gz"))
    for text in (*texts, "recorded with Python's stacks", "the run stood still for "):
        assert text in shown.out
    told = desk.here("profile", str(run), "--json").json
    assert (told["folder"], len(told["ranks"]), told["ranks"][0]["has_stacks"]) == (str(folder), 1, True)
    (event,) = [event for event in events_of(run) if event["kind"] == "profile"]
    assert told["stopped_s"] == event["stopped_s"] > 0
    # a trace of our own is a trace like any other
    judged = desk.here("diagnose", str(folder / "rank-0.trace.json.gz"))
    assert judged.code == 0, judged.err
    assert "steps: 2" in judged.out.splitlines()[0]
    assert "with the profile of steps 2 to 3" in desk.here("diagnose", str(run)).out


def test_without_steps_those_after_the_resumed_one_are_profiled(desk: Desk, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = [f"--set=run.dir={run}", *desk.settings]
    done = desk.process("train", *settings)
    assert done.code == 0, done.err
    done = desk.process("profile", *settings, "--set=train.steps=18")
    assert done.code == 0, done.err
    assert list(profile_folders(run)) == [14]
    done = desk.process("profile", *settings, "--set=train.steps=20", "--steps", "10:13")
    assert done.code == 0, done.err
    assert list(profile_folders(run)) == [14]
    (notice,) = [event for event in events_of(run) if event["kind"] == "notice" and event["code"] == "no_profile"]
    assert notice["what"] == "steps 10 to 12 were not profiled: the run goes on after step 18"
    assert notice["what"] in done.out + done.err


def test_a_run_that_goes_on_is_asked(desk: Desk, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = [*desk.settings, "--set=train.steps=1000000", "--set=train.eval_every_steps=0", f"--set=run.dir={run}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "unisono", "train", *settings],
        cwd=desk.folder,
        env=desk.child_environ(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline_s = time.monotonic() + 90
        while not (events_path(run, 0).exists() and any(event["kind"] == "step" for event in events_of(run))):
            assert process.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        done = desk.here("profile", str(run), "--now", "--steps", "2", "--json")
        assert done.code == 0, done.err
        (rank,) = done.json["ranks"]
        assert rank["num_steps"] == 2
        assert not request_path(run).exists()
        # two at once: each shows its own
        command = [sys.executable, "-m", "unisono", "profile", str(run), "--now", "--json", "--steps"]
        asking = [
            subprocess.Popen(
                [*command, steps], cwd=desk.folder, env=desk.child_environ(), stdout=subprocess.PIPE, text=True
            )
            for steps in ("1", "2")
        ]
        shown = [json.loads(each.communicate(timeout=120)[0]) for each in asking]
        assert [told["ranks"][0]["num_steps"] for told in shown] == [1, 2]
        assert shown[0]["folder"] != shown[1]["folder"]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def refused(desk: Desk, *arguments: str) -> str:
    done = desk.here("profile", *arguments)
    assert done.code == 2, done.err
    return done.err


def test_what_cannot_be_profiled(desk: Desk, tmp_path: Path) -> None:
    assert "has no profile" in refused(desk, str(tmp_path))
    assert "in which no run is under way" in refused(desk, str(tmp_path), "--now")
    assert "--now with no folder" in refused(desk, "--now")
    ended = write_events(tmp_path / "run", lambda rank, step: {"forward": 0.08}, ranks=1)
    assert "--steps 3:4 with --now" in refused(desk, str(ended), "--now", "--steps", "3:4")
    assert "at most 5 steps" in refused(desk, str(ended), "--now", "--steps", "6", "--stacks")
    with events_path(ended, 0).open("ab") as file:
        file.write(encode({"kind": "run_end", "t": 9.0, "rank": 0, "reason": "finished"}) + b"\n")
    assert "in which no run is under way" in refused(desk, str(ended), "--now")
    wrong = desk.here("profile", f"--set=run.dir={tmp_path / 'new'}", *desk.settings, "--steps", "1:4")
    assert (wrong.code, "A is 2 or more" in wrong.err, (tmp_path / "new").exists()) == (2, True, False)


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        (("--stacks",), "--stacks with the folder "),
        (("--steps", "3:4", "--set", "train.steps=5"), "--set --steps with the folder "),
        (("--now", "--plan", "x.json"), "--plan with the folder "),
    ],
)
def test_options_that_would_have_no_effect(desk: Desk, tmp_path: Path, arguments: tuple[str, ...], given: str) -> None:
    assert given in refused(desk, str(tmp_path), *arguments)
    assert "--timeout-s with a configuration" in refused(desk, *desk.settings, "--timeout-s", "3")


def test_a_run_that_does_not_answer(desk: Desk, tmp_path: Path) -> None:
    run = write_events(tmp_path / "run", lambda rank, step: {"forward": 0.08}, ranks=1)
    told = refused(desk, str(run), "--now", "--timeout-s", "0.3")
    assert "made no profile within 0.3 s" in told
    assert "the request was taken back" in told
    assert not request_path(run).exists()


def test_a_request_of_somebody_else_is_waited_for(desk: Desk, tmp_path: Path) -> None:
    run = write_events(tmp_path / "run", lambda rank, step: {"forward": 0.08}, ranks=1)
    theirs = window.write_request(run, 3, stacks=False)
    assert "another request waits" in refused(desk, str(run), "--now", "--timeout-s", "0.3")
    taken = window.take_request(run)
    assert taken is not None
    assert taken.number == theirs


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_stops_waiting_takes_the_request_back(desk: Desk, tmp_path: Path, number: signal.Signals) -> None:
    run = write_events(tmp_path / "run", lambda rank, step: {"forward": 0.08}, ranks=1)
    waiting = subprocess.Popen(
        [sys.executable, "-m", "unisono", "profile", str(run), "--now"],
        cwd=desk.folder,
        env=desk.child_environ(),
        stderr=subprocess.DEVNULL,
    )
    deadline_s = time.monotonic() + 60
    while not request_path(run).exists():
        assert waiting.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    time.sleep(0.2)  # the request is there a moment before it is waited for
    waiting.send_signal(number)
    assert waiting.wait(60) == 75
    assert not request_path(run).exists()


@pytest.mark.parametrize(
    ("answer", "ends", "said"),
    [
        (True, False, "step 7 is planned; unisono profile {run} shows it later"),
        (True, True, "step 7 was planned, and the profile was not written before the end"),
        (False, False, "the request is no longer in the folder"),
    ],
)
def test_a_request_that_the_run_has_taken_is_not_taken_back(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bool, ends: bool, said: str
) -> None:
    run = write_events(tmp_path / "run", lambda rank, step: {"forward": 0.08}, ranks=1)
    write = window.write_request

    def write_and_be_taken(run_dir: Path, num_steps: int, *, stacks: bool) -> str:
        number = write(run_dir, num_steps, stacks=stacks)
        assert window.take_request(run_dir) is not None
        if answer:
            window.write_answer(run_dir, window.ProfileWindow(first=7, num_steps=num_steps, request=number))
        write(run_dir, 2, stacks=False)  # somebody else's
        if ends:
            with events_path(run_dir, 0).open("ab") as file:
                file.write(encode({"kind": "run_end", "t": 9.0, "rank": 0, "attempt": 1, "reason": "failed"}) + b"\n")
        return number

    monkeypatch.setattr(window, "write_request", write_and_be_taken)
    told = " ".join(refused(desk, str(run), "--now", "--timeout-s", "0.3").split())
    assert said.format(run=run) in told
    assert "taken back" not in told
    assert request_path(run).exists()


def test_a_run_that_was_killed_is_not_asked(desk: Desk, tmp_path: Path) -> None:
    run = write_events(tmp_path / "run", lambda rank, step: {"forward": 0.08}, ranks=1)
    (run / "run.lock").write_text('{"pid": 7, "host": "here", "since": "2026-01-01 00:00:00"}')
    os.utime(run / "run.lock", (0, 0))
    assert "in which no run is under way" in refused(desk, str(run), "--now")


def test_names_in_a_profile_cannot_write_to_the_terminal(desk: Desk, tmp_path: Path) -> None:
    run = write_events(tmp_path / "run", lambda rank, step: {"forward": 0.08}, ranks=1)
    folder = profile_folder(run, 5)
    folder.mkdir(parents=True)
    steps = (StepTime(step=5, start_s=0.0, wall_s=1.0),)
    made = RankProfile(wall_s=1.0, steps=steps, num_steps=1, notes=("\x1b]0;title\x07",))
    (folder / "rank-0.json").write_bytes(made.to_bytes())
    done = desk.here("profile", str(run))
    assert done.code == 0, done.err
    assert "\x1b" not in done.out


def test_diagnosis_of_a_foreign_trace(desk: Desk, tmp_path: Path) -> None:
    trace = TraceBuilder().step(1, 0, 500).step(2, 500, 500).op("aten::mm", 0, 500).op("aten::mm", 500, 400)
    trace.span("_compile.compile_inner (dynamo_timed)", 900, 50)
    path = trace.write(tmp_path / "trace.json")
    done = desk.here("diagnose", str(path))
    assert done.code == 0, done.err
    assert done.out.splitlines()[0] == f"{path}: a trace of 5 events, 0.001 s, steps: 2"
    assert (
        "1. COMP01 (warning, possible): the trace contains compilations of torch.compile, costs 5% of the time"
        in done.out
    )
    told = desk.here("diagnose", str(path), "--json").json
    assert [finding["id"] for finding in told["findings"]] == ["COMP01"]
    overlay = tmp_path / "faster.toml"
    done = desk.here("diagnose", str(path), "--apply", str(overlay))
    assert (done.code, overlay.exists(), "a trace has none" in done.err) == (2, False, True)
    assert f"unisono diagnose {path}" in refused(desk, str(path))


@pytest.mark.parametrize("content", [b"", b"not JSON", b"\x1f\x8b\x08broken", b'{"traceEvents": [{"ph": "X"'])
def test_files_that_are_no_traces(desk: Desk, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    done = desk.here("diagnose", str(path))
    assert (done.code, "export_chrome_trace" in done.err) == (2, True)
