"""Devices that could do more (UTIL01) and memory that is left (MEM04), on events with exactly known figures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from event_streams import write_events

from unisono.diagnose import Finding, diagnose, read_run

GIB = 2**30
COMPUTE = {"forward": 0.03, "backward": 0.06, "optimizer": 0.01}


def found(
    folder: Path,
    *,
    start: Mapping[str, Any] | None = None,
    times: Mapping[str, float] = COMPUTE,
    plan: Mapping[str, Any] | None = None,
    ranks: int = 1,
    **fields: float,
) -> dict[str, Finding]:
    """Findings of a run with these fields in each reading."""
    named = {name.replace("_", "/", 1): value for name, value in fields.items()}
    whole = {"sync": {"kind": "dist_sync"}, **(plan or {})}
    run = write_events(folder, lambda rank, step: times, ranks=ranks, fields=named, plan=whole, start=start)
    return {finding.id: finding for finding in diagnose(read_run(run))}


@pytest.mark.parametrize(
    ("fields", "severity"),
    [
        ({"perf_matmul_ceiling_frac": 0.50}, None),  # of 70 %
        ({"perf_matmul_ceiling_frac": 0.48}, "warning"),
        ({"perf_matmul_ceiling_frac": 0.29}, "warning"),
        ({"perf_matmul_ceiling_frac": 0.27}, "critical"),
        ({"perf_mfu": 0.36}, None),  # of 50 %
        ({"perf_mfu": 0.34}, "warning"),
        ({"perf_mfu": 0.19}, "critical"),
        ({"perf_mfu": 0.19, "perf_matmul_ceiling_frac": 0.5}, None),  # the ceiling is known
        ({}, None),
        ({"perf_mfu": float("nan")}, None),
        ({"perf_mfu": -1.0}, None),
    ],
)
def test_a_device_that_could_do_more(tmp_path: Path, fields: dict[str, float], severity: str | None) -> None:
    findings = found(tmp_path, **fields)
    assert [(one.id, one.severity, one.cost_frac) for one in findings.values()] == (
        [("UTIL01", severity, 0.0)] if severity else []
    )


@pytest.mark.parametrize(("parameters", "is_judged"), [(9_999_999, False), (10_000_000, True), ("many", True)])
def test_a_small_model_cannot_reach_such_a_rate(tmp_path: Path, parameters: Any, is_judged: bool) -> None:
    findings = found(tmp_path, start={"parameters": parameters}, perf_matmul_ceiling_frac=0.1)
    assert bool(findings) == is_judged


def test_what_a_step_would_take(tmp_path: Path) -> None:
    finding = found(tmp_path, perf_matmul_ceiling_frac=0.35)["UTIL01"]
    assert finding.evidence == (
        "the model makes 35.0% of the rate of a large product, as it was measured; 70% can be expected",
        "at that a step would take 50 ms of 100 ms",
    )


@pytest.mark.parametrize(("wait_s", "ids"), [(0.03, ["DATA01"]), (0.02, ["UTIL01", "DATA01"])])
def test_a_finding_that_explains_more_than_half_of_it(tmp_path: Path, wait_s: float, ids: list[str]) -> None:
    times = {"data_wait": wait_s, "forward": 0.1 - wait_s}
    findings = found(tmp_path, times=times, perf_matmul_ceiling_frac=0.35)  # half of the step
    assert list(findings) == ids


BATCH = {"batch": {"micro_batch": 4, "accumulation": 8}}
LOW = {"perf_matmul_ceiling_frac": 0.2, "mem_limit_bytes": 100.0 * GIB}
HELD = {"held_bytes": {"parameters": 10 * GIB, "gradients": 10 * GIB, "optimizer": 5 * GIB}, "device": "cuda:0"}


@pytest.mark.parametrize(
    ("peak", "start", "plan", "larger", "share"),
    [
        (35, HELD, BATCH, 16, 0.65),  # 25 + 4 · 10; 25 + 8 · 10 is more than 85 %
        (32, HELD, BATCH, 32, 0.81),  # 25 + 8 · 7
        (56, HELD, BATCH, 0, 0.0),
        (42, {"device": "cuda:0"}, BATCH, 8, 0.84),  # all of it grows
        (35, HELD, {"batch": {"micro_batch": 4, "accumulation": 3}}, 12, 0.55),  # a divisor of the passes
        (35, HELD, {"batch": {"micro_batch": 4, "accumulation": 1}}, 0, 0.0),
        (35, HELD, BATCH | {"mesh": {"pp": 2}}, 0, 0.0),
        (35, HELD, {"batch": {"micro_batch": "4", "accumulation": None}}, 0, 0.0),
    ],
)
def test_memory_for_larger_micro_batches(
    tmp_path: Path, peak: int, start: dict[str, Any], plan: dict[str, Any], larger: int, share: float
) -> None:
    finding = found(tmp_path, start=start, plan=plan, mem_peak_bytes=float(peak * GIB), **LOW)["MEM04"]
    assert finding.evidence[0] == f"{peak}% of the memory is in use"
    assert finding.patch == ({"plan.micro_batch": larger} if larger else {})
    if larger:
        assert finding.evidence[1] == f"with {larger} samples in place of 4 it would be {share:.0%}"
        assert f"plan.micro_batch={larger}" in finding.advice
    else:
        assert "plan.global_batch" in finding.advice


def test_recompute_is_named_where_it_is_used(tmp_path: Path) -> None:
    plan = BATCH | {"recompute": {"mode": "full"}}
    assert "plan.recompute=none" in found(tmp_path, plan=plan, mem_peak_bytes=30.0 * GIB, **LOW)["MEM04"].advice


def test_memory_that_is_used_is_not_left(tmp_path: Path) -> None:
    assert list(found(tmp_path, start=HELD, plan=BATCH, mem_peak_bytes=60.0 * GIB, **LOW)) == ["UTIL01"]


def test_memory_that_is_left_where_the_device_is_used_is_no_finding(tmp_path: Path) -> None:
    fields = LOW | {"perf_matmul_ceiling_frac": 0.6}
    assert found(tmp_path, start=HELD, plan=BATCH, mem_peak_bytes=30.0 * GIB, **fields) == {}


def test_ranks_of_a_host_share_its_memory(tmp_path: Path) -> None:
    start = {**HELD, "device": "cpu"}
    fields = {"plan": BATCH, "ranks": 2, **LOW}
    assert "MEM04" not in found(tmp_path / "a", start=start, mem_peak_bytes=35.0 * GIB, **fields)
    finding = found(tmp_path / "b", start=start, mem_peak_bytes=29.0 * GIB, **fields)["MEM04"]
    # twice 25 + 4 · 4 GiB
    assert finding.patch == {"plan.micro_batch": 16}
    assert finding.evidence[1].endswith("it would be 82%")


def test_ranks_of_other_hosts_have_memory_of_their_own(tmp_path: Path) -> None:
    plan = {"sync": {"kind": "dist_sync"}, **BATCH}
    memory = {name.replace("_", "/", 1): value for name, value in {**LOW, "mem_peak_bytes": 35.0 * GIB}.items()}
    run = write_events(
        tmp_path,
        lambda rank, step: COMPUTE,
        fields=memory,
        plan=plan,
        start_of=lambda rank: {**HELD, "device": "cpu", "host": f"n{rank}"},
    )
    finding = next(one for one in diagnose(read_run(run)) if one.id == "MEM04")
    assert finding.evidence[0] == "35% of the memory is in use"
