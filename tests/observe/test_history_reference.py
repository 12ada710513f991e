"""Histories are what a plain reader with ``json.loads`` makes of the same lines, whatever these hold."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unisono.observe import events as events_module
from unisono.observe.events import NUMBERED, Event, RewindFilter, encode, events_path
from unisono.observe.history import STEP_FIELDS, RankHistory, read_history

NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
FIELDS = (*STEP_FIELDS[:5], "mem/limit_bytes")


def reference(content: bytes) -> dict[str, Any]:
    """Steps, columns, events, unit and damaged lines of a file."""
    lines = content.split(b"\n")
    lines = lines if lines[-1] else lines[:-1]
    events: list[tuple[int, Event]] = []
    damaged: list[int] = []
    for place, line in enumerate(lines, start=1):
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            event = None
        if isinstance(event, dict) and isinstance(event.get("kind"), str):
            events.append((place, event))
        else:
            damaged.append(place)
    return {"damaged": damaged, "num_lines": len(lines), **kept(events)}


def kept(events: Sequence[tuple[int, Event]]) -> dict[str, Any]:
    """What is left of ``events`` when later attempts have taken the place of earlier steps."""
    rewind, repeats = RewindFilter(), list[tuple[int, int]]()
    steps: list[tuple[int, Event]] = []
    others: list[tuple[int, Event]] = []
    unit = "tokens"
    for place, event in events:
        if event["kind"] == "step":
            if not is_count(event.get("step")) or not is_count(event.get("attempt", 1)):
                continue
            steps.append((place, event))
            unit = event["unit"] if isinstance(event.get("unit"), str) and event["unit"] else unit
            event = {"kind": "step", "step": event["step"], "attempt": event.get("attempt", 1)}
        else:
            others.append((place, event))
        first = rewind.see(event)
        if first is not None:
            repeats.append((place, first))

    def is_kept(place: int, event: Event) -> bool:
        step = event.get("step")
        if event["kind"] not in NUMBERED or not isinstance(step, int):
            return True
        return all(step < first for later, first in repeats if later > place) and step < 1 << 53

    left = [event for place, event in steps if is_kept(place, event)]
    return {
        "steps": [int(event["step"]) for event in left],
        "attempts": [int(event.get("attempt", 1)) for event in left],
        "columns": {name: [as_float(event.get(name)) for event in left] for name in STEP_FIELDS},
        "all_events": [event for _, event in others],
        "events": [event for place, event in others if is_kept(place, event)],
        "unit": unit,
    }


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 53


def as_float(value: Any) -> float:
    if isinstance(value, str):
        return NON_FINITE.get(value, math.nan)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def read(content: bytes) -> RankHistory:
    with tempfile.TemporaryDirectory() as folder:
        path = events_path(Path(folder), 0)
        path.parent.mkdir()
        path.write_bytes(content)
        return read_history(path)


def assert_same(content: bytes) -> None:
    history, expected = read(content), reference(content)
    assert history.steps.tolist() == expected["steps"]
    assert history.attempts.tolist() == expected["attempts"]
    for name in STEP_FIELDS:
        np.testing.assert_array_equal(history.columns[name], np.array(expected["columns"][name], np.float64), name)
    assert repr(list(history.all_events)) == repr(expected["all_events"])  # NaN is not equal to itself
    assert repr(list(history.events)) == repr(expected["events"])
    assert history.unit == expected["unit"]
    has_torn_tail = expected["num_lines"] in expected["damaged"] and not content.endswith(b"\n")
    num_inner = len(expected["damaged"]) - has_torn_tail
    assert any("last line" in note for note in history.notes) == has_torn_tail
    assert any(f"left out {num_inner} incomplete" in note for note in history.notes) == bool(num_inner)


_NUMBERS = st.one_of(
    st.integers(-3, 40),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from((10**30, -(10**30), 10**400, 2**53, 2**53 - 1, True, None, "NaN", "-Infinity", "3", [1], {}, 2.0)),
)
_KINDS = st.sampled_from(
    ("step", "step", "step", "eval", "log", "skipped_step", "resumed", "system", "links", "gradient_stats", 3, None)
)
_ATTEMPTS = st.one_of(st.integers(1, 3), _NUMBERS)
_STEPS = st.one_of(st.integers(0, 9), _NUMBERS)


@st.composite
def line(draw: st.DrawFn) -> bytes:
    """One line: an event as it is written, or one with values of other types, in another form, cut short or changed."""
    event = {"kind": draw(_KINDS), "t": 1.0, "attempt": draw(_ATTEMPTS), "step": draw(_STEPS)}
    for name in draw(st.lists(st.sampled_from((*FIELDS, "unit", "links", "other")), max_size=4)):
        event[name] = draw(st.one_of(_NUMBERS, st.sampled_from(("images", ""))))
    for name in draw(st.lists(st.sampled_from(("attempt", "step", "kind")), max_size=1)):
        del event[name]
    match draw(st.integers(0, 7)):
        case 0:
            return json.dumps(event).encode()  # with spaces, and bare NaN
        case 1:
            return json.dumps(dict(sorted(event.items())), ensure_ascii=False).encode() + draw(
                st.sampled_from((b" ", b"\r"))
            )
        case 2:
            written = encode(event)
            return written[: draw(st.integers(0, len(written)))]
        case 3:
            written = bytearray(encode(event))
            written[draw(st.integers(0, len(written) - 1))] = draw(st.integers(0, 127))
            return bytes(written)
        case 4:
            return encode(event) + encode(event)
        case 5:
            return encode(event)[:-1] + b',"kind":"step","step":4,"train/loss":1e999}'
        case _:
            return encode(event)


def usual(num_steps: int) -> Iterable[bytes]:
    """Lines of a sound run."""
    for step in range(1, num_steps + 1):
        yield encode({"kind": "step", "t": 1.0, "m": 2.0, "attempt": 1, "step": step, "train/loss": 1 / step})


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(lines=st.lists(line(), max_size=25), sound=st.integers(0, 9), has_end=st.booleans(), block=st.integers(1, 400))
def test_history_is_that_of_a_plain_reader(
    monkeypatch: pytest.MonkeyPatch, lines: list[bytes], sound: int, has_end: bool, block: int
) -> None:
    monkeypatch.setattr(events_module, "_BLOCK_BYTES", block)  # lines begin and end anywhere in a block
    assert_same(b"\n".join([*usual(sound), *lines]) + b"\n" * has_end)


@pytest.mark.parametrize(
    "change",
    [
        lambda number, line: line,
        lambda number, line: line if number % 7 else line[: number % 60],
        lambda number, line: line if number % 11 else encode({"kind": "system", "attempt": 1, "step": number}),
        lambda number, line: line.replace(b'"attempt":1', b'"attempt":%d' % (1 + number // 900)),
        lambda number, line: line.replace(b'"train/loss":', b'"train/loss":"NaN","train/lr":') if number % 3 else line,
    ],
    ids=["sound", "cut short", "mixed", "attempts", "NaN"],
)
def test_long_files_are_read_alike(change: Callable[[int, bytes], bytes]) -> None:
    lines = [change(number, each) for number, each in enumerate(usual(4000))]
    assert_same(b"\n".join(lines) + b"\n")


@pytest.mark.parametrize(
    "other",
    [
        b'"other":"\xff"',
        b'"oth\xffer":1',
        b'"other":' + b"9" * 4301,
        b'"train/loss":' + b"9" * 4301,
        b'"other":"\\q"',
        b'"other":01',
    ],
    ids=["UTF-8", "name", "digits", "known field", "escape", "leading zero"],
)
def test_a_step_with_a_damaged_field_that_nobody_reads_is_left_out(other: bytes) -> None:
    first, second, third = usual(3)
    content = b"\n".join([first, second[:-1] + b"," + other + b"}", third]) + b"\n"
    assert_same(content)
    assert read(content).notes == ("rank00000.jsonl: left out 1 incomplete line(s) (2): a write was cut short",)


def test_a_line_longer_than_any_event_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "MAX_EVENT_BYTES", 200)
    monkeypatch.setattr(events_module, "_BLOCK_BYTES", 64)
    long = encode({"kind": "log", "attempt": 1, "text": "x" * 300})
    first, second = usual(2)
    history = read(b"\n".join([first, long, second, long]))
    assert history.steps.tolist() == [1, 2]
    assert history.notes == (
        "rank00000.jsonl: left out 1 incomplete line(s) (2): a write was cut short",
        "rank00000.jsonl: left out the last line, which is incomplete: its process was killed",
    )
