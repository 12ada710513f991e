"""``unisono top``: a run that goes on, one that has ended, torn files, and a folder without events."""

from __future__ import annotations

import math
import re
import time
from pathlib import Path
from typing import Any

import pytest
from commands import Desk
from event_streams import write_events

from unisono.observe.events import encode, events_path
from unisono.observe.rank_status import rank_statuses


def add(run_dir: Path, rank: int, *lines: bytes) -> None:
    with events_path(run_dir, rank).open("ab") as file:
        file.write(b"".join(lines))


def system(rank: int, **fields: Any) -> dict[str, Any]:
    return {"kind": "system", "t": time.time(), "rank": rank, "step": 300, "host": f"n{rank}", **fields}


def test_ranks_of_a_run_that_goes_on(desk: Desk, tmp_path: Path) -> None:
    fields = {"train/loss": 2.5, "perf/step_s": 0.1, "mem/now_bytes": 2**30, "mem/limit_bytes": 2**32}
    run = write_events(
        tmp_path / "run", lambda rank, step: {"forward": 0.08, "data_wait": 0.02}, steps=300, fields=fields
    )
    add(run, 0, encode(system(0, **{"sys/process_cpus": 1.5})) + b"\n")
    add(run, 1, b'{"kind":"step","st')
    done = desk.here("top", str(run), "--once")
    assert done.code == 0, done.err
    header, *rows = done.out.splitlines()
    assert header.split() == [
        "rank",
        "step",
        "loss",
        "step",
        "time",
        "data",
        "comm",
        "memory",
        "CPUs",
        "last",
        "event",
    ]
    assert rows[0].split()[:9] == ["0", "300", "2.5", "100", "ms", "20%", "0%", "1/4", "GiB"]
    assert " 1.5 " in rows[0]
    assert "ago" in rows[1]
    ranks = desk.here("top", str(run), "--json").json["ranks"]
    assert [(rank["rank"], rank["step"]["step"], rank["ended"]) for rank in ranks] == [(0, 300, ""), (1, 300, "")]


DEVICE = {
    "sys/device_util_frac": 0.98,
    "sys/device_power_w": 612.4,
    "sys/device_power_limit_w": 700.0,
    "sys/device_temperature_c": 84.0,
    "sys/device_clock_hz": 1.41e9,
    "sys/device_max_clock_hz": 1.98e9,
    "sys/device_memory_bytes": 61.25 * 2**30,
    "sys/device_throttled": 1.0,
    "sys/device_slowdowns": "hardware thermal slowdown, power brake",
    "sys/device_uncorrected_errors": 2.0,
}
HOST = {
    "sys/cpu_frac": 0.42,
    "sys/iowait_frac": 0.031,
    "sys/memory_frac": 0.5,
    "sys/disk_read_bytes_per_s": 1.5e9,
    "sys/disk_written_bytes_per_s": 0.0,
    "sys/network_sent_bytes_per_s": 12.5e6,
    "sys/network_received_bytes_per_s": 999e3,
}


def test_devices_and_hosts(desk: Desk, tmp_path: Path) -> None:
    fields = {
        **{"train/loss": 0.06667, "perf/step_s": 0.12345},
        **{"mem/now_bytes": 61.25 * 2**30, "mem/limit_bytes": 79.25 * 2**30},
    }
    run = write_events(tmp_path / "run", lambda rank, step: {"forward": 0.08}, steps=9, fields=fields)
    cool = {**DEVICE, "sys/device_throttled": 0.0, "sys/device_slowdowns": "", "sys/device_uncorrected_errors": 0.0}
    add(
        run, 0, encode(system(0, **DEVICE, **HOST, **{"sys/process_cpus": 1.5}, host="node-17.cluster.example")) + b"\n"
    )
    add(run, 1, encode(system(1, **cool, **{"sys/process_cpus": 1.5})) + b"\n")
    out = desk.here("top", str(run), "--once").out
    ranks, devices, hosts = (block.splitlines() for block in out.strip("\n").split("\n\n"))
    assert len(ranks) == 3
    assert devices[0].split() == ["rank", "util", "power", "clock", "temp", "memory", "ECC", "err", "throttled"]
    assert re.split("  +", devices[1]) == [
        *("0", "98%", "612/700 W", "1.41 GHz", "84 °C", "61.2 GiB", "2"),
        "hardware thermal, p…",
    ]
    assert re.split("  +", devices[2])[-1] == "0"
    assert re.split("  +", hosts[0]) == [
        *("host", "CPU", "I/O wait", "memory", "disk read", "written", "net sent", "received")
    ]
    assert re.split("  +", hosts[1]) == [
        "node-17.cluster",
        "42%",
        "3%",
        "50%",
        "1.5GB/s",
        "0B/s",
        "12.5MB/s",
        "999kB/s",
    ]
    assert len(hosts) == 2  # one rank of a host samples it
    assert max(map(len, out.splitlines())) <= 80


def links(rank: int, *axes: Any, **fields: Any) -> dict[str, Any]:
    return {"kind": "links", "t": 0.0, "rank": rank, "step": 300, "steps": 100, "wall_s": 10.0, "axes": axes, **fields}


SHARD = {"axis": "dp", "group": "shard", "transport": "nccl", "ranks": 8, "hosts": 2, "wire_bytes": 2.5e11}
TENSOR = {"axis": "tp", "group": "tp", "transport": "nccl", "ranks": 2, "hosts": 1, "wire_bytes": 1e9}


def test_communication_by_axis(desk: Desk, tmp_path: Path) -> None:
    def told(rank: int, step: int) -> list[dict[str, Any]]:
        rows = {100: [TENSOR], 200: [{**SHARD, "expected_s": 5.0}, TENSOR]}
        return [links(rank, *rows[step], step=step)] if rank == 0 and step in rows else []

    run = write_events(tmp_path / "run", lambda rank, step: {"forward": 0.08}, steps=290, extra=told)
    add(run, 0, encode(system(0, **{"sys/cpu_frac": 0.5})) + b"\n")
    out = desk.here("top", str(run), "--once").out
    *_, table = (block.splitlines() for block in out.strip("\n").split("\n\n"))
    assert [re.split("  +", line) for line in table] == [
        ["rank", "axis", "rate", "measured", "used", "up to step"],
        ["0", "dp", "25GB/s", "50GB/s", "50%", "200"],
        ["0", "tp", "100MB/s", "200"],
    ]
    first, second = desk.here("top", str(run), "--json").json["ranks"]
    assert (first["links"]["step"], second["links"]) == (200, {})
    live = write_events(tmp_path / "live", lambda rank, step: {"forward": 0.08}, ranks=1)
    end = {"kind": "run_end", "t": 9.0, "rank": 0, "attempt": 1, "reason": "finished"}
    add(live, 0, encode(links(0, TENSOR)) + b"\n", encode(end) + b"\n")
    assert "100MB/s" in desk.here("top", str(live)).out


def test_a_link_that_was_never_measured_has_no_share(desk: Desk, tmp_path: Path) -> None:
    run = write_events(tmp_path / "run", lambda rank, step: {"forward": 0.08}, ranks=1)
    add(run, 0, encode(links(0, TENSOR)) + b"\n")
    table = desk.here("top", str(run), "--once").out.strip("\n").split("\n\n")[-1].splitlines()
    assert [re.split("  +", line) for line in table] == [
        ["rank", "axis", "rate", "up to step"],
        ["0", "tp", "100MB/s", "300"],
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"axes": "text"},
        {"axes": [3, None, {"axis": "dp"}, {**TENSOR, "axis": "\x1b[31m"}]},
        {"axes": [{**TENSOR, "wire_bytes": 10**400, "expected_s": "x"}]},
        {"wall_s": 0.0},
        {"wall_s": 1e-320, "axes": [{**TENSOR, "expected_s": 1e-320}]},
        {"steps": None},
        {"step": "\x1b[31m"},
    ],
)
def test_traffic_of_others_is_no_trouble(desk: Desk, tmp_path: Path, fields: dict[str, Any]) -> None:
    run = write_events(tmp_path / "run", lambda rank, step: {"forward": 0.08})
    add(run, 0, encode(links(0, TENSOR) | fields) + b"\n")
    for end in ("--once", "--json"):
        done = desk.here("top", str(run), end)
        assert done.code == 0, done.err
        assert "\x1b" not in done.out


def test_figures_that_no_sample_has_take_no_room(desk: Desk, tmp_path: Path) -> None:
    run = write_events(tmp_path / "run", lambda rank, step: {"forward": 0.08}, steps=9)
    add(run, 0, encode(system(0, **{"sys/device_power_w": 70.0, "sys/cpu_frac": 0.5}, host=None)) + b"\n")
    _, devices, hosts = (
        block.splitlines() for block in desk.here("top", str(run), "--once").out.strip("\n").split("\n\n")
    )
    assert [line.split() for line in devices] == [["rank", "power"], ["0", "70", "W"]]
    assert [re.split("  +", line) for line in hosts] == [["host", "CPU"], ["of rank 0", "50%"]]


@pytest.mark.parametrize("value", [math.nan, math.inf, 10**400, "text \x1b[31m", None, [1], {"a": 1}, True])
def test_samples_of_others_are_no_trouble(desk: Desk, tmp_path: Path, value: Any) -> None:
    run = write_events(tmp_path / "run", lambda rank, step: {"forward": 0.08}, steps=9)
    names = (*DEVICE, *HOST, "host", "step", "sys/process_cpus")
    for rank, changed in ((0, names), (1, ("sys/device_slowdowns", "host", "t"))):
        sample = system(rank, **DEVICE, **HOST) | dict.fromkeys(changed, value)
        add(run, rank, encode(sample) + b"\n")
    for end in ("--once", "--json"):
        done = desk.here("top", str(run), end)
        assert done.code == 0, done.err
        assert "\x1b" not in done.out


def test_a_live_view_has_devices_and_hosts_too(desk: Desk, tmp_path: Path) -> None:
    run = write_events(tmp_path / "run", lambda rank, step: {"forward": 0.08}, ranks=1)
    add(run, 0, encode(system(0, **DEVICE, **HOST)) + b"\n")
    add(run, 0, encode({"kind": "run_end", "t": 9.0, "rank": 0, "reason": "finished"}) + b"\n")
    done = desk.here("top", str(run))
    assert done.code == 0, done.err
    assert all(text in done.out for text in ("612/700 W", "1.5GB/s", "finished"))


def test_a_run_that_has_ended_ends_the_command(desk: Desk, tmp_path: Path) -> None:
    run = write_events(tmp_path / "run", lambda rank, step: {"forward": 0.08}, ranks=1)
    end = {"kind": "run_end", "t": 9.0, "rank": 0, "attempt": 1, "reason": "finished"}
    add(run, 0, encode(end) + b"\n")
    add(run, 0, encode({"kind": "sample", "t": 9.5, "rank": 0, "attempt": 1, "text": "def"}) + b"\n")
    done = desk.here("top", str(run))
    assert (done.code, "finished" in done.out) == (0, True), done.err


@pytest.mark.parametrize("mode", ["--once", "--json"])
def test_a_time_between_looks_where_there_is_one(desk: Desk, tmp_path: Path, mode: str) -> None:
    run = write_events(tmp_path / "run", lambda rank, step: {"forward": 0.08}, ranks=1)
    done = desk.here("top", str(run), mode, "--every-s", "2.0")
    assert done.code == 2
    assert f"--every-s with {mode}" in done.out + done.err
    assert "it would have no effect" in done.out + done.err
    assert desk.here("top", str(run), mode).code == 0


def test_a_second_attempt_has_not_ended(tmp_path: Path) -> None:
    run = write_events(tmp_path / "run", lambda rank, step: {"forward": 0.08}, ranks=1)
    end = {"kind": "run_end", "t": 9.0, "rank": 0, "reason": "failed"}
    start = {"kind": "run_start", "t": 10.0, "rank": 0, "attempt": 2}
    add(run, 0, encode(end) + b"\n", encode(start) + b"\n")
    (status,) = rank_statuses(run)
    assert (status.ended, status.step) == ("", {})  # the steps are of the attempt before


def test_a_folder_without_events(desk: Desk, tmp_path: Path) -> None:
    done = desk.here("top", str(tmp_path), "--once")
    assert done.code == 2
    assert "has no events of a rank" in done.err


def test_a_file_of_another_run_is_said(desk: Desk, tmp_path: Path) -> None:
    run = write_events(tmp_path / "run", lambda rank, step: {"forward": 0.08}, ranks=1)
    text = events_path(run, 0).read_text().replace('"run":"run"', '"run":"other"')
    events_path(run, 3).write_text(text)
    note = "rank00003.jsonl: left out, as its events are of the run other, the others of run"
    done = desk.here("top", str(run), "--once")
    assert (len(done.out.splitlines()), done.out.splitlines()[-1]) == (3, note)
    assert desk.here("top", str(run), "--json").json["notes"] == [note]
