"""Histories: steps in columns, without those that a later attempt repeated, whatever a file holds."""

from __future__ import annotations

import json
import math
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from histories import history_of
from hypothesis import given
from hypothesis import strategies as st

from unisono.observe.events import NUMBERED, Event, encode, events_path
from unisono.observe.history import STEP_FIELDS, RankHistory, read_history, steady_readings, undisturbed


def step(n: int, attempt: int, kind: str = "step", **fields: Any) -> Event:
    return {"kind": kind, "step": n, "attempt": attempt, "m": 1.0, **fields}


def steps(history: RankHistory) -> list[tuple[int, int]]:
    return list(zip(history.steps.tolist(), history.attempts.tolist(), strict=True))


def points(history: RankHistory, field: str) -> list[tuple[int, float]]:
    return list(zip(*(values.tolist() for values in history.points(field)), strict=True))


def shape(history: RankHistory) -> list[tuple[str, int | None, int]]:
    return [(event["kind"], event.get("step"), event["attempt"]) for event in history.events]


def test_repeated_steps_are_replaced() -> None:
    history = history_of(
        [
            {"kind": "run_start", "attempt": 1},
            *(step(n, 1) for n in range(1, 6)),
            step(5, 1, "eval"),
            {"kind": "checkpoint_saved", "step": 5, "attempt": 1},
            {"kind": "run_start", "attempt": 2},
            {"kind": "resumed", "step": 3, "attempt": 2},
            *(step(n, 2) for n in (4, 5, 6)),
        ]
    )
    assert steps(history) == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (6, 2)]
    assert shape(history) == [
        ("run_start", None, 1),
        ("checkpoint_saved", 5, 1),  # it happened
        ("run_start", None, 2),
        ("resumed", 3, 2),
    ]
    assert len(history.all_events) == 5


def test_three_attempts_follow_the_lineage() -> None:
    history = history_of(
        [
            *(step(n, 1) for n in range(10, 60, 10)),  # read every 10 steps, killed at 53
            {"kind": "resumed", "step": 35, "attempt": 2},
            step(40, 2),
            {"kind": "resumed", "step": 15, "attempt": 3},  # the checkpoint at 35 was damaged
            step(20, 3),
        ]
    )
    assert steps(history) == [(10, 1), (20, 3)]


def test_an_attempt_without_a_resumed_event_starts_at_its_first_step() -> None:
    assert steps(history_of([*(step(n, 1) for n in range(1, 6)), step(3, 2), step(4, 2)])) == [
        (1, 1),
        (2, 1),
        (3, 2),
        (4, 2),
    ]


def test_an_evaluation_of_the_loaded_state_repeats_no_step() -> None:
    resumed = {"kind": "resumed", "step": 3, "attempt": 2}
    history = history_of([step(3, 1), step(4, 1), resumed, step(3, 2, "eval"), step(4, 2)])
    assert (steps(history), shape(history)) == ([(3, 1), (4, 2)], [("resumed", 3, 2), ("eval", 3, 2)])


def test_numbers_of_steps_become_columns() -> None:
    history = history_of(
        [
            step(1, 1, **{"train/loss": 2, "unit": "images", "mem/peak_bytes": 2**40}),
            step(2, 1, **{"train/loss": math.nan, "train/grad_norm": math.inf, "perf/step_s": 0.5}),
            step(3, 1, **{"train/loss": "a lot", "perf/step_s": True}),
        ]
    )
    assert history.unit == "images"
    assert str(points(history, "train/loss")) == "[(1, 2.0), (2, nan), (3, nan)]"
    assert points(history, "perf/step_s") == [(2, 0.5)]
    assert points(history, "mem/peak_bytes") == [(1, 2.0**40)]
    assert history.columns["train/grad_norm"][1] == math.inf


def test_spans_of_attempts() -> None:
    times = [(1, 5.0), (1, 7.5), (2, 1.0), (2, 4.0)]
    history = history_of(step(n, attempt) | {"m": at} for n, (attempt, at) in enumerate(times))
    assert history.attempt_s == {1: 2.5, 2: 3.0}


@pytest.mark.parametrize("rank", [0, 7, 12345])
def test_the_rank_is_that_of_the_file(rank: int) -> None:
    assert history_of([step(1, 1)], rank).rank == rank


def test_no_file_is_no_events(tmp_path: Path) -> None:
    history = read_history(events_path(tmp_path, 0))
    assert (history.is_empty, steps(history), points(history, "train/loss"), history.notes) == (True, [], [], ())


@pytest.mark.parametrize("number", [10**30, -(10**30), True, "3", None, [1], 2.5])
def test_steps_and_attempts_that_mean_harm(number: Any) -> None:
    history = history_of(
        [
            step(1, 1),
            {"kind": "resumed", "step": number, "attempt": 1, "m": number},
            {"kind": "step", "step": number, "attempt": number},
            {"kind": ["step"], "step": 1, "attempt": 1},
            step(9, 1, **{"train/loss": number}),
        ]
    )
    assert steps(history)[-1] == (9, 1)
    assert len(history.all_events) == 1


def test_lines_that_are_no_events_are_left_out_and_noted(tmp_path: Path) -> None:
    path = events_path(tmp_path, 0)
    path.parent.mkdir()
    good = encode(step(1, 1))
    odd = [
        b"{",
        b'{"kind":"step","step":"x"}',
        b'{"kind":"step","step":1e99}',
        b'{"kind":"step","step":-1}',
        b"[" * 10**5,
    ]
    deep = b'{"kind":"step","step":2,"x":' + b"[" * 10**6 + b"]" * 10**6 + b"}"
    path.write_bytes(b"\n".join([good, *odd, deep, good, b'{"kind":"st']))
    history = read_history(path)
    assert steps(history) == [(1, 1), (1, 1)]
    assert history.notes == (
        "rank00000.jsonl: left out 3 incomplete line(s) (2, 6, 7): a write was cut short",
        "rank00000.jsonl: left out the last line, which is incomplete: its process was killed",
    )


_KINDS = st.sampled_from(("step", "eval", "log", "skipped_step", "resumed", "started_over", "checkpoint_saved"))
_EVENTS = st.lists(st.tuples(_KINDS, st.integers(0, 6), st.integers(0, 2)), max_size=40)


@given(_EVENTS)
def test_what_is_repeated_follows_from_what_comes_later(drawn: list[tuple[str, int, int]]) -> None:
    attempt = 1
    events: list[Event] = []
    for kind, n, more in drawn:
        attempt += more == 2
        events.append(step(n, attempt, kind))
    kept = [event for place, event in enumerate(events) if not is_repeated(events, place)]
    history = history_of(events)
    assert steps(history) == [(event["step"], event["attempt"]) for event in kept if event["kind"] == "step"]
    assert list(history.events) == [event for event in kept if event["kind"] != "step"]


def is_repeated(events: list[Event], place: int) -> bool:
    """Whether a later attempt went back to the step of an event, or before it."""
    event = events[place]
    if event["kind"] not in NUMBERED:
        return False
    for later in range(place + 1, len(events)):
        one = events[later]
        before = [each for each in events[:later] if each["attempt"] == one["attempt"]]
        begun = [each for each in before if each["kind"] in BEGINS]
        starts = ("step",) if begun else NUMBERED
        started = any(
            each["kind"] in (("step",) if any(b["kind"] in BEGINS for b in before[:n]) else NUMBERED)
            for n, each in enumerate(before)
        )
        if one["kind"] == "started_over" or (one["kind"] == "resumed" and event["step"] >= one["step"] + 1):
            return True
        goes_back = not begun or (begun[-1]["kind"] == "resumed" and one["step"] <= begun[-1]["step"])
        if one["kind"] in starts and not started and goes_back and event["step"] >= one["step"]:
            return True
    return False


BEGINS = ("resumed", "started_over")


def test_what_a_loop_logs_before_its_steps_are_read_is_not_repeated_by_them() -> None:
    """On an accelerator steps are read some time after they were made."""
    first = [step(2, 1, "log"), step(1, 1), step(2, 1), step(3, 1)]
    again = [{"kind": "started_over", "step": 0, "attempt": 2}, step(2, 2, "log"), step(1, 2), step(2, 2), step(3, 2)]
    resumed = [{"kind": "resumed", "step": 1, "attempt": 3}, step(3, 3, "log"), step(2, 3), step(3, 3)]
    history = history_of([*first, *again, *resumed])
    assert steps(history) == [(1, 2), (2, 3), (3, 3)]
    assert shape(history) == [("started_over", 0, 2), ("resumed", 1, 3), ("log", 3, 3)]


def test_histograms_are_passed_over(tmp_path: Path) -> None:
    """They are large, and nothing that is made of the log shows them."""
    path = events_path(tmp_path, 0)
    path.parent.mkdir()
    lines = [encode({"kind": kind, "step": 2, "attempt": 1}) for kind in ("histograms", "gradient_stats")]
    path.write_bytes(b"\n".join(lines) + b"\n" + lines[0][:-3])
    history = read_history(path)
    assert [event["kind"] for event in history.all_events] == ["gradient_stats"]
    assert history.notes == ("rank00000.jsonl: left out the last line, which is incomplete: its process was killed",)


def test_a_long_run_takes_little_memory(tmp_path: Path) -> None:
    path = events_path(tmp_path, 0)
    path.parent.mkdir()
    numbers = {name: 0.123456789 for name in STEP_FIELDS}
    lines = 50_000
    with path.open("wb") as file:
        for n in range(1, lines + 1):
            file.write(
                json.dumps({"kind": "step", "step": n, "attempt": 1, **numbers}, separators=(",", ":")).encode() + b"\n"
            )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    history = read_history(path)
    assert len(history.steps) == lines
    grown_bytes = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert grown_bytes < 3 * 8 * lines * (len(STEP_FIELDS) + 4) + (32 << 20)


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        ({"kind": "compiled", "step": 1}, [False, True, True, True]),
        ({"kind": "compiled", "step": 20}, [True, False, True, True]),
        ({"kind": "profile", "step": 23, "first_step": 22}, [True, True, False, True]),
        (
            {"kind": "profile", "step": 23, "first_step": 21},
            [True, False, False, True],
        ),  # step 20 warmed the profiler up
        ({"kind": "profile", "step": 30, "first_step": 29}, [True, True, False, False]),  # step 31 waited for its stop
        ({"kind": "profile", "step": 31, "first_step": 9}, [False, False, False, False]),
        # a window that has begun, by its planned end
        ({"kind": "profile_begin", "step": 18, "first_step": 20, "last_step": 21}, [True, False, False, True]),
        ({"kind": "profile_begin", "step": 18, "first_step": 20}, [True, True, True, True]),
        ({"kind": "profile", "step": 15}, [True, False, True, True]),
        ({"kind": "profile", "step": 15, "first_step": "x"}, [True, False, True, True]),
        ({"kind": "profile", "step": 15, "first_step": 1 << 40}, [True, False, True, True]),
        ({"kind": "compiled", "step": {}}, [True, True, True, True]),
        ({"kind": "eval", "step": 15}, [True, True, True, True]),
    ],
)
def test_readings_with_a_step_that_compiled_or_was_profiled_are_found(event: Event, expected: list[bool]) -> None:
    readings = np.ones(4, np.int64), np.array([1, 11, 21, 31]), np.array([10, 20, 30, 40])
    assert undisturbed([event], *readings).tolist() == expected
    late = {"kind": "compiled", "step": 40}
    assert undisturbed([late, event], *readings).tolist() == [*expected[:3], False]
    # of another attempt, which made the same steps
    assert undisturbed([{**event, "attempt": 2}], *readings).tolist() == [True] * 4
    both = tuple(np.concatenate([each, each]) for each in readings[1:])
    attempts = np.repeat([1, 2], 4)
    assert undisturbed([{**event, "attempt": 2}], attempts, *both).tolist() == [*[True] * 4, *expected]


def test_without_such_an_event_every_reading_is_undisturbed() -> None:
    steps = np.arange(1, 5)
    assert undisturbed([], steps, steps, steps).all()
    assert undisturbed([{"kind": "compiled", "step": 3}], steps[:0], steps[:0], steps[:0]).tolist() == []


def test_readings_have_the_steps_since_the_one_before() -> None:
    def step(number: int, attempt: int, *, is_read: bool) -> Event:
        times = {"time/other_frac": 0.1, "time/window_s": 2.0} if is_read else {}
        return {"kind": "step", "step": number, "attempt": attempt, "m": float(number), **times}

    first = [step(n, 1, is_read=n % 3 == 0) for n in range(1, 13)]
    second = [step(n, 2, is_read=n % 2 == 0) for n in range(11, 19)]
    found = steady_readings(history_of([*first, {"kind": "run_start", "attempt": 2}, *second]))
    assert found.rows.tolist() == [8, 15, 17]  # steps 9, 16 and 18; the first two of each attempt are left out
    assert found.num_steps.tolist() == [3, 2, 2]
    assert found.wall_s.tolist() == [2.0, 2.0, 2.0]


def test_a_history_without_readings() -> None:
    assert len(steady_readings(history_of([])).rows) == 0
    assert len(steady_readings(history_of([{"kind": "step", "step": 1, "attempt": 1}])).rows) == 0
