"""Sections about ranks, attempts and the parent run: from events whose figures are known, and from events that are wrong."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from attempts import T0, Stream
from event_streams import write_events
from PIL import Image
from report_pages import (
    CHROMIUM,
    PHONE_PX,
    boxes_of_charts,
    charts,
    in_browser,
    overlap,
    page_width,
    picture,
    words,
)
from tools import missing

from unisono.observe.events import encode, events_path
from unisono.profile import RankProfile
from unisono.profile.rank_profile import (
    MEMORY_CATEGORIES,
    Clock,
    MemoryProfile,
    OperatorTime,
    PhaseSpan,
    PhaseTime,
    StepTime,
    SyncPoint,
    profile_folder,
    read_profile,
)
from unisono.report import write_report
from unisono.report.render import make_report

PHASES_S = {
    "data_wait": 0.02,
    "forward": 0.1,
    "backward": 0.2,
    "bubble": 0.05,
    "comm_exposed_dp": 0.03,
    "optimizer": 0.01,
}
EVIL = "<b onclick=alert(1)>"


def make_run(
    run_dir: Path, *, ranks: int = 4, evil: str = "", traffic: dict[str, Any] | None = None, **start: Any
) -> Path:
    """Two attempts on ``ranks`` ranks, two pipeline stages: the second stage waits longer. Killed at 30, resumed from 20.
    ``traffic`` has more fields of the events ``links``."""
    plan = {
        "mesh": {"pp": 2, "dp_replicate": ranks // 2},
        "pipeline": {"schedule": "1f1b"},
        "sync": {"kind": "dist_sync"},
    }
    for rank in range(ranks):
        stream = Stream(run_dir, rank)
        held = {"parameters": 1 << 30, "gradients": 1 << 30, "optimizer": 2 << 30}
        given = {"plan": plan, "held_bytes": held, "config": {"optim.lr": 0.1}, "environment": {"torch": "2"}, **start}
        for first, last in ((1, 30), (21, 60)):
            resumed = None if first == 1 else first - 1
            stream.start(stream.now_s + 5.0 * (first > 1), loads_s=2.0, resumed=resumed, **given)
            for step in range(first, last + 1):
                phases = PHASES_S | {"bubble": 0.05 + 0.05 * (rank >= ranks // 2)}
                window_s = sum(phases.values())
                stream.now_s += window_s
                shares = {f"time/{name}_frac": seconds / window_s for name, seconds in phases.items()}
                shares |= {"time/comm_exposed_frac": 0.03 / window_s, "time/other_frac": 0.0, "time/window_s": window_s}
                loading = {"time/loader_read_s": 0.03, "time/loader_transform_s": 0.05, "time/loader_collate_s": 0.0}
                memory = {"mem/peak_bytes": (6 + rank) * 2**30, "mem/limit_bytes": 80 * 2**30}
                stream.emit("step", step=step, **shares, **memory, **loading, **{"train/loss": 1.0 / step})
            links = [
                {"peer": f"host{peer}{evil}", "sent_bytes": 2**20 * (rank + 1), "received_bytes": 2**21}
                for peer in range(2)
            ]
            stream.emit("links", step=last, **{"steps": 10, "wall_s": 10.0, "links": links} | (traffic or {}))
        stream.emit("run_end", reason="finished", step=60)
    return run_dir


def rows(page: str, title: str) -> list[list[str]]:
    """The cells of the tables under a heading, with their heads."""
    part = page[page.index(f"<h2>{title}</h2>") + 4 :].partition("<h2>")[0]
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", part, re.DOTALL)]


def test_the_step_of_each_rank(tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path)).read_text()
    bars = {bar["name"]: bar for bar in charts(page)["steps"]["data"]}
    assert bars["forward"]["y"] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert bars["forward"]["x"] == pytest.approx([100.0] * 4)
    assert bars["bubble"]["x"] == pytest.approx([50.0, 50.0, 100.0, 100.0])
    assert bars["comm exposed dp"]["x"] == pytest.approx([30.0] * 4)
    assert "comm exposed" not in bars  # its parts are there


def test_the_stages_of_a_pipeline(tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path)).read_text()
    bars = {bar["name"]: bar["x"] for bar in charts(page)["stages"]["data"]}
    assert bars["bubble"] == pytest.approx([100 * 0.05 / 0.41, 100 * 0.1 / 0.46], rel=1e-3)
    assert rows(page, "Pipeline stages")[1][:4] == ["stage 0 (2 ranks)", "24.4%", "48.8%", "12.2%"]
    assert "Schedule 1f1b." in words(page)


def test_the_stages_of_loading(tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path)).read_text()
    bars = {bar["name"]: bar["x"] for bar in charts(page)["loading"]["data"]}
    assert bars == {"read": [30.0] * 4, "transform": [50.0] * 4}
    assert rows(page, "Loading data")[:2] == [
        ["", "read", "transform", "collate", "waited"],
        ["rank 0", "30 ms", "50 ms", "0 ms", "20 ms"],
    ]


def test_memory_and_plan(tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path)).read_text()
    bars = {bar["name"]: bar["x"] for bar in charts(page)["memory"]["data"]}
    assert bars == {
        "parameters": [1.0] * 4,
        "gradients": [1.0] * 4,
        "optimizer": [2.0] * 4,
        "more than planned": [2.0, 3.0, 4.0, 5.0],
    }
    head, first, *_ = rows(page, "Memory and plan")
    assert head[-3:] == ["most in use", "more than planned", "there is (used)"]
    assert first == ["0", "1 GiB", "1 GiB", "2 GiB", "4 GiB", "6 GiB", "2 GiB", "80 GiB (8%)"]


def test_communication(tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path)).read_text()
    (matrix,) = charts(page)["links"]["data"]
    assert (matrix["x"], matrix["y"]) == (["host0", "host1"], [f"rank {rank}" for rank in range(4)])
    assert matrix["z"] == [[3.0, 3.0], [4.0, 4.0], [5.0, 5.0], [6.0, 6.0]]  # of the last attempt
    table = rows(page, "Communication")
    assert table[1] == ["0", "host0", "1 MiB", "2 MiB", "105kB/s", "210kB/s"]
    assert table[9] == ["rank", "exposed, dp", "of a step"]
    assert table[10] == ["0", "30 ms", "7%"]


def test_communication_by_axis(tmp_path: Path) -> None:
    kinds = {"transport": "gloo", "ranks": 2, "hosts": 1, "collectives": 120}
    traffic = {
        "steps": 60,
        "axes": [
            {"axis": "tp", "group": "tp", **kinds, "payload_bytes": 3e7, "wire_bytes": 6e7},
            {"axis": "dp", "group": "shard", **kinds, "payload_bytes": 12e7, "wire_bytes": 6e7, "expected_s": 2.5},
            {"axis": "dp", "group": "all", **kinds, "hosts": 2, "payload_bytes": 6e2, "wire_bytes": 6e2},
        ],
    }
    page = write_report(make_run(tmp_path, traffic=traffic)).read_text()
    (matrix,) = charts(page)["links"]["data"]
    assert (matrix["x"], matrix["y"]) == (["dp: all", "dp: shard", "tp"], [f"rank {rank}" for rank in range(4)])
    assert matrix["z"] == [[pytest.approx(10 / 2**20, rel=1e-3), 0.9537, 0.9537]] * 4  # MiB a step
    table = rows(page, "Communication")
    assert table[0][:6] == ["axis", "group", "ranks", "transport", "collectives a step", "payload a step"]
    assert table[0][6:] == ["wire a step", "wire per second", "measured", "used", "exposed a step", "of a step"]
    shown = ["dp", "shard", "2", "gloo", "2", "2MB", "1MB", "6MB/s", "24MB/s", "25%"]
    assert table[1] == [*shown, "30 ms", "7%"]
    assert table[2] == ["dp", "all", "2 on 2 hosts", "gloo", "2", "10B", "10B", "60B/s", "", "", "", ""]
    assert table[3] == ["tp", "tp", "2", "gloo", "2", "500kB", "1MB", "6MB/s", "", "", "0 ms", "0%"]


def test_goodput(tmp_path: Path) -> None:
    report = make_report(make_run(tmp_path))
    page = report.path.read_text()
    assert report.goodput is not None
    table = {row[0]: row[1:3] for row in rows(page, "Goodput")}
    assert table["repeated"][1] == f"{report.goodput.seconds['repeated'] / report.goodput.wall_s:.1%}"
    # ten steps, and half of the ranks then waited 30 x 50 ms for those that were still in theirs
    assert table["lost"][0] == f"{10 * (0.41 + 0.46) / 2 + 30 * 0.05 / 2:.1f}s"
    assert rows(page, "Goodput")[-2][3:] == ["1 to 30", "0", "10", "no end"]
    bars = {bar["name"]: bar for bar in charts(page)["goodput"]["data"]}
    assert bars[""]["x"] == [0.0, pytest.approx(report.goodput.attempts[1].began_at_s - T0, abs=0.01)]
    assert bars["useful"]["y"] == ["attempt 1", "attempt 2"]


def add_profiles(run_dir: Path, *, name: str = "aten::mm", planned: int = 300 << 20) -> None:
    """Profiles of two pipeline stages, whose second begins 5 ms after the first and whose clock is 2 s ahead."""
    for rank in range(2):
        offset_s = 2.0 * rank
        spans = [("bubble", 0.0, 0.04), ("forward", 0.001, 0.01), ("backward", 0.02, 0.015), ("optimizer", 0.04, 0.005)]
        profile = RankProfile(
            rank=rank,
            world_size=2,
            num_steps=2,
            wall_s=0.1,
            steps=(StepTime(step=5, start_s=0.0, wall_s=0.05), StepTime(step=6, start_s=0.05, wall_s=0.05)),
            began_s=T0 + 0.005 * rank,
            phases=(PhaseTime(name="forward", calls=2, total_s=0.02),),
            spans=tuple(PhaseSpan(name=phase, start_s=start, wall_s=wall) for phase, start, wall in spans),
            operators=(OperatorTime(name=name, calls=4, total_s=0.03, self_s=0.02),),
            memory=MemoryProfile(
                peak_bytes=500 << 20,
                at_peak=dict.fromkeys(MEMORY_CATEGORIES, 100 << 20),
                planned={"parameters": planned},
                timeline=((0.0, 1e8, 0.0, 2e8, 0.0, 1e7), (0.01, 1e8, 1e8, 2e8, 3e8, 1e7)),
            ),
            clock=Clock(offset_s=offset_s),
        )
        folder = profile_folder(run_dir, 5)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"rank-{rank}.json").write_bytes(profile.to_bytes())


def test_the_last_profile(tmp_path: Path) -> None:
    make_run(tmp_path)
    add_profiles(tmp_path)
    page = write_report(tmp_path).read_text()
    timeline = charts(page)["timeline"]["data"]
    assert [bar["name"] for bar in timeline] == ["bubble", "forward", "backward", "optimizer"]  # drawn below the passes
    assert (timeline[1]["y"], timeline[1]["x"]) == (["rank 0", "rank 1"], [10.0, 10.0])
    assert timeline[1]["base"] == pytest.approx([1.0, 6.0], abs=1e-3)  # of a clock in seconds since 1970
    assert "<h2>Timeline of step 5</h2>" in page
    areas = {area["name"]: area["y"] for area in charts(page)["profile-memory"]["data"]}
    assert list(areas) == [
        "parameters",
        "gradients",
        "optimizer",
        "activations",
        "other",
        "planned without activations",
    ]
    assert areas["activations"] == [0.0, pytest.approx(3e8 / 2**20, rel=1e-4)]
    assert areas["planned without activations"] == [300.0, 300.0]
    table = rows(page, "Profile")
    assert ["forward", "20.00", "20.0%"] in table
    assert ["aten::mm", "4", "20.00", "30.00", ""] in table
    assert "Steps 5 to 6 of rank 0" in words(page)


def test_the_report_has_findings_of_the_profile_and_of_the_ending(tmp_path: Path) -> None:
    make_run(tmp_path)
    add_profiles(tmp_path)
    assert "SYNC01" not in write_report(tmp_path).read_text()
    path = profile_folder(tmp_path, 5) / "rank-0.json"
    profile = read_profile(path)
    sync = SyncPoint(kind="item", phase="forward", calls=90, total_s=0.01, source="train.py:3")
    path.write_bytes(replace(profile, syncs=(sync,)).to_bytes())
    cause = {
        "kind": "out_of_memory",
        "ranks": [1],
        "sentence": "rank 1 was killed",
        "evidence": [],
        "words": "out of memory",
    }
    attempts = [{"attempt": 0, "cause": cause}]
    (tmp_path / "launch.json").write_text(json.dumps({"attempt": 0, "attempts": attempts}))
    os.utime(tmp_path / "launch.json", (T0 + 1e6,) * 2)
    page = write_report(tmp_path).read_text()
    assert "SYNC01" in page
    assert "EXIT01" in page


def test_findings_say_how_sure_they_are_what_would_be_saved_and_which_ranks(tmp_path: Path) -> None:
    def slow_at_times(rank: int, step: int) -> dict[str, float]:
        extra_s = 0.03 if step % 4 else 0.0
        return {"forward": 0.06 + extra_s} if rank else {"forward": 0.06, "comm_exposed_dp": extra_s}

    def shown(name: str, times: Any, **options: Any) -> str:
        return words(write_report(write_events(tmp_path / name, times, **options)).read_text())

    assert "BAL01 (likely): rank 1 is slower than the others costs" in shown("a", slow_at_times)
    unused = shown("b", lambda rank, step: {"forward": 0.06}, fields={"perf/mfu": 0.1})
    assert "UTIL01 (possible): the device computes less" in unused
    assert "would save" not in unused
    waiting = shown("c", lambda rank, step: {"forward": 0.06, "data_wait": 0.04}, settings={"loader.num_workers": 0})
    assert "DATA01: training waits for data costs 40% of the time" in waiting
    assert "--set loader.num_workers=-1 would save 40% of a step" in waiting
    memory = {"mem/peak_bytes": 0.95e9, "mem/limit_bytes": 1e9}
    full = shown("d", lambda rank, step: {"forward": 0.06}, fields_of=lambda rank, step: memory if rank else {})
    assert "MEM01: memory is nearly full, rank 1 warning" in full


def test_a_run_of_one_rank_has_the_sections_that_say_something(tmp_path: Path) -> None:
    stream = Stream(tmp_path)
    stream.start(0.0, loads_s=1.0)
    stream.steps(1, 20)
    page = write_report(tmp_path).read_text()
    assert "<h2>Goodput</h2>" in page
    for title in ("The step of each rank", "Pipeline stages", "Memory and plan", "Communication", "Differences from"):
        assert f"<h2>{title}" not in page


WRONG: list[dict[str, Any]] = [
    {"links": 3},
    {"links": [3, {"peer": None}, {"peer": "x", "sent_bytes": "NaN", "received_bytes": []}], "wall_s": "x"},
    {"links": [{"peer": EVIL * 9, "sent_bytes": 1, "received_bytes": 1}], "wall_s": 0},
    {"steps": 3, "wall_s": 1.0, "axes": [{"axis": "dp", "group": EVIL * 9, "transport": EVIL, "wire_bytes": 1}]},
    {"steps": 3, "wall_s": 1.0, "axes": [3, [], {"axis": "x"}, {"axis": "tp", "wire_bytes": "NaN", "ranks": 1 << 70}]},
    {"steps": 3, "wall_s": "x", "axes": {"axis": "tp"}},
]


@pytest.mark.parametrize("held", [None, 3, {"parameters": "many", "gradients": -5, "optimizer": None}])
@pytest.mark.parametrize(
    "plan", [None, [], {"mesh": 3}, {"mesh": {"pp": "2"}}, {"mesh": {"pp": 3}}, {"mesh": {"pp": 1 << 70}}]
)
def test_events_that_are_wrong(tmp_path: Path, held: Any, plan: Any) -> None:
    make_run(tmp_path, held_bytes=held, plan=plan)
    with events_path(tmp_path, 0).open("ab") as file:
        for wrong in WRONG:
            file.write(
                encode({"kind": "links", "attempt": 2, "t": T0, "m": 0.0, "rank": 0, "run": "r", **wrong}) + b"\n"
            )
        file.write(encode({"kind": "resumed", "attempt": 2, "path": ["x"], "step": "x"}) + b"\n")
    page = write_report(tmp_path).read_text()
    assert "<b onclick" not in page
    assert "<h2>Pipeline stages</h2>" not in page


# --- the parent ----------------------------------------------------------------------------------------------------------


def resumed_from(run_dir: Path, path: Any, **start: Any) -> Path:
    stream = Stream(run_dir)
    stream.start(0.0, loads_s=0.0, config={"optim.lr": 0.2, "new": 1}, environment={"torch": "2"}, **start)
    if path is not None:
        stream.emit("resumed", step=30, path=str(path))
    stream.steps(31, 40)
    return run_dir


def test_a_run_that_resumed_from_another(tmp_path: Path) -> None:
    parent = make_run(tmp_path / "first", ranks=2)
    page = write_report(resumed_from(tmp_path / "second", parent / "checkpoints/step-00000030")).read_text()
    assert f"This run resumed from a checkpoint of {parent}. The environment did not change." in words(page)
    assert rows(page, "Differences from the parent run") == [
        ["setting", "parent", "this run"],
        ["new", "none", "1"],
        ["optim.lr", "0.1", "0.2"],
    ]
    # written relative to the folder in which it was started
    page = write_report(resumed_from(tmp_path / "third", "runs/first/checkpoints/step-00000030")).read_text()
    assert "resumed from a checkpoint of" in words(page)


def test_a_run_with_the_settings_of_another(tmp_path: Path) -> None:
    parent = make_run(tmp_path / "first", ranks=2)
    origins = {"optim.lr": "faster.toml:4", "data.seq_len": f"{parent}/config.toml:12"}
    page = write_report(resumed_from(tmp_path / "first-2", None, origins=origins)).read_text()
    assert f"This run took its settings from {parent}." in words(page)


def test_a_run_without_a_parent(tmp_path: Path) -> None:
    own = tmp_path / "own"
    origins = {"optim.lr": f"{own}/config.toml:4", "x": f"{tmp_path}/gone/config.toml:4", "y": 3}
    for path in (own / "checkpoints/step-00000030", tmp_path / "gone/checkpoints/step-00000030", "\0/checkpoints/x"):
        resumed_from(own, path, origins=origins)
    assert "Differences from the parent run" not in write_report(own).read_text()


def test_another_user_s_run_is_no_parent(tmp_path: Path) -> None:
    parent = make_run(tmp_path / "first", ranks=2)
    events_path(parent, 0).chmod(0o666)
    run_dir = resumed_from(tmp_path / "second", parent / "checkpoints/step-00000030")
    assert "Differences from the parent run" not in write_report(run_dir).read_text()


def test_another_user_s_run_has_no_parent(tmp_path: Path) -> None:
    """Its report would show settings of a run of this user that it names."""
    parent = make_run(tmp_path / "first", ranks=2)
    run_dir = resumed_from(tmp_path / "second", parent / "checkpoints/step-00000030")
    events_path(run_dir, 0).chmod(0o666)
    assert "Differences from the parent run" not in write_report(run_dir).read_text()


# --- in a browser --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(
    CHROMIUM is None and bool(missing("chromium")),
    reason="no chromium on this machine: the report is NOT tested in a browser",
)
def test_sections_in_a_browser(tmp_path: Path) -> None:
    """Every chart draws, and a name of a peer stays text."""
    run_dir = make_run(tmp_path / "run", evil=EVIL)
    add_profiles(run_dir, name=EVIL)
    path = write_report(run_dir)
    assert path.stat().st_size < 1 << 20
    page, complaints = in_browser(path, tmp_path / "profile")
    assert complaints == []
    drawn = charts(path.read_text())
    assert {"steps", "loading", "stages", "memory", "links", "goodput", "timeline", "profile-memory"} <= drawn.keys()
    assert f'data-drawn="{len(drawn)}"' in page
    for name in drawn:
        assert re.search(rf'<div id="{name}"[^>]*js-plotly-plot', page), name
    assert EVIL not in page


@pytest.mark.skipif(
    CHROMIUM is None and bool(missing("chromium")),
    reason="no chromium on this machine: the report is NOT tested in a browser",
)
def test_a_page_fits_a_phone_and_is_dark_where_the_reader_wants_it(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    add_profiles(run_dir)
    path = write_report(run_dir)
    assert page_width(path, tmp_path, width=PHONE_PX) == PHONE_PX
    corners: list[object] = []
    for dark in (False, True):
        picture(path, tmp_path / "page.png", tmp_path, width=1000, height=600, dark=dark)
        corners.append(Image.open(tmp_path / "page.png").convert("RGB").getpixel((5, 5)))
    assert corners == [(255, 255, 255), (13, 17, 23)]


@pytest.mark.skipif(
    CHROMIUM is None and bool(missing("chromium")),
    reason="no chromium on this machine: the report is NOT tested in a browser",
)
@pytest.mark.parametrize("width", [1280, PHONE_PX])
def test_legends_are_clear_of_titles_and_tool_bars(tmp_path: Path, width: int) -> None:
    run_dir = make_run(tmp_path / "run", ranks=8)
    add_profiles(run_dir)
    for rank in range(8):  # legends of several lines
        with events_path(run_dir, rank).open("ab") as file:
            for number in range(9):
                sample = {"host": f"node-{rank}.cluster.example", "sys/process_cpus": 1.0 + rank, "sys/cpu_frac": 0.9}
                rates = {"sys/disk_read_bytes_per_s": 5e8, "sys/disk_written_bytes_per_s": 1e8}
                event = {"kind": "system", "attempt": 2, "t": T0 + 10.0 * number, "m": 0.0, "rank": rank, "run": "r"}
                file.write(encode({**event, "step": 60, **sample, **rates}) + b"\n")
    path = write_report(run_dir)
    boxes = boxes_of_charts(path, tmp_path, width=width)
    assert boxes.keys() == charts(path.read_text()).keys()
    for name, box in boxes.items():
        assert not overlap(box["legend"], box["bar"]), name
        assert not overlap(box["legend"], box["title"]), name
        assert width == PHONE_PX or not overlap(box["title"], box["bar"]), name
    shown = [box for box in boxes.values() if box["legend"]]
    assert sum(box["title"] is not None for box in shown) >= 3
    # a narrow screen has no tool bars
    assert any(box["bar"] for box in shown) == (width > PHONE_PX)
