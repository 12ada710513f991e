"""The load of host and process while something goes on, and devices by readers."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from fake_device import FakeDevice, in_place_of_the_cpu
from procs import wait_until

from unisono.observe import system_monitor
from unisono.observe.events import Event, EventLog, read_events
from unisono.observe.system_monitor import SystemMonitor, device_readers

SCHEDSTAT = Path("/proc/self/schedstat")


def sampled(folder: Path, count: int = 1, **options: Any) -> list[Event]:
    path = folder / "events.jsonl"
    with EventLog(path, rank=0, run_id="r", attempt=1) as log:
        monitor = SystemMonitor(log, step=lambda: 7, **{"every_s": 0.3, "with_host": True, "readers": {}, **options})
        end = time.thread_time() + 0.4
        while time.thread_time() < end:
            pass
        wait_until(lambda: len(read_events(path).events) >= count, "samples")
        monitor.close()
        monitor.close()
        taken = len(read_events(path).events)
        time.sleep(0.5)
        assert len(read_events(path).events) == taken
    return list(read_events(path).events)


def test_a_process_that_computes(tmp_path: Path) -> None:
    events = sampled(tmp_path)
    assert {event["kind"] for event in events} == {"system"}
    assert {event["step"] for event in events} == {7}
    assert max(event["sys/process_cpus"] for event in events) > 0.2
    assert max(event["sys/cpu_frac"] for event in events) > 0.05
    assert all(
        0 <= event[name] <= 1 for event in events for name in ("sys/cpu_frac", "sys/iowait_frac", "sys/memory_frac")
    )
    assert all(event["sys/network_sent_bytes_per_s"] >= 0 for event in events)


def test_the_first_sample_of_a_host_is_since_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = psutil.cpu_times()
    zeros = dict.fromkeys(times._fields, 0.0)
    readings = iter([{}, {"user": 1.0, "guest": 1.0, "idle": 2.0, "iowait": 1.0}, {"user": 5.0, "guest": 5.0}])
    last: dict[str, float] = {}

    def cpu_times() -> Any:
        last.update(next(readings, {}))
        return type(times)(**(zeros | last))

    monkeypatch.setattr(system_monitor.psutil, "cpu_times", cpu_times)
    first, second = sampled(tmp_path, 2)[:2]
    assert (first["sys/cpu_frac"], first["sys/iowait_frac"]) == (0.25, 0.25)
    assert (second["sys/cpu_frac"], second["sys/iowait_frac"]) == (1.0, 0.0)


def test_one_rank_of_a_host_samples_the_host(tmp_path: Path) -> None:
    (event, *_) = sampled(tmp_path, with_host=False)
    found = [name for name in event if name.startswith("sys/")]
    assert found == ["sys/process_cpus", *(["sys/core_wait_frac"] if SCHEDSTAT.exists() else [])]
    assert event["host"] == socket.gethostname()


@pytest.mark.skipif(not SCHEDSTAT.exists(), reason="this system does not tell how long a thread waits for a core")
def test_threads_that_share_a_core_wait_for_it(tmp_path: Path) -> None:
    def work() -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        events.extend(sampled(tmp_path))

    events: list[Event] = []
    other = subprocess.Popen(
        [sys.executable, "-c", "import os\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nwhile True: pass"]
    )
    try:
        thread = threading.Thread(target=work)  # whose affinity ends with it
        thread.start()
        thread.join()
    finally:
        other.kill()
        other.wait()
    assert max(event["sys/core_wait_frac"] for event in events) > 0.1
    assert all(0 <= event["sys/core_wait_frac"] <= 1 for event in events)


def test_devices_are_read_by_other_packages_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def good(index: int) -> Mapping[str, float]:
        return {"util_frac": 0.5 + index}

    def bad(index: int) -> Mapping[str, float]:
        raise OSError("no such device")

    class Entry:
        def __init__(self, name: str, reader: Any) -> None:
            self.name, self.load = name, lambda: reader

    entries = [Entry("good", good), Entry("bad", bad)]
    monkeypatch.setattr(
        system_monitor, "entry_points", lambda group: entries if group == "unisono.device_readers" else []
    )
    device = FakeDevice(health=ImportError("no bindings"))
    with caplog.at_level(logging.WARNING), in_place_of_the_cpu(device):
        readers = device_readers(torch.device("cpu", 3))
        assert list(readers) == ["cpu", "good", "bad"]
        events = sampled(tmp_path, 2, readers=readers)
    assert {event["sys/device_util_frac"] for event in events} == {3.5}
    assert caplog.text.count("device reader bad is left out: OSError: no such device") == 1
    assert caplog.text.count("device reader cpu is left out: ImportError: no bindings") == 1


def test_a_reader_that_hangs_holds_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def hanging() -> Mapping[str, float]:
        begun.set()
        assert go_on.wait(60)
        return {"util_frac": 1.0}

    monkeypatch.setattr(system_monitor, "_CLOSE_S", 0.1)
    path = tmp_path / "events.jsonl"
    with caplog.at_level(logging.WARNING), EventLog(path, rank=0, run_id="r", attempt=1) as log:
        monitor = SystemMonitor(log, every_s=0.01, step=lambda: 7, with_host=False, readers={"hanging": hanging})
        assert begun.wait(60)
        monitor.close()
        go_on.set()
        wait_until(lambda: "unisono-monitor" not in {thread.name for thread in threading.enumerate()}, "its end")
    assert "the monitor is left behind" in caplog.text
    assert read_events(path).events == ()  # what it has read since then comes too late


@pytest.mark.parametrize("error", [NotImplementedError("no /proc/diskstats"), PermissionError("/proc/net/dev")])
def test_a_host_that_tells_nothing_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def refused() -> None:
        raise error

    monkeypatch.setattr(psutil, "disk_io_counters", refused)
    with caplog.at_level(logging.WARNING), EventLog(tmp_path / "e", rank=0, run_id="r", attempt=1) as log:
        SystemMonitor(log, every_s=0.01, step=lambda: 7, with_host=True, readers={}).close()
    assert f"the monitor stops: {type(error).__name__}" in caplog.text


def test_the_cpu_is_no_device_to_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_monitor, "entry_points", lambda group: pytest.fail("it was looked for readers"))
    assert device_readers(torch.device("cpu")) == {}
