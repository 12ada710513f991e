"""Traces are read piece by piece: any cut gives the same events; files that are no traces are refused with their reason."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from traces import TraceBuilder

from unisono.errors import DataError
from unisono.profile import read_trace, trace_file
from unisono.profile.trace_file import KERNEL, OPERATOR, Trace


def sample() -> TraceBuilder:
    trace = TraceBuilder(distributedInfo={"rank": 3, "world_size": 8}, deviceProperties=[{"id": 0, "name": "H{1}"}])
    trace.op('odd "name" \\ with } and {', 1, 2, dims=[[2, 3], []], seq=4)
    trace.op("aten::mm", 5.25, 3, dims=[[4, 5], [5, 6]], seq=5, backward=True)
    trace.launch(6, 11, "gemm", 7, 2).memory(8, 64, -128, total=5)
    trace.events.append({"ph": "s", "cat": "fwdbwd", "name": "fwdbwd", "id": 1, "pid": 7, "tid": 1, "ts": 3})
    trace.add("PyTorch Profiler (0)", 0, 9, cat="Trace", pid="Spans", tid="x")
    return trace


def facts(trace: Trace) -> list[Any]:
    names = [trace.names[at] for at in trace.name]
    shapes = [json.loads(trace.shapes[at]) if at >= 0 else None for at in trace.shape]
    columns = (trace.kind, trace.start_us, trace.duration_us, trace.sequence, trace.correlation)
    return [names, shapes, *(column.tolist() for column in columns), trace.memory.num_bytes.tolist(), trace.num_events]


def test_what_is_read(tmp_path: Path) -> None:
    trace = sample().read(tmp_path)
    names, shapes, kinds, starts, durations, sequences, correlations, sizes, _ = facts(trace)
    assert names == ['odd "name" \\ with } and {', "aten::mm", "cudaLaunchKernel", "gemm"]
    assert shapes[:2] == [[[2, 3], []], [[4, 5], [5, 6]]]
    assert (kinds[0], kinds[3]) == (OPERATOR, KERNEL)
    assert (starts, durations) == ([1, 5.25, 6, 7], [2, 3, 1, 2])
    assert (sequences[:2], correlations[2:], sizes) == ([8, 11], [11, 11], [-128])
    assert trace.meta["distributedInfo"]["rank"] == 3


@pytest.mark.parametrize("size", [1, 7, 64, 333])
def test_pieces_of_any_size_give_the_same_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    whole = facts(sample().read(tmp_path))
    monkeypatch.setattr(trace_file, "_PIECE_BYTES", size)
    assert facts(sample().read(tmp_path)) == whole


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("as_list", [False, True])
def test_other_forms_of_the_same_trace(tmp_path: Path, indent: int | None, as_list: bool) -> None:
    built = sample()
    whole = facts(built.read(tmp_path))
    text = json.dumps(built.events if as_list else {**built.meta, "traceEvents": built.events}, indent=indent)
    packed = tmp_path / "trace.json.gz"
    packed.write_bytes(gzip.compress(text.encode()))
    assert facts(read_trace(packed))[:-1] == whole[:-1]


def refused(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_trace(path)
    assert "export_chrome_trace" in str(caught.value)
    return caught.value.problems[0].given


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "has no events"),
        (b"   ", "no JSON object or list"),
        (b'{"traceEvents": []}', "has no events"),
        (b"\x00\x01\x02", "no JSON object or list"),
        (b"PK\x03\x04", "no JSON object or list"),
        (b'"text"', "no JSON object or list"),
        (b"}" * 50, "no JSON object or list"),
        (b'{"a": 1}}}}', "closes more than it opens"),
        (sample().text()[:-40].encode(), "cut short"),
        (gzip.compress(sample().text().encode())[:-20], "cannot be read"),
        (b"\x1f\x8b\x08\x00garbage that is no gzip", "cannot be read"),
        (b'{"traceEvents": [' + b'{"ph": 3},' * 9 + b'{"ph": 4}]}', "10 unreadable events of 10"),
    ],
)
def test_what_is_no_trace(tmp_path: Path, content: bytes, reason: str) -> None:
    assert reason in refused(tmp_path / "trace.json", content)


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = sample().text().encode()
    for name, limit, reason in [
        ("MAX_TRACE_BYTES", 100, "more than 100 bytes"),
        ("MAX_TRACE_EVENTS", 3, "more than 3 events"),
        ("MAX_TRACE_EVENT_BYTES", 40, "an event of more than 40 bytes"),
        ("MAX_TRACE_NAMES", 1, "more than 1 names"),
        ("MAX_TRACE_TEXT_BYTES", 9, "more than 9 bytes of names, shapes and collectives"),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(trace_file, name, limit)
            patch.setattr(trace_file, "_PIECE_BYTES", 64)
            assert reason in refused(tmp_path / "trace.json", text), name


def test_events_of_wrong_types_are_counted_and_left_out(tmp_path: Path) -> None:
    trace = sample()
    trace.events += [
        {"ph": "X", "cat": "cpu_op", "name": "a", "ts": "soon", "dur": 1},
        {"ph": "X", "cat": "cpu_op", "name": "b", "ts": -5, "dur": 1},
        {"ph": "X", "cat": "cpu_op", "name": "c", "ts": 5, "dur": 1e300},
        {"ph": "X", "cat": "kernel", "name": "d", "ts": 5, "dur": 1, "args": {"correlation": 1 << 70}},
        {"ph": "i", "name": "[memory]", "args": [1]},
    ]
    read = trace.read(tmp_path)
    assert set(read.names).isdisjoint("abcd")
    assert read.num_damaged == 3


@pytest.mark.parametrize("seed", range(6))
def test_random_damage_ends_in_a_trace_or_an_error(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        text = bytearray(sample().text().encode())
        for _ in range(rng.randint(1, 5)):
            at = rng.randrange(len(text))
            text[at : at + rng.randint(0, 9)] = bytes(rng.randrange(256) for _ in range(rng.randint(0, 9)))
        path = tmp_path / "trace.json"
        path.write_bytes(text)
        try:
            read_trace(path)
        except DataError:
            continue


def test_a_folder_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_trace(tmp_path)


PEAK = """
import sys
from pathlib import Path
from unisono.diagnose import diagnose, read_trace_facts
from unisono.observe.host_memory import PeakMemory
facts = read_trace_facts(Path(sys.argv[1]))
diagnose(facts)
print(facts.profiles[0].num_events, PeakMemory().read() >> 20)
"""


@pytest.mark.full
def test_a_large_trace_fits_into_little_memory(tmp_path: Path) -> None:
    """200 MiB of JSON, within 512 MiB."""
    events = []
    for at in range(0, 200_000, 4):
        events.append(f'{{"ph":"X","cat":"cpu_op","name":"aten::mm","pid":1,"tid":1,"ts":{at},"dur":3,"args":')
        events[-1] += f'{{"External id":{at},"Input Dims":[[64,{at % 700}],[{at % 700},64]],"Ev Idx":{at}}}}}'
        events.append(f'{{"ph":"i","cat":"cpu_instant_event","name":"[memory]","pid":1,"tid":1,"ts":{at},"args":')
        events[-1] += f'{{"Addr":{at % 977},"Bytes":{64 if at % 8 else -64},"Device Type":0}}}}'
    path = tmp_path / "large.json"
    body = ",\n".join(events).encode()
    with path.open("wb") as file:
        file.write(b'{"traceEvents": [\n' + body)
        while file.tell() < 200 << 20:
            file.write(b",\n" + body)
        file.write(b"]}")
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(path)], capture_output=True, text=True, check=True, timeout=170
    )
    num_events, peak_mib = map(int, done.stdout.split())
    assert num_events >= 1_500_000
    assert peak_mib < 512
