"""Traces of ranks on one clock, the exchange of times behind it, and requests."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
from traces import TraceBuilder

from unisono.observe.options import ObserveOptions
from unisono.profile import RankProfile, merge, merge_traces, read_trace
from unisono.profile.clock import clock_between
from unisono.profile.rank_profile import MERGED_FILE, Clock
from unisono.profile.window import (
    ProfileRequest,
    ProfileWindow,
    read_answer,
    request_path,
    take_request,
    window_of,
    withdraw_request,
    write_answer,
    write_request,
)


def profile_of(folder: Path, rank: int, trace: TraceBuilder, **clock: Any) -> RankProfile:
    name = f"rank-{rank}.trace.json.gz"
    trace.write(folder / name)
    return RankProfile(rank=rank, trace_file=name, num_events=len(trace.events), clock=Clock(**clock))


def merged(folder: Path) -> list[dict[str, Any]]:
    return json.loads(gzip.decompress((folder / MERGED_FILE).read_bytes()))["traceEvents"]


def test_times_are_those_of_rank_0(tmp_path: Path) -> None:
    """Rank 1 counts from 2 µs later, and its clock is 5 µs ahead."""
    flow = {"ph": "s", "cat": "fwdbwd", "name": "fwdbwd", "id": 6, "pid": 7, "tid": 1, "ts": 3.0}
    one, other = TraceBuilder().op("aten::mm", 100, 10), TraceBuilder().launch(100, 4, "gemm", 103, 1)
    one.events.append(flow)
    other.events.append(flow)
    profiles = [
        profile_of(tmp_path, 1, other, base_ns=3_000, offset_s=5e-6),
        profile_of(tmp_path, 0, one, base_ns=1_000),
    ]
    assert merge_traces(tmp_path, profiles) == (0, 1)
    events = merged(tmp_path)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    times = {event["name"]: (names[event["pid"]], event["ts"]) for event in events if event["ph"] == "X"}
    assert times == {
        "aten::mm": ("rank 0", 100),
        "cudaLaunchKernel": ("rank 1", 97),
        "gemm": ("rank 1 device 0", 100),
    }
    flows = [event["id"] for event in events if event["ph"] == "s"]
    assert len(set(flows)) == 2
    assert read_trace(tmp_path / MERGED_FILE).num_events == len(events)


def test_ranks_beyond_the_limit_and_without_a_trace_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge, "MAX_MERGED_EVENTS", 5)
    profiles = [profile_of(tmp_path, rank, TraceBuilder().op("a::b", 0, 1).op("a::c", 1, 1)) for rank in range(4)]
    (tmp_path / profiles[1].trace_file).write_bytes(b"no gzip, no JSON")
    profiles[0] = RankProfile(rank=0)
    assert merge_traces(tmp_path, profiles) == (2,)
    assert merge_traces(tmp_path, [RankProfile(rank=0), RankProfile(rank=1, trace_file="../../secret")]) == ()


def test_events_of_wrong_types_are_left_out(tmp_path: Path) -> None:
    trace = TraceBuilder().op("aten::mm", 100, 10)
    wrong: list[Any] = [{"pid": [7]}, {"pid": None}, {"ts": 10**400}, {"id": 2**64 - 1}, {"args": []}]
    trace.events += [{"ph": "i", "name": "x", "pid": 7, "tid": 1, "ts": 1.0, **each} for each in wrong]
    assert merge_traces(tmp_path, [profile_of(tmp_path, 0, trace)]) == (0,)
    assert [event["ts"] for event in merged(tmp_path) if event.get("name") == "x"] == [10**400, 1.0, 1.0]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("offset_ns", [0, 7_300_000, -40_000_000_000])
def test_the_offset_of_a_clock_is_within_its_error(seed: int, offset_ns: int) -> None:
    """Two ranks that start each exchange at random times; messages take 20 µs to 3 ms in each direction."""
    rng = random.Random(seed)
    now, sent, received, other_sent, other_received = 10**18, [], [], [], []
    for _ in range(8):
        mine, theirs = now + rng.randint(0, 500_000), now + rng.randint(0, 500_000)
        to_other, to_me = (rng.randint(20_000, 3_000_000) for _ in range(2))
        my_end, their_end = max(mine, theirs + to_me), max(theirs, mine + to_other)
        sent.append(mine)
        received.append(my_end)
        other_sent.append(theirs + offset_ns)
        other_received.append(their_end + offset_ns)
        now = max(my_end, their_end)
    clock = clock_between(sent, received, other_sent, other_received)
    assert abs(clock.offset_s - offset_ns / 1e9) <= clock.error_s + 1e-9
    assert clock.error_s < 3e-3


def test_windows_by_step_numbers() -> None:
    assert window_of("") is None
    assert window_of("100:103") == ProfileWindow(first=100, num_steps=3)
    assert window_of("2:3+stacks") == ProfileWindow(first=2, num_steps=1, stacks=True)
    assert window_of("2:3", 90) == ProfileWindow(first=2, num_steps=1)
    assert window_of("+10:13+stacks", 90) == ProfileWindow(first=100, num_steps=3, stacks=True)


@pytest.mark.parametrize(
    "text", ["5", "5:5", "6:5", "1:3", "5:106", "a:b", "5:8+stack", "5:8 ", "++5:8", "-5:8", "٥:٨"]
)
def test_what_is_no_window(text: str) -> None:
    (found,) = ObserveOptions(profile_steps=text).problems()
    assert found[0] == "profile_steps"
    assert "'100:103" in found[1].nearest


def test_a_request_is_taken_once(tmp_path: Path) -> None:
    assert take_request(tmp_path) is None
    number = write_request(tmp_path, 3, stacks=True)
    assert take_request(tmp_path) == ProfileRequest(num_steps=3, stacks=True, number=number)
    assert read_answer(tmp_path, number) is None
    write_answer(tmp_path, ProfileWindow(first=7, num_steps=3, stacks=True, request=number))
    planned = read_answer(tmp_path, number)
    assert planned is not None
    assert (planned[0], read_answer(tmp_path, "0")) == (7, None)
    request_path(tmp_path).write_text('{"num_steps": 3, "request": "../x"}')
    taken = take_request(tmp_path)
    assert taken is not None
    assert taken.number.isalnum()
    assert not request_path(tmp_path).exists()
    assert take_request(tmp_path) is None


@pytest.mark.parametrize("has_links", [True, False])
def test_a_request_that_waits_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool) -> None:
    def refuse(*paths: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    if not has_links:
        monkeypatch.setattr("unisono.profile.window.os.link", refuse)
    first = write_request(tmp_path, 3, stacks=False)
    with pytest.raises(FileExistsError):
        write_request(tmp_path, 4, stacks=False)
    assert take_request(tmp_path) == ProfileRequest(num_steps=3, stacks=False, number=first)
    write_request(tmp_path, 4, stacks=False)
    assert [path.name for path in request_path(tmp_path).parent.iterdir()] == ["request.json"]


def test_windows_with_stacks_are_short(tmp_path: Path) -> None:
    assert window_of("20:25+stacks") is not None
    for text, nearest in (("20:26+stacks", "'20:25+stacks'"), ("+20:120+stacks", "'+20:25+stacks'")):
        ((_, problem),) = ObserveOptions(profile_steps=text).problems()
        assert "at most 5 steps" in problem.rule
        assert problem.nearest == f"observe.profile_steps={nearest}"
    write_request(tmp_path, 6, stacks=True)
    assert take_request(tmp_path) is None


def test_only_the_own_request_is_withdrawn(tmp_path: Path) -> None:
    first = write_request(tmp_path, 3, stacks=False)
    assert take_request(tmp_path) is not None
    second = write_request(tmp_path, 4, stacks=False)
    assert not withdraw_request(tmp_path, first)
    assert request_path(tmp_path).exists()
    assert withdraw_request(tmp_path, second)
    assert not request_path(tmp_path).exists()
    assert not withdraw_request(tmp_path, second)
    for content in ("{", '{"num_steps": 3}', "[]"):
        request_path(tmp_path).write_text(content)
        assert not withdraw_request(tmp_path, second)
