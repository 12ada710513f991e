"""Why a plan is the fastest: neighbours, what would change the choice, and the page that says so."""

from __future__ import annotations

import base64
import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from unisono.plan.pipeline_schedule import schedule_order
from unisono.planner.fastest import Candidate
from unisono.planner.fastest_page import write_fastest_page
from unisono.planner.learned import Learned
from unisono.planner.pipeline_timeline import pipeline_timeline
from unisono.planner.timed_plan import TimedPlan
from unisono.planner.why_fastest import flips, neighbours

GIB = 2**30


def candidate(settings: dict[str, Any], work_s: float = 0, sums_s: float = 0, gib: float = 1, **more: Any) -> Candidate:
    timed = TimedPlan(work_s=work_s, communication_s={"tp": sums_s}, bubble_s=0.0, straggler_s=0.0) if work_s else None
    return Candidate(settings=settings, timed=timed, peak_bytes=round(gib * GIB), **more)


BEST = candidate({"tp": 2}, work_s=1.0, sums_s=0.5)
CONFIGURED = candidate({}, work_s=2.0)
SHARDED = candidate({"dp_shard": 2}, work_s=0.8, sums_s=1.2)
LARGER = candidate({"tp": 2, "micro_batch": 8}, work_s=1.0, sums_s=0.65)
TOO_LARGE = candidate({"tp": 2, "micro_batch": 16}, gib=9, refused="1 GiB too much")
ALL = [CONFIGURED, BEST, SHARDED, LARGER, TOO_LARGE]


def test_neighbours_differ_in_one_setting() -> None:
    found = neighbours(ALL, BEST)
    assert [(each.change, each.reason) for each in found] == [
        ("micro_batch=8", ""),
        ("tp=as configured", ""),
        ("micro_batch=16", "1 GiB too much"),
    ]
    assert found[0].slower_frac == pytest.approx(0.1)
    assert found[1].slower_frac == pytest.approx(1 / 3)
    assert found[2].slower_frac is None


def test_what_would_make_another_plan_the_fastest() -> None:
    faster, slower, memory = flips(ALL, BEST)
    # 1 + 0.5 x = 0.8 + 1.2 x at x = 2/7; 1 + 0.5 x = 2 at x = 2
    assert (faster.change, faster.plan) == ("collectives 3.5 times as fast", "dp_shard=2")
    assert (slower.change, slower.plan) == ("collectives 2 times as slow", "as configured")
    assert memory.change.startswith("more memory: 9 GiB")
    assert memory.plan == "tp=2 micro_batch=16"


def test_the_nearest_change_leads_to_the_plan_that_is_then_the_fastest() -> None:
    """At the factor that is named, no other plan is faster than the one that is named."""
    timed = [each for each in ALL if each.timed is not None]
    for factor, plan in ((1 / 3.5, "dp_shard=2"), (2.0, "as configured")):
        for side in (0.999, 1.001):
            steps = {
                each.settings.get("dp_shard", 0) or ("tp" if each is BEST else id(each)): each.timed.work_s
                + side * factor * sum(each.timed.communication_s.values())
                for each in timed
                if each.timed is not None
            }
            fastest = min(steps, key=lambda name: steps[name])
            beyond = (side < 1) == (factor < 1)
            assert (fastest != "tp") == beyond, plan


def test_what_runs_taught_counts_in_both() -> None:
    slower = replace(SHARDED, learned=Learned(factor=1.25, runs=4))
    (neighbour,) = neighbours([BEST, replace(LARGER, learned=slower.learned)], BEST)
    assert neighbour.slower_frac == pytest.approx(1.25 * 1.1 - 1)
    # 1.25 (0.8 + 1.2 x) is above 1 + 0.5 x for all x; 1.1 (0.8 + 1.2 x) = 1 + 0.5 x at x = 0.12 / 0.82
    assert flips([BEST, slower], BEST) == []
    (faster,) = flips([BEST, replace(SHARDED, learned=Learned(factor=1.1, runs=4))], BEST)
    assert faster.change == "collectives 6.83 times as fast"


def test_nothing_flips_where_nothing_else_was_timed() -> None:
    assert flips([BEST], BEST) == []
    assert neighbours([BEST], BEST) == []


def charts_of(page: str) -> dict[str, Any]:
    packed = re.search(r'id="charts"[^>]*>([^<]+)<', page)
    assert packed is not None
    drawn = json.loads(gzip.decompress(base64.b64decode(packed[1])))
    return {chart["id"]: chart for chart in drawn}


def test_the_page_shows_each_plan_and_its_reason(tmp_path: Path) -> None:
    order = schedule_order("1f1b", 2, 1, 4)
    timeline = pipeline_timeline(order, {(kind, stage): 0.1 for kind in ("F", "B") for stage in (0, 1)})
    assert SHARDED.timed is not None
    pipelined = Candidate(
        settings={"pp": 2}, timed=replace(SHARDED.timed, timeline=timeline, bubble_s=0.2), peak_bytes=GIB
    )
    path = tmp_path / "page.html"
    write_fastest_page(path, [*ALL, pipelined], BEST, num_ranks=2, memory_bytes=8 * GIB)
    page = path.read_text()
    for text in (
        "Fastest: tp=2.",
        "1 GiB too much",
        "collectives 3.5 times as fast",
        "pp=2",
        "exact: tensors of",
    ):
        assert text in page
    charts = charts_of(page)
    assert list(charts) == ["steps", "memory", "passes"]
    forward, backward = charts["passes"]["data"]
    assert (forward["name"], backward["name"]) == ("forward", "backward")
    assert len(forward["x"]) == len(forward["base"]) == 8
    # the second place in the pipeline waits for the first hidden state
    assert (
        min(base for base, rank in zip(forward["base"], forward["y"], strict=True) if rank == "pipeline rank 1") == 0.1
    )
    shown = {bar["name"]: bar["x"] for bar in charts["steps"]["data"]}
    assert shown["work"][0] == 1.0
    assert "pipeline" in shown
    assert BEST.timed is not None
    assert BEST.timed.parts_s == {"work": 1.0, "tp": 0.5}
