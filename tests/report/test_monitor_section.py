"""The section about the monitor's samples: the curves that are there, of the ranks that stand out, at a bounded size."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from attempts import Stream
from report_pages import CHROMIUM, PHONE_PX, charts, in_browser, page_width, words
from tools import missing

from unisono.report import write_report

TITLE = "Load of processes, devices and hosts"
EVIL = "<b onclick=alert(1)>"
Sample = Callable[[int, int], Mapping[str, Any]]  # (rank, number) -> fields


def sampled(run_dir: Path, sample: Sample, *, ranks: int = 2, count: int = 12, attempts: int = 1) -> Path:
    """Runs of ``ranks`` ranks with ``count`` samples in each attempt, 10 s apart."""
    for rank in range(ranks):
        stream = Stream(run_dir, rank)
        for attempt in range(attempts):
            stream.start(stream.now_s + 1000.0 * (attempt > 0), loads_s=0.0, resumed=1 if attempt else None)
            for number in range(count):
                stream.now_s += 10.0
                stream.emit("step", step=number + 1, **{"train/loss": 1.0})
                stream.emit("system", step=number + 1, **sample(rank, number))
        stream.emit("run_end", reason="finished", step=count)
    return run_dir


def full(rank: int, number: int) -> dict[str, Any]:
    """A sample of a device, and on even ranks of the host."""
    slowed = rank == 1 and number % 2 == 0
    host = {
        **{"sys/cpu_frac": 0.5, "sys/disk_read_bytes_per_s": 5e8, "sys/disk_written_bytes_per_s": 1e6},
        **{"sys/network_sent_bytes_per_s": 2e6, "sys/network_received_bytes_per_s": 3e6},
    }
    return {
        **{"host": f"n{rank // 2}", "sys/process_cpus": 1.0 + rank, "sys/core_wait_frac": 0.25},
        **{"sys/device_util_frac": 0.9, "sys/device_power_w": 300.0 + number, "sys/device_clock_hz": 1.5e9},
        **{"sys/device_memory_bytes": 2.0**33, "sys/device_throttled": float(slowed)},
        **({"sys/device_slowdowns": "power brake"} if slowed else {}),
        **{"sys/device_uncorrected_errors": 2.0 * rank},
        **(host if rank % 2 == 0 else {}),
    }


def drawn(page: str) -> dict[str, Any]:
    return {name.removeprefix("monitor_"): chart for name, chart in charts(page).items() if name.startswith("monitor_")}


def test_curves_by_rank_and_by_host(tmp_path: Path) -> None:
    page = write_report(sampled(tmp_path, full, ranks=4)).read_text()
    found = drawn(page)
    assert list(found) == [
        *("cpus", "core_wait", "device", "power", "clock", "throttled", "device_memory", "host", "disk", "network")
    ]
    lines = {name: {line["name"]: line["y"] for line in chart["data"]} for name, chart in found.items()}
    assert lines["cpus"] == {f"rank {rank}": [1.0 + rank] * 12 for rank in range(4)}
    assert lines["core_wait"]["rank 0"] == [25.0] * 12
    assert lines["power"]["rank 2"] == [300.0 + number for number in range(12)]
    assert lines["clock"]["rank 1"] == [1.5] * 12
    assert lines["throttled"]["rank 1"] == [100.0, 0.0] * 6
    assert lines["device_memory"]["rank 1"] == [8.0] * 12
    assert lines["host"] == {"n0": [50.0] * 12, "n1": [50.0] * 12}
    assert lines["disk"]["n1 read"] == [500.0] * 12
    assert list(lines["network"]) == ["n0 sent", "n0 received", "n1 sent", "n1 received"]
    assert found["power"]["data"][0]["x"] == [10.0 * number for number in range(12)]
    assert found["power"]["layout"]["xaxis"]["title"]["text"] == "s since the first sample"
    text = words(page)
    assert TITLE in text
    assert "device of host samples in which it was throttled mostly because of uncorrected memory errors" in text
    assert "rank 1 n0 50% power brake 2 rank 2 n1 0% 4 rank 3 n1 0% 6" in text


def test_a_run_without_samples_has_no_such_section(tmp_path: Path) -> None:
    stream = Stream(tmp_path)
    stream.start(0.0, loads_s=0.0)
    stream.steps(1, 9)
    assert TITLE not in write_report(tmp_path).read_text()


def test_what_no_sample_has_is_not_drawn(tmp_path: Path) -> None:
    def sample(rank: int, number: int) -> Mapping[str, Any]:
        return {"sys/process_cpus": 1.0, "sys/core_wait_frac": 0.001, "sys/cpu_frac": 0.25}

    page = write_report(sampled(tmp_path, sample, ranks=1)).read_text()
    found = drawn(page)
    assert list(found) == ["cpus", "host"]
    assert [(line["name"], line["showlegend"]) for line in found["host"]["data"]] == [("host of rank 0", False)]
    assert "throttled" not in words(page)


def test_attempts_are_not_joined_by_a_line(tmp_path: Path) -> None:
    page = write_report(sampled(tmp_path, full, ranks=1, attempts=2)).read_text()
    (line,) = drawn(page)["power"]["data"]
    assert line["y"] == [*(300.0 + n for n in range(12)), None, *(300.0 + n for n in range(12))]
    assert line["x"] == sorted(line["x"])
    assert line["x"][13] - line["x"][11] > 15  # minutes


def test_of_many_ranks_those_that_stand_out_are_drawn_and_the_page_stays_small(tmp_path: Path) -> None:
    def sample(rank: int, number: int) -> Mapping[str, Any]:
        noise = (rank * 7919 + number * 104729) % 1000 / 1000  # nothing that compresses well
        rates = {name: 1e9 * noise for name in full(0, 0) if name.endswith("_per_s")}
        cpus = {3: 0.1, 17: 9.0}.get(rank, 1.0) + 0.01 * noise
        return {**full(2 * rank, number), **rates, "host": f"n{rank}", "sys/process_cpus": cpus, "sys/cpu_frac": noise}

    path = write_report(sampled(tmp_path, sample, ranks=24, count=500))
    found = drawn(path.read_text())
    names = [line["name"] for line in found["cpus"]["data"]]
    assert len(names) == 8
    assert {"rank 3", "rank 17"} <= set(names)
    assert max(len(line["x"]) for chart in found.values() for line in chart["data"]) <= 200
    assert sum(len(line["x"]) for chart in found.values() for line in chart["data"]) <= 10 * 8 * 200
    assert "Of more than 8 curves those with the lowest and the highest mean are drawn." in words(path.read_text())
    assert path.stat().st_size < 1 << 20


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 1e300, 10**400, "text", None, [1], {"a": 1}, True, EVIL])
def test_samples_of_others_are_no_trouble(tmp_path: Path, value: Any) -> None:
    def sample(rank: int, number: int) -> Mapping[str, Any]:
        kept = full(0, number)
        return dict.fromkeys((*kept, "sys/device_slowdowns", "t")[rank * 5 :: 2], value) | ({} if rank else kept)

    page = write_report(sampled(tmp_path, sample)).read_text()
    assert EVIL not in page
    assert "NaN" not in "".join(str(chart) for chart in drawn(page).values())


@pytest.mark.skipif(
    CHROMIUM is None and bool(missing("chromium")),
    reason="no chromium on this machine: the section is NOT tested in a browser",
)
def test_the_section_in_a_browser(tmp_path: Path) -> None:
    def sample(rank: int, number: int) -> Mapping[str, Any]:
        return {**full(rank, number), "host": EVIL}

    path = write_report(sampled(tmp_path / "run", sample, ranks=4))
    count = len(charts(path.read_text()))
    page, complaints = in_browser(path, tmp_path / "profile")
    assert complaints == []
    assert f'data-drawn="{count}"' in page
    assert page_width(path, tmp_path, width=PHONE_PX) == PHONE_PX
